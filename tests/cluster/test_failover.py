"""Fail-over under load: a synchronous standby is promoted, and the old primary comes back as if nothing had been."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conftest import Cluster

from . import ledger
from .cluster import Site, until
from .driver import Driver, Load, run_load, stop_schedules, wait_until_ended
from .standby import Postgres, Servers
from .test_kills import verdict

OLD_TIMELINE, NEW_TIMELINE = 1, 2
ALL_FENCES = """select count(*) || ' runs, ' || coalesce(sum(fence), 0)
                  from (select fence from tocsin.runs union all select fence from tocsin.history) r"""


def written(server: Postgres) -> str:
    """What a server knows of runs, in a nutshell: every claim changes it."""
    return server.query(ALL_FENCES, database="tocsin").strip()


def first_start(site: Site, timeline: int) -> float:
    """When (Unix time) the first run started that was claimed on this timeline: a fence begins with it."""
    lines = ledger.read(site.job_ledger)
    starts = [x["wall_us"] / 1e6 for x in lines if x["phase"] == "start" and x["fence"] >> 40 == timeline]
    return min(starts, default=0.0)


async def fail_over(site: Site, driver: Driver, old: Postgres, new: Postgres) -> float:
    """Kill the primary under load, promote the standby once somebody has noticed; seconds until something starts."""

    async def under_way() -> bool:
        return driver.answered >= 30 and first_start(site, OLD_TIMELINE) > 0

    async def noticed() -> bool:
        return driver.repeats > 0

    async def started() -> float:
        return first_start(site, NEW_TIMELINE)

    await until("the load is under way", under_way)
    await asyncio.to_thread(old.kill)
    await until("the outage is noticed", noticed)
    promoted_at = await asyncio.to_thread(new.promote)
    return await until("something starts again", started) - promoted_at


async def test_nothing_acknowledged_is_lost_and_the_old_primary_gets_nothing(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Servers(cluster) as servers:
        old = servers.copy("old")
        new = servers.standby("new", old)
        url = f"postgresql://{servers.login}@127.0.0.1:{old.port},127.0.0.1:{new.port}/tocsin"
        with Site(tmp_path, url, cluster.keys) as site:
            a, b = await asyncio.gather(site.server("a"), site.server("b"))
            await asyncio.gather(site.worker("w-a", a), site.worker("w-b", b))
            load = Load(site.job_ledger, seconds=5, batches_per_second=10, once_per_second=4, python=True)
            load.max_concurrency, load.longest = None, 0.05
            async with Driver([a.url, b.url], site.keys["key"], site.client_ledger) as driver:
                loading = asyncio.create_task(run_load(driver, load))
                took = await fail_over(site, driver, old, new)

                # The old primary is back: it takes writes, waits for no standby, and is the first in the URL.
                (old.data / "postgresql.auto.conf").write_text("")
                old.start()
                assert old.query("select pg_is_in_recovery()").strip() == "f"
                before = written(old)
                await site.server("c")  # knows nothing of what has been
                made = await loading
                await stop_schedules(driver, made)
                await wait_until_ended(driver, made)
                assert written(old) == before, "the old primary was written to"
                said = await verdict(site, driver)
    with capsys.disabled():
        print(
            f"\nfail-over to a synchronous standby: {driver.answered} requests acknowledged ({driver.repeats} "
            f"repeats), none lost; first new start {took:.2f} s after the promotion; {said}"
        )
