"""search: every line that fits is found once, by whatever it is asked for, and nobody else's."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene, WorkerHand
from tocsin.clock import EPOCH, iso
from tocsin.flow import archive
from tocsin.flow import search as module
from tocsin.settings import Settings
from tocsin.store.db import connect

Run = dict[str, Any]
LONG_AGO = time.time() - 3600  # a line is looked for within a day of when it was stored
BETWEEN = iso(EPOCH + timedelta(seconds=LONG_AGO + 300))


@pytest.fixture
async def worker(scene: Scene, worker_key: str) -> WorkerHand:
    return await WorkerHand.register(scene.node, worker_key)


async def held(scene: Scene, worker: WorkerHand, **spec: Any) -> Run:
    """A run that the worker holds."""
    job = await scene.job(**spec)
    await scene.ask(job)
    [key] = await scene.taken(worker.id)
    return {"run_id": key[0], "attempt": key[1], "fence": key[2]}


def chunk(run: Run, offset: int, *texts: str, level: str = "info", ts: float = LONG_AGO) -> Run:
    return run | {"offset": offset, "lines": [[ts + i, "stdout", level, text] for i, text in enumerate(texts)]}


async def found(scene: Scene, limit: int = 50, **query: Any) -> list[str]:
    """The texts of all pages."""
    texts: list[str] = []
    asked = query | {"limit": limit}
    while True:
        page = await scene.api.get("/v1/logs/search", params=asked)
        texts += [line["text"] for line in page["items"]]
        if page["next_cursor"] is None:
            return texts
        asked["cursor"] = page["next_cursor"]


async def test_lines_are_found_by_words_phrases_and_beginnings(scene: Scene, worker: WorkerHand) -> None:
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "Payment of ORDER-4711 failed", "retrying the payment", "done"))
    assert await found(scene, q="order") == ["Payment of ORDER-4711 failed"]
    assert await found(scene, q="order-4711") == ["Payment of ORDER-4711 failed"]
    assert await found(scene, q="payment") == ["retrying the payment", "Payment of ORDER-4711 failed"]
    assert await found(scene, q='"the payment"') == ["retrying the payment"]
    assert await found(scene, q='"payment the"') == await found(scene, q="pay") == []
    assert await found(scene, q="retr* pay*") == ["retrying the payment"]
    assert len(await found(scene)) == 3
    page = await scene.api.get("/v1/logs/search?q=done")
    [line] = page["items"]
    assert (line["run_id"], line["attempt"], line["seq"], line["level"]) == (run["run_id"], 1, 3, "info")
    assert line["job_id"] == (await scene.run(run["run_id"]))["job_id"]


async def test_lines_are_found_by_whose_they_are(scene: Scene, worker: WorkerHand) -> None:
    one = await held(scene, worker, tags={"team": "a"})
    two = await held(scene, worker, tags={"team": "b"})
    await worker.ship(chunk(one, 0, "same word"), chunk(two, 0, "same word too", level="error", ts=LONG_AGO + 900))
    job = (await scene.run(one["run_id"]))["job_id"]
    assert await found(scene, q="same") == ["same word too", "same word"]
    assert await found(scene, q="same", job=job) == ["same word"]
    assert await found(scene, run=two["run_id"]) == ["same word too"]
    assert await found(scene, run=two["run_id"], job=job) == []
    assert await found(scene, level="error") == ["same word too"]
    assert await found(scene, q="same", tag="team:a") == ["same word"]
    assert await found(scene, q="same", **{"from": BETWEEN}) == ["same word too"]
    assert await found(scene, q="same", to=BETWEEN) == ["same word"]
    error = {"class": "NoMoney", "message": "none"}
    await worker.report(finished=[two | {"outcome": "failed", "error": error}])
    assert await found(scene, q="same", error_class="NoMoney") == ["same word too"]
    assert await found(scene, run=two["run_id"], error_class="NoMoney") == ["same word too"]
    assert await found(scene, error_class="Other") == []


async def test_every_line_is_found_once_whatever_the_pages(
    scene: Scene, worker: WorkerHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await held(scene, worker)
    texts = [f"number {i}" for i in range(60)]
    for start in range(0, 60, 2):  # more segments than are looked at together
        await worker.ship(chunk(run, start, *texts[start : start + 2], ts=LONG_AGO + start))
    for limit in (1, 2, 7, 60, 500):
        assert await found(scene, limit, q="number") == texts[::-1]
        assert await found(scene, limit, q="number", run=run["run_id"]) == texts
    monkeypatch.setattr(module, "_MOST_SEGMENTS", 1)
    monkeypatch.setattr(module, "_MOST_BYTES", 1)
    assert await found(scene, q="number") == texts[::-1]
    page = await scene.api.get("/v1/logs/search?q=59")
    assert len(page["items"]) == 1 and page["next_cursor"] is not None  # bounded: not all was looked at


async def test_a_word_that_is_nowhere_reads_no_lines(
    scene: Scene, worker: WorkerHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await held(scene, worker)
    for i in range(20):
        await worker.ship(chunk(run, i, f"line {i} {'rare' if i == 7 else 'common'}"))
    read: list[str] = []
    matching = module._matching

    def counted(wanted: Any, data: bytes, start: int, frames: Any) -> Any:
        read.append("segment")
        return matching(wanted, data, start, frames)

    monkeypatch.setattr(module, "_matching", counted)
    assert await found(scene, q="rare") == ["line 7 rare"]
    assert len(read) <= 3  # a filter errs now and then


async def test_lines_that_came_twice_at_once_are_found_once(scene: Scene, worker: WorkerHand) -> None:
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "twice"))
    # As if a repeat had been under way at the same time: its rows are refused, its object is there.
    key = await scene.value("select object from log_chunks")
    await scene.sql.execute("delete from log_chunks")
    await worker.ship(chunk(run, 0, "twice"))
    await scene.sql.execute("update log_segments set void = array[0] where object = $1", key)
    assert await found(scene, q="twice") == ["twice"]


async def test_nobody_finds_the_lines_of_others(scene: Scene, worker: WorkerHand) -> None:
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "mine alone"))
    await scene.api.post("/v1/tenants", {"slug": "other"})
    for query in ("q=mine", f"run={run['run_id']}", f"job={(await scene.run(run['run_id']))['job_id']}", ""):
        page = await scene.api.get(f"/v1/logs/search?{query}", headers={"tocsin-tenant": "other"})
        assert page == {"items": [], "next_cursor": None, "incomplete": False}


async def test_bad_queries_are_refused(scene: Scene, worker: WorkerHand) -> None:
    old = f"s.1000000.{'0' * 8}-0000-7000-8000-{'0' * 12}."
    for bad, code in (
        ("q=--", "invalid_query"),
        ("q=%22%22", "invalid_query"),
        ("cursor=x", "invalid_cursor"),
        ("cursor=s.1.2.3", "invalid_cursor"),
        ("cursor=r.1.1", "invalid_cursor"),
        ("cursor=r.1.99999999999", "invalid_cursor"),
        (f"cursor={old}", "expired_cursor"),
        ("run=x", "invalid_id"),
        ("from=yesterday", "invalid_time"),
        ("what=1", "unknown_parameter"),
    ):
        problem = await scene.api.get(f"/v1/logs/search?{bad}", expect=400)
        assert problem["code"] == code, bad


async def test_lines_of_archived_runs_are_found_by_whose_they_are(scene: Scene, worker: WorkerHand) -> None:
    one = await held(scene, worker, tags={"team": "a"}, retry={"max_attempts": 1})
    two = await held(scene, worker, tags={"team": "b"}, retry={"max_attempts": 1})
    await worker.ship(chunk(one, 0, "same word"), chunk(two, 0, "same word too", ts=LONG_AGO + 900))
    error = {"class": "NoMoney", "message": "none"}
    await worker.report(finished=[one | {"outcome": "succeeded"}, two | {"outcome": "failed", "error": error}])
    job = (await scene.run(one["run_id"]))["job_id"]
    await turn_cold(scene)
    assert await found(scene, q="same", tag="team:a") == ["same word"]
    assert await found(scene, q="same", error_class="NoMoney") == ["same word too"]
    assert await found(scene, q="same", error_class="Other") == []
    assert await found(scene, run=one["run_id"]) == ["same word"]
    assert await found(scene, run=one["run_id"], job=job) == ["same word"]
    assert await found(scene, run=two["run_id"], job=job) == []


async def turn_cold(scene: Scene) -> None:
    """What ended today is archived, and stays so until the test is over."""
    node = scene.node
    [today] = await scene.rows("select current_date as day, 'history_' || to_char(now(), 'YYYYMMDD') as name")
    owner = await connect(node.db.url, "owner")
    try:
        table = {"day": today["day"], "name": today["name"], "archived": False, "attached": True, "pending": False}
        day = archive._Day(node.db, node.objects, node.parquet, owner, table)
        assert await day._take_out([await scene.value("select id from tenants where slug = 'default'")])
    finally:
        await owner.close()


@pytest.mark.parametrize("how", ["gone", "damaged"])
async def test_what_is_lost_hides_nothing_else(scene: Scene, worker: WorkerHand, settings: Settings, how: str) -> None:
    first, second = await held(scene, worker), await held(scene, worker)
    await worker.ship(chunk(first, 0, "needle one"))
    await worker.ship(chunk(second, 0, "needle lost", "needle gone"))
    await worker.ship(chunk(second, 2, "needle two"))
    path = settings.home / "objects" / await scene.value("select object from log_segments order by id offset 1 limit 1")
    whole = path.read_bytes()
    path.unlink()
    if how == "damaged":
        path.write_bytes(bytes(len(whole)))
    for query, wanted in (({}, ["needle two", "needle one"]), ({"run": second["run_id"]}, ["needle two"])):
        page = await scene.api.get("/v1/logs/search", params={"q": "needle", **query})
        assert [line["text"] for line in page["items"]] == wanted and page["incomplete"] is True
    told = (await scene.api.get(f"/v1/runs/{second['run_id']}/logs"))["items"]
    assert [(line["seq"], line["stream"], line["text"]) for line in told] == [
        (2, "system", "[tocsin: 2 lines cannot be read: object storage has lost them]"),
        (3, "stdout", "needle two"),
    ]
    page = await scene.api.get(f"/v1/runs/{second['run_id']}/logs?limit=1&after=1")
    assert page["next_after"] == 2 and "1 lines" in page["items"][0]["text"]
    path.write_bytes(whole)
    assert (await scene.api.get("/v1/logs/search", params={"q": "needle"}))["incomplete"] is False
