"""The archivist: days of history and of the audit whose time in the database is over go to object storage, and from
there when nobody is to keep them any longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        self._failed = False

    async def run_once(self) -> float:
        self._failed = False
        hot_days = self._settings.hot_days
        ended = await self._db.read_clock() - timedelta(days=hot_days) if hot_days else EPOCH
        with self._step("archive"):
            if await archive.archive(self._db, self._objects, self._parquet, ended.date()):
                await retention.forget_jobs(self._db, ended, self._settings.runs_days)
        with self._step("shelve"):
            await shelve.shelve(self._db, self._objects, self._parquet, ended.date())
        with self._step("expire runs"):
            await retention.expire(self._db, self._settings.runs_days)
            if self._settings.iceberg:
                # Before the files go that it is not to name any more.
                await publish.publish(self._db, self._objects, self._published)
            await retention.remove(self._db, self._objects)
        with self._step("expire audit"):
            await retention.expire_audit(self._db, self._objects, self._settings.audit_days)
        with self._step("expire logs"):
            await retention.expire_logs(self._db, self._settings.logs_days)
        with self._step("unlist logs"):
            await compact.unlist(self._db, self._objects, hot_days)
        with self._step("tidy"):
            await self._parquet.tidy()
        # Not after the moment that other loops wait: to write a day anew may be much work.
        return _AGAIN if self._failed else _PAUSE

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """What is wrong with one step keeps no other back: what nobody is to keep goes all the same."""
        try:
            yield
        except Exception as error:
            LOOP_ERRORS.labels(self.name).inc()
            log.warning("a step failed", step=name, error=f"{type(error).__name__}: {error}")
            self._failed = True
