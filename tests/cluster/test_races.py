"""Two servers on one database: each occurrence once, whoever plans it, and a limit that both of them keep."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster
from tocsin.flow.shared.lanes import LaneBook, LaneKey
from tocsin.settings import Settings
from tocsin.store.db import Database

from . import ledger
from .checker import check, most_at_once, summary
from .cluster import Site, until
from .driver import Driver, Load, job_spec
from .evidence import Evidence, Target, collect, instant

SECOND = timedelta(seconds=1)
JOBS, OCCURRENCES = 500, 10_000


@pytest.fixture
async def site(cluster: Cluster, database_url: str, tmp_path: Path) -> Any:
    """Two servers, each with a worker of its own."""
    with Site(tmp_path, database_url, cluster.keys, lease=10, heartbeat=3, horizon_seconds=3) as site:
        servers = await asyncio.gather(site.server("one"), site.server("two"))
        await asyncio.gather(*(site.worker(f"of-{s.name}", s, slots=100) for s in servers))
        yield site


def driver_of(site: Site) -> Driver:
    return Driver([s.url for s in site.servers], site.keys["key"], site.client_ledger)


async def evidence_of(site: Site, driver: Driver, apart: float | None = 0.5) -> Evidence:
    target = Target(site.servers[0].url, site.keys["key"], tag=driver.tag, apart=apart, settle=0, slack=2)
    evidence = await collect(target, [site.client_ledger], [site.job_ledger])
    breaches = [str(b) for b in check(evidence)]
    assert breaches == [], "\n".join(breaches[:20])
    return evidence


async def in_parallel(calls: list[Any], at_once: int = 10) -> list[Any]:
    turns = asyncio.Semaphore(at_once)

    async def one(call: Any) -> Any:
        async with turns:
            return await call

    return await asyncio.gather(*map(one, calls))


async def test_ten_thousand_occurrences_run_exactly_once(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    async with driver_of(site) as driver:
        began = time.monotonic()
        spec = job_spec(Load(site.job_ledger), {"every": "PT1S"}) | {"overlap": "allow"}
        spec["target"] = {"kind": "python", "function": "trust.note", "kwargs": {"ledger": str(site.job_ledger)}}
        job_ids = await in_parallel([driver.create_job(spec) for _ in range(JOBS)])
        created = time.monotonic() - began

        async def enough() -> bool:
            return site.job_ledger.exists() and site.job_ledger.read_bytes().count(b'"start"') >= OCCURRENCES

        await until(f"{OCCURRENCES} occurrences have run", enough, 60, every=0.2)
        ran = time.monotonic() - began
        await in_parallel([driver.cancel_job(job_id) for job_id in job_ids])

        async def drained() -> bool:
            return not any([w["running"] for w in (await driver.get("/v1/workers"))["items"]])

        await until("what was running has ended", drained, 20)
        evidence = await evidence_of(site, driver, apart=None)

    by_job, by_worker = defaultdict(list), Counter[str]()
    for run in evidence.runs:
        # The cancel at the end meets the last ones, of which one worker may have begun a later one than the other.
        assert run["state"] in ("succeeded", "cancelled")
        by_job[run["job_id"]].append(instant(run["scheduled_for"]))
        if run["state"] == "succeeded":
            by_worker[run["worker"]] += 1
    done = by_worker.total()
    with capsys.disabled():
        print(
            f"\ntwo servers: {done} occurrences of {JOBS} jobs each exactly once; created in {created:.1f} s, run in "
            f"{ran:.1f} s, {' and '.join(map(str, by_worker.values()))} by each worker; {summary(evidence)}"
        )
    for job_id, job in evidence.jobs.items():
        made = instant(job["created_at"]) if job else None
        assert sorted(by_job[job_id]) == [made + k * SECOND for k in range(1, len(by_job[job_id]) + 1)], job_id
    assert len(by_job) == JOBS
    assert done >= OCCURRENCES
    assert len(by_worker) == 2, "both servers must have had their share"


async def test_two_nodes_make_the_same_lanes(settings: Settings) -> None:
    databases = [Database(settings.database_url, size=2) for _ in range(2)]
    for database in databases:
        await database.open()
    try:
        books = [LaneBook(database) for database in databases]
        for n in range(50):
            keys = [LaneKey("default", "python", f"f{n}.{m}") for m in range(4)]
            known = await asyncio.gather(*(book.intern(keys) for book in books))
            assert known[0] == known[1]
            assert set(known[0]) == set(keys)
    finally:
        for database in databases:
            await database.close()


async def test_a_limit_holds_over_two_servers(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    async with driver_of(site) as driver:
        spec = job_spec(Load(site.job_ledger, python=True), {"manual": True}) | {"max_concurrency": 5}
        job_id = await driver.create_job(spec)
        began = time.monotonic()
        args = [{"seconds": 0.02 + 0.002 * (n % 10)} for n in range(30)]
        run_ids = [i for ids in await in_parallel([driver.create_runs(job_id, args) for _ in range(10)]) for i in ids]

        async def ended() -> bool:
            lines = ledger.read(site.job_ledger)
            return sum(x["phase"] == "end" for x in lines) >= len(run_ids)

        await until("300 runs end", ended, 60, every=0.2)
        took = time.monotonic() - began

        async def recorded() -> bool:
            page = await driver.get("/v1/runs", job=job_id, limit=500)
            return all(run["state"] == "succeeded" for run in page["items"])

        await until("300 runs have succeeded", recorded, 20, every=0.2)
        evidence = await evidence_of(site, driver)
    most = most_at_once(evidence.lines)
    pids = {x["pid"] for x in evidence.lines}
    with capsys.disabled():
        print(f"\nmax_concurrency 5: at most {most} at once, 300 runs in {took:.1f} s; {summary(evidence)}")
    assert len(evidence.runs) == 300
    assert len(pids) == 2, "both workers must have had their share"
    assert 1 < most <= 5
