"""Following a log: lines as they are stored, on any node, until the run ends; and what a follower may cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests import PATIENCE
from tests.flow.kit import Scene, WorkerHand, told
from tocsin.client import Event
from tocsin.client.core import Call, Retries
from tocsin.client.stream import Stream
from tocsin.errors import Unavailable
from tocsin.flow import logs
from tocsin.model.ids import new_id
from tocsin.node import tails as module
from tocsin.node.assemble import Node
from tocsin.node.server.app import build
from tocsin.node.server.protocol import HttpServer, Reply, Request
from tocsin.node.server.routes import logs as routes
from tocsin.settings import Settings

Run = dict[str, Any]


class Tail:
    """A follower without a socket: what is not read is not asked for."""

    def __init__(self, reply: Reply) -> None:
        assert reply.stream is not None and reply.media_type == "text/event-stream"
        self.parts = reply.stream
        self._stream = Stream(Call("GET", "", json.loads), Retries())
        self._whole: list[Event] = []

    async def event(self) -> Event:
        while not self._whole:
            self._whole += self._stream.feed(await asyncio.wait_for(anext(self.parts), PATIENCE))
        return self._whole.pop(0)

    async def texts(self, count: int) -> list[str]:
        return [(await self.event()).data["text"] for _ in range(count)]


async def ask(node: Node, key: str, run: Run, query: str = "", **headers: str) -> Reply:
    path = f"/v1/runs/{run['run_id']}/logs/stream"
    return await build(node)(Request("GET", path, query.encode(), {"authorization": f"Bearer {key}", **headers}))


@asynccontextmanager
async def following(node: Node, key: str, run: Run, query: str = "", **headers: str) -> AsyncIterator[Tail]:
    tail = Tail(await ask(node, key, run, query, **headers))
    try:
        yield tail
    finally:
        await tail.parts.aclose()


@pytest.fixture
async def scene(scene: Scene) -> Scene:
    """Of the still node only the tails turn."""
    scene.node.tails.start()
    return scene


@pytest.fixture
async def worker(scene: Scene, worker_key: str) -> WorkerHand:
    return await WorkerHand.register(scene.node, worker_key)


async def held(scene: Scene, worker: WorkerHand) -> Run:
    [key] = await scene.taken(worker.id)
    return {"run_id": key[0], "attempt": key[1], "fence": key[2]}


@pytest.fixture
async def run(scene: Scene, worker: WorkerHand) -> Run:
    await scene.ask(await scene.job())
    return await held(scene, worker)


def chunk(run: Run, offset: int, *texts: str, stream: str = "stdout") -> Run:
    return run | {"offset": offset, "lines": [[1.5, stream, "info", text] for text in texts]}


async def test_lines_come_as_they_are_stored_until_the_run_ends(scene: Scene, worker: WorkerHand, run: Run) -> None:
    await worker.ship(chunk(run, 0, "before"))
    async with following(scene.node, scene.api.key, run) as tail:
        assert await tail.texts(1) == ["before"]
        for i in range(1, 4):
            await worker.ship(chunk(run, i, f"line {i}"))
            found = await tail.event()
            assert (found.kind, found.id, found.data["text"]) == ("line", f"1.{i + 1}", f"line {i}")
        await worker.ship(chunk(run, 4, "last"))
        await worker.report(finished=[run | {"outcome": "succeeded"}])
        assert await tail.texts(1) == ["last"]
        over = await tail.event()
        assert (over.kind, over.data["state"]) == ("over", "succeeded")
    assert not scene.node.tails._tailers and not scene.node.tails._followed


async def test_another_node_finds_what_was_stored_here(
    scene: Scene, worker: WorkerHand, run: Run, settings: Settings
) -> None:
    other = Node(settings)
    await other.start(loops=False)
    other.tails.start()
    try:
        async with following(other, scene.api.key, run) as tail:
            for i in range(3):
                await worker.ship(chunk(run, i, f"line {i}"))
                assert await tail.texts(1) == [f"line {i}"]
    finally:
        await other.stop()


async def test_attempts_follow_each_other_and_a_place_is_taken_up_again(
    scene: Scene, worker: WorkerHand, run: Run
) -> None:
    await worker.ship(chunk(run, 0, "a", "b"))
    await worker.report(finished=[run | {"outcome": "failed"}])
    async with following(scene.node, scene.api.key, run) as tail:
        assert await tail.texts(2) == ["a", "b"]
        await scene.wake(run["run_id"])
        again = await held(scene, worker)
        await worker.ship(chunk(again, 0, "c", stream="stderr"), chunk(again, 1, "d"))
        assert await tail.texts(2) == ["c", "d"]
    for query, headers, wanted in (
        ("after=1.1", {}, ["b", "c", "d"]),
        ("after=1.1", {"last-event-id": "2.1"}, ["d"]),
        ("stream=stderr", {}, ["c"]),
        ("attempt=1", {}, ["a", "b"]),
    ):
        async with following(scene.node, scene.api.key, run, query, **headers) as tail:
            assert await tail.texts(len(wanted)) == wanted
            if query == "attempt=1":
                assert (await tail.event()).data["state"] == "retried"


async def test_a_follower_that_does_not_read_holds_one_page_and_misses_nothing(
    scene: Scene, worker: WorkerHand, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = logs.read

    async def counted(*args: Any) -> logs.Lines:
        page = await read(*args)
        reads.append(sum(len(line["text"]) for line in page.items))
        return page

    monkeypatch.setattr(logs, "read", counted)
    async with following(scene.node, scene.api.key, run) as tail:
        await worker.ship(chunk(run, 0, "first"))
        assert await tail.texts(1) == ["first"]
        for i in range(40):
            await worker.ship(chunk(run, 1 + i * 10, *["x" * 10_000] * 10))
        assert len(reads) == 1  # four megabytes later nothing more was read for it
        assert await tail.texts(400) == ["x" * 10_000] * 400
    assert max(reads) < 300_000


async def test_a_run_that_has_ended_is_looked_at_once_however_long_its_follower_does_not_read(
    scene: Scene, worker: WorkerHand, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = logs.look

    async def counted(db: Any, objects: Any, runs: Any) -> list[logs.Watched | None]:
        looks.append(len(runs))
        return await look(db, objects, runs)

    await worker.ship(chunk(run, 0, "first"))
    await worker.report(finished=[told(run)])
    monkeypatch.setattr(logs, "look", counted)
    stream = scene.node.tails.stream(await scene.who(), run["run_id"], None, None, None)
    await anext(stream)
    await scene.node.tails.run_once()
    assert looks
    looks.clear()
    for _ in range(3):
        await scene.node.tails.run_once()
    assert not looks
    assert b"first" in await anext(stream) and b"over" in await anext(stream)
    await stream.aclose()


async def test_a_run_whose_lines_storage_refuses_keeps_no_other_follower_waiting(
    scene: Scene, worker: WorkerHand, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.ship(chunk(run, 0, "first"))
    await worker.report(finished=[told(run)])
    gone = new_id(await scene.now())

    async def refused(db: Any, objects: Any, tenant_id: int, run_id: str, watched: Any) -> Any:
        if run_id == gone:
            raise Unavailable("object storage refused a read")
        return watched

    monkeypatch.setattr(logs, "_with_unlisted", refused)
    who = await scene.who()
    streams = [scene.node.tails.stream(who, run_id, None, None, None) for run_id in (gone, run["run_id"])]
    for stream in streams:
        await anext(stream)
    await scene.node.tails.run_once()
    assert b"unavailable" in await anext(streams[0])
    assert b"first" in await anext(streams[1])
    for stream in streams:
        await stream.aclose()


async def test_who_may_follow(scene: Scene, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    for way in ("stream", "download"):
        await scene.api.get(f"/v1/runs/{run['run_id']}/logs/{way}", headers={"tocsin-tenant": "other"}, expect=404)
    for bad in ("after=x", "after=1", "after=1.²", "attempt=-1", "what=1"):
        await scene.api.get(f"/v1/runs/{run['run_id']}/logs/stream?{bad}", expect=400)
    monkeypatch.setattr(module, "_MOST_PER_TENANT", 1)
    async with following(scene.node, scene.api.key, run) as tail:
        await anext(tail.parts)
        problem = await scene.api.get(f"/v1/runs/{run['run_id']}/logs/stream", expect=429)
        assert problem["code"] == "too_many_streams"


async def test_a_stream_ends_with_its_node_and_with_its_key(scene: Scene, run: Run) -> None:
    made = await scene.api.post("/v1/keys", {"name": "short", "role": "viewer"})
    async with following(scene.node, made["key"], run) as tail:
        await anext(tail.parts)
        await scene.api.delete(f"/v1/keys/{made['id']}")
        await scene.node.doorkeeper.run_once()
        assert b"unauthorized" in await asyncio.wait_for(anext(tail.parts), PATIENCE)
    async with following(scene.node, scene.api.key, run) as tail:
        await anext(tail.parts)
        scene.node.tails.end_streams()
        assert b"leaving" in await asyncio.wait_for(anext(tail.parts), PATIENCE)


async def test_a_log_is_downloaded_whole_as_text_that_does_no_harm_or_as_documents(
    scene: Scene, worker: WorkerHand, run: Run
) -> None:
    evil = "a\x1b]52;c;Zm9v\x07\x9b2J\u202eb\r"
    lines = [evil, 'said\x1f{"logger":"db","fields":{"n":1}}', *(f"line {i}" for i in range(1200))]
    for start in range(0, len(lines), 100):
        await worker.ship(chunk(run, start, *lines[start : start + 100]))

    async def download(query: str) -> tuple[Reply, bytes]:
        path = f"/v1/runs/{run['run_id']}/logs/download"
        headers = {"authorization": f"Bearer {scene.api.key}"}
        reply = await build(scene.node)(Request("GET", path, query.encode(), headers))
        assert reply.stream is not None and reply.headers is not None
        return reply, b"".join([part async for part in reply.stream])

    reply, body = await download("")
    assert body.decode().splitlines() == [r"a\x1b]52;c;Zm9v\x07\u009b2J\u202eb\x0d", "said", *lines[2:]]
    assert reply.headers is not None and "attachment" in reply.headers["content-disposition"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    documents = [json.loads(line) for line in (await download("format=ndjson"))[1].splitlines()]
    assert [d["seq"] for d in documents] == list(range(1, 1203)) and documents[0]["text"] == evil
    assert (documents[1]["text"], documents[1]["logger"], documents[1]["fields"]) == ("said", "db", {"n": 1})
    await scene.api.get(f"/v1/runs/{run['run_id']}/logs/download?format=pdf", expect=422)


async def test_a_download_ends_with_its_key_and_is_seen_to_be_cut(
    scene: Scene, worker: WorkerHand, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_PAGE", 10)
    await worker.ship(chunk(run, 0, *(f"line {i}" for i in range(100))))
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    living = scene.node.authenticator.living

    async def revoked(keys: set[str]) -> set[str]:
        await scene.api.delete(f"/v1/keys/{made['id']}")
        return await living(keys)

    server = HttpServer(build(scene.node))
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}/v1/runs/{run['run_id']}/logs/download"
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {made['key']}"}) as http:
        assert (await http.get(url)).text.count("line") == 100
        monkeypatch.setattr(scene.node.authenticator, "living", revoked)
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(url)
    await server.stop(grace=1.0)
