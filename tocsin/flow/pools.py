"""pools: what waits in each, who works for it, and by which order; set, paused and resumed by the platform."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from tocsin.clock import iso
from tocsin.errors import InvalidInput, NotFound, PreconditionFailed
from tocsin.flow.shared import audit, slugs
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.model.access import Identity
from tocsin.model.autoscale import WINDOW, Sample, load_of, wanted_workers
from tocsin.model.estimate import Estimate, Pace, ahead_of, in_queue, latest, not_before
from tocsin.model.fairness import HEAD_START, worst_case_wait
from tocsin.model.scalars import Duration
from tocsin.model.states import LIVE
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.telemetry import DEPTH, OVERDUE, WANTED_WORKERS
from tocsin.wire import PoolPatch

SQL = Sql(__file__)
LONGEST_HEAD_START = timedelta(hours=1)
_ALL = 100_000


class _Seen(NamedTuple):
    """A pool when this node last looked: whom it is open to (None: all), free slots, and of each tenant its weight and
    how many of its runs wait."""

    paused: bool
    open_to: Sequence[int] | None
    free: int
    queues: dict[int, tuple[int, int]]


class PoolBook:
    """The pools as this node sees them: what is in them now, and what they did in the last minute."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._samples: dict[str, deque[Sample]] = defaultdict(deque)
        self._slots: dict[str, float] = {}  # of one worker, as long as there was one
        self._seen: dict[str, _Seen] = {}
        self._ahead: dict[tuple[str, int], int] = {}

    async def list(self, who: Identity, after: str | None, limit: int) -> list[dict[str, Any]]:
        """Pools by name, those that are closed to the caller left out. Depths count the caller's runs only, unless it
        is the platform, which also learns how many workers are wanted."""
        rows = await self._db.fetch("engine", SQL["pools"], None, after, limit, who.bound_to)
        return [self._document(row, who) for row in rows]

    async def get(self, who: Identity, name: str) -> dict[str, Any]:
        """One of them; one that is closed to the caller does not exist for it."""
        row = await self._db.fetchrow("engine", SQL["pools"], name, None, 1, who.bound_to)
        if row is None:
            raise NotFound("there is no such pool")
        return self._document(row, who)

    async def measure(self, claimed: Mapping[str, int]) -> None:
        """Add what this node handed out since the last time, remember a sample of each pool, and set the gauges."""
        if claimed:
            await self._db.fetch("engine", SQL["count_claimed"], *columns(list(claimed.items()), 2))
        rows = await self._db.fetch("engine", SQL["pools"], None, None, _ALL, None)
        states: Counter[str] = Counter()
        self._ahead.clear()
        for row in rows:
            depth = _depth(row)
            states.update(depth)
            self._remember(row)
            busy = depth["running"] + depth["stopping"]
            queues = msgspec.json.decode(row["queues"], type=dict[int, tuple[int, int]])
            free = row["slots"] - busy
            self._seen[row["name"]] = _Seen(row["paused_at"] is not None, row["open_to"], free, queues)
            WANTED_WORKERS.labels(row["name"]).set(self._wanted(row))
        for state in LIVE:
            DEPTH.labels(state).set(states[state])
        OVERDUE.set(max((_lag(row) for row in rows if row["paused_at"] is None), default=0.0))

    def pace(self, pool: str) -> Pace | None:
        """How many were handed out lately, by all servers, as far as this one has seen."""
        samples = self._samples.get(pool)
        if not samples or samples[-1].at <= samples[0].at:
            return None
        return Pace(samples[-1].claimed - samples[0].claimed, samples[-1].at - samples[0].at)

    def start_of(self, tenant_id: int, pool: str, due: datetime, now: datetime) -> Estimate | None:
        """When a run that is not in the queue yet will start; None if nobody can tell. By what was seen a few seconds
        ago: `explain` looks again, and knows the run."""
        seen = self._seen.get(pool)
        if seen is None or due > now + timedelta(seconds=WINDOW):
            return not_before(due)  # what waits now says nothing about then
        if seen.paused or (seen.open_to is not None and tenant_id not in seen.open_to):
            return None
        ahead = self._ahead.get((pool, tenant_id))
        if ahead is None:
            others = dict(seen.queues)
            weight, mine = others.pop(tenant_id, (1, 0))
            ahead = self._ahead[pool, tenant_id] = ahead_of(mine, weight, list(others.values()))
        return latest([not_before(due), in_queue(now, ahead, max(0, seen.free), self.pace(pool))])

    def _remember(self, row: Row) -> None:
        samples, sample = self._samples[row["name"]], _sample(row)
        if samples and samples[-1].at > sample.at:
            samples.clear()  # the database's clock was set back
        samples.append(sample)
        while samples[0].at < sample.at - WINDOW:
            samples.popleft()

    def _wanted(self, row: Row) -> int:
        if row["workers"]:
            self._slots[row["name"]] = row["slots"] / row["workers"]
        load = load_of([*self._samples[row["name"]], _sample(row)])
        if row["paused_at"] is not None:
            load = load._replace(queued=0, arrivals=0.0)  # whoever came would find nothing to do
        return wanted_workers(load, self._slots.get(row["name"], 1.0))

    def _document(self, row: Row, who: Identity) -> dict[str, Any]:
        return {
            "name": row["name"],
            "version": row["version"],
            "policy": row["policy"],
            "head_start": str(Duration(row["head_start"])),
            "worst_case_wait": str(Duration(worst_case_wait(row["head_start"]))),
            "paused_at": row["paused_at"] and iso(row["paused_at"]),
            "tenants": row["tenants"],
            "depth": _depth(row),
            "due": row["due"],
            "oldest_due_at": row["oldest_due"] and iso(row["oldest_due"]),
            "lag_ms": round(_lag(row) * 1000, 3),
            "workers": row["workers"],
            "slots": row["slots"],
            "wanted_workers": self._wanted(row) if who.bound_to is None else None,
        }


