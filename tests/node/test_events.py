"""Live events over HTTP: who hears what, how a stream is taken up again, and what a listener may cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests import PATIENCE
from tests.cluster.cluster import Site
from tests.conftest import Api, Cluster
from tests.flow.kit import PROCESS, Scene
from tocsin.client import AsyncClient, Event, Unreachable
from tocsin.client.core import Call, Retries
from tocsin.client.stream import Stream
from tocsin.flow import events
from tocsin.node import events as module
from tocsin.node.assemble import Node
from tocsin.node.server import routes, worker_routes
from tocsin.node.server.app import build
from tocsin.node.server.openapi import document
from tocsin.node.server.protocol import Reply, Request
from tocsin.settings import Settings


class Heard:
    """A stream of one node, read without a socket: what is not read is not asked for."""

    def __init__(self, reply: Reply) -> None:
        assert reply.stream is not None and reply.media_type == "text/event-stream"
        self.parts = reply.stream
        self.raw: list[bytes] = []
        self.last_id = ""
        self._stream = Stream(Call("GET", "/v1/events", json.loads), Retries())
        self._whole: list[Event] = []

    async def part(self) -> bytes:
        self.raw.append(await asyncio.wait_for(anext(self.parts), PATIENCE))
        return self.raw[-1]

    async def event(self) -> Event:
        while not self._whole:
            self._whole += self._stream.feed(await self.part())
        event = self._whole.pop(0)
        self.last_id = event.id
        return event

    async def type(self) -> str:
        return str((await self.event()).data["type"])

    async def until(self, id_: str) -> list[str]:
        """The types of all events up to the first about this."""
        types = []
        while True:
            event = await self.event()
            types.append(event.data["type"])
            if event.data.get("id") == id_:
                return types

    async def close(self) -> None:
        await self.parts.aclose()


async def ask(node: Node, key: str, query: str = "", **headers: str) -> Reply:
    request = Request("GET", "/v1/events", query.encode(), {"authorization": f"Bearer {key}", **headers})
    return await build(node)(request)


@asynccontextmanager
async def listening(node: Node, key: str, query: str = "", **headers: str) -> AsyncIterator[Heard]:
    heard = Heard(await ask(node, key, query, **headers))
    try:
        yield heard
    finally:
        await heard.close()


@asynccontextmanager
async def another_node(settings: Settings) -> AsyncIterator[Node]:
    """A second node on the same database, of which only the events turn."""
    node = Node(settings)
    await node.start(loops=False)
    node.events.start()
    try:
        yield node
    finally:
        await node.stop()


@pytest.fixture
async def scene(scene: Scene) -> Scene:
    """Of the still node only the events turn."""
    scene.node.events.start()
    return scene


# ── hearing ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_changes_come_as_they_are_committed(scene: Scene) -> None:
    async with listening(scene.node, scene.api.key) as heard:
        assert await heard.type() == "open"
        job = await scene.job(name="nightly")
        [run_id] = await scene.ask(job)
        made, ready = await heard.event(), await heard.event()
        await scene.take()
        running = await heard.event()
    assert (made.kind, made.data["type"], made.data["name"]) == ("job", "job.created", "nightly")
    assert (ready.kind, ready.data["type"], ready.data["id"]) == ("run", "run.ready", run_id)
    assert (running.data["state"], running.data["attempt"], running.data["job_id"]) == ("running", 1, job["id"])
    described = document([*routes.ROUTES, *worker_routes.ROUTES])
    schema = {"$ref": "#/components/schemas/Event", "components": described["components"]}
    for event in (made, ready, running):
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(event.data)


async def test_only_what_was_asked_for_comes(scene: Scene) -> None:
    job, other = await scene.job(), await scene.job()
    queries = ("type=job", "type=run", f"job={other['id']}")
    streams = [Heard(await ask(scene.node, scene.api.key, query)) for query in queries]
    assert [await heard.type() for heard in streams] == ["open"] * 3
    [run_id], [their_run] = await scene.ask(job), await scene.ask(other)
    last = await scene.job()
    jobs, runs, others = streams
    assert await jobs.until(last["id"]) == ["job.created"]
    assert await runs.until(their_run) == ["run.ready", "run.ready"]
    assert await others.until(their_run) == ["run.ready"]
    for heard in streams:
        await heard.close()
    assert run_id != their_run


async def test_no_tenant_hears_another(scene: Scene) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other: Api = await scene.api.with_key("viewer", "other")
    editor: Api = await scene.api.with_key("editor", "other")
    async with listening(scene.node, scene.api.key) as mine, listening(scene.node, other.key) as theirs:
        assert (await mine.type(), await theirs.type()) == ("open", "open")
        my_job, their_job = await scene.job(), await scene.job(editor)
        last = await scene.job()
        assert await theirs.until(their_job["id"]) == ["job.created"]
        assert await mine.until(last["id"]) == ["job.created"] * 2
        assert their_job["id"].encode() not in b"".join(mine.raw) and my_job["id"].encode() not in b"".join(theirs.raw)
    # A platform key that acts for the other tenant hears that one.
    async with listening(scene.node, scene.api.key, **{"tocsin-tenant": "other"}) as acting:
        assert await acting.type() == "open"
        await scene.job()
        third = await scene.job(editor)
        assert await acting.until(third["id"]) == ["job.created"]


async def test_every_turn_is_one_question_for_all_who_listen(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.node.events.stop()  # from here on the test turns it
    reads: list[int] = []
    read = events.read

    async def counted(db: Any, places: Any) -> Any:
        reads.append(len(places))
        return await read(db, places)

    monkeypatch.setattr(events, "read", counted)
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other: Api = await scene.api.with_key("viewer", "other")
    streams = [Heard(await ask(scene.node, key)) for key in [scene.api.key] * 5 + [other.key] * 5]
    for heard in streams:
        await heard.part()
    await scene.node.events.run_once()
    assert [await heard.type() for heard in streams] == ["open"] * 10
    job = await scene.job()
    await scene.node.events.run_once()
    assert [await heard.until(job["id"]) for heard in streams[:5]] == [["job.created"]] * 5
    assert reads == [2, 2], "no listener that keeps up asks for itself"
    for heard in streams:
        await heard.close()
    assert await scene.node.events.run_once() > 10, "asleep"
    assert reads == [2, 2]


# ── taking it up again ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_goes_on_at_another_node_without_a_gap_or_a_repeat(scene: Scene, settings: Settings) -> None:
    async with another_node(settings) as second:
        async with listening(scene.node, scene.api.key) as heard:
            assert await heard.type() == "open"
            job = await scene.job()
            first = await scene.ask(job, 5)
            await heard.until(first[1])
        missed = await scene.ask(job, 5)
        async with listening(second, scene.api.key, **{"last-event-id": heard.last_id}) as again:
            later = await scene.ask(job, 5)
            told = [(await again.event()).data for _ in range(13)]
        assert [event["id"] for event in told] == [*first[2:], *missed, *later]
        # The same by the address; the header goes before it, as a browser sends both when it connects again.
        async with listening(second, scene.api.key, f"after={heard.last_id}") as again:
            assert (await again.event()).data["id"] == first[2]
        header = {"last-event-id": again.last_id}
        async with listening(second, scene.api.key, f"after={heard.last_id}", **header) as again:
            assert (await again.event()).data["id"] == first[3]


async def test_who_comes_too_late_is_told_so_first(scene: Scene, settings: Settings) -> None:
    async with listening(scene.node, scene.api.key) as heard:
        assert await heard.type() == "open"
        await scene.job()
        assert await heard.type() == "job.created"
    await scene.sql.execute("update events set at = at - interval '11 minutes'")
    await events.tidy(scene.db)
    header = {"last-event-id": heard.last_id}
    async with another_node(settings) as second, listening(second, scene.api.key, **header) as again:
        assert await again.type() == "reset"
        job = await scene.job()
        assert await again.until(job["id"]) == ["job.created"]


async def test_a_heartbeat_moves_on_where_to_resume_from(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens for hours and hears nothing must not be told that it missed something."""
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.05)
    async with listening(scene.node, scene.api.key) as heard:
        opened = await heard.event()
        await scene.api.post("/v1/tenants", {"slug": "busy"})  # transactions that are nothing to this listener
        while (beat := await heard.part()).startswith(b": quiet") is False or opened.id.encode() in beat:
            pass
    stream = Stream(Call("GET", "/v1/events", json.loads), Retries())
    assert list(stream.feed(beat)) == []
    moved = stream.request().headers["Last-Event-ID"]
    await scene.sql.execute("update event_feeds set since = $1", events.EventId.parse(opened.id).position.xid)  # type: ignore[union-attr]
    async with listening(scene.node, scene.api.key, **{"last-event-id": moved}) as again:
        job = await scene.job()
        assert await again.until(job["id"]) == ["job.created"]


