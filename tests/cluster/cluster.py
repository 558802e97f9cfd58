"""Real `tocsin server` and `tocsin worker` processes on one database, to be killed, frozen and started again.

    with Site(folder, database_url, keys) as site:
        server = await site.server("one")
        worker = await site.worker("w1", server)
        worker.kill()            # kill -9 of the agent alone; `worker.tree` still names what it had started
        await worker.start()     # the same name and settings, a new process

A server keeps its port over restarts, so that workers find it again. Leaving the block ends every process that was
started, by its id, whatever happened. What a process wrote stands in `<folder>/<name>.log`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tests import PATIENCE
from tests.ports import free_port
from tocsin.worker.proctree import die_with_parent

ROOT = Path(__file__).parents[2]
LEASE, HEARTBEAT = 4.0, 1.0
_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
T = TypeVar("T")


async def until(what: str, look: Callable[[], Awaitable[T]], seconds: float = PATIENCE, every: float = 0.05) -> T:
    """Look again and again until there is something; AssertionError after `seconds` says what never came."""
    give_up_at = time.monotonic() + seconds
    while not (found := await look()):
        assert time.monotonic() < give_up_at, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(every)
    return found


@contextlib.contextmanager
def folder_for_all(prefix: str) -> Iterator[Path]:
    """Not pytest's own folder, which the user who runs PostgreSQL for root could not enter."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Process:
    """One process of ours, and its descendants as last seen."""

    def __init__(self, site: Site, name: str, command: list[str], env: dict[str, str]) -> None:
        self.site, self.name = site, name
        self.env = env
        self.log = site.folder / f"{name}.log"
        self.tree: list[psutil.Process] = []
        self._command = [sys.executable, "-m", "tocsin", *command]
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def spawn(self) -> None:
        """Start it, without waiting for anything."""
        assert not self.alive
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={n: os.environ[n] for n in _INHERITED if n in os.environ} | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(os.getpid()),  # also when the tests themselves are killed
            )

    def look(self) -> list[psutil.Process]:
        """Its living descendants, remembered in `tree`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.tree = psutil.Process(self.pid).children(recursive=True)
        return self.tree

    def kill(self) -> None:
        """kill -9 of this process, and of nothing else."""
        if self.alive:
            self.look()
            os.kill(self.pid, signal.SIGKILL)
            assert self._popen is not None
            self._popen.wait()

    def terminate(self) -> None:
        """Ask it to go."""
        os.kill(self.pid, signal.SIGTERM)

    async def ended(self, seconds: float = 15.0) -> int:
        """Its exit code, once it has one."""

        async def gone() -> bool:
            return not self.alive

        await until(f"{self.name} ends", gone, seconds)
        assert self._popen is not None
        return self._popen.returncode

    def orphans(self) -> list[psutil.Process]:
        """What it had started and still lives."""
        return [p for p in self.tree if _lives(p)]

    def freeze(self) -> None:
        """SIGSTOP of the whole tree, the agent first."""
        os.kill(self.pid, signal.SIGSTOP)
        for child in self.look():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()

    def thaw(self) -> None:
        """SIGCONT of what was frozen, the children first: whatever they have to say, they say."""
        for child in self.tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def said(self, text: str) -> int:
        """How often a text stands in its log."""
        return self.log.read_text(errors="replace").count(text)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server(Process):
    """A server node that keeps its port."""

    def __init__(self, site: Site, name: str, database_url: str | None) -> None:
        self.port = free_port()
        settings = site.settings | ({"DATABASE_URL": database_url} if database_url else {})
        super().__init__(site, name, ["server"], settings | {"TOCSIN_PORT": str(self.port)})
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self, failpoints: str = "") -> Server:
        """Start it and wait until it serves."""
        self.spawn_with(failpoints)
        async with httpx.AsyncClient(timeout=2) as http:

            async def ready() -> bool:
                assert self.alive, f"{self.name} did not start: {self.log.read_text()[-2000:]}"
                with contextlib.suppress(httpx.TransportError):
                    return (await http.get(f"{self.url}/readyz")).is_success
                return False

            await until(f"{self.name} is ready", ready, 60)
        return self

    def spawn_with(self, failpoints: str) -> None:
        """Start it with faults to inject, without waiting for anything."""
        self.env["TOCSIN_FAILPOINTS"] = failpoints
        self.spawn()


class Worker(Process):
    """A worker, of whatever server its URL leads to."""

    def __init__(self, site: Site, name: str, url: str, slots: int, module: str | None) -> None:
        command = ["worker", *([module] if module else []), "--slots", str(slots), "--name", name]
        env = {"TOCSIN_URL": url, "TOCSIN_WORKER_KEY": site.keys["worker_key"], "TOCSIN_HOME": site.home}
        super().__init__(site, name, command, env | {"PYTHONPATH": str(ROOT), "TOCSIN_LOG_JSON": "1"})

    async def start(self) -> Worker:
        """Start it and wait until it is registered."""
        before = self.registrations()
        self.spawn()

        async def registered() -> bool:
            assert self.alive, f"{self.name} did not start: {self.log.read_text()[-2000:]}"
            return self.registrations() > before

        await until(f"{self.name} is registered", registered, 60)
        return self

    def registrations(self) -> int:
        """How often it has become a worker, over all its processes."""
        return self.said('"event": "registered"') if self.log.exists() else 0


class Site:
    """Servers and workers of one database. A context: leaving it ends them all."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        keys: dict[str, str],
        *,
        lease: float = LEASE,
        heartbeat: float = HEARTBEAT,
        **settings: Any,
    ) -> None:
        self.folder, self.keys = folder, keys
        self.home = str(folder / "home")
        self.job_ledger = folder / "jobs.ledger"
        self.client_ledger = folder / "client.ledger"
        self.settings = {
            "DATABASE_URL": database_url,
            "TOCSIN_HOME": self.home,
            "TOCSIN_LEASE_SECONDS": str(lease),
            "TOCSIN_HEARTBEAT_SECONDS": str(heartbeat),
        } | {f"TOCSIN_{name.upper()}": str(value) for name, value in settings.items()}
        self.servers: list[Server] = []
        self.workers: list[Worker] = []

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_exc: object) -> None:
        everything: list[Process] = [*self.workers, *self.servers]
        left = [child for process in everything if process.alive for child in process.look()]
        left += [child for process in everything for child in process.orphans()]
        for process in everything:
            process.kill()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    async def server(self, name: str, *, start: bool = True, database_url: str | None = None) -> Server:
        """A new server node, on the site's database or by another way to it."""
        server = Server(self, name, database_url)
        self.servers.append(server)
        return await server.start() if start else server

    async def worker(
        self,
        name: str,
        way: Server | str,
        slots: int = 8,
        module: str | None = "tests.cluster.jobs:app",
        *,
        start: bool = True,
    ) -> Worker:
        """A new worker of a server, or of whatever a URL leads to; it has the job functions of this package."""
        worker = Worker(self, name, way if isinstance(way, str) else way.url, slots, module)
        self.workers.append(worker)
        return await worker.start() if start else worker

    def client(self, server: Server, key: str = "key") -> httpx.AsyncClient:
        """The HTTP API as one of the site's keys."""
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=10)
