"""Numbered `.sql` migrations, applied in order, each in one transaction, while servers are at work.

A migration is `pre` or `post`, as its first line says. `pre` expands: servers of the release before go on working on
its schema, so it is applied first. `post` contracts: it takes away what only older servers need, so it waits until none
lives; from then on a server that does not know it refuses to serve. What a `pre` does must not need a `post`.

A migration never waits long for a lock, because the whole queue would wait behind it: it lets go and tries again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import asyncpg

from tocsin.errors import SetupError
from tocsin.store.db import Connection, Database, Sql, connect, connect_plain

SQL = Sql(__file__)
FOLDER = Path(__file__).parent / "migrations"
ROLES = Path(__file__).with_name("roles.sql")
_LOCK_WAIT = "500ms"  # for so long at most do others stand behind a migration that cannot have its lock
_PATIENCE = 600.0  # seconds until a migration that cannot have its locks, or its turn, gives up
_LONGEST_STATEMENT = 86_400.0
_BUSY = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)

Phase = Literal["pre", "post"]
Say = Callable[[str], None]


class Migration(NamedTuple):
    """One file."""

    name: str
    phase: Phase
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Older(NamedTuple):
    """A server that lives; `newest` is the newest migration it knows, None for one from before servers said."""

    name: str
    version: str
    newest: str | None


class Migrated(NamedTuple):
    """What was applied; and which contractions wait, for which servers to go."""

    applied: list[str]
    waiting: list[str]
    older: list[Older]


def migrations() -> list[Migration]:
    """Every migration, oldest first."""
    return [_read(path) for path in sorted(FOLDER.glob("[0-9]*.sql"))]


def newest() -> str:
    """The name of the newest one: how new this program is, as far as the schema is concerned."""
    return migrations()[-1].name


def _read(path: Path) -> Migration:
    text = path.read_bytes().decode()
    return Migration(path.stem, "post" if text.startswith("-- post:") else "pre", text)


async def ensure_roles(url: str) -> None:
    """Make the three roles if the login may; otherwise say what an administrator has to run."""
    connection = await connect_plain(url)
    try:
        await connection.execute(ROLES.read_text(encoding="utf-8"))
    except asyncpg.InsufficientPrivilegeError as error:
        raise SetupError(
            f"the database login may not create the roles Tocsin works with ({error}); "
            f"let an administrator run {ROLES} in this database once, and grant the three roles to the login"
        ) from error
    finally:
        await connection.close()


# ── applying ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _silent(_: str) -> None:
    pass


async def migrate(url: str, *, post: bool = False, say: Say = _silent) -> Migrated:
    """Bring the schema up to date. Contractions wait while older servers live, unless `post` says that they may go."""
    await ensure_roles(url)
    connection = await connect(url, "owner", lock_timeout=_LOCK_WAIT, application_name="tocsin migrate")
    try:
        await _take_turn(connection, say)
        await _patiently(connection, "the ledger of migrations", lambda: connection.execute(SQL["ledger"]), say)
        pending = _pending(await connection.fetch(SQL["applied"]))
        applied = []
        for migration in [m for m in pending if m.phase == "pre"]:
            await _apply(connection, migration, say)
            applied.append(migration.name)
        contractions = [m for m in pending if m.phase == "post"]
        older = await _older_than(connection, contractions) if contractions and not post else []
        for migration in contractions if not older else ():
            await _apply(connection, migration, say)
            applied.append(migration.name)
        return Migrated(applied, [m.name for m in contractions] if older else [], older)
    finally:
        await connection.close()


async def _take_turn(connection: Connection, say: Say) -> None:
    give_up_at = time.monotonic() + _PATIENCE
    for turn in itertools.count():
        if await connection.fetchval(SQL["take_turn"]):
            return
        if time.monotonic() > give_up_at:
            raise SetupError("somebody else has been migrating this database for ten minutes")
        if turn == 3:
            say("waiting for somebody else who migrates this database")
        await asyncio.sleep(random.uniform(0.1, 0.3))


async def _apply(connection: Connection, migration: Migration, say: Say) -> None:
    async def work() -> None:
        await connection.execute(migration.text, timeout=_LONGEST_STATEMENT)
        await connection.execute(SQL["record"], migration.name, migration.digest, migration.phase)

    await _patiently(connection, migration.name, work, say)


async def _patiently(connection: Connection, what: str, work: Callable[[], Any], say: Say) -> None:
    """In one transaction, tried again from its beginning whenever a lock cannot be had at once."""
    give_up_at = time.monotonic() + _PATIENCE
    for turn in itertools.count(1):
        try:
            async with connection.transaction():
                await work()
            return
        except _BUSY as error:
            if time.monotonic() > give_up_at:
                raise SetupError(
                    f"{what} could not get its locks for ten minutes and changed nothing: {error}"
                ) from None
            if turn == 1:
                say(f"{what} waits for a transaction that is in its way")
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(5.0, 0.1 * 2.0**turn))


def _pending(rows: list[Any]) -> list[Migration]:
    known = {row["name"]: row["digest"] for row in rows}
    for migration in migrations():
        if known.get(migration.name, migration.digest) != migration.digest:
            raise SetupError(f"migration {migration.name} was changed after it was applied; write a new one instead")
    return [m for m in migrations() if m.name not in known]


async def _older_than(connection: Connection, contractions: list[Migration]) -> list[Older]:
    """Servers that live and do not know the newest of these."""
    last = contractions[-1].name
    living = [Older(*row) for row in await connection.fetch(SQL["servers"])]
    return [server for server in living if server.newest is None or server.newest < last]


# ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Known(NamedTuple):
    """A migration as the database has it; `applied_at` is None for one that is still to come."""

    name: str
    phase: str
    applied_at: datetime | None


class Status(NamedTuple):
    """All migrations, the database's and this program's; servers that live; whether this program may serve."""

    migrations: list[Known]
    servers: list[Older]
    ready: bool


async def status(url: str) -> Status:
    """What the database has, and what it lacks; changes nothing."""
    connection = await connect(url, "owner", application_name="tocsin migrate")
    try:
        there = await connection.fetchval(SQL["there"])
        applied = {row["name"]: row["applied_at"] for row in await connection.fetch(SQL["applied"])} if there else {}
        registered = "0013_servers" in applied
        servers = [Older(*row) for row in await connection.fetch(SQL["servers"])] if registered else []
        phases = {m.name: m.phase for m in migrations()}
        unknown = {name: "unknown" for name in applied if name not in phases}
        known = [Known(name, phase, applied.get(name)) for name, phase in sorted((phases | unknown).items())]
        ready = there and (await _state(connection.fetchrow)) == "current"
        return Status(known, servers, ready)
    finally:
        await connection.close()


async def _state(fetchrow: Callable[..., Any]) -> Literal["old", "current", "new"]:
    wanted = [m.name for m in migrations() if m.phase == "pre"]
    row = await fetchrow(SQL["state"], wanted, [m.name for m in migrations()])
    if row["unknown"]:
        return "new"
    return "current" if row["applied"] == len(wanted) else "old"


async def schema_state(db: Database) -> Literal["old", "current", "new"]:
    """`old`: something this program needs is not applied yet; `new`: something it needs was taken away."""

    async def fetchrow(sql: str, *args: Any) -> Any:
        return await db.fetchrow("engine", sql, *args)

    return await _state(fetchrow)


async def is_current(db: Database) -> bool:
    """Whether this program can work on the schema."""
    return await schema_state(db) == "current"


async def refuse_newer(db: Database) -> None:
    """Stop a server whose program is older than the schema allows, or that has no schema to work on."""
    try:
        state = await schema_state(db)
    except asyncpg.UndefinedTableError:
        raise SetupError("the database has no schema of Tocsin yet: run `tocsin migrate`") from None
    if state == "new":
        raise SetupError(
            "the database's schema has left this release of Tocsin behind: what it needs was taken away by a newer one "
            "(`tocsin migrate --status` lists it); install the newer release here"
        )
