"""A run that takes its workers down, with real processes: it is set apart before it takes down all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster

from .cluster import Site, until
from .driver import Driver

POISON = ["sh", "-c", "kill -9 $PPID; sleep 60"]  # the parent of a program is the worker


@pytest.fixture
def site(cluster: Cluster, database_url: str, tmp_path: Path) -> Any:
    with Site(tmp_path, database_url, cluster.keys) as site:
        yield site


async def test_a_fleet_of_three_survives_a_run_that_kills_its_workers(site: Site) -> None:
    server = await site.server("server")
    workers = [await site.worker(f"w{n}", server, slots=4) for n in range(3)]
    async with Driver([server.url], site.keys["key"], site.client_ledger) as driver:

        async def ask(command: list[str], count: int) -> list[str]:
            target = {"kind": "process", "command": command}
            job = await driver.create_job({"target": target, "schedule": {"manual": True}})
            return await driver.create_runs(job, [{}] * count)

        bystanders = await ask(["sleep", "1"], 6)  # the workers that go down hold these runs, too
        [poison] = await ask(POISON, 1)

        async def ended() -> Any:
            run = await driver.get(f"/v1/runs/{poison}")
            return run if run["state"] == "dead" else None

        run = await until("the run is set apart", ended, 120)
        assert (run["error"]["class"], run["losses"]) == ("poison", 2)
        assert sum(worker.alive for worker in workers) == 1

        async def all_succeeded() -> bool:
            found = [await driver.get(f"/v1/runs/{run_id}") for run_id in bystanders]
            return all(each["state"] == "succeeded" for each in found)

        await until("the bystanders succeed", all_succeeded, 120)
        [after] = await ask(["true"], 1)

        async def works() -> bool:
            return bool((await driver.get(f"/v1/runs/{after}"))["state"] == "succeeded")

        await until("the worker that is left works on", works, 60)
