"""Lines of long ago: the database has no rows of where they lie, the directories of their segments tell.

Whoever looks for the lines of a run reads the rows first, then asks for such segments: rows that go in between are
found twice, and not never.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tocsin.errors import ObjectLost
from tocsin.flow.shared.segments import read_directory
from tocsin.store.db import Connection, Row, Sql
from tocsin.store.objects import ObjectStore

SQL = Sql(__file__)
_AT_ONCE = 16


class Place(NamedTuple):
    """Where lines of an attempt lie."""

    attempt: int
    first_line: int
    lines: int
    object: str
    position: int
    bytes: int
    job_id: str = ""  # where the directory tells it

    @property
    def end(self) -> int:
        """The seq of the last of them."""
        return self.first_line + self.lines


async def segments(connection: Connection, tenant_id: int, run_id: str) -> list[Row]:
    """Those that may have lines of the run."""
    return await connection.fetch(SQL["segments"], tenant_id, run_id)  # type: ignore[no-any-return]


class Places(NamedTuple):
    """Where lines of a run lie; `lost`: there may be others, in segments whose directory is gone or damaged."""

    found: list[Place]
    lost: bool


async def places(objects: ObjectStore, found: Sequence[Row], run_id: str) -> Places:
    """Where they lie in these segments."""
    some = asyncio.Semaphore(_AT_ONCE)

    async def read(row: Row) -> list[Place] | None:
        try:
            async with some:
                data = await objects.get(row["object"], row["position"], row["bytes"])
            _, frames = await asyncio.to_thread(read_directory, data)
        except ObjectLost:
            return None
        return [
            Place(f.attempt, f.first_line, f.lines, row["object"], f.position, f.bytes, f.job_id)
            for f in frames
            if f.run_id == run_id
        ]

    read_all = await asyncio.gather(*map(read, found))
    return Places([place for some_of in read_all for place in some_of or ()], None in read_all)


def in_order(found: Iterable[Place]) -> list[Place]:
    """By attempt and line, each once."""
    return sorted({(place.attempt, place.first_line): place for place in found}.values())
