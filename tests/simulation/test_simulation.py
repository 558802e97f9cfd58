"""The simulation itself: a round of it, and that it would notice if the product lied."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation import moves
from tests.simulation.machine import Simulation
from tests.simulation.pieces import Broken
from tests.simulation.rounds import play_round
from tests.simulation.script import Script, every
from tests.simulation.world import World
from tocsin.flow import claim, plan, reap, report, sweep
from tocsin.flow.shared import transitions
from tocsin.model.job import Schedule
from tocsin.model.limits import admit

SEED = int(os.environ.get("SIMULATION_SEED", "1"))
EXAMPLES = 35


def test_what_every_step_leaves_is_what_the_reference_says(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    before, began = (world.examples, world.steps), time.monotonic()
    with capsys.disabled():
        print(f"\nsimulation: SIMULATION_SEED={SEED}")
        play_round(SEED, EXAMPLES)
        examples, steps, took = world.examples - before[0], world.steps - before[1], time.monotonic() - began
        print(f"simulation: {examples} examples, {steps} steps in {took:.1f} s; {world.races} races")
    assert steps > 10 * EXAMPLES
    assert world.races and world.crashes


def story(play: Script) -> None:
    """A limit, a queue, and a worker that is lost."""
    play.job(schedule=Schedule(manual=True), max_concurrency=1)
    play.move(moves.ask, 0, 0, 1)
    play.job(schedule=every(5), overlap="queue")
    play.move(moves.register)
    play.move(moves.plan_)
    play.move(moves.claim_)
    play.later(6)
    play.move(moves.plan_)
    play.move(moves.claim_)
    play.later(5)
    play.move(moves.register)
    play.move(moves.claim_)
    play.move(moves.reap_)
    play.later(1)
    play.move(moves.claim_)
    play.move(moves.report_, 3)
    play.move(moves.claim_)
    play.move(moves.release)


def story_of_limits(play: Script) -> None:
    """A key that two jobs share, a rate, and an occurrence that replaces the one before it."""
    play.move(moves.register)
    for _ in range(2):
        play.later(1)
        play.job(schedule=Schedule(manual=True), concurrency_key="shared")
        play.move(moves.ask, 0, 0, 1)
        play.move(moves.claim_, 0, 0, 2)
    play.move(moves.report_)
    play.move(moves.claim_, 0, 0, 2)
    play.later(1)
    play.job(schedule=Schedule(manual=True), rate_limit="1/s")
    play.move(moves.ask, 0, 0, 2)
    play.move(moves.claim_, 0, 0, 2)
    play.later(0.5)
    play.move(moves.release)
    play.move(moves.claim_, 0, 0, 2)
    play.later(1)
    play.job(schedule=every(5), overlap="replace")
    play.move(moves.plan_)
    for _ in range(2):
        play.later(5)
        play.move(moves.renew)
        play.move(moves.claim_, 0, 0, 2)
    play.move(moves.replace_)
    assert [run.state for run in play.runs() if run.stop_reason] == ["stopping"]


@pytest.mark.parametrize("told", [story, story_of_limits])
def test_the_story_is_true(world: World, told: Callable[[Script], None]) -> None:
    told(Script.begin(world, Simulation.loop))


LIES: list[tuple[Any, str, str, str]] = [
    (claim, "take_limited", "greatest(r.fence, f.base) + 1", "f.base + 1"),
    (claim, "take", "'ready', 'waiting', 'running', 'stopping'", "'ready', 'waiting'"),
    (plan, "advance", "set next_fire_at = n.next", "set next_fire_at = n.was"),
    (reap, "orphans", "state = 'gone'", "state = 'live'"),
    (report, "finish", "(t.outcome = 'lost')::int", "0"),
    (transitions, "release", "w.blocked_by = 'limit'", "w.blocked_by = 'breaker'"),
    (transitions, "stage", "t.ready_at > now()", "t.ready_at > now() + interval '1 minute'"),
]


LIES_ABOUT_LIMITS: list[tuple[Any, str, str, str]] = [
    (claim, "weigh", "b.key_id = l.key", "b.key_id is null"),
    (claim, "take_limited", "set tat = u.tat", "set tat = null"),
    (transitions, "release_in", "floor(j.rate_burst", "floor(j.rate_burst + 1"),
    (transitions, "stage", "coalesce(n.key_id, j.key_id)", "n.key_id"),
    (sweep, "replacing", "w.overlap = 'replace'", "w.overlap = 'queue'"),
]


@pytest.mark.parametrize(
    ("told", "step", "statement", "truth", "lie"),
    [*((story, *lie) for lie in LIES), *((story_of_limits, *lie) for lie in LIES_ABOUT_LIMITS)],
)
def test_a_lie_is_noticed(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    told: Callable[[Script], None],
    step: Any,
    statement: str,
    truth: str,
    lie: str,
) -> None:
    text = step.SQL[statement]
    assert truth in text
    monkeypatch.setitem(step.SQL, statement, text.replace(truth, lie))
    with pytest.raises(Broken):
        told(Script.begin(world, Simulation.loop))


def test_one_more_than_a_limit_allows_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def lax(wishes: Any, running: Any, *rest: Any) -> Any:
        return admit(wishes, {key: count - 1 for key, count in running.items()}, *rest)

    monkeypatch.setattr(claim, "admit", lax)
    with pytest.raises(Broken):
        story(Script.begin(world, Simulation.loop))
