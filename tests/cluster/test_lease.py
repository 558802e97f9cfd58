"""Leases of real processes: nothing runs past its end, lost runs come back in time, and a busy machine loses none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster
from tests.worker.conftest import HOSTILE, last_tick
from tocsin.worker.timing import instant

from .cluster import Site, until
from .driver import Driver
from .proxy import Link

LEASE, HEARTBEAT, SWEEP = 2.0, 0.5, 2.0


@pytest.fixture
async def site(cluster: Cluster, database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    """The shortest lease there is."""
    with Site(tmp_path, database_url, cluster.keys, lease=LEASE, heartbeat=HEARTBEAT) as site:
        await site.server("server")
        yield site


def driver_of(site: Site) -> Driver:
    return Driver([s.url for s in site.servers], site.keys["key"], site.client_ledger)


async def worker_named(driver: Driver, name: str) -> dict[str, Any]:
    [found] = [w for w in (await driver.get("/v1/workers"))["items"] if w["name"] == name]
    return dict(found)


async def test_nothing_is_written_after_the_lease_of_a_worker_that_is_cut_off_or_stopped(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files' clock is the database's: one machine. Each worker has a run that says plainly that it is one, and one
    that hides."""
    [server] = site.servers
    link = await Link([("127.0.0.1", server.port)], http=True).open()
    ways = {"cut": link.url, "stopped": server.url}
    workers = {name: await site.worker(name, url, slots=2, module=None) for name, url in ways.items()}
    async with driver_of(site) as driver:
        files = [tmp_path / f"ticks-{n}" for n in range(4)]
        plainly = "import sys, time\nwhile True: print(time.time(), file=open(sys.argv[1], 'a')); time.sleep(0.005)"
        for n, file in enumerate(files):
            ticks = [*HOSTILE, "tick", str(file)]
            target = {"kind": "process", "command": ticks if n % 2 else [sys.executable, "-c", plainly, str(file)]}
            await driver.create_job({"target": target, "retry": {"max_attempts": 1}})

        async def ticking() -> bool:
            return all(file.exists() and file.stat().st_size for file in files)

        await until("all four runs write", ticking)
        link.hold(up=True, down=True)
        os.kill(workers["stopped"].pid, signal.SIGSTOP)

        async def gone() -> list[dict[str, Any]]:
            found = [await worker_named(driver, name) for name in ways]
            return found if all(w["state"] == "gone" for w in found) else []

        ends = [instant(w["lease_until"]) for w in await until("both are given up", gone)]
        said = [last_tick(file) for file in files]
        taken = [run["finished_at"] for run in (await driver.get("/v1/runs", tag=driver.tag))["items"]]
        back = [await driver.get(f"/v1/runs/{r['id']}/attempts") for r in (await driver.get("/v1/runs"))["items"]]
        lost = [instant(a["items"][0]["finished_at"]) for a in back if a["items"]]
        assert [last_tick(file) for file in files] == said, "nothing is written any more"
    await link.close()
    with capsys.disabled():
        spare = min(ends) - max(said)
        print(
            f"\nlease {LEASE:g} s: the last word came {spare:.2f} s before the first lease ended, and the runs were "
            f"taken back {max(lost) - max(ends):.2f} s after the last had; {len(taken)} runs"
        )
    assert max(said) < min(ends)
    assert len(lost) == 4 and max(lost) <= max(ends) + SWEEP


async def test_the_shortest_lease_holds_while_jobs_hog_the_machine(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    [server] = site.servers
    workers = await asyncio.gather(*(site.worker(f"w{n}", server, slots=6) for n in range(2)))
    async with driver_of(site) as driver:
        hog = ["sh", "-c", "timeout 4 sh -c 'while :; do :; done'; true"]
        job = await driver.create_job({"target": {"kind": "process", "command": hog}, "schedule": {"manual": True}})
        hogs = await driver.create_runs(job, [{}] * 4)
        small = {"kind": "process", "command": ["true"]}
        job = await driver.create_job({"target": small, "schedule": {"manual": True}})
        ids = hogs + await driver.create_runs(job, [{}] * 10)

        async def ended() -> list[dict[str, Any]]:
            runs = [await driver.get(f"/v1/runs/{run_id}") for run_id in ids]
            return runs if all(run["state"] == "succeeded" for run in runs) else []

        runs = await until("all runs succeed", ended, 40, every=0.3)
    with capsys.disabled():
        print(
            f"\nlease {LEASE:g} s, four hogs on {os.cpu_count()} processors: registrations "
            f"{[w.registrations() for w in workers]}, losses {sum(run['losses'] for run in runs)}"
        )
    assert all((run["losses"], run["failures"], run["attempt"]) == (0, 0, 1) for run in runs)
    assert [w.registrations() for w in workers] == [1, 1]
