"""claim: hand due runs to workers. One statement picks fairly, judges (overlap, pause, deadline), and marks running.

The dispatcher says from which (lane, tenant) how many may be taken and where their live entries begin; the statement
says which. Runs under an exact limit, and those that need more of a worker than a slot, take a second, short
transaction under the locks of the limits and the workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.flow.shared.endings import Ending, end_runs
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Hint, Key, gates
from tocsin.model.fairness import HEAD_START
from tocsin.model.limits import Rate, Verdict, Wish, admit
from tocsin.model.resources import NOTHING, Amounts, Guest, Room, Seating
from tocsin.store.db import Connection, Database, Row, Sql, columns
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
    look: int = 0  # at so many, if they need more than a slot: one that finds no room is not to stand in the way


class Fitting(NamedTuple):
    """By what runs that need more than a slot find their worker. `spare`: further slots, for them alone; `lanes`: what
    each worker may take from (all, if it is not named); `kept`: workers that are kept for a run; `near_wait`: how long
    a run waits for a worker that it prefers; `patience`: how long it waits for room before a worker is kept for it."""

    spare: Sequence[str] = ()
    lanes: Mapping[str, Collection[int]] = {}
    kept: Mapping[str, Key] = {}
    near_wait: timedelta = timedelta(seconds=2)
    patience: timedelta = timedelta(seconds=30)


class Unfit(NamedTuple):
    """A run for which no worker had room; `until`: it waited for one that it prefers, and no longer than that."""

    lane_id: int
    tenant_id: int
    run_id: str
    order_key: datetime
    until: datetime | None


class Taken(NamedTuple):
    """The result of a claim: the claimed rows, each with its `slot` (from 1); the places of all rows that left the
    queue, including those that were parked or ended instead; for each place the next staged instant; when the used
    rates allow the next run; jobs with an occurrence that waits for the run it replaces; rows that found no worker; and
    which of the examined workers are kept for which run."""

    rows: list[Row]
    left: Counter[tuple[int, int]]
    next_due: dict[tuple[int, int], datetime | None]
    opens: dict[Key, datetime]
    replaces: Collection[Key]
    unfit: Sequence[Unfit] = ()
    kept: Mapping[str, str | None] = {}
    hints: Sequence[Hint] = ()  # where something became claimable by what ended here


# Verdicts by which a row leaves the queue. Bound rows wait for locks.
_LEAVES = ("paused", "breaker", "overlap", "replace", "skipped_overlap", "coalesced", "expired", "limit", "rate")
_FITTED = ("fitted", "fitted_limited")
_BOUND = ("limited", *_FITTED)
_SKIPPED = ("skipped_overlap", "coalesced")
ANYWHERE = Fitting()


async def take(db: Database, shares: Sequence[Share], slots: Sequence[str], fitting: Fitting = ANYWHERE) -> Taken:
    """Claim up to one run for each of `slots`, each named by the worker that has it free."""
    workers, whose = _seats([*slots, *fitting.spare])
    looks = [s._replace(most=max(s.most, s.look)) for s in shares] if fitting is not ANYWHERE else shares
    rows, later = await _pick(db, workers, whose[: len(slots)], looks)
    expired = [row for row in rows if row["verdict"] == "expired"]
    if expired and (free := _unused(rows, len(slots))):
        rows, later = await _pick_behind(db, workers, whose, free, looks, rows)
    going = [row for row in rows if row["verdict"] == "go"]
    others = [row for row in rows if row["verdict"] != "go"] if len(going) < len(rows) else []
    left = Counter((row["lane_id"], row["tenant_id"]) for row in others if row["verdict"] in _LEAVES)
    bound = [row for row in others if row["verdict"] in _BOUND]
    more = _Bound([], [], {})
    seats = len(whose) if any(row["verdict"] in _FITTED for row in bound) else len(slots)
    if bound and len(going) < seats:
        free = _unused(going, seats)
        more = await _take_bound(db, bound, workers, [whose[slot - 1] for slot in free], _Caps(shares), fitting)
        left.update(more.parked)
        going += [_Seated(row, free[row["slot"] - 1]) for row in more.rows]
    _count(going, others)
    left.update((row["lane_id"], row["tenant_id"]) for row in going)
    replaces = {Key(row["tenant_id"], row["job_id"]) for row in others if row["verdict"] == "replace"}
    ends = expired + [row for row in others if row["verdict"] in _SKIPPED]
    woken = await _end_named(db, [row for row in ends if row["named"]]) if ends else []
    return Taken(going, left, _next_due(later), more.opens, replaces, more.unfit, more.kept, woken)


async def _pick(
    db: Database, workers: list[str], whose: list[int], shares: Sequence[Share], *, fresh: bool = False
) -> tuple[list[Row], list[Row]]:
    """Run one claim statement. Return the rows that it examined and, for each place, the next staged instant. `fresh`:
    pass over runs whose deadline is over."""
    sent = time.monotonic()
    with STEP_SECONDS.labels("claim").time():
        rows = await db.fetch("vital", SQL["take"], workers, whose, *columns(shares, 6)[:5], fresh)
    received = time.monotonic()
    await db.failpoints.hit("claim.after_commit")
    rows, later = rows[: len(rows) - len(shares)], rows[len(rows) - len(shares) :]
    if rows and rows[0]["verdict"] == "go":
        # Notice a clock that was set back before any caller gets an instant that the clock has not reached again.
        db.clock.observe(rows[0]["claimed_at"], sent, received)
    return rows, later


def _unused(rows: Iterable[Row], slots: int) -> list[int]:
    used = {row["slot"] for row in rows if row["verdict"] == "go"}
    return [slot for slot in range(1, slots + 1) if slot not in used]


async def _pick_behind(
    db: Database, workers: list[str], whose: list[int], free: list[int], shares: Sequence[Share], seen: list[Row]
) -> tuple[list[Row], list[Row]]:
    """Look behind runs whose deadline is over: they used up the share of other runs. There may be any number of them:
    one more statement passes over all of them, and the sweep ends those that remain."""
    went = Counter((row["lane_id"], row["tenant_id"]) for row in seen if row["verdict"] == "go")
    rest = [s._replace(most=s.most - went[s.lane_id, s.tenant_id]) for s in shares]
    rows, later = await _pick(db, workers, [whose[slot - 1] for slot in free], rest, fresh=True)
    # This statement finds the rows that wait for locks again.
    kept = [row for row in seen if row["verdict"] not in ("expired", *_BOUND)]
    return kept + [_Seated(row, free[row["slot"] - 1]) if row["verdict"] == "go" else row for row in rows], later


async def _end_named(db: Database, rows: Sequence[Row]) -> list[Hint]:
    """ready | staged → skipped | expired, of runs whose end affects their job, a limit or other runs. Each reason has
    its own transaction, so that runs are locked in the order of their ids."""
    woken: list[Hint] = []
    for verdict in (*_SKIPPED, "expired"):
        found = [row for row in rows if row["verdict"] == verdict]
        ends = [Ending(Key(row["tenant_id"], row["id"]), row["job_id"], row["key_id"]) for row in found]
        if ends:
            async with db.transaction("claim_end", "vital") as connection:
                woken += await end_runs(connection, ends, "expired" if verdict == "expired" else "skipped", verdict)
    return woken


def _seats(slots: Sequence[str]) -> tuple[list[str], list[int]]:
    """The workers, each once, and for each slot whose it is (from 1)."""
    workers = list(dict.fromkeys(slots))
    index = {worker: i for i, worker in enumerate(workers, 1)}
    return workers, [index[worker] for worker in slots]


class _Bound(NamedTuple):
    """What came of runs with limits or needs: those claimed, the places of those parked, when rates let more through,
    and as in `Taken`."""

    rows: Sequence[Row | _Seated]
    parked: list[tuple[int, int]]
    opens: dict[Key, datetime]
    unfit: Sequence[Unfit] = ()
    kept: Mapping[str, str | None] = {}


async def _take_bound(
    db: Database, candidates: list[Row], workers: list[str], whose: list[int], caps: _Caps, fitting: Fitting
) -> _Bound:
    """Under the locks of their limits and of the workers, let those start that there is room for, and park those that
    a limit holds. A run one of whose limits somebody else holds is left for the next claim."""
    gated = {row["id"]: _gates(row) for row in candidates}
    keys = sorted({key for keys in gated.values() for key in keys})
    async with db.transaction("claim_limited", "vital") as connection:
        rows = await connection.fetch(SQL["lock_limits"], *columns(keys, 2)) if keys else []
        locked = {Key(row["tenant_id"], row["key"]) for row in rows}
        if left_out := [row for row in candidates if not locked.issuperset(gated[row["id"]])]:
            missing = sorted({(row["tenant_id"], row["job_id"], row["key_id"]) for row in left_out}, key=str)
            made = await connection.fetch(SQL["make_limits"], *columns(missing, 3))
            locked.update(Key(row["tenant_id"], row["key"]) for row in made)
        fitted = any(row["verdict"] in _FITTED for row in candidates)
        fit = await _Fit.between(connection, candidates, workers, whose, fitting) if fitted else None
        picked = [(row["tenant_id"], row["id"]) for row in candidates if locked.issuperset(gated[row["id"]])]
        if not picked:
            return _Bound([], [], {})
        known = await connection.fetch(SQL["weigh"], *columns(picked, 2), *columns(sorted(locked), 2))
        runs = [row for row in known if row["place"] is not None]
        limits = {row["id"]: row for row in known if row["place"] is None}
        verdict = _judge(runs, limits, len(whose), caps, fit)
        parked = [(runs[b.run]["place"], b.by, b.key) for b in verdict.blocked]
        used = [(limits[key]["tenant_id"], key, tat) for key, tat in verdict.tats.items()]
        going = [runs[i]["place"] for i in verdict.going]
        # A worker that was found by its lock lives until we commit, so each run goes to the very slot it was given.
        seats = list(range(len(whose))) if fit is None else [fit.slot(runs[i]["id"]) for i in verdict.going]
        claimed = await connection.fetch(
            SQL["take_limited"], workers, [whose[s] for s in seats], going, *columns(parked, 3), *columns(used, 3)
        )
    left = [(runs[b.run]["lane_id"], runs[b.run]["tenant_id"]) for b in verdict.blocked]
    opens = _openings(runs, limits, verdict)
    if fit is None:
        return _Bound(claimed, left, opens)
    seated = [_Seated(row, seats[row["slot"] - 1] + 1) for row in claimed]
    return _Bound(seated, left, opens, fit.unfit, fit.kept)


def _gates(run: Row) -> list[Key]:
    return [] if run["verdict"] == "fitted" else gates(Key(run["tenant_id"], run["job_id"]), run["key_id"])


class _Caps:
    """How many runs may go from places where more are looked at."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._left = {(s.lane_id, s.tenant_id): s.most for s in shares if s.look}

    def reached(self, run: Row) -> bool:
        """Whether no more may go from where this run stands."""
        return self._left.get((run["lane_id"], run["tenant_id"]), 1) <= 0

    def use(self, run: Row) -> None:
        """One has gone."""
        place = run["lane_id"], run["tenant_id"]
        if place in self._left:
            self._left[place] -= 1


