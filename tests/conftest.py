"""What every test stands on: one real PostgreSQL per test process, and a fresh database per test cloned from a
migrated template (about 30 ms)."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import hypothesis
import pytest

from tocsin.node.assemble import Node, bootstrap
from tocsin.node.server.app import build
from tocsin.node.server.protocol import HttpServer, Request, Respond
from tocsin.settings import Settings
from tocsin.store.embedded import Embedded

_numbers = itertools.count(1)
# Who runs the tests in the background ignores Ctrl-C, and what they start and interrupt would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("timeless", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("timeless")


class Cluster:
    """The test process's PostgreSQL, with a migrated template database and the keys founded in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.server = Embedded(home)
        self.template_url = self.server.start()
        self.superuser_password = (home / "secrets" / "superuser").read_text().strip()
        self.keys = bootstrap(Settings.load({}, home=home, database_url=self.template_url), {})

    def as_superuser(self, database: str = "postgres") -> str:
        """A URL with every right, for what only an administrator may do."""
        _, _, rest = self.template_url.partition("@")
        return f"postgresql://postgres:{self.superuser_password}@" + rest.replace("/tocsin", f"/{database}", 1)

    def url(self, database: str) -> str:
        """A URL of the unprivileged login for another database."""
        head, _, rest = self.template_url.partition("@")
        return f"{head}@" + rest.replace("/tocsin", f"/{database}", 1)

    async def clone(self) -> str:
        """The name of a fresh copy of the template."""
        name = f"t{os.getpid()}_{next(_numbers)}"
        await self._execute(f"create database {name} template tocsin owner tocsin_owner")
        return name

    async def drop(self, name: str) -> None:
        await self._execute(f"drop database {name} with (force)")

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.as_superuser())
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # Not pytest's own folder: that is 0700, and the user who runs PostgreSQL for root could not get there.
    home = Path(tempfile.mkdtemp(prefix="tocsin-test-"))
    home.chmod(0o711)
    cluster = Cluster(home)
    try:
        yield cluster
    finally:
        cluster.server.stop(immediate=True)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def database_url(cluster: Cluster) -> Iterator[str]:
    """A migrated database of the test's own."""
    name = asyncio.run(cluster.clone())
    yield cluster.url(name)
    asyncio.run(cluster.drop(name))


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return Settings.load({}, home=tmp_path, database_url=database_url)


@pytest.fixture
async def node(settings: Settings) -> AsyncIterator[Node]:
    """A whole server node in this process, all loops running."""
    node = Node(settings)
    await node.start()
    yield node
    await node.stop()


@pytest.fixture
async def still_node(settings: Settings) -> AsyncIterator[Node]:
    """A node whose loops do not turn by themselves: the test calls the steps."""
    node = Node(settings)
    await node.start(loops=False)
    yield node
    await node.stop()


@pytest.fixture
async def served(still_node: Node) -> AsyncIterator[str]:
    """The URL of such a node on a socket, for clients that bring their own transport."""
    server = HttpServer(build(still_node))
    port = await server.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await server.stop(grace=1.0)


class InProcess(httpx.AsyncBaseTransport):
    """From httpx to the application without a socket."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, _, query = request.url.raw_path.partition(b"?")
        headers: dict[str, str] = {}
        for name, value in request.headers.multi_items():
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        body = await request.aread()
        reply = await self._respond(Request(request.method, path.decode("ascii"), query, headers, body=body))
        shown = b"" if request.method == "HEAD" else reply.body
        told = {"content-type": reply.media_type} | (reply.headers or {})
        cookies = [("set-cookie", cookie) for cookie in reply.cookies]
        return httpx.Response(reply.status, headers=[*told.items(), *cookies], content=shown)


class Api:
    """The HTTP API in this process, as one key."""

    def __init__(self, node: Node, key: str) -> None:
        self.node = node
        self.key = key
        self.http = httpx.AsyncClient(
            transport=InProcess(build(node)),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {key}"},
        )

    async def call(self, method: str, path: str, *, expect: int | None = None, **kwargs: Any) -> Any:
        """The decoded answer, after checking its status (any 2xx unless told)."""
        reply = await self.http.request(method, path, **kwargs)
        fits = reply.is_success if expect is None else reply.status_code == expect
        assert fits, f"{method} {path}: {reply.status_code} {reply.text}"
        return reply.json() if reply.content else None

    async def get(self, path: str, **kwargs: Any) -> Any:
        return await self.call("GET", path, **kwargs)

    async def post(self, path: str, json: Any = None, **kwargs: Any) -> Any:
        return await self.call("POST", path, json={} if json is None else json, **kwargs)

    async def delete(self, path: str, **kwargs: Any) -> Any:
        return await self.call("DELETE", path, **kwargs)

    async def with_key(self, role: str, tenant: str = "default") -> Api:
        """The API as a new key of another role or tenant."""
        made = await self.post("/v1/keys", {"role": role}, headers={"tocsin-tenant": tenant})
        return Api(self.node, made["key"])


@pytest.fixture
async def api(node: Node, cluster: Cluster) -> AsyncIterator[Api]:
    """The API as the platform key of tenant `default`."""
    api = Api(node, cluster.keys["key"])
    yield api
    await api.http.aclose()


@pytest.fixture
async def still_api(still_node: Node, cluster: Cluster) -> AsyncIterator[Api]:
    """The same on a node whose loops do not turn."""
    api = Api(still_node, cluster.keys["key"])
    yield api
    await api.http.aclose()


@pytest.fixture
def worker_key(cluster: Cluster) -> str:
    return cluster.keys["worker_key"]
