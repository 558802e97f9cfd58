"""db: the second wall between tenants, and the databases that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.conftest import Cluster
from tests.store.washed import database_url, db, washed_database
from tocsin.errors import Contention, SetupError, Unavailable
from tocsin.flow import claim
from tocsin.store import db as module
from tocsin.store.db import Database, Sql, columns, connect, is_contention, is_data_error

__all__ = ["database_url", "db", "washed_database"]


@pytest.fixture
async def admin(cluster: Cluster, database_url: str) -> AsyncIterator[asyncpg.Connection]:
    name = urlsplit(database_url).path.lstrip("/")
    connection = await asyncpg.connect(cluster.as_superuser(name), server_settings={"search_path": "tocsin"})
    yield connection
    await connection.close()


async def test_every_table_with_a_tenant_forces_row_level_security(admin: asyncpg.Connection) -> None:
    tables = await admin.fetch(
        """select c.relname, c.relrowsecurity, c.relforcerowsecurity, c.relispartition,
                  array(select p.polname::text from pg_policy p where p.polrelid = c.oid order by 1) as policies,
                  has_table_privilege('tocsin_app', c.oid, 'select, insert, update, delete, truncate') as app_may
             from pg_class c
             join pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant_id' and not a.attisdropped
            where c.relnamespace = 'tocsin'::regnamespace and c.relkind in ('r', 'p')"""
    )
    assert len(tables) >= 12
    for table in tables:
        if table["relispartition"]:  # reached through its parent only
            assert not table["app_may"], table["relname"]
        else:
            assert table["relrowsecurity"] and table["relforcerowsecurity"], table["relname"]
            assert {"engine", "tenant"} <= set(table["policies"]) <= {"engine", "tenant", "scope"}, table["relname"]


async def test_no_role_of_ours_is_above_the_walls(admin: asyncpg.Connection) -> None:
    roles = await admin.fetch("select * from pg_roles where rolname like 'tocsin%'")
    assert {r["rolname"] for r in roles} == {"tocsin", "tocsin_owner", "tocsin_engine", "tocsin_app"}
    assert not any(r["rolsuper"] or r["rolbypassrls"] or r["rolcreaterole"] or r["rolcreatedb"] for r in roles)
    forbidden = await admin.fetch(
        """select t, p
             from unnest(array['tenants', 'cluster', 'workers']) t, unnest(array['select', 'insert', 'update']) p
            where has_table_privilege('tocsin_app', 'tocsin.' || t, p)"""
    )
    assert forbidden == []
    for role in ("tocsin_app", "tocsin_engine"):
        may = await admin.fetchval("select has_table_privilege($1, 'tocsin.audit', 'update, delete')", role)
        assert not may, f"{role} could rewrite the audit"


async def seed(admin: asyncpg.Connection) -> tuple[int, int]:
    """Two tenants with a job each; their ids."""
    await admin.execute("insert into lanes (pool, kind) values ('default', 'seed') on conflict do nothing")
    lane = await admin.fetchval("select id from lanes where kind = 'seed'")
    ids = []
    for slug in ("aa", "bb"):
        tenant = await admin.fetchval("insert into tenants (slug) values ($1) returning id", slug)
        await admin.execute(
            """insert into jobs (tenant_id, id, spec, lane_id, once, max_attempts, priority)
               values ($1, gen_random_uuid(), '{}', $2, true, 1, 500)""",
            tenant,
            lane,
        )
        ids.append(tenant)
    return ids[0], ids[1]


TENANTS = "select array_agg(distinct tenant_id) from jobs"


async def test_the_app_role_sees_one_tenant_and_without_one_nothing(db: Database, admin: asyncpg.Connection) -> None:
    a, b = await seed(admin)
    assert await db.fetchval("app", TENANTS) is None
    assert await db.fetchval("engine", "select count(*) from jobs") == 2
    for tenant in (a, b):
        async with db.tenant(tenant, "test") as connection:
            assert await connection.fetchval(TENANTS) == [tenant]
            # Neither reading nor writing reaches the other, however it is asked for.
            other = b if tenant == a else a
            assert await connection.fetch("select * from jobs where tenant_id = $1", other) == []
            assert await connection.execute("update jobs set priority = 1 where tenant_id = $1", other) == "UPDATE 0"
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        async with db.tenant(a, "test") as connection:
            await connection.execute("insert into holds (tenant_id, job_id) values ($1, gen_random_uuid())", b)
    assert await admin.fetchval("select count(*) from holds") == 0


async def test_a_pooled_connection_carries_no_tenant_over(db: Database, admin: asyncpg.Connection) -> None:
    a, b = await seed(admin)

    async def ask(tenant: int) -> None:
        async with db.tenant(tenant, "test") as connection:
            assert await connection.fetchval(TENANTS) == [tenant]

    await asyncio.gather(*(ask(t) for _ in range(20) for t in (a, b)))
    for broken in (a, b):
        with pytest.raises(ZeroDivisionError):
            async with db.tenant(broken, "test") as connection:
                await connection.fetchval("select 1")
                raise ZeroDivisionError
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with db.tenant(broken, "test") as connection:
                await connection.fetchval("select 1 / 0")
    assert await asyncio.gather(*(db.fetchval("app", TENANTS) for _ in range(10))) == [None] * 10


async def test_a_role_above_the_walls_is_refused(
    database_url: str, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for right in ("superuser", "bypassrls"):
        await admin.execute(f"create role careless {right}")
        await admin.execute("grant careless to tocsin with set true")
        try:
            monkeypatch.setitem(module._ROLE, "app", {"role": "careless"})
            db = Database(database_url, size=1)
            with pytest.raises(SetupError, match="superuser or bypasses"):
                await db.open()
            await db.close()
        finally:
            await admin.execute("drop role careless")


@pytest.mark.parametrize("role", ["app", "engine"])
async def test_a_session_that_forgets_is_refused(database_url: str, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setitem(module._ROLE, role, module._ROLE[role] | {"synchronous_commit": "off"})
    db = Database(database_url, size=1)
    with pytest.raises(SetupError, match="synchronous_commit=off"):
        await db.open()
    await db.close()


async def test_a_database_that_forgets_is_refused(cluster: Cluster) -> None:
    name = await cluster.clone()
    try:
        await cluster._execute(f"alter database {name} set synchronous_commit = off")
        db = Database(cluster.url(name), size=1)
        with pytest.raises(SetupError, match="would not survive a crash"):
            await db.open()
        await db.close()
    finally:
        await cluster.drop(name)


async def test_a_database_that_is_not_there_is_said_so(database_url: str) -> None:
    gone = database_url.replace(urlsplit(database_url).path, "/nowhere")
    with pytest.raises(SetupError, match="cannot connect"):
        await Database(gone, size=1).open()
    with pytest.raises(Unavailable):
        await connect(gone, "engine")


async def test_errors_are_sorted_by_what_helps(db: Database) -> None:
    for statement, data, contention in (
        ("select 1 / 0", True, False),
        ("select 'x'::int", True, False),
        ("insert into tenants (slug) values ('default')", True, False),
        ("select set_config('statement_timeout', '20', true), pg_sleep(1)", False, True),
    ):
        with pytest.raises((asyncpg.PostgresError, Contention)) as caught:
            async with db.transaction("test") as connection:
                await connection.execute("set local statement_timeout = 20")
                await connection.fetch(statement)
        assert (is_data_error(caught.value), is_contention(caught.value)) == (data, contention), statement


async def test_sessions_carry_their_limits_and_the_clock_is_the_databases(db: Database) -> None:
    for pool, role in (("engine", "tocsin_engine"), ("vital", "tocsin_engine"), ("app", "tocsin_app")):
        assert await db.fetchval(pool, "select current_user::text") == role
        for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            assert await db.fetchval(pool, "select current_setting($1)", name) not in ("0", ""), name
        assert await db.fetchval(pool, "select current_setting('TimeZone')") == "UTC"
    now = await db.read_clock()
    assert abs((db.clock.now() - now).total_seconds()) < 0.5


def test_columns_turn_rows_into_arrays() -> None:
    assert columns([(1, "a"), (2, "b")], 2) == [[1, 2], ["a", "b"]]
    assert columns([], 3) == [[], [], []]


def test_a_sql_file_is_read_by_name_with_what_it_includes() -> None:
    sql = Sql(claim.__file__, claim.SHARED)
    assert "include" not in "".join(sql.values()) and "recorded as (" in sql["take"]


async def test_a_driver_that_lost_count_is_a_lost_connection(database_url: str) -> None:
    db = Database(database_url, size=1)
    await db.open()
    with pytest.raises(Unavailable):
        async with db.transaction("test"):
            raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    assert await db.fetchval("engine", "select 1") == 1, "on another connection"
    await db.close()
