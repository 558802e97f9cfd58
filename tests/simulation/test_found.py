"""What the simulation has found, each as short as it can be told."""

from __future__ import annotations

import pytest

from tests.simulation import moves
from tests.simulation.machine import Simulation, come_to_rest
from tests.simulation.script import Script, every
from tests.simulation.world import World
from tocsin.model.job import Misfire


@pytest.fixture
def play(world: World) -> Script:
    return Script.begin(world, Simulation.loop)


def test_occurrences_that_are_equal_in_order_leave_a_queue_one_after_the_other(play: Script) -> None:
    """Which of them was released was chance; one that was not the first was parked again, and on it went for ever."""
    play.job(schedule=every(2, misfire=Misfire(policy="all")), overlap="queue_all")
    play.later(81)
    play.move(moves.plan_)
    assert len({run.ready_at for run in play.runs("ready")}) == 1
    first = min(run.id for run in play.runs())
    for _ in range(3):
        play.move(moves.release)
        play.run(play.world.play(moves.every_slot(play.world)))
        [held] = [run for run in play.runs() if run.worker]
        assert held.id == first
        play.run(play.world.play(moves.succeed(play.world, [held])))
        first = min(run.id for run in play.runs())
    play.run(come_to_rest(play.world))


def test_what_a_worker_holds_ahead_is_not_counted_again_by_a_pause(play: Script) -> None:
    """One that was handed back was retracted, and the cursor set back to it: behind two that were already claimed."""
    play.job(schedule=every(2), overlap="allow")
    play.later(0.5)
    play.move(moves.plan_)
    play.move(moves.register)
    play.move(moves.claim_ahead, 0, 0, 0, 1)
    assert [run.state for run in play.runs()] == ["running"] * 3 + ["staged"] * 2
    play.move(moves.give_back, 0, 2)
    play.move(moves.pause)
    play.later(7)
    play.move(moves.report_, 2, 0, 1, 0, 0)
    play.move(moves.resume)


def test_an_occurrence_that_was_cancelled_ahead_of_its_instant_does_not_come_back(play: Script) -> None:
    """A pause set the cursor back to before it, and after the resume it was staged anew."""
    job = play.job(schedule=every(2))
    play.move(moves.plan_)
    cancelled = play.runs()[2]
    play.move(moves.cancel_run, 2)
    assert cancelled.id not in play.world.book.runs
    play.move(moves.pause)
    play.move(moves.resume)
    play.move(moves.plan_)
    play.later(11)
    play.move(moves.plan_)
    assert cancelled.scheduled_for not in {run.scheduled_for for run in play.runs()}
    assert play.world.book.jobs[job.id].state == "active"


def test_a_job_that_completes_while_it_is_paused_is_not_on_hold_for_ever(play: Script) -> None:
    """What ran of it ended, but its hold stayed: a retry waited for a resume that a completed job refuses."""
    job = play.job()
    play.move(moves.register)
    play.move(moves.claim_)
    play.move(moves.pause)
    play.move(moves.report_)
    assert play.world.book.jobs[job.id].state == "completed"
    play.move(moves.retry)
    play.move(moves.claim_)
    assert [run.state for run in play.runs()] == ["running"]
