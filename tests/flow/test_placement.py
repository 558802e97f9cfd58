"""Resources and labels: what a run needs of a worker, and which worker it gets."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene, WorkerHand, end_of
from tocsin.flow import claim, fleet, report
from tocsin.flow.claim import THE_BEGINNING, Fitting, Share
from tocsin.flow.fleet import Worker
from tocsin.model.resources import Amounts
from tocsin.node import fitting
from tocsin.node.dispatcher import Dispatcher, Poll
from tocsin.node.loop import Pace
from tocsin.store.db import Row
from tocsin.wire import Register

HOUR = timedelta(hours=1)


async def hire(scene: Scene, slots: int = 10, labels: Mapping[str, str] | None = None, **resources: float) -> Worker:
    """A worker with these resources."""
    body = Register(name="w", slots=slots, resources=resources, labels=dict(labels or {}), targets=["process"])
    return await fleet.register(scene.db, await scene.who(), body, 3600)


async def shares(scene: Scene, most: int = 100) -> list[Share]:
    return [share._replace(look=100 * (share.lane_id in scene.node.lanes.fitted)) for share in await scene.shares(most)]


async def take(scene: Scene, worker: Worker, slots: int = 100) -> list[Row]:
    """Claim for one worker, from everywhere."""
    return list((await claim.take(scene.db, await shares(scene), [worker.id] * slots)).rows)


async def used(scene: Scene) -> dict[str, list[int]]:
    """What was given out of each worker."""
    rows = await scene.rows(
        "select worker_id::text as w, sum(needs[1])::int as cpu, sum(needs[2])::int as memory from runs"
        " where state in ('running', 'stopping') and needs is not null group by 1"
    )
    return {row["w"]: [row["cpu"], row["memory"]] for row in rows}


class Desk:
    """A dispatcher that a test turns by hand."""

    def __init__(self, scene: Scene, **terms: timedelta) -> None:
        self.scene = scene
        self.dispatcher = Dispatcher(scene.db, scene.node.lanes, **terms)

    def ask(self, worker: Worker, slots: int = 10) -> Poll:
        return self.dispatcher.open_poll(worker, slots)

    async def turn(self) -> None:
        """Look everywhere, and hand out what can be."""
        self.dispatcher._full_scans = Pace()
        self.dispatcher.rescan()
        await self.dispatcher.run_once()
        self.dispatcher._fitter._looked.clear()  # as if a moment had passed
        await self.dispatcher.run_once()

    async def served(self, *polls: Poll) -> list[list[str]]:
        """After a turn: the runs that each poll got."""
        await self.turn()
        return [[row["id"] for row in poll.answer.result()] if poll.answer.done() else [] for poll in polls]


# ── resources ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_gets_what_it_has_room_for_and_no_more(scene: Scene) -> None:
    job = await scene.job(resources={"cpu": 1.5, "memory_mb": 300})
    await scene.ask(job, 10)
    worker = await hire(scene, cpu=4, memory_mb=1000)
    first = await take(scene, worker)
    assert len(first) == 2
    assert await used(scene) == {worker.id: [3000, 600]}
    assert await take(scene, worker) == []
    await scene.end(worker.id, end_of(first[0]))
    assert len(await take(scene, worker)) == 1
    assert await scene.states(job) == ["running"] * 2 + ["ready"] * 7


async def test_claims_at_once_never_give_out_a_resource_twice(scene: Scene) -> None:
    """As when a worker's claim was lost on one node while it asks another."""
    for memory in (100, 300):
        await scene.ask(await scene.job(resources={"cpu": 1, "memory_mb": memory}), 20)
    workers = [await hire(scene, cpu=4, memory_mb=700), await hire(scene, cpu=2, memory_mb=5000)]
    places = await shares(scene, 5)
    for _ in range(6):
        slots = [worker.id for worker in workers for _ in range(8)]
        await asyncio.gather(*(claim.take(scene.db, places, slots) for _ in range(4)))
    given = await used(scene)
    assert given[workers[0].id][0] <= 4000 and given[workers[0].id][1] <= 700, given
    assert given[workers[1].id] == [2000, given[workers[1].id][1]], "and what there is is used"


