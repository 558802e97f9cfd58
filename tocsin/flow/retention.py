"""retention: what nobody is to keep any longer goes: archived runs and records of the audit, logs, and jobs that ran
once and are archived."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import date, datetime, timedelta
from uuid import UUID

from tocsin.clock import EPOCH
from tocsin.errors import Unavailable
from tocsin.model.ids import instant_of, lowest_id
from tocsin.store.db import Database, Row, Sql, columns, connect
from tocsin.store.objects import ObjectStore, Refusals

SQL = Sql(__file__)
# Limits of one statement: catalogues have a row for each tenant and day, and grow every day.
_WAVE = 1_000
_TENANTS = 500
_JOBS = 10_000
_LINES = 100_000  # of logs, in one transaction
_LAST_TENANT, _LAST_ID = 2**31 - 1, str(UUID(int=2**128 - 1))


async def expire(db: Database, runs_days: int) -> None:
    """Hide files whose retention is over from all readers, unless the files are held; in waves."""
    await _expire(lambda *wave: db.fetchrow("engine", SQL["expire"], runs_days, *wave))


async def _expire(step: Callable[[int, int, int], Awaitable[Row]]) -> None:
    """Process all tenants in waves of some tenants and some files. After a full wave, the same tenants may have more
    files."""
    behind = 0
    while True:
        wave = await step(behind, _TENANTS, _WAVE)
        if wave["files"] < _WAVE:
            if wave["tenants"] < _TENANTS:
                return
            behind = wave["last"]


async def remove(db: Database, objects: ObjectStore) -> int:
    """Let files go that nobody reads any more; answers how many. First the objects, then what the catalogue says of
    them: whoever is interrupted is followed by the next turn."""
    removal = _Removal(objects)
    last: tuple[int, date, str] = (0, date.min, "")
    while wave := await db.fetch("engine", SQL["expired"], _WAVE, *last):
        for row in wave:
            if not row["held"] and await removal.remove(row):
                await db.fetch("engine", SQL["forget"], row["tenant_id"], row["day"], row["object"])
        last = wave[-1]["tenant_id"], wave[-1]["day"], wave[-1]["object"]
    return removal.end()


class _Removal:
    """Removes objects, tenant after tenant."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._refused: dict[int, Unavailable] = {}  # by tenant
        self._refusals = Refusals()
        self._gone = 0

    async def remove(self, row: Row) -> bool:
        """Remove one object. Return whether it is gone. After a refusal, the tenant's other objects wait for the next
        turn."""
        if row["tenant_id"] in self._refused:
            return False
        try:
            await self._objects.delete(row["object"])
        except Unavailable as problem:
            self._refused[row["tenant_id"]] = problem
            self._refusals.refused(problem)
            return False
        self._refusals.passed()
        self._gone += 1
        return True

    def end(self) -> int:
        """Return how many objects were removed. Raise if one could not be removed."""
        for problem in self._refused.values():
            raise problem
        return self._gone


async def expire_audit(db: Database, objects: ObjectStore, audit_days: int) -> int:
    """The same for files with records of the audit, from the beginning of each chain on; as the owner, for nobody who
    serves may take a record away. What is left of them is where the chain begins now."""
    owner = await connect(db.url, "owner", lock_timeout="2s")
    try:
        await _expire(lambda *wave: owner.fetchrow(SQL["expire_audit"], audit_days, *wave))
        removal, last = _Removal(objects), (0, 0)
        while wave := await owner.fetch(SQL["expired_audit"], _WAVE, *last):
            for row in wave:
                if row["object"] is not None and not row["held"] and await removal.remove(row):
                    await owner.execute(SQL["note_audit"], row["tenant_id"], row["first_seq"])
            await owner.execute(SQL["forget_audit"], sorted({row["tenant_id"] for row in wave}))
            last = wave[-1]["tenant_id"], wave[-1]["first_seq"]
        return removal.end()
    finally:
        await owner.close()


async def expire_logs(db: Database, logs_days: int) -> int:
    """Let segments of logs go whose lines were stored too long ago; answers how many. From the commit of a wave on its
    lines are neither read nor found; the compactor removes the objects, when no other tenant has lines in them."""
    now = await db.read_clock()
    rows = await db.fetch("engine", SQL["logs_kept"], logs_days)
    oldest = [(row["id"], lowest_id(max(EPOCH, now - timedelta(days=row["days"])))) for row in rows]
    gone = 0
    for start in range(0, len(oldest), _TENANTS):
        wave = oldest[start : start + _TENANTS]
        for tenant_id, first in await db.fetch("engine", SQL["with_old_logs"], *columns(wave, 2)):
            while segments := await _expire_segments(db, tenant_id, first):
                gone += segments
    return gone


async def _expire_segments(db: Database, tenant_id: int, first: str) -> int:
    async with db.transaction("retention") as connection:
        segments = await connection.fetch(SQL["expire_segments"], tenant_id, first, _LINES)
        if segments:
            names = [row["object"] for row in segments]
            # A run is older than its lines, but for what two clocks may differ by. Only up to the newest of this wave:
            # whoever shortens a retention lets years go, and each wave would look through all of them.
            newest = instant_of(max(row["id"] for row in segments))
            await connection.execute(SQL["forget_lines"], tenant_id, lowest_id(newest + timedelta(hours=1)), names)
            await connection.execute(SQL["leave_objects"], names)
    return len(segments)


async def forget_jobs(db: Database, ended_before: datetime, runs_days: int) -> int:
    """One-time jobs that ended long ago and whose runs are archived leave; answers how many. Looks through all jobs.
    A tenant's own hot days go before `ended_before`, and its own retention before `runs_days`, after which those go
    that may never have run."""
    gone, last = 0, (0, str(UUID(int=0)))
    while last < (_LAST_TENANT, _LAST_ID):
        upto = await db.fetchrow("engine", SQL["jobs_behind"], *last, _JOBS)
        end = (_LAST_TENANT, _LAST_ID) if upto is None else tuple(upto)
        gone += await _forget_jobs(db, ended_before, runs_days, last, end)
        last = end
    return gone


async def _forget_jobs(
    db: Database, ended_before: datetime, runs_days: int, last: tuple[int, str], end: tuple[int, str]
) -> int:
    """Delete the ended jobs after `last` up to `end`."""
    gone = 0
    while True:
        async with db.transaction("retention") as connection:
            found = await connection.fetch(SQL["lock_ended_jobs"], ended_before, *last, _WAVE, runs_days, *end)
            gone += int(await connection.fetchval(SQL["forget_jobs"], *columns(found, 2)))
        if len(found) < _WAVE:
            return gone
        last = tuple(found[-1])
