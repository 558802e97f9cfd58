"""What container and kubernetes have in common: an attempt that an engine executes, seen through by a task of ours.

The engine's answers may be late or lost, so nothing is concluded from silence: an attempt has ended when the engine
says that nothing of it is left. While an engine does not answer, its attempts stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal, NamedTuple, TypeVar

from tocsin.model.loglines import from_outside
from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker.executors import KILL_PATIENCE, LOST, STOP_GRACE, Attempt, Executor, Why
from tocsin.worker.frames import Outcome
from tocsin.worker.lines import LineSplitter, OutputLimit

log = get_logger("worker")

LAST_OUTPUT = 2.0  # how long to wait for the end of the output of what is gone
_RETRY_FIRST, _RETRY_MOST = 0.05, 5.0
_Answer = TypeVar("_Answer")


class Exit(NamedTuple):
    """How it ended by itself. Without an error class it succeeded."""

    code: int | None = None
    error_class: str = ""
    message: str = ""


class Superseded(Exception):
    """The engine already has a later attempt of this run, so this one is nobody's any more."""


class RemoteExecutor(Executor):
    """A task for each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[Attempt, Remote] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def remote(self, attempt: Attempt) -> Remote:
        """The attempt, as this engine executes it."""

    def start(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            attempt.started_ns = time.monotonic_ns()
            self._under_way[attempt] = remote = self.remote(attempt)
            task = asyncio.ensure_future(self._see_through(attempt, remote))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self, attempt: Attempt) -> None:
        remote = self._under_way.get(attempt)
        if remote is not None:
            remote.stop("cancelled")

    def silence(self) -> None:
        super().silence()
        # An engine may be out of reach for longer than a session lasts; the next one knows nothing of these.
        for remote in self._under_way.values():
            remote.sink = self.sink

    async def kill_all(self, why: Why = LOST) -> None:
        for remote in self._under_way.values():
            remote.kill(why)
        if self._tasks:
            _, left = await asyncio.wait(set(self._tasks), timeout=KILL_PATIENCE)
            if left:
                log.error("the engine does not say that all runs are gone", kind=self.kind, runs=len(left))

    async def _see_through(self, attempt: Attempt, remote: Remote) -> None:
        end: Finished | None
        try:
            end = await remote.run()
        except Exception as exc:  # the slot must come free, whatever is wrong with us
            log.error("an attempt could not be seen through", run=attempt.run.run_id, how=attempt.discreet(exc))
            message = f"{type(exc).__name__}: {exc}; whether it still runs is not known"
            end = attempt.finished("failed", error_class="worker", message=message)
        del self._under_way[attempt]
        if end is None:
            remote.sink.handed_back([attempt])
        else:
            remote.sink.ended([(attempt, end)])


class Remote(ABC):
    """One attempt in an engine's hands."""

    def __init__(self, executor: RemoteExecutor, attempt: Attempt) -> None:
        self.attempt = attempt
        self.begun = False  # there may be something that hears a request to end
        self.enforced: dict[str, str | bool] = {}
        self.sink = executor.sink
        self._asked, self._killed = asyncio.Event(), asyncio.Event()
        self._lost: Why | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._limit = OutputLimit()
        self._splitters: dict[str, LineSplitter] = {}

    @abstractmethod
    async def execute(self) -> Exit:
        """Start it and follow it until it has ended by itself, its output included. May be cancelled at any point."""

    @abstractmethod
    async def ask(self) -> None:
        """Ask it to end. May be cancelled at any point."""

    @abstractmethod
    async def remove(self) -> None:
        """End it if need be, and leave nothing of it behind. To return is the proof."""

    def let_go(self) -> bool:
        """Whether it runs on without its worker, which goes or was lost, for the run's next attempt to take over; else
        it is ended."""
        return False

    def waits_for(self) -> str:
        """Why it has not begun yet, if the engine has said so."""
        return ""

    def stop(self, why: Literal["cancelled", "timeout"]) -> None:
        """Ask it to end; after the grace it is killed."""
        if not (self.attempt.stopping or self._over or self._killed.is_set()):
            self.attempt.stopping = why
            self._asked.set()

    def kill(self, why: Why) -> None:
        """End it at once, unless it has ended."""
        if not self._over:
            self._lost = self._lost or why
            self._killed.set()

    def times_out_in(self, seconds: float | None) -> None:
        """Stop it then, if it has not ended; never, if it is none."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.stop, "timeout")

    async def run(self) -> Finished | None:
        """From its start to the proof of its end; None if it was let go and runs on."""
        self.times_out_in(self.attempt.run.timeout_ms / 1000)
        work = asyncio.ensure_future(self.execute())
        await self._until_over(work)
        self.times_out_in(None)
        self._over = True  # from here on a wish to end it comes too late
        if self._lost is not None and not self.attempt.stopping and self.let_go():
            await _cancel(work)
            return None
        if not self.begun:
            await _cancel(work)
        await self.remove()
        if not work.done():
            await asyncio.wait({work}, timeout=LAST_OUTPUT)
            await _cancel(work)
        self._close_output()
        end = self._finished(work)
        if self.enforced:
            end.usage = {"enforced": self.enforced}
        return end

    async def _until_over(self, work: asyncio.Task[Exit]) -> None:
        """Until it has ended by itself, or may be removed by force."""
        await _first(work, self._asked.wait, self._killed.wait)
        if work.done() or self._killed.is_set():
            return
        if self.begun:
            asking = asyncio.ensure_future(self.ask())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE):
                    await _first(work, self._killed.wait)
            await _cancel(asking)

    def _finished(self, work: asyncio.Task[Exit]) -> Finished:
        attempt = self.attempt
        if self._lost is not None:
            return attempt.finished("lost", error_class=self._lost.error_class, message=self._lost.message)
        if not work.cancelled() and isinstance(work.exception(), Superseded):
            return attempt.finished("lost", error_class="lost", message="a later attempt of this run is under way here")
        if attempt.stopping == "timeout":
            waits = self.waits_for()
            message = f"still {'waiting' if waits else 'running'} after {attempt.run.timeout_ms} ms"
            return attempt.finished("timeout", error_class="timeout", message=message + (waits and f": {waits}"))
        if attempt.stopping:
            known = not work.cancelled() and work.exception() is None
            return attempt.finished("cancelled", exit_code=work.result().code if known else None)
        code, error_class, message = work.result()
        if error_class:
            outcome: Outcome = "timeout" if error_class == "timeout" else "failed"
            return attempt.finished(outcome, exit_code=code, error_class=error_class, message=message)
        return attempt.finished("succeeded", exit_code=code)

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def output(self, stream: str, data: bytes) -> None:
        """Bytes that it has written."""
        if self._limit.reached:
            dropped = data.count(b"\n")
            if dropped:
                self.sink.output(self.attempt, [], dropped)
            return
        splitter = self._splitters.get(stream)
        if splitter is None:
            splitter = self._splitters[stream] = LineSplitter()
        self._take(stream, splitter.feed(data))

    def note(self, text: str) -> None:
        """A line of our own among its output."""
        self._take("stderr", [f"[tocsin: {from_outside(text)}]"])

    def _close_output(self) -> None:
        for stream, splitter in self._splitters.items():
            self._take(stream, splitter.end())

    def _take(self, stream: str, lines: list[str]) -> None:
        kept, dropped = self._limit.take(lines)
        if kept or dropped:
            at = time.time()
            shaped: list[LogLine] = [(at, stream, "info", line) for line in kept]
            self.sink.output(self.attempt, shaped, dropped)


def exit_by_code(code: int) -> Exit:
    """What an exit code says: engines tell a death by signal as 128 and the signal's number."""
    if code == 0:
        return Exit(0)
    with contextlib.suppress(ValueError):
        return Exit(None, "signal", f"killed by {signal.Signals(code - 128).name}")
    return Exit(code, "exit", f"exit code {code}")


def out_of_memory(code: int | None) -> Exit:
    """It was killed by the kernel, for its memory."""
    return Exit(code, "oom", "killed because it used more memory than it was given")


async def pauses() -> AsyncIterator[None]:
    """For `async for`: the first turn at once, each further one after a longer pause."""
    pause = _RETRY_FIRST
    while True:
        yield
        await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
        pause = min(pause * 2, _RETRY_MOST)


async def whole(request: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Wait for the answer even if nobody wants it any more: a request that is cut off may still be obeyed, later."""
    task = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _cancel(work: asyncio.Task[Any]) -> None:
    work.cancel()
    await asyncio.wait({work})


async def _first(work: asyncio.Task[Any], *others: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Until `work` or one of the others is done."""
    waits = [asyncio.ensure_future(other()) for other in others]
    try:
        await asyncio.wait({work, *waits}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
