"""An end that cannot be reported fails only its own run: the worker and the other runs continue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tocsin.wire import Finished, Register, RunError
from tocsin.worker.executors import LOST, Attempt, Executor, Why
from tocsin.worker.link import Link
from tocsin.worker.session import Drain, Session
from tocsin.worker.timing import Lease

from .conftest import started
from .gateway import Gateway

DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


class Odd(Executor):
    """Ends each attempt with the object that its command names."""

    kind = "process"

    def start(self, attempts: list[Attempt]) -> None:
        self.sink.ended((attempt, self._end(attempt)) for attempt in attempts)

    def _end(self, attempt: Attempt) -> Finished:
        end = attempt.finished("succeeded")
        match attempt.target.command[0]:
            case "surrogate in usage":
                end.usage = {"text": "\ud800"}
            case "integer without msgpack":
                end.usage = {"bytes": 2**70}
            case "deep usage":
                end.usage = {"deep": DEEP}
            case "surrogate in error":
                end = attempt.finished("failed", error_class="\udcff", message="\udcfe\x00\x1b" + "x" * 100_000)
        return end

    def stop(self, attempt: Attempt) -> None: ...

    async def kill_all(self, why: Why = LOST) -> None: ...


async def ends_of(*commands: str) -> list[Finished]:
    """Return the ends of runs of these commands, as one session reports them."""
    async with Gateway() as gateway, Link(gateway.url, "the-key") as link:
        runs = [gateway.process(command) for command in commands]
        drain = Drain()
        registered = await link.register(Register(name="odd", slots=100))
        lease = Lease(registered.lease_seconds, 0.0, lambda _: None)
        lease.renew(asyncio.get_running_loop().time())
        session = Session(link, registered, {"process": Odd()}, 100, drain, lease, lambda: None, 0)
        life = asyncio.ensure_future(session.run())
        ends = [await gateway.end_of(run) for run in runs]
        drain.ask()
        await life
        await session.logs.stop()
        return ends


@pytest.mark.parametrize("command", ["surrogate in usage", "integer without msgpack", "deep usage"])
async def test_an_end_that_cannot_be_encoded_fails_its_run_alone(command: str) -> None:
    before, odd, after = await ends_of("fine", command, "fine")
    assert (before.outcome, after.outcome) == ("succeeded", "succeeded")
    assert odd.outcome == "failed" and odd.error is not None
    assert odd.error.class_ == "unreportable" and "(succeeded)" in odd.error.message


async def test_the_texts_of_an_error_are_cleaned_and_cut_on_their_way_out() -> None:
    [end] = await ends_of("surrogate in error")
    assert end.error == RunError(class_=r"\xff", message=r"\xfe\x00\x1b" + "x" * (8192 - 12))


async def test_a_bug_of_the_worker_costs_the_session_but_not_the_process() -> None:
    async with started(broken=True, may_fail=True, heartbeat=0.2) as (gateway, process):
        gateway.process("meet-the-bug")
        await gateway.until(lambda: len(gateway.registered) == 2)
        assert (await gateway.end_of(gateway.process("true"))).outcome == "succeeded"
        assert process.returncode is None
        assert gateway.registered[1].formerly == "", "for the server this worker went down"


async def test_a_worker_that_lost_its_lease_names_its_former_id() -> None:
    async with started(lease=2.0, heartbeat=0.2) as (gateway, _):
        gateway.unknown.add("worker-1")
        await gateway.until(lambda: len(gateway.registered) == 2)
        assert gateway.registered[1].formerly == "worker-1"
