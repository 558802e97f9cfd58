"""The seam between the agent and what executes: an `Executor` is given attempts and says how they ended."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from tocsin.wire import ClaimedRun, Finished, LogLine, RunError, RunKey
from tocsin.worker.frames import Outcome
from tocsin.worker.proctree import Family, Tree

STOP_GRACE = 5.0  # between asking a run to stop and killing it
KILL_PATIENCE = 5.0  # how long to wait for the end of what is killed because the worker goes or was lost

_UNTOUCHABLE_FOR = 5.0  # how long to wait for processes that we may not even signal
_LOOK_AGAIN, _LOOK_RARELY = 0.01, 0.25


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


class Why(NamedTuple):
    """What is told of a run that its worker killed: the error's class, and its message."""

    error_class: str
    message: str


LOST = Why("lost", "killed by its worker")


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
    async def kill_all(self, why: Why = LOST) -> None:
        """Kill everything now and tell the sink what was lost; returns when nothing runs any more, or after a few
        seconds: what cannot be killed must not keep the worker from going or from registering anew."""

    async def close(self) -> None:
        """Leave nothing behind."""
        await self.kill_all()


async def kill_tree(family: Family, tree: Tree) -> bool:
    """Kill the whole tree until nothing of it is left: True is the proof. False if for five seconds all that was left
    were processes that we may not signal."""
    began = time.monotonic()
    while True:
        found = family.kill_once(tree)
        if not found.alive and not found.restless:
            return True
        waited = time.monotonic() - began
        if waited > _UNTOUCHABLE_FOR and found.alive <= found.untouchable:
            return False
        await asyncio.sleep(min(_LOOK_AGAIN + waited / 50, _LOOK_RARELY))


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