class _Fit:
    """Where runs that need more than a slot go: between workers whose rows are held, with what is left of them."""

    def __init__(
        self, rooms: dict[str, Room], preferred: Mapping[int, Row], awaited: Collection[str], fitting: Fitting
    ) -> None:
        self._workers, self._seating = list(rooms), Seating(list(rooms.values()))
        self._preferred, self._awaited, self._fitting = preferred, awaited, fitting
        self.unfit: list[Unfit] = []

    @classmethod
    async def between(
        cls, connection: Connection, candidates: list[Row], workers: list[str], whose: list[int], fitting: Fitting
    ) -> _Fit:
        """Hold the workers that have these free slots, and count what the runs they hold have of them."""
        slots: dict[str, list[int]] = {}
        for slot, worker in enumerate(whose):
            slots.setdefault(workers[worker - 1], []).append(slot)
        held = {row["id"]: row for row in await connection.fetch(SQL["lock_workers"], list(slots))}
        used = {row["id"]: Amounts(*row["used"]) for row in await connection.fetch(SQL["holdings"], list(held))}
        suspected = {row["id"] for row in await connection.fetch(SQL["suspected"], list(held))}
        kept = await _still_kept(connection, fitting.kept) if fitting.kept else {}
        rooms = {
            worker: Room(
                slots[worker],
                Amounts(*held[worker]["resources"]),
                used[worker],
                msgspec.json.decode(held[worker]["labels"]),
                fitting.lanes.get(worker),
                kept.get(worker),
                worker in suspected,
            )
            for worker in slots
            if worker in held
        }
        lanes = sorted({row["lane_id"] for row in candidates})
        preferred = {row["id"]: row for row in await connection.fetch(SQL["wanted_labels"], lanes)}
        return cls(rooms, preferred, kept.values(), fitting)

    def seat(self, run: Row) -> bool:
        """Whether there is a worker for this run; it is given its slot."""
        wanted = self._preferred.get(run["lane_id"])
        until = run["ready_at"] + self._fitting.near_wait if wanted is not None and wanted["near"] else None
        near_only = until is not None and run["now"] < until
        # One whose worker is not here is left to that worker: another one is not kept as well.
        starving = run["now"] - run["ready_at"] >= self._fitting.patience
        guest = Guest(
            run["id"],
            run["lane_id"],
            NOTHING if run["needs"] is None else Amounts(*run["needs"]),
            {} if wanted is None else msgspec.json.decode(wanted["prefer"]),
            near_only,
            starving and run["id"] not in self._awaited,
            run["suspect"],
        )
        if self._seating.seat(guest):
            return True
        if run["suspect"] and run["needs"] is None:  # it does not wait for room, and it waits for seconds at most
            return False
        until = until if near_only else None
        self.unfit.append(Unfit(run["lane_id"], run["tenant_id"], run["id"], run["order_key"], until))
        return False

    def slot(self, run_id: str) -> int:
        """The slot that a run was given (from 0)."""
        return self._seating.slot_of[run_id]

    @property
    def kept(self) -> dict[str, str | None]:
        """For whom each of these workers is kept."""
        return {worker: self._seating.kept.get(i) for i, worker in enumerate(self._workers)}