async def test_each_goes_where_it_leaves_least(scene: Scene) -> None:
    large, small = await hire(scene, cpu=16, memory_mb=64_000), await hire(scene, cpu=4, memory_mb=8000)
    with_gpu = await hire(scene, cpu=4, memory_mb=8000, gpus=1)
    desk = Desk(scene)
    polls = [desk.ask(worker) for worker in (large, with_gpu, small)]
    [two] = await scene.ask(await scene.job(resources={"cpu": 2, "memory_mb": 1000}))
    assert await desk.served(*polls) == [[], [], [two]]
    [ten] = await scene.ask(await scene.job(resources={"cpu": 10}))
    [gpu] = await scene.ask(await scene.job(resources={"gpus": 1}))
    assert await desk.served(*polls[:2]) == [[ten], [gpu]]


async def test_a_lane_is_open_only_to_workers_that_are_large_enough(scene: Scene) -> None:
    await scene.job(resources={"cpu": 3})
    await scene.job(resources={"cpu": 3, "gpus": 1})
    book = scene.node.lanes
    three = await hire(scene, cpu=3)
    assert len(book.open_to("default", ["process"], [], three.resources) & book.fitted) == 1
    assert not book.open_to("default", ["process"], []) & book.fitted


async def test_a_run_that_nobody_could_ever_take_says_so(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(resources={"cpu": 3, "memory_mb": 10}))
    assert (await scene.run(run_id))["blocked_by"] is None, "without a worker that is not what is missing"
    small = await hire(scene, cpu=2.5, memory_mb=1000)
    desk = Desk(scene)
    poll = desk.ask(small)
    assert await desk.served(poll) == [[]]
    run = await scene.run(run_id)
    assert (run["state"], run["blocked_by"], run["reason"]) == ("ready", "resources", "unschedulable")
    large = desk.ask(await hire(scene, cpu=3, memory_mb=10))
    assert (await scene.run(run_id))["reason"] is None
    assert await desk.served(large) == [[run_id]]


async def test_what_is_too_large_does_not_stand_in_the_way(scene: Scene) -> None:
    """Of its class, of its tenant, or of those that need a slot alone."""
    await scene.ask(await scene.job(resources={"cpu": 4}), 5)
    [fits] = await scene.ask(await scene.job(resources={"cpu": 2.5}))
    [plain] = await scene.ask(await scene.job())
    desk = Desk(scene)
    polls = [desk.ask(await hire(scene, cpu=3)) for _ in range(2)]
    got = await desk.served(*polls)
    assert sorted(got) == sorted([[fits], [plain]])


async def test_however_many_are_too_large_the_one_behind_them_is_found(scene: Scene) -> None:
    await scene.ask(await scene.job(resources={"cpu": 4}), 2 * fitting._LOOKS)
    [fits] = await scene.ask(await scene.job(resources={"cpu": 2.5}))
    desk = Desk(scene)
    poll = desk.ask(await hire(scene, cpu=3))
    for _ in range(3):
        await desk.turn()
    assert [row["id"] for row in poll.answer.result()] == [fits]


async def test_a_run_under_a_limit_needs_room_as_well(scene: Scene) -> None:
    job = await scene.job(resources={"cpu": 1}, concurrency_key={"key": "k", "max": 3})
    await scene.ask(job, 8)
    worker = await hire(scene, cpu=2)
    first = await take(scene, worker)
    assert len(first) == 2
    assert await scene.states(job) == ["running"] * 2 + ["ready"] * 6, "for want of room nothing is parked"
    other = await hire(scene, cpu=9)
    assert len(await take(scene, other)) == 1
    assert sorted(await scene.states(job)) == ["running"] * 3 + ["waiting"] * 5
    await scene.end(worker.id, end_of(first[0]))
    assert len(await take(scene, other)) == 1, "the limit let one go"


