"""logs: lines arrive once, in order, in object storage and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from tests.flow.kit import Scene, WorkerHand
from tests.flow.test_reap import lapse
from tocsin.flow import logs


@pytest.fixture
async def held(scene: Scene, worker_key: str) -> tuple[WorkerHand, dict[str, Any]]:
    """A worker and the run it holds."""
    worker = await WorkerHand.register(scene.node, worker_key)
    await scene.ask(await scene.job())
    [key] = await scene.taken(worker.id)
    return worker, {"run_id": key[0], "attempt": key[1], "fence": key[2]}


def chunk(run: dict[str, Any], offset: int, *texts: str, stream: str = "stdout", ts: float = 1.5) -> dict[str, Any]:
    return run | {"offset": offset, "lines": [[ts, stream, "info", text] for text in texts]}


async def texts(scene: Scene, run: dict[str, Any], query: str = "") -> list[str]:
    page = await scene.api.get(f"/v1/runs/{run['run_id']}/logs{query}")
    return [line["text"] for line in page["items"]]


Held = tuple[WorkerHand, dict[str, Any]]


class Gate:
    """Where somebody waits until the test lets them on."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def pass_through(self) -> None:
        self.reached.set()
        await self.open.wait()


async def test_lines_come_back_in_order_with_their_stream_and_time(scene: Scene, held: Held) -> None:
    worker, run = held
    await worker.ship(chunk(run, 0, "a", "b"))
    await worker.ship(chunk(run, 2, "c", stream="stderr"))
    page = await scene.api.get(f"/v1/runs/{run['run_id']}/logs")
    assert [(line["seq"], line["stream"], line["text"]) for line in page["items"]] == [
        (1, "stdout", "a"),
        (2, "stdout", "b"),
        (3, "stderr", "c"),
    ]
    assert page["items"][0]["ts"] == "1970-01-01T00:00:01.500000Z"
    assert await texts(scene, run, "?stream=stderr") == ["c"]


async def test_a_repeat_is_harmless_and_an_overlap_adds_only_what_is_new(scene: Scene, held: Held) -> None:
    worker, run = held
    for _ in range(3):
        await worker.ship(chunk(run, 0, "a", "b"))
    await worker.ship(chunk(run, 1, "b", "c"))
    await asyncio.gather(*(worker.ship(chunk(run, 3, "d")) for _ in range(4)))
    assert await texts(scene, run) == ["a", "b", "c", "d"]