async def _still_kept(connection: Connection, kept: Mapping[str, Key]) -> dict[str, str]:
    """Without workers that are kept for a run that another dispatcher has started since, or that ended."""
    rows = await connection.fetch(SQL["still_queued"], *columns(sorted(set(kept.values())), 2))
    queued = {row["id"] for row in rows}
    return {worker: run.id for worker, run in kept.items() if run.id in queued}


def _judge(runs: Sequence[Row], limits: Mapping[str, Row], slots: int, caps: _Caps, fit: _Fit | None) -> Verdict:
    wishes = [
        Wish(i, r["job_id"], r["key_id"], limits[r["job_id"]]["max"], r["max"], _rate(r))
        if r["limited"]
        else Wish(i, "")
        for i, r in enumerate(runs)
    ]

    def seat(i: int) -> bool:
        if caps.reached(runs[i]) or (fit is not None and not fit.seat(runs[i])):
            return False
        caps.use(runs[i])
        return True

    running = {key: row["running"] for key, row in limits.items()}
    tats = {key: row["tat"] for key, row in limits.items()}
    return admit(wishes, running, tats, runs[0]["now"], slots, seat) if runs else Verdict([], [], {})


def _rate(run: Row) -> Rate | None:
    return None if run["rate_gap"] is None else Rate(run["rate_gap"], run["rate_burst"])


