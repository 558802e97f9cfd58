"""sweep: the safety nets that run once a second. Deadlines, late occurrences, and whatever waits for nothing any more.

Nothing here is on the path of a healthy run; it ends what can no longer start and wakes what a race left asleep.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from tocsin.clock import EPOCH
from tocsin.flow.shared.endings import Ending, end_runs
from tocsin.flow.shared.idempotency import SQL as IDEMPOTENCY
from tocsin.flow.shared.joins import release_stranded, settle, share_graph
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import (
    Hint,
    Key,
    Stop,
    cancel_runs,
    hints,
    lock_jobs,
    lock_limits,
    release,
    release_in,
    stops,
)
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.telemetry import MISSED

SQL = Sql(__file__, SHARED)
_FORGOTTEN = 5_000  # idempotency records that one statement deletes
_BATCH, _BATCHES = 1000, 20  # runs past their deadline in one statement; statements in one turn
_JOINING = 200  # runs that wait for others, looked at in one turn
_KEYS = 200  # limits and jobs that runs wait for: checked and locked at once
_LIMITS = 500  # limits that one turn checks for use
_REPLACED = 100  # jobs whose earlier runs are stopped in one turn
_FIRST = "00000000-0000-0000-0000-000000000000"


class Expired(NamedTuple):
    """The runs that became claimable, and whether more runs may have to end."""

    hints: list[Hint]
    more: bool


async def expire(db: Database) -> Expired:
    """staged | ready | waiting → expired: runs that did not start before their deadline, in batches."""
    woken: list[Hint] = []
    for _ in range(_BATCHES):
        rows = await db.fetch("engine", SQL["overdue"], _BATCH)
        woken += await _end(db, rows, "expired", "expired")
        if len(rows) < _BATCH:
            return Expired(woken, False)
    return Expired(woken, True)


async def misfires(db: Database, lanes: Sequence[int]) -> list[Hint]:
    """Decide about occurrences of these lanes that are more than a minute late. If no worker could take an occurrence
    because none was there, it is run, coalesced or expired as its job says. The others are late and run."""
    late = [row["lane_id"] for row in await db.fetch("engine", SQL["vouch"], list(lanes))]
    # If a worker vouches for the lane, claims take most of these runs, and nothing is left to decide.
    rows = await db.fetch("engine", SQL["misfired"], late) if late else []
    by_verdict: dict[str, list[Row]] = {"misfire_expired": [], "coalesced": [], "kept": []}
    for row in rows:
        by_verdict[_misfired(row)].append(row)
    woken: list[Hint] = []
    # Each reason has its own transaction, so that runs are locked in the order of their ids.
    for reason in ("misfire_expired", "coalesced"):
        woken += await _end(db, by_verdict[reason], "skipped", reason)
        MISSED.labels(reason).inc(len(by_verdict[reason]))
    if kept := by_verdict["kept"]:
        keys = sorted(((row["tenant_id"], row["id"]) for row in kept), key=lambda key: key[1])
        woken += hints(await db.fetch("engine", SQL["keep"], *columns(keys, 2)))
    return woken


def _misfired(row: Row) -> str:
    if row["once"] or not row["misfire"]:
        return "kept"
    if row["too_old"] or row["policy"] == "skip":
        return "misfire_expired"
    return "coalesced" if row["policy"] == "latest" and row["superseded"] else "kept"


async def release_waiting(db: Database, lanes: Collection[int], after: str | None = None) -> Looked:
    """waiting → ready where the block has ended and the release was missed. Checks one page of limits and jobs.

    `lanes`: lanes with free workers. Runs that wait for a limit or a rate are released only there: no worker could
    start them elsewhere, and they would have to wait again once the limit is full."""
    rows = await db.fetch("engine", SQL["waiting"], after or _FIRST, _KEYS)
    rest = rows[-1]["key"] if len(rows) == _KEYS else None
    keys = [Key(row["tenant_id"], row["key"]) for row in rows if not row["held"]]
    if not keys:
        return Looked([], rest)
    woken = hints(await db.fetch("engine", SQL["unpause"], [key.id for key in keys]))
    return Looked(woken + await release_keys(db, keys, lanes), rest, keys)


async def release_keys(db: Database, keys: Sequence[Key], lanes: Collection[int]) -> list[Hint]:
    """waiting → ready in these lanes, where these limits have room or their rates allow a run."""
    async with db.transaction("sweep") as connection:
        await lock_limits(connection, keys)
        return hints(await release_in(connection, keys, lanes))


class Replaced(NamedTuple):
    """The runs that became claimable, and the runs that must stop because a younger occurrence replaces them; `more`:
    these jobs may need another check."""

    hints: list[Hint]
    stops: list[Stop]
    more: bool = False


class Due(NamedTuple):
    """Jobs with a due occurrence that replaces the run before it, and where the next search continues."""

    jobs: list[Key]
    after: tuple[datetime, str] | None


async def due_to_replace(db: Database, after: tuple[datetime, str] | None) -> Due:
    """Find occurrences that are due and that no free worker has claimed."""
    rows = await db.fetch("engine", SQL["due_to_replace"], *(after or (EPOCH, _FIRST)), _KEYS)
    last = (rows[-1]["ready_at"], rows[-1]["id"]) if len(rows) == _KEYS else None
    return Due([Key(row["tenant_id"], row["job_id"]) for row in rows], last)


async def replace_earlier(db: Database, jobs: Collection[Key]) -> Replaced:
    """Cancel what stands before an occurrence that is to replace it (`overlap: replace`). It waits for the proof."""
    if not jobs:
        return Replaced([], [])
    woken: list[Hint] = []
    orders: list[Stop] = []
    found = await db.fetch("engine", SQL["replacing"], *columns(sorted(set(jobs)), 2), _REPLACED)
    for row in found:
        job = Key(row["tenant_id"], row["job_id"])
        async with db.transaction("sweep") as connection:
            await share_graph(connection, job.tenant_id)
            await lock_jobs(connection, [job])
            limits = [Key(job.tenant_id, key) for key in row["keys"]]
            await lock_limits(connection, [job, *limits])
            cancelled = await cancel_runs(connection, job, "replaced", before=row["id"])
            orders += stops(cancelled)
            woken += hints(await release(connection, [job, *limits]))
            woken += (await settle(connection, cancelled)).hints
    return Replaced(woken, orders, len(found) == _REPLACED)


class Looked(NamedTuple):
    """The runs that became claimable, where the next search continues (None: from the beginning), and the limits and
    jobs that were checked."""

    hints: list[Hint]
    after: str | None
    keys: Sequence[Key] = ()


async def release_joining(db: Database, after: str | None) -> Looked:
    """waiting → ready | skipped: runs that wait for runs of other jobs of which none comes any more.

    Whoever ends a run decides about those that wait for it. What is left to this are instants for which a parent gets
    no run at all though another has one: it was paused or cancelled, or nobody planned it in time (misfire), or it has
    ended for good; and runs that were made before their job had children. An instant for which no parent gets a run is
    none of its children's."""
    seen = await db.fetch("engine", SQL["joining"], after or _FIRST, _JOINING)
    rest = seen[-1]["id"] if len(seen) == _JOINING else None
    stranded = [row for row in seen if row["stranded"]]
    if not stranded:
        return Looked([], rest)
    async with db.transaction("sweep") as connection:
        return Looked((await release_stranded(connection, stranded)).hints, rest)


