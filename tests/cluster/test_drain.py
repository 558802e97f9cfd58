"""Rolling restarts of real servers and workers under load: nothing is lost, no attempt burned, no call fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster
from tocsin.client import AsyncClient

from .cluster import Server, Site, Worker, until
from .proxy import Link


@pytest.fixture
def site(cluster: Cluster, database_url: str, tmp_path: Path) -> Any:
    with Site(tmp_path, database_url, cluster.keys, lease=10, heartbeat=3) as site:
        yield site


async def test_a_rolling_restart_costs_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    servers = await asyncio.gather(*(site.server(f"s{n}") for n in range(2)))
    balancer = await Link([("127.0.0.1", s.port) for s in servers], http=True).open()
    workers = await asyncio.gather(*(site.worker(f"w{n}", balancer.url, slots=4) for n in range(2)))
    ids: list[str] = []
    over = asyncio.Event()
    async with AsyncClient(balancer.url, site.keys["key"]) as client:
        target = {"kind": "process", "command": ["sleep", "0.2"]}
        job = await client.create_job({"target": target, "schedule": {"manual": True}, "retry": {"max_attempts": 1}})

        async def load() -> None:
            """As a program would do it that knows no better than the SDK."""
            while not over.is_set():
                ids.append((await client.run_job(job["id"]))["id"])
                await asyncio.sleep(0.2)

        callers = [asyncio.create_task(load()) for _ in range(3)]
        took = []
        processes: list[Server | Worker] = [*servers, *workers]
        for process in processes:
            before = len(ids)

            async def more(before: int = before) -> bool:
                return len(ids) >= before + 5 or any(caller.done() for caller in callers)

            await until("the load goes on", more)
            began = time.monotonic()
            process.terminate()
            assert await process.ended() == 0, "a server answers its long polls, and goes"
            took.append(time.monotonic() - began)
            await process.start()
        over.set()
        await asyncio.gather(*callers)

        async def ended() -> list[dict[str, Any]]:
            runs = [run async for run in client.list_runs(job=job["id"])]
            return runs if all(run["state"] in ("succeeded", "dead", "cancelled") for run in runs) else []

        runs = await until("all runs end", ended, every=0.3)
    await balancer.close()
    with capsys.disabled():
        print(
            f"\nrolling restart of 2 servers and 2 workers: {len(runs)} runs, none lost; gone after "
            f"{', '.join(f'{t:.2f}' for t in took)} s"
        )
    assert sorted(run["id"] for run in runs) == sorted(ids)
    assert {(run["state"], run["losses"], run["failures"]) for run in runs} == {("succeeded", 0, 0)}
    assert [w.registrations() for w in workers] == [2, 2]
