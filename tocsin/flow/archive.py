"""archive: closed days of history become Parquet in object storage, a file per tenant and day, and leave PostgreSQL.

Steps, each of which may be repeated after a crash: the rows of a tenant are written to a file under a name of its own,
which no other try gives; it is read back and compared with the rows; it enters the catalogue (`archives`). When all
tenants' rows are there the day enters `archived_days`, and from that commit on it is read from its files. Then the
partition is detached, which waits for those who still read it but lets nobody wait, and dropped.

A day is closed to a tenant when none of its runs that were made on it is live: no row of it can come any more, for ids
are made of the database's present. While some tenant is to have the day in the database, or has such a run, the others'
rows go by themselves: a file is in use from the commit that deletes what it holds.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Set
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tocsin.errors import ServerFault, Unavailable
from tocsin.flow.shared import cold
from tocsin.flow.shared.turns import turn
from tocsin.model.ids import lowest_id, new_id
from tocsin.store.db import Connection, Database, Row, Sql, is_damage
from tocsin.store.objects import ObjectStore, Refusals
from tocsin.store.parquet import File, Parquet, checksum, is_unreadable
from tocsin.telemetry import ARCHIVE_LAG, get_logger

SQL = Sql(__file__)
log = get_logger("archive")
MOST_BYTES = 96 << 20  # in one file, as text
# What is read at once: a hundredth of a second or two of the database. After it we rest, twice as long as it took:
# nobody waits for what is old, and where others are busy there is less of this, not more.
SLICE_ROWS, SLICE_BYTES = 1_000, 1 << 20  # bytes as the database has them
_REST = 2.0
# Where a test may end the archivist, in this order: of a whole day, and of what goes by itself.
POINTS = ("written", "stored", "proved", "listed", "cold", "detached", "dropped")
POINTS_OF_PART = ("written", "stored", "proved", "removed", "listed")
# To wait for those who read a partition keeps nobody waiting but who would attach or alter one: as long as a report may
# take, for there may always be one.
_LOCK_WAIT = "15s"
_PATIENCE = 600.0  # seconds for a statement over a large day; nobody waits for it


class Bounds(NamedTuple):
    """Ids of runs: from the lower one on, before the upper one."""

    lower: str
    upper: str


def bounds(day: date) -> Bounds:
    """The ids of a day's runs."""
    start = datetime.combine(day, time(), UTC)
    return Bounds(lowest_id(start), lowest_id(start + timedelta(days=1)))


async def archive(db: Database, objects: ObjectStore, parquet: Parquet, before: date) -> list[date]:
    """Take what is older than its tenant keeps it in the database one step after the other, `before` being the first
    day that those keep who do not say; answers the days of which something went."""
    gone, behind = [], 0.0
    async with turn(db, "archive", lock_timeout=_LOCK_WAIT, statement_timeout=f"{_PATIENCE:.0f}s") as owner:
        for table in await owner.fetch(SQL["days"], before) if owner else ():
            day = _Day(db, objects, parquet, owner, table)
            if await day.archive(before):
                gone.append(table["day"])
            behind = max(behind, day.behind)
            if owner and await owner.fetchval(SQL["erasing"]):
                # Who erases a tenant waits for this turn to end; the days that are left go with the next one.
                return gone
    # Who comes to here has let all go that is due and could, or leaves it to another server, which tells.
    ARCHIVE_LAG.set(behind)
    return gone


class _Part(NamedTuple):
    """A tenant's runs of a day, or some of them, and the file that they are in."""

    tenant_id: int
    bounds: Bounds
    file: File
    rows: int


