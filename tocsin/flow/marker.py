"""marker: servers have the same object storage, or they do not start.

What one server puts into a folder of its own the others never find: log lines, and days of history once they are
archived. So the database names one object, and whoever does not find it has another storage. Each marker has a name of
its own: two servers that start first at the same instant both put theirs, and the database says which one it is,
whatever the storage promises of writes that meet.
"""

from __future__ import annotations

import uuid

from tocsin.errors import SetupError
from tocsin.store.db import Database, Sql
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("marker")

_TEXT = b"By this object the servers of Tocsin know that they have the same storage. Keep it.\n"


async def compare(db: Database, objects: ObjectStore, given_up: str) -> None:
    """Raises if the other servers have another storage. `given_up`: the marker of a storage that was lost, or left on
    purpose, in whose place this one comes."""
    known: str | None = await db.fetchval("engine", SQL["known"])
    if known is not None and await _has(objects, known):
        return
    if known is None or known == given_up:
        if known is not None:
            log.warning("another object storage comes in the place of the one before", lost=known)
        known = await _settle(db, objects, known)
        if await _has(objects, known):
            return
    raise SetupError(
        f"this server's object storage is not that of the other servers: {objects.address(_key(known))} is missing. "
        "Give all servers the same one by TOCSIN_OBJECTS, or share the folder `objects` of TOCSIN_HOME. If theirs was "
        f"lost, or left on purpose, start with TOCSIN_ADOPT_OBJECTS={known} once: what lay there is not found any more"
    )


async def _settle(db: Database, objects: ObjectStore, before: str | None) -> str:
    """Put a marker, then name it; answers the one that is named, which is another server's if that was first."""
    own = str(uuid.uuid4())
    await objects.put(_key(own), _TEXT, durable=True)
    named: str = await db.fetchval("engine", SQL["settle"], own, before)
    if named != own:
        await objects.delete(_key(own))
    return named


async def _has(objects: ObjectStore, marker: str) -> bool:
    return await objects.read(_key(marker)) is not None


def _key(marker: str) -> str:
    return f"marker/{marker}"
