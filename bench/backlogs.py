"""backlogs: every kind of backlog in one database, and an ordinary tenant beside them.

Thousands of tenants and lanes, keys that stay full, cursors that this server cannot read, expired runs in front of
fresh ones, and jobs that catch up after hours of downtime. The benchmark measures how late the ordinary tenant's runs
start during that time, and whether each backlog drains.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bench.stand import Api, Stand, await_until, marks, say

BAR_SECONDS = 1.0
_SLOTS = 600  # in addition to the slots that the full keys hold
_SUBMITS_A_SECOND = 20
_WAIT_SECONDS = 1800.0
_CLAIMED = "tocsin_claim_runs_total"
_NOOP = {"kind": "python", "function": "bench.noop"}
_UNREADABLE_RULES = "9999z"
_BATCH = 5_000

# Rows as they are after hours of downtime. All servers are stopped while these statements run.
_EXPIRE = "update runs set deadline_at = now() - interval '1 second' where job_id = $1::uuid"
_HIDE_CURSORS = """
with hidden as (
    update jobs set zone_rules = $2 where id = any($1::uuid[]) returning tenant_id, id
)
update triggers t set next_fire_at = now() - interval '1 hour'
  from hidden h where t.tenant_id = h.tenant_id and t.job_id = h.id
"""
# Rows as an edit by a server with newer rules writes them.
_SHOW_CURSORS = """
with shown as (
    update jobs set zone_rules = null where id = any($1::uuid[]) returning tenant_id, id
)
update triggers t set waits_for = null
  from shown s where t.tenant_id = s.tenant_id and t.job_id = s.id
"""
_REWIND = """
with late as (
    update jobs set anchored_at = now() - $2::interval - interval '1 minute'
     where id = any($1::uuid[]) returning tenant_id, id
)
update triggers t set next_fire_at = now() - $2::interval
  from late l where t.tenant_id = l.tenant_id and t.job_id = l.id
"""
_OUTAGE = "update planner set turned_at = now() - $1::interval"
_COUNT_LIVE = "select count(*) from runs where job_id = any($1::uuid[])"
_COUNT_ENDED = """
select count(*) from history where job_id = any($1::uuid[]) and final and state = $2
"""
_COUNT_STUCK = """
select count(*) from triggers where job_id = any($1::uuid[]) and next_fire_at < now() - interval '10 seconds'
"""
_LAGS = """
select extract(epoch from started_at - ready_at)::float8 as lag
  from history where job_id = $1::uuid and ready_at >= $2 and started_at is not null
"""


@dataclass(frozen=True)
class Sizes:
    """The size of each backlog."""

    tenants: int = 2_000
    lanes: int = 20_000
    full_keys: int = 1_000
    unreadable_cursors: int = 1_000
    expired_runs: int = 100_000
    late_jobs: int = 50
    outage_seconds: int = 3 * 3600


SMALL = Sizes(
    tenants=60,
    lanes=600,
    full_keys=1_020,
    unreadable_cursors=1_020,
    expired_runs=5_000,
    late_jobs=5,
    outage_seconds=600,
)


@dataclass(frozen=True)
class Lag:
    """Seconds between the instant at which runs were due and their start."""

    runs: int
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True)
class Backlogs:
    """The delays that the ordinary tenant saw, and after how many seconds each backlog was gone."""

    sizes: Sizes
    scheduled: Lag
    asked_for: Lag
    behind_expired: Lag
    drained_after: dict[str, float] = field(default_factory=dict)
    late_runs: int = 0

    def document(self) -> dict[str, Any]:
        """Return the figures for the results file."""
        return asdict(self) | {"bar": BAR_SECONDS}


def describe(one: Backlogs) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of the table."""
    for what, lag in (
        ("ordinary schedule", one.scheduled),
        ("ordinary run by request", one.asked_for),
        ("fresh run behind expired ones", one.behind_expired),
    ):
        more = f"p50 {lag.p50 * 1000:.0f} ms, longest {lag.longest * 1000:.0f} ms, {lag.runs:,} runs"
        yield f"{what}: start lag p99", f"{lag.p99 * 1000:.0f} ms", f"{more} (bar: {BAR_SECONDS * 1000:.0f} ms)"
    for what, seconds in one.drained_after.items():
        yield f"{what}: drained after", f"{seconds:.1f} s", f"{one.late_runs:,} runs" if what == "late" else ""