def _openings(runs: Sequence[Row], limits: Mapping[str, Row], verdict: Verdict) -> dict[Key, datetime]:
    """When each rate that was used, or that somebody waits for, lets the next one through."""
    out: dict[Key, datetime] = {}
    for run in runs:
        if not run["limited"]:
            continue
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

    def __getitem__(self, name: str) -> Any:
        return self._slot if name == "slot" else self._row[name]


def _count(going: list[Row], others: list[Row]) -> None:
    CLAIMED.inc(len(going))
    for row in others:
        if row["verdict"] in _SKIPPED:
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
    return Ahead(going, until, _next_due(left))


def _next_due(later: Sequence[Row]) -> dict[tuple[int, int], datetime | None]:
    return {(row["lane_id"], row["tenant_id"]): row["ready_at"] for row in later}


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


async def foremost(
    db: Database, places: Sequence[tuple[int, int, datetime, datetime]], slots: int
) -> dict[tuple[int, int], int]:
    """Of the first `slots` runs in one order over all these (lane, tenant, floor, floor of what is staged): how many
    stand in each place."""
    rows = await db.fetch("vital", SQL["foremost"], *columns(places, 4), slots)
    return {places[row["place"] - 1][:2]: row["runs"] for row in rows}


class Terms(NamedTuple):
    """A tenant's share, how many of its runs may run at once, and whether none may start."""

    weight: int = 1
    max_running: int | None = None
    suspended: bool = False


async def tenants(db: Database) -> dict[int, Terms]:
    """By what tenants are served."""
    return {row["id"]: Terms(*row[1:]) for row in await db.fetch("vital", SQL["tenants"])}


async def running(db: Database, tenant_ids: Sequence[int]) -> dict[int, int]:
    """How many runs of these tenants workers hold."""
    return {row["tenant_id"]: row["runs"] for row in await db.fetch("vital", SQL["running"], list(tenant_ids))}


class Pool(NamedTuple):
    """By what a pool is served: `policy` is `fair` (tenants by weight), or `priority` or `fifo` (all runs in one
    order); `head_start` is what one point of priority is worth; `tenants`: whom it is open to, None if to all."""

    policy: str = "fair"
    head_start: timedelta = HEAD_START
    paused: bool = False
    tenants: frozenset[int] | None = None


async def pools(db: Database) -> dict[str, Pool]:
    """By what pools are served."""
    rows = await db.fetch("vital", SQL["pools"])
    found = {row["name"]: Pool(row["policy"], row["head_start"], row["paused"]) for row in rows}
    closed = {row["name"]: frozenset(row["tenants"]) for row in rows if row["tenants"] is not None}
    return found | {name: found[name]._replace(tenants=tenants) for name, tenants in closed.items()}
