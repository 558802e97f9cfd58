"""One job of a workflow run, run again: in a run that has ended, and in one that still runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.kit import Scene
from tests.flow.stage import DIAMOND, Says, Stage, nodes
from tests.node.test_scopes import key_for
from tocsin.errors import Contention
from tocsin.flow import dead

FORK = {"a": [], "b": ["a"], "after_b": ["b"], "c": ["a"], "after_c": ["c"], "both": ["after_b", "after_c"]}


def failing(*names: str) -> Says:
    return lambda node, _: {"outcome": "failed"} if node in names else {}


async def retry(stage: Stage, run_id: str, node: str, expect: int = 202) -> dict[str, Any]:
    """Run a node of a workflow run again, by its last run."""
    return await stage.api.post(f"/v1/runs/{await run_of(stage, run_id, node)}/retry", expect=expect)  # type: ignore[no-any-return]


async def run_of(stage: Stage, run_id: str, node: str) -> str:
    found = {each["name"]: each["run_id"] for each in (await stage.get(run_id))["nodes"]}
    return found[node]  # type: ignore[no-any-return]


# ── in one that has ended ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_node_takes_its_place_again_with_what_was_skipped_because_of_it(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask(args={"day": 1})
    failed = await stage.play(run_id, failing("b"))
    assert failed["state"] == "dead"
    stage.started.clear()
    was = await run_of(stage, run_id, "b")
    made = await retry(stage, run_id, "b")
    assert (made["origin_run_id"], made["workflow_run_id"]) == (was, run_id)
    run = await stage.play(run_id)
    assert stage.started == ["b", "d"], "and nothing else"
    assert (run["state"], run["retries"]) == ("succeeded", 1)
    assert await stage.states(run_id) == dict.fromkeys(DIAMOND, "succeeded")
    again = await stage.scene.run(await run_of(stage, run_id, "b"))
    assert (again["origin_run_id"], again["trigger"], again["workflow_run_id"]) == (was, "retry", run_id)


async def test_a_root_has_the_arguments_of_the_workflow_run_again(stage: Stage) -> None:
    await stage.make(nodes({"a": [], "b": ["a"]}))
    run_id = await stage.ask(args={"day": 1})
    await stage.play(run_id, failing("a"))
    await retry(stage, run_id, "a")
    run = await stage.play(run_id)
    assert run["state"] == "succeeded"
    assert (await stage.scene.run(run["nodes"][0]["run_id"]))["args"] == {"day": 1}


async def test_what_else_failed_stays_and_so_does_the_verdict(stage: Stage) -> None:
    await stage.make(nodes(FORK))
    run_id = await stage.ask()
    await stage.play(run_id, failing("b", "c"))
    stage.started.clear()
    await retry(stage, run_id, "b")
    run = await stage.play(run_id)
    assert stage.started == ["b", "after_b"]
    assert (run["state"], run["error"]["message"]) == ("dead", "c is dead")
    assert await stage.states(run_id) == {
        **dict.fromkeys(("a", "b", "after_b"), "succeeded"),
        "c": "dead",
        **dict.fromkeys(("after_c", "both"), "skipped (upstream_failed)"),
    }
    await retry(stage, run_id, "c")
    assert (await stage.play(run_id))["state"] == "succeeded"
    assert stage.started == ["b", "after_b", "c", "after_c", "both"]


async def test_one_that_fails_again_may_be_tried_again(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.play(run_id, failing("d"))
    for _ in range(2):
        await retry(stage, run_id, "d")
        assert (await stage.play(run_id, failing("d")))["state"] == "dead"
    assert stage.started.count("d") == 3
    assert stage.started.count("a") == 1


async def test_a_mapped_node_is_mapped_anew_and_not_one_of_its_runs_alone(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"], "after": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id = await stage.ask()
    says: Says = lambda node, place: {"result": [1, 2]} if node == "list" else {}  # noqa: E731
    one_fails: Says = lambda node, place: {"outcome": "failed"} if (node, place) == ("each", 1) else says(node, place)  # noqa: E731
    await stage.play(run_id, one_fails)
    element = await stage.scene.value("select run_id::text from history where error_class = 'bad' limit 1")
    problem = await stage.api.post(f"/v1/runs/{element}/retry", expect=409)
    assert problem["code"] == "part_of_workflow"
    assert await run_of(stage, run_id, "each") in problem["detail"]
    await retry(stage, run_id, "each")
    assert (await stage.play(run_id, says))["state"] == "succeeded"
    assert stage.started == ["list", "each", "each", "each", "each", "after"]


async def test_what_cannot_be_run_again_is_refused_and_says_what_to_do(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.play(run_id, failing("b"))
    refused = await retry(stage, run_id, "a", 409)
    assert refused["code"] == "nothing_failed"
    refused = await retry(stage, run_id, "d", 409)
    assert (refused["code"], refused["detail"]) == (
        "upstream_failed",
        "d waits for b, which did not succeed: retry that",
    )
    first = await run_of(stage, run_id, "b")
    await retry(stage, run_id, "b")
    await stage.play(run_id, failing("b"))
    refused = await stage.api.post(f"/v1/runs/{first}/retry", expect=409)
    assert (refused["code"], await run_of(stage, run_id, "b") in refused["detail"]) == ("run_again_since", True)
    await stage.api.call("PUT", "/v1/workflows/by-name/flow", json={"name": "flow", "jobs": nodes({"a": []})})
    assert (await retry(stage, run_id, "b", 409))["code"] == "job_completed"


async def test_what_is_archived_in_part_is_not_run_again(stage: Stage) -> None:
    """How its other jobs ended is not known here any more: they would be run a second time."""
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.play(run_id, failing("b"))
    was = await run_of(stage, run_id, "b")
    await stage.scene.sql.execute("delete from history where run_id = $1", run_id)
    assert (await stage.api.post(f"/v1/runs/{was}/retry", expect=409))["code"] == "archived"


async def test_a_key_that_is_kept_to_the_job_alone_does_not_run_the_workflow(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.play(run_id, failing("b"))
    was = await run_of(stage, run_id, "b")
    only_b = await key_for(stage.scene, jobs=["flow.b"])
    assert (await only_b.post(f"/v1/runs/{was}/retry", expect=403))["code"] == "out_of_scope"
    all_of_it = await key_for(stage.scene, jobs=["flow", "flow.b"])
    await all_of_it.post(f"/v1/runs/{was}/retry", expect=202)
    assert (await stage.play(run_id))["state"] == "succeeded"


async def test_it_waits_like_any_run_of_its_workflow_and_once(stage: Stage) -> None:
    await stage.make(nodes(FORK))
    run_id = await stage.ask()
    await stage.play(run_id, failing("b", "c"))
    await stage.api.post(f"/v1/workflows/{stage.workflow['id']}/pause")
    await retry(stage, run_id, "b")
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "waiting"
    assert (await retry(stage, run_id, "c", 409))["code"] == "under_way"
    assert not await stage.claim()


async def test_the_newest_graph_is_run_to_its_end(stage: Stage) -> None:
    """What was added since has not run yet, and does; what failed beside stays."""
    await stage.make(nodes({"a": [], "b": ["a"], "c": ["a"]}))
    run_id = await stage.ask()
    await stage.play(run_id, failing("b", "c"))
    newest = nodes({"a": [], "b": ["a"], "c": ["a"], "new": ["a"], "newer": ["b", "new"]})
    await stage.api.call("PUT", "/v1/workflows/by-name/flow", json={"name": "flow", "jobs": newest})
    stage.started.clear()
    await retry(stage, run_id, "b")
    await stage.play(run_id)
    assert sorted(stage.started) == ["b", "new", "newer"]
    assert (await stage.states(run_id))["c"] == "dead"


# ── in one that still runs ───────────────────────────────────────────────────────────────────────────────────────


async def held(stage: Stage, graph: dict[str, list[Any]], fails: str, *keep: str) -> tuple[str, dict[str, Any]]:
    """A workflow run of which these runs are held, and another has failed."""
    await stage.make(nodes(graph))
    run_id = await stage.ask()
    kept: dict[str, Any] = {}
    await stage.turn()
    while rows := await stage.claim():
        for node, row in rows.items():
            if node in keep:
                kept[node] = row
            else:
                await stage.end(row, "failed" if node == fails else "succeeded")
        await stage.turn()
    assert (await stage.get(run_id))["state"] == "running"
    return run_id, kept


async def test_in_one_that_runs_it_starts_at_once_and_what_was_skipped_follows(stage: Stage) -> None:
    run_id, kept = await held(stage, FORK, "b", "c")
    assert (await stage.states(run_id))["after_b"] == "skipped (upstream_failed)"
    was = await run_of(stage, run_id, "b")
    made = await retry(stage, run_id, "b")
    assert (made["job_name"], made["origin_run_id"], made["workflow_run_id"]) == ("flow.b", was, run_id)
    assert await stage.states(run_id) == {
        **{"a": "succeeded", "b": "ready", "after_b": "waiting", "c": "running", "after_c": "waiting"},
        "both": "waiting",
    }
    await stage.play_all(lambda node, _: {})
    await stage.end(kept["c"])
    run = await stage.play(run_id)
    assert (run["state"], run["retries"]) == ("succeeded", 0)
    assert stage.started == ["a", "b", "c", "b", "after_b", "after_c", "both"]


async def test_what_waits_for_others_too_goes_by_how_it_ends_now(stage: Stage) -> None:
    run_id, kept = await held(stage, DIAMOND, "b", "c")
    assert (await stage.states(run_id))["d"] == "waiting"
    await retry(stage, run_id, "b")
    await stage.end(kept["c"])
    assert (await stage.states(run_id))["d"] == "waiting", "for what is run again"
    run = await stage.play(run_id)
    assert run["state"] == "succeeded"
    assert stage.started == ["a", "b", "c", "b", "d"]
    d = await stage.scene.run(run["nodes"][3]["run_id"])
    assert d["origin_run_id"] is None, "it is the same run, which had not been decided"


async def test_one_that_fails_again_in_one_that_runs_fails_it(stage: Stage) -> None:
    run_id, kept = await held(stage, DIAMOND, "b", "c")
    await retry(stage, run_id, "b")
    [row] = (await stage.claim()).values()
    await stage.end(row, "failed")
    await stage.end(kept["c"])
    run = await stage.play(run_id)
    assert (run["state"], run["error"]["message"]) == ("dead", "b is dead")
    assert await stage.states(run_id) == {
        **{"a": "succeeded", "b": "dead", "c": "succeeded", "d": "skipped (upstream_failed)"}
    }


async def test_two_that_failed_are_run_again_one_after_the_other(stage: Stage) -> None:
    graph = {"x": [], "y": [], "z": [], "join": ["x", "y"], "end": ["join", "z"]}
    await stage.make(nodes(graph))
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    await stage.end(rows["x"], "failed")
    await stage.end(rows["y"], "failed")
    assert (await stage.states(run_id))["join"] == "skipped (upstream_failed)"
    await retry(stage, run_id, "x")
    assert (await retry(stage, run_id, "y"))["job_name"] == "flow.y"
    await stage.play_all(lambda node, _: {})
    await stage.end(rows["z"])
    assert (await stage.play(run_id))["state"] == "succeeded"
    assert sorted(stage.started) == ["end", "join", "x", "x", "y", "y", "z"]


async def test_a_compensation_that_has_not_begun_is_not_needed_after_all(stage: Stage) -> None:
    graph = {"a": [], "other": [], "undo": [{"job": "a", "on": "failure"}, {"job": "other", "on": "completion"}]}
    run_id, kept = await held(stage, graph, "a", "other")
    await retry(stage, run_id, "a")
    await stage.play_all(lambda node, _: {})
    await stage.end(kept["other"])
    assert (await stage.play(run_id))["state"] == "succeeded"
    assert (await stage.states(run_id))["undo"] == "skipped (not_needed)"


async def test_one_that_is_mapped_over_what_ran_again_has_its_result(stage: Stage) -> None:
    jobs = nodes({"list": [], "other": [], "each": ["list", "other"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    await stage.end(rows["list"], "failed")
    await retry(stage, run_id, "list")
    [row] = (await stage.claim()).values()
    await stage.end(row, result=[1, 2, 3])
    await stage.end(rows["other"])
    run = await stage.play(run_id)
    assert (run["state"], run["nodes"][2]["elements"]) == ("succeeded", {"succeeded": 3})


async def test_what_is_under_way_or_being_stopped_is_not_run_again(stage: Stage) -> None:
    run_id, _ = await held(stage, DIAMOND, "b", "c")
    was = await run_of(stage, run_id, "b")
    await retry(stage, run_id, "b")
    assert (await stage.api.post(f"/v1/runs/{was}/retry", expect=409))["code"] == "under_way"
    await stage.api.post(f"/v1/workflow-runs/{run_id}/cancel")
    assert (await stage.api.post(f"/v1/runs/{was}/retry", expect=409))["code"] == "under_way"


async def test_two_who_ask_at_once_run_it_once(stage: Stage) -> None:
    run_id, _ = await held(stage, DIAMOND, "b", "c")
    was = await run_of(stage, run_id, "b")
    asked = [stage.api.http.post(f"/v1/runs/{was}/retry", json={}) for _ in range(4)]
    statuses = [reply.status_code for reply in await asyncio.gather(*asked)]
    assert sorted(statuses) == [202, 409, 409, 409]
    assert list(await stage.claim()) == ["b"]


async def test_one_that_comes_to_its_end_meanwhile_is_left_alone(stage: Stage, scene: Scene) -> None:
    """All of its jobs have ended, and nobody has ended the whole yet."""
    await stage.make(nodes({"a": []}))
    run_id = await stage.ask()
    await stage.turn()
    await stage.end((await stage.claim())["a"], "failed")
    was = await run_of(stage, run_id, "a")
    with pytest.raises(Contention, match="ends at this moment"):
        await dead.retry(scene.db, await scene.who(), was, scene.db.clock.now(), None)
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "dead"
