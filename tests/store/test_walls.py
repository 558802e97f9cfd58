"""The second wall between tenants: row-level security, held to the catalogue and to every way a transaction ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest

from tests.conftest import Cluster
from tests.store.washed import database_url, db, washed_database
from tocsin.errors import TocsinError
from tocsin.model.access import Scope
from tocsin.store.db import Connection, Database, kept_to

__all__ = ["database_url", "db", "washed_database"]

# Tables without a tenant, and what of them a tenant's transactions may do. Whatever comes must be put here, or have
# a tenant and a wall.
COMMON = {
    "archived_days": "select",
    "lane_pass": "",
    "audit_sealer": "select",
    "lanes": "select",
    "migrations": "select",
    "pools": "select",
    "cluster": "",
    "log_garbage": "",
    "logouts": "",
    "past_workers": "",
    "lane_vouchers": "",
    "planner": "",
    "outages": "",
    "servers": "",
    "tenants": "",
    "workers": "",
}
# Unique keys without the tenant, of tables that have one. A value that two tenants could both choose would tell one of
# the other by the refusal; these are made of ids that we draw, and of a hash of 256 random bits.
DRAWN = {
    "api_keys (hash)",
    "api_keys (id)",
    "audit (id)",
    "audit_chain (audit_id)",
    "runs (job_id, join_key)",
    "runs (job_id, scheduled_for)",
}
# Tables with a job in them that a key with a scope is not kept from by the database: no route that is open to such a
# key reads them.
UNSCOPED = {"calendar_uses"}


@pytest.fixture
async def admin(cluster: Cluster, database_url: str) -> AsyncIterator[asyncpg.Connection]:
    name = urlsplit(database_url).path.lstrip("/")
    connection = await asyncpg.connect(cluster.as_superuser(name), server_settings={"search_path": "tocsin"})
    yield connection
    await connection.close()


# ── the catalogue ────────────────────────────────────────────────────────────────────────────────────────────────

_TABLES = """
select c.relname as name, c.relrowsecurity and c.relforcerowsecurity as forced, c.relispartition as part,
       exists (select from pg_attribute a
                where a.attrelid = c.oid and a.attname = 'tenant_id' and not a.attisdropped) as owned,
       exists (select from pg_attribute a
                where a.attrelid = c.oid and a.attname = 'job_id' and not a.attisdropped) as of_job,
       (select jsonb_object_agg(p.polname, jsonb_build_array(pg_get_expr(p.polqual, p.polrelid), p.polpermissive,
                   p.polcmd, p.polroles::regrole[]::text[], pg_get_expr(p.polwithcheck, p.polrelid)))::text
          from pg_policy p where p.polrelid = c.oid) as policies,
       array(select what from unnest(array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger'])
                            as r(what)
              where has_table_privilege('tocsin_app', c.oid, what)
                 or (what in ('select', 'insert', 'update') and has_any_column_privilege('tocsin_app', c.oid, what)))
           as app_may
  from pg_class c
 where c.relnamespace = 'tocsin'::regnamespace and c.relkind in ('r', 'p')
 order by 1
"""

_OWN = "(tenant_id = (NULLIF(current_setting('tocsin.tenant'::text, true), ''::text))::integer)"
_PERMISSIVE, _RESTRICTIVE = True, False
_WALL = {
    "tenant": [_OWN, _PERMISSIVE, "*", ["tocsin_app"], _OWN],
    "engine": ["true", _PERMISSIVE, "*", ["tocsin_engine", "tocsin_owner"], "true"],
}
_UNSET = "((COALESCE(current_setting('tocsin.scope'::text, true), ''::text) = ''::text) OR "
_SCOPE = [_RESTRICTIVE, "*", ["tocsin_app"], None]


async def test_every_table_with_a_tenant_forces_row_level_security(admin: asyncpg.Connection) -> None:
    tables = [table for table in await admin.fetch(_TABLES) if table["owned"] and not table["part"]]
    assert len(tables) >= 30
    for table in tables:
        policies = msgspec.json.decode(table["policies"] or "{}")
        scope = policies.pop("scope", None)
        assert table["forced"] and policies == _WALL, table["name"]
        if table["name"] == "jobs" or (table["of_job"] and table["name"] not in UNSCOPED):
            assert scope is not None, f"{table['name']}: keys with a scope are not kept to their jobs there"
            assert scope[0].startswith(_UNSET) and scope[1:] == _SCOPE, table["name"]
            assert ("name ~ " if table["name"] == "jobs" else "job_id)") in scope[0], table["name"]
        else:
            assert scope is None, table["name"]


async def test_what_has_no_tenant_is_known_and_a_part_is_reached_through_the_whole(admin: asyncpg.Connection) -> None:
    tables = await admin.fetch(_TABLES)
    common = {table["name"]: " ".join(table["app_may"]) for table in tables if not table["owned"]}
    assert common == COMMON
    for table in tables:
        assert not (table["part"] and table["app_may"]), table["name"]
        assert "truncate" not in table["app_may"], f"{table['name']}: no policy is asked about that"


async def test_no_unique_key_tells_one_tenant_of_another(admin: asyncpg.Connection) -> None:
    keys = await admin.fetch(
        """select c.relname || ' (' || string_agg(a.attname, ', ' order by k.n) || ')' as name,
                  bool_or(a.attname = 'tenant_id') as owned
             from pg_index i
             join pg_class c on c.oid = i.indrelid and c.relnamespace = 'tocsin'::regnamespace and not c.relispartition
            cross join unnest(i.indkey::int[]) with ordinality as k(attribute, n)
             join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attribute
            where i.indisunique
              and exists (select from pg_attribute t where t.attrelid = c.oid and t.attname = 'tenant_id')
            group by i.indexrelid, c.relname"""
    )
    assert len(keys) >= 30
    assert {key["name"] for key in keys if not key["owned"]} == DRAWN


async def test_no_role_of_ours_is_above_the_walls(admin: asyncpg.Connection) -> None:
    roles = await admin.fetch("select * from pg_roles where rolname like 'tocsin%'")
    assert {r["rolname"] for r in roles} == {"tocsin", "tocsin_owner", "tocsin_engine", "tocsin_app"}
    assert not any(r["rolsuper"] or r["rolbypassrls"] or r["rolcreaterole"] or r["rolcreatedb"] for r in roles)
    for role in ("tocsin_app", "tocsin_engine"):
        may = await admin.fetchval("select has_table_privilege($1, 'tocsin.audit', 'update, delete')", role)
        assert not may, f"{role} could rewrite the audit"


async def test_what_acts_with_the_owners_rights_is_called_by_no_tenant(admin: asyncpg.Connection) -> None:
    functions = await admin.fetch(
        """select p.proname as name, p.prorettype = 'trigger'::regtype as of_trigger, p.proconfig as settings
             from pg_proc p where p.pronamespace = 'tocsin'::regnamespace and p.prosecdef"""
    )
    assert functions
    for function in functions:
        assert function["of_trigger"], f"{function['name']}: a statement could call it"
        assert function["settings"] == ["search_path=tocsin, pg_temp"], function["name"]
    views = "select relname from pg_class where relnamespace = 'tocsin'::regnamespace and relkind in ('v', 'm')"
    assert await admin.fetch(views) == [], "a view looks with its owner's eyes"


# ── the wall itself ──────────────────────────────────────────────────────────────────────────────────────────────


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
CARRIED = """select string_agg(current_setting('tocsin.' || name, true), '')
               from unnest(array['tenant', 'scope', 'scope_tags']) as s(name)"""


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


async def test_connections_are_shared_by_tenants_and_carry_none_over(db: Database, admin: asyncpg.Connection) -> None:
    a, b = await seed(admin)

    async def ask(tenant: int) -> int:
        async with db.tenant(tenant, "test") as connection:
            assert await connection.fetchval(TENANTS) == [tenant]
            return int(await connection.fetchval("select pg_backend_pid()"))

    backends = await asyncio.gather(*(ask(t) for _ in range(20) for t in (a, b)))
    assert len(set(backends)) <= 2, "each was borrowed by both"
    await nobody_left(db)


async def nobody_left(db: Database) -> None:
    """Every connection of the pool is nobody's."""
    async with db.transaction("test", "app") as one, db.transaction("test", "app") as two:
        for connection in (one, two):
            assert await connection.fetchval(TENANTS) is None
            assert await connection.fetchval(CARRIED) in (None, "")


# How a tenant's transaction may end other than well.


async def _raises(connection: Connection) -> None:
    raise ZeroDivisionError


async def _fails(connection: Connection) -> None:
    await connection.fetchval("select 1 / 0")


async def _takes_too_long(connection: Connection) -> None:
    await connection.execute("set local statement_timeout = 5")
    await connection.fetchval("select pg_sleep(60)")


async def _waits_for_a_lock(connection: Connection) -> None:
    await connection.execute("set local lock_timeout = 5")
    await connection.fetchval("lock table jobs in row exclusive mode")


async def _is_not_answered(connection: Connection) -> None:
    await connection.fetchval("select pg_sleep(60)", timeout=0.005)


async def _loses_its_connection(connection: Connection) -> None:
    await connection.fetchval("select pg_terminate_backend(pg_backend_pid())")


@pytest.mark.parametrize(
    "ends",
    [_raises, _fails, _takes_too_long, _waits_for_a_lock, _is_not_answered, _loses_its_connection],
    ids=lambda ends: ends.__name__.strip("_"),
)
async def test_no_tenant_is_left_by_a_transaction_that_ends_badly(
    db: Database, admin: asyncpg.Connection, ends: Callable[[Connection], Awaitable[None]]
) -> None:
    a, b = await seed(admin)
    async with contextlib.AsyncExitStack() as stack:
        if ends is _waits_for_a_lock:
            await stack.enter_async_context(admin.transaction())
            await admin.execute("lock table jobs in share mode")
        for tenant in (a, b, a):
            with (
                pytest.raises((ZeroDivisionError, asyncpg.PostgresError, TocsinError)),
                kept_to(Scope(("nothing",), (("team", "none"),))),
            ):
                async with db.tenant(tenant, "test") as connection:
                    await ends(connection)
    await nobody_left(db)


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_nor_by_one_whose_caller_went_away(db: Database, admin: asyncpg.Connection, times: int) -> None:
    a, _ = await seed(admin)
    within = asyncio.Event()

    async def ask() -> None:
        async with db.tenant(a, "test") as connection:
            within.set()
            await connection.fetchval("select pg_sleep(60)")

    for _ in range(4):
        within.clear()
        asking = asyncio.create_task(ask())
        await within.wait()
        # Once more while it rolls back, and while it gives the connection back.
        for _ in range(times):
            asking.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await asking
    await nobody_left(db)
