"""The agent's duties: lease, reports, orders, drain; each against a real worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests import PATIENCE
from tocsin.worker.session import CLAIM_WAIT
from tocsin.worker.timing import instant

from .conftest import HOSTILE, alive, last_tick, naming, started, until, worker
from .gateway import Gateway

FOREVER = ("bash", "-c", "setsid sleep 300 & echo $!; sleep 300")


async def test_a_heartbeat_lists_all_that_runs() -> None:
    async with started(heartbeat=0.1) as (gateway, _):
        runs = [gateway.process("sleep", "300") for _ in range(3)]
        keys = {(run.run_id, run.fence) for run in runs}
        await gateway.until(lambda: [r for r in gateway.reports if set(r.running or []) == keys and r.last_claim])


async def test_a_lost_reply_is_answered_by_the_same_report_again() -> None:
    async with started(lease=600.0, heartbeat=200.0) as (gateway, _):
        gateway.report_faults = ["lost_reply", "503"]
        await gateway.end_of(gateway.process("true"))
        await gateway.until(lambda: len(gateway.reports) == 3)  # the first heartbeat, and the result twice
        assert len(gateway.report_bodies) == 4
        assert gateway.report_bodies[1] == gateway.report_bodies[2] == gateway.report_bodies[3]
        second = gateway.process("true")
        await gateway.end_of(second)
        assert [end.run_id for end in gateway.reports[-1].finished] == [second.run_id]  # settled is settled


async def test_the_tenant_of_a_run_comes_back_with_its_end_and_its_lines() -> None:
    async with started(heartbeat=5.0) as (gateway, _):
        runs = [gateway.process("echo", "hello", tenant=42), gateway.process("echo", "hello")]
        assert [(await gateway.end_of(run)).tenant for run in runs] == [42, 0], "an older server names none"
        assert [gateway.log_tenants[run.run_id] for run in runs] == [{42}, {0}]


async def test_superseded_settles_a_result() -> None:
    async with started(heartbeat=5.0) as (gateway, _):
        run = gateway.process("true")
        gateway.superseded.add(run.run_id)
        await gateway.end_of(run)
        second = gateway.process("true")
        await gateway.end_of(second)
        assert [end.run_id for report in gateway.reports for end in report.finished] == [run.run_id, second.run_id]


async def test_when_the_lease_is_over_all_trees_are_killed_before_the_server_gives_them_away(tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    async with started(lease=2.0, heartbeat=0.2) as (gateway, _):
        run = gateway.process(*HOSTILE, "tick", str(ticks))
        await until(lambda: ticks.exists() and ticks.stat().st_size)
        await gateway.until(lambda: gateway.reports)
        gateway.deaf, began = True, time.time()
        await until(lambda: not naming(ticks))
        assert last_tick(ticks) < began + 2.0
        gateway.deaf = False
        await gateway.until(lambda: len(gateway.registered) == 2)  # as somebody new, without the old result
        assert (await gateway.end_of(gateway.process("true"))).outcome == "succeeded"
        assert run.run_id not in gateway.finished


async def test_a_worker_that_slept_through_its_lease_says_nothing_of_the_past(tmp_path: Path) -> None:
    ticks, go = tmp_path / "ticks", tmp_path / "go"
    async with started(lease=1.5, heartbeat=0.2, module="sample:app") as (gateway, process):
        keeps = gateway.process(*HOSTILE, "tick", str(ticks))
        await until(lambda: ticks.exists() and ticks.stat().st_size)
        waits = f"until [ -e {go} ]; do sleep 0.01; done"
        ends_meanwhile = [gateway.process("sh", "-c", waits), gateway.python("sleep_until", str(go))]
        await gateway.until(lambda: [r for r in gateway.reports if len(r.running or []) == 3])
        process.send_signal(signal.SIGSTOP)
        stopped = time.time()
        go.touch()
        await until(lambda: not naming(ticks))  # by the guard, since the agent cannot
        assert last_tick(ticks) < stopped + 1.5
        process.send_signal(signal.SIGCONT)
        await gateway.until(lambda: len(gateway.registered) == 2)
        assert (await gateway.end_of(gateway.python("math.add", 1))).result == 1
        assert not {run.run_id for run in (keeps, *ends_meanwhile)} & set(gateway.finished)


async def test_lines_of_a_run_that_was_reported_arrive_though_the_session_is_lost() -> None:
    async with started(lease=2.0, heartbeat=0.2) as (gateway, _):
        gateway.log_faults = [(503, {})] * 10_000
        run = gateway.process("sh", "-c", "echo first; echo second")
        await gateway.end_of(run)  # which has waited for its lines for long enough
        assert gateway.text_of(run) == []
        gateway.deaf = True
        await gateway.until(lambda: len(gateway.registered) == 2)
        gateway.log_faults, gateway.deaf = [], False
        await gateway.until(lambda: len(gateway.text_of(run)) == 2)
        assert gateway.text_of(run) == ["first", "second"] and gateway.shipped_by[run.run_id] == {"worker-1"}


async def test_a_worker_declared_lost_starts_anew() -> None:
    async with started(heartbeat=0.1, module="sample:app") as (gateway, _):
        run, call = gateway.process(*FOREVER), gateway.python("sleep", 300)
        pid = int(await gateway.line_of(run, ""))
        gateway.unknown.add("worker-1")
        await gateway.until(lambda: len(gateway.registered) == 2)
        assert not alive(pid)
        assert (await gateway.end_of(gateway.python("math.add", 1))).result == 1
        assert run.run_id not in gateway.finished and call.run_id not in gateway.finished


@pytest.mark.parametrize(("status", "code"), [(403, 1), (426, 4)])
async def test_a_refused_worker_says_why_and_exits(status: int, code: int) -> None:
    async with Gateway() as gateway:
        gateway.refuse = (status, {"code": "nope", "detail": "because of the moon"})
        async with worker(gateway) as process:
            assert process.stderr is not None
            text = (await process.stderr.read()).decode()
            assert await process.wait() == code and "because of the moon" in text


async def test_a_module_that_cannot_be_loaded_is_an_error_at_once() -> None:
    async with Gateway() as gateway, worker(gateway, module="no_such_module:app") as process:
        assert process.stderr is not None
        text = (await process.stderr.read()).decode()
        assert await process.wait() == 1 and "no_such_module" in text
        assert not gateway.registered


async def test_drain_by_signal_hands_back_what_has_not_started_and_waits_for_what_has() -> None:
    async with started(heartbeat=5.0) as (gateway, process):
        held = gateway.process("true", in_seconds=60)
        running = gateway.process("sh", "-c", "echo up; sleep 0.5; echo down")
        await gateway.line_of(running, "up")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert gateway.returned == [(held.run_id, held.fence)] and held.run_id not in gateway.finished
        assert gateway.finished[running.run_id].outcome == "succeeded"
        assert gateway.text_of(running) == ["up", "down"]


async def test_drain_by_the_server_kills_what_does_not_end_in_time() -> None:
    async with started(heartbeat=0.1, module="sample:app", drain_grace=0.3) as (gateway, process):
        run, call = gateway.process(*FOREVER), gateway.python("sleep", 300)
        pid = int(await gateway.line_of(run, ""))
        gateway.drain = True
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        for end in (gateway.finished[run.run_id], gateway.finished[call.run_id]):
            assert end.outcome == "lost" and end.error is not None and end.error.class_ == "drained"
            assert "drained" in end.error.message and "0.3 s" in end.error.message
        assert not alive(pid) and len(gateway.registered) == 1
        assert gateway.reports[-1].leaving, "nobody has to wait for its lease"


async def test_a_second_signal_does_not_wait() -> None:
    async with started(heartbeat=5.0) as (gateway, process):
        run = gateway.process(*FOREVER)
        await gateway.line_of(run, "")
        process.send_signal(signal.SIGINT)
        await gateway.until(lambda: not gateway.claims_open)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert gateway.finished[run.run_id].outcome == "lost"


async def test_a_run_never_starts_before_its_instant_and_can_be_stopped_while_it_waits() -> None:
    async with started(heartbeat=0.1) as (gateway, _):
        later = gateway.process("date", "+%s.%N", in_seconds=1.0)
        never = gateway.process("true", in_seconds=300)
        end = await gateway.end_of(later)
        start_at = instant(later.start_at)
        assert float(gateway.text_of(later)[0]) >= start_at and end.held_ms > 0
        gateway.order_stop(never)
        end = await gateway.end_of(never)
        assert end.outcome == "cancelled" and end.ran_ms == 0


async def test_a_run_that_waits_for_its_instant_gives_way_to_one_that_is_due() -> None:
    async with started(slots=2, heartbeat=0.1) as (gateway, _):
        sooner, later = (gateway.process("sleep", "300", in_seconds=s) for s in (60, 120))
        await gateway.until(lambda: [r for r in gateway.reports if len(r.running or []) == 2])
        await gateway.until(lambda: gateway.claims_open)
        due = gateway.process("true", in_seconds=-1)  # surely due
        assert (await gateway.end_of(due)).outcome == "succeeded"
        await gateway.until(lambda: gateway.returned == [(later.run_id, later.fence)])
        assert not {sooner.run_id, later.run_id} & set(gateway.finished)


async def test_a_run_that_is_about_to_start_does_not_give_way() -> None:
    async with started(slots=1, heartbeat=0.1) as (gateway, _):
        held = gateway.process("sleep", "0.2", in_seconds=0.4)
        await gateway.until(lambda: gateway.queue.empty() and gateway.claims_open)
        await gateway.until(lambda: not gateway.claims_open)
        due = gateway.process("true")
        assert (await gateway.end_of(held)).outcome == "succeeded"
        assert (await gateway.end_of(due)).outcome == "succeeded"
        assert gateway.returned == []


async def test_who_has_most_of_its_slots_waiting_asks_again_before_they_have_all_started() -> None:
    async with started(slots=3, heartbeat=0.1) as (gateway, _):
        gateway.process("true", in_seconds=9)
        await gateway.until(lambda: gateway.claims[-1].held == 1)
        assert gateway.claims[-1].wait == CLAIM_WAIT, "more are free than will be"
        gateway.process("true", in_seconds=8)
        await gateway.until(lambda: gateway.claims[-1].held == 2)
        assert gateway.claims[-1].wait < 5


async def test_functions_wait_for_their_instant_in_the_runner() -> None:
    async with started(slots=50, module="sample:app", heartbeat=0.1) as (gateway, _):
        kinds = ["clock.sync", "clock.async"]
        runs = [gateway.python(kinds[n % 2], in_seconds=1.0) for n in range(20)]
        for run in runs:
            end = await gateway.end_of(run)
            assert end.outcome == "succeeded" and end.result >= instant(run.start_at), "never early"
            assert end.held_ms > 0


async def test_a_function_is_stopped_though_its_runner_has_it_already() -> None:
    async with started(slots=50, module="sample:app", heartbeat=0.05, head_start=60.0) as (gateway, _):
        never = [gateway.python(kind, in_seconds=30) for kind in ("clock.sync", "clock.async")]
        later = gateway.python("clock.async", in_seconds=0.3)
        assert (await gateway.end_of(later)).outcome == "succeeded"
        for run in never:
            gateway.order_stop(run)
        for run in never:
            end = await gateway.end_of(run)
            assert (end.outcome, end.ran_ms, end.held_ms) == ("cancelled", 0, 0)


async def test_nothing_survives_the_sudden_death_of_the_worker() -> None:
    async with started(module="sample:app") as (gateway, process):
        run = gateway.process("bash", "-c", "setsid sleep 300 & echo $!; echo $$; sleep 300")
        await gateway.until(lambda: len(gateway.text_of(run)) == 2)
        pids = [*map(int, gateway.text_of(run))]
        pids += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(set(pids)) >= 3 and os.getpid() not in pids
        process.kill()
        await until(lambda: not any(map(alive, pids)))


async def test_the_guard_is_replaced_when_it_dies() -> None:
    def guard(process: asyncio.subprocess.Process) -> list[int]:
        children = [child for child in psutil.Process(process.pid).children() if alive(child.pid)]
        return [child.pid for child in children if "tocsin.worker.guard" in child.cmdline()]

    async with started(heartbeat=0.1) as (_, process):
        [first] = guard(process)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not alive(first))
        await until(lambda: guard(process))


async def test_slots_bound_what_is_claimed() -> None:
    async with started(slots=2, heartbeat=0.1) as (gateway, _):
        first = [gateway.process("sleep", "300", in_seconds=-1) for _ in range(2)]  # surely due
        third = gateway.process("true")
        await gateway.until(lambda: [r for r in gateway.reports if len(r.running or []) == 2])
        assert third.run_id not in gateway.finished and gateway.queue.qsize() == 1
        gateway.order_stop(first[0])
        assert (await gateway.end_of(third)).outcome == "succeeded"


async def test_orders_reach_a_worker_whose_slots_are_all_taken_at_once() -> None:
    async with started(slots=1, lease=600.0, heartbeat=200.0) as (gateway, process):
        run = gateway.process("sleep", "300", in_seconds=-1)
        await gateway.until(lambda: gateway.claims[-1].listen and gateway.claims_open)
        gateway.order_stop(run)
        await gateway.order_at_once()
        assert (await gateway.end_of(run)).outcome == "cancelled"
        gateway.stops = []
        last = gateway.process("sleep", "1", in_seconds=-1)
        await gateway.until(lambda: gateway.queue.empty() and gateway.claims[-1].listen and gateway.claims_open)
        await gateway.order_at_once(drain=True)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert gateway.finished[last.run_id].outcome == "succeeded"


async def test_after_a_lost_answer_the_worker_hears_from_the_server_before_it_asks_again() -> None:
    """Only then does its next claim prove that the answer was lost."""
    async with started(heartbeat=5.0) as (gateway, _):
        gateway.cut_claim = True
        gateway.process("true")
        await gateway.until(lambda: len(gateway.claims) == 2)
        cut, after = gateway.claims
        assert after.last_claim == cut.last_claim and after.number > cut.number
        assert cut.heard < gateway.cut_at < after.heard


async def test_the_guard_finds_what_hides_when_the_agent_is_stopped_or_killed(tmp_path: Path) -> None:
    for ends in (signal.SIGSTOP, signal.SIGKILL):
        ticks = tmp_path / ends.name
        async with started(lease=2.0, heartbeat=0.2) as (gateway, process):
            gateway.process(*HOSTILE, "tick", str(ticks))
            await until(lambda: ticks.exists() and ticks.stat().st_size)  # noqa: B023
            process.send_signal(ends)
            struck = time.time()
            await until(lambda: not naming(ticks))  # noqa: B023
            assert last_tick(ticks) < struck + 2.0