def measure(stand: Stand, sizes: Sizes) -> Backlogs:
    """Build all backlogs, start the system again, and watch the ordinary tenant until every backlog is gone."""
    with marks() as gate:
        made = _Made(stand, sizes, gate)
        made.build()
        stand.stop_server()
        made.age()
        stand.start_workers(1, _SLOTS + sizes.full_keys)
        say("all backlogs are there; starting the server again …")
        try:
            made.begin()
            with _ordinary_load(stand.api.another(), made):
                drained = made.drain(gate)
        finally:
            stand.stop_workers()
    return made.result(drained)


class _Made:
    """The backlogs of one round: the ids of their jobs, and when each is gone."""

    def __init__(self, stand: Stand, sizes: Sizes, gate: Path) -> None:
        self._stand, self._sizes, self._gate = stand, sizes, gate
        self.scheduled, self.asked_for, self.fresh, self.expired = "", "", "", ""
        self.keyed: list[str] = []
        self.unreadable: list[str] = []
        self.late: list[str] = []
        self.late_runs = 0
        self._begun = 0.0
        self._since: datetime | None = None

    # ── building ─────────────────────────────────────────────────────────────────────────────────────────────────

    def build(self) -> None:
        """Submit everything through the API."""
        api, sizes = self._stand.api, self._sizes
        slugs = [f"tenant-{n:05d}" for n in range(sizes.tenants)]
        say(f"{sizes.tenants:,} tenants, {sizes.lanes:,} lanes …")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(_Tenants(api, sizes).make, slugs))
        for slug in ("ordinary", "expiring", "late", "unreadable"):
            api.post("/v1/tenants", {"slug": slug})
        every_second = {"every": "PT1S"}
        self.scheduled = _create(api, "ordinary", [{"schedule": every_second, "overlap": "allow"}])[0]
        self.asked_for = _create(api, "ordinary", [{}])[0]
        self.fresh = _create(api, "expiring", [{}])[0]
        self.expired = _create(api, "expiring", [{"start_deadline": "PT10H"}])[0]
        say(f"{sizes.full_keys:,} keys, {sizes.unreadable_cursors:,} cursors, {sizes.late_jobs:,} late jobs …")
        hold = {"kind": "python", "function": "bench.hold", "kwargs": {"gate": str(self._gate)}}
        keyed = [{"target": hold, "concurrency_key": f"key-{n}"} for n in range(sizes.full_keys)]
        self.keyed = _create(api, slugs[0], keyed)
        daily = {"schedule": {"cron": "0 0 * * *", "timezone": "Europe/Berlin"}}
        self.unreadable = _create(api, "unreadable", [daily] * sizes.unreadable_cursors)
        misfire = {"policy": "all", "max": 10_000, "window": "PT24H"}
        catching_up = {"schedule": every_second | {"misfire": misfire}, "overlap": "allow"}
        self.late = _create(api, "late", [catching_up] * sizes.late_jobs)
        say(f"{sizes.expired_runs:,} runs that expire …")
        self._queue(api, self.expired, "expiring", sizes.expired_runs)
        for job in self.keyed:
            self._queue(api, job, slugs[0], 2)

    def _queue(self, api: Api, job: str, tenant: str, runs: int) -> None:
        for first in range(0, runs, _BATCH):
            api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * min(_BATCH, runs - first)}, tenant)

    def age(self) -> None:
        """Make the rows as old as an outage would have left them. No server runs now."""
        asyncio.run(self._age(timedelta(seconds=self._sizes.outage_seconds)))

    async def _age(self, outage: timedelta) -> None:
        connection = await self._stand.connect()
        try:
            await connection.execute(_EXPIRE, self.expired)
            await connection.execute(_HIDE_CURSORS, self.unreadable, _UNREADABLE_RULES)
            await connection.execute(_REWIND, self.late, outage)
            await connection.execute(_OUTAGE, outage)
            await connection.execute("vacuum analyze")
        finally:
            await connection.close()

    def begin(self) -> None:
        """Wait for the server and for the worker's first claim. Runs that are due after that are measured."""
        claimed = self._stand.api.counter(_CLAIMED)
        self._begun = time.monotonic()
        await_until(lambda: self._stand.api.counter(_CLAIMED) > claimed, "a first claim")
        self._since = self._query("select now()")

    # ── draining ─────────────────────────────────────────────────────────────────────────────────────────────────

    def drain(self, gate: Path) -> dict[str, float]:
        """Wait until each backlog is gone. Full keys and hidden cursors stay until the other backlogs are gone."""
        drained = {}
        self._await("expired", lambda: self._live([self.expired]) == 0)
        drained["expired"] = time.monotonic() - self._begun
        say(f"expired runs are gone after {drained['expired']:.1f} s")
        least = self._sizes.late_jobs * min(self._sizes.outage_seconds, 10_000)
        self._await("late", lambda: self._ended(self.late) >= least)
        drained["late"] = time.monotonic() - self._begun
        self.late_runs = least
        say(f"late occurrences have run after {drained['late']:.1f} s")
        shown = time.monotonic()
        self._query(_SHOW_CURSORS, self.unreadable)
        self._await("cursors", lambda: self._query(_COUNT_STUCK, self.unreadable) == 0)
        drained["cursors"] = time.monotonic() - shown
        opened = time.monotonic()
        gate.write_text("open")
        self._await("keys", lambda: self._live(self.keyed) == 0)
        drained["keys"] = time.monotonic() - opened
        return drained

    def _await(self, what: str, gone: Any) -> None:
        await_until(gone, f"{what} drained", _WAIT_SECONDS, every=0.5)

    def _live(self, jobs: list[str]) -> int:
        return int(self._query(_COUNT_LIVE, jobs))

    def _ended(self, jobs: list[str]) -> int:
        return int(self._query(_COUNT_ENDED, jobs, "succeeded"))

    def _query(self, statement: str, *values: object) -> Any:
        rows = asyncio.run(self._stand.query(statement, *values))
        return rows[0][0] if rows else None

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────

    def result(self, drained: dict[str, float]) -> Backlogs:
        """Read the lags of the ordinary runs from history."""
        scheduled, asked_for, fresh = map(self._lag, (self.scheduled, self.asked_for, self.fresh))
        return Backlogs(self._sizes, scheduled, asked_for, fresh, drained, self.late_runs)

    def _lag(self, job: str) -> Lag:
        rows = asyncio.run(self._stand.query(_LAGS, job, self._since))
        lags = sorted(row["lag"] for row in rows)
        return Lag(len(lags), statistics.median(lags), lags[int(len(lags) * 0.99)], lags[-1])


