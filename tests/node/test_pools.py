"""Pools: what they show, and who goes first in them by each policy."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand, end_of
from tests.node.test_dispatcher import fill, fresh, served, shares, tenant, worker_of
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
