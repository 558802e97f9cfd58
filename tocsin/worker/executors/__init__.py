"""The seam between the agent and what executes: an `Executor` is given attempts and says how they ended.

One class for each kind of target; `table.py` says which there are. `tests/worker/conformance` holds all of them to the
contract that `Executor` states.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

from tocsin.wire import ClaimedRun, Finished, LogLine, RunError, RunKey
from tocsin.worker.frames import Note, Outcome
from tocsin.worker.masks import AttemptMask, mask_of
from tocsin.worker.proctree import Family, Tree
from tocsin.worker.targets import NO_RESOURCES, Spec

STOP_GRACE = 5.0  # between asking a run to stop and killing it
KILL_PATIENCE = 5.0  # how long to wait for the end of what is killed because the worker goes or was lost

MOST_IN_VARIABLE = 96 * 1024  # bytes; Linux takes 128 KiB, with the name
_READ_CHARS = 64 * 1024  # characters read beyond the shown part of a text, to find a secret that the cut goes through
_UNTOUCHABLE_FOR = 5.0  # how long to wait for processes that we may not even signal
_LOOK_AGAIN, _LOOK_RARELY = 0.01, 0.25


class Attempt:
    """A claimed run on its way through this worker."""

    __slots__ = (
        *("_mask", "executor", "handle", "key", "log", "over", "received_ns", "resources", "run", "start_ns"),
        *("started_ns", "stopping", "target"),
    )

    def __init__(self, run: ClaimedRun, spec: Spec | None, executor: Executor, received_ns: int) -> None:
        self.run = run
        self.key: RunKey = (run.run_id, run.fence)
        self.target: Any = spec and spec.target  # of the struct that belongs to the executor's kind
        self.resources = NO_RESOURCES if spec is None else spec.resources
        self.executor = executor
        self.received_ns = received_ns
        self.start_ns = 0  # not to begin before this monotonic nanosecond
        self.started_ns = 0
        self.stopping: Literal["", "cancelled", "timeout"] = ""
        self.over = False  # the server knows its end already
        self.handle: Any = None
        self.log: Any = None
        self._mask: AttemptMask | None = None

    @property
    def mask(self) -> AttemptMask:
        """Return the mask for all confidential texts of the run. It is created when it is first needed: every run has a
        token, but most runs produce no text."""
        if self._mask is None:
            self._mask = mask_of(self.run, self.target)
        return self._mask

    def masked(self, text: str, most: int) -> str:
        """Return a text masked, then cut to `most` characters."""
        return self.mask.text(text[: most + _READ_CHARS])[:most]

    def mask_end(self, end: Finished) -> None:
        """Mask an end. No mask is created for an end without text, or with less text than a token has."""
        run = self.run
        told = end.error is not None or (end.result is not None and len(end.result) > len(run.token))
        if told or run.secrets or run.sensitive:
            self.mask.end(end)

    def discreet(self, exc: BaseException) -> str:
        """Where and how something went wrong with it, for the worker's own log: what is secret is not for that."""
        return self.mask.text("".join(traceback.format_exception(exc)))

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
            tenant=run.tenant,
            outcome=outcome,
            held_ms=(started - self.received_ns) / 1e6 if started else 0.0,
            ran_ms=ran_ns / 1e6,
            exit_code=exit_code,
            error=RunError(class_=error_class, message=message) if error_class else None,
            result=result,
        )


def environment(attempt: Attempt, url: str) -> dict[str, str]:
    """What a program finds in its environment, wherever it runs: what its job sets, its secrets, which run it is."""
    run = attempt.run
    parents = {} if run.parents is None else {"TOCSIN_PARENTS": msgspec.json.encode(run.parents).decode()}
    return {
        **attempt.target.env,
        **run.secrets,
        "TOCSIN_RUN_ID": run.run_id,
        "TOCSIN_JOB_ID": run.job_id,
        "TOCSIN_JOB_NAME": run.job_name or "",
        "TOCSIN_ATTEMPT": str(run.attempt),
        "TOCSIN_FENCE": str(run.fence),
        "TOCSIN_SCHEDULED_FOR": run.scheduled_for,
        "TOCSIN_LOGICAL_AT": run.stands_for,
        "TOCSIN_ARGS": msgspec.json.encode({} if run.args is None else run.args).decode(),
        "TOCSIN_URL": url,
        "TOCSIN_RUN_TOKEN": run.token,
        **parents,
    }


