"""A PostgreSQL of a round's own, to be stopped and started under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.conftest import Cluster

T = TypeVar("T")


class OwnDatabase:
    """A context: leaving it stops the server.

    PostgreSQL dies with the thread that started it, and starting it blocks; so one thread does nothing else, as long
    as this lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o711, exist_ok=True)  # PostgreSQL runs as another user where we are root
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "postgres")

    def __enter__(self) -> OwnDatabase:
        self._cluster = self._thread.submit(Cluster, self._folder).result()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._thread.submit(self._cluster.server.stop, immediate=True).result()
        self._thread.shutdown()

    @property
    def keys(self) -> dict[str, str]:
        """The keys that were founded in it."""
        return self._cluster.keys

    @property
    def socket(self) -> str:
        """Where it listens."""
        return str(self._folder / "run" / ".s.PGSQL.5432")

    def url_by(self, port: int) -> str:
        """The login's URL by way of a proxy on that port."""
        login = self._cluster.template_url.partition("@")[0]
        return f"{login}@127.0.0.1:{port}/tocsin?sslmode=disable"

    async def restart(self, *, immediate: bool) -> float:
        """Stop and start; the instant (Unix time) from which it takes connections again."""
        await self._run(lambda: self._cluster.server.stop(immediate=immediate))
        await self._run(self._cluster.server.start)
        return time.time()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
