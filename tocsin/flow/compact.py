"""compact: the small segments of a tenant's day become few large ones, with better compression and fewer rows; with
none when their runs leave the database.

Steps, each of which may be repeated after a crash: the new object is noted as garbage, written, and in one commit taken
into use, in the place of the segments that it was made of. Those, and their objects, go an hour later, when no search
that has begun before needs them. Whoever loses a race, or dies, leaves an object that is noted as garbage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, groupby
from typing import NamedTuple, TypeVar
from uuid import UUID

from tocsin.clock import EPOCH
from tocsin.errors import ObjectLost, Unavailable
from tocsin.flow.shared.segments import (
    COMPACTED,
    FOLDER,
    Frame,
    Part,
    Segment,
    compacted_folder,
    made_at,
    read_directory,
    unpack,
    write,
)
from tocsin.model.ids import instant_of, lowest_id, new_id
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore, each
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("compact")
T = TypeVar("T")
SETTLED = 120.0  # seconds
# Where a test may end it, in this order; beside before and after its commit.
POINTS = ("noted", "stored", "removed")

_FULL = 4 * 1024 * 1024  # bytes of lines in a segment
_MOST_FRAME = 1024 * 1024
_MOST_SEGMENTS = 512
_AT_ONCE = 16
_TENANTS = 500  # that one statement looks at
_FEW = 3  # that are named
_MOST_GARBAGE = 100
_STRAY = timedelta(hours=1)  # no shipment is under way for so long
_LEVEL = 9  # of compression: it is done once


class _Lost(Exception):
    """Somebody else has compacted the same, or taken something of it away."""


class _Lying(NamedTuple):
    """A frame and the object it lies in."""

    object: str
    frame: Frame

    @property
    def place(self) -> tuple[str, int, int, str, int]:
        frame = self.frame
        return frame.run_id, frame.attempt, frame.first_line, self.object, frame.position


async def tenants(db: Database) -> list[int]:
    """Who has something to compact."""
    return [row["id"] for row in await db.fetch("engine", SQL["tenants"], SETTLED)]


async def compact(db: Database, objects: ObjectStore, tenant_id: int) -> int:
    """Compact what a tenant has ready; answers how many segments were replaced."""
    last = str(UUID(int=0))
    while rows := await db.fetch("engine", SQL["loose"], tenant_id, SETTLED, last, _MOST_SEGMENTS):
        replaced, failed = 0, False
        for group in _groups(rows):
            try:
                replaced += await _Group(db, objects, tenant_id, group).compact()
            except Unavailable as problem:
                failed = True
                log.warning("segments of logs cannot be compacted", tenant_id=tenant_id, error=problem.detail)
        if replaced or failed:
            return replaced
        # What is lost stays where it is, however much: what comes behind it does not wait for that.
        last = rows[-1]["id"]
    return 0


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Segments of one day that fill one; fewer if they have waited for an hour."""
    for _, of_day in groupby(rows, key=lambda row: instant_of(row["id"]).date()):
        group: list[Row] = []
        for row in of_day:
            group.append(row)
            if sum(one["raw_bytes"] for one in group) >= _FULL:
                yield group
                group = []
        if group and (group[-1]["ripe"] or len(rows) == _MOST_SEGMENTS):
            yield group


