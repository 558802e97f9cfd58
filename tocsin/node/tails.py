"""Logs that are followed live: one look for all who follow here, each of whom keeps a place of its own.

Nothing is queued for a follower. Lines that are stored on this node set the look going at once; a few looks a second
find those that others have stored. Who is behind then reads from its own place, a page at a time, and the next page
only when the last has been taken: a follower that stops reading costs one page of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable
from typing import Any, NamedTuple

from tocsin.clock import iso
from tocsin.errors import TooManyRequests, Unavailable
from tocsin.flow import logs
from tocsin.model.access import Identity
from tocsin.node.loop import Loop
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import TAILERS
from tocsin.wire import LogChunk, encode

_TICK = 0.25
_ASLEEP = 60.0
_HEARTBEAT_SECONDS = 15.0
_MOST_PER_TENANT, _MOST = 100, 1000
_PAGE = 500


class Place(NamedTuple):
    """A line of a run's log: the seq of the last one seen of an attempt."""

    attempt: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """The place that an event's id names."""
        attempt, _, seq = text.partition(".")
        if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in (attempt, seq)):
            return None
        return cls(max(1, int(attempt)), int(seq))


class _Tailer:
    """One stream of one run's lines."""

    def __init__(self, who: Identity, run_id: str, only: int | None, stream: str | None, place: Place) -> None:
        self.who, self.run = who, (who.tenant_id, run_id)
        self.only, self.stream, self.place = only, stream, place
        self.seen: logs.Watched | None = None  # at the last look
        self.woken = asyncio.Event()
        self.spoke_at = time.monotonic()
        self.leave_because: str | None = None

    def take(self, seen: logs.Watched) -> None:
        """This is how the run stands."""
        if seen != self.seen:
            self.seen = seen
            self.woken.set()

    def end(self, reason: str) -> None:
        """Let the stream end as soon as it can."""
        self.leave_because = reason
        self.woken.set()

    @property
    def behind(self) -> bool:
        """Whether there is something to read."""
        return self.seen is not None and self.place < self.seen.last

    def pass_on(self) -> bool:
        """Go on to the next attempt, if there is one to go on to."""
        if self.only is not None or self.seen is None or self.place.attempt >= self.seen.attempt:
            return False
        self.place = Place(self.place.attempt + 1, 0)
        return True

    @property
    def over(self) -> str | None:
        """What the run has become, once nothing more is to come."""
        if self.seen is None:
            return None
        if self.only is not None and self.seen.attempt > self.only:
            return self.seen.ended or "retried"
        return self.seen.ended

    async def news(self) -> None:
        """Wait for news, or until it is time for a sign of life."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.woken.wait(), self.spoke_at + _HEARTBEAT_SECONDS - time.monotonic())


def _word(attempt: int, line: dict[str, Any]) -> bytes:
    """One line as it is sent."""
    return b"id: %d.%d\nevent: line\ndata: %b\n\n" % (attempt, line["seq"], encode({**line, "attempt": attempt}))


class Tails(Loop):
    """Looks for all who follow a log on this node; asleep while nobody does."""

    name = "tails"

    def __init__(self, db: Database, objects: ObjectStore) -> None:
        super().__init__()
        self._db, self._objects = db, objects
        self._tailers: set[_Tailer] = set()
        self._followed: set[str] = set()
        self._leaving = False

    def stored(self, chunks: Iterable[LogChunk]) -> None:
        """Lines of these were stored here."""
        if self._followed and any(chunk.run_id in self._followed for chunk in chunks):
            self.wake()

    def refuse_crowd(self, tenant_id: int) -> None:
        """Raise if there are as many streams as there may be."""
        own = sum(tailer.who.tenant_id == tenant_id for tailer in self._tailers)
        if own >= _MOST_PER_TENANT or len(self._tailers) >= _MOST:
            raise TooManyRequests(
                "too many logs are followed on this server", code="too_many_streams", headers={"retry-after": "5"}
            )

    async def stream(
        self, who: Identity, run_id: str, only: int | None, stream: str | None, resume: Place | None
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events from the beginning (or `resume`) on, until the run, or the `only` attempt, has ended."""
        tailer = _Tailer(who, run_id, only, stream, resume or Place(only or 1, 0))
        self._tailers.add(tailer)
        self._followed.add(run_id)
        TAILERS.inc()
        self.wake()
        try:
            yield b"retry: 1000\n\n"
            if self._leaving:
                tailer.end("leaving")
            async for word in self._words(tailer):
                tailer.spoke_at = time.monotonic()
                yield word
        except Unavailable:
            yield self._last_word("end", reason="unavailable")
        finally:
            TAILERS.dec()
            self._tailers.discard(tailer)
            self._followed = {one.run[1] for one in self._tailers}

    async def _words(self, tailer: _Tailer) -> AsyncIterator[bytes]:
        while tailer.leave_because is None:
            tailer.woken.clear()
            # How the run stands is taken before its lines: what was written before the end is then sure to be read.
            over = tailer.over
            if tailer.behind and (lines := await self._lines(tailer)):
                yield lines
            elif tailer.pass_on():
                continue
            elif over is not None:
                yield self._last_word("over", state=over)
                return
            elif time.monotonic() >= tailer.spoke_at + _HEARTBEAT_SECONDS:
                yield b": quiet\n\n"
            else:
                await tailer.news()
        yield self._last_word("end", reason=tailer.leave_because)

    async def _lines(self, tailer: _Tailer) -> bytes:
        """The next lines that are wanted; empty if there are none in this attempt."""
        tenant_id, run_id = tailer.run
        while True:
            attempt, seq = tailer.place
            page = await logs.read(self._db, self._objects, tenant_id, run_id, attempt, tailer.stream, seq, _PAGE)
            tailer.place = Place(attempt, page.upto)
            if page.items or not page.more:
                return b"".join(_word(attempt, line) for line in page.items)

    def _last_word(self, kind: str, **told: str) -> bytes:
        """Why the stream ends. It has no id: what is resumed is what came before it."""
        at = iso(self._db.clock.now())
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"at": at, "type": kind, **told}))

    def end_streams(self) -> None:
        """End every stream: the node is going."""
        self._leaving = True
        for tailer in self._tailers:
            tailer.end("leaving")

    def keys_inside(self) -> set[str]:
        """With which keys somebody follows."""
        return {tailer.who.key_id for tailer in self._tailers}

    def show_out(self, key_ids: Collection[str]) -> None:
        """End the streams of these keys."""
        for tailer in self._tailers:
            if tailer.who.key_id in key_ids:
                tailer.end("unauthorized")

    async def run_once(self) -> float:
        tailers = list(self._tailers)
        if not tailers:
            return _ASLEEP
        # Of a run that has ended nothing more is waited for, however long its follower does not read what there is.
        tailers = [tailer for tailer in tailers if tailer.seen is None or tailer.seen.ended is None]
        if not tailers:
            return _TICK
        runs = list({tailer.run for tailer in tailers})
        seen = dict(zip(runs, await logs.look(self._db, self._objects, runs), strict=True))
        for tailer in tailers:
            found = seen[tailer.run]
            if found is None:
                tailer.end("unavailable")
            else:
                tailer.take(found)
        return _TICK
