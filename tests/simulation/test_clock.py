"""The clock of the simulation rules every statement of ours."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

import tocsin
from tests.conftest import Cluster
from tests.simulation.nodes import BEGINNING, SEARCH_PATH, ManualClock, SimulatedDatabase, install_clock

HOUR = timedelta(hours=1)


@pytest.fixture
async def observer(cluster: Cluster, database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await install_clock(cluster.as_superuser(urlsplit(database_url).path.lstrip("/")))
    yield connection
    await connection.close()


@pytest.fixture
async def db(observer: asyncpg.Connection, database_url: str) -> AsyncIterator[SimulatedDatabase]:
    clock = ManualClock(observer)
    await clock.restart()
    db = SimulatedDatabase(database_url, clock)
    await db.open()
    yield db
    await db.close()


async def test_every_role_has_the_time_that_was_set(db: SimulatedDatabase) -> None:
    clock = db.clock
    assert isinstance(clock, ManualClock)
    asked = "select now(), statement_timestamp(), transaction_timestamp()"
    for at in (BEGINNING, BEGINNING + HOUR, BEGINNING - HOUR):
        await clock.set(at)
        for pool in ("engine", "vital", "app"):
            assert tuple(await db.fetchrow(pool, asked)) == (at,) * 3
        assert await db.read_clock() == clock.now() == at


async def test_an_open_transaction_keeps_the_time_at_which_it_began(db: SimulatedDatabase) -> None:
    clock = db.clock
    assert isinstance(clock, ManualClock)
    async with db.transaction("test") as connection:
        assert await connection.fetchval("select now()") == BEGINNING
        await clock.set(BEGINNING + HOUR)
        row = await connection.fetchrow("select now(), statement_timestamp()")
        assert tuple(row) == (BEGINNING, BEGINNING + HOUR)


async def test_defaults_and_indexed_conditions_go_by_it(db: SimulatedDatabase, observer: asyncpg.Connection) -> None:
    await db.fetch("engine", "insert into tenants (slug) values ('sim')")
    assert await observer.fetchval("select created_at from tenants where slug = 'sim'") == BEGINNING
    async with observer.transaction():
        await observer.execute("set local search_path = pg_catalog")  # so that what is not of there is written out
        bound = await observer.fetch(
            "select pg_get_expr(f.adbin, f.adrelid) as by from pg_attrdef f join pg_class c on c.oid = f.adrelid"
            " where c.relnamespace = 'tocsin'::regnamespace and pg_get_expr(f.adbin, f.adrelid) ~ 'now|timestamp'"
        )
    assert {row["by"] for row in bound} == {"sim.now()"}
    plan = await db.fetch(
        "engine",
        "explain select * from triggers where next_fire_at <= now() + interval '1 minute'"
        " and kept_until is null and waits_for is null",
    )
    text = "\n".join(row[0] for row in plan)
    assert "Index Cond" in text and "Seq Scan" not in text


def test_no_statement_asks_another_clock() -> None:
    others = re.compile(
        r"current_timestamp|current_time\b|current_date|localtime|timeofday|pg_catalog\.now|'now'", re.I
    )
    for path in Path(tocsin.__file__).parent.rglob("*.sql"):
        if path.name == "restored.sql":
            continue  # a command for when nothing runs; the real day numbers its epoch
        assert not others.search(path.read_text()), path
    assert SEARCH_PATH.endswith("pg_catalog"), "named last, or it would be looked into first"
