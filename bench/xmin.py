"""xmin: the drain with three servers and mixed priorities, without and with one idle transaction that holds the
horizon, so that nothing that leaves the queue can be cleared away behind it."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from bench.stand import TENANTS, Api, Rated, Stand, say

SERVERS = 3
_PRIORITIES = (100, 300, 500, 700, 900)
_BATCH = 5_000
_WAIT_SECONDS = 600.0
_REPORTED = "tocsin_report_attempts_total"


@dataclass(frozen=True)
class Round(Rated):
    """One drain. `held`: how long the transaction was open at its end; 0: there was none."""

    runs: int
    seconds: float
    held: float
    postgres_us: float
    dead: int
    foreign_cores: float


def measure(stand: Stand, *, runs: int, slots: int, hold: float, repeat: int) -> list[Round]:
    """Rounds by turns without and with the transaction, on one stand."""
    jobs = _create_jobs(stand.api)
    servers = [stand.api, *(stand.add_server() for _ in range(SERVERS - 1))]
    say("warming up …")
    _drain(stand, servers, jobs, runs // 20, slots, 0.0)
    found = []
    for _ in range(repeat):
        for seconds in (0.0, hold):
            found.append(_drain(stand, servers, jobs, runs, slots, seconds))
            say(describe(found[-1]))
    return found


def cost(rounds: list[Round]) -> tuple[float, float]:
    """What the transaction costs: the share of the rate that is lost, and of PostgreSQL's CPU a run that is added."""
    free, held = ([r for r in rounds if bool(r.held) == is_held] for is_held in (False, True))
    rate = [statistics.median(r.per_second for r in some) for some in (free, held)]
    micro = [statistics.median(r.postgres_us for r in some) for some in (free, held)]
    return 1 - rate[1] / rate[0], micro[1] / micro[0] - 1


def describe(one: Round) -> str:
    """One line."""
    return (
        f"{'horizon held' if one.held else 'undisturbed':<12} {one.per_second:,.0f} runs/s ({one.runs:,} in "
        f"{one.seconds:.1f} s), CPU of PostgreSQL {one.postgres_us:.0f} µs a run, {one.dead:,} dead rows at the end; "
        f"others used {one.foreign_cores:.2f} cores"
    )


def _create_jobs(api: Api) -> list[tuple[str, str]]:
    """For each tenant a no-op job of each priority: (tenant, job)."""
    jobs = []
    for number in range(TENANTS):
        slug = f"xmin-{number:02d}"
        api.post("/v1/tenants", {"slug": slug})
        for priority in _PRIORITIES:
            target = {"kind": "python", "function": "bench.noop"}
            jobs.append((slug, api.create_job(target, slug, priority=priority)))
    return jobs


def _drain(stand: Stand, servers: list[Api], jobs: list[tuple[str, str]], runs: int, slots: int, hold: float) -> Round:
    reported = _count(servers)
    asyncio.run(stand.query("vacuum (analyze) runs"))
    _enqueue(servers[0], jobs, runs)
    stand.await_quiet()
    return asyncio.run(_timed(stand, servers, runs, reported + runs, slots, hold))


async def _timed(stand: Stand, servers: list[Api], runs: int, goal: int, slots: int, hold: float) -> Round:
    """The transaction stays open for `hold` seconds at least, and until the drain is over."""
    idle = await stand.connect()
    opened = time.perf_counter()
    if hold:
        await idle.execute("begin isolation level repeatable read")
        await idle.fetchval("select count(*) from tenants")
    begun, before = time.perf_counter(), stand.cpu()
    try:
        for server in servers:
            stand.start_workers(1, slots, server)
        deadline = begun + _WAIT_SECONDS
        while _count(servers) < goal:
            if time.perf_counter() > deadline:
                raise RuntimeError(f"not drained after {_WAIT_SECONDS:.0f} s")
            await asyncio.sleep(0.1)
        seconds, used = time.perf_counter() - begun, stand.cpu().since(before)
        [row] = await stand.query("select n_dead_tup from pg_stat_user_tables where relname = 'runs'")
        if hold:
            await asyncio.sleep(max(0.0, hold - (time.perf_counter() - opened)))
        held = time.perf_counter() - opened if hold else 0.0
    finally:
        stand.stop_workers()
        await idle.close()
    micro = used.trees["postgres"] * 1e6 / runs
    return Round(runs, seconds, held, micro, row["n_dead_tup"], used.foreign() / seconds)


def _count(servers: list[Api]) -> int:
    return sum(server.counter(_REPORTED) for server in servers)


def _enqueue(api: Api, jobs: list[tuple[str, str]], runs: int) -> None:
    """Spread the runs evenly, so that every tenant has all priorities."""
    for number, (tenant, job) in enumerate(jobs):
        left = runs * (number + 1) // len(jobs) - runs * number // len(jobs)
        while left > 0:
            size = min(left, _BATCH)
            api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * size}, tenant)
            left -= size
