"""search: lines of a tenant's logs by their words, newest first. Filters tell which segments need not be read.

A request does a bounded amount of work and answers where to go on. Pages see the segments of one moment: what is
compacted meanwhile stays for as long as a cursor is good. The log of one run is read from its beginning instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import EPOCH
from tocsin.errors import BadRequest, ObjectLost
from tocsin.flow.shared import cold, unlisted
from tocsin.flow.shared.segments import (
    Frame,
    decode,
    inflate,
    instant,
    job_word,
    level_word,
    read_directory,
    shown,
)
from tocsin.model.ids import lowest_id, parse_id
from tocsin.model.logsearch import Filter, Query, folded
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import Parquet
from tocsin.wire import LogLine

SQL = Sql(__file__, cold.SQL)
CURSOR_LASTS = timedelta(minutes=50)  # less than a segment stays that was replaced

_AT_ONCE = 16
_MOST_SEGMENTS = 1_024
_MOST_BYTES = 64 * 1024 * 1024
_STRAY = timedelta(days=1)
_LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_MICROSECOND = timedelta(microseconds=1)


class Wanted(NamedTuple):
    """Which lines; None: whatever."""

    query: Query = Query()
    job_id: str | None = None
    run_id: str | None = None
    tag: dict[str, str] | None = None
    from_: datetime | None = None
    to: datetime | None = None
    level: str | None = None
    error_class: str | None = None

    def has(self, line: LogLine) -> bool:
        """Whether this is such a line, as far as it tells by itself."""
        ts, _, level, text = line
        if self.level is not None and level != self.level:
            return False
        if (self.from_ is not None and instant(ts) < self.from_) or (self.to is not None and instant(ts) >= self.to):
            return False
        return self.query.fits(text)

    @property
    def words(self) -> set[bytes]:
        """What the filter of a segment with such lines has."""
        words = set(self.query.words)
        if self.level is not None:
            words.add(level_word(self.level))
        if self.job_id is not None:
            words.add(job_word(self.job_id))
        return words


class Cursor(NamedTuple):
    """Where to go on: in a segment of the view `as_of`, behind so many lines found there (None: behind it all)."""

    as_of: datetime
    segment: str
    skip: int | None

    def __str__(self) -> str:
        return f"s.{(self.as_of - EPOCH) // _MICROSECOND}.{self.segment}.{'' if self.skip is None else self.skip}"


class RunCursor(NamedTuple):
    """Where to go on in the log of a run."""

    attempt: int
    seq: int

    def __str__(self) -> str:
        return f"r.{self.attempt}.{self.seq}"


def parse_cursor(text: str, now: datetime) -> Cursor | RunCursor:
    """A cursor of ours; raises if it is none, or none any more."""
    kind, *parts = text.split(".")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) <= 17]
    if kind == "r" and len(parts) == len(numbers) == 2 and max(numbers) < 2**31:
        return RunCursor(*numbers)
    segment = parse_id(parts[1]) if kind == "s" and len(parts) == 3 else None
    if segment is None or len(numbers) != (2 if parts[2] else 1):
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    as_of = EPOCH + numbers[0] * _MICROSECOND
    if not now - CURSOR_LASTS < as_of < now + CURSOR_LASTS:
        raise BadRequest("this cursor is too old: begin anew", code="expired_cursor")
    return Cursor(as_of, segment, numbers[1] if parts[2] else None)


class Found(NamedTuple):
    """Lines, and where to go on looking, if there may be more: `lines` may be empty all the same. `incomplete`: object
    storage has lost some that were to be looked at."""

    lines: list[dict[str, Any]]
    cursor: Cursor | RunCursor | None
    incomplete: bool


class _Hit(NamedTuple):
    ts: float
    run_id: str
    attempt: int
    job_id: str
    seq: int
    line: LogLine

    def document(self) -> dict[str, Any]:
        about = {"run_id": self.run_id, "job_id": self.job_id, "attempt": self.attempt}
        return about | shown(self.seq, self.line)


class Stores(NamedTuple):
    """Where there is something to be found: lines in objects, and whose they are in the database or the archive."""

    db: Database
    objects: ObjectStore
    parquet: Parquet


async def search(
    stores: Stores, tenant_id: int, wanted: Wanted, cursor: Cursor | RunCursor | None, limit: int
) -> Found:
    """The next lines that fit, `limit` at most."""
    searching = _Search(stores, tenant_id, wanted, limit)
    if wanted.run_id is not None:
        if isinstance(cursor, Cursor):
            raise BadRequest("this cursor is of another search", code="invalid_cursor")
        return await searching.through_run(wanted.run_id, cursor or RunCursor(0, 0))
    if isinstance(cursor, RunCursor):
        raise BadRequest("this cursor is of another search", code="invalid_cursor")
    return await searching.through_segments(cursor)


class _Search:
    def __init__(self, stores: Stores, tenant_id: int, wanted: Wanted, limit: int) -> None:
        self._db, self._objects, self._parquet = stores
        self._tenant_id, self._wanted, self._limit = tenant_id, wanted, limit
        self._words = wanted.words
        self._lines: list[dict[str, Any]] = []
        self._bytes = 0
        self._segments = 0
        self._incomplete = False

    def _found(self, cursor: Cursor | RunCursor | None) -> Found:
        return Found(self._lines, cursor, self._incomplete)

    async def through_segments(self, cursor: Cursor | None) -> Found:
        """All of the tenant's logs, newest segment first, each from its newest line on."""
        while True:
            batch = await self._next(cursor)
            directories = await asyncio.gather(*map(self._directory, batch))
            for row, directory in zip(batch, directories, strict=True):
                skip = cursor.skip or 0 if cursor is not None and cursor.segment == row["id"] else 0
                cursor = Cursor(row["as_of"], row["id"], None)
                self._segments += 1
                if directory is None or not directory[0].may_have(self._words):
                    continue
                hits = (await self._hits(row, directory[1]))[skip:]
                room = self._limit - len(self._lines)
                self._lines += [hit.document() for hit in hits[:room]]
                if len(hits) > room:
                    return self._found(cursor._replace(skip=skip + room))
                if len(hits) == room or self._bytes > _MOST_BYTES:
                    return self._found(cursor)
            if len(batch) < _AT_ONCE:
                return self._found(None)
            if self._segments >= _MOST_SEGMENTS:
                return self._found(cursor)

    async def _next(self, cursor: Cursor | None) -> Sequence[Row]:
        """The next segments; the one that the cursor stands in is the first of them, unless it is done."""
        wanted = self._wanted
        highest = _LAST_ID if wanted.to is None else lowest_id(wanted.to + _STRAY)
        lowest = lowest_id(EPOCH if wanted.from_ is None else max(EPOCH + _STRAY, wanted.from_) - _STRAY)
        place = (None, highest, False)
        if cursor is not None:
            place = (cursor.as_of, min(cursor.segment, highest), cursor.skip is not None)  # type: ignore[assignment]
        async with self._db.tenant(self._tenant_id, "search") as connection:
            return await connection.fetch(  # type: ignore[no-any-return]
                SQL["segments"], self._tenant_id, *place, lowest, wanted.from_, wanted.to, _AT_ONCE
            )

    async def _directory(self, row: Row) -> tuple[Filter, list[Frame]] | None:
        """What a segment has; None if that is lost."""
        try:
            return read_directory(await self._objects.get(row["object"], row["position"], row["bytes"]))
        except ObjectLost:
            self._incomplete = True
            return None

    async def _hits(self, row: Row, frames: Iterable[Frame]) -> list[_Hit]:
        """The lines of a segment that fit, newest first."""
        job_id, void = self._wanted.job_id, set(row["void"])
        own = [f for f in frames if f.position not in void and job_id in (None, f.job_id)]
        if not own:
            return []
        self._bytes += row["raw_bytes"]
        hits = await self._matches(row["object"], own)
        hits.sort(key=lambda hit: hit[:5], reverse=True)
        return await self._fitting(hits)

    async def _matches(self, name: str, frames: Sequence[Frame]) -> list[_Hit]:
        """The lines of these frames of an object that fit, as far as they tell; none if they are lost."""
        start, end = frames[0].position, frames[-1].position + frames[-1].bytes
        try:
            data = await self._objects.get(name, start, end - start)
            return await asyncio.to_thread(_matching, self._wanted, data, start, frames)
        except ObjectLost:
            self._incomplete = True
            return []

    async def through_run(self, run_id: str, place: RunCursor) -> Found:
        """The log of one run, oldest line first."""
        async with self._db.tenant(self._tenant_id, "search") as connection:
            rows = await connection.fetch(SQL["chunks"], self._tenant_id, run_id, *place, _AT_ONCE)
            segments = await unlisted.segments(connection, self._tenant_id, run_id)
        unnamed = await unlisted.places(self._objects, segments, run_id)
        self._incomplete = unnamed.lost
        old = [one for one in unnamed.found if (one.attempt, one.end) > place]
        chunks = unlisted.in_order([*old, *(unlisted.Place(*row) for row in rows)])
        more = len(chunks) >= _AT_ONCE
        for chunk in chunks[:_AT_ONCE]:
            where = chunk.first_line, chunk.lines, chunk.position, chunk.bytes
            frame = Frame(run_id, chunk.attempt, chunk.job_id, *where)
            after = place.seq if place.attempt == frame.attempt else 0
            found = await self._matches(chunk.object, [frame])
            hits = await self._fitting([hit for hit in found if hit.seq > after])
            room = self._limit - len(self._lines)
            self._lines += [hit.document() for hit in hits[:room]]
            if len(hits) >= room:
                return self._found(RunCursor(frame.attempt, hits[room - 1].seq))
            place = RunCursor(frame.attempt, max(after, frame.first_line + frame.lines))
        return self._found(place if more else None)

    async def _fitting(self, hits: list[_Hit]) -> list[_Hit]:
        """Those whose runs fit, too. Runs are looked up if something is to be known of them that does not lie with
        their lines: those may have expired before these."""
        wanted = self._wanted
        if not hits or (not (wanted.tag or wanted.error_class) and all(hit.job_id for hit in hits)):
            return [hit for hit in hits if wanted.job_id in (None, hit.job_id)]
        jobs = await self._jobs({(hit.run_id, hit.attempt) for hit in hits})
        return [hit._replace(job_id=jobs[hit.run_id, hit.attempt]) for hit in hits if (hit.run_id, hit.attempt) in jobs]

    async def _jobs(self, attempts: set[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """The jobs of those attempts that fit, be they in the database or, days later, in the archive."""
        wanted = self._wanted
        tag = msgspec.json.encode(wanted.tag).decode() if wanted.tag else None
        asked = (*columns(list(attempts), 2), wanted.error_class, tag, wanted.job_id)
        async with self._db.tenant(self._tenant_id, "search") as connection:
            rows = await connection.fetch(SQL["fitting"], self._tenant_id, *asked)
            # After them: what is archived in between is found twice, and not never.
            lost = attempts - {(row["run_id"], row["attempt"]) for row in rows}
            days = [cold.day_of(run_id) for run_id, _ in lost]
            found = await cold.files(connection, [self._tenant_id], min(days), max(days)) if days else []
        jobs = {(row["run_id"], row["attempt"]): row["job_id"] for row in rows if row["fits"]}
        for wave in cold.waves([archived for archived in found if archived.day in days]):
            given = (self._tenant_id, *columns(list(lost), 2), *asked[2:])
            rows = await cold.query(self._parquet, SQL["fitting_in_files"], wave, given)
            jobs |= {(row["run_id"], row["attempt"]): row["job_id"] for row in rows}
        return jobs


def _matching(wanted: Wanted, data: bytes, start: int, frames: Iterable[Frame]) -> list[_Hit]:
    """The lines of these frames that fit. `data` is what lies from `start` on."""
    hits = []
    for frame in frames:
        raw = inflate(data[frame.position - start : frame.position - start + frame.bytes])
        if not wanted.query.may_be_in(folded(raw)):
            continue
        for seq, line in enumerate(decode(raw), frame.first_line + 1):
            if wanted.has(line):
                hits.append(_Hit(line[0], frame.run_id, frame.attempt, frame.job_id, seq, line))
    return hits
