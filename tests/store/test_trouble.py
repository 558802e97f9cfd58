"""db and primary: connections that are lost, hang, or are used up; commits whose outcome nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests import PATIENCE
from tests.cluster.proxy import Link
from tests.conftest import Api, Cluster
from tests.flow.kit import poll_opened
from tests.store.washed import database_url, db, washed_database
from tocsin.errors import Contention, OutcomeUnknown, SetupError, Unavailable
from tocsin.node.assemble import Node
from tocsin.settings import Settings
from tocsin.store import db as module
from tocsin.store import primary
from tocsin.store.db import Database
from tocsin.store.primary import Host, Primary, hosts_of

__all__ = ["database_url", "db", "washed_database"]


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u:p@h/db", [Host()]),
        ("postgresql://u@/db?host=/run/pg&port=5432", [Host()]),
        ("postgresql://u:p@h1:5433,h2/db?sslmode=require", [Host("h1", 5433), Host("h2", 5432)]),
        ("postgresql://u@[::1]:1,[fe80::2]/db", [Host("::1", 1), Host("fe80::2", 5432)]),
        ("postgresql://u@/db?host=/run/a,/run/b&port=1,2", [Host("/run/a", 1), Host("/run/b", 2)]),
        ("postgresql://u@h1,h2/db?port=6000", [Host("h1", 6000), Host("h2", 6000)]),
    ],
)
def test_a_url_may_name_several_hosts(url: str, hosts: list[Host]) -> None:
    assert hosts_of(url) == hosts


# ── a way to the database that can be cut ────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def link(cluster: Cluster) -> AsyncIterator[Link]:
    link = await Link([str(cluster.home / "run" / ".s.PGSQL.5432")]).open()
    yield link
    await link.close()


def by(link: Link, url: str) -> str:
    """The same database by way of the proxy."""
    return _by(link.port, url)


def _by(port: int, url: str) -> str:
    parts = urlsplit(url)
    return f"postgresql://{parts.netloc.partition('@')[0]}@127.0.0.1:{port}{parts.path}?sslmode=disable"


@pytest.fixture
async def linked(link: Link, database_url: str) -> AsyncIterator[Database]:
    db = Database(by(link, database_url), size=3)
    await db.open()
    yield db
    link.heal()
    await db.close()


async def all_at_once(db: Database, pool: str = "engine", count: int = 3) -> None:
    """As many connections as the pool has, used at the same time: no slot is lost."""
    begun = asyncio.Barrier(count)

    async def one() -> None:
        async with db.transaction("test", pool) as connection:
            await connection.fetchval("select 1")
            await begun.wait()

    await asyncio.wait_for(asyncio.gather(*(one() for _ in range(count))), PATIENCE)


def descriptors(link: Link) -> Iterator[socket.socket]:
    """Duplicates of this process's sockets towards the proxy."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                with one, contextlib.suppress(OSError):
                    if one.getpeername()[1:2] == (link.port,):
                        yield one


async def test_the_kernel_notices_a_server_that_is_gone(linked: Database, link: Link) -> None:
    await linked.warm_up()
    ours = 0
    for one in descriptors(link):
        ours += 1
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        idle, apart, count = (
            one.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + apart * count <= 6
    assert ours == 3 + 6 + 3


async def test_a_connection_that_hangs_is_thrown_away_and_its_slot_is_free(
    linked: Database, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._TERMS, "engine", module._Terms("engine", 1))
    monkeypatch.setattr(module, "_SLACK", 0)
    await linked._drop_connections()
    await all_at_once(linked)
    assert link.strand() >= 3
    async with asyncio.timeout(PATIENCE):
        asked = (linked.fetchval("engine", "select 1") for _ in range(3))
        failed = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in failed] == [Unavailable] * 3
    await all_at_once(linked)  # by new connections, though the old ones were never closed by the other side


