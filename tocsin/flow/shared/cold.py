"""Cold history: days that lie in object storage, found by the catalogue and read from their files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

from tocsin.store.db import Connection, Sql
from tocsin.store.parquet import File, Parquet

SQL = Sql(__file__)
# Of a file, in order. Times are UTC without saying so.
COLUMNS = {
    **{"tenant_id": "INTEGER", "run_id": "UUID", "attempt": "INTEGER", "job_id": "UUID", "job_name": "VARCHAR"},
    **{"pool": "VARCHAR", "job_version": "INTEGER", "final": "BOOLEAN", "state": "VARCHAR", "outcome": "VARCHAR"},
    **{"reason": "VARCHAR", "count": "INTEGER", "fence": "BIGINT", "trigger": "VARCHAR", "priority": "INTEGER"},
    **{"failures": "INTEGER", "losses": "INTEGER", "max_attempts": "INTEGER", "first_for": "TIMESTAMP"},
    **{"scheduled_for": "TIMESTAMP", "ready_at": "TIMESTAMP", "started_at": "TIMESTAMP", "finished_at": "TIMESTAMP"},
    **{"worker_id": "UUID", "exit_code": "INTEGER", "error_class": "VARCHAR", "error": "VARCHAR", "usage": "VARCHAR"},
    **{"result": "VARCHAR", "args": "VARCHAR", "tags": "VARCHAR", "origin_run_id": "UUID"},
}
FIRST_DAY, LAST_DAY = date(1970, 1, 1), date(9999, 12, 31)


class Archived(NamedTuple):
    """A file of one tenant and day."""

    tenant_id: int
    day: date
    rows: int
    file: File


async def files(connection: Connection, tenants: Sequence[int], first: date, last: date) -> list[Archived]:
    """What there is of these days, the newest first."""
    return [
        Archived(row["tenant_id"], row["day"], row["rows"], File(row["object"], row["bytes"], row["checksum"]))
        for row in await connection.fetch(SQL["files"], list(tenants), first, last)
    ]


async def between(connection: Connection) -> list[date]:
    """Days that are cold and still hot."""
    return [row["day"] for row in await connection.fetch(SQL["between"])]


async def read(parquet: Parquet, sql: str, found: Sequence[Archived], *args: Any) -> list[dict[str, Any]]:
    """Rows of these files."""
    return await parquet.query(sql, [archived.file for archived in found], *args) if found else []


def day_of(at: datetime) -> date:
    """Where a run that was made then lies."""
    return at.date()
