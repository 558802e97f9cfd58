"""kill -9 and SIGSTOP of real processes: what was running runs again in time, and a zombie changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster

from . import ledger
from .checker import check, summary
from .cluster import LEASE, Site, Worker, until
from .driver import Driver, Load, job_spec, run_load, stop_schedules, wait_until_ended
from .evidence import Target, collect

MANUAL = {"manual": True}


@pytest.fixture
def site(cluster: Cluster, database_url: str, tmp_path: Path) -> Any:
    with Site(tmp_path, database_url, cluster.keys) as site:
        yield site


def driver_of(site: Site) -> Driver:
    return Driver([s.url for s in site.servers], site.keys["key"], site.client_ledger)


async def start_runs(site: Site, driver: Driver, args: list[dict[str, Any]], *, python: bool) -> list[str]:
    spec = job_spec(Load(site.job_ledger, python=python), MANUAL)
    if not python:  # what a program leaves in the background is part of it
        spec["target"]["command"] = ["sh", "-c", 'sleep 300 & exec "$@"', "sh", *spec["target"]["command"]]
    return await driver.create_runs(await driver.create_job(spec), args)


async def starts(site: Site, run_ids: list[str], attempt: int) -> list[dict[str, Any]]:
    wanted = set(run_ids)
    lines = ledger.read(site.job_ledger)
    return [x for x in lines if x["run_id"] in wanted and x["attempt"] == attempt and x["phase"] == "start"]


async def all_started(site: Site, run_ids: list[str], attempt: int = 1) -> list[dict[str, Any]]:
    async def look() -> list[dict[str, Any]]:
        found = await starts(site, run_ids, attempt)
        return found if len(found) >= len(run_ids) else []

    return await until(f"{len(run_ids)} runs start attempt {attempt}", look)


async def documents(driver: Driver, run_ids: list[str]) -> dict[str, Any]:
    """All that the API tells of these runs: themselves, and their attempts out of history."""
    return {
        run_id: [await driver.get(f"/v1/runs/{run_id}"), await driver.get(f"/v1/runs/{run_id}/attempts")]
        for run_id in run_ids
    }


async def all_in(driver: Driver, run_ids: list[str], fits: Callable[[dict[str, Any]], bool]) -> None:
    async def look() -> bool:
        return all([fits(await driver.get(f"/v1/runs/{run_id}")) for run_id in run_ids])

    await until("all runs get there", look, every=0.2)


async def no_orphans(worker: Worker) -> None:
    """What it had started is gone; only the guard of an agent that lives may live on."""

    async def look() -> bool:
        left = worker.orphans()
        return not left or (worker.alive and all("tocsin.worker.guard" in p.cmdline() for p in left))

    await until(f"the {len(worker.tree)} children of {worker.name} are gone", look)


async def verdict(site: Site, driver: Driver) -> str:
    target = Target(site.servers[0].url, site.keys["key"], tag=driver.tag, apart=0.5, settle=0, slack=3)
    evidence = await collect(target, [site.client_ledger], [site.job_ledger])
    breaches = [str(b) for b in check(evidence)]
    assert breaches == [], "\n".join(breaches)
    return summary(evidence)


async def test_runs_of_a_killed_worker_run_again_in_time(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    server = await site.server("server")
    doomed = await site.worker("doomed", server, slots=20)
    async with driver_of(site) as driver:
        long = [{"first_seconds": 60, "seconds": 0.05}] * 10
        processes = await start_runs(site, driver, long, python=False)
        functions = await start_runs(site, driver, long, python=True)
        run_ids = processes + functions
        first = {x["run_id"]: x for x in await all_started(site, run_ids)}
        other = await site.worker("other", server, slots=20)

        doomed.kill()
        killed_at = time.time()
        again = await all_started(site, run_ids, attempt=2)
        took = max(x["wall_us"] for x in again) / 1e6 - killed_at

        assert len(doomed.tree) >= 21  # ten programs, each with one of its own, and the runner with ten functions
        await no_orphans(doomed)
        await all_in(driver, run_ids, lambda run: run["state"] == "succeeded")
        for x in again:
            assert x["fence"] > first[x["run_id"]]["fence"]
        for run_id, (run, attempts) in (await documents(driver, run_ids)).items():
            outcomes = [(a["attempt"], a["outcome"]) for a in sorted(attempts["items"], key=lambda a: a["attempt"])]
            assert outcomes == [(1, "lost"), (2, "succeeded")], run_id
            assert (run["losses"], run["failures"]) == (1, 0)
        assert other.alive
        said = await verdict(site, driver)
    with capsys.disabled():
        print(f"\nkill -9 of a worker: 20 of 20 runs started again {took:.2f} s later (lease {LEASE:g} s); {said}")


async def test_a_worker_that_wakes_after_its_lease_changes_nothing(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await site.server("server")
    sleeper = await site.worker("sleeper", server)
    async with driver_of(site) as driver:
        # Some would go on for long after waking; of others the time is up while they are frozen, so that they end,
        # and note it, the moment they wake.
        args = [{"first_seconds": 60, "seconds": 0.05}, {"first_seconds": 1.5, "seconds": 0.05}]
        run_ids = await start_runs(site, driver, args, python=False) + await start_runs(
            site, driver, args * 2, python=True
        )
        await all_started(site, run_ids)
        sleeper.freeze()
        await site.worker("other", server)
        await all_in(driver, run_ids, lambda run: run["state"] == "succeeded")
        before = await documents(driver, run_ids)
        notes = len(ledger.read(site.job_ledger))

        registrations = sleeper.registrations()
        sleeper.thaw()

        async def back() -> bool:
            return sleeper.registrations() > registrations

        await until("the woken worker registers anew", back)
        await no_orphans(sleeper)
        workers = (await driver.get("/v1/workers"))["items"]
        assert sorted(w["state"] for w in workers if w["name"] == "sleeper") == ["gone", "live"]
        assert sleeper.alive

        # The new incarnation works, and what it does is far behind whatever the old one may have sent.
        later = await start_runs(site, driver, [{"seconds": 0}] * 20, python=True)
        await all_in(driver, later, lambda run: run["state"] == "succeeded")
        assert await documents(driver, run_ids) == before
        assert all(run["fence"] == max(a["fence"] for a in told["items"]) for run, told in before.values())
        stale = len([x for x in ledger.read(site.job_ledger)[notes:] if x["run_id"] in run_ids])
        said = await verdict(site, driver)
    with capsys.disabled():
        print(f"\nSIGSTOP past the lease: {stale} late notes of frozen attempts changed nothing; {said}")
    assert all(run["losses"] <= 1 for run, _ in before.values()), "nothing is claimed for a worker without a lease"


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await site.server("server")
    workers = [await site.worker(f"w{n}", server) for n in (1, 2)]
    pids = [w.pid for w in workers]
    load = Load(
        site.job_ledger, seconds=5, batches_per_second=15, once_per_second=8, workflows_per_second=4, python=True
    )
    load.max_concurrency, load.longest = None, 0.05
    async with driver_of(site) as driver:
        loading = asyncio.create_task(run_load(driver, load))
        downtimes = []
        for _ in range(2):
            before = driver.answered

            async def answered(before: int = before) -> bool:
                return driver.answered >= before + 20

            await until("the load is under way", answered)
            server.kill()
            killed_at = time.monotonic()
            await server.start()
            downtimes.append(time.monotonic() - killed_at)
        made = await loading
        assert driver.repeats > 0
        await stop_schedules(driver, made)
        await wait_until_ended(driver, made)
        said = await verdict(site, driver)
        kept = [w.registrations() for w in workers]
    assert [w.pid for w in workers if w.alive] == pids
    with capsys.disabled():
        print(
            f"\nkill -9 of the server, twice: {driver.answered} requests acknowledged ({driver.repeats} repeats), none "
            f"lost; down for {', '.join(f'{d:.2f}' for d in downtimes)} s, registrations {kept}; {said}"
        )
