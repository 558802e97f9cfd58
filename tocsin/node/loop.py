"""One skeleton for every loop of a node: turn, wait for a reason to turn again, never die.

A turn that fails is counted and tried again after a jittered back-off; only `stop` ends a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod

from tocsin.telemetry import LOOP_ERRORS, get_logger

log = get_logger("loop")
_LONGEST_BACKOFF = 5.0


class Loop(ABC):
    """Subclasses say what a turn does, and how long to wait for `wake` after it."""

    name = "loop"

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
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
        """Finish the turn under way, then end."""
        self._stopping = True
        self.wake()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(self._task), 5)

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                pause = await self.run_once()
                self._failures = 0
            except Exception as error:
                pause = self._after(error)
                await asyncio.sleep(pause)
                continue
            if pause > 0 and not self._stopping:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)

    def _after(self, error: Exception) -> float:
        self._failures += 1
        LOOP_ERRORS.labels(self.name).inc()
        log.warning("turn failed", loop=self.name, error=f"{type(error).__name__}: {error}", failures=self._failures)
        return random.uniform(0.05, min(_LONGEST_BACKOFF, 0.1 * 2**self._failures))
