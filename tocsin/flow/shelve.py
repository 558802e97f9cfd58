"""shelve: closed days of the audit become Parquet in object storage, a file per tenant and day, and leave PostgreSQL.

Steps, each of which may be repeated after a crash: the records that follow the last file are written to a file under a
name made of its contents; it is read back, and each record is held to the hash of the one before it; it enters the
catalogue (`audit_archives`), and from that commit on its records are read from it; then they leave the database.

Only what is anchored is moved. A record that is not what was sealed stays where it is, as evidence, with its day and
all later ones.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tocsin.errors import ServerFault, Unavailable
from tocsin.flow.shared import audit, shelf
from tocsin.flow.shared.turns import turn
from tocsin.model.audit import GENESIS, link, of_one_day
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.objects import ObjectStore, Refusals
from tocsin.store.parquet import File, Parquet, checksum
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
_TENANTS = 500  # tenants in one statement
log = get_logger("shelve")
# Where a test may end it, in this order.
POINTS = ("written", "stored", "proved", "listed", "removed")


async def shelve(db: Database, objects: ObjectStore, parquet: Parquet, before: date) -> int:
    """Move the records of days before this one, or before the one that a tenant says; answers how many files were
    made."""
    made, refusals = 0, Refusals()
    async with turn(db, "shelve", lock_timeout="2s") as owner:
        if owner is None or await owner.fetchval(SQL["older_servers"]):
            return 0
        for row in await owner.fetch(SQL["unfinished"]):
            with _one_tenants(row["tenant_id"], refusals):
                await _remove(db, owner, row["tenant_id"], row["first_seq"])
        behind = 0
        while wave := [row["tenant_id"] for row in await owner.fetch(SQL["wave"], behind, _TENANTS)]:
            for row in await owner.fetch(SQL["tenants"], before, wave):
                chain = _Chain(db, objects, parquet, owner, row)
                with _one_tenants(row["tenant_id"], refusals):
                    while await chain.move_day(row["before"]):
                        made += 1
            behind = wave[-1]
    return made


@contextmanager
def _one_tenants(tenant_id: int, refusals: Refusals) -> Iterator[None]:
    """What is wrong with one chain is nothing to the others."""
    try:
        yield
        refusals.passed()
    except (ServerFault, Unavailable) as fault:
        if isinstance(fault, Unavailable):
            refusals.refused(fault)
        log.error("a tenant's audit is not archived", tenant_id=tenant_id, why=str(fault))


class _Part(NamedTuple):
    """Records that become a file."""

    first: int
    last: int
    last_id: int
    day: date


class _Chain:
    """One tenant's, from its first record in the database on."""

    def __init__(self, db: Database, objects: ObjectStore, parquet: Parquet, owner: Connection, row: Row) -> None:
        self._db, self._objects, self._parquet, self._owner = db, objects, parquet, owner
        self._tenant_id: int = row["tenant_id"]
        self._anchored: int = row["anchored_seq"]
        self._seq: int = row["seq"]
        self._hash: bytes = row["hash"] or GENESIS
        self._file: bytes = row["checksum"] or GENESIS

    async def move_day(self, before: date) -> bool:
        """Whether there was one."""
        found = (self._tenant_id, self._seq, self._anchored, shelf.MOST_ROWS)
        rows = await self._owner.fetch(SQL["times"], *found)
        gone = next(
            (n for n, row in enumerate(rows) if row["seq"] != self._seq + 1 + n or row["at"] is None), len(rows)
        )
        times = [row["at"] for row in rows[:gone]]
        count = of_one_day(times, before)
        if count == gone < len(rows):
            raise ServerFault(f"record {self._seq + 1 + gone} is gone; its day and later ones stay in the database")
        if count == 0:
            return False
        part = _Part(self._seq + 1, self._seq + count, max(row["audit_id"] for row in rows[:count]), times[0].date())
        file = await self._store(part)
        last = await self._prove(part, file)
        await self._point("proved")
        span = min(times[:count]), max(times[:count])
        await self._owner.execute(
            SQL["add"], self._tenant_id, part.first, part.last, last, part.last_id, part.day, *span, *file, self._file
        )
        await self._point("listed")
        self._seq, self._hash, self._file = part.last, last, file.checksum
        await _remove(self._db, self._owner, self._tenant_id, part.first)
        return True

    async def _store(self, part: _Part) -> File:
        with tempfile.TemporaryDirectory(prefix="tocsin-shelve-") as folder:
            rows = Path(folder, "rows.csv")
            given = (self._tenant_id, part.first, part.last, self._file.hex())
            await self._owner.copy_from_query(SQL["rows"], *given, output=str(rows), format="csv", null="\\N")
            data = await self._parquet.write(rows, shelf.COLUMNS)
        await self._point("written")
        digest = await checksum(data)
        name = f"{shelf.folder(self._tenant_id)}{part.day}-{part.first}-{digest.hex()[:16]}.parquet"
        await self._objects.put(name, data, durable=True)
        await self._point("stored")
        return File(name, len(data), digest)

    async def _prove(self, part: _Part, file: File) -> bytes:
        """The hash of the stored file's last record, if each follows the one before it and the database ends alike."""
        data = await self._parquet.fetch(file)
        found = await shelf.records(self._parquet, self._tenant_id, data, part.first, part.first - 1)
        last = await asyncio.to_thread(self._linked, part, found)
        if len(found) != part.last - part.first + 1:
            raise ServerFault(f"{file.object} does not hold the records it was made of; they stay in the database")
        if last != await self._owner.fetchval(SQL["hash"], self._tenant_id, part.last):
            raise ServerFault(f"record {part.last} is another than in {file.object}; it stays in the database")
        return last

    def _linked(self, part: _Part, records: shelf.Records) -> bytes:
        """The hash of the last of them."""
        last = self._hash
        for seq, row in zip(range(part.first, part.last + 1), records, strict=False):
            last = link(last, self._tenant_id, seq, audit.said(row))
            if row["hash"] != last:
                raise ServerFault(f"record {seq} is not what was sealed; its day and later ones stay in the database")
        return last

    async def _point(self, name: str) -> None:
        await _pass(self._db, name)


async def _pass(db: Database, point: str) -> None:
    """One of `POINTS`."""
    await db.failpoints.hit(f"shelve.{point}")


async def _remove(db: Database, owner: Connection, tenant_id: int, first: int) -> None:
    """Let the records go that a file holds, all of them or none."""
    async with owner.transaction():
        if not await owner.fetchval(SQL["remove"], tenant_id, first):
            raise ServerFault(f"the records from {first} on are not those of their file; they stay in the database")
    await _pass(db, "removed")
