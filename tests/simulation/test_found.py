"""What the simulation has found, each as short as it can be told."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.simulation import moves
from tests.simulation.machine import Simulation, come_to_rest
from tests.simulation.script import Script
from tests.simulation.world import World
from tocsin.model.job import Misfire, Schedule
from tocsin.model.scalars import Duration


@pytest.fixture
def play(world: World) -> Iterator[Script]:
    Simulation.loop.run_until_complete(world.begin(0))
    yield Script(world, Simulation.loop)


def every(seconds: float, **more: Any) -> Schedule:
    return Schedule(every=Duration(timedelta(seconds=seconds)), **more)


def test_occurrences_that_are_equal_in_order_leave_a_queue_one_after_the_other(play: Script) -> None:
    """Which of them was released was chance; one that was not the first was parked again, and on it went for ever."""
    play.job(schedule=every(2, misfire=Misfire(policy="all")), overlap="queue_all")
    play.later(81)
    play.move(moves.plan_)
    assert len({run.order_key for run in play.world.book.runs.values() if run.state == "ready"}) == 1
    first = min(run.id for run in play.world.book.runs.values())
    for _ in range(3):
        play.move(moves.release)
        play.run(play.world.play(moves.every_slot(play.world)))
        [held] = [run for run in play.world.book.runs.values() if run.worker]
        assert held.id == first
        play.run(play.world.play(moves.succeed(play.world, [held])))
        first = min(run.id for run in play.world.book.runs.values())
    play.run(come_to_rest(play.world))
