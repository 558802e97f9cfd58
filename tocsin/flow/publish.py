"""publish: archived history as tables that other engines read: Iceberg's metadata, a table for each tenant beside its
files, and going with them when the tenant's objects go.

A table has the files that are in use, and no memory of others, so that nobody is sent to what retention took away. A
version is written under names that nobody reads yet, then the hint names it: whoever is interrupted is followed by the
next turn, which writes the same names again. Nothing of ours reads it; the catalogue alone says what is archived.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from tocsin.errors import Unavailable
from tocsin.flow.shared import cold
from tocsin.flow.shared.turns import turn
from tocsin.store import iceberg
from tocsin.store.db import Database, Sql
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("publish")
# Where a test may end it, in this order.
POINTS = ("written", "tidied", "named")
_KEPT = 10  # versions, with the one in use: somebody may be reading one that just was


async def publish(db: Database, objects: ObjectStore, seen: dict[int, str]) -> list[int]:
    """Bring the tables up to the catalogue; answers the tenants whose changed. `seen`: what the caller knows to be
    published already, which need not be looked at again."""
    changed = []
    async with turn(db, "publish") as owner:
        for tenant_id, now in await owner.fetch(SQL["tenants"]) if owner else ():
            found = await cold.files(owner, [tenant_id], cold.FIRST_DAY, cold.LAST_DAY)
            made = _Table(db, objects, tenant_id, found)
            if seen.get(tenant_id) == made.state:
                continue
            try:
                if await made.publish(now):
                    changed.append(tenant_id)
                seen[tenant_id] = made.state
            except Unavailable as problem:
                # It keeps neither others' tables back, nor retention, which somebody may owe.
                log.warning("a table cannot be published", tenant_id=tenant_id, error=problem.detail)
    return changed


class _Table:
    """One tenant's."""

    def __init__(self, db: Database, objects: ObjectStore, tenant_id: int, found: list[cold.Archived]) -> None:
        self._db, self._objects = db, objects
        self._folder = cold.folder(tenant_id)
        self._table = iceberg.Table(objects.address(self._folder).rstrip("/"), cold.COLUMNS)
        self._files = [
            iceberg.DataFile(objects.address(one.file.object), one.day, one.rows, one.file.size) for one in found
        ]
        self.state = self._table.state(self._files)

    async def publish(self, now: datetime) -> bool:
        """Whether there was something new to say."""
        hint = await self._objects.read(self._folder + iceberg.HINT)
        version = int(hint) if hint and hint.isdigit() else 0
        if version:
            stored = await self._objects.read(self._folder + iceberg.names(version)[-1])
            if stored and iceberg.state_of(stored) == self.state:
                return False
        elif not self._files:
            return False
        await self._write(version + 1, now)
        log.info("a table is published", location=self._table.location, version=version + 1, files=len(self._files))
        return True

    async def _write(self, version: int, now: datetime) -> None:
        # Years of days take a while.
        contents = await asyncio.to_thread(iceberg.write, self._table, self._files, version, now)
        for name, data in zip(iceberg.names(version), contents, strict=True):
            await self._objects.put(self._folder + name, data, durable=True)
        await self._point("written")
        # Before the hint, because after it nobody would come back to these.
        if version > _KEPT:
            for name in iceberg.names(version - _KEPT):
                await self._objects.delete(self._folder + name)
        await self._point("tidied")
        await self._objects.put(self._folder + iceberg.HINT, str(version).encode(), durable=True)
        await self._point("named")

    async def _point(self, name: str) -> None:
        await self._db.failpoints.hit(f"publish.{name}")
