"""migrate: applied once, by however many at once; never changed afterwards. And the partitions of history."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from tests import PATIENCE
from tests.conftest import Api, Cluster
from tocsin.errors import PartitionMissing, SetupError
from tocsin.flow import partitions, servers
from tocsin.flow.servers import Server
from tocsin.model.ids import instant_of, new_id
from tocsin.node.assemble import Node
from tocsin.settings import Settings
from tocsin.store import migrate as module
from tocsin.store.db import Database, connect
from tocsin.store.migrate import Migration, is_current, migrate, migrations, status


@pytest.fixture
async def empty(cluster: Cluster) -> AsyncIterator[str]:
    """A database without anything in it."""
    name = "empty_for_migrations"
    await cluster._execute(f"create database {name} owner tocsin_owner")
    yield cluster.url(name)
    await cluster.drop(name)


def test_migrations_are_numbered_and_say_what_they_are() -> None:
    names = [m.name for m in migrations()]
    assert names and all(re.fullmatch(r"\d{4}_[a-z0-9_]+", name) for name in names)
    assert len({name[:4] for name in names}) == len(names), "each number once"
    silent = [m.name for m in migrations() if not re.match(r"-- (pre|post): \w", m.text)]
    assert all(name < "0016" for name in silent), "from 0016 on the first line says `-- pre: …` or `-- post: …`"


# What would break a server of the release before. New columns and tables do not; nor does an index less or more.
_CONTRACTS = re.compile(
    r"\bdrop (table|column|function|trigger|type|view|constraint|sequence)\b|\brename\b"
    r"|\balter column \w+ (type|set not null)\b|\bdrop default\b|\brevoke\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("migration", [m for m in migrations() if m.name > "0013"], ids=lambda m: m.name)
def test_what_takes_something_away_is_post(migration: Migration) -> None:
    text = re.sub(r"--[^\n]*", "", migration.text)
    # A constraint that comes back in the same breath may allow more than it did; else it is for the review.
    text = re.sub(r"\bdrop constraint (\w+),\s+add constraint \1\b", "", text)
    found = _CONTRACTS.search(text)
    assert migration.phase == "post" or not found, f"{found} in a migration that older servers must survive"


async def test_eight_migrators_at_once_apply_each_migration_once(empty: str) -> None:
    done = await asyncio.gather(*(migrate(empty) for _ in range(8)))
    assert sorted(name for one in done for name in one.applied) == [m.name for m in migrations()]
    assert await migrate(empty) == ([], [], []), "and again does nothing"
    db = Database(empty, size=1)
    await db.open()
    assert await is_current(db)
    await db.close()


class Folder:
    """Migrations of the test's own: those there are, and more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for migration in migrations():
            self.add(migration.name, migration.text)

    def add(self, name: str, text: str) -> None:
        self.path.joinpath(f"{name}.sql").write_bytes(text.encode())

    def remove(self, name: str) -> None:
        self.path.joinpath(f"{name}.sql").unlink()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    made = Folder(tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    return made


async def test_a_migration_changed_after_it_was_applied_is_found(empty: str, folder: Folder) -> None:
    await migrate(empty)
    last = migrations()[-1]
    folder.add("9999_new", "create table extra (x int);")
    assert (await migrate(empty)).applied == ["9999_new"]
    folder.add(last.name, last.text + "\n-- only a comment\n")
    with pytest.raises(SetupError, match=f"{last.name} was changed"):
        await migrate(empty)


async def test_a_migration_that_fails_leaves_nothing_behind(
    empty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    (tmp_path / "0001_half.sql").write_text("create table tocsin.half (x int); select 1 / 0;")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty)
    (tmp_path / "0001_half.sql").write_text("create table tocsin.half (x int);")
    assert (await migrate(empty)).applied == ["0001_half"]


# ── expand and contract ──────────────────────────────────────────────────────────────────────────────────────────


CONTRACTION = "-- post: nobody reads it any more\nalter table jobs drop column anchored_at;"
EXPANSION = "-- pre: more\nalter table jobs add column more int;"


async def enlisted(db: Database, newest: str) -> Server:
    server = Server(str(uuid.uuid4()), f"host-{newest}", "0.1.0", newest)
    await servers.enlist(db, server)
    return server


async def test_a_contraction_waits_until_older_servers_have_gone(
    database_url: str, db: Database, folder: Folder
) -> None:
    folder.add("9998_less", CONTRACTION)
    folder.add("9999_more", EXPANSION)
    old, new = await enlisted(db, "9997"), await enlisted(db, "9999_more")
    done = await migrate(database_url)
    assert (done.applied, done.waiting) == (["9999_more"], ["9998_less"]), "what expands does not wait"
    assert [server.name for server in done.older] == [old.name]
    assert await is_current(db), "a server of this release works before the contraction, too"
    seen = await status(database_url)
    assert seen.ready and {s.name for s in seen.servers} == {old.name, new.name}
    assert [m.name for m in seen.migrations if m.applied_at is None] == ["9998_less"]
    await servers.leave(db, old)
    assert (await migrate(database_url)).applied == ["9998_less"]
    assert await is_current(db)


async def test_a_server_that_was_not_heard_of_for_long_is_not_waited_for(
    database_url: str, db: Database, folder: Folder
) -> None:
    folder.add("9998_less", CONTRACTION)
    await enlisted(db, "9997")
    await db.fetch("engine", "update servers set seen_at = now() - interval '31 s'")
    assert (await migrate(database_url)).applied == ["9998_less"]


async def test_servers_from_before_the_register_are_told_by_their_sessions(database_url: str, folder: Folder) -> None:
    folder.add("9998_less", CONTRACTION)
    before = await connect(database_url, "engine", application_name="tocsin")
    try:
        done = await migrate(database_url)
        assert done.waiting == ["9998_less"] and [server.newest for server in done.older] == [None]
        assert (await migrate(database_url, post=True)).applied == ["9998_less"], "whoever knows better may say so"
    finally:
        await before.close()


async def test_a_program_that_the_schema_left_behind_refuses_to_serve(
    settings: Settings, still_node: Node, cluster: Cluster, folder: Folder
) -> None:
    folder.add("9998_less", CONTRACTION)
    folder.add("9999_more", EXPANSION)
    await migrate(settings.database_url)
    folder.remove("9999_more")
    assert await is_current(still_node.db), "what expands does not hurt an older program"
    folder.remove("9998_less")
    assert not (await status(settings.database_url)).ready
    reply = await Api(still_node, cluster.keys["key"]).get("/readyz", expect=503)
    assert reply["code"] == "schema_new"
    newcomer = Node(settings)
    with pytest.raises(SetupError, match="left this release of Tocsin behind"):
        await newcomer.start()
    await newcomer.stop()


async def test_a_server_without_a_schema_says_what_to_do(empty: str, settings: Settings) -> None:
    newcomer = Node(replace(settings, database_url=empty))
    with pytest.raises(SetupError, match="run `tocsin migrate`"):
        await newcomer.start()
    await newcomer.stop()


async def test_a_migration_lets_the_queue_through_while_somebody_is_in_its_way(
    database_url: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a DDL that waits for its lock all others would wait, so it does not wait long, and tries again."""
    monkeypatch.setattr(module, "_LOCK_WAIT", "50ms")
    folder.add("9999_more", EXPANSION)
    in_the_way, queue = await connect(database_url, "engine"), await connect(database_url, "engine")
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    try:
        transaction = in_the_way.transaction()
        await transaction.start()
        await in_the_way.execute("select from jobs limit 1")
        migrating = asyncio.create_task(migrate(database_url, say=told.set_result))
        assert "9999_more waits" in await asyncio.wait_for(told, PATIENCE)
        await queue.execute("select from jobs limit 1")  # would be ended by its lock_timeout if it had to wait
        assert not migrating.done()
        await transaction.rollback()
        assert (await migrating).applied == ["9999_more"]
    finally:
        await in_the_way.close()
        await queue.close()


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
    with pytest.raises(PartitionMissing):  # no default partition: a forgotten day raises an error
        await db.fetch(
            "engine",
            """insert into history select h.tenant_id, $1, h.attempt, h.job_id, h.job_version, h.final, h.state
                 from history h limit 1""",
            new_id(midnight + timedelta(days=30)),
        )
