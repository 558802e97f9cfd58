"""One skeleton for every loop of a node: turn, wait for a reason to turn again, never die.

A turn that fails is counted and tried again after a jittered back-off, short enough that a database that is back is
noticed soon; only `stop` ends a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod

from tocsin.telemetry import LOOP_ERRORS, get_logger

log = get_logger("loop")
_SHORTEST_BACKOFF, _LONGEST_BACKOFF = 0.05, 2.0
_LAST_TURN = 5.0  # seconds for the turn under way when a loop is told to stop


class Loop(ABC):
    """Subclasses say what a turn does, and how long to wait for `wake` after it."""

    name = "loop"

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._failures = 0

    @abstractmethod
    async def run_once(self) -> float:
        """One turn; answers for how many seconds at most to wait for a reason to turn again."""

    def wake(self) -> None:
        """There is a reason to turn now."""
        self._wake.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        """Finish the turn under way, then end; a turn that does not come to an end is cut off."""
        self._stopping.set()
        self.wake()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_LAST_TURN)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                pause = await self.run_once()
                self._failures = 0
            except (Exception, asyncio.CancelledError) as error:
                if _is_meant_for_us(error):
                    raise
                # Not to be cut short by `wake`: reasons to turn come by the hundred.
                await _elapsed(self._stopping, self._backoff(error))
                continue
            if pause > 0 and not self._stopping.is_set():
                await _elapsed(self._wake, pause)

    def _backoff(self, error: BaseException) -> float:
        self._failures += 1
        LOOP_ERRORS.labels(self.name).inc()
        log.warning("turn failed", loop=self.name, error=f"{type(error).__name__}: {error}", failures=self._failures)
        longest = min(_LONGEST_BACKOFF, 2 * _SHORTEST_BACKOFF * 2 ** min(self._failures, 10))
        return random.uniform(_SHORTEST_BACKOFF, longest)


class Pace:
    """How often to do what grows dearer with all that a held snapshot leaves lying in the way: as often as is wanted,
    but never for more than a twentieth of the time, unless it has not been done for long."""

    SHARE, LONGEST = 0.05, 30.0

    def __init__(self) -> None:
        self._begun = self._done = float("-inf")

    def due(self, every: float) -> bool:
        """Whether to do it now, if it is wanted every so many seconds."""
        rest = (self._done - self._begun) / self.SHARE if self._done > self._begun else 0.0
        return time.monotonic() >= self._begun + max(every, min(rest, self.LONGEST))

    def begin(self) -> None:
        self._begun = self._done = time.monotonic()

    def end(self) -> None:
        self._done = time.monotonic()


def _is_meant_for_us(error: BaseException) -> bool:
    """Whether we are cancelled, rather than something that the turn waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _elapsed(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, so long at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
