"""claim: how fast runs of many tenants are claimed, some of them under limits, beside the raw claim of the floor.

The step itself, as a dispatcher calls it: shares by weight over all tenants that have something, batches of 500. No
HTTP and no worker, so that what is compared is the claim alone. 30 % of the runs are under a limit: a third of these by
`max_concurrency`, a third by a shared `concurrency_key`, a third by a rate, each wide enough to let all of them go.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from bench.stand import Rated, Stand, say
from tocsin.flow import claim
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.model.fairness import VirtualTime, allot
from tocsin.store.db import Database

TENANTS = 200
BATCH = 500
LIMITED = 0.3
_TARGET = {"kind": "python", "function": "bench.noop"}
_WIDE = 1_000_000
_LIMITS: tuple[dict[str, Any], ...] = (
    {"max_concurrency": _WIDE},
    {"concurrency_key": {"key": "shared", "max": _WIDE}},
    {"rate_limit": {"rate": "1000000/s", "burst": _WIDE}},
)
_UNDO = """
update runs set state = 'ready', attempt = 0, worker_id = null, claim_id = null, claimed_at = null
 where state <> 'ready'
"""


@dataclass(frozen=True)
class Claims(Rated):
    """One round: so many runs of so many tenants, claimed by so many statements."""

    limited: float
    runs: int
    claims: int
    seconds: float
    postgres_us: float
    foreign_cores: float


def measure(stand: Stand, *, runs: int = 50_000, repeat: int = 3) -> list[Claims]:
    """Rounds without limits and with, in turn; each claims the same runs again."""
    say(f"{TENANTS} tenants, {runs:,} runs …")
    _enqueue(stand, runs)
    found = []
    for number in range(1, repeat + 1):
        for share in (0.0, LIMITED):
            found.append(asyncio.run(_round(stand, runs, share)))
            say(f"claim {number}/{repeat}, {describe(found[-1])}")
    return found


def describe(one: Claims) -> str:
    """One line."""
    return (
        f"{one.limited:.0%} under limits: {one.per_second:,.0f} runs/s ({one.runs:,} in {one.seconds:.2f} s by "
        f"{one.claims} claims), PostgreSQL {one.postgres_us:.0f} µs a run; others used {one.foreign_cores:.2f} cores"
    )


def _enqueue(stand: Stand, runs: int) -> None:
    """The same number of runs for each tenant, of a plain job and of one for each limit."""
    api = stand.api
    for number in range(TENANTS):
        slug = f"claim-{number:03d}"
        api.post("/v1/tenants", {"slug": slug})
        mine = runs * (number + 1) // TENANTS - runs * number // TENANTS
        limited = round(mine * LIMITED)
        of_each = [limited * (n + 1) // len(_LIMITS) - limited * n // len(_LIMITS) for n in range(len(_LIMITS))]
        for count, limit in ((mine - limited, {}), *zip(of_each, _LIMITS, strict=True)):
            job = api.create_job(_TARGET, slug, **limit)
            api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * count}, slug)


async def _round(stand: Stand, runs: int, limited: float) -> Claims:
    await stand.query(_UNDO)
    # Without limits: the same runs, as if nobody had set any.
    await stand.query(
        "update runs r set limited = $1 and (j.max_concurrency is not null or j.key_id is not null or"
        " j.rate_gap is not null) from jobs j where j.id = r.job_id",
        limited > 0,
    )
    # In turn, as they would come in: not all of one job after all of another.
    await stand.query(
        "update runs r set order_key = o.at from (select id, timestamptz '2026-01-01' + interval '1 microsecond' *"
        " row_number() over (partition by tenant_id order by md5(id::text)) as at from runs) o where o.id = r.id"
    )
    # As fresh as the floor's own rows.
    await stand.query("vacuum (full, analyze) runs")
    stand.await_quiet()
    db = Database(stand.settings.database_url, size=2)
    await db.open()
    try:
        worker = await _worker(stand)
        places = [tuple(r) for r in await stand.query("select distinct lane_id, tenant_id from runs")]
        await _claim_all(db, places, worker, BATCH)  # the statements are prepared
        begun, own, before = time.perf_counter(), time.process_time(), stand.cpu()
        claimed, claims = await _claim_all(db, places, worker, runs)
        seconds, used = time.perf_counter() - begun, stand.cpu().since(before)
        foreign = max(0.0, used.foreign() - (time.process_time() - own)) / seconds
    finally:
        await db.close()
    [left] = await stand.query("select count(*) filter (where state <> 'running') as left from runs")
    if left["left"]:
        raise RuntimeError(f"{left['left']} runs were not claimed")
    return Claims(limited, claimed, claims, seconds, used.trees["postgres"] * 1e6 / claimed, foreign)


async def _worker(stand: Stand) -> str:
    worker = str(uuid.uuid4())
    await stand.query(
        "insert into workers (id, key_id, name, pool, slots, lease_until)"
        " values ($1, $1, 'bench', 'default', 1000000, now() + interval '1 hour')",
        worker,
    )
    return worker


async def _claim_all(db: Database, places: list[tuple[Any, ...]], worker: str, most: int) -> tuple[int, int]:
    """As the dispatcher does, until `most` are claimed or nothing is left; how many were, and by how many claims."""
    times, floors = VirtualTime(), dict.fromkeys(places, THE_BEGINNING)
    lane_of = {tenant: lane for lane, tenant in places}
    total = claims = 0
    while total < most:
        wanted = allot(min(BATCH, most - total), times.of(lane_of), {})
        shares = [Share(lane_of[t], t, n, floors[lane_of[t], t]) for t, n in wanted.items()]
        taken = await claim.take(db, shares, [worker] * sum(wanted.values()))
        claims += 1
        if not taken.rows:
            break
        total += len(taken.rows)
        for row in taken.rows:
            times.charge(row["tenant_id"], 1, 1)
            place = row["lane_id"], row["tenant_id"]
            floors[place] = max(floors[place], row["order_key"])
    return total, claims