async def test_what_needs_nothing_takes_one_statement_as_ever(scene: Scene) -> None:
    await scene.ask(await scene.job(), 3)
    worker = await hire(scene, cpu=1)
    await scene.sql.execute("begin")
    await scene.sql.execute("select from workers where id = $1 for update", worker.id)
    try:
        assert len(await take(scene, worker)) == 3, "without the worker's lock"
    finally:
        await scene.sql.execute("rollback")


async def test_a_worker_that_somebody_holds_is_left_for_the_next_claim(scene: Scene) -> None:
    await scene.ask(await scene.job(resources={"cpu": 1}))
    worker = await hire(scene, cpu=1)
    await scene.sql.execute("begin")
    await scene.sql.execute("select from workers where id = $1 for update", worker.id)
    try:
        assert await take(scene, worker) == []
    finally:
        await scene.sql.execute("rollback")
    assert len(await take(scene, worker)) == 1


async def test_an_edit_binds_what_is_made_from_then_on(scene: Scene) -> None:
    job = await scene.job(resources={"cpu": 1})
    await scene.ask(job)
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"resources": {"cpu": 2}})
    await scene.ask(job)
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"resources": {"cpu": 0}})
    await scene.ask(job)
    rows = await scene.rows("select needs from runs where job_id = $1 order by id", job["id"])
    assert [row["needs"] for row in rows] == [[1000, 0, 0, 0], [2000, 0, 0, 0], None]


async def test_random_steps_never_give_out_too_much_nor_lose_anything(scene: Scene) -> None:
    """Dispatchers claim at once for the same workers, while runs end, are handed back, lost or cancelled."""
    rng = random.Random(23)
    workers = [await hire(scene, cpu=cpu, memory_mb=1000 * cpu) for cpu in (2, 4, 8)]
    total = {w.id: w.resources for w in workers}
    shapes = [(0.5, 100), (1, 2000), (3, 500), (5, 8000), (0, 900)]
    jobs = [await scene.job(resources={"cpu": cpu, "memory_mb": mb}) for cpu, mb in shapes]
    jobs.append(await scene.job(resources={"cpu": 1}, max_concurrency=2))
    jobs.append(await scene.job())
    desks = [Desk(scene, patience=timedelta(0)) for _ in range(3)]

    async def claim_at(desk: Desk) -> None:
        polls = [desk.ask(worker, rng.randint(1, 3)) for worker in rng.sample(workers, rng.randint(1, 3))]
        await desk.turn()
        for poll in polls:
            desk.dispatcher.close_poll(poll)  # now and then its answer is lost

    async def end_some() -> None:
        held = await scene.rows(
            "select id::text, attempt, fence, worker_id::text as w from runs where state = 'running'"
        )
        for run in rng.sample(held, min(len(held), rng.randint(0, 4))):
            if rng.random() < 0.3:
                await report.give_back(scene.db, [report.Returned(run["w"], run["id"], run["fence"])])
            elif rng.random() < 0.2:
                await scene.api.post(f"/v1/runs/{run['id']}/cancel")
                await scene.end(run["w"], end_of(run, "cancelled"))
            else:
                await scene.end(run["w"], end_of(run))

    for step in range(24):
        if step < 16:
            await scene.ask(rng.choice(jobs), rng.randint(1, 4))
        await asyncio.gather(*map(claim_at, rng.sample(desks, 2)), end_some())
        for worker, (cpu, memory) in (await used(scene)).items():
            assert Amounts(cpu, memory).within(total[worker]), step
    for _ in range(200):
        if not await scene.value("select count(*) from runs"):
            break
        await claim_at(rng.choice(desks))
        await end_some()
    assert await scene.value("select count(*) from runs") == 0, "all that was asked for came to its end"


# ── a large run among small ones ─────────────────────────────────────────────────────────────────────────────────


