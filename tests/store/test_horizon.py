"""horizon: whoever keeps dead rows from being removed is measured and named, once; our own sessions cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.conftest import Cluster
from tests.store.washed import database_url, db, washed_database
from tocsin.errors import Unavailable
from tocsin.store import horizon as module
from tocsin.store.db import Database
from tocsin.store.horizon import Holder, Horizon
from tocsin.telemetry import LONGEST_TX, SEES_SESSIONS, XMIN_AGE

__all__ = ["database_url", "db", "washed_database"]


@pytest.fixture
async def idle(cluster: Cluster, database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Somebody's idle transaction with a snapshot."""
    name = urlsplit(database_url).path.lstrip("/")
    connection = await asyncpg.connect(cluster.as_superuser(name), server_settings={"application_name": "a report"})
    await connection.execute("begin isolation level repeatable read")
    await connection.fetchval("select count(*) from pg_class")
    yield connection
    await connection.close()


class Said(list[dict[str, Any]]):
    """A logger that keeps its warnings."""

    def warning(self, event: str, **more: Any) -> None:
        self.append({"event": event} | more)


async def test_a_session_that_holds_the_horizon_is_measured_and_named_once(
    db: Database, idle: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    horizon = Horizon(db)
    monkeypatch.setattr(module, "TOO_LONG", 0.0)
    monkeypatch.setattr(module, "log", said := Said())
    for _ in range(3):
        await horizon.watch()
    pid = idle.get_server_pid()
    [named] = [one for one in said if one["pid"] == pid]
    assert (named["user"], named["application"], named["state"]) == ("postgres", "a report", "idle in transaction")
    assert named["age_seconds"] >= 0 and "dead rows" in named["event"]
    assert XMIN_AGE._value.get() > 0 and LONGEST_TX._value.get() >= XMIN_AGE._value.get()
    assert SEES_SESSIONS._value.get() == 1

    await idle.execute("rollback")
    await horizon.watch()
    assert pid not in [holder.pid for holder in (await horizon.look())[0]]
    await idle.execute("begin isolation level repeatable read")
    await idle.fetchval("select count(*) from pg_class")
    await horizon.watch()
    assert len([one for one in said if one["pid"] == pid]) == 2, "another transaction is another story"


async def test_a_replication_slot_counts_from_when_it_was_first_seen(db: Database) -> None:
    horizon = Horizon(db)
    row = {"kind": "replication slot", "pid": None, "user": None, "application": "gone", "state": "idle"}

    async def rows(_pool: str, sql: str) -> list[Any]:
        return [Row(row | {"seconds": None, "holds": True})] if sql == module.SQL["holders"] else [(True,)]

    db.fetch = rows  # type: ignore[method-assign, assignment]
    [first], _ = await horizon.look()
    await asyncio.sleep(0.05)
    [second], _ = await horizon.look()
    assert first.seconds == 0.0 < 0.05 <= second.seconds
    assert str(second) == "replication slot (gone, idle): 0 s"


class Row(dict[str, Any]):
    """A row: a tuple whose columns are also found by name."""

    def __iter__(self) -> Any:
        return iter(self.values())


async def test_without_the_right_to_see_others_it_says_so(
    db: Database, idle: asyncpg.Connection, cluster: Cluster
) -> None:
    await cluster._execute("revoke pg_read_all_stats from tocsin_engine")
    try:
        holders, sees_all = await Horizon(db).look()
    finally:
        await cluster._execute("grant pg_read_all_stats to tocsin_engine")
    assert not sees_all
    assert idle.get_server_pid() not in [holder.pid for holder in holders]


async def test_our_own_transactions_are_ended_by_their_limits(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"idle_in_transaction_session_timeout": "100ms"}
    monkeypatch.setattr(Database, "session", Database.session | limits)
    db = Database(database_url, size=1)
    await db.open()
    with pytest.raises(Unavailable):
        async with db.transaction("test") as connection:
            await connection.fetchval("select 1")
            await asyncio.sleep(0.5)
            await connection.fetchval("select 1")
    assert await db.fetchval("engine", "select current_setting('transaction_timeout', true)") in ("30s", None)
    await db.close()


def test_a_holder_reads_like_a_sentence() -> None:
    holder = Holder("client backend", 7, "ann", "psql", "idle in transaction", 61.2, True)
    assert str(holder) == "client backend of ann (psql, pid 7, idle in transaction): 61 s"
