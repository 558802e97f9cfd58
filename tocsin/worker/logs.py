"""Log shipping: lines of many runs, batched, repeated until acknowledged, bounded in memory.

Logs degrade before jobs do: what does not fit is dropped and counted, and a result waits for its lines a few seconds
at most; then it goes ahead, and they follow it. A run that writes nothing costs nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from tocsin.wire import ClaimedRun, LogChunk, LogLine
from tocsin.worker.link import Link, LogConflict, Unreachable

SHIP_BYTES = 64 * 1024
SHIP_AFTER = 0.25
RESULT_WAITS = 5.0

_MAX_SHIPMENT = 1024 * 1024
_MAX_HELD = 64 * 1024 * 1024
_LINE_OVERHEAD = 64
_TIMEOUT = 4.0


class RunLog:
    """The unacknowledged lines of one attempt."""

    __slots__ = ("acked", "dropped", "lines", "on_flushed", "run", "size")

    def __init__(self, run: ClaimedRun) -> None:
        self.run = run
        self.acked = 0
        self.dropped = 0
        self.lines: list[LogLine] = []
        self.size = 0
        self.on_flushed: Callable[[], None] | None = None

    def summary(self) -> dict[str, int]:
        """What the report says about the log."""
        return {"lines": self.acked, "dropped": self.dropped}

    def chunk(self, room: int) -> tuple[LogChunk, int]:
        """As many of the first lines as fit into `room`, at least one; and their size."""
        size = count = 0
        while count < len(self.lines) and (not count or size < room):
            size += len(self.lines[count][3]) + _LINE_OVERHEAD
            count += 1
        run = self.run
        return (
            LogChunk(
                run_id=run.run_id, attempt=run.attempt, fence=run.fence, offset=self.acked, lines=self.lines[:count]
            ),
            size,
        )

    def acknowledge(self, upto: int) -> int:
        """The server has `upto` lines; the size of what need not be held any more."""
        gone = self.lines[: max(upto - self.acked, 0)]
        del self.lines[: len(gone)]
        self.acked += len(gone)
        freed = sum(len(line[3]) + _LINE_OVERHEAD for line in gone)
        self.size -= freed
        return freed

    def give_up(self) -> int:
        """Drop what is left; its size."""
        freed, self.size = self.size, 0
        self.dropped += len(self.lines)
        self.lines = []
        return freed


class LogShipper:
    """One shipment at a time, of whatever has gathered."""

    def __init__(self, link: Link, worker_id: str, may_send: Callable[[], None]) -> None:
        self._link, self._worker_id, self._may_send = link, worker_id, may_send
        self._dirty: dict[RunLog, None] = {}
        self._size = 0
        self._oldest = 0.0
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self.all_arrived = asyncio.Event()
        self.all_arrived.set()

    def add(self, log: RunLog, lines: list[LogLine], dropped: int) -> None:
        """Take lines in, as far as memory allows."""
        log.dropped += dropped
        size = sum(len(line[3]) + _LINE_OVERHEAD for line in lines)
        if self._size + size > _MAX_HELD:
            log.dropped += len(lines)
            return
        if not lines:
            return
        if not self._dirty:
            self._oldest = time.monotonic()
        self._dirty[log] = None
        self.all_arrived.clear()
        log.lines.extend(lines)
        log.size += size
        self._size += size
        self._something.set()
        if self._size >= SHIP_BYTES:
            self._urgent.set()

    def close(self, log: RunLog, then: Callable[[], None]) -> None:
        """Call `then` when all its lines have arrived, or have been waited for long enough."""
        if not log.lines:
            then()
            return
        log.on_flushed = then
        self._urgent.set()
        asyncio.get_running_loop().call_later(RESULT_WAITS, _go_ahead, log)

    async def run(self) -> None:
        """Ship for as long as the session lives."""
        failures = 0
        while True:
            await self._something.wait()
            if not self._urgent.is_set():
                with contextlib.suppress(TimeoutError):
                    wait = self._oldest + SHIP_AFTER - time.monotonic()
                    await asyncio.wait_for(self._urgent.wait(), max(wait, 0))
            try:
                await self._ship(self._gather())
                failures = 0
            except Unreachable:
                failures += 1
                await asyncio.sleep(random.uniform(0.5, 1) * min(0.1 * 2**failures, 2.0))
            self._look_again()

    def _gather(self) -> list[tuple[RunLog, LogChunk]]:
        chunks, room = [], _MAX_SHIPMENT
        # Runs that only wait for their log go first.
        for log in sorted(self._dirty, key=lambda log: log.on_flushed is None):
            if room <= 0:
                break
            chunk, size = log.chunk(room)
            chunks.append((log, chunk))
            room -= size
        return chunks

    async def _ship(self, chunks: list[tuple[RunLog, LogChunk]]) -> None:
        if not chunks:
            return
        self._may_send()
        try:
            await self._link.ship_logs(self._worker_id, [chunk for _, chunk in chunks], _TIMEOUT)
        except LogConflict as conflict:
            if len(chunks) == 1:
                self._resolve(chunks[0][0], conflict)
                return
            # The answer does not say which chunk is meant; a repeat of the others is harmless.
            for one in chunks:
                await self._ship([one])
            return
        for log, chunk in chunks:
            self._acknowledge(log, chunk.offset + len(chunk.lines))

    def _resolve(self, log: RunLog, conflict: LogConflict) -> None:
        expected = conflict.expected_offset
        if conflict.code == "log_gap" and expected is not None and log.acked < expected <= log.acked + len(log.lines):
            self._acknowledge(log, expected)
        else:  # superseded, or the server lacks lines that we no longer have
            self._abandon(log)

    def _acknowledge(self, log: RunLog, upto: int) -> None:
        self._size -= log.acknowledge(upto)
        self._flushed(log)

    def _abandon(self, log: RunLog) -> None:
        self._size -= log.give_up()
        self._flushed(log)

    def _flushed(self, log: RunLog) -> None:
        if not log.lines:
            self._dirty.pop(log, None)
            if not self._dirty:
                self.all_arrived.set()
            _go_ahead(log)

    def _look_again(self) -> None:
        self._oldest = time.monotonic()
        if not self._dirty:
            self._something.clear()
        if self._size < SHIP_BYTES and all(log.on_flushed is None for log in self._dirty):
            self._urgent.clear()


def _go_ahead(log: RunLog) -> None:
    """Let the result go that waits for these lines."""
    then, log.on_flushed = log.on_flushed, None
    if then is not None:
        then()
