"""The runner's inside: whose lines are whose."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tocsin.client.app import App
from tocsin.worker.frames import Call, CallTarget, Done, Orders, Replies, Table
from tocsin.worker.lines import LINE_BYTES, OutputLimit
from tocsin.worker.runner.calls import Calls
from tocsin.worker.runner.output import OutputBuffer

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
            calls._settle(run, Done(0, "run", 1, 1, 1))
            calls.flush()
            return lines, 0

    run.limit = Meanwhile()
    calls.output.add(run, "stdout", "info", ["late"])
    calls.flush()
    assert [(reply.done, reply.output) for reply in wire.said] == [([Done(0, "run", 1, 1, 1)], [])]
    calls._queue.clear()  # its pump runs only now
    table.close()


def quiet_run() -> Any:
    return SimpleNamespace(ref=(0, "run", 1), ended=False, told=False, limit=None)


def test_no_line_is_lost_that_a_thread_adds_while_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.worker.runner.output._BACKLOG_LINES", 2**60)
    buffer = OutputBuffer(lambda: None)
    batches, lines = 100, [f"line {n}" for n in range(1000)]

    def write() -> None:
        run = quiet_run()
        for _ in range(batches):
            buffer.add(run, "stdout", "info", lines)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    got = 0
    while any(thread.is_alive() for thread in threads):
        got += len(buffer.take())
    assert got + len(buffer.take()) == len(threads) * batches * len(lines)


@pytest.mark.parametrize("text", ["é" * 40_000, "x" + "€" * 20_000, "x" * 40_000, "\U0001f514" * 5_000, "short", ""])
def test_a_long_line_is_cut_by_its_bytes_and_between_characters(text: str) -> None:
    buffer = OutputBuffer(lambda: None)
    buffer.add(quiet_run(), "stdout", "info", [text])
    told = [line.text for line in buffer.take()]
    assert "".join(told) == text
    assert all(len(line.encode()) <= LINE_BYTES for line in told)