async def test_there_is_a_heartbeat_also_among_events_that_are_not_wanted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(module, "_TICK", 0.01)
    job = await scene.job()

    async def busy() -> None:
        while True:
            await scene.ask(job)

    async with listening(scene.node, scene.api.key, "type=job") as heard:
        opened = await heard.event()
        at_work = asyncio.create_task(busy())
        try:
            beats = [await heard.part() for _ in range(2)]
        finally:
            at_work.cancel()
    assert all(beat.startswith(b": quiet\nid: ") for beat in beats)
    assert opened.id.encode() not in beats[1] and beats[0] != beats[1], "it moves on over what was not wanted"


async def test_an_id_of_a_feed_that_is_gone_is_reset(scene: Scene) -> None:
    async with listening(scene.node, scene.api.key, "after=1-2-3-4") as heard:
        assert await heard.type() == "reset"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("after=yesterday", "invalid_event_id"),
        ("after=1-2-3", "invalid_event_id"),
        ("job=7", "invalid_id"),
        ("since=1", "unknown_parameter"),
    ],
)
async def test_bad_questions_are_refused(scene: Scene, query: str, code: str) -> None:
    reply = await ask(scene.node, scene.api.key, query)
    assert (reply.status, json.loads(reply.body)["code"], reply.stream) == (400, code, None)