async def forget_joins(db: Database, after: str | None) -> str | None:
    """Forget runs that ended while they waited for others of which none can still come; where to look on."""
    return await db.fetchval("engine", SQL["forget_joins"], after or _FIRST, _JOINING)  # type: ignore[no-any-return]


async def forget_limits(db: Database, after: Key | None) -> Key | None:
    """Remove unused limits: there is one for each concurrency key that was ever used. Checks one page and returns where
    the next page begins. A claim that misses a limit creates it again."""
    rows = await db.fetch("engine", SQL["limits"], *(after or Key(0, _FIRST)), _LIMITS)
    unused = [Key(row["tenant_id"], row["key"]) for row in rows if row["unused"]]
    if unused:
        async with db.transaction("sweep") as connection:
            locked = await connection.fetch(SQL["lock_unused"], *columns(unused, 2))
            await connection.execute(SQL["drop_limits"], *columns([Key(*row) for row in locked], 2))
    return Key(rows[-1]["tenant_id"], rows[-1]["key"]) if len(rows) == _LIMITS else None


async def _end(db: Database, rows: Sequence[Row], state: str, reason: str) -> list[Hint]:
    endings = [
        Ending(
            Key(row["tenant_id"], row["id"]),
            row["job_id"],
            row["key_id"],
            row["once"],
            row["limited"] or row["overlap"] is not None,
        )
        for row in rows
    ]
    woken: list[Hint] = []
    for first in range(0, len(endings), _BATCH):
        async with db.transaction("sweep") as connection:
            woken += await end_runs(connection, endings[first : first + _BATCH], state, reason)
    return woken


async def forget_keys(db: Database, batch: int = _FORGOTTEN, most: int = 10 * _FORGOTTEN) -> int:
    """Delete idempotency records older than a day in batches, each in its own transaction: deleted batches stay deleted
    if a later batch fails. Return how many were deleted, at most `most`."""
    gone = 0
    while gone < most:
        found: int = await db.fetchval("engine", IDEMPOTENCY["forget"], batch)
        gone += found
        if found < batch:
            break
    return gone
