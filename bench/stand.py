"""The test stand: a PostgreSQL, a server and workers of its own, as real processes on loopback, with safe settings."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from bench import cpu
from tocsin.cli.up import server_environment, worker_environment
from tocsin.node.assemble import bootstrap
from tocsin.settings import Settings
from tocsin.store.embedded import Embedded, die_with_parent

ROOT = Path(__file__).resolve().parent.parent
TENANTS = 20
FLOOR_DATABASE = "floor"
_START_SECONDS = 30.0
_STOP_SECONDS = 15.0
_QUIET_CORES = 0.2
_SILENT_SECONDS = 5.0
# A promise, a lie, or a knob turned for the figures: the conditions are printed beside them.
CONDITIONS = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size")
T = TypeVar("T")


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


class Stand:
    """Everything a benchmark stands on. A context: nothing of it is left afterwards."""

    def __init__(self, patience: float = 0.0) -> None:
        self._patience = patience
        # 0711, because the user who runs PostgreSQL for root must get through.
        self.home = Path(tempfile.mkdtemp(prefix="tocsin-bench-"))
        self.home.chmod(0o711)
        self.postgres = Embedded(self.home)
        self.settings = Settings()
        self.keys: dict[str, str] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.more_servers: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self._api: Api | None = None

    def __enter__(self) -> Stand:
        try:
            say("starting PostgreSQL …")
            url = self.postgres.start()
            # Rates are counted as ever, and as high as no machine gets: one key makes all the requests here.
            rates = {"rate_per_key": 1e6, "rate_per_address": 1e6}
            # Old days are archived by those who measure it, not by a server in between.
            self.settings = Settings.load({}, home=self.home, database_url=url, port=_free_port(), hot_days=0, **rates)
            self.keys = bootstrap(self.settings, {})
            # Now, because a template must have no other sessions.
            asyncio.run(self.query(f"create database {FLOOR_DATABASE} template tocsin", database="postgres"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop_workers()
        for server in [self.server, *self.more_servers]:
            if server is not None:
                _end(server)
        self.postgres.stop(immediate=True)
        shutil.rmtree(self.home, ignore_errors=True)

    # ── PostgreSQL ───────────────────────────────────────────────────────────────────────────────────────────────

    def superuser_url(self, database: str = "tocsin") -> str:
        """A URL with every right."""
        password = (self.home / "secrets" / "superuser").read_text().strip()
        _, _, rest = self.settings.database_url.partition("@")
        return f"postgresql://postgres:{password}@" + rest.replace("/tocsin", f"/{database}", 1)

    def login_url(self, database: str) -> str:
        """The URL of the unprivileged login for another database."""
        head, _, rest = self.settings.database_url.partition("@")
        return f"{head}@" + rest.replace("/tocsin", f"/{database}", 1)

    async def connect(self, database: str = "tocsin") -> asyncpg.Connection:
        """A connection as superuser."""
        return await asyncpg.connect(self.superuser_url(database), server_settings={"search_path": "tocsin"})

    async def query(self, statement: str, *values: object, database: str = "tocsin") -> list[Any]:
        """Rows of one statement, as superuser."""
        connection = await self.connect(database)
        try:
            return list(await connection.fetch(statement, *values))
        finally:
            await connection.close()

    async def execute(self, script: str) -> None:
        """Statements of which no rows are wanted, as superuser."""
        connection = await self.connect()
        try:
            await connection.execute(script)
        finally:
            await connection.close()

    async def conditions(self) -> dict[str, str]:
        """The settings of PostgreSQL that decide what a figure is worth."""
        rows = await self.query("select name, setting, unit from pg_settings where name = any($1)", CONDITIONS)
        return {row["name"]: f"{row['setting']}{' × ' + row['unit'] if row['unit'] else ''}" for row in rows}

    # ── our processes ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def api(self) -> Api:
        """The API as platform key; starts the server if it does not run yet."""
        if self._api is None:
            say("starting the server …")
            environment = server_environment(self.settings, os.environ)
            self.server = self._start("server", environment)
            self._api = Api(self.settings.port, self.keys["key"])
            _wait_for(self._api.is_ready, self.server, "the server")
        return self._api

    def stop_server(self) -> None:
        """Stop the first server; `api` starts it again."""
        if self.server is not None:
            _end(self.server)
        self.server, self._api = None, None

    def add_server(self, module: str = "tocsin", **more: Any) -> Api:
        """One more server on the same database, with settings of its own; `module`: what is run instead of ours."""
        settings = replace(self.settings, port=_free_port(), **more)
        server = self._start("server", server_environment(settings, os.environ), module=module)
        self.more_servers.append(server)
        api = Api(settings.port, self.keys["key"])
        _wait_for(api.is_ready, server, "another server")
        return api

    def start_workers(self, count: int, slots: int, server: Api | None = None) -> None:
        """Start workers, of another server than the first if one is given; they register when they are ready."""
        url = f"http://127.0.0.1:{server.port if server else self.settings.port}"
        environment = worker_environment(self.settings, os.environ, url, self.keys["worker_key"])
        environment["PYTHONPATH"] = str(ROOT)
        for _ in range(count):
            self.workers.append(self._start("worker", environment, "--slots", str(slots), "bench.jobs:app"))

    def stop_workers(self) -> None:
        """Ask all of them to go, then wait for each."""
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            _end(worker)
        self.workers.clear()

    def cpu(self) -> cpu.Usage:
        """CPU seconds so far of PostgreSQL, the server and the workers."""
        roots = {
            "postgres": [self.postgres.pid or 0],
            "server": [server.pid for server in (self.server, *self.more_servers) if server is not None],
            "worker": [worker.pid for worker in self.workers],
        }
        return cpu.measure(roots)

    def await_quiet(self) -> None:
        """Wait, for as long as patience allows, until others leave the machine alone."""
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            before = self.cpu()
            time.sleep(0.5)
            if self.cpu().since(before).foreign() / 0.5 < _QUIET_CORES:
                return

    def _start(
        self, role: str, environment: dict[str, str], *arguments: str, module: str = "tocsin"
    ) -> subprocess.Popen[bytes]:
        with open(self.home / f"{role}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, role, *arguments],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    def log_tail(self) -> str:
        """The last words of server and worker, for when something failed."""
        tails = []
        for role in ("server", "worker"):
            with contextlib.suppress(OSError):
                tails.append(f"--- {role}.log\n{(self.home / f'{role}.log').read_text(errors='replace')[-3000:]}")
        return "\n".join(tails)


class Api:
    """The HTTP API over one kept connection: plain, so that the client's own cost stays small."""

    def __init__(self, port: int, key: str) -> None:
        self.port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._used_at = time.monotonic()
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    def post(self, path: str, body: object, tenant: str = "default") -> Any:
        """The decoded answer; anything but 2xx is an error."""
        return self.call("POST", path, body, tenant)

    def call(self, method: str, path: str, body: object = None, tenant: str = "default") -> Any:
        """The same by any method."""
        headers = self._headers | {"tocsin-tenant": tenant}
        self._open_anew()
        self._connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
        reply = self._connection.getresponse()
        content = reply.read()
        if not 200 <= reply.status < 300:
            raise RuntimeError(f"{method} {path}: {reply.status} {content[:500].decode(errors='replace')}")
        return json.loads(content) if content else None

    def _open_anew(self) -> None:
        """The server ends connections on which nothing was said for long."""
        if time.monotonic() - self._used_at > _SILENT_SECONDS:
            self._connection.close()
        self._used_at = time.monotonic()

    def another(self) -> Api:
        """The same over a connection of its own, for another thread."""
        return Api(self.port, self._headers["authorization"].removeprefix("Bearer "))

    def counter(self, name: str) -> int:
        """A counter of /metrics, over all its labels."""
        self._open_anew()
        self._connection.request("GET", "/metrics")
        lines = self._connection.getresponse().read().decode().splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.partition(" ")[0].startswith(name))

    def is_ready(self) -> bool:
        """Whether the server serves."""
        try:
            self._connection.request("GET", "/readyz")
            reply = self._connection.getresponse()
            reply.read()
            return reply.status == 200
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return False

    def create_job(self, target: dict[str, Any], tenant: str = "default", **more: object) -> str:
        """The id of a new manual job."""
        job = self.post("/v1/jobs", {"schedule": {"manual": True}, "target": target, **more}, tenant)
        return str(job["id"])


@contextlib.contextmanager
def stand(patience: float = 0.0) -> Iterator[Stand]:
    """A stand that tells what its processes said if anything fails."""
    with Stand(patience) as made:
        try:
            yield made
        except Exception:
            say(made.log_tail())
            raise


@contextlib.contextmanager
def marks() -> Iterator[Path]:
    """A file in which jobs note their starts."""
    descriptor, name = tempfile.mkstemp(prefix="tocsin-marks-")
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        os.unlink(name)


def await_until(look: Callable[[], T | None], what: str, seconds: float = 600.0, every: float = 0.05) -> T:
    """What `look` finds, once it finds something: others' work has no event that a benchmark could wait for."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:.0f} s: {what}")
        time.sleep(every)
    return found


class Rated:
    """A round of `runs` in `seconds`; for dataclasses."""

    runs: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.runs / self.seconds

    def document(self) -> dict[str, float]:
        """For the results' file."""
        return asdict(self) | {"per_second": self.per_second}  # type: ignore[call-overload, no-any-return]


def _wait_for(condition: Any, process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not start")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
