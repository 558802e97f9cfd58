"""Two servers on one database: each occurrence once, whoever plans it, and a limit that both of them keep."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE
from tests.conftest import Cluster
from tocsin.flow.shared.lanes import LaneBook, LaneKey
from tocsin.settings import Settings
from tocsin.store.db import Database

from . import ledger
from .checker import check, most_at_once, owed_instants, summary
from .cluster import Site, until
from .driver import Driver, Load, Made, job_spec, wait_until_ended
from .evidence import Evidence, Target, collect, instant

SECOND = timedelta(seconds=1)
JOBS, OCCURRENCES = 500, 10_000
LIFE = 22 * SECOND


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
        job_ids = await in_parallel([short_lived(site, driver) for _ in range(JOBS)])
        created = time.monotonic() - began
        owed = {job_id: owed_by(await driver.get(f"/v1/jobs/{job_id}")) for job_id in job_ids}
        total = sum(map(len, owed.values()))

        async def enough() -> bool:
            return site.job_ledger.exists() and site.job_ledger.read_bytes().count(b'"end"') >= total

        await until(f"{total} occurrences have run", enough, 3 * PATIENCE, every=0.2)
        ran = time.monotonic() - began
        await wait_until_ended(driver, Made(every=job_ids))
        evidence = await evidence_of(site, driver, apart=None)

    by_job, by_worker = defaultdict(list), Counter[str]()
    for run in evidence.runs:
        assert run["state"] == "succeeded"
        by_job[run["job_id"]].append(instant(run["scheduled_for"]))
        by_worker[run["worker"]] += 1
    with capsys.disabled():
        shares = " and ".join(map(str, by_worker.values()))
        print(
            f"\ntwo servers: {total} occurrences of {JOBS} jobs each exactly once; created in {created:.1f} s, run in "
            f"{ran:.1f} s, {shares} by each worker; {summary(evidence)}"
        )
    assert {job_id: sorted(instants) for job_id, instants in by_job.items()} == owed
    assert total >= OCCURRENCES
    assert len(by_worker) == 2, "both servers must have had their share"


async def short_lived(site: Site, driver: Driver) -> str:
    """A schedule that ends by itself. A cancel would race with the occurrences that a worker holds ahead of their
    instants: it may find one unclaimed while another worker holds the next."""
    end = datetime.now(UTC) + LIFE
    spec = job_spec(Load(site.job_ledger), {"every": "PT1S", "until": end.isoformat()}) | {"overlap": "allow"}
    spec["target"] = {"kind": "python", "function": "trust.note", "kwargs": {"ledger": str(site.job_ledger)}}
    return await driver.create_job(spec)


def owed_by(job: dict[str, Any]) -> list[datetime]:
    instants = owed_instants(job, datetime.max.replace(tzinfo=UTC))
    assert isinstance(instants, list)
    return instants


async def test_two_nodes_make_the_same_lanes(settings: Settings) -> None:
    databases = [Database(settings.database_url, size=2) for _ in range(2)]
    for database in databases:
        await database.open()
    try:
        books = [LaneBook(database) for database in databases]
        for n in range(50):
            keys = [LaneKey("default", "python", f"f{n}.{m}") for m in range(4)]
            known = await asyncio.gather(*(book.intern(dict.fromkeys(keys)) for book in books))
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

        await until("300 runs end", ended, every=0.2)
        took = time.monotonic() - began

        async def recorded() -> bool:
            page = await driver.get("/v1/runs", job=job_id, limit=500)
            return all(run["state"] == "succeeded" for run in page["items"])

        await until("300 runs have succeeded", recorded, every=0.2)
        evidence = await evidence_of(site, driver)
    most = most_at_once(evidence.lines)
    pids = {x["pid"] for x in evidence.lines}
    with capsys.disabled():
        print(f"\nmax_concurrency 5: at most {most} at once, 300 runs in {took:.1f} s; {summary(evidence)}")
    assert len(evidence.runs) == 300
    assert len(pids) == 2, "both workers must have had their share"
    assert 1 < most <= 5
