"""partitions: history has one partition a day, made a week ahead; never any DDL on the path of a report."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

from tocsin.flow.shared.cold import day_of
from tocsin.model.ids import lowest_id
from tocsin.store.db import Database, Sql, connect

SQL = Sql(__file__)
DAYS_AHEAD = 7
_MOST_DAYS = 400  # days for which partitions are created at once


def wanted(now: datetime) -> list[datetime]:
    """The days that must exist: from yesterday (clocks, retries) to a week ahead."""
    today = datetime.combine(now.astimezone(UTC).date(), time(), UTC)
    return [today + timedelta(days=d) for d in range(-1, DAYS_AHEAD + 1)]


def partition_name(day: datetime) -> str:
    return f"history_{day:%Y%m%d}"


async def make_ahead(db: Database) -> list[str]:
    """Make the partitions that are missing; answers their names."""
    days = wanted(await db.read_clock())
    rows = await db.fetch("engine", SQL["existing"])
    missing = [d for d in days if partition_name(d) not in {row["name"] for row in rows}]
    return [partition_name(day) for day in missing if await make(db, day)]


async def make_missing(db: Database) -> list[str]:
    """Create the partitions that live runs need and that are missing. Return their names. Days that are read from files
    get no partition: no query would find its rows, and the archivist would remove it."""
    oldest = await db.fetchval("engine", SQL["oldest_live"])
    days = wanted(await db.read_clock())
    if oldest is not None:
        first = datetime.combine(day_of(oldest), time(), UTC)
        days = [first + timedelta(days=d) for d in range((days[-1] - first).days + 1)][-_MOST_DAYS:]
    rows = await db.fetch("engine", SQL["unmade"], [day.date() for day in days])
    unmade = {row["day"] for row in rows}
    return [partition_name(day) for day in days if day.date() in unmade and await make(db, day)]


async def make(db: Database, day: datetime) -> bool:
    """Make the partition of one day; False if it was there."""
    owner = await connect(db.url, "owner", lock_timeout="2s")
    try:
        async with owner.transaction():
            await owner.execute(SQL["lock"])
            if partition_name(day) in {row["name"] for row in await owner.fetch(SQL["existing"])}:
                return False
            statement = SQL["make"].replace("$NAME", partition_name(day))
            statement = statement.replace("$FROM", lowest_id(day)).replace("$TO", lowest_id(day + timedelta(days=1)))
            await owner.execute(statement)
            return True
    finally:
        await owner.close()
