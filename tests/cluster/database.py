"""A PostgreSQL of a round's own, to be stopped and started under load, with a standby to fail over to if wanted."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.conftest import Cluster

from .standby import Postgres, Servers

T = TypeVar("T")


class OwnDatabase:
    """A context: leaving it ends every server.

    PostgreSQL dies with the thread that started it, and starting it blocks; so one thread does nothing else, as long
    as this lives."""

    def __init__(self, folder: Path, *, standby: bool = False) -> None:
        folder.mkdir(mode=0o711, exist_ok=True)  # PostgreSQL runs as another user where we are root
        self._folder, self.has_standby = folder, standby
        self._thread = ThreadPoolExecutor(1, "postgres")
        self._number = 0

    def __enter__(self) -> OwnDatabase:
        self._thread.submit(self._begin).result()
        return self

    def _begin(self) -> None:
        cluster = Cluster(self._folder)
        self.keys = cluster.keys
        self._servers = Servers(cluster)
        self._primary = self._servers.copy(self._name())
        cluster.server.stop(immediate=True)  # it was only the pattern
        # A standby that lost its primary asks for it again at once: until it is back, nothing is acknowledged.
        self._primary.configure(wal_retrieve_retry_interval="200ms")
        self._standby = self._new_standby() if self.has_standby else None

    def __exit__(self, *_exc: object) -> None:
        self._thread.submit(self._servers.__exit__, None, None, None).result()
        self._thread.shutdown()

    @property
    def address(self) -> tuple[str, int]:
        """Where the primary listens."""
        return "127.0.0.1", self._primary.port

    def url_by(self, port: int) -> str:
        """The login's URL by way of a proxy on that port."""
        return f"postgresql://{self._servers.login}@127.0.0.1:{port}/tocsin?sslmode=disable"

    async def restart(self, *, immediate: bool) -> float:
        """Stop and start; the instant (Unix time) from which it takes connections again."""

        def again() -> float:
            self._primary.stop(signal.SIGQUIT if immediate else signal.SIGINT)
            self._primary.start()
            return time.time()

        return await self._run(again)

    async def fail_over(self) -> float:
        """Kill the primary and promote its standby; the instant from which that takes writes."""

        def promote() -> float:
            assert self._standby is not None
            self._primary.kill()
            shutil.rmtree(self._primary.data, ignore_errors=True)
            self._primary, self._standby = self._standby, None
            return self._primary.promote()

        return await self._run(promote)

    async def replace_standby(self) -> None:
        """Give the primary a standby again."""
        self._standby = await self._run(self._new_standby)

    def _new_standby(self) -> Postgres:
        return self._servers.standby(self._name(), self._primary)

    def _name(self) -> str:
        self._number += 1
        return f"postgres-{self._number}"

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
