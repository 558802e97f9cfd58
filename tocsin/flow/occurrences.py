"""occurrences: what a job owed in a range of time, and what became of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import InvalidInput, NotFound
from tocsin.flow.shared import calendars
from tocsin.model.access import Identity
from tocsin.model.calendars import Calendar
from tocsin.model.ids import instant_of, lowest_id
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.occurrences import Owed, Piece, Place, Record, Told, tell
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, timetable
from tocsin.model.timetable import TICK, Never, Once, Timetable, within
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.wire import decode_job_spec

SQL = Sql(__file__)
MOST_VERSIONS = 1000
# Farther ahead nobody looks whether a schedule has come to the end of its `max_runs`.
MOST_COUNTED = 10_000
# How far the id of a row that began in time may lie from its instant: a minute, and a clock of ours.
_SLACK = timedelta(minutes=2)
# More than the occurrences there may be in that time.
_MORE = 300
_NOBODY = "00000000-0000-0000-0000-000000000000"


class Page(NamedTuple):
    """Some of what was owed, in order; and where to go on if there is more."""

    told: list[Told]
    more: Place | None


async def occurrences(
    db: Database, who: Identity, job_id: str, from_: datetime, to: datetime, place: Place | None, limit: int
) -> Page:
    """All that a job owes from `from_` on and before `to`, behind a place; work grows with what is answered."""
    async with db.tenant(who.tenant_id, "occurrences") as connection:
        await connection.execute(SQL["steady"])
        job = await connection.fetchrow(SQL["job"], who.tenant_id, job_id)
        if job is None:
            raise NotFound("there is no such job")
        _refuse_archived(await connection.fetchval(SQL["archived_until"]), from_, job["created_at"])
        known = await calendars.named_by(connection, who.tenant_id, _schedule(job))
        versions = await connection.fetch(SQL["versions"], who.tenant_id, job_id, MOST_VERSIONS)
        records = await _records(connection, (who.tenant_id, job_id), place or from_, to, limit + 1)
    start = place or Place(from_, _NOBODY, from_ - TICK)
    found = list(
        islice(tell(records, _owed(who, job_id, job, versions, known and known.calendar), start, to), limit + 1)
    )
    more = found[limit - 1][1] if len(found) > limit else None
    return Page([told for told, _ in found[:limit]], more)


def _refuse_archived(until: datetime | None, from_: datetime, created_at: datetime) -> None:
    """What became of occurrences that are archived is not looked up: to call them missing would be a lie."""
    if until is not None and from_ < until and created_at < until:
        raise InvalidInput.field("from", "archived", f"what is before {iso(until)} is archived; list its runs instead")


async def _records(
    connection: Connection, job: tuple[int, str], start: Place | datetime, to: datetime, most: int
) -> list[Record]:
    """The records behind a place, or from an instant on, in order: `most` of them at least, if there are so many."""
    first, id_ = (start, _NOBODY) if isinstance(start, datetime) else start[:2]
    ids = lowest_id(first - _SLACK), lowest_id(to + _SLACK)
    rows = await connection.fetch(SQL["records"], *job, first, id_, to, *ids, most, most + _MORE)
    by_id = [row["id"] for row in rows if row["by_id"]]
    if len(by_id) == most + _MORE:  # behind the last of them may be one that comes before it
        known_until = instant_of(max(by_id)) - _SLACK
        rows = [row for row in rows if row["first"] < known_until]
    if isinstance(start, datetime):
        rows += await connection.fetch(SQL["begun_before"], *job, start)
    return sorted((Record(*row[:8]) for row in rows), key=lambda record: (record.first, record.id))


def _owed(who: Identity, job_id: str, job: Row, versions: list[Row], calendar: Calendar | None) -> Owed:
    cursor = job["next_fire_at"] or job["held_at"]
    # When each schedule began to count, newest first: the present one, then those it had before.
    begun = [*(v["successor_after"] for v in versions), job["created_at"] - TICK]
    past = [
        Piece(_timetable(who, job_id, version), after, version["owed_until"])
        # Where we stopped looking, it is not known when the oldest one began.
        for version, after in list(zip(versions, begun[1:], strict=True))[: MOST_VERSIONS - 1]
        if version["anchor"] is not None and _recurs(decode_job_spec(version["spec"]))
    ]
    if job["once"]:  # told by its records alone: what it stands for may be the instant it was stored at
        return Owed(past[::-1], Never() if cursor is None else Once(cursor), cursor)
    coming = _as_many_as_left(_timetable(who, job_id, job, calendar), job, cursor)
    # What an earlier state of its calendar would have left is not known.
    since = max(begun[0], job["by_calendar_since"] or begun[0])
    stands = cursor or job["parked"]
    present = Piece(coming, since, job["ended_at"] if stands is None else stands - TICK)
    return Owed([*past[::-1], present], coming, cursor, None if job["held_at"] is None else job["now"])


def _as_many_as_left(table: Timetable, job: Row, cursor: datetime | None) -> Timetable:
    """Of what is to come, as much as `max_runs` allows if none of it is skipped."""
    schedule = _schedule(job)
    if schedule is None or schedule.max_runs is None or job["used"] is None or cursor is None:
        return table
    left = schedule.max_runs - job["used"]
    if left > MOST_COUNTED:
        return table
    last: datetime | None = cursor
    for _ in range(left - 1):
        last = last and table.next_after(last)
    return within(table, None, last)


def _recurs(spec: JobSpec) -> bool:
    """Whether a version's instants are known: those of a calendar that may have changed since are not."""
    return not spec.once and (spec.schedule is None or spec.schedule.calendar is None)


def _timetable(who: Identity, job_id: str, version: Row, calendar: Calendar | None = None) -> Timetable:
    return timetable(_schedule(version), version["anchor"], seed_of(who.tenant, version["name"], job_id), calendar)


def _schedule(version: Row) -> Schedule | None:
    return msgspec.json.decode(version["schedule"] or "null", type=Schedule | None, dec_hook=decode_scalar)