async def test_a_connection_cut_in_a_transaction_leaves_nothing_and_the_next_call_works(
    linked: Database, link: Link
) -> None:
    with pytest.raises(Unavailable) as caught:
        async with linked.transaction("test") as connection:
            await connection.execute("insert into tenants (slug) values ('cut')")
            link.strand()
            link.heal()  # whoever is stranded is cut off
            await connection.fetchval("select 1")
    assert caught.value.code == "database_unavailable"
    assert await linked.fetchval("engine", "select count(*) from tenants where slug = 'cut'") == 0
    await all_at_once(linked)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (asyncpg.SerializationError, Contention, "contention"),
        (asyncpg.DeadlockDetectedError, Contention, "contention"),
        (asyncpg.LockNotAvailableError, Contention, "contention"),
        (asyncpg.DiskFullError, Unavailable, "database_full"),
        (asyncpg.OutOfMemoryError, Unavailable, "database_full"),
        (asyncpg.TooManyConnectionsError, Unavailable, "database_unavailable"),
        (asyncpg.AdminShutdownError, Unavailable, "database_unavailable"),
        (asyncpg.ReadOnlySQLTransactionError, Unavailable, "database_unavailable"),
        (asyncpg.TargetServerAttributeNotMatched, Unavailable, "database_unavailable"),
        (ConnectionResetError, Unavailable, "database_unavailable"),
    ],
)
async def test_what_the_database_says_has_an_answer(
    linked: Database, raised: type[Exception], kind: type[Unavailable], code: str
) -> None:
    with pytest.raises(kind) as caught:
        async with linked.transaction("test"):
            raise raised("said so")
    assert caught.value.status == 503 and caught.value.code == code
    await all_at_once(linked)


async def test_a_server_that_takes_no_writes_loses_all_its_connections(linked: Database) -> None:
    await linked.warm_up()
    before = await pids(linked)
    with pytest.raises(Unavailable):
        async with linked.transaction("test") as connection:
            await connection.execute("set local transaction_read_only = on")
            await connection.execute("insert into tenants (slug) values ('never')")
    assert not before & await pids(linked)


