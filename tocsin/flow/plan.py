"""plan: turn cursors that fall due within the horizon into staged runs, and move the cursors, in one transaction.

The planner only stages. Overlap, limits and pause are decided when a run becomes due. The pure rule in `model.misfire`
decides here about occurrences that fell due during an outage. Every other occurrence is staged, however late.

A turn has a budget of runs. A cursor that owes more than its piece of the budget stays at its first unstaged occurrence
and continues beside the others, in rounds. A cursor that cannot be planned waits apart from the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

import msgspec

from tocsin.flow.shared import calendars, triggers
from tocsin.flow.shared.calendars import CalendarKey, Known
from tocsin.flow.shared.transitions import Hint, Key, NewRun, counted, hints, note_missed, stage
from tocsin.flow.shared.triggers import Count, Spent
from tocsin.model.ids import new_id, new_ids
from tocsin.model.job import Schedule
from tocsin.model.misfire import SHORTEST_OUTAGE, Outage, Planned, merge_outages, plan_occurrences
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, spread, timetable
from tocsin.model.zones import is_newer
from tocsin.store.db import Connection, Database, Row, Sql, columns, is_data_error
from tocsin.telemetry import MISSED, PLANNED, SCHEDULES_STUCK, get_logger

SQL = Sql(__file__)
log = get_logger("plan")
BATCH = 1000  # due cursors in one turn
RUNS = 2000  # runs that a turn stages
PIECE = 20  # runs of one due cursor in one turn
BEHIND = 50  # cursors in one turn that had more to stage than their piece
LARGE_PIECE = 200  # runs of one such cursor
WAITING = 100  # cursors in one turn that waited for something
_REASONS = 100  # wait reasons that a turn checks
_OUTAGES = 1000  # outages that are kept apart; all time before the oldest of them counts as one outage
_YIELD = 100  # occurrences that are computed before the event loop gets a turn
# Seconds between checks of wait reasons, and between retries of failed cursors
_LOOK_SECONDS, _RETRY_SECONDS = 1.0, 60.0
_FAILED = "error"  # the wait reason of a cursor that made a turn fail
_FIRST_ID = "00000000-0000-0000-0000-000000000000"
_BEGINNING = datetime.min.replace(tzinfo=UTC)


class Rotation:
    """The position of a planner among cursors that are behind or wait, so that each of them gets its turn."""

    def __init__(self) -> None:
        self.behind = self.failed = _FIRST_ID
        self._reason = ""
        self._looked = self._retried = float("-inf")

    async def look(self, db: Database) -> list[str]:
        """Return the wait reasons that may have ended. Check at most once a second."""
        now = time.monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return []
        self._looked = now
        rows = await db.fetch("engine", SQL["reasons"], self._reason, _REASONS)
        reasons = [row["waits_for"] for row in rows]
        self._reason = reasons[-1] if len(reasons) == _REASONS else ""
        if _FAILED in reasons and now < self._retried + _RETRY_SECONDS:
            reasons.remove(_FAILED)
        elif _FAILED in reasons:
            self._retried = now
        return await _over(db, reasons)

    def go_on(self, rows: Sequence[Row], asked_failed: int) -> bool:
        """Continue after these cursors, or from the beginning if there were no more. Return whether cursors that are
        behind remain to be examined. `asked_failed`: how many failed cursors the statement asked for."""
        behind = [row["job_id"] for row in rows if row["class"] == "behind"]
        unseen = self.behind != _FIRST_ID or len(behind) == BEHIND
        self.behind = max(behind) if len(behind) == BEHIND else _FIRST_ID
        if asked_failed:
            failed = [row["job_id"] for row in rows if row["waits_for"] == _FAILED]
            self.failed = max(failed) if len(failed) == asked_failed else _FIRST_ID
        return unseen


async def _over(db: Database, reasons: Sequence[str]) -> list[str]:
    """Return the wait reasons that have ended: zone rules that this node has, calendars that exist, and failures that
    are due for a retry."""
    named = {_waits_for_calendar(key): key for key in map(_calendar_waited_for, reasons) if key is not None}
    there: set[CalendarKey] = set()
    if named:
        async with db.transaction("plan") as connection:
            there = set(await calendars.read(connection, named.values()))
    return [
        reason
        for reason in reasons
        if reason == _FAILED
        or (reason in named and named[reason] in there)
        or (reason.startswith("rules ") and not is_newer(reason.removeprefix("rules ")))
    ]


def _waits_for_calendar(key: CalendarKey) -> str:
    return f"calendar {key.tenant_id} {key.name}"


def _calendar_waited_for(reason: str) -> CalendarKey | None:
    if not reason.startswith("calendar "):
        return None
    _, tenant_id, name = reason.split(" ", 2)
    return CalendarKey(int(tenant_id), name)


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

    @property
    def kept_until(self) -> datetime | None:
        return None if self.parked is not None else self.owed.kept_until


class _Skipped(NamedTuple):
    """A cursor that cannot be planned, and the reason why it waits."""

    row: Row
    reason: str


class PlanResult(NamedTuple):
    """The result of one turn: moved cursors, where runs were staged, and whether more can be done at once."""

    cursors: int
    hints: list[Hint]
    more: bool


@lru_cache(maxsize=20_000)
def _schedule(text: str) -> Schedule:
    return msgspec.json.decode(text, type=Schedule, dec_hook=decode_scalar)


async def measure(db: Database) -> None:
    """Set the gauge of schedules that nobody plans."""
    SCHEDULES_STUCK.set(await db.fetchval("engine", SQL["stuck"]))


Pick = Callable[[Connection], Awaitable[list[Row]]]


async def plan(db: Database, horizon: timedelta, rotation: Rotation | None = None) -> PlanResult:
    """One turn of the planner."""
    rotation = rotation or Rotation()
    reasons = await rotation.look(db)
    each = max(1, WAITING // len(reasons)) if reasons else 0
    picked: list[Row] = []

    async def pick(connection: Connection) -> list[Row]:
        asked = (BATCH, rotation.behind, BEHIND, reasons, each, rotation.failed)
        picked.extend(await connection.fetch(SQL["due"], horizon, *asked))
        return picked

    try:
        result = await _turn_over(db, horizon, pick)
    except Exception as error:
        if not is_data_error(error):
            raise
        result = await _bisect(db, horizon, [_key(row) for row in picked], error)
    unseen = rotation.go_on(picked, each if _FAILED in reasons else 0)
    if not picked or not _is_fresh(picked[0]):
        await db.fetch("engine", SQL["completed"])
    return result._replace(more=result.more or unseen)


def _is_fresh(row: Row) -> bool:
    """Return whether a turn was recorded less than a second ago."""
    at = row["turned_at"]
    return at is not None and timedelta(0) <= row["now"] - at < timedelta(seconds=1)


async def _bisect(db: Database, horizon: timedelta, keys: Sequence[Key], error: BaseException) -> PlanResult:
    """Plan these cursors when one of them makes the turn fail. That cursor waits, and the others continue."""
    if len(keys) == 1:
        async with db.transaction("plan") as connection:
            rows = await connection.fetch(SQL["these"], *columns(keys, 2))
            await _skip(connection, [_failed(row, error) for row in rows])
        return PlanResult(0, [], False)
    done = []
    for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):

        async def pick(connection: Connection, half: Sequence[Key] = half) -> list[Row]:
            return await connection.fetch(SQL["these"], *columns(half, 2))  # type: ignore[no-any-return]

        try:
            done.append(await _turn_over(db, horizon, pick))
        except Exception as again:
            if not is_data_error(again):
                raise
            done.append(await _bisect(db, horizon, half, again))
    return PlanResult(sum(r.cursors for r in done), [hint for r in done for hint in r.hints], True)


async def _turn_over(db: Database, horizon: timedelta, pick: Pick) -> PlanResult:
    """Plan the cursors that `pick` locks, within the budget."""
    async with db.transaction("plan") as connection:
        rows = await pick(connection)
        if not rows:
            return PlanResult(0, [], False)
        turns, skipped = await _turns(connection, rows, rows[0]["now"] + horizon)
        await _skip(connection, skipped)
        moved = await _advance(connection, turns)
        kept = [turn for turn in turns if turn.row["job_id"] in moved]
        staged = await stage(connection, await _all_runs(kept))
        missed = [m for turn in kept for m in counted(turn.key, turn.row["now"], turn.owed.missed)]
        await note_missed(connection, missed)
        await triggers.use(
            connection, [Spent(*t.key, len(t.owed.stage), t.parked) for t in kept if _most(t.row) is not None]
        )
        await _complete_missed(connection, kept)
    PLANNED.inc(len(staged))
    for m in missed:
        MISSED.labels(m.reason).inc(m.how_many)
    full = sum(row["class"] == "due" for row in rows) == BATCH
    unfinished = len(turns) + len(skipped) < len(rows) or any(turn.kept_until is not None for turn in kept)
    return PlanResult(len(kept), hints(staged), full or unfinished)


async def _turns(connection: Connection, rows: Sequence[Row], until: datetime) -> tuple[list[_Turn], list[_Skipped]]:
    """Return the action for each cursor that the budget reaches, and the cursors that cannot be planned."""
    read, skipped = _read_all(rows)
    known = await calendars.read(connection, map(_calendar, read))
    counts = await triggers.read_counts(connection, [_key(row) for row in read if _most(row) is not None])
    outages = await _outages(connection, read)
    turns: list[_Turn] = []
    budget = _Budget(read)
    for row in sorted(read, key=_precedence):
        calendar = _calendar(row)
        if calendar is not None and calendar not in known:
            skipped.append(_Skipped(row, _waits_for_calendar(calendar)))
            continue
        most = budget.piece(row)
        if most == 0:
            continue
        try:
            turn = _turn(row, until, calendar and known[calendar], counts, _outages_of(row, outages), most)
        except Exception as error:  # a row that a bug or a person wrote may contain anything
            skipped.append(_failed(row, error))
            continue
        turns.append(turn)
        await budget.use(row, len(turn.owed.stage))
    return turns, skipped


def _precedence(row: Row) -> tuple[bool, bool, datetime]:
    """Sort due cursors before cursors that waited, and cursors that are behind last."""
    return row["class"] == "behind", row["class"] == "waiting", row["next_fire_at"]


def _read_all(rows: Iterable[Row]) -> tuple[list[Row], list[_Skipped]]:
    """Separate the cursors whose schedule cannot be read, or only by a node with newer rules of its zone."""
    read, skipped = [], []
    for row in rows:
        try:
            _schedule(row["schedule"])
            newer = row["zone_rules"] is not None and is_newer(row["zone_rules"])
        except Exception as error:
            skipped.append(_failed(row, error))
            continue
        if newer:
            skipped.append(_Skipped(row, f"rules {row['zone_rules']}"))
        else:
            read.append(row)
    return read, skipped


class _Budget:
    """Shares the runs of a turn evenly among its cursors. A quarter is kept for cursors that are behind, if there are
    any."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._behind: int = sum(row["class"] == "behind" for row in rows)
        self._others = len(rows) - self._behind
        self._left = RUNS
        self._kept = RUNS // 4 if self._behind else 0
        self._computed = 0

    def piece(self, row: Row) -> int:
        """Return how many runs this cursor may stage now."""
        if row["class"] == "behind":
            return min(LARGE_PIECE, -(-self._left // self._behind))
        return min(PIECE, -(-max(0, self._left - self._kept) // self._others))

    async def use(self, row: Row, runs: int) -> None:
        """Count the runs that a cursor has staged, and give the event loop a turn from time to time."""
        self._left -= runs
        if row["class"] == "behind":
            self._behind -= 1
        else:
            self._others -= 1
        self._computed += 1 + runs
        if self._computed >= _YIELD:
            self._computed = 0
            await asyncio.sleep(0)


async def _outages(connection: Connection, rows: Sequence[Row]) -> list[Outage]:
    """Return the outages that may concern these cursors. Outages do not concern cursors that are not late."""
    first = min((row["next_fire_at"] for row in rows), default=None)
    if first is None or first >= rows[0]["now"]:
        return []
    found = await connection.fetch(SQL["outages"], first, _OUTAGES)
    outages = merge_outages(Outage(row["from_at"], row["to_at"]) for row in found)
    if len(found) >= _OUTAGES:
        outages[0] = Outage(_BEGINNING, outages[0].end)
    return outages


def _outages_of(row: Row, outages: Sequence[Outage]) -> Sequence[Outage]:
    """Add the time during which no node could plan this cursor, if it is more than a minute."""
    since = row["unplanned_since"]
    if since is None or row["now"] - since <= SHORTEST_OUTAGE:
        return outages
    return merge_outages([*outages, Outage(since, row["now"])])


def _turn(
    row: Row,
    until: datetime,
    calendar: Known | None,
    counts: Mapping[Key, Count],
    outages: Sequence[Outage],
    most: int,
) -> _Turn:
    schedule = _schedule(row["schedule"])
    table = timetable(schedule, row["anchor"], _seed(row), calendar and calendar.calendar)
    # No count: an edit has removed it since `due` read the schedule. `advance` will notice.
    count = counts.get(_key(row)) if schedule.max_runs is not None else None
    left = count.left(schedule.max_runs) if schedule.max_runs is not None and count is not None else None
    most = most if left is None else min(most, left)
    owed = plan_occurrences(schedule, table, row["next_fire_at"], until, outages, most, row["kept_until"])
    return _Turn(row, owed, owed.cursor if len(owed.stage) == left else None)


def _failed(row: Row, error: BaseException) -> _Skipped:
    if row["waits_for"] != _FAILED:
        told = f"{type(error).__name__}: {error}"
        log.error("a schedule cannot be planned", tenant=row["tenant"], job=row["job_id"], error=told[:500])
    return _Skipped(row, _FAILED)


async def _skip(connection: Connection, skipped: Sequence[_Skipped]) -> None:
    """Make these cursors wait. Cursors that already waited for the same reason stay unchanged."""
    new = [
        (row["place"], row["job_place"], row["job_id"], row["next_fire_at"], row["version"], reason)
        for row, reason in skipped
        if row["waits_for"] != reason
    ]
    if new:
        await connection.execute(SQL["skip"], *columns(new, 6))


def _key(row: Row) -> Key:
    return Key(row["tenant_id"], row["job_id"])


def _calendar(row: Row) -> CalendarKey | None:
    return calendars.key_of(row["tenant_id"], _schedule(row["schedule"]))


def _most(row: Row) -> int | None:
    return _schedule(row["schedule"]).max_runs


def _seed(row: Row) -> str:
    return seed_of(row["tenant"], row["name"], row["job_id"])


async def _advance(connection: Connection, turns: Sequence[_Turn]) -> set[str]:
    moves = [
        (row["place"], row["job_place"], row["job_id"], row["next_fire_at"], row["version"], t.cursor, t.kept_until)
        for t in turns
        for row in [t.row]
    ]
    return {row["job_id"] for row in await connection.fetch(SQL["advance"], *columns(moves, 7))} if moves else set()


async def _complete_missed(connection: Connection, kept: list[_Turn]) -> None:
    """A one-time job whose only occurrence was missed for good has ended with it."""
    over = [turn.key for turn in kept if turn.owed.cursor is None and not turn.owed.stage]
    if over:
        await connection.execute(SQL["complete_missed"], *columns(over, 2))


async def _all_runs(turns: Sequence[_Turn]) -> list[NewRun]:
    runs: list[NewRun] = []
    made = 0
    for turn in turns:
        runs += _runs(turn)
        if len(runs) - made >= _YIELD:
            made = len(runs)
            await asyncio.sleep(0)
    return runs


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
