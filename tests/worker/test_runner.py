"""The runner's inside: whose lines are whose."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tocsin.client.app import App
from tocsin.worker.frames import Call, CallTarget, Done, Orders, Replies, Table
from tocsin.worker.lines import OutputLimit
from tocsin.worker.runner.calls import Calls

app = App("tests")


@app.function("waits")
async def waits() -> None:
    await asyncio.Event().wait()


class Wire:
    """What is said to the agent."""

    backlog = 0

    def __init__(self) -> None:
        self.said: list[Replies] = []

    def send(self, frame: bytes) -> None:
        self.said.append(msgspec.msgpack.decode(frame, type=Replies))


async def test_what_a_thread_says_when_its_run_has_just_ended_is_not_the_next_runs() -> None:
    table, wire = Table(1), Wire()
    calls = Calls(dict(app.functions), 1, table, "http://localhost", asyncio.get_running_loop())
    calls.channel = wire  # type: ignore[assignment]
    about: Any = ("run", 1, 1, "job", None, "2026-01-01T00:00:00Z", None, "", 60_000, 0, 1)
    calls.on_frame(msgspec.msgpack.encode(Orders([CallTarget("waits", [], {})], [Call(0, 0, *about)])))
    [run] = calls._live.values()

    class Meanwhile(OutputLimit):
        """Between the look at whether its run goes on and the line, the loop's thread has its turn."""

        def take(self, lines: list[str]) -> tuple[list[str], int]:
            calls._settle(run, Done(0, 1, 1))
            calls.flush()
            return lines, 0

    run.limit = Meanwhile()
    calls.output.add(run, "stdout", "info", ["late"])
    calls.flush()
    assert [(reply.done, reply.output) for reply in wire.said] == [([Done(0, 1, 1)], [])]
    table.close()