# ── what a listener may cost ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_slow_listener_keeps_nothing_in_memory_and_loses_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PAGE", 2)
    job = await scene.job()
    async with listening(scene.node, scene.api.key) as slow, listening(scene.node, scene.api.key) as quick:
        assert (await slow.type(), await quick.type()) == ("open", "open")
        ids = [run_id for _ in range(8) for run_id in await scene.ask(job, 150)]
        await quick.until(ids[-1])
        largest = 0
        for run_id in ids:
            assert (await slow.event()).data["id"] == run_id
            largest = max(largest, len(slow.raw[-1]))
        assert largest < 300 * 2 * 100, "a part is one page"


async def test_a_listener_that_falls_behind_what_is_kept_is_reset(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PAGE", 2)
    async with listening(scene.node, scene.api.key) as slow, listening(scene.node, scene.api.key) as quick:
        assert (await slow.type(), await quick.type()) == ("open", "open")
        for _ in range(8):
            job = await scene.job()
            await quick.until(job["id"])
        await scene.sql.execute("update events set at = at - interval '11 minutes'")
        await events.tidy(scene.db)
        types = [await slow.type()]
        while types[-1] != "reset":
            types.append(await slow.type())
        job = await scene.job()
        assert await slow.until(job["id"]) == ["job.created"]
        assert await quick.until(job["id"]) == ["job.created"], "who kept up is not disturbed"


async def test_there_are_only_so_many_streams(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PER_TENANT", 1)
    async with listening(scene.node, scene.api.key) as heard:
        assert await heard.type() == "open"
        refused = await ask(scene.node, scene.api.key)
        assert (refused.status, json.loads(refused.body)["code"]) == (429, "too_many_streams")
        assert refused.headers is not None and "retry-after" in refused.headers
    async with listening(scene.node, scene.api.key) as heard:
        assert await heard.type() == "open"


async def test_a_stream_ends_with_its_key(scene: Scene) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    async with listening(scene.node, made["key"]) as heard, listening(scene.node, scene.api.key) as other:
        assert (await heard.type(), await other.type()) == ("open", "open")
        await scene.api.delete(f"/v1/keys/{made['id']}")
        await scene.node.doorkeeper.run_once()
        with pytest.raises(StopAsyncIteration):
            await heard.event()
        assert b"event: end\n" in heard.raw[-1] and b'"unauthorized"' in heard.raw[-1]
        job = await scene.job()
        assert await other.until(job["id"]) == ["job.created"]


async def test_a_node_that_goes_ends_its_streams_at_once(scene: Scene) -> None:
    async with listening(scene.node, scene.api.key) as heard:
        assert await heard.type() == "open"
        scene.node.events.end_streams()
        with pytest.raises(StopAsyncIteration):
            await heard.event()
        assert b'"leaving"' in heard.raw[-1]
    async with listening(scene.node, scene.api.key) as late:
        with pytest.raises(StopAsyncIteration):
            await late.event()


async def test_a_feed_that_was_lost_in_a_crash_is_opened_again(scene: Scene) -> None:
    """Both tables are unlogged: after a crash of PostgreSQL they are empty."""
    async with listening(scene.node, scene.api.key) as heard:
        assert await heard.type() == "open"
        await scene.sql.execute("truncate events, event_feeds")
        assert await heard.type() == "reset"
        job = await scene.job()
        assert await heard.until(job["id"]) == ["job.created"]


# ── real servers ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_client_hears_everything_over_a_kill_and_a_restart(
    cluster: Cluster, database_url: str, tmp_path: Path
) -> None:
    with Site(tmp_path, database_url, cluster.keys) as site:
        one, two = await site.server("one"), await site.server("two")
        async with (
            AsyncClient(one.url, cluster.keys["key"]) as listener,
            AsyncClient(two.url, cluster.keys["key"]) as maker,
        ):
            job = await maker.create_job({"target": PROCESS, "schedule": {"manual": True}})
            told = listener.events(type="run")
            assert (await anext(told)).kind == "open"
            ids = [(await maker.run_job(job["id"]))["id"]]
            assert (await anext(told)).data["id"] == ids[0]
            for end in (one.kill, one.terminate):
                end()
                ids = (await maker.run_batch(job["id"], [{}] * 20))["ids"]
                await one.ended()
                await one.start()
                ids += (await maker.run_batch(job["id"], [{}] * 20))["ids"]
                heard = [await asyncio.wait_for(anext(told), PATIENCE) for _ in range(40)]
                assert [event.data["id"] for event in heard] == ids
            one.terminate()
            assert await one.ended(5) == 0, "an open stream does not hold up the end"
            await told.aclose()  # type: ignore[attr-defined]


async def test_a_client_gives_up_on_a_server_that_never_was_there() -> None:
    async with AsyncClient("http://127.0.0.1:9", "key", retries=Retries(attempts=2, first_pause=0.01)) as client:
        with pytest.raises(Unreachable):
            await anext(client.events())
