"""logs: lines go to object storage, one compressed object per shipment; the database keeps where they lie."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tocsin.errors import Conflict, Contention, ObjectLost, Unavailable
from tocsin.flow.shared import unlisted
from tocsin.flow.shared.segments import Part, loose_object, made_at, shown, unpack, write
from tocsin.flow.shared.unlisted import Place
from tocsin.model.ids import new_id, parse_id
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import LOG_LINES_CUT
from tocsin.wire import LogChunk, LogLine

SQL = Sql(__file__)
_MOST_LINE, _MOST_NAME = 65_536, 16  # characters of a text; of a stream and a level
_MOST_CHUNKS = 64
_MOST_ROUNDS = 3
_MOST_PROBES = 100_000  # look-ups of late chunks that do not name their tenant, in one shipment
_LITTLE, _PER_LINE = 16 * 1024, 32  # characters that compress in about a millisecond, and the extra cost of each line
_LOOKS_AT_ONCE = 16
_MOST_READ = 262_144  # characters in one answer
# One thread: more would only take the interpreter, and its words out of the processor's cache, from each other.
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="tocsin-logs")
_SOME_LOST = "[tocsin: object storage has lost lines of that time: some of this run may be among them]"


class _Fresh(NamedTuple):
    """The lines of an attempt that are not stored yet, and how many come before them."""

    tenant_id: int
    job_id: str
    run_id: str
    attempt: int
    first_line: int
    lines: list[LogLine]
    room: int | None  # bytes that the tenant may still log today, as it was before this shipment


async def ship(db: Database, objects: ObjectStore, worker_id: str, chunks: list[LogChunk]) -> None:
    """Store lines. A repeat is harmless; a gap or a stale fence is a 409 that names the run and changes nothing."""
    for chunk in chunks:
        if parse_id(chunk.run_id) is None or not (0 <= chunk.attempt < 2**31 and 0 <= chunk.fence < 2**63):
            raise _superseded(chunk)
    for _ in range(_MOST_ROUNDS):
        fresh = _fresh(chunks, await _stored(db, worker_id, chunks))
        if not fresh or await _store(db, objects, fresh):
            return
    raise Contention("the same lines are being stored by others: ship them again")


async def _store(db: Database, objects: ObjectStore, fresh: list[_Fresh]) -> bool:
    """Whether all of it is stored. Where an earlier shipment of the same lines, given up by its worker but not by its
    server, came first, nothing is: it may have had fewer of them, and what it lacked is still to be stored."""
    id_ = new_id(db.clock.now())
    key = loose_object(fresh[0].run_id, id_)
    used: Counter[int] = Counter()
    parts = list(_parts(fresh, used))
    if sum(len(line[3]) + _PER_LINE for part in parts for line in part.lines) <= _LITTLE:
        body, segments = write(parts)
    else:  # it takes a while
        body, segments = await asyncio.get_running_loop().run_in_executor(_WRITER, write, parts)
    # The worker lets go of what was acknowledged: a power cut must not take it.
    await objects.put(key, body, durable=True)
    frames = [
        (segment.tenant_id, frame.run_id, frame.attempt, frame.first_line, frame.lines, frame.position, frame.bytes)
        for segment in segments
        for frame in segment.frames
    ]
    own = [segment[:8] for segment in segments]
    rows = await db.fetch("engine", SQL["add"], key, id_, *columns(frames, 7), *columns(own, 8))
    added = {(row["run_id"], row["attempt"]) for row in rows}
    for part in parts:
        if part.tenant_id in used and (part.run_id, part.attempt) not in added:
            used[part.tenant_id] -= _bytes(part.lines)
    if used:
        # After the lines: who dies in between has logged for nothing, which is better than to have paid for nothing.
        await db.fetch("engine", SQL["use"], *columns(list(used.items()), 2))
    return len(added) == len(parts)


async def _stored(db: Database, worker_id: str, chunks: list[LogChunk]) -> dict[int, Row]:
    """What there is of each chunk's log already, by the chunk's place; those that are not the worker's are missing."""
    stored: dict[int, Row] = {}

    async def find(sql: str, wanted: Sequence[int], width: int, *more: Any) -> None:
        missing = [i for i in wanted if i not in stored]
        if missing:
            keys = columns([_lookup(chunks[i]) for i in missing], 4)[:width]
            for row in await db.fetch("engine", sql, worker_id, *keys, *more):
                stored[missing[row["n"] - 1]] = row

    await find(SQL["held"], range(len(chunks)), 3)
    await find(SQL["late"], [i for i, chunk in enumerate(chunks) if chunk.tenant], 4)
    await find(SQL["late_anywhere"], [i for i, chunk in enumerate(chunks) if not chunk.tenant], 3, _MOST_PROBES)
    return stored


