"""Functions: how they are called, and what their ends, their output and their crashes become."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.wire import ClaimedRun

from .conftest import alive, until
from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_the_worker_registers(shared: Gateway) -> None:
    body = shared.registered[0]
    assert {"process", "python"} <= set(body.targets) and "math.add" in body.functions and "add_sync" in body.functions
    assert body.slots == 8 and body.labels == {"region": "here"}


@pytest.mark.parametrize("name", ["math.add", "add_sync"])
async def test_arguments(shared: Gateway, name: str) -> None:
    target, own = shared.python(name, 1, kwargs={"b": 2}), shared.python(name, 1, kwargs={"b": 2}, args={"b": 10})
    assert (await shared.end_of(target)).result == 3
    assert (await shared.end_of(own)).result == 11  # the run's own args win
    end = await shared.end_of(shared.python(name, 1, 2, 3))
    assert end.outcome == "failed" and end.error is not None and end.error.class_ == "arguments"


async def test_what_a_function_used_is_told_where_it_can_be(shared: Gateway) -> None:
    end = await shared.end_of(shared.python("compute_sync", 0.03))
    assert end.usage is not None and 30 <= end.usage["cpu_ms"] <= end.ran_ms + 1
    assert (await shared.end_of(shared.python("add_sync", 1))).usage is None, "less than a millisecond"


async def test_the_context(shared: Gateway) -> None:
    run = shared.python("show", args={"day": "monday"}, logical_at="2025-02-03T00:00:00.000000Z")
    end = await shared.end_of(run)
    assert end.outcome == "succeeded"
    assert end.result == {
        "run_id": run.run_id,
        "job": [run.job_id, run.job_name],
        "attempt": 1,
        "fence": run.fence,
        "year": int(run.scheduled_for[:4]),
        "stands_for": "2025-02-03T00:00:00+00:00",
        "args": {"day": "monday"},
        "more": {"day": "monday"},
        "token": ["***", run.token[::-1]],
        "url": shared.url,
    }
    assert [line[1:] for line in shared.log_lines[run.run_id]] == [
        ("log", "debug", "quiet"),
        ("log", "warning", "first of two"),
        ("log", "warning", "second of two"),
        ("stdout", "info", "printed in pieces"),
        ("stdout", "info", "and no end"),
    ]


async def test_prints_of_a_thread_and_of_loggers_reach_the_log(shared: Gateway) -> None:
    await shared.end_of(run := shared.python("print_sync"))
    assert shared.text_of(run, "stdout") == ["from a thread"]
    assert shared.text_of(run, "stderr") == ["from a logger"]


async def test_exceptions(shared: Gateway) -> None:
    end = await shared.end_of(shared.python("fail"))
    assert end.outcome == "failed" and end.error is not None and end.error.class_ == "ValueError"
    assert end.error.message.startswith("no such\\x00thing\n") and "in fail" in end.error.message
    end = await shared.end_of(shared.python("fail_sync"))
    assert end.error is not None and end.error.class_ == "GiveUp"
    end = await shared.end_of(shared.python("exit_system"))
    assert end.error is not None and end.error.class_ == "SystemExit"
    end = await shared.end_of(shared.python("cancels_itself"))
    assert (await shared.end_of(shared.python("math.add", 1))).result == 1  # whatever became of its task


async def test_results(shared: Gateway) -> None:
    assert (await shared.end_of(shared.python("give_back", "set"))).result in ([1, 2], [2, 1])
    assert (await shared.end_of(shared.python("give_back", "big"))).result == "x" * 100_000
    end = await shared.end_of(shared.python("give_back", "huge"))
    assert end.outcome == "failed" and end.give_up and end.result is None
    assert end.error is not None and end.error.class_ == "result_too_large" and "8,388,610 bytes" in end.error.message
    assert (await shared.end_of(shared.python("give_back", "float"))).result is None
    for what in ("object", "int"):
        end = await shared.end_of(shared.python("give_back", what))
        assert end.outcome == "failed" and end.error is not None and end.error.class_ == "result"


async def test_each_call_has_a_context_and_a_task_of_its_own(shared: Gateway) -> None:
    runs = [shared.python("leak", str(i)) for i in range(5)]
    assert [(await shared.end_of(run)).result for run in runs] == ["clean"] * 5
    assert (await shared.end_of(shared.python("uses_its_task"))).result == "grouped"


async def test_suspended_calls_do_not_hold_up_others(shared: Gateway) -> None:
    slow = [shared.python("sleep", 30) for _ in range(3)]
    assert (await shared.end_of(shared.python("math.add", 1, 1))).result == 2
    assert (await shared.end_of(shared.python("sleep", 0.05))).result == "slept"
    for run in slow:
        shared.order_stop(run)
    assert {(await shared.end_of(run)).outcome for run in slow} == {"cancelled"}


async def test_time_outs_by_the_runner(shared: Gateway) -> None:
    names = ("sleep", "sleep_stubborn", "spin")
    ends = [await shared.end_of(run) for run in [shared.python(name, 30, timeout=0.1) for name in names]]
    assert [end.outcome for end in ends] == ["timeout"] * 3
    # The clock of an event loop may be a millisecond ahead of the one that an attempt is measured with.
    assert all(end.ran_ms >= 99 for end in ends)


async def test_a_call_that_cannot_be_interrupted_takes_the_runner_along(shared: Gateway) -> None:
    """Its time-out is honest, its neighbours are lost, and the next runner serves."""
    innocent = shared.python("sleep", 60)
    blocks = shared.python("block", 60, timeout=1.0)
    pid = int((await shared.line_of(blocks, "blocking in")).split()[-1])
    assert (await shared.end_of(blocks)).outcome == "timeout"
    assert (await shared.end_of(innocent)).outcome == "lost"
    assert not alive(pid)
    assert (await shared.end_of(shared.python("math.add", 1))).result == 1


async def test_a_blocked_loop_neither_stops_heartbeats_nor_outlives_its_timeout(shared: Gateway) -> None:
    await beats_go_on(shared, shared.python("block_loop", 60))
    assert (await shared.end_of(shared.python("block_loop", 60, timeout=0.3))).outcome == "timeout"


async def beats_go_on(shared: Gateway, run: ClaimedRun) -> None:
    """Heartbeats tell of the run, again and again, until it is stopped."""
    await shared.until(lambda: sum((run.run_id, run.fence) in (r.running or []) for r in shared.reports) > 4)
    shared.order_stop(run)
    assert (await shared.end_of(run)).outcome == "cancelled"


async def test_a_crash_fails_what_was_running_and_returns_what_was_not(shared: Gateway) -> None:
    running = shared.python("sleep", 60)
    crash = shared.python("crash", "segv")
    end = await shared.end_of(crash)
    assert end.outcome == "failed" and end.error is not None and end.error.class_ == "crashed"
    assert "signal 11" in end.error.message
    assert (await shared.end_of(running)).outcome == "failed"
    at_once = shared.python("crash_at_once")
    behind = [shared.python("math.add", 1) for _ in range(4)]
    assert (await shared.end_of(at_once)).error.class_ == "crashed"  # type: ignore[union-attr]
    # The rest came in the same frame and was handed back, or in a later one and was served by the next runner.
    await shared.until(
        lambda: all((r.run_id, r.fence) in shared.returned or r.run_id in shared.finished for r in behind)
    )
    assert all(shared.finished[r.run_id].outcome == "succeeded" for r in behind if r.run_id in shared.finished)


async def test_what_a_killed_runner_had_spawned_is_killed(shared: Gateway) -> None:
    pid = (await shared.end_of(shared.python("spawn"))).result
    assert alive(pid)
    await shared.end_of(shared.python("crash", "exit"))
    await shared.end_of(shared.python("math.add", 1))
    assert not alive(pid)


async def test_many_calls(shared: Gateway) -> None:
    runs = [shared.python("math.add" if i % 2 else "add_sync", i, i) for i in range(200)]
    assert [(await shared.end_of(run)).result for run in runs] == [2 * i for i in range(200)]


@pytest.mark.parametrize("how", ["popen", "fork", "async", "spawn"])
async def test_what_a_stopped_call_has_forked_is_killed_with_it(shared: Gateway, tmp_path: Path, how: str) -> None:
    """Also when it hides; a neighbour in the same process, and what that has forked, live on."""
    files = [tmp_path / name for name in ("mine", "other")]
    mine, other = (shared.python(f"forks.{'async' if how == 'async' else 'sync'}", how, str(file)) for file in files)
    await until(lambda: all(file.exists() and file.read_text() for file in files))
    [pid], [kept] = ([int(p) for p in file.read_text().split()] for file in files)
    assert alive(pid) and alive(kept)
    shared.order_stop(mine)
    assert (await shared.end_of(mine)).outcome == "cancelled"
    assert not alive(pid) and alive(kept) and other.run_id not in shared.finished
    shared.order_stop(other)
    assert (await shared.end_of(other)).outcome == "cancelled"
    assert not alive(kept)


@pytest.mark.parametrize("name", ["power", "regex"])
async def test_a_function_that_holds_the_interpreter_stops_neither_heartbeats_nor_its_time_out(
    shared: Gateway, name: str
) -> None:
    """A loop in C never lets go of the lock that Python code needs."""
    await beats_go_on(shared, shared.python(f"hold.{name}"))
    assert (await shared.end_of(shared.python(f"hold.{name}", timeout=0.3))).outcome == "timeout"
    assert (await shared.end_of(shared.python("math.add", 1))).result == 1
