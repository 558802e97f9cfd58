"""retention: what nobody is to keep any longer goes: archived runs, and jobs that ran once and are archived."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from tocsin.store.db import Database, Sql, columns
from tocsin.store.objects import ObjectStore

SQL = Sql(__file__)
_WAVE = 1000


async def expire(db: Database, objects: ObjectStore, runs_days: int) -> int:
    """Let files go whose retention is over, unless they are held; answers how many. First nobody reads them, then the
    objects go, then what the catalogue says of them: whoever is interrupted is followed by the next turn."""
    await db.fetch("engine", SQL["expire"], runs_days)
    gone = 0
    while wave := await db.fetch("engine", SQL["expired"], _WAVE):
        for row in wave:
            await objects.delete(row["object"])
            await db.fetch("engine", SQL["forget"], row["tenant_id"], row["day"], row["object"])
        gone += len(wave)
    return gone


async def forget_jobs(db: Database, ended_before: datetime) -> int:
    """One-time jobs that ended long ago and whose runs are archived leave; answers how many. Looks through all jobs.
    A tenant's own hot days go before `ended_before`."""
    gone, last = 0, (0, str(UUID(int=0)))
    while True:
        async with db.transaction("retention") as connection:
            found = await connection.fetch(SQL["lock_ended_jobs"], ended_before, *last, _WAVE)
            gone += int(await connection.fetchval(SQL["forget_jobs"], *columns(found, 2)))
        if len(found) < _WAVE:
            return gone
        last = tuple(found[-1])
