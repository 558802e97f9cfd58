"""kill -9 at each step of what moves records, the archive of history and the compaction of logs: nothing is lost,
nothing is there twice, and whoever comes next goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx

from tests.conftest import Cluster
from tests.tables import read
from tocsin.clock import iso
from tocsin.flow import archive, compact, erase, publish
from tocsin.model.ids import instant_of, lowest_id

from .cluster import Server, Site, until

Document = dict[str, Any]
RUNS, LINES = 12, 20
HAND = {"name": "by-hand", "slots": 50, "targets": ["process"]}
# A table for a day of long ago; and the runs that ended today once more, as if they had been made then.
_TABLE = """
create table history_{name} (like history including all);
alter table history_{name} owner to tocsin_owner;
alter table history attach partition history_{name} for values from ('{low}') to ('{high}');
"""
_RUNS = """
insert into history
select (jsonb_populate_record(h, jsonb_build_object('run_id', left($1, 13) || substr(h.run_id::text, 14)))).*
  from history h
  join tenants t on t.id = h.tenant_id
 where h.run_id > $2::uuid and t.slug = any($3)
"""


class Stage:
    """A server that is killed and started again, its database and its objects."""

    def __init__(self, site: Site, server: Server, sql: asyncpg.Connection) -> None:
        self.site, self.server, self.sql = site, server, sql

    async def kill_at(self, *points: str) -> None:
        """Let a server die at each of these, one after the other."""
        for point in points:
            self.server.spawn_with(f"{point}=kill")
            assert await self.server.ended(60) == -signal.SIGKILL, f"{point}: {self.server.log.read_text()[-2000:]}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[httpx.AsyncClient]:
        """The API of one that lives until the block ends."""
        await self.server.start()
        async with self.site.client(self.server) as api:
            yield api
        self.server.kill()

    async def until_value(self, wanted: Any, statement: str) -> None:
        async def fits() -> bool:
            return await self.sql.fetchval(statement) == wanted  # type: ignore[no-any-return]

        await until(f"{statement} is {wanted}", fits, 60)

    def objects(self, pattern: str) -> list[Path]:
        return list(Path(self.site.home, "objects").rglob(pattern))


@asynccontextmanager
async def stage(cluster: Cluster, url: str, folder: Path, **settings: Any) -> AsyncIterator[Stage]:
    sql = await asyncpg.connect(cluster.as_superuser(urlsplit(url).path.lstrip("/")))
    await sql.execute("set search_path = tocsin")
    with Site(folder, url, cluster.keys, lease=30, heartbeat=10, **settings) as site:
        yield Stage(site, await site.server("server", start=False), sql)
    await sql.close()


async def told(reply: httpx.Response) -> Document:
    assert reply.is_success, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def ended_runs(place: Stage, api: httpx.AsyncClient, tenant: str) -> None:
    """Runs of a tenant, some of which failed, with lines in their logs."""
    await make_runs(api, tenant)
    await end_runs(place, RUNS)


async def make_runs(api: httpx.AsyncClient, tenant: str) -> None:
    headers = {"tocsin-tenant": tenant}
    body = {"target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}, "tags": {"of": tenant}}
    job = await told(await api.post("/v1/jobs", json=body | {"retry": {"max_attempts": 1}}, headers=headers))
    await told(await api.post(f"/v1/jobs/{job['id']}/runs/batch", json={"runs": [{}] * RUNS}, headers=headers))


async def end_runs(place: Stage, count: int) -> None:
    """A worker takes so many; the first and the last of them have lines."""
    async with place.site.client(place.server, "worker_key") as hand:
        worker = (await told(await hand.post("/v1/worker/register", json=HAND)))["worker_id"]
        runs: list[Document] = []
        last = 0
        while len(runs) < count:
            asked = {"slots": count - len(runs), "wait": 5, "last_claim": last}
            answer = await told(await hand.post(f"/v1/worker/{worker}/claim", json=asked))
            runs, last = runs + answer["runs"], answer["claim_id"]
        keys = [{name: run[name] for name in ("run_id", "attempt", "fence")} for run in runs]
        for offset in range(LINES):
            lines = [[time.time(), "stdout", "info", f"line {offset}"]]
            chunks = [key | {"offset": offset, "lines": lines} for key in (keys[0], keys[-1])]
            await told(await hand.post(f"/v1/worker/{worker}/logs", json={"chunks": chunks}))
        ends = [key | {"outcome": ("succeeded", "failed")[n % 2]} for n, key in enumerate(keys)]
        await told(await hand.post(f"/v1/worker/{worker}/report", json={"finished": ends}))


async def all_runs(api: httpx.AsyncClient) -> dict[str, set[str]]:
    """The runs that each tenant is told of, page by page; each once, and counted as often."""
    found = {}
    for tenant in ("default", "other"):
        headers, query, runs = {"tocsin-tenant": tenant}, {"limit": "10"}, []
        while True:
            page = await told(await api.get("/v1/runs", params=query, headers=headers))
            runs += page["items"]
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        start = iso(instant_of(runs[-1]["id"]))
        [total] = (await told(await api.get("/v1/reports/runs", params={"from": start}, headers=headers)))["items"]
        found[tenant] = {run["id"] for run in runs}
        assert len(runs) == len(found[tenant]) == total["runs"] and total["dead"] == total["runs"] / 2
    return found


async def long_ago(place: Stage, days: int, *tenants: str) -> None:
    """A day of so long ago on which these had runs."""
    now = await place.sql.fetchval("select now()")
    day = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=days)
    low, high = lowest_id(day), lowest_id(day + timedelta(days=1))
    await place.sql.execute(_TABLE.format(name=f"{day:%Y%m%d}", low=low, high=high))
    made = lowest_id(day + timedelta(hours=1))
    await place.sql.execute(_RUNS, made, lowest_id(now - timedelta(hours=1)), list(tenants))


async def test_an_archivist_that_is_killed_at_any_step(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    """One day that a tenant may not let go yet, and one that goes as a whole."""
    async with stage(cluster, database_url, tmp_path, hot_days=2, iceberg=True) as place:
        async with place.serving() as api:
            await told(await api.post("/v1/tenants", json={"slug": "other"}))
            for tenant in ("default", "other"):
                await ended_runs(place, api, tenant)
        await place.sql.execute("update tenants set hot_days = 3650 where slug = 'other'")
        await long_ago(place, 200, "default", "other")
        await long_ago(place, 100, "default")
        rows = await place.sql.fetchval("select count(*) from history")
        assert rows == 5 * RUNS
        # The steps up to a file that is proved are the same in both.
        await place.kill_at(*(f"archive.{point}" for point in (*archive.POINTS_OF_PART[2:], *archive.POINTS)))
        await place.kill_at(*(f"publish.{point}" for point in publish.POINTS))
        async with place.serving() as api:
            await place.until_value(3 * RUNS, "select count(*) from history")
            await place.until_value(1, "select count(*) from archived_days where gone_at is not null")
            runs = await all_runs(api)
        assert {tenant: len(found) for tenant, found in runs.items()} == {"default": 3 * RUNS, "other": 2 * RUNS}
        assert await place.sql.fetchval("select sum(rows) from archives") == 2 * RUNS
        assert len(place.objects("*.parquet")) == await place.sql.fetchval("select count(*) from archives") == 2
        [hint] = place.objects("version-hint.text")
        assert len(read(f"file://{hint.parent.parent}")) == 2 * RUNS


async def test_a_compactor_that_is_killed_at_any_step(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    async with stage(cluster, database_url, tmp_path) as place:
        async with place.serving() as api:
            await ended_runs(place, api, "default")
            before = await all_lines(api)
        assert len(before) == 2 * LINES
        await place.sql.execute("update log_segments set added_at = now() - interval '2 hours'")
        *steps, removed = (f"compact.{point}" for point in ("before_commit", "after_commit", *compact.POINTS))
        await place.kill_at(*(step for step in (*steps[2:], *steps[:2])))
        await place.until_value(0, "select count(*) from log_segments where not compacted and replaced_at is null")
        await place.sql.execute("update log_garbage set due_at = now() - interval '1 second'")
        await place.kill_at(removed)
        # The compactor puts objects off before it deletes them, so that one that is refused does not hide the others.
        await place.sql.execute("update log_garbage set due_at = now() - interval '1 second'")
        async with place.serving() as api:
            await place.until_value(0, "select count(*) from log_garbage")
            assert await all_lines(api) == before
        assert (
            len(place.objects("*.zst"))
            == await place.sql.fetchval("select count(distinct object) from log_chunks")
            == 1
        )


async def test_an_eraser_that_is_killed_at_any_step(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    """What it left is gone all the same, and the lines of the other tenant, in the same objects, are not."""
    async with stage(cluster, database_url, tmp_path) as place:
        async with place.serving() as api:
            await told(await api.post("/v1/tenants", json={"slug": "other"}))
            for tenant in ("default", "other"):
                await make_runs(api, tenant)
            await end_runs(place, 2 * RUNS)
            before = await all_lines(api)
            assert len(place.objects("*.zst")) == LINES, "both are in each of them"
            await place.sql.execute("select pg_advisory_lock(hashtext('tocsin.erase'))")  # not before it is killed
            await told(await api.request("DELETE", "/v1/tenants/other", json={"confirm": "other"}))
        await place.sql.execute("select pg_advisory_unlock_all()")
        # As long after the last trace of it as a server waits.
        settled = "update erasures set empty_since = now() - interval '2 minutes' where empty_since is not null"
        *steps, erased = (f"erase.{point}" for point in erase.POINTS)
        await place.kill_at(*steps, steps[-1])  # once more, by one that finds nothing
        assert await place.sql.execute(settled) == "UPDATE 1"
        await place.kill_at(erased)
        async with place.serving() as api:
            assert (await api.get("/v1/tenants/other")).status_code == 404
            assert await all_lines(api) == before
        for table in (*erase.TABLES, "history"):
            assert await place.sql.fetchval(f"select count(*) from {table} where tenant_id <> 1") == 0, table
        assert await place.sql.fetchval("select count(*) from audit where action = 'tenant.erased'") == 1
        assert len(place.objects("*.zst")) == LINES


async def all_lines(api: httpx.AsyncClient) -> list[str]:
    """Of the runs that have any, in order."""
    runs = (await told(await api.get("/v1/runs", params={"limit": 500})))["items"]
    lines = [(await told(await api.get(f"/v1/runs/{run['id']}/logs")))["items"] for run in runs]
    return [
        f"{run['id']} {line['seq']} {line['text']}" for run, of_run in zip(runs, lines, strict=True) for line in of_run
    ]
