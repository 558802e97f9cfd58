"""Lanes: servers read changed lanes, a poll costs what it matches, unused lanes are removed, and a tenant has a
limit."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from tests.conftest import Api
from tests.flow.kit import Scene
from tocsin.flow import retire
from tocsin.flow.shared import lanes
from tocsin.flow.shared.lanes import LaneBook, LaneKey
from tocsin.model.resources import Amounts
from tocsin.node.conductor import Conductor


def function() -> str:
    """Return a function name that no other test uses: lanes outlive tests."""
    return f"once.f{uuid.uuid4().hex}"


@pytest.fixture
async def many(scene: Scene) -> AsyncIterator[str]:
    """Create twenty thousand lanes of a separate kind, which no test here asks for."""
    kind = f"k{uuid.uuid4().hex}"
    await scene.sql.execute(
        "insert into lanes (pool, kind, labels) select 'default', $1, jsonb_build_object('zone', n::text)"
        " from generate_series(1, 20000) n",
        kind,
    )
    await scene.sql.execute("analyze lanes")
    yield kind
    await scene.sql.execute("delete from lanes where kind = $1", kind)


async def pages(scene: Scene, statement: str, *args: Any) -> int:
    async with scene.db._borrowed("vital") as connection:
        rows = await connection.fetch(f"explain (analyze, buffers, format json) {statement}", *args)
    plan = json.loads(rows[0][0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_refresh_reads_only_what_has_changed(scene: Scene, many: str) -> None:
    book = LaneBook(scene.db)
    await book.refresh()
    assert len(book) >= 20_000
    known, version = len(book), book.version
    assert await pages(scene, lanes.SQL["changed"], book._upto) < 20, "not the twenty thousand"
    await book.refresh()
    assert (len(book), book.version) == (known, version)
    await scene.sql.execute("insert into lanes (pool, kind, function) values ('default', $1, 'new')", many)
    await book.refresh()
    assert len(book) == known + 1
    assert await pages(scene, lanes.SQL["changed"], book._upto) < 20


async def test_lanes_that_are_committed_out_of_order_are_read(scene: Scene) -> None:
    book, names = LaneBook(scene.db), [function() for _ in range(3)]
    make = "insert into lanes (pool, kind, function) values ('default', 'python', $1)"
    slow = await asyncpg.connect(scene.node.settings.database_url, server_settings={"role": "tocsin_engine"})
    try:
        async with slow.transaction():
            await slow.execute(make.replace("lanes", "tocsin.lanes"), names[0])
            await scene.sql.execute(make, names[1])
            await book.refresh()
            assert len(book.open_to("default", ["python"], names)) == 1
    finally:
        await slow.close()
    await scene.sql.execute(make, names[2])
    await book.refresh()
    assert len(book.open_to("default", ["python"], names)) == 3, "the first was made first and committed later"


async def test_a_poll_looks_only_at_lanes_that_it_may_match(
    scene: Scene, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = LaneBook(scene.db)
    await book.refresh()
    looked_at = []
    monkeypatch.setattr(lanes, "matches", lambda has, required: looked_at.append(required) or _fits(has, required))
    assert len(book.open_to("default", [many], [], labels={"zone": "17", "disk": "ssd"})) == 1
    assert len(looked_at) == 1
    again = book.open_to("default", [many], [], labels={"zone": "17", "disk": "ssd"})
    assert len(looked_at) == 1, "workers that can do the same share one answer"
    assert again is book.open_to("default", [many], [], labels={"disk": "ssd", "zone": "17"})


def _fits(has: dict[str, str], required: Any) -> bool:
    return all(has.get(name) == value for name, value in required)


async def test_a_worker_gets_the_lanes_whose_terms_it_meets(scene: Scene) -> None:
    """The index by pool, kind, function and first label gives the same result as a check of every lane."""
    name = function()
    keys = [
        LaneKey("default", kind, name if kind == "python" else "", require, needs)
        for kind in ("python", "process", "container")
        for require in ((), (("a", "1"),), (("a", "1"), ("b", "2")), (("b", "2"),))
        for needs in (None, Amounts(2000, 0, 0, 0))
    ]
    book = LaneBook(scene.db)
    ids = await book.intern(dict.fromkeys(keys))
    for targets, labels, total in (
        (["python"], {}, Amounts(0, 0, 0, 0)),
        (["python", "process"], {"a": "1"}, Amounts(4000, 0, 0, 0)),
        (["process"], {"b": "2", "a": "1"}, Amounts(1000, 0, 0, 0)),
        (["container", "python"], {"b": "3"}, Amounts(4000, 0, 0, 0)),
    ):
        expected = {
            ids[key]
            for key in keys
            if key.kind in targets and _fits(labels, key.require) and (key.needs is None or total.cpu >= 2000)
        }
        assert book.open_to("default", targets, [name], total, labels) & set(ids.values()) == expected
    assert not book.open_to("elsewhere", ["python"], [name])


# ── what is retired ──────────────────────────────────────────────────────────────────────────────────────────────


async def whole_pass(scene: Scene, *, later: bool = True) -> None:
    """Run a whole pass over all jobs and runs; `later`: long after the last one."""
    if later:
        await scene.sql.execute("update lanes set retired_at = retired_at - interval '1 hour'")
        await scene.sql.execute("update lanes set seen_at = seen_at - interval '1 hour'")
        await scene.sql.execute("update lane_pass set began_at = began_at - interval '1 hour'")
    await scene.sql.execute("update lane_pass set part = 'done', began_at = began_at - interval '11 minutes'")
    assert await retire.turn(scene.db)
    while await scene.value("select part <> 'done' from lane_pass"):
        assert await retire.turn(scene.db)


async def lane(scene: Scene, name: str) -> str:
    rows = await scene.rows("select retired_at is not null as retired from lanes where function = $1", name)
    return {(): "gone", (True,): "retired", (False,): "used"}[tuple(row["retired"] for row in rows)]


async def test_a_lane_without_jobs_is_retired_and_removed_a_pass_later(scene: Scene) -> None:
    name = function()
    job = await scene.job(target={"kind": "python", "function": name})
    await whole_pass(scene)
    assert await lane(scene, name) == "used"
    await scene.sql.execute("delete from jobs where id = $1", job["id"])
    await whole_pass(scene)
    assert await lane(scene, name) == "retired"
    await scene.node.lanes.refresh()
    await whole_pass(scene, later=False)
    assert await lane(scene, name) == "retired", "not every server has heard"
    known = len(scene.node.lanes)
    await scene.sql.execute(
        "insert into lane_vouchers (lane_id, worker_id) select id, gen_random_uuid() from lanes where function = $1",
        name,
    )
    await whole_pass(scene)
    assert await lane(scene, name) == "gone"
    assert await scene.value("select count(*) from lane_vouchers") == 0
    await scene.node.lanes.forget_removed()
    assert len(scene.node.lanes) < known


async def test_a_lane_with_a_run_that_its_job_has_left_stays(scene: Scene) -> None:
    name = function()
    job = await scene.job(target={"kind": "python", "function": name})
    await scene.ask(job)
    await scene.take()
    await scene.sql.execute("update jobs set lane_id = (select min(id) from lanes) where id = $1", job["id"])
    for _ in range(3):
        await whole_pass(scene)
    assert await lane(scene, name) == "used"


async def test_a_retired_lane_comes_back_when_a_job_needs_it(scene: Scene) -> None:
    name = function()
    target = {"kind": "python", "function": name}
    job = await scene.job(target=target)
    before = await scene.value("select lane_id from jobs where id = $1", job["id"])
    await scene.sql.execute("delete from jobs where id = $1", job["id"])
    await whole_pass(scene)
    await scene.node.lanes.refresh()
    again = await scene.job(target=target)
    assert await lane(scene, name) == "used"
    assert await scene.value("select lane_id from jobs where id = $1", again["id"]) == before


async def test_a_job_that_a_server_sends_through_before_it_has_heard_keeps_its_lane(scene: Scene) -> None:
    name = function()
    target = {"kind": "python", "function": name}
    job = await scene.job(target=target)
    await scene.sql.execute("delete from jobs where id = $1", job["id"])
    await whole_pass(scene)
    again = await scene.job(target=target)  # this server has not refreshed yet
    assert await lane(scene, name) == "retired"
    lane_id = await scene.value("select lane_id from jobs where id = $1", again["id"])
    assert lane_id in scene.node.lanes.open_to("default", ["python"], [name]), "its runs are served all the same"
    await whole_pass(scene)
    assert await lane(scene, name) == "used"


async def test_a_server_that_has_slept_looks_before_it_sends_a_job_through_a_lane(scene: Scene) -> None:
    name = function()
    target = {"kind": "python", "function": name}
    job = await scene.job(target=target)
    await scene.sql.execute("delete from jobs where id = $1", job["id"])
    for _ in range(2):
        await whole_pass(scene)
    assert await lane(scene, name) == "gone"
    scene.node.lanes._looked -= 301
    assert LaneKey("default", "python", name) in scene.node.lanes._ids, "it has heard of nothing"
    again = await scene.job(target=target)
    assert await lane(scene, name) == "used"
    found = "select count(*) from jobs j join lanes l on l.id = j.lane_id where j.id = $1"
    assert await scene.value(found, again["id"]) == 1


async def test_a_pass_goes_page_by_page(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [function() for _ in range(5)]
    for name in names:
        await scene.ask(await scene.job(target={"kind": "python", "function": name}))
    await whole_pass(scene)
    monkeypatch.setattr(retire, "PAGE", 2)
    await scene.sql.execute("update lane_pass set part = 'done', began_at = now() - interval '11 minutes'")
    turns = 0
    while turns == 0 or await scene.value("select part <> 'done' from lane_pass"):
        assert await retire.turn(scene.db)
        turns += 1
    assert turns == 1 + 3 + 3, "it begins, and looks at five jobs and five runs, two at a time"
    assert [await lane(scene, name) for name in names] == ["used"] * 5
    assert not await retire.turn(scene.db), "the next pass is to come"


async def test_no_lane_is_removed_while_a_server_of_an_older_release_lives(scene: Scene) -> None:
    name = function()
    job = await scene.job(target={"kind": "python", "function": name})
    await scene.sql.execute("delete from jobs where id = $1", job["id"])
    older = "insert into servers (id, name, version, newest_migration) values (gen_random_uuid(), 'old', '0', '0119_x')"
    await scene.sql.execute(older)
    for _ in range(2):
        await whole_pass(scene)
    assert await lane(scene, name) == "retired", "it never hears that the lane is retired"
    await scene.sql.execute("delete from servers where name = 'old'")
    await whole_pass(scene)
    assert await lane(scene, name) == "gone"


async def test_the_lane_of_workflow_runs_is_never_retired(scene: Scene) -> None:
    """The conductor knows the lane by its id."""
    conductor = scene.node.conductor
    assert isinstance(conductor, Conductor)
    await conductor.run_once()
    for _ in range(3):
        await whole_pass(scene)
    assert await scene.value("select count(*) from lanes where id = $1 and retired_at is null", conductor._lane) == 1


# ── how many ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenant_makes_a_bounded_number_of_lanes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.api.post("/v1/tenants", {"slug": "inventive"})
    await scene.api.post("/v1/tenants", {"slug": "other"})
    inventive, other = [
        Api(scene.node, (await scene.api.with_key("admin", slug)).key) for slug in ("inventive", "other")
    ]
    monkeypatch.setattr(lanes, "MOST_LANES", 3)
    zones = [uuid.uuid4().hex for _ in range(4)]
    jobs = [{"placement": {"require": {"zone": zone}}} for zone in zones]
    made = [await scene.job(inventive, **job) for job in jobs[:3]]
    body = {"target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}}
    refused = await inventive.post("/v1/jobs", body | jobs[3], expect=422)
    [error] = refused["errors"]
    assert (error["path"], error["code"]) == ("pool", "too_many_lanes") and "must be one of the 3" in error["message"]
    await inventive.call("PATCH", f"/v1/jobs/{made[0]['id']}", json=jobs[3], expect=422)
    batch = {"jobs": [body | jobs[0], body | jobs[3]]}
    await inventive.post("/v1/jobs/batch", batch, expect=422)
    await scene.job(inventive, **jobs[0])
    await scene.job(other, **jobs[3])
    await scene.job(inventive, **jobs[3])  # all tenants can use a lane that another tenant created
    assert await scene.value("select count(*) from lanes where labels ->> 'zone' = any($1)", zones) == 4


async def test_a_job_of_an_unknown_pool_is_still_refused(scene: Scene) -> None:
    body = {"target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}, "pool": "nowhere"}
    [error] = (await scene.api.post("/v1/jobs", body, expect=422))["errors"]
    assert error["code"] == "unknown_pool"
