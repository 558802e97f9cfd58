"""db: databases and roles that are refused, how errors are sorted, and what its sessions carry."""

from __future__ import annotations

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
