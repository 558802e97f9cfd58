"""plan: turn cursors that fall due within the horizon into staged runs, and move the cursors, in one transaction.

The planner only stages. Overlap, limits and pause are decided when a run becomes due; misfires (occurrences it
reaches more than a minute late) are decided here, by the pure rule of `model.schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tocsin.flow.shared import calendars
from tocsin.flow.shared.calendars import CalendarKey, Known
from tocsin.flow.shared.transitions import Hint, Key, Missed, NewRun, counted, hints, note_missed, stage
from tocsin.model.ids import new_id, new_ids
from tocsin.model.job import Schedule
from tocsin.model.misfire import Planned, misfire
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, spread, timetable
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.telemetry import MISSED, PLANNED

SQL = Sql(__file__)
BATCH = 1000


class PlanResult(NamedTuple):
    """What one turn did: cursors moved, where runs were staged, and whether more cursors wait."""

    cursors: int
    hints: list[Hint]
    more: bool


@lru_cache(maxsize=20_000)
def _schedule(text: str) -> Schedule:
    return msgspec.json.decode(text, type=Schedule, dec_hook=decode_scalar)


async def plan(db: Database, horizon: timedelta) -> PlanResult:
    """One turn of the planner."""
    async with db.transaction("plan") as connection:
        rows = await connection.fetch(SQL["due"], horizon, BATCH)
        if not rows:
            return PlanResult(0, [], False)
        until = rows[0]["now"] + horizon
        known = await calendars.read(connection, map(_calendar, rows))
        there = {None, *known}
        planned = [(row, _owed(row, until, known)) for row in rows if _calendar(row) in there]
        moved = await _advance(connection, planned)
        kept = [(row, owed) for row, owed in planned if row["job_id"] in moved]
        staged = await stage(connection, [run for row, owed in kept for run in _runs(row, owed)])
        missed = [m for row, owed in kept for m in _missed(row, owed)]
        await note_missed(connection, missed)
        await _complete_missed(connection, kept)
    PLANNED.inc(len(staged))
    for m in missed:
        MISSED.labels(m.reason).inc(m.how_many)
    return PlanResult(len(kept), hints(staged), len(rows) == BATCH)


def _calendar(row: Row) -> CalendarKey | None:
    return calendars.key_of(row["tenant_id"], _schedule(row["schedule"]))


def _owed(row: Row, until: datetime, known: Mapping[CalendarKey, Known]) -> Planned:
    schedule, key = _schedule(row["schedule"]), _calendar(row)
    table = timetable(schedule, row["anchor"], _seed(row), None if key is None else known[key].calendar)
    return misfire(schedule, table, row["next_fire_at"], row["now"], until)


def _seed(row: Row) -> str:
    return seed_of(row["tenant"], row["name"], row["job_id"])


async def _advance(connection: Connection, planned: list[tuple[Row, Planned]]) -> set[str]:
    moves = [
        (row["place"], row["job_place"], row["job_id"], row["next_fire_at"], owed.cursor, row["version"])
        for row, owed in planned
    ]
    return {row["job_id"] for row in await connection.fetch(SQL["advance"], *columns(moves, 6))}


async def _complete_missed(connection: Connection, kept: list[tuple[Row, Planned]]) -> None:
    """A one-time job whose only occurrence was missed for good has ended with it."""
    over = [(row["tenant_id"], row["job_id"]) for row, owed in kept if owed.cursor is None and not owed.stage]
    if over:
        await connection.execute(SQL["complete_missed"], *columns(over, 2))


def _runs(row: Row, owed: Planned) -> list[NewRun]:
    # The id carries the instant the run stands for, so that "earlier" by id is earlier by schedule, too; those of
    # instants that are past rise in their order.
    later = spread(_schedule(row["schedule"]), _seed(row))
    past = sum(at <= row["now"] for at in owed.stage)
    ids = new_ids(row["now"], past) + [new_id(at) for at in owed.stage[past:]]
    return [
        NewRun(row["tenant_id"], id_, row["job_id"], "schedule", at, ready_at=at + later)
        for id_, at in zip(ids, owed.stage, strict=True)
    ]


def _missed(row: Row, owed: Planned) -> list[Missed]:
    return counted(Key(row["tenant_id"], row["job_id"]), row["now"], owed.missed)


async def next_due(db: Database) -> datetime | None:
    """The earliest cursor: when the planner has something to do at the latest."""
    return await db.fetchval("engine", SQL["next_due"])  # type: ignore[no-any-return]