def _depth(row: Row) -> dict[str, int]:
    return dict.fromkeys(LIVE, 0) | msgspec.json.decode(row["depth"], type=dict[str, int])


def _lag(row: Row) -> float:
    return (row["now"] - row["oldest_due"]).total_seconds() if row["oldest_due"] else 0.0


def _sample(row: Row) -> Sample:
    depth = _depth(row)
    return Sample(row["now"].timestamp(), row["claimed"], row["due"], depth["running"] + depth["stopping"])


# ── what the platform may change ─────────────────────────────────────────────────────────────────────────────────


async def change(
    db: Database, who: Identity, name: str, patch: PoolPatch, wish: Wish | None, version: int | None
) -> None:
    """Another policy or head start, or other tenants that may use it. Runs that are there keep their places: an order
    key is a constant. Those of a tenant that may not use it any more wait, from the first claim that begins after this
    on."""
    given = {field: str(value) for field in ("policy", "head_start") if (value := getattr(patch, field)) is not None}
    if patch.tenants is not UNSET:
        given["tenants"] = "all" if patch.tenants is None else ", ".join(patch.tenants)
    named = await slugs.ids_of(db, patch.tenants, "tenants") if patch.tenants else patch.tenants
    async with db.transaction("pools") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock"], name)
        _seen(was, name, version)
        policy = patch.policy or was["policy"]
        head_start = _head_start(policy, was, patch)
        tenants = was["tenants"] if named is UNSET else named
        before, after = (was["policy"], was["head_start"], was["tenants"]), (policy, head_start, tenants)
        if before != after:
            await connection.execute(SQL["change"], name, policy, head_start, was["paused_at"] is not None, tenants)
            texts = (" ".join(map(str, terms)) for terms in (before, after))
            entry = audit.platform_entry(who, "pool.update", f"pool:{name}", **given)
            await audit.record(connection, entry.changing(*texts))
        await remember(connection, wish, 200, [])


def _head_start(policy: str, was: Row, patch: PoolPatch) -> timedelta:
    """First come, first served is no head start at all; a pool that leaves it has the usual one again."""
    given = None if patch.head_start is None else patch.head_start.delta
    if policy == "fifo":
        if given:
            raise InvalidInput.field("head_start", "invalid", "a pool that is fifo has none")
        return timedelta(0)
    if given is not None and given > LONGEST_HEAD_START:
        raise InvalidInput.field("head_start", "invalid", "is at most one hour for each point of priority")
    kept: timedelta = HEAD_START if was["policy"] == "fifo" else was["head_start"]
    return kept if given is None else given


async def switch(
    db: Database,
    who: Identity,
    name: str,
    verb: Literal["pause", "resume"],
    reason: str,
    wish: Wish | None,
    version: int | None,
) -> None:
    """Let nothing more be claimed from a pool, by any claim that begins after this; or let it be again."""
    async with db.transaction("pools") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock"], name)
        _seen(was, name, version)
        paused = verb == "pause"
        if (was["paused_at"] is not None) != paused:
            await connection.execute(SQL["change"], name, was["policy"], was["head_start"], paused, was["tenants"])
            entry = audit.platform_entry(who, f"pool.{verb}", f"pool:{name}", reason=reason)
            await audit.record(connection, entry)
        await remember(connection, wish, 200, [])


def _seen(row: Row | None, name: str, version: int | None) -> None:
    if row is None:
        raise NotFound("there is no such pool")
    if version is not None and row["version"] != version:
        raise PreconditionFailed(f"pool {name!r} is at version {row['version']}")
