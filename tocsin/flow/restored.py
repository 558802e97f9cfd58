"""restored: what must be done once a backup was restored, before servers and workers go on.

Workers still hold what they were given after the backup was made, by a database that is no more. So fences go on in a
higher epoch, every worker is declared gone, and what they ran is run again.
"""

from __future__ import annotations

from typing import NamedTuple

from tocsin.store.db import Sql, connect

SQL = Sql(__file__)


class Restored(NamedTuple):
    """The epoch in which fences go on, how many workers were declared gone and runs taken back, and which servers were
    running already: they hold what they knew of the other past, and go down by themselves."""

    epoch: int
    workers: int
    runs: int
    servers: list[str]


async def restored(url: str) -> Restored:
    """Do it all in one transaction, as the schema's owner."""
    connection = await connect(url, "owner")
    try:
        async with connection.transaction():
            epoch = await connection.fetchval(SQL["raise_epoch"])
            workers = await connection.fetch(SQL["dismiss"])
            runs = await connection.fetch(SQL["take_back"])
            await connection.execute(SQL["stamp_lanes"])
            await connection.execute(SQL["note"], epoch)
            servers = [row["name"] for row in await connection.fetch(SQL["living"])]
        return Restored(epoch, len(workers), len(runs), servers)
    finally:
        await connection.close()
