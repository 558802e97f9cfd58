"""Leftovers: lines that waited for the server when their session was lost, and go on trying without it.

The server takes lines of an attempt for an hour after the end that its worker has told, whatever became of the worker;
those of attempts that it has given up it refuses, and they are dropped. All that waits together is bounded on disk as
one session's is, and in memory by how many sessions are remembered.
"""

from __future__ import annotations

import asyncio

from tocsin.telemetry import get_logger
from tocsin.worker.logs import SPOOLED, LogShipper

log = get_logger("worker")

_LAST = 3600.0  # seconds; the server takes none that are later
_MOST = 3  # sessions


class Leftovers:
    """What is left of sessions that were lost."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Task[None], LogShipper] = {}

    @property
    def room(self) -> int:
        """Bytes that the next session may bring to disk."""
        return max(SPOOLED - sum(shipper.on_disk for shipper in self._left.values()), 0)

    def take(self, shipper: LogShipper) -> None:
        """Let this one go on for as long as somebody takes its lines. One that is too many takes the oldest's place."""
        if len(self._left) >= _MOST:
            next(iter(self._left)).cancel()
        task = asyncio.create_task(self._see_off(shipper))
        self._left[task] = shipper
        task.add_done_callback(self._left.pop)

    async def _see_off(self, shipper: LogShipper) -> None:
        try:
            async with asyncio.timeout(_LAST):
                await shipper.finished()
        except TimeoutError:
            pass
        finally:
            await shipper.stop()
            if lost := shipper.give_up():
                log.warning("log lines of a session that was lost did not arrive", lines=lost)

    async def end(self, within: float) -> None:
        """Wait for them for so long, and let the rest go."""
        left = list(self._left)
        if left:
            await asyncio.wait(left, timeout=within)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
