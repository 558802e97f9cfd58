"""A rolling upgrade for real: servers and workers of an earlier commit beside those of this one, on one new schema,
under load. And a schema that was upgraded is the one that a fresh install makes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest

from tests.conftest import Cluster
from tocsin.store.migrate import migrate, status

from .checker import check, summary
from .cluster import ROOT, Process, Site, Worker, folder_for_all
from .driver import Driver, Load, Made, run_load, stop_schedules, wait_until_ended
from .evidence import Target, collect

# The last one before servers registered (migration 0013). Move it on with each release.
PREVIOUS = "d289a24"


@pytest.fixture(scope="module")
def previous() -> Iterator[Path]:
    """A folder with the program as it was."""
    with folder_for_all("tocsin-previous-") as folder:
        packed = subprocess.run(
            ["git", "archive", PREVIOUS, "tocsin", "tests", "pyproject.toml"], cwd=ROOT, capture_output=True
        )
        if packed.returncode:
            pytest.skip(f"this copy has no history, so no {PREVIOUS}: {packed.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        yield folder


def of(process: Process, folder: Path) -> None:
    """Let it run the program in that folder."""
    process.env["PYTHONPATH"] = str(folder)
    process._command = ["env", "-C", str(folder), *process._command]


_FOUND = """
import json, sys
from pathlib import Path
from tocsin.node.assemble import bootstrap
from tocsin.settings import Settings
print(json.dumps(bootstrap(Settings.load({}, home=Path(sys.argv[2]), database_url=sys.argv[1]), {})))
"""


class Old(NamedTuple):
    """A database that the earlier program has made, and its keys."""

    url: str
    keys: dict[str, str]


@pytest.fixture
def old_database(cluster: Cluster, previous: Path, tmp_path: Path) -> Iterator[Old]:
    name = f"old_{os.getpid()}"
    asyncio.run(cluster._execute(f"create database {name} owner tocsin_owner"))
    words = [sys.executable, "-c", _FOUND, cluster.url(name), str(tmp_path)]
    done = subprocess.run(words, cwd=previous, env={"PYTHONPATH": str(previous)}, capture_output=True, text=True)
    try:
        assert done.returncode == 0, done.stderr
        yield Old(cluster.url(name), json.loads(done.stdout))
    finally:
        asyncio.run(cluster.drop(name))


async def test_old_and_new_servers_and_workers_work_on_one_new_schema(
    old_database: Old, previous: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Site(tmp_path, old_database.url, old_database.keys) as site:
        old, new = [await site.server(name, start=False) for name in ("old", "new")]
        workers = [Worker(site, f"old-{s.name}", s.url, 8, "tests.cluster.jobs:app") for s in (old, new)]
        site.workers += workers
        for process in (old, *workers):
            of(process, previous)
        await old.start()
        await workers[0].start()
        async with Driver([old.url, new.url], site.keys["key"], site.client_ledger) as driver:
            load = Load(site.job_ledger, 5.0, batches_per_second=5, python=True, cancels_per_second=1)
            loading = asyncio.create_task(run_load(driver, load))
            migrated = await migrate(old_database.url)  # under the old server's load
            await new.start()
            await asyncio.gather(workers[1].start(), site.worker("new-old", old), site.worker("new-new", new))
            load.seconds = 2.0
            made = Made.all(await asyncio.gather(loading, run_load(driver, load)))
            await stop_schedules(driver, made)
            await wait_until_ended(driver, made)
            for url in (new.url, old.url):  # both must tell the same
                target = Target(url, site.keys["key"], driver.tag, apart=0.3, settle=0, slack=2.0)
                evidence = await collect(target, [site.client_ledger], [site.job_ledger])
                assert [str(b) for b in check(evidence)] == []
            names = {w["id"]: w["name"] for w in (await driver.get("/v1/workers"))["items"]}
        seen = await status(old_database.url)
    with capsys.disabled():
        print(f"\nold and new together: applied {migrated.applied}, waiting {migrated.waiting}; {summary(evidence)}")
    assert migrated.older and all(m.phase == "post" for m in seen.migrations if m.applied_at is None)
    did = {names.get(a["worker"]) for attempts in evidence.attempts.values() for a in attempts}
    assert did >= {"old-old", "old-new", "new-old", "new-new"}, "each pair of old and new has worked"


_CATALOG = {
    "columns": """select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
                         pg_get_expr(d.adbin, d.adrelid), co.collname
                    from pg_attribute a join pg_class c on c.oid = a.attrelid
                    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
                    left join pg_collation co on co.oid = a.attcollation
                   where c.relnamespace = 'tocsin'::regnamespace and a.attnum > 0 and not a.attisdropped""",
    "tables": """select relname, relkind, relpersistence, relrowsecurity, relforcerowsecurity, reloptions, relacl::text
                   from pg_class where relnamespace = 'tocsin'::regnamespace""",
    "indexes": "select indexdef from pg_indexes where schemaname = 'tocsin'",
    "constraints": """select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint
                       where connamespace = 'tocsin'::regnamespace""",
    "policies": "select tablename, policyname, roles::text, cmd, qual, with_check from pg_policies",
    "functions": """select proname, pg_get_functiondef(oid), proacl::text from pg_proc
                     where pronamespace = 'tocsin'::regnamespace""",
    "triggers": """select tgrelid::regclass::text, pg_get_triggerdef(oid) from pg_trigger
                    where not tgisinternal""",
}


async def catalog(url: str) -> dict[str, set[str]]:
    """All that a schema is, without the order in which it became so."""
    connection = await asyncpg.connect(url)
    try:
        return {what: {str(tuple(row)) for row in await connection.fetch(sql)} for what, sql in _CATALOG.items()}
    finally:
        await connection.close()


async def test_an_upgraded_schema_is_the_one_of_a_fresh_install(
    cluster: Cluster, old_database: Old, database_url: str
) -> None:
    def administrators(url: str) -> str:
        return cluster.as_superuser(url.rpartition("@")[2].lstrip("/").partition("?")[0])

    before = await catalog(administrators(old_database.url))
    await migrate(old_database.url)
    upgraded, fresh = await catalog(administrators(old_database.url)), await catalog(administrators(database_url))
    assert before != fresh, "something was upgraded"
    assert {w: upgraded[w] ^ fresh[w] for w in _CATALOG} == {w: set() for w in _CATALOG}
    assert len(fresh["columns"]) > 100 and all(fresh.values())
