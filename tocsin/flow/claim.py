"""claim: hand due runs to workers. One statement picks fairly, judges (overlap, pause, deadline), and marks running.

The dispatcher says from which (lane, tenant) how many may be taken and where their live entries begin; the statement
says which. Runs under an exact limit take a second, short transaction under the limit's lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.telemetry import CLAIMED, MISSED, START_LAG, STEP_SECONDS

SQL = Sql(__file__, SHARED)
THE_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class Share(NamedTuple):
    """How many runs may be taken from a tenant's place in a lane, and where its live entries begin."""

    lane_id: int
    tenant_id: int
    most: int
    floor: datetime
    due_floor: datetime = THE_BEGINNING  # of what is staged


class Taken(NamedTuple):
    """The claimed rows, each with the `slot` it goes to (from 1); and the places of all that left the queue, among
    them what was parked or ended instead of claimed."""

    rows: list[Row]
    left: Counter[tuple[int, int]]


# Verdicts by which a row leaves the queue. What is `expired` waits for the sweep, `limited` for its limit's lock.
_LEAVES = ("paused", "overlap", "skipped_overlap", "coalesced", "limit")


async def take(db: Database, shares: Sequence[Share], slots: Sequence[str]) -> Taken:
    """Claim up to one run for each of `slots`, each named by the worker that has it free."""
    workers, whose = _seats(slots)
    sent = time.monotonic()
    with STEP_SECONDS.labels("claim").time():
        rows = await db.fetch("vital", SQL["take"], workers, whose, *columns(shares, 5))
    received = time.monotonic()
    await db.failpoints.hit("claim.after_commit")
    going = [row for row in rows if row["verdict"] == "go"]
    if going:
        # A clock that was set back is noticed before anybody is told an instant that it has not reached.
        db.clock.observe(going[0]["claimed_at"], sent, received)
    others = [row for row in rows if row["verdict"] != "go"] if len(going) < len(rows) else []
    limited = [row for row in others if row["verdict"] == "limited"]
    if limited and len(going) < len(slots):
        used = {row["slot"] for row in going}
        free = [slot for slot in range(1, len(slots) + 1) if slot not in used]
        more = await _take_limited(db, limited, workers, [whose[slot - 1] for slot in free])
        others += [row for row in more if row["verdict"] != "go"]
        going += [_Seated(row, free[row["slot"] - 1]) for row in more if row["verdict"] == "go"]
    _count(going, others)
    left = Counter((row["lane_id"], row["tenant_id"]) for row in going)
    left.update((row["lane_id"], row["tenant_id"]) for row in others if row["verdict"] in _LEAVES)
    return Taken(going, left)


def _seats(slots: Sequence[str]) -> tuple[list[str], list[int]]:
    """The workers, each once, and for each slot whose it is (from 1)."""
    workers = list(dict.fromkeys(slots))
    index = {worker: i for i, worker in enumerate(workers, 1)}
    return workers, [index[worker] for worker in slots]


async def _take_limited(db: Database, candidates: list[Row], workers: list[str], whose: list[int]) -> list[Row]:
    keys = sorted({(row["tenant_id"], row["job_id"]) for row in candidates})
    async with db.transaction("claim_limited", "vital") as connection:
        locked = {(r["tenant_id"], r["key"]) for r in await connection.fetch(SQL["lock_limits"], *columns(keys, 2))}
        picked = [(r["tenant_id"], r["id"]) for r in candidates if (r["tenant_id"], r["job_id"]) in locked]
        if not picked:
            return []
        return await connection.fetch(SQL["take_limited"], workers, whose, *columns(picked, 2))  # type: ignore[no-any-return]


class _Seated:
    """A claimed row whose slot is counted among all slots, not among those that were still free."""

    __slots__ = ("_row", "_slot")

    def __init__(self, row: Row, slot: int) -> None:
        self._row, self._slot = row, slot

    def __getitem__(self, name: str) -> object:
        return self._slot if name == "slot" else self._row[name]


def _count(going: list[Row], others: list[Row]) -> None:
    CLAIMED.inc(len(going))
    for row in others:
        if row["verdict"] in ("skipped_overlap", "coalesced"):
            MISSED.labels(row["verdict"]).inc()
    # One observation per claim, of its oldest run: per-run histograms would cost more than the claim itself.
    oldest = min((row["ready_at"] for row in going if row["attempt"] == 1), default=None)
    if oldest is not None:
        START_LAG.observe(max(0.0, (going[0]["claimed_at"] - oldest).total_seconds()))


class Ahead(NamedTuple):
    """Runs claimed before their instant; how far this looked; and for each place the next instant that is left."""

    rows: list[Row]
    until: datetime
    next_due: dict[tuple[int, int], datetime | None]


async def take_ahead(db: Database, shares: Sequence[Share], slots: Sequence[str], lead: timedelta) -> Ahead:
    """Claim runs that fall due within `lead` and that nothing can block any more, for slots nobody else wants."""
    sent = time.monotonic()
    with STEP_SECONDS.labels("claim").time():
        rows = await db.fetch("vital", SQL["take_ahead"], *_seats(slots), *columns(shares, 5)[:3], lead)
    received = time.monotonic()
    await db.failpoints.hit("claim.after_commit")
    going = [row for row in rows if row["verdict"] == "go"]
    _count(going, [])
    left = rows[len(going) :]
    until = left[0]["scheduled_for"]
    db.clock.observe(until - lead, sent, received)
    return Ahead(going, until, {(row["lane_id"], row["tenant_id"]): row["ready_at"] for row in left})


async def promote(
    db: Database, places: Sequence[tuple[int, int]], most: int, floors: Sequence[datetime] | None = None
) -> int:
    """staged (due) → ready in these (lane, tenant) places, at most `most` in each; from the floor of each, if given."""
    floors = [THE_BEGINNING] * len(places) if floors is None else list(floors)
    return len(await db.fetch("vital", SQL["promote"], *columns(places, 2), floors, most))


class Head(NamedTuple):
    """A tenant's first ready run in a lane (`head`), or its first staged one (`due`)."""

    lane_id: int
    tenant_id: int
    head: datetime | None
    due: datetime | None


async def heads(db: Database, lanes: Sequence[int]) -> list[Head]:
    """Who has something to claim in these lanes."""
    return [Head(*row) for row in await db.fetch("vital", SQL["heads"], list(lanes))]


async def heads_from(db: Database, places: Sequence[tuple[int, int, datetime, datetime]]) -> list[Head]:
    """The same of known (lane, tenant) places alone, from their floors of what is ready and what is staged."""
    return [Head(*row) for row in await db.fetch("vital", SQL["heads_from"], *columns(places, 4))]


async def weights(db: Database) -> dict[int, int]:
    """Each tenant's share."""
    return {row["id"]: row["weight"] for row in await db.fetch("vital", SQL["weights"])}
