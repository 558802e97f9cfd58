"""The archivist: days of history and of the audit whose time in the database is over go to object storage, and from
there when nobody is to keep them any longer."""

from __future__ import annotations

from datetime import timedelta

from tocsin.clock import EPOCH
from tocsin.flow import archive, compact, publish, retention, shelve
from tocsin.node.loop import Loop
from tocsin.settings import Settings
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import Parquet
from tocsin.telemetry import LOOP_ERRORS, get_logger

log = get_logger("archivist")
_PAUSE, _AGAIN = 600.0, 60.0  # seconds between looks, and after one that failed; nothing waits for it


class Archivist(Loop):
    """Every ten minutes: is a day older than history is kept hot, or than it is kept at all?"""

    name = "archivist"

    def __init__(self, db: Database, objects: ObjectStore, parquet: Parquet, settings: Settings) -> None:
        super().__init__()
        self._db = db
        self._objects = objects
        self._parquet = parquet
        self._settings = settings
        self._published: dict[int, str] = {}

    async def run_once(self) -> float:
        try:
            await self._take_turn()
        except Exception as error:
            # Not after the moment that other loops wait: to write a day anew may be much work.
            LOOP_ERRORS.labels(self.name).inc()
            log.warning("turn failed", error=f"{type(error).__name__}: {error}")
            return _AGAIN
        return _PAUSE

    async def _take_turn(self) -> None:
        hot_days = self._settings.hot_days
        ended = await self._db.read_clock() - timedelta(days=hot_days) if hot_days else EPOCH
        if await archive.archive(self._db, self._objects, self._parquet, ended.date()):
            await retention.forget_jobs(self._db, ended)
        await shelve.shelve(self._db, self._objects, self._parquet, ended.date())
        await retention.expire(self._db, self._settings.runs_days)
        if self._settings.iceberg:
            # Before the files go that it is not to name any more.
            await publish.publish(self._db, self._objects, self._published)
        await retention.remove(self._db, self._objects)
        await retention.expire_audit(self._db, self._objects, self._settings.audit_days)
        await retention.expire_logs(self._db, self._settings.logs_days)
        await compact.unlist(self._db, self._objects, hot_days)
        await self._parquet.tidy()
