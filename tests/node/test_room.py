"""Room on a worker, on a node at work: what frees it wakes whoever waits for it."""

from __future__ import annotations

import asyncio

from tests import PATIENCE
from tests.flow.kit import Scene, WorkerHand, poll_opened, told


async def test_what_a_run_frees_goes_to_the_next_at_once(live: Scene, worker_key: str) -> None:
    job = await live.job(resources={"cpu": 1})
    first, second = await live.ask(job, 2)
    worker = await WorkerHand.register(live.node, worker_key, slots=5, resources={"cpu": 1})
    answer = await worker.claim(slots=5, wait=30)
    assert [run["run_id"] for run in answer["runs"]] == [first]
    opened = poll_opened(live.node)
    poll = asyncio.create_task(worker.claim(slots=4, last_claim=answer["claim_id"], wait=30))
    await opened.wait()
    # Something that needs a slot alone passes what finds no room.
    plain = await live.job(schedule=None)
    answer = await asyncio.wait_for(poll, PATIENCE)
    assert [run["job_id"] for run in answer["runs"]] == [plain["id"]]
    opened = poll_opened(live.node)
    poll = asyncio.create_task(worker.claim(slots=3, last_claim=answer["claim_id"], wait=30))
    await opened.wait()
    await worker.report(finished=[told({"run_id": first, "attempt": 1, "fence": await fence_of(live, first)})])
    assert [run["run_id"] for run in (await asyncio.wait_for(poll, PATIENCE))["runs"]] == [second]


async def fence_of(scene: Scene, run_id: str) -> int:
    return await scene.value("select fence from runs where id = $1", run_id)  # type: ignore[no-any-return]


async def test_a_worker_that_lies_about_what_is_free_gets_no_more(live: Scene, worker_key: str) -> None:
    await live.ask(await live.job(resources={"memory_mb": 600}), 3)
    worker = await WorkerHand.register(live.node, worker_key, slots=5, resources={"memory_mb": 1000})
    answer = await worker.claim(slots=5, wait=30)
    assert len(answer["runs"]) == 1
    lie = {"slots": 5, "resources": {"memory_mb": 1e6}, "last_claim": answer["claim_id"], "wait": 0.5}
    assert (await worker.say("claim", lie))["runs"] == []


async def test_a_python_function_with_needs_goes_to_who_knows_it_and_has_room(live: Scene, worker_key: str) -> None:
    job = await live.job(target={"kind": "python", "function": "train"}, resources={"gpus": 1})
    [run_id] = await live.ask(job)
    knows = {"targets": ["python"], "functions": ["train"]}
    without = await WorkerHand.register(live.node, worker_key, **knows)
    fits = await WorkerHand.register(live.node, worker_key, resources={"gpus": 2}, **knows)
    assert (await without.claim(wait=0.3))["runs"] == []
    assert [run["run_id"] for run in (await fits.claim(wait=30))["runs"]] == [run_id]
