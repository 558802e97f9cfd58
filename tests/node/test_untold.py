"""Integers beyond 64 bits, which no worker can be told in msgpack: those that were stored before such were refused end
their own run, and nobody else's."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tests.flow.kit import PROCESS, Scene, WorkerHand, told
from tests.node.test_parents import claimed, make

LARGE = 99999999999999999999999
MSGPACK = "application/msgpack"


async def packed_claim(worker: WorkerHand, *, shared: bool = True) -> list[str]:
    """The runs that a worker gets that speaks msgpack."""
    body = {"slots": 10, "last_claim": 2**40, "wait": 20.0, "shared_specs": shared}
    reply = await worker.api.http.post(
        f"/v1/worker/{worker.id}/claim",
        content=msgspec.msgpack.encode(body),
        headers={"content-type": MSGPACK, "accept": MSGPACK},
    )
    assert reply.status_code == 200, reply.text
    return [run["run_id"] for run in msgspec.msgpack.decode(reply.content)["runs"]]


async def claim_of(scene: Scene, worker: WorkerHand, good: str, odd: str, **claim: Any) -> None:
    """A worker gets the good run, and the other one has ended."""
    got: list[str] = []
    while not got or (await scene.run(odd))["state"] == "ready":
        got += await packed_claim(worker, **claim)
    assert got == [good]
    assert (await scene.run(odd))["state"] == "dead", "another try would be told as little"
    [end] = await scene.rows("select error_class from history where run_id = $1", odd)
    assert end["error_class"] == "integer_out_of_range"


async def test_arguments_from_before_end_their_run_alone(live: Scene, worker_key: str) -> None:
    job = await live.job(retry={"max_attempts": 3})
    [odd] = await live.ask(job, args={"n": 1})
    [good] = await live.ask(await live.job(), args={"n": 1})
    await live.sql.execute("update runs set args = $2 where id = $1", odd, f'{{"n": {LARGE}}}')
    await claim_of(live, await WorkerHand.register(live.node, worker_key), good, odd)


async def test_a_checkpoint_from_before_ends_its_run_alone(live: Scene, worker_key: str) -> None:
    [odd] = await live.ask(await live.job())
    [good] = await live.ask(await live.job())
    await live.sql.execute("update runs set checkpoint = $2 where id = $1", odd, f"[{LARGE}]")
    await claim_of(live, await WorkerHand.register(live.node, worker_key), good, odd)


async def test_a_job_from_before_ends_its_own_runs_alone(live: Scene, worker_key: str) -> None:
    job = await live.job(target={"kind": "http", "url": "https://x.example/", "body": {"n": 7777777}})
    await live.sql.execute("update jobs set spec = replace(spec::text, '7777777', $1)::jsonb", str(LARGE))
    live.node.specs._known.clear()
    worker = await WorkerHand.register(live.node, worker_key, targets=["process", "http"])
    for shared in (True, False):
        [odd] = await live.ask(job)
        [good] = await live.ask(await live.job())
        await claim_of(live, worker, good, odd, shared=shared)


async def test_a_double_that_the_database_writes_out_is_told(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key, targets=["http"])
    body = b'{"target": {"kind": "http", "url": "https://x.example/", "body": [1e30]}, "schedule": {"manual": true}}'
    job = await live.api.call("POST", "/v1/jobs", content=body, headers={"content-type": "application/json"})
    asked = await live.ask(job)
    assert await packed_claim(worker) == asked


async def test_what_a_worker_says_in_json_is_kept_as_a_text(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    root = await make(live, "root", target=PROCESS)
    await make(live, "child", "root")
    await live.ask(root)
    run = (await claimed(worker, "root"))["root"]
    result = {"n": LARGE, "m": -LARGE, "most": 2**64 - 1, "least": -(2**63)}
    note = {"run_id": run["run_id"], "fence": run["fence"], "checkpoint": [LARGE]}
    assert await worker.say("notes", {"notes": [note]}) == {"kept": [[run["run_id"], run["fence"]]]}
    assert await live.value("select checkpoint from runs where id = $1", run["run_id"]) == f'["{LARGE}"]'
    await worker.report(finished=[told(run, result=result)])
    child = (await claimed(worker, "child"))["child"]
    assert child["parents"]["root"]["result"] == result | {"n": str(LARGE), "m": str(-LARGE)}
    body = json.dumps({"finished": [told(child, result=0)]}).replace('"result": 0', f'"result": {"9" * 5000}')
    reply = await worker.api.http.post(f"/v1/worker/{worker.id}/report", content=body)
    assert reply.status_code == 200, reply.text
    assert (await live.run(child["run_id"]))["result"] == "9" * 5000
