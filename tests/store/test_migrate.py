"""migrate: applied once, by however many at once; never changed afterwards. And the partitions of history."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from tests.conftest import Cluster
from tocsin.errors import SetupError
from tocsin.flow import partitions
from tocsin.model.ids import instant_of, new_id
from tocsin.store import migrate as module
from tocsin.store.db import Database
from tocsin.store.migrate import is_current, migrate, migrations


@pytest.fixture
async def empty(cluster: Cluster) -> AsyncIterator[str]:
    """A database without anything in it."""
    name = "empty_for_migrations"
    await cluster._execute(f"create database {name} owner tocsin_owner")
    yield cluster.url(name)
    await cluster.drop(name)


def test_migrations_are_numbered_without_a_gap() -> None:
    names = [path.name for path in migrations()]
    assert names and all(re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", name) for name in names)
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


async def test_eight_migrators_at_once_apply_each_migration_once(empty: str) -> None:
    applied = await asyncio.gather(*(migrate(empty) for _ in range(8)))
    assert sorted(name for names in applied for name in names) == [path.stem for path in migrations()]
    assert await migrate(empty) == [], "and again does nothing"
    db = Database(empty, size=1)
    await db.open()
    assert await is_current(db)
    await db.close()


async def test_a_migration_changed_after_it_was_applied_is_found(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in migrations():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    await migrate(empty)
    last = migrations()[-1]
    (tmp_path / "9999_new.sql").write_text("create table extra (x int);")
    assert await migrate(empty) == ["9999_new"]
    last.write_text(last.read_text() + "\n-- only a comment\n")
    with pytest.raises(SetupError, match=f"{last.stem} was changed"):
        await migrate(empty)


async def test_a_migration_that_fails_leaves_nothing_behind(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0001_half.sql").write_text("create table tocsin.half (x int); select 1 / 0;")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty)
    (tmp_path / "0001_half.sql").write_text("create table tocsin.half (x int);")
    assert await migrate(empty) == ["0001_half"]


# ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    db = Database(database_url, size=4)
    await db.open()
    yield db
    await db.close()


async def names(db: Database) -> list[str]:
    return sorted(row["name"] for row in await db.fetch("engine", partitions.SQL["existing"]))


async def test_partitions_are_made_ahead_once_by_however_many(db: Database) -> None:
    made = await asyncio.gather(*(partitions.make_ahead(db) for _ in range(4)))
    today = await db.read_clock()
    wanted = sorted(f"history_{today + timedelta(days=d):%Y%m%d}" for d in range(-1, 8))
    assert sorted(name for names in made for name in names) == wanted == await names(db)
    assert await partitions.make_ahead(db) == []


async def test_a_row_lands_in_the_partition_of_its_ids_day(db: Database) -> None:
    await partitions.make_ahead(db)
    midnight = partitions.wanted(await db.read_clock())[2]
    around = [midnight - timedelta(milliseconds=1), midnight, midnight + timedelta(hours=23, minutes=59, seconds=59)]
    for at in around:
        run_id = new_id(at)
        await db.fetch(
            "engine",
            """insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, fence, trigger,
                                    priority, failures, losses, max_attempts, scheduled_for, ready_at, finished_at)
               values (1, $1, 1, $1, 1, true, 'succeeded', 1, 'api', 500, 0, 0, 1, now(), now(), now())""",
            run_id,
        )
        where = await db.fetchval("engine", "select tableoid::regclass::text from history where run_id = $1", run_id)
        assert where == partitions.partition_name(at) and abs(instant_of(run_id) - at) <= timedelta(milliseconds=1)
    with pytest.raises(asyncpg.CheckViolationError):  # no default partition: a forgotten day is loud
        await db.fetch(
            "engine",
            """insert into history select h.tenant_id, $1, h.attempt, h.job_id, h.job_version, h.final, h.state
                 from history h limit 1""",
            new_id(midnight + timedelta(days=30)),
        )
