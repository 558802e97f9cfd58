"""Whom a worker is trusted with: the pools and tenants that its key names, and of those what it has claimed."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from tests import PATIENCE
from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, poll_opened, told
from tests.flow.test_logs import chunk
from tests.node.test_dispatcher import fresh, tenant, worker_of
from tocsin.flow.shared.transitions import Hint
from tocsin.model.resources import Amounts
from tocsin.node.dispatcher import Dispatcher, Poll
from tocsin.node.reaper import Reaper
from tocsin.node.server import edge, http


async def key_serving(scene: Scene, **scopes: Any) -> str:
    made = await scene.api.post("/v1/keys", {"role": "worker", "scopes": scopes})
    assert made["scopes"] == scopes
    return str(made["key"])


@pytest.fixture
async def acme(scene: Scene) -> Api:
    return await tenant(scene, "acme")


async def test_a_worker_registers_in_the_pools_of_its_key_alone(scene: Scene) -> None:
    before = await scene.value("select count(*) from workers")
    key = await key_serving(scene, pools=["gpu", "batch"])
    api = Api(scene.node, key)
    body = {"name": "w", "slots": 1, "targets": ["process"]}
    for pool in ("default", "gpu2"):
        reply = await api.post("/v1/worker/register", body | {"pool": pool}, expect=403)
        assert reply["code"] == "out_of_scope"
    assert await scene.value("select count(*) from workers") == before
    assert await scene.value("select count(*) from pools where name = 'gpu2'") == 0, "nothing was left behind"
    for pool in ("gpu", "batch"):
        await api.post("/v1/worker/register", body | {"pool": pool})


async def test_a_key_does_not_fill_the_list_of_workers(
    scene: Scene, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "_REGISTRATIONS", 0.001)
    monkeypatch.setattr(edge, "_FLEET", 4000.0)  # so that four are a fleet
    scene.node.edge = edge.Edge(scene.node.settings)
    monkeypatch.setattr(http, "_HELD_SECONDS", 0.0)
    rogue, api = Api(scene.node, await key_serving(scene, pools=["default"])), Api(scene.node, worker_key)
    body = {"name": "w", "targets": ["process"]}
    before = await scene.value("select count(*) from workers")
    told_off = [(await rogue.http.post("/v1/worker/register", json=body)).status_code for _ in range(7)]
    assert told_off == [200] * 4 + [429] * 3
    assert await scene.value("select count(*) from workers") == before + 4
    await api.post("/v1/worker/register", body)


async def test_a_worker_gets_runs_of_its_tenants_alone(live: Scene) -> None:
    acme = await tenant(live, "acme")
    key = await key_serving(live, tenants=["acme"])
    worker = await WorkerHand.register(live.node, key)
    mine, theirs = await live.job(), await live.job(acme)
    # What comes first, and has waited longer, is not its own.
    await live.ask(mine, 5)
    opened = poll_opened(live.node)
    waiting = asyncio.create_task(worker.claim(10, wait=60))
    await opened.wait()
    made = await acme.post(f"/v1/jobs/{theirs['id']}/runs")
    answer = await asyncio.wait_for(waiting, PATIENCE)
    assert [run["run_id"] for run in answer["runs"]] == [made["id"]]
    assert await live.states(mine) == ["ready"] * 5
    # The same on a server that never saw it register: what binds it is its key.
    live.node.gateway._sessions.clear()
    assert (await worker.claim(10, last_claim=answer["claim_id"], wait=0.0))["runs"] == []
    assert await live.states(mine) == ["ready"] * 5


async def restricted(scene: Scene, dispatcher: Dispatcher, slug: str, **more: Any) -> Poll:
    """A long poll of a worker that serves one tenant."""
    tenants = frozenset([await scene.value("select id from tenants where slug = $1", slug)])
    return dispatcher.open_poll((await worker_of(scene))._replace(tenants=tenants), 10, **more)


async def test_both_kinds_are_served_side_by_side(scene: Scene, acme: Api) -> None:
    dispatcher = fresh(scene)
    await scene.ask(await scene.job(), 20)
    theirs = await scene.job(acme)
    await acme.post(f"/v1/jobs/{theirs['id']}/runs/batch", {"runs": [{}] * 20})
    bound = await restricted(scene, dispatcher, "acme")
    free = dispatcher.open_poll(await worker_of(scene), 10)
    for _ in range(5):
        await dispatcher.run_once()
    tenants = {row["tenant_id"] for row in await bound.answer}
    assert tenants == {await scene.value("select id from tenants where slug = 'acme'")}
    assert len(await bound.answer) == len(await free.answer) == 10


async def test_nothing_is_handed_ahead_to_one_who_may_not_have_it_and_nobody_spins(scene: Scene, acme: Api) -> None:
    dispatcher = fresh(scene)
    job = await scene.job(schedule={"every": "PT1H"})
    await scene.occur(job, -0.9)
    lane = await scene.value("select lane_id from jobs where id = $1", job["id"])
    tenant_id = (await scene.who()).tenant_id
    poll = await restricted(scene, dispatcher, "acme", ahead=True)
    now = scene.db.clock.now()
    await dispatcher.run_once()
    dispatcher.hint([Hint(lane, tenant_id, now + timedelta(seconds=0.3), now)])
    pause = await dispatcher.run_once()
    assert pause > 0.05, "it waits for the instant, though somebody asks for runs ahead of theirs"
    assert not poll.answer.done() and await scene.states(job) == ["staged"]


async def test_what_needs_more_than_a_slot_finds_no_worker_of_others(scene: Scene, acme: Api) -> None:
    dispatcher = fresh(scene)
    job = await scene.job(resources={"cpu": 1}, target=PROCESS)
    await scene.ask(job, 3)
    await scene.node.lanes.refresh()
    big = Amounts(cpu=8000, memory_mb=0, disk_mb=0, gpus=0)
    full, other = [(await worker_of(scene))._replace(resources=big) for _ in range(2)]
    # By the book the first has nothing left, and the second all of it.
    await scene.sql.execute("update workers set resources = '{8000,0,0,0}' where id = $1", other.id)
    tenants = frozenset([await scene.value("select id from tenants where slug = 'acme'")])
    polls = [dispatcher.open_poll(full, 10), dispatcher.open_poll(other._replace(tenants=tenants), 10)]
    for _ in range(5):
        await dispatcher.run_once()
    assert not any(poll.answer.done() for poll in polls)
    assert await scene.states(job) == ["ready"] * 3
    dispatcher.close_poll(polls[1])
    mine = dispatcher.open_poll(other, 10)
    async with asyncio.timeout(PATIENCE):
        while not mine.answer.done():
            await dispatcher.run_once()  # which looks again a moment after it looked in vain
    assert len(await mine.answer) == 3, "it was not for want of room"


async def test_explain_knows_that_nobody_there_serves_the_tenant(scene: Scene, acme: Api) -> None:
    await WorkerHand.register(scene.node, await key_serving(scene, tenants=["acme"]))
    [run] = await scene.ask(await scene.job())
    found = await scene.api.get(f"/v1/runs/{run}/explain")
    assert [b["code"] for b in found["blockers"]] == ["no_worker"]


async def test_a_worker_sees_and_changes_only_what_it_claimed(live: Scene, worker_key: str) -> None:
    job = await live.job()
    await live.ask(job)
    holder, other = [await WorkerHand.register(live.node, worker_key) for _ in range(2)]
    stranger = await WorkerHand.register(live.node, (await live.api.post("/v1/keys", {"role": "worker"}))["key"])
    [run] = (await holder.claim(1, wait=30))["runs"]
    key = {k: run[k] for k in ("run_id", "attempt", "fence")}
    before = await live.rows("select * from runs")
    for hand in (other, stranger):
        told_off = await hand.report(finished=[told(run, result={"stolen": True})])
        assert told_off["superseded"] == [[run["run_id"], run["fence"]]] and not told_off["accepted"]
        assert (await hand.report(returned=[[run["run_id"], run["fence"]]]))["accepted"] == []
        await hand.ship(chunk(key, 0, "forged"), expect=409)
        assert (await hand.say("notes", {"notes": [key | {"progress": 0.5}]}))["kept"] == []
    # Another key cannot even speak as that worker.
    for verb, body in (("claim", {"slots": 1}), ("report", {}), ("logs", {"chunks": []}), ("notes", {"notes": []})):
        found = await stranger.api.post(f"/v1/worker/{holder.id}/{verb}", body, expect=404)
        assert found["code"] == "unknown_worker"
    # Nor has a worker any other door: what a run was given comes with its claim alone.
    for path in ("", "/attempts", "/logs", "/explain"):
        await holder.api.get(f"/v1/runs/{run['run_id']}{path}", expect=403)
    assert await live.rows("select * from runs") == before
    assert await live.value("select count(*) from log_chunks") == 0
    assert (await holder.report(finished=[told(run)]))["accepted"]


async def test_a_run_token_dies_with_the_fence_and_with_the_lease(live: Scene, worker_key: str) -> None:
    job = await live.job(retry={"max_attempts": 5, "delay": "PT0S", "backoff": "immediate"})
    await live.ask(job)
    worker = await WorkerHand.register(live.node, worker_key)
    [first] = (await worker.claim(1, wait=30))["runs"]
    await worker.report(finished=[told(first, "failed", error={"class": "Oops"})])
    answer = await worker.claim(1, last_claim=1, wait=30)
    [second] = answer["runs"]
    assert second["run_id"] == first["run_id"] and second["token"] != first["token"]
    path = f"/v1/runs/{first['run_id']}/complete"
    stale, fresh_ = Api(live.node, first["token"]), Api(live.node, second["token"])
    assert (await stale.post(path, expect=409))["code"] == "superseded"
    [reaper] = [loop for loop in live.node._loops if isinstance(loop, Reaper)]
    await reaper.stop()  # it would take the run back
    await live.sql.execute("update workers set lease_until = now() where id = $1", worker.id)
    parents = f"/v1/runs/{first['run_id']}/parents"
    assert (await fresh_.post(path, expect=409))["code"] == "superseded"
    assert (await fresh_.get(parents, expect=409))["code"] == "superseded"
    await live.sql.execute("update workers set lease_until = now() + interval '1 hour' where id = $1", worker.id)
    assert await fresh_.get(parents) == {}
    await fresh_.post(path)
    for method, other in (("GET", f"/v1/runs/{first['run_id']}"), ("POST", f"/v1/runs/{first['run_id']}/cancel")):
        await fresh_.call(method, other, expect=403)
    await fresh_.get("/v1/runs", expect=401)
