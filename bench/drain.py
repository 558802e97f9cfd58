"""drain: queued no-op runs of 20 tenants, through the HTTP worker protocol into history, end to end."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

from bench.cpu import Usage
from bench.stand import TENANTS, Api, Rated, Stand, say

_BATCH = 5_000  # the API's limit for one call
_WARM_RUNS = 20  # per tenant
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.25  # rendering /metrics costs the server a millisecond or two
_CLAIMED = "tocsin_claim_runs_total"
_REPORTED = "tocsin_report_attempts_total"
_COUNT = """
select count(*) filter (where final and state = 'succeeded') as good, count(*) as every,
       (select count(*) from runs where job_id = any($1::uuid[])) as live
  from history where job_id = any($1::uuid[])
"""


class _Counts(NamedTuple):
    good: int
    every: int
    live: int


@dataclass(frozen=True)
class Drain(Rated):
    """One drain, from the first claim to the last history row."""

    runs: int
    slots: int
    workers: int
    seconds: float
    enqueue_per_second: float
    postgres_us: float
    server_us: float
    worker_us: float
    foreign_cores: float


def measure(stand: Stand, *, runs: int = 50_000, slots: int = 2_000, workers: int = 1, repeat: int = 3) -> list[Drain]:
    """Several drains on one stand, one after the other."""
    jobs = create_jobs(stand.api)
    say("warming up …")
    drain_once(stand, jobs, _WARM_RUNS * TENANTS, slots, workers)
    found = []
    for number in range(1, repeat + 1):
        found.append(drain_once(stand, jobs, runs, slots, workers))
        say(f"drain {number}/{repeat}: {describe(found[-1])}")
    return found


def median(drains: list[Drain]) -> Drain:
    """The drain in the middle, by rate (the lower of two)."""
    middle = statistics.median_low(one.per_second for one in drains)
    return next(one for one in drains if one.per_second == middle)


def describe(one: Drain) -> str:
    """One line."""
    return (
        f"{one.per_second:,.0f} runs/s ({one.runs:,} in {one.seconds:.2f} s, {one.workers} × {one.slots} slots), "
        f"CPU µs per run: PostgreSQL {one.postgres_us:.0f}, server {one.server_us:.0f}, worker {one.worker_us:.0f}; "
        f"enqueued {one.enqueue_per_second:,.0f}/s; others used {one.foreign_cores:.2f} cores"
    )


def create_jobs(api: Api) -> dict[str, str]:
    """One manual no-op job per tenant: its id by the tenant's slug."""
    jobs = {}
    for number in range(TENANTS):
        slug = f"bench-{number:02d}"
        api.post("/v1/tenants", {"slug": slug})
        jobs[slug] = api.create_job({"kind": "python", "function": "bench.noop"}, slug)
    return jobs


def enqueue(api: Api, jobs: dict[str, str], runs: int) -> float:
    """Submit this many runs, spread evenly; answers the seconds it took."""
    begun = time.perf_counter()
    for number, (tenant, job) in enumerate(jobs.items()):
        left = runs * (number + 1) // len(jobs) - runs * number // len(jobs)
        while left > 0:
            size = min(left, _BATCH)
            api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * size}, tenant)
            left -= size
    return time.perf_counter() - begun


def drain_once(stand: Stand, jobs: dict[str, str], runs: int, slots: int, workers: int) -> Drain:
    """Queue so many runs, let workers come, and wait until the last has ended."""
    api = stand.api
    finished = asyncio.run(_finished(stand, jobs))
    claimed, reported = api.counter(_CLAIMED), api.counter(_REPORTED)
    # Every drain begins alike: with what autovacuum leaves of a queue that was empty for a few seconds.
    asyncio.run(stand.query("vacuum (analyze) runs"))
    enqueue_seconds = enqueue(api, jobs, runs)
    stand.await_quiet()
    stand.start_workers(workers, slots)
    try:
        _wait(api, _CLAIMED, claimed + 1, fast=True)
        begun, before = time.perf_counter(), stand.cpu()
        _wait(api, _REPORTED, reported + runs)
        seconds, used = time.perf_counter() - begun, stand.cpu().since(before)
    finally:
        stand.stop_workers()
    _verify(finished, asyncio.run(_finished(stand, jobs)), runs)
    return _result(runs, slots, workers, seconds, runs / enqueue_seconds, used)


def _result(runs: int, slots: int, workers: int, seconds: float, enqueued: float, used: Usage) -> Drain:
    micro = {name: value * 1e6 / runs for name, value in used.trees.items()}
    return Drain(
        runs,
        slots,
        workers,
        seconds,
        enqueued,
        micro["postgres"],
        micro["server"],
        micro["worker"],
        used.foreign() / seconds,
    )


def _wait(api: Api, counter: str, goal: int, *, fast: bool = False) -> None:
    """Until a counter reaches its goal. Looks seldom, but often when the goal is near."""
    deadline = time.monotonic() + _WAIT_SECONDS
    last, last_at, pause = 0, 0.0, 0.005 if fast else _POLL_SECONDS
    while (value := api.counter(counter)) < goal:
        now = time.monotonic()
        if now > deadline:
            raise RuntimeError(f"{counter} is {value} after {_WAIT_SECONDS:.0f} s, not {goal}")
        if last and value > last and not fast:
            left = (goal - value) * (now - last_at) / (value - last)
            pause = min(_POLL_SECONDS, max(0.005, left / 2))
        last, last_at = value, now
        time.sleep(pause)


async def _finished(stand: Stand, jobs: dict[str, str]) -> _Counts:
    rows = await stand.query(_COUNT, list(jobs.values()))
    return _Counts(rows[0]["good"], rows[0]["every"], rows[0]["live"])


def _verify(before: _Counts, after: _Counts, runs: int) -> None:
    """Each run succeeded once, in one attempt, and none is left: else the figure is worth nothing."""
    good, every = after.good - before.good, after.every - before.every
    if (good, every, after.live) != (runs, runs, 0):
        raise RuntimeError(f"{runs} runs made {every} history rows, {good} of them successes; {after.live} are live")