class _Group:
    """Segments on their way to be one."""

    def __init__(self, db: Database, objects: ObjectStore, tenant_id: int, rows: Sequence[Row]) -> None:
        self._db, self._objects, self._tenant_id, self._rows = db, objects, tenant_id, rows
        self._lost: set[str] = set()  # objects; they lie as they are, for somebody may bring them back
        # As new as the newest of them, so that searches find it in its place.
        newest = instant_of(rows[-1]["id"])
        self._id = new_id(newest)
        self._object = f"{compacted_folder(tenant_id)}{newest:%Y-%m-%d}/{self._id}.zst"

    async def compact(self) -> int:
        """How many were replaced: those that can be read."""
        frames = await self._living([lying for part in await self._read_directories() for lying in part])
        read = [part for some in _batches(frames) for part in await self._read(some)]
        frames = [lying for lying in frames if lying.object not in self._lost]
        self._rows = [row for row in self._rows if row["object"] not in self._lost]
        if self._lost:
            log.warning("segments of logs are lost", tenant_id=self._tenant_id, objects=sorted(self._lost)[:_FEW])
        if not self._rows:
            return 0
        parts = [part for name, part in read if name not in self._lost]
        body, segments = await asyncio.to_thread(write, _merged(parts), _LEVEL)
        await self._db.fetch("engine", SQL["note"], self._object)
        await _pass(self._db, "noted")
        if segments:
            await self._objects.put(self._object, body, durable=True)
        await _pass(self._db, "stored")
        try:
            async with self._db.transaction("compact") as connection:
                await self._replace(connection, frames, segments)
        except _Lost:
            return 0
        return len(self._rows)

    async def _read_directories(self) -> list[list[_Lying]]:
        async def read(row: Row) -> list[_Lying]:
            try:
                _, frames = read_directory(await self._objects.get(row["object"], row["position"], row["bytes"]))
            except ObjectLost:
                self._lost.add(row["object"])
                return []
            return [_Lying(row["object"], frame) for frame in frames if frame.position not in row["void"]]

        return [lying for some in _batches(self._rows) for lying in await asyncio.gather(*map(read, some))]

    async def _living(self, frames: list[_Lying]) -> list[_Lying]:
        """Those that are the place of lines still."""
        rows = await self._db.fetch(
            "engine", SQL["living"], self._tenant_id, *columns([lying.place for lying in frames], 5)
        )
        return [frames[row["n"] - 1] for row in rows]

    async def _read(self, frames: Iterable[_Lying]) -> list[tuple[str, Part]]:
        """Their lines, each with the object they lie in."""

        async def read(lying: _Lying) -> list[tuple[str, Part]]:
            f = lying.frame
            try:
                lines = unpack(await self._objects.get(lying.object, f.position, f.bytes))
            except ObjectLost:
                self._lost.add(lying.object)
                return []
            part = Part(self._tenant_id, f.run_id, f.attempt, f.job_id, f.first_line, f.lines, lines)
            return [(lying.object, part)]

        return list(chain.from_iterable(await asyncio.gather(*map(read, frames))))

    async def _replace(self, connection: Connection, frames: list[_Lying], segments: list[Segment]) -> None:
        """All at once, or nothing."""
        if not await connection.fetch(SQL["use"], self._object):
            raise _Lost
        gone = await connection.fetch(SQL["replace"], self._tenant_id, [row["id"] for row in self._rows])
        places = columns([lying.place for lying in frames], 5)
        taken = await connection.fetch(SQL["take_out"], self._tenant_id, *places)
        if len(gone) < len(self._rows) or len(taken) < len(frames):
            raise _Lost
        for segment in segments:
            new = [(f.run_id, f.attempt, f.first_line, f.lines, f.position, f.bytes) for f in segment.frames]
            await connection.execute(SQL["put_in"], self._tenant_id, self._object, *columns(new, 6))
            await connection.execute(SQL["add"], self._tenant_id, self._id, self._object, *segment[1:8])
        await connection.execute(SQL["leave"], [row["object"] for row in gone])


async def _pass(db: Database, point: str) -> None:
    """One of `POINTS`."""
    await db.failpoints.hit(f"compact.{point}")


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


def _merged(parts: list[Part]) -> Iterator[Part]:
    """Lines of an attempt that follow each other, together; those behind which some were cut off stay apart, because a
    line is counted by its place."""
    parts.sort(key=lambda part: (part.run_id, part.attempt, part.first_line))
    whole: Part | None = None
    size = 0
    for part in parts:
        if whole is not None and size < _MOST_FRAME and _follows(whole, part):
            whole.lines.extend(part.lines)
            whole = whole._replace(counted=whole.counted + part.counted)
        else:
            if whole is not None:
                yield whole
            whole, size = part, 0
        size += sum(len(line[3]) for line in part.lines)
    if whole is not None:
        yield whole


