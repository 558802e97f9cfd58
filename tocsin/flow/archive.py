"""archive: closed days of history become Parquet in object storage, a file per tenant and day, and leave PostgreSQL.

Steps, each of which may be repeated after a crash: the rows of a tenant are written to a file under a name made of
its contents; it is read back and compared with the rows; it enters the catalogue (`archives`). When all tenants' rows
are there the day enters `archived_days`, and from that commit on it is read from its files. Then the partition is
detached, which waits for those who still read it but lets nobody wait, and dropped.

A day is closed when no run that was made on it is live: no row of it can come any more, for ids are made of the
database's present. One that still has a live run stays where it is until that has ended.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import NamedTuple

from tocsin.errors import ServerFault
from tocsin.flow.shared.cold import COLUMNS
from tocsin.model.ids import lowest_id
from tocsin.store.db import Connection, Database, Row, Sql, connect
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import File, Parquet
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("archive")
MOST_ROWS = 500_000  # in one file
# Where a test may end the archivist, in this order.
POINTS = ("written", "stored", "proved", "listed", "cold", "detached", "dropped")


class Bounds(NamedTuple):
    """Ids of runs: from the lower one on, before the upper one."""

    lower: str
    upper: str


def bounds(day: date) -> Bounds:
    """The ids of a day's runs."""
    start = datetime.combine(day, time(), UTC)
    return Bounds(lowest_id(start), lowest_id(start + timedelta(days=1)))


async def archive(db: Database, objects: ObjectStore, parquet: Parquet, before: date) -> list[date]:
    """Take the days before this one one step after the other; answers those whose partitions went."""
    gone = []
    async with _turn(db) as owner:
        for table in await owner.fetch(SQL["days"], before) if owner else ():
            if await _Day(db, objects, parquet, owner, table).archive():
                gone.append(table["day"])
    return gone


@asynccontextmanager
async def _turn(db: Database) -> AsyncIterator[Connection | None]:
    """A connection as the owner, or none if another archivist is at work."""
    owner = await connect(db.url, "owner", lock_timeout="2s")
    try:
        yield owner if await owner.fetchval(SQL["take_turn"]) else None
    finally:
        await owner.close()


class _Day:
    """One day on its way out."""

    def __init__(self, db: Database, objects: ObjectStore, parquet: Parquet, owner: Connection, table: Row) -> None:
        self._db, self._objects, self._parquet, self._owner, self._table = db, objects, parquet, owner, table
        self._day: date = table["day"]
        self._bounds = bounds(self._day)

    async def archive(self) -> bool:
        """Whether it is gone now."""
        if not self._table["archived"]:
            if not self._table["attached"] or await self._owner.fetchval(SQL["live"], *self._bounds):
                return False
            await self._copy()
        if self._table["attached"]:
            await self._ddl(SQL["finalize"] if self._table["pending"] else SQL["detach"])
            await self._point("detached")
        async with self._owner.transaction():
            await self._ddl(SQL["drop"])
            await self._owner.execute(SQL["mark_gone"], self._day)
        await self._point("dropped")
        log.info("a day of history is archived", day=str(self._day))
        return True

    async def _copy(self) -> None:
        await self._owner.execute(SQL["forget_files"], self._day)
        for row in await self._owner.fetch(SQL["tenants"], *self._bounds):
            lower: str | None = self._bounds.lower
            while lower is not None:
                following = await self._owner.fetchval(SQL["part_end"], row["id"], lower, self._bounds.upper, MOST_ROWS)
                await self._copy_part(row["id"], Bounds(lower, following or self._bounds.upper))
                lower = following
        if await self._owner.fetchval(SQL["turn_cold"], self._day, *self._bounds) is None:
            raise ServerFault(f"the archive of {self._day} lacks rows; nothing was dropped")
        await self._point("cold")

    async def _copy_part(self, tenant_id: int, part: Bounds) -> None:
        with tempfile.TemporaryDirectory(prefix="tocsin-archive-") as folder:
            rows = Path(folder, "rows.csv")
            await self._owner.copy_from_query(SQL["rows"], tenant_id, *part, output=str(rows), format="csv", null="\\N")
            data = await self._parquet.write(rows, COLUMNS)
        await self._point("written")
        checksum = hashlib.sha256(data).digest()
        file = File(f"history/{tenant_id}/{self._day}-{checksum.hex()[:16]}.parquet", len(data), checksum)
        await self._objects.put(file.object, data, durable=True)
        await self._point("stored")
        count = await self._prove(tenant_id, part, file)
        await self._point("proved")
        await self._owner.execute(SQL["add_file"], tenant_id, self._day, file.object, count, file.size, checksum)
        await self._point("listed")

    async def _prove(self, tenant_id: int, part: Bounds, file: File) -> int:
        """How many rows the stored file has, which are those of the database."""
        [found] = await self._parquet.query_stored(SQL["proof_of_file"], file)
        wanted = await self._owner.fetchrow(SQL["proof"], tenant_id, *part)
        if (found["rows"], found["digest"]) != (wanted["rows"], wanted["digest"]):
            raise ServerFault(f"{file.object} does not hold the rows it was made of; nothing was dropped")
        return int(found["rows"])

    async def _ddl(self, statement: str) -> None:
        await self._owner.execute(statement.replace("$NAME", self._table["name"]))

    async def _point(self, name: str) -> None:
        await self._db.failpoints.hit(f"archive.{name}")
