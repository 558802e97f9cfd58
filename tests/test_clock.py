"""The database's time as a node knows it: never ahead of it, whatever readings come, and right again after a step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin import clock as module
from tocsin.clock import DatabaseClock

START = datetime(2026, 3, 1, tzinfo=UTC)


class World:
    """A node's monotonic clock, and the database's, which may be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.elapsed = 1000.0
        self.ahead = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.elapsed)

    def database(self) -> datetime:
        return START + timedelta(seconds=self.elapsed + self.ahead)

    def read(self, clock: DatabaseClock, there: float = 0.001, back: float = 0.001) -> None:
        sent = self.elapsed
        self.elapsed += there
        now = self.database()
        self.elapsed += back
        clock.observe(now, sent, self.elapsed)


Readings = st.lists(st.tuples(*(st.floats(0, 30), st.floats(0, 2), st.floats(0, 2))), min_size=1, max_size=20)


@given(Readings)
def test_what_is_said_to_be_reached_is(readings: list[tuple[float, float, float]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world, clock = World(patch), DatabaseClock()
        for pause, there, back in readings:
            world.read(clock, there, back)
            world.elapsed += pause
            assert clock.reached() <= world.database() + timedelta(microseconds=2)
        assert clock.take_step() == 0.0


@given(Readings, st.sampled_from([-90.0, -5.0, 5.0, 90.0, 3.2e8]))
def test_the_first_reading_after_a_step_counts(readings: list[tuple[float, float, float]], step: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world, clock = World(patch), DatabaseClock()
        for pause, there, back in readings:
            world.read(clock, there, back)
            world.elapsed += pause
        world.ahead += step
        world.read(clock)
        assert clock.reached() <= world.database() + timedelta(microseconds=2)
        assert abs((clock.now() - world.database()).total_seconds()) < 0.002
        assert clock.take_step() == pytest.approx(step, abs=2.1)
        assert clock.take_step() == 0.0, "told once"


def test_skew_is_the_nodes_wall_clock_less_the_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clock = World(monkeypatch), DatabaseClock()
    world.read(clock)
    monkeypatch.setattr(module.time, "time", lambda: world.database().timestamp() + 3600)
    assert clock.skew() == pytest.approx(3600, abs=0.002)


def test_a_step_and_its_undoing_do_not_hide_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world, clock = World(monkeypatch), DatabaseClock()
    world.read(clock)
    for step in (-90, 90):
        world.ahead += step
        world.read(clock)
    assert abs(clock.take_step()) == pytest.approx(90, abs=0.01)
