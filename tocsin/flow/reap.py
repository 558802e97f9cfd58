"""reap: take back the runs of workers whose lease is over. Needs no leader; any node may do it at any time."""

from __future__ import annotations

from typing import NamedTuple

from tocsin.store.db import Database, Sql
from tocsin.wire import Finished, RunError

SQL = Sql(__file__)
_LOST = RunError(class_="lost", message="the worker stopped reporting")
_POISON = RunError(
    class_="poison",
    message="two workers in a row went down while they held this run, the second of them with no other suspect",
)


class Orphan(NamedTuple):
    """A run held by a worker that is gone, as the report that the worker can no longer make."""

    worker_id: str
    finished: Finished


async def lapse(db: Database) -> list[tuple[str, str]]:
    """Declare workers gone whose lease is over; answers (id, name)."""
    return [(row["id"], row["name"]) for row in await db.fetch("vital", SQL["lapse"])]


async def orphans(db: Database) -> list[Orphan]:
    """Runs that nobody will report: each to be ended as `lost`, and one that is poison for good."""
    return [
        Orphan(
            row["worker_id"],
            Finished(
                run_id=row["id"],
                attempt=row["attempt"],
                fence=row["fence"],
                tenant=row["tenant_id"],
                outcome="lost",
                error=_POISON if row["poison"] else _LOST,
                give_up=row["poison"],
            ),
        )
        for row in await db.fetch("vital", SQL["orphans"])
    ]