def _lookup(chunk: LogChunk) -> tuple[str, int, int, int]:
    tenant = chunk.tenant if 0 <= chunk.tenant < 2**31 else -1  # not a tenant's number: matches nothing
    return chunk.run_id, chunk.attempt, chunk.fence, tenant


def _fresh(chunks: list[LogChunk], held: dict[int, Row]) -> list[_Fresh]:
    """What is new, one piece of each attempt's log, so that it is stored or not: a chunk may go on where the one before
    it in the same shipment ends."""
    fresh: dict[tuple[str, int], _Fresh] = {}
    for i, chunk in enumerate(chunks):
        if i not in held:
            raise _superseded(chunk)
        row = held[i]
        key = row["run_id"], chunk.attempt
        piece = fresh.setdefault(key, _Fresh(row["tenant_id"], row["job_id"], *key, row["lines"], [], row["room"]))
        have = piece.first_line + len(piece.lines)
        if chunk.offset > have:
            raise Conflict(
                f"lines {have} to {chunk.offset - 1} are missing",
                code="log_gap",
                extra={"run_id": chunk.run_id, "attempt": chunk.attempt, "expected_offset": have},
            )
        piece.lines.extend(chunk.lines[have - chunk.offset :])
    return [piece for piece in fresh.values() if piece.lines]


def _superseded(chunk: LogChunk) -> Conflict:
    about = {"run_id": chunk.run_id, "attempt": chunk.attempt}
    return Conflict("this attempt is over or belongs to another worker", code="superseded", extra=about)


def _parts(fresh: list[_Fresh], used: Counter[int]) -> Iterator[Part]:
    for tenant_id, job_id, run_id, attempt, first_line, new, room in fresh:
        lines = _cut(new)
        if room is not None:
            lines = _within(lines, room - used[tenant_id])
            used[tenant_id] += _bytes(lines)
        # All lines are counted, those too that were cut: the worker goes on behind them.
        yield Part(tenant_id, run_id, attempt, job_id, first_line, len(new), lines)


def _cut(lines: list[LogLine]) -> list[LogLine]:
    """Lines of bounded length; a copy only of those that need it."""
    names = {line[1] for line in lines} | {line[2] for line in lines}
    if max(map(len, names)) <= _MOST_NAME and max(map(len, [line[3] for line in lines])) <= _MOST_LINE:
        return lines
    return [(ts, stream[:_MOST_NAME], level[:_MOST_NAME], text[:_MOST_LINE]) for ts, stream, level, text in lines]


def _bytes(lines: list[LogLine]) -> int:
    return sum(len(line[3].encode()) for line in lines)


def _within(lines: list[LogLine], room: int) -> list[LogLine]:
    """As many lines as fit into so many bytes; a line in their place says how many do not."""
    for kept, (ts, _, _, text) in enumerate(lines):
        room -= len(text.encode())
        if room < 0:
            cut = len(lines) - kept
            LOG_LINES_CUT.inc(cut)
            return [*lines[:kept], (ts, "system", "warning", f"{cut} lines left out: log_bytes_per_day is used up")]
    return lines


class Lines(NamedTuple):
    """Lines of an attempt, oldest first, and the seq of the last one that was looked at."""

    attempt: int
    items: list[dict[str, Any]]
    upto: int
    more: bool  # there may be more now


