"""reap: take back the runs of workers whose lease is over. Needs no leader; any node may do it at any time."""

from __future__ import annotations

from typing import NamedTuple

from tocsin.store.db import Database, Row, Sql
from tocsin.wire import Finished, RunError

SQL = Sql(__file__)
_HOLDERS, _RUNS = 500, 1000  # workers that are examined, and runs that are taken back, at once
_FIRST = "00000000-0000-0000-0000-000000000000"
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
    """Return runs of lost workers. Each must end as `lost`; a run that is poison ends for good."""
    return [_orphan(row) for row in await db.fetch("vital", SQL["orphans"])]


class Strays(NamedTuple):
    """Runs whose worker is long gone or unknown, and where the next search continues (None: from the beginning)."""

    orphans: list[Orphan]
    after: str | None


async def strays(db: Database, after: str | None) -> Strays:
    """Find runs that `orphans` does not see: `orphans` covers only workers that were lost within a day."""
    holders = await db.fetch("vital", SQL["strays"], after or _FIRST, _HOLDERS)
    gone = [row["id"] for row in holders if row["stray"]]
    found = await db.fetch("vital", SQL["held_by"], gone, _RUNS) if gone else []
    if len(found) == _RUNS:
        return Strays([_orphan(row) for row in found], after)
    return Strays([_orphan(row) for row in found], holders[-1]["id"] if len(holders) == _HOLDERS else None)


def _orphan(row: Row) -> Orphan:
    return Orphan(
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
