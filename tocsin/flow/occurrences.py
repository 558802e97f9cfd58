"""occurrences: what a job owed in a range of time, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

import msgspec

from tocsin.errors import NotFound
from tocsin.flow.shared import calendars, cold
from tocsin.model.access import Identity
from tocsin.model.calendars import Calendar
from tocsin.model.ids import instant_of, lowest_id
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.occurrences import Owed, Piece, Place, Record, Told, tell
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, timetable
from tocsin.model.timetable import TICK, Never, Once, Timetable, within
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.parquet import Parquet
from tocsin.wire import decode_job_spec

SQL = Sql(__file__, cold.SQL)
MOST_VERSIONS = 1000
# Farther ahead nobody looks whether a schedule has come to the end of its `max_runs`.
MOST_COUNTED = 10_000
# How far the id of a row that began in time may lie from its instant: a minute, and a clock of ours.
_SLACK = timedelta(minutes=2)
# More than the occurrences there may be in that time.
_MORE = 300
_NOBODY = "00000000-0000-0000-0000-000000000000"
_COLUMNS = ("id", "first", "last", "count", "state", "reason", "live", "started")  # of a record, in order


class Page(NamedTuple):
    """Some of what was owed, in order; and where to go on if there is more."""

    told: list[Told]
    more: Place | None


class Asked(NamedTuple):
    """What a job owes from one instant on and before another, behind a place if there is one; how much of it."""

    job_id: str
    from_: datetime
    to: datetime
    place: Place | None
    limit: int

    @property
    def start(self) -> tuple[datetime, str]:
        """Records come after this one."""
        return (self.from_, _NOBODY) if self.place is None else self.place[:2]


async def occurrences(db: Database, parquet: Parquet, who: Identity, asked: Asked, runs_days: int) -> Page:
    """Some of it; work grows with what is answered. `runs_days`: how long runs are kept unless the tenant says."""
    kept_since = await cold.kept_since(db, who.tenant_id, runs_days)
    async with db.tenant(who.tenant_id, "occurrences") as connection:
        await connection.execute(SQL["steady"])
        job = await connection.fetchrow(SQL["job"], who.tenant_id, asked.job_id)
        if job is None:
            raise NotFound("there is no such job")
        cold.refuse_expired(kept_since, asked.from_, job["created_at"])
        known = await calendars.named_by(connection, who.tenant_id, _schedule(job))
        versions = await connection.fetch(SQL["versions"], who.tenant_id, asked.job_id, MOST_VERSIONS)
        hot = await _records(connection, who.tenant_id, asked)
        # No id is older than the instants it stands for; it may be much younger.
        first = max(asked.start[0] - _SLACK, job["created_at"]).date()
        files = await cold.files(connection, [who.tenant_id], first, cold.LAST_DAY)
    records = hot if not files else await _and_archived(parquet, who.tenant_id, asked, files, hot)
    start = asked.place or Place(asked.from_, _NOBODY, asked.from_ - TICK)
    owed = _owed(who, asked.job_id, job, versions, known and known.calendar)
    found = list(islice(tell(records, owed, start, asked.to), asked.limit + 1))
    more = found[asked.limit - 1][1] if len(found) > asked.limit else None
    return Page([told for told, _ in found[: asked.limit]], more)


async def _records(connection: Connection, tenant_id: int, asked: Asked) -> list[Record]:
    """The records behind a place, or from an instant on, in order: a page of them at least, if there are so many."""
    job, most = (tenant_id, asked.job_id), asked.limit + 1
    ids = lowest_id(asked.start[0] - _SLACK), lowest_id(asked.to + _SLACK)
    rows = await connection.fetch(SQL["records"], *job, *asked.start, asked.to, *ids, most, most + _MORE)
    by_id = [row["id"] for row in rows if row["by_id"]]
    if len(by_id) == most + _MORE:  # behind the last of them may be one that comes before it
        known_until = instant_of(max(by_id)) - _SLACK
        rows = [row for row in rows if row["first"] < known_until]
    if asked.place is None:
        rows += await connection.fetch(SQL["begun_before"], *job, asked.from_)
    return _in_order(rows)


async def _and_archived(
    parquet: Parquet, tenant_id: int, asked: Asked, files: list[cold.Archived], hot: list[Record]
) -> list[Record]:
    """The same with those in files; of a day that is on its way there, some are in both."""
    first, id_ = asked.start
    given = {
        "tenant": tenant_id,
        "job": asked.job_id,
        "first": first.astimezone(UTC).replace(tzinfo=None),
        "id": id_,
        "before": asked.to.astimezone(UTC).replace(tzinfo=None),
        "afresh": asked.place is None,
        "most": asked.limit + 1,
    }
    archived = _in_order(await cold.query(parquet, SQL["records_in_files"], files, given))
    return _sorted({record.id: record for record in (*archived, *hot)}.values())


def _in_order(rows: Iterable[Row]) -> list[Record]:
    return _sorted(Record(*(row[name] for name in _COLUMNS)) for row in rows)


def _sorted(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: (record.first, record.id))


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
