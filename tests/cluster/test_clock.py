"""Clocks that are set while everything is at work: a node's changes nothing, the database's loses and doubles nothing.

What the jobs note is in true time, because the library that steps a clock lets go of what a process executes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import PATIENCE
from tests.conftest import Cluster
from tocsin.store import embedded

from . import ledger
from .checker import check, summary
from .clockshim import ClockShim
from .cluster import Server, Site, Worker, folder_for_all, until
from .driver import Driver, Load, Made, job_spec, run_load, stop_schedules, wait_until_ended
from .evidence import Evidence, Target, collect

HOUR, TEN_YEARS = 3600.0, 10 * 365.25 * 86400
SLACK = 3.0


@pytest.fixture
def shim() -> Iterator[ClockShim]:
    with folder_for_all("tocsin-clock-") as folder:
        yield ClockShim(folder)


async def server(site: Site, name: str, shim: ClockShim) -> Server:
    """A server that lives by that clock."""
    made = await site.server(name, start=False)
    made.env |= shim.env
    return await made.start()


async def worker(site: Site, name: str, server: Server, shim: ClockShim) -> Worker:
    """A worker that does."""
    made = Worker(site, name, server.url, 8, "tests.cluster.jobs:app")
    site.workers.append(made)
    made.env |= shim.env
    return await made.start()


@contextlib.asynccontextmanager
async def loaded(site: Site, seconds: float) -> AsyncIterator[tuple[Driver, asyncio.Task[Made]]]:
    """Schedules, delayed jobs, retries, a limit, and runs by the dozen, for so long."""
    async with Driver([s.url for s in site.servers], site.keys["key"], site.client_ledger) as driver:
        load = Load(site.job_ledger, seconds, batches_per_second=5, once_per_second=3, python=True)
        delayed = [job_spec(load, {"delay": f"PT{n}S"}) for n in (1, 2, 3)]
        ids = [await driver.create_job(spec) for spec in delayed]
        task = asyncio.create_task(run_load(driver, load))
        try:
            yield driver, task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                (await task).once += ids


async def gathered(site: Site, driver: Driver, made: Made) -> Evidence:
    """Everything ended, as seen from outside."""
    await stop_schedules(driver, made)
    await wait_until_ended(driver, made)
    target = Target(site.servers[-1].url, site.keys["key"], driver.tag, apart=0.3, settle=0, slack=SLACK)
    return await collect(target, [site.client_ledger], [site.job_ledger])


def assert_clean(evidence: Evidence) -> str:
    assert [str(b) for b in check(evidence)] == []
    return summary(evidence)


async def metric(server: Server, name: str) -> float:
    async with httpx.AsyncClient(timeout=5) as http:
        lines = (await http.get(f"{server.url}/metrics")).text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


async def test_the_wall_clock_of_a_node_decides_nothing(
    cluster: Cluster, database_url: str, tmp_path: Path, shim: ClockShim, capsys: pytest.CaptureFixture[str]
) -> None:
    with Site(tmp_path, database_url, cluster.keys) as site:
        odd, _ = await asyncio.gather(server(site, "odd", shim), site.server("even"))
        agent, _ = await asyncio.gather(worker(site, "odd-worker", odd, shim), site.worker("even-worker", odd))
        async with loaded(site, 4.5) as (driver, load):
            for step in (HOUR, -2 * HOUR, HOUR + TEN_YEARS, -TEN_YEARS):
                await asyncio.sleep(0.7)
                shim.step(step)
            while not load.done():  # slowly, by a tenth
                await asyncio.sleep(0.05)
                shim.step(0.005)
            shim.step(HOUR)
            made = await load
            evidence = await gathered(site, driver, made)
            registered = agent.registrations()

            async def told() -> bool:
                return abs(await metric(odd, "tocsin_clock_skew_seconds") - shim.ahead) < 1

            await until("the server measures how wrong its clock is", told, every=0.3)
            busy = [await cpu_share(process) for process in (odd, agent)]
        said = assert_clean(evidence)
        assert odd.said("this node's clock is wrong") >= 1
    with capsys.disabled():
        print(f"\na node's clock +1 h, -1 h, +10 y, drifting: {said}; then {max(busy):.0%} of a processor when idle")
    assert registered == 1, "its lease goes by another clock"
    assert all(run["losses"] == 0 for run in evidence.runs)
    assert max(busy) < 0.4


async def cpu_share(process: Server | Worker, seconds: float = 1.0) -> float:
    """How much of a processor it uses: one that turns without a pause uses all it can get."""
    watched = psutil.Process(process.pid)
    before = watched.cpu_times()
    await asyncio.sleep(seconds)
    after = watched.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


async def test_a_worker_whose_machine_slept_lets_go_before_it_says_anything(
    cluster: Cluster, database_url: str, tmp_path: Path, shim: ClockShim
) -> None:
    with Site(tmp_path, database_url, cluster.keys) as site:
        home = await site.server("server")
        sleeper = await worker(site, "sleeper", home, shim)
        async with Driver([home.url], site.keys["key"], site.client_ledger) as driver:
            spec = job_spec(Load(site.job_ledger, python=True), {"manual": True})
            runs = await driver.create_runs(await driver.create_job(spec), [{"first_seconds": 1.0, "seconds": 0}] * 3)

            async def begun() -> bool:
                return len(ledger.read(site.job_ledger)) == len(runs)

            await until("all runs have started", begun)
            sleeper.freeze()
            shim.suspend(600)
            await asyncio.sleep(1.2)  # the runs' time is up: awake, they would end at once, and the lease still holds
            sleeper.thaw()
            evidence = await gathered(site, driver, Made())
        assert_clean(evidence)
        assert sleeper.registrations() == 2
    assert [(run["state"], run["losses"], run["attempt"]) for run in evidence.runs] == [("succeeded", 1, 2)] * 3


@pytest.fixture
def stepped_cluster(shim: ClockShim, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A PostgreSQL of the test's own, which lives by that clock."""
    monkeypatch.setattr(embedded, "_SERVER_ENVIRONMENT", embedded._SERVER_ENVIRONMENT | shim.env)
    with folder_for_all("tocsin-stepped-") as home:
        cluster = Cluster(home)
        try:
            yield cluster
        finally:
            cluster.server.stop(immediate=True)


