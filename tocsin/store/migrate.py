"""Numbered `.sql` migrations, applied in order, each in one transaction, by any number of nodes at once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import asyncpg

from tocsin.errors import SetupError
from tocsin.store.db import Database, Sql, connect, connect_plain

SQL = Sql(__file__)
FOLDER = Path(__file__).parent / "migrations"
ROLES = Path(__file__).with_name("roles.sql")


def migrations() -> list[Path]:
    """Every migration, oldest first."""
    return sorted(FOLDER.glob("[0-9]*.sql"))


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


async def migrate(url: str) -> list[str]:
    """Bring the schema up to date; answers the names of what was applied."""
    await ensure_roles(url)
    connection = await connect(url, "owner", lock_timeout="60s")
    try:
        async with connection.transaction():
            await connection.execute(SQL["lock"])
            await connection.execute(SQL["ledger"])
        applied = []
        for path in migrations():
            async with connection.transaction():
                await connection.execute(SQL["lock"])
                if await _is_new(connection, path):
                    await connection.execute(path.read_text(encoding="utf-8"))
                    await connection.execute(SQL["record"], path.stem, _digest(path))
                    applied.append(path.stem)
        return applied
    finally:
        await connection.close()


async def is_current(db: Database) -> bool:
    """Whether every migration this program knows is applied."""
    names = [path.stem for path in migrations()]
    return bool(await db.fetchval("engine", SQL["current"], names) == len(names))


async def _is_new(connection: asyncpg.Connection, path: Path) -> bool:
    known = {row["name"]: row["digest"] for row in await connection.fetch(SQL["applied"])}
    if path.stem not in known:
        return True
    if known[path.stem] != _digest(path):
        raise SetupError(f"migration {path.stem} was changed after it was applied; write a new one instead")
    return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
