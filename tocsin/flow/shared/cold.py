"""Cold history: days that lie in object storage, found by the catalogue and read from their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, NamedTuple

from tocsin.clock import iso
from tocsin.errors import InvalidInput
from tocsin.model.access import Identity
from tocsin.model.ids import instant_of, lowest_id
from tocsin.store.db import Connection, Database, Sql
from tocsin.store.parquet import File, Parquet

SQL = Sql(__file__)
# Of a file, in order: new ones come last, for other engines know them by their place. Times are UTC without saying so.
COLUMNS = {
    **{"tenant_id": "INTEGER", "run_id": "UUID", "attempt": "INTEGER", "job_id": "UUID", "job_name": "VARCHAR"},
    **{"pool": "VARCHAR", "job_version": "INTEGER", "final": "BOOLEAN", "state": "VARCHAR", "outcome": "VARCHAR"},
    **{"reason": "VARCHAR", "count": "INTEGER", "fence": "BIGINT", "trigger": "VARCHAR", "priority": "INTEGER"},
    **{"failures": "INTEGER", "losses": "INTEGER", "max_attempts": "INTEGER", "first_for": "TIMESTAMP"},
    **{"scheduled_for": "TIMESTAMP", "ready_at": "TIMESTAMP", "started_at": "TIMESTAMP", "finished_at": "TIMESTAMP"},
    **{"worker_id": "UUID", "exit_code": "INTEGER", "error_class": "VARCHAR", "error": "VARCHAR", "usage": "VARCHAR"},
    **{"result": "VARCHAR", "args": "VARCHAR", "tags": "VARCHAR", "origin_run_id": "UUID", "spec": "VARCHAR"},
    **{"logical_at": "TIMESTAMP", "workflow_run_id": "UUID"},
}
FIRST_DAY, LAST_DAY = date(1970, 1, 1), date(9999, 12, 31)
_NO_ROW = ", ".join(f"null::{kind} as {name}" for name, kind in COLUMNS.items())
_WAVE = 32  # files of one query


def folder(tenant_id: int) -> str:
    """Where a tenant's files lie."""
    return f"history/{tenant_id}/"


class Archived(NamedTuple):
    """A file of one tenant and day."""

    day: date
    rows: int
    file: File


async def files(connection: Connection, tenants: Sequence[int], first: date, last: date) -> list[Archived]:
    """What there is of these days, both included, the newest first."""
    return [
        Archived(row["day"], row["rows"], File(row["object"], row["bytes"], row["checksum"]))
        for row in await connection.fetch(SQL["files"], list(tenants), first, last)
    ]


async def query(
    parquet: Parquet, statement: str, found: Sequence[Archived], given: Sequence[Any] | Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of a statement over `rows_of_files`."""
    return await parquet.query(statement.replace("$NO_ROW", _NO_ROW), [archived.file for archived in found], given)


def waves(found: Sequence[Archived]) -> Iterator[list[Archived]]:
    """Some days after the other, each of them whole."""
    wave: list[Archived] = []
    for archived in found:
        if len(wave) >= _WAVE and archived.day != wave[-1].day:
            yield wave
            wave = []
        wave.append(archived)
    if wave:
        yield wave


async def kept_since(db: Database, tenant_id: int, runs_days: int) -> datetime | None:
    """From when on nothing that was archived has gone; None: nothing has. `runs_days`: for how many days runs are kept
    unless the tenant says."""
    return await db.fetchval("engine", SQL["kept_since"], tenant_id, runs_days)  # type: ignore[no-any-return]


def refuse_expired(kept_since: datetime | None, from_: datetime, created_at: datetime) -> None:
    """Of what is not kept any more nobody knows what became of it: to call it missing would be a lie."""
    if kept_since is not None and from_ < kept_since and created_at < kept_since:
        raise InvalidInput.field("from", "expired", f"what became of runs before {iso(kept_since)} is not kept")


def day_of(run_id: str) -> date:
    """Where a run lies. What is no id of ours may name an instant beyond all days."""
    try:
        return instant_of(run_id).date()
    except OverflowError:
        return LAST_DAY


def day_before(run_id: str) -> date:
    """The last day on which there may be runs with lower ids than this one."""
    day = day_of(run_id)
    return day - timedelta(days=1) if run_id == lowest_id(datetime.combine(day, time(), UTC)) else day


async def attempts_of(db: Database, parquet: Parquet, who: Identity, run_id: str) -> list[dict[str, Any]]:
    """A run's rows, the last one final; none if it is not in the archive."""
    day = day_of(run_id)
    async with db.tenant(who.tenant_id, "cold") as connection:
        found = await files(connection, [who.tenant_id], day, day)
    if not found:
        return []
    return await query(parquet, SQL["run"], found, {"tenant": who.tenant_id, "run": run_id})
