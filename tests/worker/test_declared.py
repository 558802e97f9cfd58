"""What a worker does for functions that are declared as jobs: it makes the jobs, reads their arguments, keeps what they
say of themselves, and gives those that want one a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests import PATIENCE
from tocsin.client.credentials import Credentials
from tocsin.errors import SetupError
from tocsin.worker.declared import declare

from .conftest import alive, started, until, worker
from .gateway import Gateway


def ended_well(run: Any) -> Any:
    assert run.outcome == "succeeded", run
    return run.result


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def declared() -> AsyncIterator[Gateway]:
    """One gateway with one worker for all tests of the module."""
    async with started(module="declared_sample:app", grace=3.0, heartbeat=0.2) as (gateway, _):
        yield gateway


# ── the jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_makes_its_jobs_before_it_takes_runs_and_the_next_one_changes_nothing() -> None:
    async with Gateway() as gateway:
        for number in (1, 2):
            async with worker(gateway, module="declared_sample:app", editor="editor-key"):
                await gateway.until(lambda number=number: len(gateway.registered) == number)  # type: ignore[misc]
                assert len(gateway.puts) == number * len(gateway.jobs)
        assert set(gateway.jobs) >= {"sdk.daily", "sdk.typed"}
        assert {job["version"] for job in gateway.jobs.values()} == {1}
        assert gateway.jobs["sdk.daily"]["body"] == {
            "name": "sdk.daily",
            "target": {"kind": "python", "function": "sdk.daily"},
            "schedule": {"cron": "0 9 * * MON-FRI", "timezone": "America/New_York"},
            "retry": {"max_attempts": 6},
            "timeout": "10m",
            "tags": {"tocsin.app": "sdk"},
        }
        assert set(gateway.registered[0].functions) == set(gateway.jobs)
        assert gateway.workflows["sdk-nightly"] == {
            "name": "sdk-nightly",
            "schedule": {"cron": "0 2 * * *"},
            "tags": {"tocsin.app": "sdk"},
            "jobs": {
                "daily": {
                    "target": {"kind": "python", "function": "sdk.daily"},
                    "retry": {"max_attempts": 6},
                    "timeout": "10m",
                },
                "typed": {"target": {"kind": "python", "function": "sdk.typed"}, "depends_on": ["daily"]},
                "ends": {
                    "target": {"kind": "python", "function": "sdk.ends"},
                    "depends_on": [{"job": "typed", "on": "failure"}],
                },
            },
        }


async def test_a_job_that_is_declared_no_more_is_named_and_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    async with Gateway() as gateway:
        gateway.jobs["sdk.gone"] = {"name": "sdk.gone", "version": 1, "body": {"tags": {"tocsin.app": "sdk"}}}
        async with worker(gateway, module="declared_sample:app", editor="editor-key"):
            await gateway.until(lambda: gateway.registered)
        assert "sdk.gone" in gateway.jobs
    assert "sdk.gone" in capfd.readouterr().err


@pytest.mark.parametrize("given", [{}, {"editor": "editor-key"}], ids=["no key", "a key that may not"])
async def test_without_a_key_that_may_make_jobs_it_works_all_the_same(
    given: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    async with Gateway() as gateway:
        gateway.refuse_job = 403, {"code": "forbidden", "detail": "an editor's key is needed"}
        async with worker(gateway, module="declared_sample:app", **given):
            run = gateway.python("sdk.daily")
            assert ended_well(await gateway.end_of(run)) == "us"
    assert "are not made" in capfd.readouterr().err


async def test_a_job_that_the_server_refuses_keeps_the_worker_from_starting() -> None:
    async with Gateway() as gateway:
        gateway.refuse_job = 422, {"code": "invalid", "detail": "schedule.cron: no"}
        async with worker(gateway, module="declared_sample:app", editor="editor-key") as process:
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 1
        assert not gateway.registered


async def test_a_schedule_that_is_over_does_not_keep_the_worker_from_starting() -> None:
    async with Gateway() as gateway:
        gateway.refuse_job = 422, {"code": "never_fires", "detail": "schedule.until: it is over"}
        async with worker(gateway, module="declared_sample:app", editor="editor-key"):
            await gateway.until(lambda: gateway.registered)


async def test_what_is_to_happen_once_is_not_declared() -> None:
    job = {"name": "once", "target": {"kind": "python", "function": "once"}, "schedule": {"text": "tomorrow at 9am"}}
    async with Gateway() as gateway:
        with pytest.raises(SetupError, match="submit_at"):
            await declare([job], Credentials(gateway.url, "editor-key"))
        assert gateway.jobs == {}


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.asyncio(loop_scope="module")
async def test_arguments_are_read_as_the_function_wants_them(declared: Gateway) -> None:
    good = declared.python("sdk.typed", args={"day": "2026-03-06", "pages": 2})
    bad = declared.python("sdk.typed", args={"day": "2026-03-06", "pages": "2"})
    assert ended_well(await declared.end_of(good)) == {"day": "Friday", "pages": 3}
    end = await declared.end_of(bad)
    assert end.outcome == "failed" and end.error is not None and end.give_up
    assert (end.error.class_, end.error.message) == ("arguments", "Expected `int`, got `str` - in `pages`")


@pytest.mark.asyncio(loop_scope="module")
async def test_functions_say_how_their_run_goes_on(declared: Gateway) -> None:
    later = await declared.end_of(declared.python("sdk.ends", "later"))
    assert later.error is not None and (later.error.class_, later.retry_after, later.give_up) == ("Retry", 90, False)
    never = await declared.end_of(declared.python("sdk.ends", "never"))
    assert never.error is not None and never.error.message.startswith("broke")
    assert (never.error.class_, never.retry_after, never.give_up) == ("declared_sample.NoMoney", None, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_log_lines_carry_values(declared: Gateway) -> None:
    run = declared.python("sdk.daily", args={"region": "eu"})
    await declared.end_of(run)
    [line] = declared.text_of(run, "log")
    assert line.startswith("rendering region=eu")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("wait", [True, False])
async def test_checkpoints_and_progress_reach_the_server_before_the_end(declared: Gateway, wait: bool) -> None:
    run = declared.python("sdk.counts", args={"up_to": 5, "wait": wait}, checkpoint=2, timeout=59)
    assert ended_well(await declared.end_of(run)) == {"from": 2, "left": True, "deadline": True}
    notes = declared.notes[run.run_id]
    assert [note.checkpoint for note in notes if note.checkpoint is not None][-1] == 5
    if wait:  # else it may have ended with them, and nobody asks any more how far it is
        assert len(notes) >= 3
        assert max(note.progress or 0 for note in notes) > 0.5


@pytest.mark.asyncio(loop_scope="module")
async def test_a_thread_waits_until_its_checkpoint_is_kept_whatever_the_server_does_meanwhile(
    declared: Gateway,
) -> None:
    declared.note_faults = [(503, {"code": "unavailable"})]
    run = declared.python("sdk.counts_in_a_thread", checkpoint={"n": 1})
    assert ended_well(await declared.end_of(run)) == {"n": 1}
    assert not declared.note_faults
    assert [note.checkpoint for note in declared.notes[run.run_id]] == [{"state": "x"}]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_checkpoint_that_is_not_kept_is_told(declared: Gateway) -> None:
    run = declared.python("sdk.counts_in_a_thread")
    declared.superseded.add(run.run_id)
    end = await declared.end_of(run)
    assert end.error is not None and end.error.class_ == "Superseded"
    declared.note_faults = [(404, {"code": "not_found", "detail": "an older server has no such path"})]
    end = await declared.end_of(declared.python("sdk.counts_in_a_thread"))
    assert end.error is not None and end.error.class_ == "Superseded" and "older server" in end.error.message
    end = await declared.end_of(declared.python("sdk.counts_in_a_thread", 70_000))
    assert end.error is not None and (end.error.class_, "65,536" in end.error.message) == ("ValueError", True)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_end_that_waits_for_its_checkpoint_is_not_lost_with_its_process(declared: Gateway) -> None:
    declared.notes_go_on.clear()
    before = declared.notes_waiting
    run = declared.python("sdk.counts", args={"up_to": 1, "wait": False})
    await declared.until(lambda: declared.notes_waiting > before)
    assert run.run_id not in declared.finished
    crashed = await declared.end_of(declared.python("sdk.crashes"))
    assert crashed.error is not None and crashed.error.class_ == "crashed"
    assert (await declared.end_of(run)).outcome == "succeeded"
    declared.notes_go_on.set()
    assert ended_well(await declared.end_of(declared.python("sdk.daily"))) == "us"


@pytest.mark.asyncio(loop_scope="module")
async def test_who_looks_at_the_event_may_end_by_itself(declared: Gateway) -> None:
    run = declared.python("sdk.heeds")
    await declared.line_of(run, "listening")
    declared.order_stop(run)
    await declared.order_at_once()
    assert (await declared.end_of(run)).outcome == "cancelled"
    assert "heard it" in declared.text_of(run)
    timed_out = declared.python("sdk.heeds_not", timeout=0.3)
    assert (await declared.end_of(timed_out)).outcome == "timeout"


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.asyncio(loop_scope="module")
async def test_isolated_functions_have_processes_of_their_own_that_are_used_again(declared: Gateway) -> None:
    main = ended_well(await declared.end_of(declared.python("sdk.together")))
    first = ended_well(await declared.end_of(declared.python("sdk.alone")))
    assert ended_well(await declared.end_of(declared.python("sdk.alone_async"))) == first != main
    held = [declared.python("sdk.alone", 30) for _ in range(2)]
    pids = {int((await declared.line_of(run, "alone in")).split()[-1]) for run in held}
    assert len(pids) == 2 and main not in pids
    for run in held:
        declared.order_stop(run)
    await declared.order_at_once()
    for run in held:
        assert (await declared.end_of(run)).outcome == "cancelled"
    assert ended_well(await declared.end_of(declared.python("sdk.together"))) == main


@pytest.mark.asyncio(loop_scope="module")
async def test_an_isolated_crash_takes_nobody_along(declared: Gateway) -> None:
    beside = declared.python("sdk.heeds")
    await declared.line_of(beside, "listening")
    crashed = await declared.end_of(declared.python("sdk.alone_async", 7))
    assert crashed.error is not None and crashed.error.class_ == "crashed" and "exit code 7" in crashed.error.message
    slow = declared.python("sdk.alone", 60, timeout=1.0)
    pid = int((await declared.line_of(slow, "alone in")).split()[-1])
    assert (await declared.end_of(slow)).outcome == "timeout"
    await until(lambda: not alive(pid))
    declared.order_stop(beside)
    await declared.order_at_once()
    assert (await declared.end_of(beside)).outcome == "cancelled"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_seat_is_free_only_when_what_was_forked_from_it_is_gone(declared: Gateway) -> None:
    run = declared.python("sdk.alone_with_children")
    child = int((await declared.line_of(run, "child")).split()[-1])
    declared.order_stop(run)
    await declared.order_at_once()
    others = [declared.python("sdk.alone") for _ in range(3)]
    assert (await declared.end_of(run)).outcome == "cancelled"
    assert not alive(child)
    for other in others:
        ended_well(await declared.end_of(other))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_what_an_isolated_call_leaves_behind_ends_with_it(declared: Gateway, how: str) -> None:
    run = declared.python("sdk.alone_leaves_children", how)
    child = int((await declared.line_of(run, "child")).split()[-1])
    end = await declared.end_of(run)
    assert end.outcome == ("succeeded" if how == "returns" else "failed")
    assert not alive(child)
    ended_well(await declared.end_of(declared.python("sdk.alone")))


async def test_a_worker_that_goes_leaves_no_process_behind() -> None:
    async with started(module="declared_sample:app", drain_grace=0.2) as (gateway, process):
        run = gateway.python("sdk.alone", 60)
        pid = int((await gateway.line_of(run, "alone in")).split()[-1])
        process.terminate()
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        end = await gateway.end_of(run)
        assert end.outcome == "lost" and end.error is not None and end.error.class_ == "drained"
        assert not alive(pid)