def overlong(env: Mapping[str, str]) -> str:
    """What is wrong with an environment that no program could be started with; nothing, if one could."""
    sizes = {name: len(value.encode()) for name, value in env.items() if len(value) > MOST_IN_VARIABLE // 4}
    for name, size in sizes.items():
        if size > MOST_IN_VARIABLE:
            return f"{name} has {size:,} bytes, and a program here can be given {MOST_IN_VARIABLE // 1024} KiB at most"
    return ""


class Why(NamedTuple):
    """What is told of a run that its worker killed: the error's class, and its message."""

    error_class: str
    message: str


LOST = Why("lost", "killed by its worker")


Answer = Callable[[str], None]  # why a checkpoint was not kept; "" if it was


class Sink(Protocol):
    """Where executors say what happened."""

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        """These attempts are over; nothing of them runs any more."""

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        """These attempts were never started and will not be; or others may go on with what they have begun."""

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        """Lines an attempt has written, and how many were left out before them."""

    def note(self, attempt: Attempt, note: Note, answer: Answer | None) -> None:
        """What an attempt says of itself: its progress, or a checkpoint, whose fate is told to `answer`."""


class Executor(ABC):
    """Executes attempts of one kind of target and tells the sink how each ended. The contract:

    - **Once**: each attempt given to `start` ends exactly once, by `sink.ended` or, if another worker could begin it or
      go on with it, by `sink.handed_back`. What cannot be started ends, too: `failed`, error class `start`.
    - **The end is proof**: by the time it is told, nothing of the attempt runs any more. An executor that cannot prove
      that says so in the error's message. Two exceptions: of a function that ends by itself in the process that it
      shares with others, what it started stays with that process, for it may be a pool that the next calls use; and
      what outlives its worker anyway, and only one attempt of a run can have (a Job of a cluster), runs on when the
      worker goes, for the next attempt to adopt: nothing is done twice that need not be.
    - **Time-outs are the executor's**: after `run.timeout_ms` from the start, as `stop` does it; outcome and error
      class `timeout`. A stop ends as `cancelled`, unless the attempt had already ended by itself.
    - **Error classes** are stable words: `start`, `exit` (with `exit_code`), `signal`, `oom`, `timeout`, `lost`, or of
      the kind's own.
    - **Output** goes to the sink as it comes, as lines that are safe to store (`lines.LineSplitter`), and at most
      `lines.ATTEMPT_BYTES` of it (`lines.OutputLimit`): the rest is counted, and must neither grow in memory nor make
      what runs wait.
    - **Limits**: what `attempt.resources` asks for is enforced as far as this place can; `Finished.usage["enforced"]`
      names each limit that was asked for and how it is held, False if it is not.
    - **The loop is shared** with heartbeats: nothing here may block it.

    `head_start`: so many seconds before its `start_ns` it wants an attempt, to have all ready and begin on the dot."""

    kind: ClassVar[str]
    head_start = 0.0

    def __init__(self) -> None:
        self.sink: Sink = _NoSink()

    def serve(self, sink: Sink) -> None:
        """A session begins: it is told what happens, and runs come."""
        self.sink = sink

    def silence(self) -> None:
        """What ends from now on ends for nobody: its session is gone."""
        self.sink = _NoSink()

    async def open(self) -> None:  # noqa: B027 (most executors need no preparation)
        """Get ready, before each registration; raises `SetupError` if the worker must not go on without it."""

    def offers(self) -> list[str]:
        """The kinds under which runs may come, asked after `open`; none, if that cannot work here."""
        return [self.kind]

    @abstractmethod
    def start(self, attempts: list[Attempt]) -> None:
        """Start them; each one's end reaches the sink."""

    @abstractmethod
    def stop(self, attempt: Attempt) -> None:
        """Ask, wait for `STOP_GRACE`, then kill; the end that reaches the sink is the proof of stop. Nothing happens to
        an attempt that has ended or is not known."""

    @abstractmethod
    async def kill_all(self, why: Why = LOST) -> None:
        """Kill everything now, or let it go, and tell the sink what was lost; returns when that is done, or after a few
        seconds: what cannot be killed must not keep the worker from going or from registering anew."""

    async def close(self) -> None:
        """Leave nothing behind."""
        await self.kill_all()


async def kill_tree(family: Family, tree: Tree) -> bool:
    """Kill the whole tree until nothing of it is left: True is the proof. False if for five seconds all that was left
    were processes that we may not signal."""
    began = time.monotonic()
    while True:
        try:
            found = family.kill_once(tree)
        except OSError:  # no file descriptor is left to look with; when others end, there is
            await asyncio.sleep(_LOOK_RARELY)
            continue
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

    def note(self, attempt: Attempt, note: Note, answer: Answer | None) -> None:
        if answer is not None:
            answer("its worker was lost")
