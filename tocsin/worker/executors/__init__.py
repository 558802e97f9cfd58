"""The seam between the agent and what executes: an `Executor` is given attempts and says how they ended."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct

from tocsin.wire import ClaimedRun, Finished, LogLine, RunError, RunKey
from tocsin.worker import proctree
from tocsin.worker.frames import Outcome

STOP_GRACE = 5.0  # between asking a run to stop and killing it

_KILL_FOR = 5.0
_LOOK_AGAIN = 0.01


class ProcessTarget(Struct, tag_field="kind", tag="process"):
    """As in the job document, but unknown fields are ignored, so that a newer server can speak to us."""

    command: list[str]
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin: str | None = None


class PythonTarget(Struct, tag_field="kind", tag="python"):
    """As in the job document, but unknown fields are ignored."""

    function: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Spec(Struct):
    """The part of a job's document that a worker acts on."""

    target: ProcessTarget | PythonTarget


def read_spec(raw: bytes | msgspec.Raw) -> Spec:
    """Read a job's document, in msgpack or, from a server that answers so, in JSON."""
    data = bytes(raw)
    if data[:1] == b"{":
        return msgspec.json.decode(data, type=Spec)
    return msgspec.msgpack.decode(data, type=Spec)


class Attempt:
    """A claimed run on its way through this worker."""

    __slots__ = (
        *("executor", "handle", "key", "log", "received_ns", "run", "start_ns", "started_ns", "stopping", "target"),
    )

    def __init__(self, run: ClaimedRun, target: Any, executor: Executor, received_ns: int) -> None:
        self.run = run
        self.key: RunKey = (run.run_id, run.fence)
        self.target = target
        self.executor = executor
        self.received_ns = received_ns
        self.start_ns = 0  # not to begin before this monotonic nanosecond
        self.started_ns = 0
        self.stopping: Literal["", "cancelled", "timeout"] = ""
        self.handle: Any = None
        self.log: Any = None

    def finished(
        self,
        outcome: Outcome,
        *,
        error_class: str = "",
        message: str = "",
        exit_code: int | None = None,
        ran_ns: int | None = None,
        result: msgspec.Raw | None = None,
    ) -> Finished:
        """The record of how it ended; it ended now unless `ran_ns` says how long it took."""
        run, started = self.run, self.started_ns
        if ran_ns is None:
            ran_ns = time.monotonic_ns() - started if started else 0
        return Finished(
            run_id=run.run_id,
            attempt=run.attempt,
            fence=run.fence,
            outcome=outcome,
            held_ms=(started - self.received_ns) / 1e6 if started else 0.0,
            ran_ms=ran_ns / 1e6,
            exit_code=exit_code,
            error=RunError(class_=error_class, message=message) if error_class else None,
            result=result,
        )


class Sink(Protocol):
    """Where executors say what happened."""

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        """These attempts are over; nothing of them runs any more."""

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        """These attempts were never started and will not be."""

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        """Lines an attempt has written, and how many were left out before them."""


class Executor(ABC):
    """Executes attempts of one target kind and tells the sink how each ended, once.

    `head_start`: so many seconds before its `start_ns` it wants an attempt, to have all ready and begin on the dot."""

    head_start = 0.0

    def __init__(self) -> None:
        self.sink: Sink = _NoSink()

    def silence(self) -> None:
        """What ends from now on ends for nobody: its session is gone."""
        self.sink = _NoSink()

    async def open(self) -> None:  # noqa: B027 (most executors need no preparation)
        """Get ready; raises `SetupError` if that cannot be."""

    @abstractmethod
    def start(self, attempts: list[Attempt]) -> None:
        """Start them; each one's end reaches the sink."""

    @abstractmethod
    def stop(self, attempt: Attempt) -> None:
        """Ask, wait for `STOP_GRACE`, then kill; the end that reaches the sink is the proof of stop."""

    @abstractmethod
    async def kill_all(self) -> None:
        """Kill everything now and tell the sink what was lost; returns when nothing runs any more."""

    async def close(self) -> None:
        """Leave nothing behind."""
        await self.kill_all()


async def kill_tree(root: int, mark: str) -> bool:
    """Kill the whole tree; True once nothing of it lives, False if something outlived five seconds of killing."""
    until = time.monotonic() + _KILL_FOR
    while proctree.kill_once(root, mark):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(_LOOK_AGAIN)
    return True


class _NoSink:
    """Nobody listens: between two registrations there is nobody to tell."""

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        for _ in ends:
            pass

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        for _ in attempts:
            pass

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        pass