async def test_a_large_run_is_not_starved_by_small_ones(scene: Scene) -> None:
    """Small runs come without end, and there is always room for one of them, never for the large one."""
    worker = await hire(scene, cpu=4)
    small = await scene.job(resources={"cpu": 1}, priority=1000)
    large = await scene.job(resources={"cpu": 3})
    await scene.ask(small, 4)
    desk = Desk(scene, patience=HOUR)
    poll = desk.ask(worker)
    await desk.turn()
    running = list(poll.answer.result())
    assert len(running) == 4
    [wanted] = await scene.ask(large)
    for _ in range(3):
        await scene.ask(small)
        await scene.end(worker.id, end_of(running.pop()))
        poll = desk.ask(worker)
        await desk.turn()
        [row] = poll.answer.result()
        assert row["id"] != wanted
        running.append(row)
    await scene.sql.execute("update runs set ready_at = ready_at - interval '1 hour' where id = $1", wanted)
    for _ in range(3):
        await scene.ask(small)
        await scene.end(worker.id, end_of(running.pop()))
        desk.dispatcher.close_poll(poll)
        poll = desk.ask(worker)
        await desk.turn()
        if poll.answer.done():
            break
    assert [row["id"] for row in poll.answer.result()][:1] == [wanted]
    assert len(running) == 1, "as soon as there was room, and no later"


async def test_a_worker_is_not_kept_for_a_run_that_has_gone(scene: Scene) -> None:
    worker = await hire(scene, cpu=4)
    [small] = await scene.ask(await scene.job(resources={"cpu": 2}))
    desk = Desk(scene, patience=timedelta(0))
    poll = desk.ask(worker, 1)
    await desk.turn()
    assert [row["id"] for row in poll.answer.result()] == [small]
    [large] = await scene.ask(await scene.job(resources={"cpu": 4}))
    poll = desk.ask(worker, 1)
    assert await desk.served(poll) == [[]]
    [other] = await scene.ask(await scene.job(resources={"cpu": 1}))
    assert await desk.served(poll) == [[]], "it is kept for the large one"
    await scene.api.post(f"/v1/runs/{large}/cancel")
    assert await desk.served(poll) == [[other]]


async def test_nor_for_one_that_another_dispatcher_has_started(scene: Scene) -> None:
    small, big = await hire(scene, cpu=4), await hire(scene, cpu=4)
    await scene.ask(await scene.job(resources={"cpu": 2}))
    await scene.ask(await scene.job(resources={"cpu": 4}))
    desk, other = Desk(scene, patience=timedelta(0)), Desk(scene)
    assert len(await take(scene, small, 1)) == 1
    poll = desk.ask(small, 1)
    assert await desk.served(poll) == [[]], "it is kept for the large one"
    assert [len(ids) for ids in await other.served(other.ask(big))] == [1]
    [last] = await scene.ask(await scene.job(resources={"cpu": 1}))
    assert await desk.served(poll) == [[last]]


# ── labels ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_required_labels_must_be_there(scene: Scene) -> None:
    desk = Desk(scene)
    wanted = {"region": "eu", "disk": "ssd"}
    polls = [desk.ask(await hire(scene, labels=labels)) for labels in ({}, {"region": "eu"}, wanted | {"x": "y"})]
    [run_id] = await scene.ask(await scene.job(placement={"require": wanted}))
    assert await desk.served(*polls) == [[], [], [run_id]]


async def test_the_near_worker_is_waited_for_a_moment_and_then_the_far_one_takes_it(scene: Scene) -> None:
    near, far = await hire(scene, labels={"region": "eu"}), await hire(scene)
    job = await scene.job(placement={"prefer": {"region": "eu"}})
    [first] = await scene.ask(job)
    desk = Desk(scene, near_wait=HOUR)
    polls = [desk.ask(far), desk.ask(near)]
    assert await desk.served(*polls) == [[], [first]], "the near one first"
    [second] = await scene.ask(job)
    assert await desk.served(polls[0]) == [[]], "it lives, so it is waited for"
    place = desk.dispatcher._places[next(iter(desk.dispatcher._fitter._looked))]
    assert place.next_due is not None, "and then looked again, at the very moment"
    await scene.sql.execute("update runs set ready_at = ready_at - interval '1 hour' where id = $1", second)
    assert await desk.served(polls[0]) == [[second]]


