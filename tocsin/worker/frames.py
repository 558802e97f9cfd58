"""The messages between agent and runner: msgpack arrays, many runs per frame.

Agent and runner share a table of 64-bit cells, one per current run, that outlives a crash of the runner: it shows the
agent which runs had been started, and when, without a message for each.

Cells are reused. So every message about a run names its cell, its id and its fence, and each side checks all three
against the run that it has in that cell. A mismatch is a `ProtocolViolation`: the runner is replaced.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Literal

import msgspec
from msgspec import Struct

NOT_STARTED, ENDED = 0, -1  # any other cell is the monotonic nanosecond of the start

Outcome = Literal["succeeded", "failed", "timeout", "lost", "cancelled"]
_NIL = msgspec.Raw(b"\xc0")

RunRef = tuple[int, str, int]  # cell, run id, fence


class ProtocolViolation(Exception):
    """The other side sent a message that the protocol forbids; none of its messages can be trusted any more."""


class Call(Struct, array_like=True, gc=False):
    """One run to call; `cell` is its index in the table."""

    cell: int
    target: int
    run_id: str
    attempt: int
    fence: int
    job_id: str
    job_name: str | None
    scheduled_for: str
    args: Any
    token: str
    timeout_ms: int
    start_ns: int  # not to begin before this monotonic nanosecond, on the clock that both processes share
    brand: int  # of what it forks
    saved: Any = None  # the last checkpoint of an earlier attempt
    secrets: dict[str, str] = {}
    parents: Any = None  # the runs that it waited for: `wire.Parent` by name
    logical_at: str | None = None  # the instant that it stands for, if that is not `scheduled_for`
    sensitive: bool = False  # its arguments are confidential


class CallTarget(Struct, array_like=True):
    """What several calls of a frame share."""

    function: str
    args: list[Any]
    kwargs: dict[str, Any]


class Orders(Struct, array_like=True):
    """Agent to runner."""

    targets: list[CallTarget] = []
    calls: list[Call] = []
    stops: list[RunRef] = []
    # the run of a checkpoint, its number, and why it was not kept ("" if it was)
    kept: list[tuple[RunRef, int, str]] = []


class Done(Struct, array_like=True, gc=False):
    """One ended call."""

    cell: int
    run_id: str
    fence: int
    started_ns: int
    ran_ns: int
    outcome: Outcome = "succeeded"
    error_class: str = ""
    message: str = ""
    result: msgspec.Raw = _NIL
    left_children: int = 0  # it has forked, and nothing of that may stay: the brand of what it may have left behind
    cpu_ns: int = 0  # what it used of a processor, where that can be told from what others used
    retry_after: float | None = None  # it asks to be tried again in so many seconds
    give_up: bool = False


class Hello(Struct, array_like=True):
    """The runner's first words: what it can call, or why it cannot start; which of that wants a process of its own, and
    the jobs and workflows that are declared with it."""

    functions: list[str]
    error: str = ""
    isolated: list[str] = []
    jobs: list[dict[str, Any]] = []
    workflows: list[dict[str, Any]] = []


class Output(Struct, array_like=True, gc=False):
    """One line a call has written; `dropped` counts lines left out just before it."""

    cell: int
    run_id: str
    fence: int
    at: float
    stream: str
    level: str
    text: str
    dropped: int = 0


class Note(Struct, array_like=True, gc=False):
    """What a call says of itself: how far it is, or a checkpoint with a number to answer it by."""

    cell: int
    run_id: str
    fence: int
    progress: float | None = None
    number: int = 0
    checkpoint: msgspec.Raw = _NIL


class Replies(Struct, array_like=True):
    """Runner to agent. Output and notes come before the end of the call that wrote them."""

    hello: Hello | None = None
    output: list[Output] = []
    done: list[Done] = []
    notes: list[Note] = []

    def halves(self) -> tuple[Replies, Replies] | None:
        """Split a frame that is too large, the ends last. Return None if it has only one entry."""
        if self.output and (self.notes or self.done):
            return Replies(output=self.output), Replies(notes=self.notes, done=self.done)
        if self.notes and self.done:
            return Replies(notes=self.notes), Replies(done=self.done)
        half = (len(self.output) + len(self.notes) + len(self.done)) // 2  # all entries are of one kind
        if not half:
            return None
        return (
            Replies(output=self.output[:half], done=self.done[:half], notes=self.notes[:half]),
            Replies(output=self.output[half:], done=self.done[half:], notes=self.notes[half:]),
        )


class Table:
    """The shared cells. The agent makes it, the runner inherits its file descriptor."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.fd = os.memfd_create("tocsin-runs") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size * 8)
        self._map = mmap.mmap(self.fd, size * 8)
        self.cells = memoryview(self._map).cast("q")

    def close(self) -> None:
        self.cells.release()
        self._map.close()
        os.close(self.fd)