def _follows(whole: Part, part: Part) -> bool:
    same = (whole.run_id, whole.attempt) == (part.run_id, part.attempt)
    return same and len(whole.lines) == whole.counted and whole.first_line + whole.counted == part.first_line


async def clean(db: Database, objects: ObjectStore) -> int:
    """Remove some objects that are due. Return how many. Objects with segments that are not replaced stay. If an object
    cannot be removed, the others are removed first, then this raises; a later turn tries again."""
    due = [row for row in await db.fetch("engine", SQL["due"], _MOST_GARBAGE) if not row["needed"]]

    async def remove(row: Row) -> None:
        await objects.delete(row["object"])
        await _pass(db, "removed")
        await db.fetch("engine", SQL["forget"], row["object"], row["due_at"])

    await each(remove, due)
    return len(due)


async def sweep(db: Database, objects: ObjectStore) -> int:
    """Remove loose objects that nothing names, an hour after they were made: whoever shipped their lines has died, or
    lost the database, before it could say that they are there, and the worker has shipped them once more. Answers how
    many."""
    before, gone = db.clock.now() - _STRAY, 0
    for folder in await objects.folders(FOLDER):
        if folder == COMPACTED:
            continue
        async for keys in objects.pages(folder):
            made = [(key, at) for key in keys if (at := made_at(key)) is not None and at < before]
            strays = await db.fetch("engine", SQL["unnamed"], *columns(made, 2))
            await each(objects.delete, [row["object"] for row in strays])
            gone += len(strays)
    return gone


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def unlist(db: Database, objects: ObjectStore, hot_days: int) -> int:
    """Let the rows of lines go that are older than runs stay in the database, `hot_days` unless a tenant says otherwise
    (0: for ever): their segment's directory tells where they lie. Answers of how many segments."""
    now = await db.read_clock()
    kept = await db.fetch("engine", SQL["hot_days"], hot_days)
    oldest = [(row["id"], lowest_id(max(EPOCH, now - timedelta(days=row["days"])))) for row in kept]
    done = 0
    for start in range(0, len(oldest), _TENANTS):
        wave = oldest[start : start + _TENANTS]
        for tenant_id, first in await db.fetch("engine", SQL["with_listed"], *columns(wave, 2)):
            done += await _unlist_all(db, objects, tenant_id, first)
    return done


async def _unlist_all(db: Database, objects: ObjectStore, tenant_id: int, first: str) -> int:
    """Unlist all segments of one tenant that are older than `first`. Return how many."""
    done, last = 0, str(UUID(int=0))
    while rows := await db.fetch("engine", SQL["listed"], tenant_id, first, last, _MOST_SEGMENTS):
        for row in rows:
            try:
                done += await _unlist(db, objects, row)
            except Unavailable as problem:
                # A segment that cannot be read does not delay the others.
                log.warning("a segment of logs cannot be read", object=row["object"], error=problem.detail)
        last = rows[-1]["id"]
    return done


async def _unlist(db: Database, objects: ObjectStore, row: Row) -> bool:
    tenant_id = row["tenant_id"]
    _, frames = read_directory(await objects.get(row["object"], row["position"], row["bytes"]))
    runs = sorted({frame.run_id for frame in frames})
    places = columns([_Lying(row["object"], frame).place for frame in frames], 5)
    try:
        async with db.transaction("compact") as connection:
            if not await connection.fetch(SQL["unlist"], tenant_id, row["id"], runs[0], runs[-1], runs):
                return False
            if len(await connection.fetch(SQL["take_out"], tenant_id, *places)) < len(frames):
                raise _Lost
    except _Lost:
        log.error("a segment of logs has lines that the database does not know", object=row["object"])
        return False
    return True