async def test_nobody_waits_for_a_near_worker_that_does_not_live(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(placement={"prefer": {"region": "eu"}}))
    desk = Desk(scene, near_wait=HOUR)
    poll = desk.ask(await hire(scene))
    assert await desk.served(poll) == [[run_id]]


async def test_needs_labels_and_preference_together(scene: Scene) -> None:
    job = await scene.job(
        resources={"cpu": 1}, placement={"require": {"os": "linux"}, "prefer": {"zone": "a"}}, max_concurrency=2
    )
    await scene.ask(job, 4)
    desk = Desk(scene, near_wait=timedelta(0))
    polls = [
        desk.ask(await hire(scene, cpu=9, labels={"zone": "a"})),
        desk.ask(await hire(scene, cpu=9, labels={"os": "linux"})),
        desk.ask(await hire(scene, cpu=1, labels={"os": "linux", "zone": "a"})),
    ]
    got = await desk.served(*polls)
    assert [len(runs) for runs in got] == [0, 1, 1], got


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "resources", [{"cpu": -1}, {"memory_mb": -0.5}, {"gpus": 1e30}, {"cpu": 1e9}, {"disk_mb": 2e9}]
)
async def test_numbers_that_cannot_be_are_refused(scene: Scene, worker_key: str, resources: dict[str, float]) -> None:
    body: dict[str, Any] = {"name": "liar", "targets": ["process"], "resources": resources}
    hand = WorkerHand(type(scene.api)(scene.node, worker_key), "")
    problem = await hand.api.post("/v1/worker/register", body, expect=422)
    assert problem["errors"][0]["path"].startswith("resources.")
    assert await scene.value("select count(*) from workers where name <> 'conductor'") == 0


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"resources": {"cpu": 1e7}}, "resources.cpu"),
        ({"resources": {"memory_mb": 1.5}}, "resources.memory_mb"),
        ({"placement": {"require": {"a\n": "b"}}}, "placement.require"),
        ({"placement": {"prefer": {"a": "b" * 300}}}, "placement.prefer.a"),
    ],
)
async def test_needs_that_cannot_be_are_refused(scene: Scene, fields: dict[str, Any], path: str) -> None:
    body = {"target": {"kind": "process", "command": ["true"]}} | fields
    problem = await scene.api.call("POST", "/v1/jobs", json=body, expect=422)
    assert problem["errors"][0]["path"] == path


async def test_a_worker_shows_what_is_free(scene: Scene) -> None:
    worker = await hire(scene, cpu=4, memory_mb=1000, gpus=1)
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("editor", "other")
    job = await scene.job(other, resources={"cpu": 1, "memory_mb": 100})
    await other.post(f"/v1/jobs/{job['id']}/runs", {})
    await scene.ask(await scene.job(resources={"cpu": 0.5}))
    assert len(await take(scene, worker)) == 2
    shown = (await scene.api.get(f"/v1/workers/{worker.id}"))["resources"]
    assert shown["total"] == {"cpu": 4, "memory_mb": 1000, "disk_mb": 0, "gpus": 1}
    assert shown["used"] == {"cpu": 1.5, "memory_mb": 100, "disk_mb": 0, "gpus": 0}
    assert shown["free"] == {"cpu": 2.5, "memory_mb": 900, "disk_mb": 0, "gpus": 1}
    assert shown["yours"]["cpu"] == 0.5
    assert (await other.get(f"/v1/workers/{worker.id}"))["resources"]["yours"]["cpu"] == 1


async def test_a_claim_whose_worker_is_unknown_gives_nothing_out(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(resources={"cpu": 1}))
    nobody = str(uuid.uuid4())
    taken = await claim.take(scene.db, await shares(scene), [nobody], Fitting())
    assert (taken.rows, [unfit.run_id for unfit in taken.unfit]) == ([], [run_id])
    assert all(share.floor == THE_BEGINNING for share in await shares(scene))