class _Day:
    """One day on its way out."""

    def __init__(self, db: Database, objects: ObjectStore, parquet: Parquet, owner: Connection, table: Row) -> None:
        self._db, self._objects, self._parquet, self._owner, self._table = db, objects, parquet, owner, table
        self._day: date = table["day"]
        self._bounds = bounds(self._day)
        self._failed: set[int] = set()  # tenants
        self._refusals = Refusals()
        self.behind = 0.0  # seconds that something should have gone ago, but could not

    async def archive(self, before: date) -> bool:
        """Whether something of it has gone."""
        if not self._table["archived"]:
            if not self._table["attached"]:
                return False
            tenants = await self._owner.fetch(SQL["tenants"], *self._bounds, self._day, before)
            due = {row["id"]: row["due"] for row in tenants if row["due"] and not row["live"]}
            late = {tenant_id: (self._db.clock.now() - since).total_seconds() for tenant_id, since in due.items()}
            if late:
                ARCHIVE_LAG.set(max(late.values()))
            if len(due) < len(tenants) or not await self._list_all(due):
                gone = await self._take_out(due.keys() - self._failed)
                self.behind = max((late[tenant_id] for tenant_id in self._failed), default=0.0)
                return gone
            await self._turn_cold()
        if self._table["attached"]:
            await self._ddl(SQL["finalize"] if self._table["pending"] else SQL["detach"])
            await self._point("detached")
        async with self._owner.transaction():
            await self._ddl(SQL["drop"])
            await self._owner.execute(SQL["mark_gone"], self._day)
        await self._point("dropped")
        log.info("a day of history is archived", day=str(self._day))
        return True

    async def _take_out(self, tenants: Set[int]) -> bool:
        """Let the rows of these go, while others stay. Servers of the release before would not find them."""
        if not tenants or await self._owner.fetchval(SQL["older_servers"]):
            return False
        await self._owner.execute(SQL["forget_files"], self._day)
        found = False
        for tenant_id in sorted(tenants):
            with self._one_tenants(tenant_id):
                async for part in self._parts(tenant_id):
                    await self._let_go(part)
                    found = True
        return found

    async def _let_go(self, part: _Part) -> None:
        async with self._owner.transaction():
            removed = await self._owner.fetchval(SQL["remove"], part.tenant_id, *part.bounds, timeout=_PATIENCE)
            if removed != part.rows:
                raise ServerFault(f"{part.file.object} does not hold what would go; nothing was deleted")
            await self._list(part, in_use=True)
            await self._point("removed")
        await self._point("listed")

    async def _list_all(self, tenants: Iterable[int]) -> bool:
        """Whether that could be done."""
        await self._owner.execute(SQL["forget_files"], self._day)
        for tenant_id in tenants:
            with self._one_tenants(tenant_id):
                async for part in self._parts(tenant_id):
                    await self._list(part, in_use=False)
                    await self._point("listed")
        return not self._failed

    async def _turn_cold(self) -> None:
        if await self._owner.fetchval(SQL["turn_cold"], self._day, *self._bounds, timeout=_PATIENCE) is None:
            raise ServerFault(f"the archive of {self._day} lacks rows; nothing was dropped")
        await self._point("cold")

    @contextmanager
    def _one_tenants(self, tenant_id: int) -> Iterator[None]:
        """What is wrong with one tenant's rows, or with their file, is nothing to the others: they stay alone."""
        try:
            yield
            self._refusals.passed()
        except Exception as error:
            if not (isinstance(error, ServerFault) or is_unreadable(error) or is_damage(error)):
                if not isinstance(error, Unavailable):
                    raise
                self._refusals.refused(error)
            self._failed.add(tenant_id)
            log.error("a tenant's day is not archived", tenant_id=tenant_id, day=str(self._day), why=str(error))

    async def _parts(self, tenant_id: int) -> AsyncIterator[_Part]:
        """All that the tenant has of the day, in files, proved; none if it has nothing."""
        await self._remove_strays(tenant_id)
        lower: str | None = self._bounds.lower
        while lower is not None:
            with tempfile.TemporaryDirectory(prefix="tocsin-archive-") as place:
                rows = Path(place, "rows.csv")
                slices, lower = await self._read(tenant_id, lower, rows)
                data = await self._parquet.write(rows, cold.COLUMNS)
            await self._point("written")
            part = await self._store(tenant_id, slices, data)
            if part.rows:
                yield part

    async def _remove_strays(self, tenant_id: int) -> None:
        """Files of tries that did not come to an end: what no list names retention would not find. None of them is ever
        written again, so that it does no harm if this is held up until the turn is another server's."""
        folder = cold.folder(tenant_id)
        found = {key for key in await self._objects.keys(folder) if key.startswith(f"{folder}{self._day}-")}
        listed = {row["object"] for row in await self._owner.fetch(SQL["listed"], tenant_id, self._day)}
        for key in found - listed:
            await self._objects.delete(key)

    async def _read(self, tenant_id: int, lower: str, rows: Path) -> tuple[list[Bounds], str | None]:
        """Write what the tenant has from a run on to `rows`, as much as one file is to hold. Answers the slices that it
        was read in, and where the next file begins."""
        slices: list[Bounds] = []
        following: str | None = lower
        with rows.open("wb") as text:
            while following is not None and text.tell() < MOST_BYTES:
                async with _rest():
                    rest_of_day = tenant_id, following, self._bounds.upper
                    end = await self._owner.fetchval(SQL["slice_end"], *rest_of_day, SLICE_ROWS, SLICE_BYTES)
                    slices.append(Bounds(following, end or self._bounds.upper))
                    given = (tenant_id, *slices[-1], lower)
                    await self._owner.copy_from_query(SQL["rows"], *given, output=text, format="csv", null="\\N")
                following = end
        return slices, following

    async def _store(self, tenant_id: int, slices: list[Bounds], data: bytes) -> _Part:
        digest = await checksum(data)
        name = f"{cold.folder(tenant_id)}{self._day}-{new_id(self._db.clock.now())}.parquet"
        file = File(name, len(data), digest)
        await self._objects.put(file.object, data, durable=True)
        await self._point("stored")
        count = await self._prove(tenant_id, slices, file)
        await self._point("proved")
        return _Part(tenant_id, Bounds(slices[0].lower, slices[-1].upper), file, count)

    async def _prove(self, tenant_id: int, slices: list[Bounds], file: File) -> int:
        """How many rows the stored file has, which are those of the database."""
        rows = digest = 0
        for one in slices:
            async with _rest():
                wanted = await self._owner.fetchrow(SQL["proof"], tenant_id, *one)
            rows, digest = rows + wanted["rows"], digest + int(wanted["digest"])
        [found] = await self._parquet.query_stored(SQL["proof_of_file"], file)
        if (found["rows"], int(found["digest"])) != (rows, digest):
            raise ServerFault(f"{file.object} does not hold the rows it was made of; nothing was dropped")
        return rows

    async def _list(self, part: _Part, in_use: bool) -> None:
        file = part.file
        await self._owner.execute(
            SQL["add_file"], part.tenant_id, self._day, file.object, part.rows, file.size, file.checksum, in_use
        )

    async def _ddl(self, statement: str) -> None:
        await self._owner.execute(statement.replace("$NAME", self._table["name"]), timeout=_PATIENCE)

    async def _point(self, name: str) -> None:
        await self._db.failpoints.hit(f"archive.{name}")


@asynccontextmanager
async def _rest() -> AsyncIterator[None]:
    """After what is done within, in proportion to the time that it took."""
    begun = monotonic()
    yield
    await asyncio.sleep(_REST * (monotonic() - begun))
