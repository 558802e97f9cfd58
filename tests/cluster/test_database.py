"""A real PostgreSQL in real trouble: restarted under a node, frozen, without writes, without fsync, without room."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE
from tests.conftest import Api, Cluster
from tocsin.errors import SetupError
from tocsin.node.assemble import Node
from tocsin.settings import Settings
from tocsin.store import db as module
from tocsin.store.db import Database

from .cluster import until
from .standby import Postgres, Servers

PROCESS = {"kind": "process", "command": ["true"]}


@pytest.fixture(scope="module")
def own(cluster: Cluster) -> Iterator[Postgres]:
    with Servers(cluster) as servers:
        yield servers.copy("own")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all nodes on it have their objects."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
async def api(own: Postgres, cluster: Cluster, home: Path) -> AsyncIterator[Api]:
    """A whole node on it, all loops turning."""
    node = Node(Settings.load({}, home=home, database_url=own.url()))
    await node.start()
    yield Api(node, cluster.keys["key"])
    await node.stop()


class Hand:
    """A worker by hand that gets a run through, whatever stands in its way."""

    def __init__(self, api: Api, key: str) -> None:
        self._client, self._api = api, Api(api.node, key)

    async def _insist(self, path: str, body: Any, fits: Any = lambda answer: answer) -> Any:
        async def ask() -> Any:
            reply = await self._api.http.post(path, json=body)
            return fits(reply.json()) if reply.is_success else None

        return await until(f"{path} is answered", ask)

    async def one_run(self) -> None:
        """Submit, claim and report."""

        async def submit() -> Any:
            reply = await self._client.http.post("/v1/jobs", json={"target": PROCESS})
            return reply.json()["id"] if reply.is_success else None

        job_id = await until("a job is stored", submit)
        body = {"name": "by-hand", "slots": 8, "targets": ["process"]}
        worker = (await self._insist("/v1/worker/register", body))["worker_id"]
        asked = {"slots": 8, "wait": 2}

        def mine(answer: Any) -> list[Any]:
            return [run for run in answer["runs"] if run["job_id"] == job_id]

        [run] = await self._insist(f"/v1/worker/{worker}/claim", asked, mine)
        end = {k: run[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "succeeded"}
        assert (await self._insist(f"/v1/worker/{worker}/report", {"finished": [end]}))["accepted"]


async def status(api: Api, path: str = "/readyz") -> int:
    return (await api.http.get(path)).status_code


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGINT])
async def test_a_node_outlives_a_restart(api: Api, own: Postgres, cluster: Cluster, how: signal.Signals) -> None:
    hand = Hand(api, cluster.keys["worker_key"])
    await hand.one_run()
    listener = api.node.whisper._listener
    await asyncio.to_thread(own.stop, how)
    refused = await api.call("POST", "/v1/jobs", json={"target": PROCESS}, expect=503)
    assert refused["code"] == "database_unavailable"
    assert await status(api) == 503 and await status(api, "/healthz") == 200
    own.start()
    await hand.one_run()

    async def listens() -> bool:
        now = api.node.whisper._listener
        return now is not None and now is not listener and not now.is_closed()

    await until("hints are listened to again", listens)
    assert await status(api) == 200


async def test_a_frozen_server_costs_a_moment_not_the_pool(
    api: Api, own: Postgres, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(api, cluster.keys["worker_key"])
    await hand.one_run()
    monkeypatch.setitem(module._TERMS, "vital", module._Terms("engine", 1))
    await api.node.db._drop_connections()
    await api.node.db.warm_up()
    own.signal_all(signal.SIGSTOP)
    try:
        calls = [api.node.db.read_clock() for _ in range(module._VITAL)]
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
    finally:
        own.signal_all(signal.SIGCONT)
    assert all(isinstance(answer, Exception) for answer in answers)
    await hand.one_run()


async def test_a_primary_without_writes_is_no_primary(api: Api, own: Postgres, cluster: Cluster) -> None:
    own.configure(default_transaction_read_only="on")
    try:

        async def refuses() -> bool:
            reply = await api.http.post("/v1/jobs", json={"target": PROCESS})
            assert reply.status_code in (201, 503), reply.text  # the new setting takes a moment
            return reply.status_code == 503

        await until("writes are refused", refuses)
    finally:
        own.configure(default_transaction_read_only="off")
    await Hand(api, cluster.keys["worker_key"]).one_run()


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_a_server_that_would_forget_is_refused(own: Postgres, setting: str) -> None:
    own.configure(**{setting: "off"})
    try:
        own.wait_for(f"current_setting('{setting}') = 'off'", "has the setting")
        with pytest.raises(SetupError, match=f"{setting}=off: what we acknowledge would not survive"):
            await Database(own.url(), size=1).open()
    finally:
        own.configure(**{setting: "on"})
    own.wait_for(f"current_setting('{setting}') = 'on'", "has the setting")


async def test_a_server_that_is_still_starting_is_waited_for(own: Postgres) -> None:
    own.stop(signal.SIGQUIT)
    db = Database(own.url(), size=1)
    opening = asyncio.create_task(db.open(patience=20))
    await asyncio.sleep(0)
    own.start()
    await asyncio.wait_for(opening, PATIENCE)
    await db.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small file system")
async def test_a_full_disk_refuses_writes_serves_reads_and_heals(own: Postgres, cluster: Cluster, home: Path) -> None:
    room = own.data.parent / "room"
    room.mkdir(mode=0o755)
    own.stop()
    own.start(room=room)
    own.query(f"create tablespace small location '{room}'")
    own.query("alter table tocsin.jobs set tablespace small", "tocsin")
    own.query("create table public.filler (t text) tablespace small", "tocsin")
    node = Node(Settings.load({}, home=home, database_url=own.url()))
    await node.start()
    api = Api(node, cluster.keys["key"])
    big = {"target": PROCESS | {"stdin": secrets.token_hex(30_000)}, "schedule": {"manual": True}}
    try:
        job = await api.post("/v1/jobs", big)
        with pytest.raises(AssertionError, match="No space left on device"):
            own.query(
                "insert into public.filler select repeat(md5(n::text), 60) from generate_series(1, 1e6) n", "tocsin"
            )
        for _ in range(3):
            refused = await api.http.post("/v1/jobs", json=big)
            assert (refused.status_code, refused.json()["code"]) == (503, "database_full"), refused.text
            assert refused.headers["retry-after"] == "5"
        assert (await api.get(f"/v1/jobs/{job['id']}"))["id"] == job["id"]
        assert job["id"] in [found["id"] for found in (await api.get("/v1/jobs"))["items"]]
        own.query("drop table public.filler", "tocsin")

        async def stores() -> bool:
            return (await api.http.post("/v1/jobs", json=big)).is_success

        await until("there is room again", stores)
        await Hand(api, cluster.keys["worker_key"]).one_run()
    finally:
        await node.stop()
