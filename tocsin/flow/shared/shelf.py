"""Old records of the audit: files in object storage, each with records of one tenant that follow each other.

A file says which file came before it (the SHA-256 of its bytes), so that the files are a chain, too, also to somebody
who has nothing but them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

from tocsin.errors import Unavailable
from tocsin.store.db import Connection, Row, Sql
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import File, Parquet

SQL = Sql(__file__)
MOST_ROWS = 20_000  # in one file: what is proved at once
# Of a file, in order. Times are UTC without saying so, digests are in hexadecimal.
COLUMNS = {
    **{"tenant_id": "INTEGER", "seq": "BIGINT", "id": "BIGINT", "at": "TIMESTAMP", "actor": "VARCHAR"},
    **{"key_id": "VARCHAR", "action": "VARCHAR", "target": "VARCHAR", "detail": "VARCHAR", "before": "VARCHAR"},
    **{"after": "VARCHAR", "address": "VARCHAR", "request_id": "VARCHAR", "hash": "VARCHAR"},
    **{"previous_file": "VARCHAR"},
}
Records = list[dict[str, Any]]


def folder(tenant_id: int) -> str:
    """Where a tenant's files lie."""
    return f"audit-archive/{tenant_id}/"


class Shelved(NamedTuple):
    """A file: the numbers of its first and last record, that one's hash, its highest row id, and the file before."""

    first: int
    last: int
    hash: bytes
    id: int
    day: date
    file: File
    previous: bytes

    @classmethod
    def of(cls, row: Row) -> Shelved:
        first, last, hash_, id_, day, object_, size, checksum, previous = row
        return cls(first, last, hash_, id_, day, File(object_, size, checksum), previous)


async def upto(connection: Connection, tenant_id: int) -> int:
    """The last record that is read from a file."""
    return await connection.fetchval(SQL["upto"], tenant_id) or 0


async def holding(connection: Connection, tenant_id: int, seq: int, most: int) -> list[Shelved]:
    """Files that end at or behind a record, in order."""
    return [Shelved.of(row) for row in await connection.fetch(SQL["holding"], tenant_id, seq, most)]


async def below(
    connection: Connection, tenant_id: int, top: int, from_: datetime | None, to: datetime | None, most: int
) -> list[Shelved]:
    """Files with records below a number that may be of a time, the newest first."""
    return [Shelved.of(row) for row in await connection.fetch(SQL["below"], tenant_id, top, from_, to, most)]


class Found(NamedTuple):
    """What lies under a file's name: its records behind some number, and whether it is what was stored. `records` is
    None if there is no such object, or nothing that could be read."""

    records: Records | None
    there: bool
    intact: bool


async def examine(objects: ObjectStore, parquet: Parquet, tenant_id: int, shelved: Shelved, after: int) -> Found:
    """Read a file whatever somebody has made of it."""
    data = await objects.read(shelved.file.object)
    if data is None:
        return Found(None, there=False, intact=False)
    intact = hashlib.sha256(data).digest() == shelved.file.checksum
    try:
        return Found(await records(parquet, tenant_id, data, shelved.first, after), there=True, intact=intact)
    except Unavailable:
        return Found(None, there=True, intact=intact)


async def records(parquet: Parquet, tenant_id: int, data: bytes, first: int, after: int) -> Records:
    """The records of a file whose first is `first`: those behind `after`, and those that do not belong there."""
    return await parquet.query_bytes(SQL["records"], data, {"tenant": tenant_id, "first": first, "after": after})


async def find(parquet: Parquet, tenant_id: int, files: Sequence[Shelved], top: int, **wanted: Any) -> Records:
    """Records below `top` that fit, newest first; `wanted` is what a list is narrowed by, and its limit."""
    given = {"tenant": tenant_id, "top": top} | wanted
    return await parquet.query(SQL["list"], [shelved.file for shelved in files], given)
