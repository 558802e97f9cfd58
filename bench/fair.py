"""fair: 20 tenants with weights 1 to 4 under saturation, with workers of one slot and of many; and a tenant's only run
behind another's 200,000. Counts starts, so the shares do not depend on how fast the machine is."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.stand import TENANTS, Api, Stand, await_until, marks, say

_BATCH = 5_000
_WAIT_SECONDS = 300.0
_CLAIMED = "tocsin_claim_runs_total"
_NOOP = {"kind": "python", "function": "bench.noop"}
_STARTED = """
select j.id::text as job,
       (select count(*) from history h where h.job_id = j.id and h.started_at is not null) as started,
       (select count(*) from runs r where r.job_id = j.id and r.state in ('ready', 'staged')) as queued
  from jobs j where j.id = any($1::uuid[])
"""


@dataclass(frozen=True)
class Shares:
    """What 20 tenants got of so many starts: the largest deviation from a tenant's share by weight, and Jain's index of
    what each got for its weight (1: all the same)."""

    workers: int
    slots: int
    starts: int
    worst: float
    jain: float


@dataclass(frozen=True)
class Lone:
    """How long a tenant's only run waited behind another's queue, each time."""

    queued: int
    waited_ms: list[float]


def measure(stand: Stand) -> tuple[list[Shares], Lone]:
    """Shares with one-slot workers, then with one large one; then the lone run."""
    jobs = _tenants(stand.api)
    # Enough that nobody runs dry: what is asked for goes by weight, and half as much again.
    shares = [_shares(stand, jobs, workers=4, slots=1, starts=4_000), _shares(stand, jobs, 1, 200, 20_000)]
    _empty(stand, jobs)
    return shares, _lone(stand)


def jain(values: list[float]) -> float:
    """Jain's index of fairness: 1 if all are alike, 1/n if one has all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def _tenants(api: Api) -> dict[str, tuple[str, int]]:
    """A manual no-op job for each tenant, and the tenant's weight, by slug."""
    jobs = {}
    for number in range(TENANTS):
        slug, weight = f"fair-{number:02d}", number % 4 + 1
        api.post("/v1/tenants", {"slug": slug, "weight": weight})
        jobs[slug] = api.create_job(_NOOP, slug), weight
    return jobs


def _shares(stand: Stand, jobs: dict[str, tuple[str, int]], workers: int, slots: int, starts: int) -> Shares:
    total = sum(weight for _, weight in jobs.values())
    for slug, (job, weight) in jobs.items():
        _enqueue(stand.api, job, slug, starts * weight * 3 // (total * 2))
    before = asyncio.run(_started(stand, jobs))
    goal = stand.api.counter(_CLAIMED) + starts
    stand.start_workers(workers, slots)
    try:
        await_until(lambda: stand.api.counter(_CLAIMED) >= goal, f"{goal} runs are claimed", _WAIT_SECONDS)
    finally:
        stand.stop_workers()
    after = asyncio.run(_started(stand, jobs))
    if dry := [slug for slug, (_, queued) in after.items() if not queued]:
        raise RuntimeError(f"{', '.join(dry)} ran dry: what the others got meanwhile says nothing")
    got = {slug: after[slug][0] - before[slug][0] for slug in jobs}
    all_starts = sum(got.values())
    worst = max(abs(got[slug] * total / (all_starts * weight) - 1) for slug, (_, weight) in jobs.items())
    found = Shares(workers, slots, all_starts, worst, jain([got[slug] / weight for slug, (_, weight) in jobs.items()]))
    say(describe(found))
    return found


def describe(one: Shares) -> str:
    """One line."""
    return f"{one.starts:,} starts, {one.workers} × {one.slots} slots: at most {one.worst:.1%} off, Jain {one.jain:.4f}"


def _lone(stand: Stand, queued: int = 200_000, times: int = 5) -> Lone:
    api = stand.api
    for slug in ("crowd", "lone"):
        api.post("/v1/tenants", {"slug": slug})
    crowd = api.create_job(_NOOP, "crowd")
    mark = api.create_job({"kind": "python", "function": "bench.mark"}, "lone")
    _enqueue(api, crowd, "crowd", queued)
    begun = api.counter(_CLAIMED)
    with marks() as path:
        stand.start_workers(1, 200)
        try:
            await_until(lambda: api.counter(_CLAIMED) >= begun + 1_000, "the crowd is at work", _WAIT_SECONDS)
            for number in range(1, times + 1):
                api.post(f"/v1/jobs/{mark}/runs", {"args": {"path": str(path), "sent": time.time()}}, "lone")
                seen = functools.partial(_has_lines, path, number)
                await_until(seen, "the lone run starts", _WAIT_SECONDS, every=0.002)
        finally:
            stand.stop_workers()
        lines = [line.split() for line in path.read_text().splitlines()]
    left = asyncio.run(stand.query("select count(*) from runs where job_id = $1 and state = 'ready'", crowd))[0][0]
    if not left:
        raise RuntimeError("the crowd was gone before the lone run came")
    return Lone(queued, [1000 * (float(started) - float(sent)) for started, sent in lines])


def _enqueue(api: Api, job: str, tenant: str, runs: int) -> None:
    while runs > 0:
        size = min(runs, _BATCH)
        api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * size}, tenant)
        runs -= size


def _has_lines(path: Path, count: int) -> bool:
    return path.read_text().count("\n") >= count


def _empty(stand: Stand, jobs: dict[str, tuple[str, int]]) -> None:
    """What is left would only be in the way of the next measurement."""
    for slug, (job, _) in jobs.items():
        stand.api.post(f"/v1/jobs/{job}/cancel", {}, slug)


async def _started(stand: Stand, jobs: dict[str, tuple[str, int]]) -> dict[str, tuple[int, int]]:
    slugs = {job: slug for slug, (job, _) in jobs.items()}
    rows = await stand.query(_STARTED, list(slugs))
    return {slugs[row["job"]]: (row["started"], row["queued"]) for row in rows}


def document(shares: list[Shares], lone: Lone) -> dict[str, object]:
    """For the results' file."""
    return {"shares": [asdict(one) for one in shares], "lone": asdict(lone)}
