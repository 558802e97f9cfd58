"""Cancel with proof, through real processes: `stopping` while anything of a run lives, and one end for both sides."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE
from tests.conftest import Cluster
from tests.worker.conftest import HOSTILE, alive

from .cluster import Site, until

GRACE = 5.0  # between asking and killing


@pytest.fixture
def site(cluster: Cluster, database_url: str, tmp_path: Path) -> Any:
    with Site(tmp_path, database_url, cluster.keys, lease=10, heartbeat=3) as site:
        yield site


async def test_stopping_is_said_until_nothing_of_the_run_lives(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It forks twice, starts a session, ignores TERM, closes its files and empties its environment."""
    server = await site.server("server")
    await site.worker("worker", server, slots=1, module=None)  # all slots taken: the order must come all the same
    pids = tmp_path / "pids"
    async with site.client(server) as http:
        target = {"kind": "process", "command": [*HOSTILE, "hide", str(pids)]}
        job = (await http.post("/v1/jobs", json={"target": target})).json()

        async def started() -> list[int]:
            return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []

        [pid] = await until("it hides", started)
        [run] = (await http.get("/v1/runs", params={"job": job["id"]})).json()["items"]
        asked = time.monotonic()
        assert (await http.post(f"/v1/runs/{run['id']}/cancel")).json()["state"] == "stopping"
        dead_after = said_after = 0.0
        while not said_after:
            lives = alive(pid)
            state = (await http.get(f"/v1/runs/{run['id']}")).json()["state"]
            took = time.monotonic() - asked
            assert state == "stopping" or not alive(pid), f"{state} while process {pid} lives"
            dead_after = dead_after or (0.0 if lives else took)
            said_after = took if state == "cancelled" else 0.0
            assert took < PATIENCE, f"still {state}"
            await asyncio.sleep(0.02)
    with capsys.disabled():
        print(
            f"\ncancel: nothing of it alive {dead_after:.2f} s after, said {said_after:.2f} s after (grace {GRACE:g} s)"
        )
    assert GRACE <= dead_after <= said_after


async def test_success_and_cancel_at_one_moment_end_one_way(site: Site, tmp_path: Path) -> None:
    """What the worker tells of an attempt and what the server makes of the run agree, however the race ends."""
    server = await site.server("server")
    await site.worker("worker", server, slots=16)
    rng = random.Random(5)
    async with site.client(server) as http:
        # Asked to stop, it exits well: that is a cancelled run, and not a success that came too late.
        script = "trap 'exit 0' TERM; sleep 0.5 & wait"
        target = {"kind": "process", "command": ["sh", "-c", script]}
        body = {"target": target, "schedule": {"manual": True}, "retry": {"max_attempts": 3}}
        job = (await http.post("/v1/jobs", json=body)).json()

        async def race() -> tuple[str, str]:
            run = (await http.post(f"/v1/jobs/{job['id']}/runs", json={})).json()
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await http.post(f"/v1/runs/{run['id']}/cancel")

            async def ended() -> Any:
                found = (await http.get(f"/v1/runs/{run['id']}")).json()
                return found if found["state"] in ("succeeded", "cancelled", "dead") else None

            end = await until("the run ends", ended)
            attempts = (await http.get(f"/v1/runs/{run['id']}/attempts")).json()["items"]
            # One that was cancelled before it began has no attempt.
            return end["state"], attempts[0]["outcome"] if attempts else "cancelled"

        ends = Counter([end for _ in range(3) for end in await asyncio.gather(*(race() for _ in range(16)))])
    assert set(ends) <= {("succeeded", "succeeded"), ("cancelled", "cancelled")}, ends
    assert len(ends) == 2, f"there was no race: {ends}"
