"""Live events of a node: one reader for all who listen here, each of whom keeps a place of its own.

Nothing is queued for a listener. The table is the buffer: who keeps up is handed what the reader has just read, who
lags reads the table from its own place, and who lags so far that this is gone is told to read the lists anew. So a slow
listener costs one page of memory, whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from typing import Literal, NamedTuple

from tocsin.clock import iso
from tocsin.errors import TooManyRequests, Unavailable
from tocsin.flow import catalog, events
from tocsin.flow.events import NOWHERE, Change, EventId, Position, Reading
from tocsin.model.access import Identity
from tocsin.node.loop import Loop
from tocsin.store.db import Database, kept_to
from tocsin.telemetry import LISTENERS
from tocsin.wire import CircuitEvent, FeedEvent, JobEvent, RunEvent, encode

_TICK = 0.1
_ASLEEP = 60.0
_RENEW_SECONDS = 60.0
_HEARTBEAT_SECONDS = 15.0
_MOST_PER_TENANT, _MOST = 100, 1000


class Wanted(NamedTuple):
    """Which events a listener asked for; None: all."""

    subject: str | None = None
    job_id: str | None = None

    def of(self, changes: Sequence[Change], cursor: Position) -> list[Change]:
        """Those of `changes` that are wanted and lie behind `cursor`."""
        return [
            change
            for change in changes
            if change.position > cursor
            and self.subject in (None, change.subject)
            and self.job_id in (None, change.job_id)
        ]


class _Feed:
    """A tenant's feed as this node reads it."""

    def __init__(self, tenant_id: int) -> None:
        self.tenant_id = tenant_id
        self.listeners: set[_Listener] = set()
        self.renewed_at = float("-inf")
        self.read_to = NOWHERE
        self._mark: int | None = None
        self._since = 0
        # What the last turn that found something found, all there is between two positions.
        self._after, self._upto = NOWHERE, NOWHERE
        self._latest: list[Change] = []

    def take(self, reading: Reading) -> None:
        """Take in what a turn has read from `read_to` on."""
        if not reading.open:
            self.renewed_at = float("-inf")
        news = reading.mark != self._mark
        if news:  # it has just become complete, or is so no more
            self._mark, self._latest = reading.mark, []
            self._after = self._upto = reading.upto
        elif reading.changes:
            news = True
            self._after, self._upto, self._latest = self._upto, reading.upto, reading.changes
        self._since, self.read_to = reading.since, reading.upto
        if news:
            for listener in self.listeners:
                listener.woken.set()

    def end(self, reason: str) -> None:
        """Let all its streams end."""
        for listener in self.listeners:
            listener.end(reason)

    @property
    def begun(self) -> bool:
        return self._mark is not None

    def here(self) -> EventId:
        """The place behind everything that was read."""
        return EventId(self._mark or 0, self.read_to)

    def behind(self, cursor: Position) -> Reading | None:
        """What follows `cursor`: nothing, what was read last; or None if only the table knows."""
        if cursor >= self._upto:
            return Reading(True, self._mark, self._since, [], max(cursor, self.read_to), False)
        if cursor >= self._after:
            return Reading(True, self._mark, self._since, self._latest, self._upto, False)
        return None