class _Tenants:
    """Creates tenants with jobs whose lanes no worker serves. Each thread has its own connection."""

    def __init__(self, api: Api, sizes: Sizes) -> None:
        self._api, self._lanes = api, sizes.lanes // sizes.tenants
        self._own = threading.local()

    def make(self, slug: str) -> None:
        """Create one tenant and its jobs."""
        if not hasattr(self._own, "api"):
            self._own.api = self._api.another()
        self._own.api.post("/v1/tenants", {"slug": slug})
        module = slug.replace("-", "_")
        targets = [{"kind": "python", "function": f"{module}.job_{n}"} for n in range(self._lanes)]
        _create(self._own.api, slug, [{"target": target} for target in targets])


def _create(api: Api, tenant: str, jobs: list[dict[str, Any]]) -> list[str]:
    """Create jobs and return their ids."""
    bodies = [{"schedule": {"manual": True}, "target": _NOOP} | job for job in jobs]
    made: list[str] = []
    for first in range(0, len(bodies), 1_000):
        answer = api.post("/v1/jobs/batch", {"jobs": bodies[first : first + 1_000]}, tenant)
        made += [item["id"] for item in answer["items"]]
    return made


@contextmanager
def _ordinary_load(api: Api, made: _Made) -> Iterator[None]:
    """Submit a run of the ordinary tenant, and one behind the expired runs, twenty times a second each."""
    over = threading.Event()

    def submit() -> None:
        while not over.wait(1 / _SUBMITS_A_SECOND):
            api.post(f"/v1/jobs/{made.asked_for}/runs", {}, "ordinary")
            api.post(f"/v1/jobs/{made.fresh}/runs", {}, "expiring")

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
