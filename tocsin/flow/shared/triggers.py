"""A job's cursor, and how many occurrences its schedule may still have (`max_runs`).

Whoever writes either holds the job or, as the planner does, the trigger's lock. An occurrence counts from when it is
staged; one that ends unclaimed gives its place back. When there are no more places, the cursor is parked: it is null
for all who look for something to plan, and kept aside for a place that is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from tocsin.flow.shared.transitions import Key
from tocsin.store.db import Connection, Row, Sql, columns

SQL = Sql(__file__)


class Count(NamedTuple):
    """How many occurrences have a place, and where the cursor stood when there were no more."""

    used: int
    parked: datetime | None

    def left(self, most: int) -> int:
        """How many more there may be."""
        return max(0, most - self.used)


NOTHING_USED = Count(0, None)


class Spent(NamedTuple):
    """What a step takes of a job's places, and where it parks the cursor."""

    tenant_id: int
    job_id: str
    places: int
    parked: datetime | None


async def lock(connection: Connection, job: Key) -> Row | None:
    """The cursor of a job, held until the end of the transaction."""
    return await connection.fetchrow(SQL["lock"], *job)


async def put(
    connection: Connection,
    job: Key,
    at: datetime | None,
    paused: bool = False,
    unplanned_since: datetime | None = None,
) -> None:
    """Set the cursor, or the one that a pause holds. Lock the job first. No node could plan the cursor since
    `unplanned_since`: occurrences that fell due since then are misfires."""
    await connection.execute(SQL["put"], *job, *((None, at) if paused else (at, None)), unplanned_since)


async def begin_counting(connection: Connection, jobs: Sequence[Key]) -> None:
    """From now on these jobs' occurrences are counted; those that are counted already go on."""
    if jobs:
        await connection.execute(SQL["count"], *columns(jobs, 2))


async def read_counts(connection: Connection, jobs: Iterable[Key]) -> dict[Key, Count]:
    """The counts of those jobs that are counted. Lock their triggers first."""
    wanted = sorted(set(jobs))
    rows = await connection.fetch(SQL["counts"], *columns(wanted, 2)) if wanted else []
    return {Key(row["tenant_id"], row["job_id"]): Count(row["used"], row["parked"]) for row in rows}


async def use(connection: Connection, spent: Sequence[Spent]) -> None:
    """Take places, and set what is parked."""
    if spent:
        await connection.execute(SQL["use"], *columns(spent, 4))


async def settle(
    connection: Connection, job: Key, most: int | None, count: Count | None, places: int, cursor: datetime | None
) -> datetime | None:
    """A schedule that may have `most` occurrences takes some places: where its cursor stands, None if it is parked.
    Begins or ends the counting, if that is new."""
    if most is None:
        if count is not None:
            await connection.execute(SQL["stop_counting"], *job)
        return cursor
    if count is None:
        await begin_counting(connection, [job])
    parked = cursor if (count or NOTHING_USED).left(most) <= places else None
    await use(connection, [Spent(*job, places, parked)])
    return cursor if parked is None else None
