"""The scene on which steps are called by hand, in one database that is emptied after each test (a clone takes some
300 ms with fsync on, emptying a tenth of that)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.conftest import Api, Cluster
from tests.flow.kit import Scene
from tests.flow.old import DAY, Old
from tests.flow.past import DAYS, Past
from tests.flow.stage import Stage
from tocsin.flow import partitions, report, seal
from tocsin.store.db import Database, is_contention
from tocsin.store.parquet import Parquet

_WASH = """
do $$
declare t text;
begin
    set local session_replication_role = replica;
    for t in select c.relname from pg_class c
              where c.relnamespace = 'tocsin'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
                and c.relname not in ('migrations', 'cluster', 'tenants', 'api_keys', 'pools', 'lanes', 'audit_sealer',
                                      'workers', 'lane_pass')
    loop
        execute format('delete from tocsin.%I', t);
    end loop;
    delete from tocsin.workers where name <> 'conductor';
    update tocsin.workers set state = 'live', lease_until = '9999-01-01', gone_at = null;
    delete from tocsin.api_keys where name not like 'tocsin up (%)';
    delete from tocsin.tenants where slug <> 'default';
    update tocsin.tenants set weight = 1, max_jobs = null, max_queued = null, max_running = null, submit_rate = null,
                              log_bytes_per_day = null, runs_days = null, legal_hold = false, suspended_at = null,
                              suspended_from = null, suspended_until = null, hot_days = null, logs_days = null,
                              audit_days = null;
    delete from tocsin.pools where name not in ('default', 'workflows') and name not in (select pool from tocsin.lanes);
    update tocsin.pools set policy = 'fair', head_start = default, paused_at = null, claimed = 0, version = 1,
                            tenants = null, paused_from = null, paused_until = null;
    update tocsin.lane_pass set part = 'jobs', began_at = now(), at_tenant = 0, at_id = default;
    update tocsin.cluster set restored = 0, objects_id = null;
    update tocsin.audit_sealer set high = (select last_value from tocsin.audit_id_seq), gaps = '[]', epoch = 0;
end $$
"""


@pytest.fixture(scope="session")
def washed_database(cluster: Cluster) -> str:
    """The name of the one database, with its partitions made ahead."""

    async def make() -> str:
        name = await cluster.clone()
        db = Database(cluster.url(name), size=1)
        await db.open()
        try:
            await partitions.make_ahead(db)
        finally:
            await db.close()
        return name

    return asyncio.run(make())


@pytest.fixture
def database_url(cluster: Cluster, washed_database: str) -> Iterator[str]:
    """A migrated database without a trace of other tests."""

    async def wash() -> None:
        connection = await asyncpg.connect(cluster.as_superuser(washed_database))
        try:
            await connection.execute(_WASH)
        finally:
            await connection.close()

    yield cluster.url(washed_database)
    asyncio.run(wash())


@pytest.fixture
async def scene(still_api: Api, cluster: Cluster) -> AsyncIterator[Scene]:
    database = urlsplit(still_api.node.settings.database_url).path.lstrip("/")
    connection = await asyncpg.connect(
        cluster.as_superuser(database), server_settings={"search_path": "tocsin", "timezone": "UTC"}
    )
    yield Scene(still_api, connection)
    await connection.close()


@pytest.fixture
async def old(scene: Scene, tmp_path: Path) -> AsyncIterator[Old]:
    """Days of long ago that can be archived; none of them is left."""
    parquet = Parquet(scene.node.objects, tmp_path / "cold")
    old = Old(scene, parquet)
    yield old
    parquet.close()
    for name in await old.tables() & {f"history_{DAY + timedelta(days=d):%Y%m%d}" for d in range(-5, 5)}:
        await scene.sql.execute(f"drop table {name}")


@pytest.fixture
def stage(scene: Scene) -> Stage:
    return Stage(scene)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Why reports had to be tried again."""
    found: list[BaseException] = []
    once = report._report_once

    async def listening(*args: Any) -> report.Reported:
        try:
            return await once(*args)
        except Exception as error:
            if is_contention(error):
                found.append(error)
            raise

    monkeypatch.setattr(report, "_report_once", listening)
    return found


@pytest.fixture
async def other(scene: Scene) -> AsyncIterator[Database]:
    """The same database, as a second server has it."""
    db = Database(scene.db.url, size=2)
    await db.open()
    yield db
    await db.close()


@pytest.fixture
async def past(scene: Scene, tmp_path: Path) -> AsyncIterator[Past]:
    """Create three past days of one tenant, and some records of today."""
    parquet = Parquet(scene.node.objects, tmp_path / "cold")
    past = Past(scene, parquet)
    past.tenant_id = (await scene.who()).tenant_id
    await scene.sql.execute("delete from audit")  # the records of the keys' creation
    for day in DAYS:
        await past.live(day)
    await past.anchor(await scene.now())  # as servers do every day
    await scene.job(name="today")
    await seal.seal(scene.db)
    yield past
    parquet.close()
