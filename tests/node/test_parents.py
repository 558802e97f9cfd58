"""What a run is told of the runs that it waited for: with it, or by its token where that is large."""

from __future__ import annotations

from typing import Any

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, told
from tocsin.flow.parents import WITH_THE_RUN


async def make(scene: Scene, name: str, *parents: Any, **spec: Any) -> dict[str, Any]:
    body = {"name": name, "target": PROCESS, "retry": {"max_attempts": 1}} | spec
    body |= {"depends_on": list(parents)} if parents else {"schedule": {"manual": True}}
    return await scene.api.post("/v1/jobs", body)  # type: ignore[no-any-return]


async def claimed(worker: WorkerHand, *names: str) -> dict[str, dict[str, Any]]:
    """A run of each of these jobs, by its name."""
    found: dict[str, dict[str, Any]] = {}
    while found.keys() < set(names):
        answer = await worker.claim(last_claim=2**40, wait=20)
        found |= {run["job_name"]: run for run in answer["runs"]}
    assert found.keys() == set(names)
    return found


async def turn(worker: WorkerHand, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Claim runs of these jobs and end them with these results (None: they fail); what was claimed, by name."""
    runs = await claimed(worker, *results)
    ends = [told(run, "failed") if results[n] is None else told(run, result=results[n]) for n, run in runs.items()]
    await worker.report(finished=ends)
    return runs


async def test_results_come_with_the_run(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    root = await make(live, "root")
    for name in ("extract", "check"):
        await make(live, name, "root")
    await make(live, "load", "extract", {"job": "check", "on": "completion"}, "root")
    await make(live, "repair", {"job": "check", "on": "failure"})
    await live.ask(root)
    first = await turn(worker, {"root": 1})
    assert "parents" not in first["root"], "it waited for nobody"
    second = await turn(worker, {"extract": {"rows": 3}, "check": None})
    [ended] = await live.rows("select run_id from history where job_id = $1", root["id"])
    expected = {"root": {"run_id": str(ended["run_id"]), "state": "succeeded", "result": 1}}
    assert {name: run["parents"] for name, run in second.items()} == {"extract": expected, "check": expected}
    third = await turn(worker, {"load": None, "repair": None})
    load = third["load"]["parents"]
    assert load["root"] == expected["root"] and load["extract"]["result"] == {"rows": 3}
    assert (load["check"]["state"], "result" in load["check"]) == ("dead", False)
    assert third["repair"]["parents"] == {"check": load["check"]}
    assert "parents_url" not in third["load"]


async def test_what_is_large_is_fetched_by_the_run_alone(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key, targets=["process", "python"], functions=["f"])
    await make(live, "root")
    large = "x" * (WITH_THE_RUN // 2)
    for name in ("a", "b"):
        await make(live, name, "root")
    await make(live, "c", "a", "b", target={"kind": "python", "function": "f"})
    await make(live, "small", "a")
    [root] = (await live.api.get("/v1/jobs?q=root"))["items"]
    await live.ask(root)
    await turn(worker, {"root": 1})
    await turn(worker, {"a": large, "b": large})
    runs = await claimed(worker, "c", "small")
    assert runs["small"]["parents"]["a"]["result"] == large
    run = runs["c"]
    assert "parents" not in run and run["parents_url"] == f"/v1/runs/{run['run_id']}/parents"
    holder = Api(live.node, run["token"])
    found = await holder.get(run["parents_url"])
    assert {name: (each["state"], each["result"]) for name, each in found.items()} == {
        "a": ("succeeded", large),
        "b": ("succeeded", large),
    }
    other = Api(live.node, runs["small"]["token"])
    await other.get(run["parents_url"], expect=401)
    await live.api.get(run["parents_url"], expect=403)
    await worker.report(finished=[told(run)])
    assert (await holder.get(run["parents_url"], expect=409))["code"] == "superseded"


async def test_a_job_without_a_name_is_told_by_its_id(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    root = await live.job()
    await make(live, "child", root["id"])
    await live.ask(root)
    [run] = (await worker.claim(wait=20))["runs"]
    await worker.report(finished=[told(run, result=5)])
    run = (await claimed(worker, "child"))["child"]
    assert run["parents"][root["id"]]["result"] == 5


async def test_who_was_tried_again_is_told_of_who_succeeded(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    root = await make(live, "root")
    await make(live, "a", "root")
    child = await make(live, "c", "root", "a")
    await live.ask(root)
    await turn(worker, {"root": 1})
    await turn(worker, {"a": None})
    dead = await live.value("select run_id from history where state = 'dead'")
    await live.api.post(f"/v1/runs/{dead}/retry")
    again = await turn(worker, {"a": 2})
    assert again["a"]["parents"]["root"]["result"] == 1
    last = await turn(worker, {"c": None})
    assert {name: each["result"] for name, each in last["c"]["parents"].items()} == {"root": 1, "a": 2}
    failed = await live.value("select run_id from history where job_id = $1 and state = 'dead'", child["id"])
    await live.api.post(f"/v1/runs/{failed}/retry")
    assert (await turn(worker, {"c": 3}))["c"]["parents"] == last["c"]["parents"]


async def test_a_large_list_is_mapped_over_without_anybodys_hand(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    jobs = {"list": {"target": PROCESS}, "each": {"target": PROCESS, "depends_on": ["list"], "map": {"over": "list"}}}
    made = await live.api.post("/v1/workflows", {"name": "flow", "jobs": jobs})
    await live.api.post(f"/v1/workflows/{made['id']}/runs", {})
    large = ["x" * WITH_THE_RUN, "y"]
    await turn(worker, {"flow.list": large})
    found: list[Any] = []
    while len(found) < len(large):
        found += (await worker.claim(last_claim=2**40, wait=20))["runs"]
    assert sorted(run["args"]["item"] for run in found) == large