async def test_steps_of_the_databases_clock_lose_and_double_nothing(
    stepped_cluster: Cluster, tmp_path: Path, shim: ClockShim, capsys: pytest.CaptureFixture[str]
) -> None:
    with Site(tmp_path, stepped_cluster.template_url, stepped_cluster.keys) as site:
        one = await site.server("one")
        agents = await asyncio.gather(*(site.worker(f"w{n}", one) for n in (1, 2)))
        async with loaded(site, 6.5) as (driver, load):
            await asyncio.sleep(2)
            shim.step(-90)
            set_back = time.time_ns() // 1000
            await asyncio.sleep(2.5)
            goes_on = [x for x in ledger.read(site.job_ledger) if x["wall_us"] > set_back + 1_000_000]
            shim.step(180)
            made = await load
            await asyncio.sleep(SLACK)
            evidence = await gathered(site, driver, made)
        by_its_clock(evidence, shim)
        said = assert_clean(evidence)
        lost = max(run["losses"] for run in evidence.runs)
        assert one.said("the database's clock was set") >= 1
        registered = [agent.registrations() for agent in agents]
    with capsys.disabled():
        print(f"\nthe database's clock -90 s, +180 s: {said}; registrations {registered}")
    assert goes_on, "what is due now is claimed, whatever the clock showed before"
    assert lost <= 1 and max(registered) <= 2, "leases end at most once by one step"


def by_its_clock(evidence: Evidence, shim: ClockShim) -> None:
    """Put what was noted in true time on the database's clock, which is the one that decides."""
    for line in evidence.client:
        line["wall_us"] = shim.shown(line["wall_us"])
    for line in evidence.lines:  # what was claimed before a step back may start after it
        line["wall_us"] = shim.shown(line["wall_us"], settling=PATIENCE)
    evidence.settled_by = type(evidence.settled_by).fromtimestamp(
        shim.shown(int(evidence.settled_by.timestamp() * 1e6)) / 1e6, evidence.settled_by.tzinfo
    )
