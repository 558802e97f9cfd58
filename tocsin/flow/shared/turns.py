"""Turns: work that one server at a time does for all, as the owner of the tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tocsin.store.db import Connection, Database, Sql, connect

SQL = Sql(__file__)


@asynccontextmanager
async def turn(db: Database, *work: str, **settings: str) -> AsyncIterator[Connection | None]:
    """A connection as the owner, or none if another server is at some of this work. It uses one core: nobody waits for
    such work, and those beside it need the others."""
    owner = await connect(db.url, "owner", max_parallel_workers_per_gather="0", **settings)
    try:
        yield owner if await owner.fetchval(SQL["take"], work) else None
    finally:
        await owner.close()