async def pids(db: Database) -> set[int]:
    return {await db.fetchval(pool, "select pg_backend_pid()") for pool in ("engine", "vital", "app")}


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pool_that_is_used_up_says_so_soon_and_heartbeats_have_their_own(
    linked: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POOL_SECONDS", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(linked.transaction("test"))
        with pytest.raises(Unavailable) as caught:
            await linked.fetchval("engine", "select 1")
        assert (caught.value.code, caught.value.headers) == ("database_busy", {"retry-after": "1"})
        assert await linked.fetchval("vital", "select 1") == 1
    await all_at_once(linked)


async def test_a_worker_is_served_while_every_call_waits(
    database_url: str, cluster: Cluster, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One vital connection is enough for all that a worker says, also for a failure whose retry must be looked up."""
    monkeypatch.setattr(module, "_VITAL", 1)
    monkeypatch.setattr(module, "_POOL_SECONDS", 0.5)
    node = Node(Settings.load({}, home=tmp_path, database_url=database_url, database_connections=2))
    await node.start(loops=False)
    try:
        worker, client = Api(node, cluster.keys["worker_key"]), Api(node, cluster.keys["key"])
        job = await client.post("/v1/jobs", {"target": {"kind": "process", "command": ["true"]}})
        worker_id = (await worker.post("/v1/worker/register", {"name": "w", "slots": 2, "targets": ["process"]}))[
            "worker_id"
        ]
        node.authenticator._known = {k: (0.0, who) for k, (_, who) in node.authenticator._known.items()}
        async with contextlib.AsyncExitStack() as stack:
            for pool in ("engine", "engine", "app", "app"):
                await stack.enter_async_context(node.db._borrowed(pool))
            node.specs._known.clear()
            opened = poll_opened(node)
            claim = asyncio.create_task(worker.post(f"/v1/worker/{worker_id}/claim", {"slots": 1, "wait": 30}))
            await opened.wait()
            while not claim.done():
                await node.dispatcher.run_once()
                await asyncio.sleep(0.01)
            [run] = (await claim)["runs"]
            assert run["job_id"] == job["id"]
            node.specs._known.clear()
            ends = [{k: run[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "failed"}]
            told = await worker.post(f"/v1/worker/{worker_id}/report", {"finished": ends, "running": []})
            assert len(told["accepted"]) == 1
            refused = await client.call("GET", "/v1/workers", expect=503)
            assert refused["code"] == "database_busy"
    finally:
        await node.stop()


# ── settings that change, databases that start late ──────────────────────────────────────────────────────────────


async def test_a_login_that_forgets_is_refused_even_if_it_began_to_later(cluster: Cluster) -> None:
    name = await cluster.clone()
    try:
        db = Database(cluster.url(name), size=1)
        await db.open()
        for setting in ("off", "local"):
            await cluster._execute(f"alter role tocsin in database {name} set synchronous_commit = {setting}")
            assert await db.fetchval("engine", "select 1") == 1  # a session that began before keeps its promise
            await db._drop_connections()
            with pytest.raises(Unavailable, match=f"synchronous_commit={setting}"):
                await db.fetchval("engine", "select 1")
            with pytest.raises(SetupError, match=f"synchronous_commit={setting}"):
                await Database(cluster.url(name), size=1).open()
            await cluster._execute(f"alter role tocsin in database {name} reset synchronous_commit")
            assert await db.fetchval("engine", "select 1") == 1
        await db.close()
    finally:
        await cluster.drop(name)


async def test_a_database_that_is_late_is_waited_for(cluster: Cluster, database_url: str) -> None:
    scissors = Scissors(cluster)
    await scissors.open()
    url = scissors.url(database_url)
    scissors.close()
    with pytest.raises(SetupError, match="cannot connect"):
        await Database(url, size=1).open()
    db = Database(url, size=1)
    opening = asyncio.create_task(db.open(patience=20))
    hung_up = asyncio.Event()

    def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        hung_up.set()

    starting = await asyncio.start_server(hang_up, "127.0.0.1", scissors.port)
    await asyncio.wait_for(hung_up.wait(), PATIENCE)
    assert not opening.done()
    starting.close()
    await scissors.open(scissors.port)
    await asyncio.wait_for(opening, PATIENCE)
    assert await db.fetchval("engine", "select 1") == 1
    await db.close()
    scissors.close()


async def test_an_old_primary_is_refused(database_url: str) -> None:
    timelines = iter((3, 3, 2, 4))

    async def examine(_connection: Any) -> int:
        return next(timelines)

    moves: list[int] = []

    async def moved() -> None:
        moves.append(1)

    found = Primary(database_url, examine, moved)
    for _ in range(2):
        (await found.connect({}, 5)).terminate()
    with pytest.raises(Unavailable, match="timeline 2, but we have written to timeline 3"):
        await found.connect({}, 5)
    assert not moves
    (await found.connect({}, 5)).terminate()
    assert moves == [1]


async def test_a_silent_host_does_not_keep_the_others_from_being_asked(
    database_url: str, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary, "CONNECT_SECONDS", 2.0)
    silent = await asyncio.start_server(lambda r, w: asyncio.Event().wait(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    url = by(link, database_url).replace("@", f"@127.0.0.1:{port},")
    db = Database(url, size=1)
    await db.open()
    assert await db.fetchval("engine", "select 1") == 1
    assert db._primary._host == Host("127.0.0.1", link.port)
    await db.look_around()
    await db.close()
    silent.close()


# ── commits whose outcome nobody knows ───────────────────────────────────────────────────────────────────────────


class Scissors:
    """A way to the database that is cut at the next COMMIT: before it gets there, or when it has been answered."""

    def __init__(self, cluster: Cluster) -> None:
        self._path = str(cluster.home / "run" / ".s.PGSQL.5432")
        self.cut: str | None = None
        self.cuts = 0
        self.port = 0

    async def open(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def url(self, url: str) -> str:
        """The same database by this way."""
        return _by(self.port, url)

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        back = asyncio.create_task(_carry(far_reader, writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.cut and b"commit\n" in data:
                    how, self.cut = self.cut, None
                    self.cuts += 1
                    back.cancel()
                    await asyncio.wait([back])
                    if how == "after":
                        far_writer.write(data)
                        await far_reader.readuntil(b"COMMIT\0")
                    break
                far_writer.write(data)
        for one in (writer, far_writer):
            one.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_cut_off_is_unknown_and_the_repeat_is_safe(
    cluster: Cluster, database_url: str, tmp_path: Any, when: str
) -> None:
    scissors = Scissors(cluster)
    await scissors.open()
    node = Node(Settings.load({}, home=tmp_path, database_url=scissors.url(database_url)))
    await node.start(loops=False)
    api = Api(node, cluster.keys["key"])
    job = {"name": f"cut-{when}", "target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}}
    try:
        await api.get("/v1/jobs")
        for path, body in (("/v1/jobs", job), ("/v1/jobs/{id}/runs", {}), ("/v1/jobs/{id}/pause", {})):
            made = [] if path == "/v1/jobs" else (await api.get("/v1/jobs"))["items"]
            where = path.replace("{id}", made[0]["id"]) if made else path
            wish = {"idempotency-key": f"{when}{path}"}
            scissors.cut = when
            said = await api.call("POST", where, json=body, headers=wish, expect=503)
            assert said["code"] == OutcomeUnknown.default_code, path
            again = await api.http.post(where, json=body, headers=wish)
            assert again.is_success, again.text
            assert ("idempotent-replayed" in again.headers) == (when == "after"), path
        [stored] = (await api.get("/v1/jobs"))["items"]
        assert (stored["name"], stored["state"]) == (job["name"], "paused")
        assert len((await api.get(f"/v1/jobs/{stored['id']}/runs"))["items"]) == 1
        assert scissors.cuts == 3
    finally:
        await node.stop()
        scissors.close()
