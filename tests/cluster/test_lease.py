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

LEASE, HEARTBEAT = 2.0, 0.5


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
    plainly = "import sys, time\nwhile True: print(time.time(), file=open(sys.argv[1], 'a')); time.sleep(0.005)"
    programs = [[sys.executable, "-c", plainly], [*HOSTILE, "tick"]]
    files: dict[str, list[Path]] = {}
    async with driver_of(site) as driver:
        for name, url in {"cut": link.url, "stopped": server.url}.items():
            worker = await site.worker(name, url, slots=2, module=None)
            files[name] = [tmp_path / f"{name}-{n}" for n in range(2)]
            for program, file in zip(programs, files[name], strict=True):
                target = {"kind": "process", "command": [*program, str(file)]}
                await driver.create_job({"target": target, "retry": {"max_attempts": 1}})

            async def ticking(name: str = name) -> bool:
                return all(file.exists() and file.stat().st_size for file in files[name])

            await until("both of its runs write, and have all its slots", ticking)
        link.hold(up=True, down=True)
        os.kill(worker.pid, signal.SIGSTOP)

        async def gone() -> list[dict[str, Any]]:
            found = [await worker_named(driver, name) for name in files]
            return found if all(w["state"] == "gone" for w in found) else []

        ends = [instant(w["lease_until"]) for w in await until("both are given up", gone)]
        said = [max(map(last_tick, ticks)) for ticks in files.values()]
        taken = [run["finished_at"] for run in (await driver.get("/v1/runs", tag=driver.tag))["items"]]
        back = [await driver.get(f"/v1/runs/{r['id']}/attempts") for r in (await driver.get("/v1/runs"))["items"]]
        lost = [instant(a["items"][0]["finished_at"]) for a in back if a["items"]]
        assert [max(map(last_tick, ticks)) for ticks in files.values()] == said, "nothing is written any more"
    await link.close()
    with capsys.disabled():
        spare = min(end - last for end, last in zip(ends, said, strict=True))
        print(
            f"\nlease {LEASE:g} s: the last words came {spare:.2f} s before the lease ended, and the runs were "
            f"taken back {max(lost) - max(ends):.2f} s after the last had; {len(taken)} runs"
        )
    assert spare > 0
    assert len(lost) == 4 and min(lost) >= min(ends)


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

        runs = await until("all runs succeed", ended, every=0.3)
    with capsys.disabled():
        print(
            f"\nlease {LEASE:g} s, four hogs on {os.cpu_count()} processors: registrations "
            f"{[w.registrations() for w in workers]}, losses {sum(run['losses'] for run in runs)}"
        )
    assert all((run["losses"], run["failures"], run["attempt"]) == (0, 0, 1) for run in runs)
    assert [w.registrations() for w in workers] == [1, 1]
