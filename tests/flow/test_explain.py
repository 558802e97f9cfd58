"""explain: names what stands in a run's way, the right thing first, tells when it may start, and tells no tales."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, end_of
from tocsin.flow import explain, fleet
from tocsin.model.blockers import CODES
from tocsin.model.estimate import Pace
from tocsin.wire import Register

Plant = Callable[[Scene], Awaitable[str]]
PLANTED: dict[str, tuple[Plant, str]] = {}


def planted(code: str) -> Callable[[Plant], Plant]:
    """What `explain` must name first in the scene that is set."""

    def keep(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = plant, code
        return plant

    return keep


async def hire(scene: Scene, slots: int = 10, **more: Any) -> str:
    """A living worker."""
    body = Register(name="hired", slots=slots, **({"targets": ["process"]} | more))
    return (await fleet.register(scene.db, await scene.who(), body, 3600)).id


async def explained(scene: Scene, run_id: str, api: Api | None = None) -> dict[str, Any]:
    return await (api or scene.api).get(f"/v1/runs/{run_id}/explain")  # type: ignore[no-any-return]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


# ── planted, one at a time, with everything else in order ────────────────────────────────────────────────────────


@planted("tenant_suspended")
async def a_suspended_tenant(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job())
    await scene.api.post("/v1/tenants/default/suspend")
    return run


@planted("parent")
async def parents_that_have_not_ended(scene: Scene) -> str:
    root = await scene.job(name="root")
    for name, parents in (("extract", ["root"]), ("load", ["root", "extract"])):
        await scene.api.post("/v1/jobs", {"name": name, "target": PROCESS, "depends_on": parents})
    await scene.ask(root)
    worker = await hire(scene)
    [run] = await scene.take(worker=worker)
    await scene.end(worker, end_of(run))
    return str(await scene.value("select id from runs where blocked_by = 'parent'"))


@planted("job_paused")
async def a_paused_job(scene: Scene) -> str:
    job = await scene.job()
    [run] = await scene.ask(job)
    await scene.api.post(f"/v1/jobs/{job['id']}/pause", {})
    return run


@planted("due_later")
async def an_instant_to_come(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job(), at=(await scene.now() + timedelta(minutes=5)).isoformat())
    return run


@planted("backing_off")
async def a_failed_attempt(scene: Scene) -> str:
    job = await scene.job(retry={"backoff": "fixed", "delay": "PT5M", "jitter": "none"})
    [run] = await scene.ask(job)
    worker = await hire(scene)
    [taken] = await scene.take(1, worker)
    await scene.end(worker, end_of(taken, "failed", "ValueError"))
    return run


@planted("overlap")
async def an_earlier_occurrence(scene: Scene) -> str:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="queue")
    await scene.occur(job, 9)
    await scene.take(10, await hire(scene))
    [run] = await scene.occur(job, 1)
    await scene.take(10, await hire(scene))
    assert (await scene.run(run))["blocked_by"] == "overlap"
    return run


@planted("overlap")
async def an_occurrence_that_will_be_skipped(scene: Scene) -> str:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="skip")
    await scene.occur(job, 9)
    await scene.take(10, await hire(scene))
    [run] = await scene.occur(job, 1)
    return run


@planted("quota")
async def as_many_as_the_tenant_may(scene: Scene) -> str:
    job = await scene.job()
    await scene.ask(job)
    await scene.take(1, await hire(scene))
    [run] = await scene.ask(job)
    await scene.sql.execute("update tenants set max_running = 1")
    return run


@planted("limit")
async def the_jobs_own_limit(scene: Scene) -> str:
    job = await scene.job(max_concurrency=1)
    _, run = await scene.ask(job, 2)
    await scene.take(10, await hire(scene))
    assert (await scene.run(run))["blocked_by"] == "limit"
    return run


@planted("limit")
async def a_key_that_another_job_holds(scene: Scene) -> str:
    await scene.ask(await scene.job(concurrency_key="db-{args.n}"), args={"n": 7})
    await scene.take(10, await hire(scene))
    [run] = await scene.ask(await scene.job(concurrency_key="db-7"))
    return run


@planted("rate")
async def a_rate_that_is_used_up(scene: Scene) -> str:
    _, run = await scene.ask(await scene.job(rate_limit="1/hour"), 2)
    await scene.take(10, await hire(scene))
    return run


@planted("breaker")
async def an_open_circuit(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job())
    await scene.sql.execute(
        "insert into circuits (tenant_id, id, name, state, next_at)"
        " select tenant_id, id, 'billing', 'open', now() + interval '5 s' from runs"
    )
    await scene.sql.execute("update runs set circuit_id = id")
    return run


@planted("resources")
async def more_than_any_worker_has(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job(resources={"gpus": 2}))
    await hire(scene, resources={"cpu": 4, "gpus": 1})
    return run


@planted("resources")
async def more_than_is_free_now(scene: Scene) -> str:
    worker = await hire(scene, resources={"cpu": 4})
    _, run = await scene.ask(await scene.job(resources={"cpu": 3}), 2)
    await scene.sql.execute(
        "update runs set state = 'running', worker_id = $1, claimed_at = now(), claim_id = 1 where id <> $2",
        worker,
        run,
    )
    return run


@planted("placement")
async def labels_that_nobody_has(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job(placement={"require": {"region": "eu"}}))
    await hire(scene, labels={"region": "us"})
    return run


@planted("pool_paused")
async def a_paused_pool(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job())
    await scene.sql.execute("update pools set paused_at = now() where name = 'default'")
    return run


@planted("pool_closed")
async def a_pool_that_is_open_to_others_only(scene: Scene) -> str:
    [run] = await scene.ask(await scene.job())
    await scene.sql.execute("update pools set tenants = '{}' where name = 'default'")
    return run


@planted("no_worker")
async def a_pool_without_workers(scene: Scene) -> str:
    await scene.sql.execute("insert into pools (name) values ('empty') on conflict do nothing")
    [run] = await scene.ask(await scene.job(pool="empty"))
    return run


@planted("no_worker")
async def a_function_that_nobody_knows(scene: Scene) -> str:
    await hire(scene, targets=["python"], functions=["reports.daily"])
    [run] = await scene.ask(await scene.job(target={"kind": "python", "function": "reports.nightly"}))
    return run


@planted("behind")
async def others_before_it(scene: Scene) -> str:
    *_, run = await scene.ask(await scene.job(), 30)
    return run


@pytest.mark.parametrize("name", PLANTED)
async def test_the_right_one_is_named_first(scene: Scene, name: str) -> None:
    plant, code = PLANTED[name]
    await hire(scene, slots=20)
    run = await plant(scene)
    found = await explained(scene, run)
    assert [b["code"] for b in found["blockers"]][:1] == [code], found
    assert found["summary"] == found["blockers"][0]["message"]
    assert {b["code"] for b in found["blockers"]} <= CODES.keys()


def test_all_codes_are_planted() -> None:
    named = {code for _, code in PLANTED.values()}
    assert named | {"busy"} == CODES.keys(), "`busy` comes with `behind`, below"
    assert len(named) >= 12


async def test_all_that_stands_in_the_way_is_named_in_order(scene: Scene) -> None:
    job = await scene.job(max_concurrency=1)
    one, two, three = await scene.ask(job, 3)
    worker = await hire(scene, slots=1)
    await scene.take(10, worker)
    await scene.api.post(f"/v1/jobs/{job['id']}/pause", {})
    found = await explained(scene, three)
    assert [b["code"] for b in found["blockers"]] == ["job_paused", "limit", "busy"]
    assert found["blockers"][1]["runs"] == [one]
    assert found["estimated_start_at"] is None, "who knows when somebody resumes it"
    assert two not in str(found), "only those that hold it are named"


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_known_is_told(scene: Scene) -> None:
    later = await explained(scene, await an_instant_to_come(scene))
    assert later["estimated_start_at"] is None, "nobody could take it"
    await hire(scene)
    run = await an_instant_to_come(scene)
    later = await explained(scene, run)
    assert later["estimated_start_at"] == later["blockers"][0]["until"] == (await scene.run(run))["ready_at"]
    rated = await explained(scene, await a_rate_that_is_used_up(scene))
    assert rated["estimated_start_at"] == rated["blockers"][0]["until"]
    assert 3500 < (at(rated["estimated_start_at"]) - await scene.now()).total_seconds() <= 3600


async def test_nothing_in_the_way(scene: Scene) -> None:
    await hire(scene)
    [run] = await scene.ask(await scene.job())
    found = await explained(scene, run)
    assert (found["blockers"], found["state"]) == ([], "ready")
    assert abs((at(found["estimated_start_at"]) - await scene.now()).total_seconds()) < 5
    assert found["estimated_error_seconds"] > 0


async def test_a_queue_is_told_from_the_pace_of_its_pool(scene: Scene) -> None:
    worker = await hire(scene, slots=1)
    runs = await scene.ask(await scene.job(), 11)
    await scene.take(1, worker)
    who = await scene.who()
    slow = await explain.explain(scene.db, scene.node.parquet, who, runs[-1], lambda _: Pace(60, 60.0))
    fast = await explain.explain(scene.db, scene.node.parquet, who, runs[-1], lambda _: Pace(600, 60.0))
    unknown = await explain.explain(scene.db, scene.node.parquet, who, runs[-1], lambda _: None)
    assert [b["code"] for b in slow["blockers"]] == ["busy", "behind"]
    assert slow["blockers"][1]["message"] == "9 runs stand before it"
    now = await scene.now()
    assert 8 < (at(slow["estimated_start_at"]) - now).total_seconds() <= 10
    assert (at(fast["estimated_start_at"]) - now).total_seconds() <= 1
    assert unknown["estimated_start_at"] is None


async def test_what_waited_for_something_that_is_over_says_so(scene: Scene) -> None:
    run = await the_jobs_own_limit(scene)
    await scene.sql.execute("update limits set max = 2")
    found = await explained(scene, run)
    assert found["blockers"] == []
    assert found["summary"].startswith("what it waited for (limit) is over")
    await scene.sweep_waiting()
    assert (await scene.run(run))["state"] == "ready"


# ── whose ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def acme(scene: Scene) -> Api:
    await scene.api.post("/v1/tenants", {"slug": "acme"})
    key = await scene.api.post("/v1/keys", {"role": "admin"}, headers={"tocsin-tenant": "acme"})
    return Api(scene.node, key["key"])


async def test_others_are_counted_and_never_named(scene: Scene) -> None:
    await hire(scene, slots=1)
    theirs = await scene.job(name="secret-project", concurrency_key="secret-key")
    secret = await scene.ask(theirs, 5)
    other = await acme(scene)
    job = await other.post("/v1/jobs", {"target": PROCESS, "schedule": {"manual": True}})
    mine = [(await other.post(f"/v1/jobs/{job['id']}/runs", {}))["id"] for _ in range(3)]
    found = await explained(scene, mine[-1], other)
    assert found["blockers"][-1]["message"] == (
        "2 runs and 3 runs of 1 other tenant that share the pool stand before it"
    )
    told = str(found)
    assert not any(word in told for word in ("secret", theirs["id"], *secret))


async def test_a_foreign_run_does_not_exist(scene: Scene) -> None:
    other = await acme(scene)
    [run] = await scene.ask(await scene.job())
    problem = await other.call("GET", f"/v1/runs/{run}/explain", expect=404)
    assert problem["code"] == "not_found"


async def test_it_changes_nothing(scene: Scene) -> None:
    run = await the_jobs_own_limit(scene)
    before = await scene.rows("select * from runs order by id")
    await explained(scene, run)
    assert await scene.rows("select * from runs order by id") == before
    async with scene.db.snapshot(1, "test") as connection:
        assert await connection.fetchval("show transaction_read_only") == "on"
        assert await connection.fetchval("select count(*) from jobs where tenant_id <> 1") == 0


# ── those that started ───────────────────────────────────────────────────────────────────────────────────────────


async def test_held_and_ended_runs_are_told_in_words(scene: Scene) -> None:
    worker = await hire(scene)
    job = await scene.job(retry={"max_attempts": 1})
    good, bad, gone = await scene.ask(job, 3)
    taken = {row["id"]: row for row in await scene.take(3, worker)}
    running = await explained(scene, good)
    assert running["summary"].startswith(f"worker {worker} has had it since 20")
    assert running["blockers"] == [] and running["estimated_start_at"] is None
    await scene.api.post(f"/v1/runs/{gone}/cancel", {})
    assert "was told to stop it" in (await explained(scene, gone))["summary"]
    await scene.end(
        worker, end_of(taken[good]), end_of(taken[bad], "failed", "ValueError"), end_of(taken[gone], "cancelled")
    )
    assert (await explained(scene, good))["summary"] == "it did what it was to do in attempt 1"
    dead = await explained(scene, bad)
    assert dead["summary"] == "1 of 1 attempt failed; the last time with ValueError: it broke"
    assert (await explained(scene, gone))["summary"] == "somebody cancelled it, or its job"


async def test_an_occurrence_that_did_not_run_says_why(scene: Scene) -> None:
    await hire(scene)
    run = await an_occurrence_that_will_be_skipped(scene)
    await scene.take(10, await hire(scene))
    found = await explained(scene, run)
    assert found["state"] == "skipped"
    assert "overlap: skip" in found["summary"]