class _Listener:
    """One stream: its place in its tenant's feed, and the words it is written in."""

    def __init__(self, db: Database, feed: _Feed, who: Identity, wanted: Wanted) -> None:
        self._db = db
        self._feed = feed
        self._wanted = wanted
        self._who = who
        self.key_id = who.key_id
        self.woken = asyncio.Event()
        self.spoke_at = time.monotonic()
        self.leave_because: str | None = None

    def end(self, reason: str) -> None:
        """Let the stream end as soon as it can."""
        self.leave_because = reason
        self.woken.set()

    async def words(self, resume: EventId | None) -> AsyncIterator[bytes]:
        """The stream from `resume` on, or from now; empty words are not to be sent."""
        place, first = resume, resume is None
        while self.leave_because is None:
            self.woken.clear()
            if not self._feed.begun:
                yield self._heartbeat(place)
                await self._news()
            elif place is None:
                place = self._feed.here()
                yield self._about("open" if first else "reset", place)
                first = False
            elif (found := await self._behind(place)) is None:
                place = None
            else:
                changes = await self._in_scope(self._wanted.of(found.changes, place.position))
                place = EventId(place.mark, found.upto)
                yield _written(changes, place.mark) or self._heartbeat(place)
                if not found.changes:
                    await self._news()
        yield self.last_word(self.leave_because)

    def last_word(self, reason: str) -> bytes:
        """Why the stream ends. It has no id: what is resumed is what came before it."""
        return self._about("end", None, reason)

    async def _in_scope(self, changes: list[Change]) -> list[Change]:
        """Those of jobs that the listener's key may see."""
        if self._who.scope is None or not changes:
            return changes
        with kept_to(self._who.scope):
            jobs = {change.job_id for change in changes if change.job_id is not None}
            seen = await catalog.visible(self._db, self._who, jobs)
        return [change for change in changes if change.job_id in seen]

    async def _behind(self, place: EventId) -> Reading | None:
        """What follows `place`; None if something of it is gone."""
        found = self._feed.behind(place.position)
        if found is None:
            found = (await events.read(self._db, {self._feed.tenant_id: place.position}))[self._feed.tenant_id]
        return found if found.follows(place) else None

    def _heartbeat(self, place: EventId | None) -> bytes:
        """A sign of life, if it is time for one. It moves on where to resume from, over all that was not wanted."""
        if time.monotonic() < self.spoke_at + _HEARTBEAT_SECONDS:
            return b""
        return b": quiet\n\n" if place is None else b": quiet\nid: %b\n\n" % str(place).encode()

    async def _news(self) -> None:
        """Wait for news, or until it is time for a sign of life."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.woken.wait(), self.spoke_at + _HEARTBEAT_SECONDS - time.monotonic())

    def _about(self, kind: Literal["open", "reset", "end"], place: EventId | None, reason: str | None = None) -> bytes:
        return _word(place, kind, FeedEvent(iso(self._db.clock.now()), kind, reason))


def _word(place: EventId | None, kind: str, event: FeedEvent | RunEvent | JobEvent | CircuitEvent) -> bytes:
    """One event as it is sent."""
    line = b"" if place is None else b"id: %b\n" % str(place).encode()
    return b"%bevent: %b\ndata: %b\n\n" % (line, kind.encode(), encode(event))


def _written(changes: Sequence[Change], mark: int) -> bytes:
    return b"".join(_word(EventId(mark, change.position), change.subject, change.event) for change in changes)


class Events(Loop):
    """Reads what changed for all tenants that somebody listens to here; asleep while nobody does."""

    name = "events"

    def __init__(self, db: Database) -> None:
        super().__init__()
        self._db = db
        self._feeds: dict[int, _Feed] = {}
        self._leaving = False

    # ── listening ────────────────────────────────────────────────────────────────────────────────────────────────

    def refuse_crowd(self, tenant_id: int) -> None:
        """Raise if there are as many streams as there may be."""
        feed = self._feeds.get(tenant_id)
        if (feed and len(feed.listeners) >= _MOST_PER_TENANT) or len(self._listeners()) >= _MOST:
            raise TooManyRequests(
                "too many streams are open on this server", code="too_many_streams", headers={"retry-after": "5"}
            )

    async def stream(self, who: Identity, wanted: Wanted, resume: EventId | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events, until somebody hangs up or the listener has to go."""
        feed = self._feeds.setdefault(who.tenant_id, _Feed(who.tenant_id))
        listener = _Listener(self._db, feed, who, wanted)
        feed.listeners.add(listener)
        LISTENERS.inc()
        self.wake()
        try:
            yield b"retry: 1000\n\n"
            if self._leaving:
                listener.end("leaving")
            async for word in listener.words(resume):
                if word:
                    listener.spoke_at = time.monotonic()
                    yield word
        except Unavailable:
            yield listener.last_word("unavailable")
        finally:
            LISTENERS.dec()
            feed.listeners.discard(listener)

    def end_streams(self) -> None:
        """End every stream: the node is going."""
        self._leaving = True
        for listener in self._listeners():
            listener.end("leaving")

    def keys_inside(self) -> set[str]:
        """With which keys somebody listens."""
        return {listener.key_id for listener in self._listeners()}

    def show_out(self, key_ids: Collection[str]) -> None:
        """End the streams of these keys."""
        for listener in self._listeners():
            if listener.key_id in key_ids:
                listener.end("unauthorized")

    def _listeners(self) -> list[_Listener]:
        return [listener for feed in self._feeds.values() for listener in feed.listeners]

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def run_once(self) -> float:
        self._feeds = {tenant: feed for tenant, feed in self._feeds.items() if feed.listeners}
        if not self._feeds:
            return _ASLEEP
        now = time.monotonic()
        feeds = dict(self._feeds)  # others may join meanwhile
        due = [feed for feed in feeds.values() if now - feed.renewed_at > _RENEW_SECONDS]
        if due:
            opened = await events.open_feeds(self._db, [feed.tenant_id for feed in due])
            for feed in due:
                feed.renewed_at = now
                if feed.tenant_id not in opened:  # the tenant is erased, and whoever acts for it has nothing to hear
                    feed.end("unauthorized")
        readings = await events.read(self._db, {tenant: feed.read_to for tenant, feed in feeds.items()})
        for tenant, reading in readings.items():
            feeds[tenant].take(reading)
        return 0.0 if any(reading.full for reading in readings.values()) else _TICK
