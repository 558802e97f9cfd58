"""claim: hand due runs to workers. One statement picks fairly, judges (overlap, pause, deadline), and marks running.

The dispatcher says from which (lane, tenant) how many may be taken and where their live entries begin; the statement
says which. Runs under an exact limit take a second, short transaction under the limit's lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Key, gates
from tocsin.model.limits import Rate, Verdict, Wish, admit
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
    """The claimed rows, each with the `slot` it goes to (from 1); the places of all that left the queue, among them
    what was parked or ended instead of claimed; when the rates that were used let the next one through; and whether
    something waits for what it is to replace."""

    rows: list[Row]
    left: Counter[tuple[int, int]]
    opens: dict[Key, datetime]
    replaces: bool


# Verdicts by which a row leaves the queue. What is `expired` waits for the sweep, `limited` for its limit's lock.
_LEAVES = ("paused", "overlap", "replace", "skipped_overlap", "coalesced", "limit", "rate")


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
    left = Counter((row["lane_id"], row["tenant_id"]) for row in others if row["verdict"] in _LEAVES)
    limited = [row for row in others if row["verdict"] == "limited"]
    opens: dict[Key, datetime] = {}
    if limited and len(going) < len(slots):
        used = {row["slot"] for row in going}
        free = [slot for slot in range(1, len(slots) + 1) if slot not in used]
        more = await _take_limited(db, limited, workers, [whose[slot - 1] for slot in free])
        left.update(more.parked)
        opens = more.opens
        going += [_Seated(row, free[row["slot"] - 1]) for row in more.rows]
    _count(going, others)
    left.update((row["lane_id"], row["tenant_id"]) for row in going)
    return Taken(going, left, opens, any(row["verdict"] == "replace" for row in others))


def _seats(slots: Sequence[str]) -> tuple[list[str], list[int]]:
    """The workers, each once, and for each slot whose it is (from 1)."""
    workers = list(dict.fromkeys(slots))
    index = {worker: i for i, worker in enumerate(workers, 1)}
    return workers, [index[worker] for worker in slots]


class _Limited(NamedTuple):
    """What came of runs under limits: those claimed, the places of those parked, and when rates let more through."""

    rows: list[Row]
    parked: list[tuple[int, int]]
    opens: dict[Key, datetime]


async def _take_limited(db: Database, candidates: list[Row], workers: list[str], whose: list[int]) -> _Limited:
    """Under the locks of their limits, let those start that the limits have room for, and park the others. A run one
    of whose limits somebody else holds is left for the next claim."""
    gated = {row["id"]: gates(Key(row["tenant_id"], row["job_id"]), row["key_id"]) for row in candidates}
    keys = sorted({key for keys in gated.values() for key in keys})
    async with db.transaction("claim_limited", "vital") as connection:
        rows = await connection.fetch(SQL["lock_limits"], *columns(keys, 2))
        locked = {Key(row["tenant_id"], row["key"]) for row in rows}
        picked = [(row["tenant_id"], row["id"]) for row in candidates if locked.issuperset(gated[row["id"]])]
        if not picked:
            return _Limited([], [], {})
        known = await connection.fetch(SQL["weigh"], *columns(picked, 2), *columns(sorted(locked), 2))
        runs = [row for row in known if row["place"] is not None]
        limits = {row["id"]: row for row in known if row["place"] is None}
        verdict = _judge(runs, limits, len(whose))
        parked = [(runs[b.run]["place"], b.by, b.key) for b in verdict.blocked]
        used = [(limits[key]["tenant_id"], key, tat) for key, tat in verdict.tats.items()]
        going = [runs[i]["place"] for i in verdict.going]
        claimed = await connection.fetch(
            SQL["take_limited"], workers, whose, going, *columns(parked, 3), *columns(used, 3)
        )
    left = [(runs[b.run]["lane_id"], runs[b.run]["tenant_id"]) for b in verdict.blocked]
    return _Limited(claimed, left, _openings(runs, limits, verdict))


def _judge(runs: Sequence[Row], limits: Mapping[str, Row], slots: int) -> Verdict:
    wishes = [
        Wish(i, r["job_id"], r["key_id"], limits[r["job_id"]]["max"], r["max"], _rate(r)) for i, r in enumerate(runs)
    ]
    running = {key: row["running"] for key, row in limits.items()}
    tats = {key: row["tat"] for key, row in limits.items()}
    return admit(wishes, running, tats, runs[0]["now"], slots) if runs else Verdict([], [], {})


def _rate(run: Row) -> Rate | None:
    return None if run["rate_gap"] is None else Rate(run["rate_gap"], run["rate_burst"])


def _openings(runs: Sequence[Row], limits: Mapping[str, Row], verdict: Verdict) -> dict[Key, datetime]:
    """When each rate that was used, or that somebody waits for, lets the next one through."""
    out: dict[Key, datetime] = {}
    for run in runs:
        key, rate = run["key_id"] or run["job_id"], _rate(run)
        tat = verdict.tats.get(key, limits[key]["tat"])
        if rate is not None and tat is not None:
            out[Key(run["tenant_id"], key)] = rate.opens_at(tat)
    return out


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