async def test_what_a_slow_shipment_lacked_is_stored_by_its_repeat(
    scene: Scene, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, run = held
    first, second = Gate(), Gate()
    gates, put = [first, second], scene.node.objects.put

    async def slow(key: str, body: bytes, **how: Any) -> None:
        if gates:
            await gates.pop(0).pass_through()
        await put(key, body, **how)

    monkeypatch.setattr(scene.node.objects, "put", slow)
    given_up = asyncio.create_task(worker.ship(chunk(run, 0, "a", "b")))
    await first.reached.wait()
    repeated = asyncio.create_task(worker.ship(chunk(run, 0, "a", "b", "c"), chunk(run, 3, "d")))
    await second.reached.wait()
    for gate, shipment in ((first, given_up), (second, repeated)):
        gate.open.set()
        await shipment
    await worker.ship(chunk(run, 4, "e"))
    assert await texts(scene, run) == ["a", "b", "c", "d", "e"]


async def test_a_shipment_that_always_comes_second_is_to_be_repeated(
    scene: Scene, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, run = held
    put, offset = scene.node.objects.put, iter(range(9))

    async def overtaken(key: str, body: bytes, **how: Any) -> None:
        monkeypatch.setattr(scene.node.objects, "put", put)
        await worker.ship(chunk(run, (at := next(offset)), str(at)))
        monkeypatch.setattr(scene.node.objects, "put", overtaken)
        await put(key, body, **how)

    monkeypatch.setattr(scene.node.objects, "put", overtaken)
    assert (await worker.ship(chunk(run, 0, *"0123456789"), expect=503))["code"] == "contention"
    monkeypatch.setattr(scene.node.objects, "put", put)
    await worker.ship(chunk(run, 0, *"0123456789"))
    assert await texts(scene, run) == list("0123456789")


async def test_a_gap_is_refused_with_what_was_expected(scene: Scene, held: Held) -> None:
    worker, run = held
    await worker.ship(chunk(run, 0, "a"))
    problem = await worker.ship(chunk(run, 5, "f"), expect=409)
    assert (problem["code"], problem["expected_offset"], problem["run_id"]) == ("log_gap", 1, run["run_id"])
    assert await texts(scene, run) == ["a"]


async def test_two_chunks_of_one_run_may_travel_together(scene: Scene, held: Held) -> None:
    worker, run = held
    await worker.ship(chunk(run, 0, "a", "b"), chunk(run, 2, "c"), chunk(run, 1, "b", "c", "d"))
    assert await texts(scene, run) == ["a", "b", "c", "d"]
    problem = await worker.ship(chunk(run, 4, "e"), chunk(run, 6, "g"), expect=409)
    assert (problem["code"], problem["expected_offset"]) == ("log_gap", 5)


async def test_a_stale_fence_or_a_foreign_worker_is_superseded(scene: Scene, held: Held, worker_key: str) -> None:
    worker, run = held
    other = await WorkerHand.register(scene.node, worker_key)
    for who, bad in (
        (worker, run | {"fence": run["fence"] - 1}),
        (worker, run | {"fence": 2**70}),
        (worker, run | {"attempt": 2}),
        (worker, run | {"run_id": "no-id"}),
        (other, run),
    ):
        assert (await who.ship(chunk(bad, 0, "evil"), expect=409))["code"] == "superseded"
    assert await texts(scene, run) == []
    await worker.ship(run | {"offset": -1, "lines": []}, expect=422)


async def test_lines_may_follow_the_end_that_their_worker_has_told(scene: Scene, held: Held, worker_key: str) -> None:
    worker, run = held
    other = await WorkerHand.register(scene.node, worker_key)
    await worker.ship(chunk(run, 0, "a"))
    await worker.report(finished=[run | {"outcome": "succeeded"}])
    for _ in range(2):
        await worker.ship(chunk(run, 1, "late"))
    for who, bad in ((worker, run | {"fence": run["fence"] - 1}), (worker, run | {"attempt": 2}), (other, run)):
        assert (await who.ship(chunk(bad, 2, "evil"), expect=409))["code"] == "superseded"
    assert await texts(scene, run) == ["a", "late"]


async def test_lines_may_follow_an_end_when_their_worker_is_gone(scene: Scene, held: Held) -> None:
    worker, run = held
    await scene.ask(await scene.job())
    [key] = await scene.taken(worker.id)
    lost = {"run_id": key[0], "attempt": key[1], "fence": key[2]}
    await worker.report(finished=[run | {"outcome": "succeeded"}])
    await lapse(scene, worker)
    await worker.ship(chunk(run, 0, "late"))
    assert await texts(scene, run) == ["late"]
    assert (await worker.ship(chunk(lost, 0, "of a lost attempt"), expect=409))["code"] == "superseded"
    stranger = WorkerHand(await scene.api.with_key("worker"), worker.id)
    assert (await stranger.ship(chunk(run, 1, "evil"), expect=404))["code"] == "unknown_worker"


async def test_reading_goes_on_where_the_last_page_ended(scene: Scene, held: Held) -> None:
    worker, run = held
    lines = [f"line {i}" for i in range(250)]
    for start in range(0, 250, 3):  # more chunks than one page reads
        await worker.ship(chunk(run, start, *lines[start : start + 3]))
    found, after = [], 0
    while after is not None:
        page = await scene.api.get(f"/v1/runs/{run['run_id']}/logs?limit=40&after={after}")
        found += [line["text"] for line in page["items"]]
        after = page["next_after"]
    assert found == lines
    for bad in ("after=-1", "after=x", "after=²", "attempt=99999999999999", "limit=0", "limit=501"):
        await scene.api.get(f"/v1/runs/{run['run_id']}/logs?{bad}", expect=400)


async def test_each_attempt_has_its_own_lines_and_the_latest_is_shown(scene: Scene, held: Held) -> None:
    worker, run = held
    await worker.ship(chunk(run, 0, "first try"))
    await worker.report(finished=[run | {"outcome": "failed"}])
    await scene.wake(run["run_id"])
    [key] = await scene.taken(worker.id)
    again = {"run_id": key[0], "attempt": key[1], "fence": key[2]}
    assert await texts(scene, run) == ["first try"]
    await worker.ship(chunk(again, 0, "second try"))
    assert await texts(scene, run) == ["second try"]
    assert await texts(scene, run, "?attempt=1") == ["first try"]


async def test_no_line_is_ever_in_the_database(scene: Scene, held: Held) -> None:
    worker, run = held
    canary = "canary-5e1f-do-not-store"
    await worker.ship(chunk(run, 0, canary, canary * 100))
    assert await texts(scene, run) == [canary, canary * 100]
    columns = await scene.rows(
        """select c.table_name, c.column_name from information_schema.columns c
             join information_schema.tables t using (table_schema, table_name)
            where c.table_schema = 'tocsin' and t.table_type = 'BASE TABLE'"""
    )
    assert len(columns) > 100
    for table in {c["table_name"] for c in columns}:
        assert not await scene.value(f"select count(*) from {table} t where t::text like '%{canary}%'"), table


async def test_a_line_of_any_content_and_time_can_be_read_back(scene: Scene, held: Held) -> None:
    worker, run = held
    odd = [
        [float("nan"), "stdout", "info", "nan"],
        [1e300, "stdout", "info", "late"],
        [-5.0, "s" * 99, "info", "x" * 99_999],
    ]
    body = msgspec.msgpack.encode({"chunks": [run | {"offset": 0, "lines": odd}]})
    reply = await worker.api.http.post(
        f"/v1/worker/{worker.id}/logs", content=body, headers={"content-type": "application/msgpack"}
    )
    assert reply.status_code == 200
    half = msgspec.json.encode({"chunks": [chunk(run, 3, "half SURROGATE nul \x00")]}).decode()
    reply = await worker.api.http.post(
        f"/v1/worker/{worker.id}/logs",
        content=half.replace("SURROGATE", "\\ud800"),
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 200
    found = await texts(scene, run)
    assert found[:2] == ["nan", "late"] and len(found[2]) == 65_536
    assert found[3] == "half \\ud800 nul \x00"


async def test_a_batch_is_compressed_beside_the_event_loop_by_its_size_not_by_its_lines(
    scene: Scene, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, run = held
    threads: list[str] = []
    write = logs.write

    def noted(parts: Any) -> Any:
        threads.append(threading.current_thread().name.partition("_")[0])
        return write(parts)

    monkeypatch.setattr(logs, "write", noted)
    await worker.ship(chunk(run, 0, "short"))
    await worker.ship(chunk(run, 1, *["x" * 16_000] * 60))
    await worker.ship(chunk(run, 61, *[""] * 600))
    assert threads == ["MainThread", "tocsin-logs", "tocsin-logs"]
