"""How much is left of what ends without a warning of its own: disks, connections, the queue of notifications; and how
much piles up: WAL that is kept for somebody, rows that are dead."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from tocsin.store.db import Database, Sql
from tocsin.telemetry import CONNECTIONS, DEAD_RATIO, DISK_FREE, NOTIFY_QUEUE, SLOT_RETAINED

SQL = Sql(__file__)


class Room:
    """Looks now and then. `folders`: those that are on a disk of this machine, by what is in them."""

    def __init__(self, db: Database, folders: Mapping[str, Path]) -> None:
        self._db = db
        self._folders = folders

    async def look(self) -> None:
        """Set the gauges."""
        for what, folder in self._folders.items():
            # In a thread: a disk that is away answers late. What is not there, or not ours to see, is not told.
            with contextlib.suppress(OSError):
                disk = await asyncio.to_thread(shutil.disk_usage, folder)
                DISK_FREE.labels(what).set(disk.free / disk.total if disk.total else 0.0)
        left = await self._db.fetchrow("engine", SQL["left"])
        CONNECTIONS.set(left["connections"])
        NOTIFY_QUEUE.set(left["notifications"])
        SLOT_RETAINED.set(left["retained"])
        for row in await self._db.fetch("engine", SQL["dead"]):
            DEAD_RATIO.labels(row["name"]).set(row["ratio"])
