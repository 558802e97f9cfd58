"""fill: make the next runs of backfills, as many as each may have at a time, and move their cursors with them.

An occurrence gets its run in the transaction that moves the backfill's cursor past it, under the backfill's lock: once,
whoever makes it and whenever he dies. How many more there may be is counted from the runs that live, never from a
counter; what became of those that ended was left by whoever ended them (`backfill_ends`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.flow.shared.jobs import key_of_run
from tocsin.flow.shared.transitions import Family, Hint, Key, NewRun, hints, stage
from tocsin.model.backfill import decode_plan
from tocsin.model.ids import new_ids
from tocsin.model.misfire import due_between
from tocsin.model.timetable import Timetable
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.telemetry import FILLED, get_logger

SQL = Sql(__file__)
log = get_logger("fill")
AT_ONCE = 100  # backfills of one turn
PIECE = 8  # runs that a backfill gets in a turn, with the nodes of workflows: many at once would hold up live work
MOST_FAILURES = 100  # that are named; the others are counted
# What each end of a run counts as.
COUNTS = {
    "succeeded": "succeeded",
    **{"dead": "failed", "expired": "failed"},
    **{"cancelled": "cancelled", "skipped": "cancelled"},
}


class Filled(NamedTuple):
    """Where runs were made and how many, with the nodes of workflows; whether there is more to do at once, or somebody
    else was at some of it; and whether one of them could have more runs than it got."""

    hints: list[Hint]
    made: int
    more: bool
    held_back: bool = False


class Tables:
    """The timetables of backfills, which never change: the last ones that were asked for."""

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._known: OrderedDict[Key, Timetable] = OrderedDict()

    async def read(self, connection: Connection, keys: Sequence[Key]) -> dict[Key, Timetable]:
        """Return the backfills that can be read. One query reads all that are not cached."""
        missing = [key for key in keys if key not in self._known]
        if missing:
            for row in await connection.fetch(SQL["plans"], *columns(missing, 2)):
                try:
                    self._known[_key(row)] = decode_plan(row["plan"]).between(row["from_at"], row["to_at"])
                except Exception as error:  # a backfill that cannot be read must not keep the others from their runs
                    told = f"{type(error).__name__}: {error}"
                    log.error("a backfill cannot be read", tenant_id=row["tenant_id"], backfill=row["id"], error=told)
        found = {key: self._known[key] for key in keys if key in self._known}
        for key in found:
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return found


class _Room:
    """How many more runs a backfill may have in this turn, and how many may wait of tenants that have a quota of it:
    what is beyond waits for another turn."""

    def __init__(self, rows: Sequence[Row], nodes: Mapping[str, int]) -> None:
        self._left: dict[int, int] = {row["id"]: row["max_queued"] - row["queued"] for row in rows}
        self._empty = {row["id"] for row in rows if not row["queued"] and row["max_queued"]}
        self._nodes = nodes
        self.is_short = False  # somebody could have had more

    @classmethod
    async def read(cls, connection: Connection, rows: Sequence[Row]) -> _Room:
        """Of the tenants of these backfills."""
        bound = await connection.fetch(SQL["room"], list({row["tenant_id"] for row in rows}))
        found = await connection.fetch(SQL["nodes"], *columns([(row["tenant_id"], row["job_id"]) for row in rows], 2))
        return cls(bound, {row["id"]: row["nodes"] for row in found})

    def work(self, row: Row) -> int:
        """The runs that come of one run of a backfill."""
        return 1 + self._nodes[row["job_id"]]

    def take(self, row: Row, wanted: int) -> int:
        """So many of those runs of a backfill that it wants. A workflow with more nodes than its tenant may have
        waiting gets a run when nothing else waits, for it would never get one."""
        tenant_id, each = row["tenant_id"], self.work(row)
        if tenant_id in self._left:
            wanted = min(wanted, max(self._left[tenant_id] // each, int(tenant_id in self._empty)))
        taken = min(wanted, max(PIECE // each, 1))
        self.is_short = self.is_short or taken < wanted
        if taken and tenant_id in self._left:
            self._left[tenant_id] -= taken * each
            self._empty.discard(tenant_id)
        return taken


class _Turn(NamedTuple):
    """A backfill, the runs it gets now, and what is to be written down of it."""

    row: Row
    runs: list[NewRun]
    next_at: datetime | None
    ended: Sequence[Row]
    state: str

    def saved(self, made: set[str]) -> tuple[Any, ...]:
        """The columns of `save`, if these runs were made."""
        row, counts = self.row, Counter(COUNTS[end["state"]] for end in self.ended)
        return (
            *_key(row),
            self.next_at,
            sum(run.id in made for run in self.runs),
            *(counts["succeeded"], counts["failed"], counts["cancelled"]),
            _failures(row["failures"], self.ended) if counts["failed"] else None,
            self.state,
        )


async def fill(db: Database, tables: Tables, everywhere: bool) -> Filled:
    """One turn: over backfills of which runs have ended or, `everywhere`, all that are open."""
    due = sorted(_key(row) for row in await db.fetch("engine", SQL["due"], everywhere, AT_ONCE))
    if not due:
        return Filled([], 0, False)
    async with db.transaction("fill") as connection:
        rows = await connection.fetch(SQL["take"], *columns(due, 2))
        room = await _Room.read(connection, rows)
        turns = await _turns(connection, rows, tables, room)
        staged = await stage(connection, [run for turn in turns for run in turn.runs])
        made = {row["id"] for row in staged}
        if turns:
            await connection.execute(SQL["save"], *columns([turn.saved(made) for turn in turns], 9))
        if len(rows) < len(due):
            await connection.execute(SQL["forget"], *columns(due, 2))
    FILLED.inc(len(staged))
    work = sum(room.work(turn.row) * len(turn.runs) for turn in turns)
    return Filled(hints(staged), work, len(due) >= AT_ONCE or len(rows) < len(due), room.is_short)


def _key(row: Row) -> Key:
    return Key(row["tenant_id"], row["id"])


async def _turns(connection: Connection, rows: Sequence[Row], tables: Tables, room: _Room) -> list[_Turn]:
    timetables = await tables.read(connection, [_key(row) for row in rows])
    rows = [row for row in rows if _key(row) in timetables]
    if not rows:
        return []
    live: dict[str, int] = {}
    ended: dict[str, list[Row]] = {row["id"]: [] for row in rows}
    for row in await connection.fetch(SQL["settle"], *columns([_key(row) for row in rows], 2)):
        if row["run_id"] is None:
            live[row["id"]] = row["live"]
        else:
            ended[row["id"]].append(row)
    return [_turn(row, timetables[_key(row)], live[row["id"]], ended[row["id"]], room) for row in rows]


def _turn(row: Row, table: Timetable, live: int, ended: Sequence[Row], room: _Room) -> _Turn:
    state, next_at = row["state"], row["next_at"]
    if state in ("running", "paused") and row["job_state"] not in ("active", "paused"):
        return _Turn(row, [], next_at, ended, "cancelled")
    instants: list[datetime] = []
    if state == "running" and next_at is not None and live < row["max_concurrency"]:
        more = room.take(row, row["max_concurrency"] - live)
        instants, next_at = due_between(table, next_at, row["to_at"], more)
    if state in ("running", "paused") and next_at is None and not live and not instants:
        state = "completed"
    return _Turn(row, _runs(row, instants), next_at, ended, state)


def _runs(row: Row, instants: Sequence[datetime]) -> list[NewRun]:
    key = key_of_run(row["tenant_id"], row["key_template"], row["args"]) if instants else None
    return [
        NewRun(
            row["tenant_id"],
            id_,
            row["job_id"],
            "backfill",
            None,
            row["priority"],
            row["args"],
            key_id=key,
            family=Family(logical_at=at, backfill_id=row["id"]),
        )
        for id_, at in zip(new_ids(row["now"], len(instants)), instants, strict=True)
    ]


def _failures(text: str, ended: Sequence[Row]) -> str:
    """The first runs that failed, with these."""
    known = msgspec.json.decode(text)
    more = [
        {"id": row["run_id"], "logical_at": iso(row["logical_at"]), "state": row["state"]}
        for row in ended
        if COUNTS[row["state"]] == "failed"
    ]
    return msgspec.json.encode((known + more)[:MOST_FAILURES]).decode()