async def read(
    db: Database,
    objects: ObjectStore,
    tenant_id: int,
    run_id: str,
    attempt: int | None,
    stream: str | None,
    after: int,
    limit: int,
) -> Lines:
    """Lines with seq > `after`, of the latest attempt that has any unless one is named: `limit` of them, or fewer if
    they are long."""
    async with db.tenant(tenant_id, "logs") as connection:
        last = attempt or await connection.fetchval(SQL["last_attempt"], tenant_id, run_id) or 1
        rows = await connection.fetch(SQL["chunks"], tenant_id, run_id, last, after, _MOST_CHUNKS)
        segments = await unlisted.segments(connection, tenant_id, run_id)
    old = await unlisted.places(objects, segments, run_id)
    places = [*old.found, *(Place(*row) for row in rows)]
    attempt = attempt or max((place.attempt for place in places), default=last)
    chunks = unlisted.in_order(place for place in places if place.attempt == attempt and place.end > after)
    more = len(chunks) >= _MOST_CHUNKS
    items = [_notice(0, 0.0, _SOME_LOST)] if old.lost and after == 0 else []
    size = 0
    for chunk in chunks[:_MOST_CHUNKS]:
        try:
            lines = unpack(await objects.get(chunk.object, chunk.position, chunk.bytes))
        except ObjectLost:
            items.append(_lost(chunk, after))
            lines = []
        for seq, line in enumerate(lines, chunk.first_line + 1):
            if seq > after and stream in (None, line[1]):
                items.append(shown(seq, line))
                size += len(line[3])
                if len(items) >= limit or size > _MOST_READ:
                    return Lines(attempt, items, seq, True)
        after = max(after, chunk.end)
        if len(items) >= limit:
            return Lines(attempt, items, after, True)
    return Lines(attempt, items, after, more)


def _lost(chunk: Place, after: int) -> dict[str, Any]:
    """A line in the place of those that nobody can read any more. It keeps back none of the others."""
    made = made_at(chunk.object)
    count = chunk.end - max(after, chunk.first_line)
    text = f"[tocsin: {count} lines cannot be read: object storage has lost them]"
    return _notice(chunk.end, 0.0 if made is None else made.timestamp(), text)


def _notice(seq: int, ts: float, text: str) -> dict[str, Any]:
    return shown(seq, (ts, "system", "warning", text))


class Watched(NamedTuple):
    """Of a run: its newest attempt, its state if it has ended, and where its log ends (attempt, lines)."""

    attempt: int
    ended: str | None
    last: tuple[int, int]


async def look(db: Database, objects: ObjectStore, runs: Sequence[tuple[int, str]]) -> list[Watched | None]:
    """Return the state of these runs (tenant, id) and their logs at one moment; None if storage refuses to answer."""
    rows = await db.fetch("engine", SQL["look"], *columns(runs, 2))
    found = [Watched(row["attempt"], row["ended"], (row["log_attempt"], row["lines"])) for row in rows]
    some = asyncio.Semaphore(_LOOKS_AT_ONCE)

    async def complete(run: tuple[int, str], watched: Watched) -> Watched | None:
        try:
            async with some:
                return await _with_unlisted(db, objects, *run, watched)
        except Unavailable:
            return None

    ended = [i for i, watched in enumerate(found) if watched.ended is not None]
    looked = await asyncio.gather(*(complete(runs[i], found[i]) for i in ended))
    completed = dict(zip(ended, looked, strict=True))
    return [completed.get(i, watched) for i, watched in enumerate(found)]


async def _with_unlisted(db: Database, objects: ObjectStore, tenant_id: int, run_id: str, watched: Watched) -> Watched:
    async with db.tenant(tenant_id, "logs") as connection:
        segments = await unlisted.segments(connection, tenant_id, run_id)
    places = await unlisted.places(objects, segments, run_id)
    last = max([watched.last, *((place.attempt, place.end) for place in places.found)])
    return watched._replace(attempt=max(watched.attempt, last[0]), last=last)
