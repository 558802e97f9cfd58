"""claim: how fast runs of many tenants are claimed, some of them under limits, beside the raw claim of the floor.

The step itself, as a dispatcher calls it: shares by weight over all tenants that have something, batches of 500. No
HTTP and no worker, so that what is compared is the claim alone. 30 % of the runs are under a limit: a third of these by
`max_concurrency`, a third by a shared `concurrency_key`, a third by a rate, each wide enough to let all of them go.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.floor import race
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
Place = tuple[int, int]  # a lane, and a tenant in it
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
    """One round: so many runs of many tenants, claimed by so many clients side by side."""

    limited: float
    clients: int
    runs: int
    seconds: float
    postgres_us: float
    foreign_cores: float


def measure(
    stand: Stand, *, runs: int = 50_000, repeat: int = 3, clients: tuple[int, ...] = (1, 2)
) -> dict[tuple[float, int], list[Claims]]:
    """Rounds without limits and with, by one client and by two, as the floor has them, in turn; each claims the same
    runs again."""
    say(f"{TENANTS} tenants, {runs:,} runs …")
    _enqueue(stand, runs)
    found: dict[tuple[float, int], list[Claims]] = {}
    for number in range(1, repeat + 1):
        for share, count in itertools.product((0.0, LIMITED), clients):
            one = _round(stand, runs, share, count)
            found.setdefault((share, count), []).append(one)
            say(f"claim {number}/{repeat}, {describe(one)}")
    return found


def describe(one: Claims) -> str:
    """One line."""
    return (
        f"{one.limited:.0%} under limits: {one.per_second:,.0f} runs/s ({one.runs:,} in {one.seconds:.2f} s by "
        f"{one.clients} clients), PostgreSQL {one.postgres_us:.0f} µs a run; others used {one.foreign_cores:.2f} cores"
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


async def _prepare(stand: Stand, limited: float) -> list[Place]:
    """Everything is ready again, as if nothing had been claimed; where it stands."""
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
    return [tuple(r) for r in await stand.query("select distinct lane_id, tenant_id from runs")]


def _round(stand: Stand, runs: int, limited: float, clients: int) -> Claims:
    places = asyncio.run(_prepare(stand, limited))
    workers = [asyncio.run(_worker(stand)) for _ in range(clients)]
    stand.await_quiet()
    claimed = runs - clients * BATCH
    pace = race(stand, [functools.partial(_claimer, stand, places, worker) for worker in workers], claimed)
    [left] = asyncio.run(stand.query("select count(*) filter (where state <> 'running') as left from runs"))
    if left["left"]:
        raise RuntimeError(f"{left['left']} runs were not claimed")
    return Claims(limited, clients, claimed, claimed / pace.per_second, pace.postgres_us, pace.foreign_cores)


async def _claimer(stand: Stand, places: list[Place], worker: str, ready: Callable[[], Any]) -> None:
    """One dispatcher's claims, until nothing is left."""
    db = Database(stand.settings.database_url, size=2)
    await db.open()
    try:
        await _claim_all(db, places, worker, BATCH)  # the statements are prepared
        ready()
        await _claim_all(db, places, worker, sys.maxsize)
    finally:
        await db.close()


async def _worker(stand: Stand) -> str:
    worker = str(uuid.uuid4())
    await stand.query(
        "insert into workers (id, key_id, name, pool, slots, lease_until)"
        " values ($1, $1, 'bench', 'default', 1000000, now() + interval '1 hour')",
        worker,
    )
    return worker


async def _claim_all(db: Database, places: list[Place], worker: str, most: int) -> None:
    """As the dispatcher does, until `most` are claimed or nothing is left."""
    times, floors = VirtualTime(), dict.fromkeys(places, THE_BEGINNING)
    lane_of = {tenant: lane for lane, tenant in places}
    total = 0
    while total < most:
        wanted = allot(min(BATCH, most - total), times.of(lane_of), {})
        shares = [Share(lane_of[t], t, n, floors[lane_of[t], t]) for t, n in wanted.items()]
        taken = await claim.take(db, shares, [worker] * sum(wanted.values()))
        if not taken.rows:
            if all(floor == THE_BEGINNING for floor in floors.values()):
                break
            # Another one held what was passed over; a dispatcher looks again now and then, too.
            floors = dict.fromkeys(places, THE_BEGINNING)
        total += len(taken.rows)
        for row in taken.rows:
            times.charge(row["tenant_id"], 1, 1)
            place = row["lane_id"], row["tenant_id"]
            floors[place] = max(floors[place], row["order_key"])
