"""plan: turn cursors that fall due within the horizon into staged runs, and move the cursors, in one transaction.

The planner only stages. Overlap, limits and pause are decided when a run becomes due; misfires (occurrences it
reaches more than a minute late) are decided here, by the pure rule of `model.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tocsin.flow.shared import calendars, triggers
from tocsin.flow.shared.calendars import CalendarKey, Known
from tocsin.flow.shared.transitions import Hint, Key, NewRun, counted, hints, note_missed, stage
from tocsin.flow.shared.triggers import Count, Spent
from tocsin.model.ids import new_id, new_ids
from tocsin.model.job import Schedule
from tocsin.model.misfire import Planned, capped, misfire
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, spread, timetable
from tocsin.model.zones import is_newer
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.telemetry import MISSED, PLANNED, SCHEDULES_STUCK

SQL = Sql(__file__)
BATCH = 1000


class _Turn(NamedTuple):
    """A cursor, what becomes of what it owes, and where it is parked if the schedule may have no more."""

    row: Row
    owed: Planned
    parked: datetime | None

    @property
    def key(self) -> Key:
        return _key(self.row)

    @property
    def cursor(self) -> datetime | None:
        return None if self.parked is not None else self.owed.cursor


class PlanResult(NamedTuple):
    """What one turn did: cursors moved, where runs were staged, and whether more cursors wait."""

    cursors: int
    hints: list[Hint]
    more: bool


@lru_cache(maxsize=20_000)
def _schedule(text: str) -> Schedule:
    return msgspec.json.decode(text, type=Schedule, dec_hook=decode_scalar)


async def measure(db: Database) -> None:
    """Set the gauge of schedules that nobody plans."""
    SCHEDULES_STUCK.set(await db.fetchval("engine", SQL["stuck"]))


async def plan(db: Database, horizon: timedelta) -> PlanResult:
    """One turn of the planner."""
    async with db.transaction("plan") as connection:
        rows = await connection.fetch(SQL["due"], horizon, BATCH)
        if not rows:
            return PlanResult(0, [], False)
        turns = await _turns(connection, rows, rows[0]["now"] + horizon)
        moved = await _advance(connection, turns)
        kept = [turn for turn in turns if turn.row["job_id"] in moved]
        staged = await stage(connection, [run for turn in kept for run in _runs(turn)])
        missed = [m for turn in kept for m in counted(turn.key, turn.row["now"], turn.owed.missed)]
        await note_missed(connection, missed)
        await triggers.use(
            connection, [Spent(*t.key, len(t.owed.stage), t.parked) for t in kept if _most(t.row) is not None]
        )
        await _complete_missed(connection, kept)
    PLANNED.inc(len(staged))
    for m in missed:
        MISSED.labels(m.reason).inc(m.how_many)
    return PlanResult(len(kept), hints(staged), len(rows) == BATCH)


async def _turns(connection: Connection, rows: Iterable[Row], until: datetime) -> list[_Turn]:
    """What to do with each cursor; those that only a node with newer rules of their zone can read are left to it."""
    ours = [row for row in rows if row["zone_rules"] is None or not is_newer(row["zone_rules"])]
    known = await calendars.read(connection, map(_calendar, ours))
    there = {None, *known}
    counts = await triggers.read_counts(connection, [_key(row) for row in ours if _most(row) is not None])
    return [_turn(row, until, known, counts) for row in ours if _calendar(row) in there]


def _turn(row: Row, until: datetime, known: Mapping[CalendarKey, Known], counts: Mapping[Key, Count]) -> _Turn:
    schedule, key = _schedule(row["schedule"]), _calendar(row)
    table = timetable(schedule, row["anchor"], _seed(row), None if key is None else known[key].calendar)
    owed = misfire(schedule, table, row["next_fire_at"], row["now"], until)
    # No count: an edit has taken it away since `due` read the schedule, and `advance` will notice.
    count = counts.get(_key(row)) if schedule.max_runs is not None else None
    if schedule.max_runs is None or count is None:
        return _Turn(row, owed, None)
    left = count.left(schedule.max_runs)
    owed = capped(owed, left)
    return _Turn(row, owed, owed.cursor if len(owed.stage) == left else None)


def _key(row: Row) -> Key:
    return Key(row["tenant_id"], row["job_id"])


def _calendar(row: Row) -> CalendarKey | None:
    return calendars.key_of(row["tenant_id"], _schedule(row["schedule"]))


def _most(row: Row) -> int | None:
    return _schedule(row["schedule"]).max_runs


def _seed(row: Row) -> str:
    return seed_of(row["tenant"], row["name"], row["job_id"])


async def _advance(connection: Connection, turns: list[_Turn]) -> set[str]:
    moves = [
        (row["place"], row["job_place"], row["job_id"], row["next_fire_at"], turn.cursor, row["version"])
        for turn in turns
        for row in [turn.row]
    ]
    return {row["job_id"] for row in await connection.fetch(SQL["advance"], *columns(moves, 6))}


async def _complete_missed(connection: Connection, kept: list[_Turn]) -> None:
    """A one-time job whose only occurrence was missed for good has ended with it."""
    over = [turn.key for turn in kept if turn.owed.cursor is None and not turn.owed.stage]
    if over:
        await connection.execute(SQL["complete_missed"], *columns(over, 2))


def _runs(turn: _Turn) -> list[NewRun]:
    # The id carries the instant the run stands for, so that "earlier" by id is earlier by schedule, too; those of
    # instants that are past rise in their order.
    row, instants = turn.row, turn.owed.stage
    later = spread(_schedule(row["schedule"]), _seed(row))
    past = sum(at <= row["now"] for at in instants)
    ids = new_ids(row["now"], past) + [new_id(at) for at in instants[past:]]
    return [
        NewRun(row["tenant_id"], id_, row["job_id"], "schedule", at, ready_at=at + later)
        for id_, at in zip(ids, instants, strict=True)
    ]


async def take_back(db: Database) -> None:
    """Give places of occurrences that ended unclaimed back to their schedules (`max_runs`); parked ones go on."""
    if not await db.fetchval("engine", SQL["any_unclaimed"]):
        return
    async with db.transaction("take_back") as connection:
        jobs = await connection.fetch(SQL["lock_unclaimed"])
        await connection.execute(SQL["take_back"], *columns(jobs, 2))
        await connection.execute(SQL["forget_unclaimed"])


async def next_due(db: Database) -> datetime | None:
    """The earliest cursor: when the planner has something to do at the latest."""
    return await db.fetchval("engine", SQL["next_due"])  # type: ignore[no-any-return]
