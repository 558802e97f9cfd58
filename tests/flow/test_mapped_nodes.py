"""Mapped nodes: a run for each element of a list, which stand and fall together with the run that they are of."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.cluster.cluster import until
from tests.flow.kit import end_of
from tests.flow.stage import WORKER, Stage, nodes
from tocsin.model.workflow import CONDUCTOR


async def mapped(stage: Stage, result: Any = (1, 2, 3), **more: Any) -> str:
    """A workflow run whose list is known: `each` has a run for each element, and `sum` waits."""
    jobs = nodes({"list": [], "each": ["list"], "sum": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs, **more)
    run_id = await stage.ask()
    await stage.turn()
    await stage.end((await stage.claim())["list"], result=result)
    await stage.turn()
    return run_id


async def node(stage: Stage, run_id: str, name: str) -> dict[str, Any]:
    return {each["name"]: each for each in (await stage.get(run_id))["nodes"]}[name]


async def take_one(stage: Stage) -> Any:
    [row] = await stage.scene.take(1, WORKER)
    return row


async def test_a_mapped_node_is_mapped_over(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"], "more": ["each"], "last": ["more"]})
    jobs["each"]["map"], jobs["more"]["map"] = {"over": "list"}, {"over": "each"}
    await stage.make(jobs)
    run_id = await stage.ask()
    run = await stage.play(
        run_id, lambda node, place: {"result": [1, 2] if node == "list" else {"n": place} if node == "each" else place}
    )
    assert run["state"] == "succeeded"
    assert (await node(stage, run_id, "more"))["elements"] == {"succeeded": 2}
    given = await stage.scene.rows(
        "select h.args from history h join jobs j on j.id = h.job_id"
        " where j.node = 'more' and h.origin_run_id is not null order by h.run_id"
    )
    assert [row["args"] for row in given] == ['{"n":0}', '{"n":1}']


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("text", "list is no list"),
        ([1] * 4, "list has 4 elements, at most 3 are allowed"),
        ([1, 2], "1 of 2 runs failed"),
    ],
)
async def test_a_mapped_node_that_fails_says_why(stage: Stage, result: Any, says: str) -> None:
    jobs = nodes({"list": [], "each": ["list"]})
    jobs["each"]["map"] = {"over": "list", "max": 3}
    await stage.make(jobs)
    run_id = await stage.ask()
    await stage.play(
        run_id, lambda name, place: {"result": result} if name == "list" else {"outcome": "failed"} if place else {}
    )
    each = await node(stage, run_id, "each")
    assert (each["state"], each["reason"]) == ("dead", "map_failed")
    assert each["error"] == {"class": "map_failed", "message": says}


async def test_a_key_made_of_arguments_is_that_of_each_element(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"]})
    jobs["each"]["map"] = {"over": "list"}
    jobs["each"]["concurrency_key"] = {"key": "customer-{args.item}", "max": 1}
    await stage.make(jobs)
    run_id = await stage.ask()
    await stage.turn()
    await stage.end((await stage.claim())["list"], result=["x", "y", "x"])
    rows = await stage.claim_all()
    assert len(rows) == 2, "one of each customer"
    for _, row in rows:
        await stage.end(row)
    assert (await stage.play(run_id))["state"] == "succeeded"
    assert stage.started.count("each") == 3


@pytest.mark.parametrize(("size", "shown"), [(10, True), (5000, False)])
async def test_a_result_is_shown_or_it_is_told_how_large_it_is(stage: Stage, size: int, shown: bool) -> None:
    jobs = nodes({"list": [], "each": ["list"], "one": [], "none": ["list"]})
    jobs["each"]["map"], jobs["none"]["map"] = {"over": "list"}, {"over": "list.none"}
    await stage.make(jobs)
    results = {"one": "ü" * size, "each": {"of": "x" * size}}
    says = {name: {"result": result} for name, result in results.items()} | {"list": {"result": [1, 2]}}
    run_id = await stage.ask()
    await stage.play(run_id, lambda name, _: says[name])
    found = {each["name"]: each for each in (await stage.get(run_id))["nodes"]}
    wanted = {"one": results["one"], "each": [results["each"]] * 2, "list": [1, 2]}
    for name, result in wanted.items():
        assert found[name]["result_bytes"] == len(msgspec.json.encode(result))
        assert found[name]["result"] == (result if shown or name == "list" else None)
    assert (found["none"]["result"], found["none"]["result_bytes"]) == (None, None)
    assert (await stage.scene.run(found["one"]["run_id"]))["result"] == results["one"]


async def test_a_mapped_node_without_elements_results_in_an_empty_list(stage: Stage) -> None:
    run_id = await mapped(stage, [])
    each = await node(stage, run_id, "each")
    assert (each["state"], each["result"], each["result_bytes"]) == ("succeeded", [], 2)


# ── stopped ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_workflow_run_ends_with_the_last_proof_of_its_elements(stage: Stage) -> None:
    run_id = await mapped(stage, max_concurrency=1)
    held = [await take_one(stage), await take_one(stage)]
    behind = await stage.ask()
    await stage.api.post(f"/v1/workflow-runs/{run_id}/cancel")
    await stage.turn()
    for row in held:
        assert (await stage.get(run_id))["state"] == "stopping"
        each = await node(stage, run_id, "each")
        assert (each["state"], each["finished_at"]) == ("stopping", None)
        assert (await stage.get(behind))["state"] == "waiting", "only one at a time"
        assert (await stage.api.post(f"/v1/workflow-runs/{run_id}/retry", expect=409))["code"] == "under_way"
        assert await stage.scene.take(10, WORKER) == []
        await stage.scene.end(WORKER, end_of(row, "cancelled"))
        await stage.turn()
    assert (await stage.get(run_id))["state"] == "cancelled"
    each = await node(stage, run_id, "each")
    assert (each["state"], each["reason"], each["elements"]) == ("cancelled", "cancelled", {"cancelled": 3})
    assert (await stage.get(behind))["state"] == "running"
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry", expect=202)


async def test_one_whose_time_is_up_ends_with_the_last_proof_of_its_elements(stage: Stage) -> None:
    run_id = await mapped(stage)
    row = await take_one(stage)
    await stage.scene.sql.execute("update runs set deadline_at = now() where worker_id = $1", CONDUCTOR)
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "running"
    assert (await node(stage, run_id, "each"))["state"] == "stopping"
    await stage.scene.end(WORKER, end_of(row, "cancelled"))
    await stage.turn()
    run = await stage.get(run_id)
    assert (run["state"], run["error"]["class"]) == ("dead", "timeout")


async def test_nothing_of_a_cancelled_mapped_node_starts_any_more(stage: Stage) -> None:
    run_id = await mapped(stage)
    row = await take_one(stage)
    each = await node(stage, run_id, "each")
    path = f"/v1/runs/{each['run_id']}"
    await stage.api.post(f"{path}/cancel")
    await stage.api.post(f"{path}/cancel")
    await stage.turn()
    assert await stage.scene.take(10, WORKER) == []
    assert (await stage.api.get(path))["state"] == "waiting", "for the proof"
    assert (await node(stage, run_id, "each"))["state"] == "stopping"
    await stage.scene.end(WORKER, end_of(row, "cancelled"))
    await stage.turn()
    assert (await stage.api.get(path))["state"] == "cancelled"
    assert await stage.states(run_id) == {
        "list": "succeeded", "each": "cancelled (cancelled)", "sum": "skipped (upstream_failed)"
    }  # fmt: skip
    assert (await stage.get(run_id))["state"] == "dead"


async def test_a_mapped_node_of_which_nothing_runs_is_cancelled_at_once(stage: Stage) -> None:
    run_id = await mapped(stage)
    each = await node(stage, run_id, "each")
    assert (await stage.api.post(f"/v1/runs/{each['run_id']}/cancel"))["state"] == "cancelled"
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "dead"
    assert await stage.scene.value("select count(*) from runs") == 0


async def test_a_cancel_that_comes_too_late_for_the_last_element_changes_nothing(stage: Stage) -> None:
    run_id = await mapped(stage, [1])
    row = await take_one(stage)
    each = await node(stage, run_id, "each")
    await stage.api.post(f"/v1/runs/{each['run_id']}/cancel")
    await stage.end(row)
    assert (await stage.play(run_id))["state"] == "succeeded"


async def test_a_mapped_node_whose_list_becomes_known_meanwhile_is_cancelled_with_its_elements(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id, scene = await stage.ask(), stage.scene
    await stage.turn()
    row = (await stage.claim())["list"]
    each = await node(stage, run_id, "each")
    waits = "select count(*) from pg_locks where not granted and locktype in ('transactionid', 'tuple')"
    async with scene.sql.transaction():
        await scene.sql.execute("select from runs where id = $1 for update", each["run_id"])
        ending = asyncio.create_task(stage.end(row, result=[1, 2]))
        await until("the end waits", lambda: scene.value(waits))
        cancel = asyncio.create_task(stage.api.post(f"/v1/runs/{each['run_id']}/cancel"))

        async def both_wait() -> bool:
            return bool(await scene.value(waits) == 2)

        await until("so does the cancel", both_wait)
    await ending
    await cancel
    await stage.turn()
    assert await scene.take(10, WORKER) == []
    assert (await node(stage, run_id, "each"))["state"] == "cancelled"
    assert (await stage.get(run_id))["state"] == "dead"
