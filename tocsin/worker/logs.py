"""Log shipping: lines of many runs, batched, repeated until acknowledged, bounded in memory and on disk.

While the server is away lines wait in memory, then on disk. Logs degrade before jobs do: what does not fit there is
dropped and counted, a line says so in its place, and a result waits for its lines a few seconds at most; then it goes
ahead, and they follow it. A run that writes nothing costs nothing here.

What waits outlives the session (`leftovers.py`), but not the worker's process: a new process is a new worker, whose
lines for the old one's attempts the server would refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tocsin.wire import ClaimedRun, LogChunk, LogLine
from tocsin.worker.link import Link, LogConflict, Unreachable
from tocsin.worker.spool import Piece, Spool

SHIP_BYTES = 64 * 1024
SHIP_AFTER = 0.25
RESULT_WAITS = 5.0
KEPT = 16 * 1024 * 1024  # what is more than this goes to disk
SPOOLED = 1024 * 1024 * 1024

_MAX_SHIPMENT = 1024 * 1024
_MAX_HELD = 64 * 1024 * 1024  # while the disk does not keep up
_LINE_OVERHEAD = 64
_TIMEOUT = 4.0
_decode = msgspec.msgpack.Decoder(list[LogLine]).decode


def _size(lines: list[LogLine]) -> int:
    return sum(len(line[3]) + _LINE_OVERHEAD for line in lines)


def _left_out(count: int, why: str) -> LogLine:
    return time.time(), "system", "warning", f"[tocsin: {count} lines left out: {why}]"


class _Away(NamedTuple):
    """Lines on disk."""

    piece: Piece
    lines: int


class RunLog:
    """The unacknowledged lines of one attempt: the first in memory, then those on disk, then the last in memory."""

    __slots__ = (
        "acked",
        "away",
        "dropped",
        "last",
        "leaving",
        "lines",
        "missing",
        "on_flushed",
        "run",
        "sent",
    )

    def __init__(self, run: ClaimedRun) -> None:
        self.run = run
        self.acked = 0
        self.sent = 0  # of `lines`, on their way now
        self.dropped = 0
        self.missing = 0  # dropped behind the last line, and not told yet
        self.lines: list[LogLine] = []
        self.away: list[_Away] = []
        self.leaving = 0  # lines on their way to disk
        self.last: list[LogLine] = []
        self.on_flushed: Callable[[], None] | None = None

    def summary(self) -> dict[str, int]:
        """What the report says about the log."""
        return {"lines": self.acked, "dropped": self.dropped}

    @property
    def arrived(self) -> bool:
        """Whether nothing is left to ship."""
        return not (self.lines or self.away or self.leaving or self.last)

    def extend(self, lines: list[LogLine]) -> int:
        """Add lines at the end, behind a word about those that are missing; the size of all that."""
        if self.missing:
            lines = [_left_out(self.missing, "too much waited for the server"), *lines]
            self.missing = 0
        (self.last if self.away or self.leaving else self.lines).extend(lines)
        return _size(lines)

    def chunk(self, room: int) -> tuple[LogChunk, int]:
        """As many of the first lines as fit into `room`, at least one; and their size."""
        size = count = 0
        while count < len(self.lines) and (not count or size < room):
            size += len(self.lines[count][3]) + _LINE_OVERHEAD
            count += 1
        run = self.run
        self.sent = count
        return (
            LogChunk(
                run_id=run.run_id,
                attempt=run.attempt,
                fence=run.fence,
                tenant=run.tenant,
                offset=self.acked,
                lines=self.lines[:count],
            ),
            size,
        )

    def acknowledge(self, upto: int) -> int:
        """The server has `upto` lines; the size of what need not be held any more."""
        gone = self.lines[: max(upto - self.acked, 0)]
        del self.lines[: len(gone)]
        self.acked += len(gone)
        self.sent = 0
        return _size(gone)

    def fall_back(self, upto: int) -> int:
        """The server has lost what came behind `upto` lines, and we no longer have it: a word stands in its place. The
        size of that."""
        lost, self.acked, self.sent = self.acked - upto, upto, 0
        self.dropped += lost
        word = [_left_out(lost, "the server has lost them")]
        self.lines[:0] = word
        return _size(word)

    def give_up(self) -> int:
        """Drop what is left in memory; its size."""
        freed = _size(self.lines) + _size(self.last)
        self.dropped += len(self.lines) + len(self.last) + sum(piece.lines for piece in self.away)
        self.lines, self.last, self.sent = [], [], 0
        return freed

    def part(self, most: int) -> list[LogLine]:
        """Take lines out that may go to disk, the first of those behind what is there already."""
        if not self.away:
            # What is not on its way to the server follows what goes to disk.
            self.last = self.lines[self.sent :] + self.last
            del self.lines[self.sent :]
        count = size = 0
        while count < len(self.last) and size < most:
            size += len(self.last[count][3]) + _LINE_OVERHEAD
            count += 1
        taken = self.last[:count]
        del self.last[:count]
        self.leaving = count
        return taken

    def close_up(self) -> None:
        """Nothing is on disk: the last lines are the next."""
        if not self.away and not self.leaving:
            self.lines += self.last
            self.last = []


class LogShipper:
    """One shipment at a time, of whatever has gathered."""

    def __init__(self, link: Link, worker_id: str, spooled: int | None = None) -> None:
        self._link, self._worker_id = link, worker_id
        self._shipping: asyncio.Task[None] | None = None
        self._dirty: dict[RunLog, None] = {}
        self._size = 0
        self._oldest = 0.0
        self._spool = Spool(SPOOLED if spooled is None else spooled)
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self._too_much = asyncio.Event()
        self.all_arrived = asyncio.Event()
        self.all_arrived.set()

    @property
    def backlog(self) -> int:
        """How many bytes wait, in memory and on disk."""
        return self._size + self.on_disk

    @property
    def on_disk(self) -> int:
        """How many of them are on disk."""
        return sum(away.piece.length for log in self._dirty for away in log.away)

    def add(self, log: RunLog, lines: list[LogLine], dropped: int) -> None:
        """Take lines in, as far as there is room."""
        log.dropped += dropped
        if not lines:
            return
        if self._size + _size(lines) > _MAX_HELD:
            log.dropped += len(lines)
            log.missing += len(lines)
            return
        self._take_in(log, lines)

    def _take_in(self, log: RunLog, lines: list[LogLine]) -> None:
        if not self._dirty:
            self._oldest = time.monotonic()
        self._dirty[log] = None
        self.all_arrived.clear()
        self._size += log.extend(lines)
        self._something.set()
        if self._size >= SHIP_BYTES:
            self._urgent.set()
        if self._size > KEPT:
            self._too_much.set()

    def close(self, log: RunLog, then: Callable[[], None]) -> None:
        """Call `then` when all its lines have arrived, or have been waited for long enough."""
        if log.missing:
            self._take_in(log, [])
        if log.arrived:
            then()
            return
        log.on_flushed = then
        self._urgent.set()
        asyncio.get_running_loop().call_later(RESULT_WAITS, _go_ahead, log)

    def start(self) -> asyncio.Task[None]:
        """Ship from now on, until stopped or refused for good. Whose lines are still wanted the server knows, by their
        fences: it does not end with the lease."""
        self._shipping = asyncio.create_task(self._run())
        return self._shipping

    async def finished(self) -> None:
        """Until all lines have arrived, or none can any more."""
        if self._shipping is not None:
            arrived = asyncio.create_task(self.all_arrived.wait())
            try:
                await asyncio.wait((arrived, self._shipping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()

    async def stop(self) -> None:
        """Ship nothing more."""
        if self._shipping is not None:
            self._shipping.cancel()
            await asyncio.gather(self._shipping, return_exceptions=True)

    def give_up(self) -> int:
        """Drop what has not arrived; how many lines."""
        logs = list(self._dirty)
        before = sum(log.dropped for log in logs)
        for log in logs:
            self._abandon(log)
        return sum(log.dropped for log in logs) - before

    async def _run(self) -> None:
        spools = asyncio.create_task(self._spools())
        try:
            await self._ships()
        finally:
            spools.cancel()

    async def _ships(self) -> None:
        failures = 0
        while True:
            await self._something.wait()
            if not self._urgent.is_set():
                with contextlib.suppress(TimeoutError):
                    wait = self._oldest + SHIP_AFTER - time.monotonic()
                    await asyncio.wait_for(self._urgent.wait(), max(wait, 0))
            try:
                await self._ship(await self._gather())
                failures = 0
            except Unreachable:
                failures += 1
                for log in self._dirty:
                    log.sent = 0
                await asyncio.sleep(random.uniform(0.5, 1) * min(0.1 * 2**failures, 2.0))
            self._look_again()

    async def _gather(self) -> list[tuple[RunLog, LogChunk]]:
        chunks, room = [], _MAX_SHIPMENT
        # Runs that only wait for their log go first.
        for log in sorted(self._dirty, key=lambda log: log.on_flushed is None):
            if room <= 0:
                break
            if not log.lines and log.away:
                await self._fetch(log)
            if log.lines:
                chunk, size = log.chunk(room)
                chunks.append((log, chunk))
                room -= size
        return chunks

    async def _ship(self, chunks: list[tuple[RunLog, LogChunk]]) -> None:
        if not chunks:
            return
        try:
            await self._link.ship_logs(self._worker_id, [chunk for _, chunk in chunks], _TIMEOUT)
        except LogConflict as conflict:
            if len(chunks) == 1:
                self._resolve(chunks[0][0], conflict)
                return
            # The server stored nothing of the shipment. Find the attempt that is over by bisection: a request for each
            # attempt would take minutes if many runs log.
            half = len(chunks) // 2
            await self._ship(chunks[:half])
            await self._ship(chunks[half:])
            return
        for log, chunk in chunks:
            self._acknowledge(log, chunk.offset + len(chunk.lines))

    def _resolve(self, log: RunLog, conflict: LogConflict) -> None:
        expected = conflict.expected_offset
        if conflict.code == "log_gap" and expected is not None and log.acked < expected <= log.acked + len(log.lines):
            self._acknowledge(log, expected)
        elif conflict.code == "log_gap" and expected is not None and 0 <= expected < log.acked:
            self._size += log.fall_back(expected)
        else:  # superseded, or the server has lines that we have never sent
            self._abandon(log)

    def _acknowledge(self, log: RunLog, upto: int) -> None:
        self._size -= log.acknowledge(upto)
        self._flushed(log)

    def _abandon(self, log: RunLog) -> None:
        self._size -= log.give_up()
        while log.away:
            self._spool.drop(log.away.pop(0).piece)
        self._flushed(log)

    def _flushed(self, log: RunLog) -> None:
        if log.arrived:
            self._dirty.pop(log, None)
            if not self._dirty:
                self.all_arrived.set()
            _go_ahead(log)

    def _look_again(self) -> None:
        self._oldest = time.monotonic()
        if not any(log.lines or log.away for log in self._dirty):  # what is on its way to disk says when it is there
            self._something.clear()
        if self._size < SHIP_BYTES and all(log.on_flushed is None and not log.away for log in self._dirty):
            self._urgent.clear()

    # ── what waits on disk ───────────────────────────────────────────────────────────────────────────────────────

    async def _spools(self) -> None:
        """Bring lines to disk while memory holds too much, those first of which there are most."""
        while True:
            await self._too_much.wait()
            self._too_much.clear()
            while self._size > KEPT and self._spool.room > _MAX_SHIPMENT:
                log = max(self._dirty, key=lambda log: len(log.last) + (0 if log.away else len(log.lines) - log.sent))
                lines = log.part(_MAX_SHIPMENT)
                if not lines or not await self._spool_out(log, lines):
                    log.close_up()
                    break  # until more comes

    async def _spool_out(self, log: RunLog, lines: list[LogLine]) -> bool:
        piece = await self._spool.put(msgspec.msgpack.encode(lines))
        log.leaving = 0
        if piece is None:
            log.last = lines + log.last
        else:
            log.away.append(_Away(piece, len(lines)))
            self._size -= _size(lines)
        self._something.set()
        return piece is not None

    async def _fetch(self, log: RunLog) -> None:
        """The next lines from disk are the first in memory."""
        away = log.away[0]
        try:
            lines = _decode(await self._spool.take(away.piece))
        except (OSError, msgspec.DecodeError):
            log.dropped += away.lines
            lines = [_left_out(away.lines, "the worker's disk has lost them")]
        del log.away[0]
        log.lines += lines
        self._size += _size(lines)
        log.close_up()


def _go_ahead(log: RunLog) -> None:
    """Let the result go that waits for these lines."""
    then, log.on_flushed = log.on_flushed, None
    if then is not None:
        then()
