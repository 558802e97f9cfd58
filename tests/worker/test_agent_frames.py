"""The messages of a runner, against a model: an attempt ends once, with its own result, and false messages are
refused."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import PATIENCE
from tocsin.wire import ClaimedRun, Finished, LogLine
from tocsin.worker.executors import Answer, Attempt
from tocsin.worker.executors.python import PythonExecutor
from tocsin.worker.executors.runner_process import RunnerProcess
from tocsin.worker.frames import Done, Hello, Note, Output, Replies
from tocsin.worker.proctree import Family
from tocsin.worker.targets import PythonTarget, Spec

RUNS = 4
HELLO = Replies(hello=Hello(["f"]))


class Scripted(RunnerProcess):
    """A runner whose messages come from the test. Its process only waits to be killed."""

    def _start_process(self, command: list[str], fd: int) -> subprocess.Popen[bytes]:
        self.voice = socket.socket(fileno=os.dup(fd))
        return subprocess.Popen(["sleep", "1000"], start_new_session=True)


class Listener:
    """The sink: it counts, and raises for some attempts."""

    def __init__(self, raises_for: set[int]) -> None:
        self.raises_for = raises_for
        self.ends: dict[int, list[Finished]] = {}
        self.back: list[int] = []
        self.answers: list[Answer] = []

    @property
    def sink(self) -> Listener:
        return self

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        for attempt, end in ends:
            assert (end.run_id, end.fence) == attempt.key
            self.ends.setdefault(number_of(attempt), []).append(end)

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        self.back += map(number_of, attempts)

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        assert all(line[3] == f"line of {number_of(attempt)}" for line in lines)
        self._perhaps_raise(attempt)

    def note(self, attempt: Attempt, note: Note, answer: Answer | None) -> None:
        if answer is None:
            assert note.progress == number_of(attempt) / 10
        else:
            assert msgspec.msgpack.decode(note.checkpoint) == number_of(attempt)
        self._perhaps_raise(attempt)
        if answer is not None:
            self.answers.append(answer)

    def _perhaps_raise(self, attempt: Attempt) -> None:
        if number_of(attempt) in self.raises_for:
            raise RuntimeError("the sink fails")


def number_of(attempt: Attempt) -> int:
    return int(attempt.run.run_id.removeprefix("run-"))


class Step(NamedTuple):
    """One message of the runner. `lie`: how it is wrong, if it is."""

    what: str
    of: int
    lie: str = ""


WORDS = st.sampled_from(["done", "output", "progress", "checkpoint"])
TRUTHS = st.builds(Step, WORDS, st.integers(0, RUNS - 1))
LIES = st.builds(
    Step, WORDS, st.integers(0, RUNS - 1), st.sampled_from(["run", "fence", "cell", "brand", "bytes", "hello"])
)


def said(step: Step, attempt: Attempt, cells: dict[int, int]) -> bytes:
    """Return one frame."""
    cell, run_id, fence = attempt.handle, attempt.run.run_id, attempt.run.fence
    match step.lie:
        case "run":
            run_id = f"run-{(step.of + 1) % RUNS}"
        case "fence":
            fence += 1
        case "cell":
            cell = cells[(step.of + 1) % RUNS]
        case "bytes":
            return b"\x93\xff"
        case "hello":
            return msgspec.msgpack.encode(HELLO)
    match step.what:
        case "output":
            replies = Replies(output=[Output(cell, run_id, fence, 0.0, "stdout", "info", f"line of {step.of}")])
        case "progress":
            replies = Replies(notes=[Note(cell, run_id, fence, step.of / 10)])
        case "checkpoint":
            raw = msgspec.Raw(msgspec.msgpack.encode(step.of))
            replies = Replies(notes=[Note(cell, run_id, fence, None, 1, raw)])
        case _:
            raw = msgspec.Raw(msgspec.msgpack.encode(step.of))
            replies = Replies(done=[Done(cell, run_id, fence, 1, 1, result=raw)])
    if step.lie == "brand":
        replies = Replies(done=[Done(cell, run_id, fence, 1, 1, left_children=2**40)])
    return msgspec.msgpack.encode(replies)


def an_attempt(n: int, executor: Any) -> Attempt:
    run = ClaimedRun(
        run_id=f"run-{n}",
        attempt=1,
        fence=100 + n,
        start_at="2026-01-01T00:00:00Z",
        timeout_ms=60_000,
        job_id="job",
        job_name=None,
        scheduled_for="2026-01-01T00:00:00Z",
        args=None,
        token=f"tcr_1.{n}",
    )
    return Attempt(run, Spec(target=PythonTarget("f")), executor, 1)


async def play(script: list[Step], raises_for: set[int], started: set[int], answered: bool) -> tuple[Listener, bool]:
    """Send all messages of the runner, then let it die. Return what the sink received, and whether the runner was still
    trusted."""
    listener = Listener(raises_for)
    runner = Scripted([], RUNS, Family(), listener, 1 << 8)  # type: ignore[arg-type]
    with runner.voice:
        attempts = [an_attempt(n, PythonExecutor) for n in range(RUNS)]
        runner.start(attempts)
        cells = {n: attempt.handle for n, attempt in enumerate(attempts)}
        for n in started:
            runner._table.cells[cells[n]] = time.monotonic_ns()
        frames = [msgspec.msgpack.encode(HELLO), *(said(step, attempts[step.of], cells) for step in script)]
        runner.voice.sendall(b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))
        async with asyncio.timeout(PATIENCE):
            await runner.hello()
            believed = runner.ready
            while answered and listener.answers:
                listener.answers.pop()("")
            await runner.kill()
    return listener, believed


@settings(max_examples=60)
@given(
    st.lists(TRUTHS, max_size=8),
    st.none() | LIES,
    st.lists(TRUTHS, max_size=4),
    st.sets(st.integers(0, RUNS - 1)),
    st.sets(st.integers(0, RUNS - 1)),
    st.booleans(),
)
def test_an_attempt_ends_once_and_with_its_own_result(
    before: list[Step], lie: Step | None, after: list[Step], raises_for: set[int], started: set[int], answered: bool
) -> None:
    truths, seen = [], set[int]()
    for step in before:  # a correct runner sends nothing about a run that has ended
        if step.of not in seen:
            truths.append(step)
        if step.what == "done":
            seen.add(step.of)
    script = [*truths, *([lie, *after] if lie else [])]
    heard, believed = asyncio.run(play(script, raises_for, started, answered))
    assert believed == (lie is None)
    broken = {step.of for step in truths if step.what != "done"} & raises_for
    for n in range(RUNS):
        ends = heard.ends.get(n, [])
        assert len(ends) + heard.back.count(n) == 1, "each attempt ends exactly once"
        if not ends:
            assert n not in seen and n not in started and n not in broken
            continue
        [end] = ends
        if n in broken:
            assert (end.outcome, end.error and end.error.class_, end.result) == ("failed", "internal", None)
        elif n in seen:
            assert end.outcome == "succeeded" and msgspec.msgpack.decode(end.result or b"") == n
        else:
            assert end.outcome == "lost" and end.result is None
