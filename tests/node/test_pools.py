"""Pools: what they show, and who goes first in them by each policy."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, end_of
from tests.node.test_dispatcher import fill, fresh, served, shares, tenant, worker_of
from tocsin.flow import claim
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.node.dispatcher import Dispatcher
from tocsin.node.loop import Pace

POOL = "/v1/pools/default"


async def patch(api: Api, path: str, body: dict[str, Any], **more: Any) -> Any:
    return await api.call("PATCH", path, json=body, **more)


# ── the documents ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pool_shows_what_waits_and_who_works(scene: Scene, worker_key: str) -> None:
    job = await scene.job()
    await scene.ask(job, 3)
    await scene.ask(job, at=(await scene.now() + timedelta(hours=1)).isoformat())
    worker = await WorkerHand.register(scene.node, worker_key, slots=8)
    [_] = await scene.take(1, worker.id)
    pool = await scene.api.get(POOL)
    assert pool["depth"] == {"staged": 1, "ready": 2, "waiting": 0, "running": 1, "stopping": 0}
    assert (pool["due"], pool["workers"], pool["slots"]) == (2, 1, 8)
    assert pool["oldest_due_at"] and pool["lag_ms"] > 0
    assert (pool["policy"], pool["head_start"], pool["worst_case_wait"]) == ("fair", "PT0.02S", "PT20S")
    assert pool["wanted_workers"] == 1
    assert [one["name"] for one in (await scene.api.get("/v1/pools"))["items"]] == ["default"]


async def test_a_tenant_sees_its_own_depth_and_may_change_nothing(scene: Scene) -> None:
    await scene.ask(await scene.job(), 3)
    other = await tenant(scene, "other")
    pool = await other.get(POOL)
    assert pool["depth"]["ready"] == 0 and pool["oldest_due_at"] is None and pool["wanted_workers"] is None
    await patch(other, POOL, {"policy": "fifo"}, expect=403)
    await other.post(f"{POOL}/pause", expect=403)


async def test_changes_have_versions_and_audit_rows_and_are_made_once(scene: Scene) -> None:
    api, headers = scene.api, {"idempotency-key": "p"}
    first = await patch(api, POOL, {"head_start": "50ms"}, headers=headers)
    assert (first["version"], first["head_start"], first["worst_case_wait"]) == (2, "PT0.05S", "PT50S")
    assert (await patch(api, POOL, {"head_start": "50ms"}, headers=headers))["version"] == 2
    assert (await patch(api, POOL, {"head_start": "50ms"}))["version"] == 2, "nothing changed"
    await patch(api, POOL, {"policy": "priority"}, headers={"if-match": '"1"'}, expect=412)
    assert (await patch(api, POOL, {"policy": "fifo"}))["head_start"] == "PT0S"
    await patch(api, POOL, {"head_start": "1s"}, expect=422)
    assert (await patch(api, POOL, {"policy": "fair"}))["head_start"] == "PT0.02S"
    await patch(api, POOL, {"head_start": "2h"}, expect=422)
    await patch(api, POOL, {"color": 1}, expect=422)
    await patch(api, "/v1/pools/none", {"policy": "fifo"}, expect=404)
    await api.post(f"{POOL}/pause", {"reason": "moving"})
    again = await api.post(f"{POOL}/pause")
    assert again["paused_at"] and again["version"] == 5
    assert (await api.post(f"{POOL}/resume"))["paused_at"] is None
    rows = await scene.rows("select action from audit where target = 'pool:default' order by id")
    assert [r["action"] for r in rows] == ["pool.update"] * 3 + ["pool.pause", "pool.resume"]


async def test_nothing_is_claimed_from_a_paused_pool_by_whoever_asks(scene: Scene) -> None:
    [run] = await scene.ask(await scene.job())
    dispatcher = scene.node.dispatcher
    poll = dispatcher.open_poll(await worker_of(scene), 5)
    await scene.api.post(f"{POOL}/pause")
    for _ in range(3):
        await dispatcher.run_once()
    assert not poll.answer.done() and await scene.take(5) == [], "nor by a claim that has not heard of it"
    await scene.api.post(f"{POOL}/resume")
    await dispatcher.run_once()
    await dispatcher.run_once()
    assert [row["id"] for row in poll.answer.result()] == [run]


async def test_a_dispatcher_rests_while_a_paused_pool_has_something_to_come(scene: Scene) -> None:
    await scene.api.post(f"{POOL}/pause")
    await scene.ask(await scene.job(), at=(await scene.now() + timedelta(seconds=30)).isoformat())
    dispatcher = Dispatcher(scene.db, scene.node.lanes, lead=timedelta(minutes=2))  # it would have gone ahead by now
    poll = dispatcher.open_poll(await worker_of(scene), 1, ahead=True)
    for _ in range(2):
        await dispatcher.run_once()
    assert await dispatcher.run_once() > 0.01
    await scene.api.post(f"{POOL}/resume")
    assert not poll.answer.done()


# ── who may use it ───────────────────────────────────────────────────────────────────────────────────────────────


async def closed_to_all_but(scene: Scene, *slugs: str) -> None:
    await patch(scene.api, POOL, {"tenants": list(slugs)})
    await scene.node.lanes.refresh()


async def test_a_pool_is_open_to_the_tenants_on_its_list(scene: Scene) -> None:
    acme, beta = await tenant(scene, "acme"), await tenant(scene, "beta")
    assert (await scene.api.get(POOL))["tenants"] is None
    changed = await patch(scene.api, POOL, {"tenants": ["beta", "acme", "acme"]})
    assert (changed["tenants"], changed["version"]) == (["acme", "beta"], 2)
    assert (await patch(scene.api, POOL, {"tenants": ["acme", "beta"]}))["version"] == 2, "nothing changed"
    assert (await patch(scene.api, POOL, {"policy": "priority"}))["tenants"] == ["acme", "beta"], "it stays"
    assert (await acme.get(POOL))["tenants"] == ["acme"], "who else uses it is not for it to know"
    changed = await patch(scene.api, POOL, {"tenants": ["beta"]})
    await acme.get(POOL, expect=404)
    assert "default" not in [pool["name"] for pool in (await acme.get("/v1/pools"))["items"]], "it is others'"
    assert "default" in [pool["name"] for pool in (await scene.api.get("/v1/pools"))["items"]]
    refused = await patch(scene.api, POOL, {"tenants": ["beta", "nobody"]}, expect=422)
    assert refused["errors"][0]["path"] == "tenants[1]"
    await patch(acme, POOL, {"tenants": ["acme"]}, expect=403)
    assert (await patch(scene.api, POOL, {"tenants": None}))["tenants"] is None
    assert (await beta.get(POOL))["tenants"] is None
    rows = await scene.rows("select detail from audit where action = 'pool.update' order by id")
    told = [msgspec.json.decode(row["detail"]) for row in rows]
    assert told == [{"tenants": "beta, acme, acme"}, {"policy": "priority"}, {"tenants": "beta"}, {"tenants": "all"}]


async def test_the_pool_of_workflow_runs_is_nobodys_to_change(scene: Scene) -> None:
    before = await scene.rows("select * from pools where name = 'workflows'")
    await patch(scene.api, "/v1/pools/workflows", {"tenants": []}, expect=404)
    await scene.api.post("/v1/pools/workflows/pause", expect=404)
    assert await scene.rows("select * from pools where name = 'workflows'") == before


async def test_no_job_comes_into_a_pool_that_is_closed_to_its_tenant(scene: Scene) -> None:
    await scene.sql.execute("insert into pools (name) values ('open') on conflict do nothing")
    acme, body = await tenant(scene, "acme"), {"target": PROCESS, "schedule": {"manual": True}}
    there = await acme.post("/v1/jobs", body | {"name": "there"}, expect=201)
    elsewhere = await acme.post("/v1/jobs", body | {"pool": "open"}, expect=201)
    node = {"target": PROCESS}
    await closed_to_all_but(scene, "default")
    for path, given, at in (
        ("/v1/jobs", body, "pool"),
        ("/v1/jobs/batch", {"jobs": [body | {"pool": "open"}, body]}, "jobs[1].pool"),
        ("/v1/workflows", {"name": "w", "jobs": {"a": node | {"pool": "open"}, "b": node}}, "jobs.b.pool"),
    ):
        refused = await acme.post(path, given, expect=422)
        assert (refused["code"], refused["errors"][0]["path"]) == ("pool_closed", at)
        assert "'default' is not open to your tenant" in refused["detail"]
    await patch(acme, f"/v1/jobs/{elsewhere['id']}", {"pool": "default"}, expect=422)
    changed = await patch(acme, f"/v1/jobs/{there['id']}", {"description": "it was there before"})
    assert changed["version"] == 2
    await scene.api.post("/v1/jobs", body, expect=201)
    await patch(scene.api, POOL, {"tenants": None})
    await scene.node.lanes.refresh()
    await patch(acme, f"/v1/jobs/{elsewhere['id']}", {"pool": "default"})


@pytest.mark.parametrize("ahead", [False, True])
async def test_runs_of_a_tenant_that_was_taken_off_wait_and_say_why(scene: Scene, ahead: bool) -> None:
    acme = await tenant(scene, "acme")
    job = await scene.job(acme)
    at = {"at": (await scene.now() + timedelta(seconds=30)).isoformat()} if ahead else {}
    run = (await acme.post(f"/v1/jobs/{job['id']}/runs", at))["id"]
    dispatcher = Dispatcher(scene.db, scene.node.lanes, lead=timedelta(minutes=2))
    poll = dispatcher.open_poll(await worker_of(scene), 5, ahead=True)
    place = next(iter(await scene.rows("select lane_id, tenant_id from runs where id = $1", run)))
    await closed_to_all_but(scene, "default")
    for _ in range(3):
        await dispatcher.run_once()
    assert await dispatcher.run_once() > 0.01, "it rests"
    share, worker = Share(place["lane_id"], place["tenant_id"], 5, THE_BEGINNING), (await worker_of(scene)).id

    async def taken() -> list[str]:
        now = await claim.take(scene.db, [share], [worker])
        soon = await claim.take_ahead(scene.db, [share], [worker], timedelta(minutes=2))
        return [row["id"] for row in (*now.rows, *soon.rows)]

    assert not poll.answer.done() and await taken() == [], "nor by a claim that has not heard of it"
    told = await acme.get(f"/v1/runs/{run}/explain")
    assert "pool_closed" in [blocker["code"] for blocker in told["blockers"]] and told["estimated_start_at"] is None
    pool = await scene.api.get(POOL)
    assert (pool["due"], pool["oldest_due_at"], pool["wanted_workers"]) == (0, None, 0), "nobody is wanted for it"
    await patch(scene.api, POOL, {"tenants": ["acme"]})
    assert await taken() == [run]


# ── who goes first ───────────────────────────────────────────────────────────────────────────────────────────────


async def claimed_one_by_one(scene: Scene, dispatcher: Dispatcher, count: int, slots: int = 1) -> list[str]:
    out: list[str] = []
    while len(out) < count:
        for poll in await served(scene, dispatcher, slots):
            out += [row["id"] for row in poll.answer.result()]
    return out


async def mixed(scene: Scene) -> list[str]:
    """Runs of three tenants and many priorities, one after the other; their ids in the order they were asked for."""
    ids: list[str] = []
    for turn, slug in enumerate(("one", "two", "three")):
        api = await tenant(scene, slug, weight=turn + 1)
        job = await scene.job(api)
        for priority in (500, 100, 900, 0, 1000, 480 + 7 * turn):
            made = await api.post(f"/v1/jobs/{job['id']}/runs", {"priority": priority})
            ids.append(made["id"])
    return ids


@pytest.mark.parametrize("slots", [1, 4])
async def test_priority_takes_all_tenants_in_one_order(scene: Scene, slots: int) -> None:
    await patch(scene.api, POOL, {"policy": "priority"})
    await mixed(scene)
    wanted = [r["id"] for r in await scene.rows("select id::text as id from runs order by order_key")]
    dispatcher = fresh(scene)
    dispatcher.open_poll(await worker_of(scene), 0)  # a look round, for nothing
    await dispatcher.run_once()
    got = await claimed_one_by_one(scene, dispatcher, 18, slots)
    groups = [sorted(got[i : i + slots]) for i in range(0, 16, slots)]
    assert groups == [sorted(wanted[i : i + slots]) for i in range(0, 16, slots)]


async def test_fifo_goes_by_when_runs_fell_due_whatever_their_priority(scene: Scene) -> None:
    await patch(scene.api, POOL, {"policy": "fifo"})
    ids = await mixed(scene)
    dispatcher = fresh(scene)
    dispatcher.open_poll(await worker_of(scene), 0)
    await dispatcher.run_once()
    assert await claimed_one_by_one(scene, dispatcher, 18) == ids


@pytest.mark.parametrize("policy", ["fair", "priority"])
async def test_the_lowest_priority_waits_for_nothing_that_came_after_its_worst_case(scene: Scene, policy: str) -> None:
    """Two high ones come for each that is started, for ever; those of the lowest priority start all the same."""
    pool = await patch(scene.api, POOL, {"policy": policy, "head_start": "PT0.0002S"})
    assert pool["worst_case_wait"] == "PT0.2S"
    job = await scene.job()
    low = set(await scene.ask(job, 3, priority=0))
    await scene.ask(job, 6, priority=1000)
    dispatcher, before, started = fresh(scene), Counter[str](), 0
    due = await scene.value("select min(ready_at) from runs")
    for _ in range(600):
        await scene.ask(job, 2, priority=1000)
        [poll] = await served(scene, dispatcher, 1)
        [row] = poll.answer.result()
        late = row["ready_at"] > due + timedelta(seconds=0.2, milliseconds=1)
        before["late" if late else "in time"] += row["id"] not in low
        started += row["id"] in low
        if started == 3:
            break
    assert started == 3
    assert before["late"] == 0, "what came later than the worst case went before it"
    assert before["in time"] > 5, "there was something to wait for"


async def test_twenty_tenants_share_by_weight_with_workers_of_one_slot(scene: Scene) -> None:
    weights = {f"t{n:02d}": n % 4 + 1 for n in range(20)}
    for slug, weight in weights.items():
        await fill(scene, await tenant(scene, slug, weight), 5 * weight + 5)
    dispatcher = fresh(scene)
    dispatcher.open_poll(await worker_of(scene), 0)
    await dispatcher.run_once()
    got = await shares(scene, dispatcher, 1, rounds=100)
    got += await shares(scene, dispatcher, 3, rounds=50)
    assert got == Counter({slug: 5 * weight for slug, weight in weights.items()})


# ── max_running ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_tenant_runs_no_more_than_its_quota_and_the_others_go_on(scene: Scene) -> None:
    small = await tenant(scene, "small")
    await patch(scene.api, "/v1/tenants/small", {"quotas": {"max_running": 3}})
    await fill(scene, small, 20)
    await fill(scene, await tenant(scene, "other"), 15)
    dispatcher = fresh(scene)
    dispatcher.open_poll(await worker_of(scene), 0)
    await dispatcher.run_once()
    got = await shares(scene, dispatcher, 10) + await shares(scene, dispatcher, 10)
    assert got == {"small": 3, "other": 15}, "what the first claim could not give it went to the other by the second"
    held = await scene.row(
        "select r.id::text as id, r.attempt, r.fence, r.worker_id::text as worker_id from runs r"
        " join tenants t on t.id = r.tenant_id where t.slug = 'small' and r.state = 'running' limit 1"
    )
    await scene.end(held["worker_id"], end_of(held))
    dispatcher._quotas._counts = Pace()  # however long the last count took
    assert await shares(scene, dispatcher, 10) == {"small": 1}


async def test_what_was_handed_out_is_counted_once_for_the_pool(scene: Scene) -> None:
    await scene.ask(await scene.job(), 4)
    await served(scene, scene.node.dispatcher, 3)
    await scene.node._measure_pools()
    await scene.node._measure_pools()
    assert await scene.value("select claimed from pools where name = 'default'") == 3


async def test_a_new_job_is_told_its_start_by_the_estimator_that_explains_it(scene: Scene, worker_key: str) -> None:
    pools = scene.node.pools
    await pools.measure({})
    later, now = await scene.job(schedule={"delay": "PT10M"}), await scene.job(schedule=None)
    assert later["estimated_start_at"] == later["next_run_at"], "what waits now says nothing about then"
    assert now["next_run_at"] and now["estimated_start_at"] is None, "nobody is there who could take it"
    await fill(scene, scene.api, 30)
    worker = await WorkerHand.register(scene.node, worker_key, slots=5)
    await pools.measure({})
    await scene.take(5, worker.id)
    await pools.measure({"default": 5})
    job = await scene.job(schedule=None)
    [run] = (await scene.api.get(f"/v1/jobs/{job['id']}/runs"))["items"]
    told = await scene.api.get(f"/v1/runs/{run['id']}/explain")
    off = datetime.fromisoformat(told["estimated_start_at"]) - datetime.fromisoformat(job["estimated_start_at"])
    assert job["estimated_start_at"] > job["next_run_at"]
    assert abs(off.total_seconds()) < told["estimated_error_seconds"]
