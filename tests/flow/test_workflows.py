"""Workflow runs: begun, joined, mapped, stopped, ended, retried; on a node whose loops stand still."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, time
from typing import Any

import msgspec
import pytest

from tests.cluster.cluster import until
from tests.flow.kit import PROCESS, end_of
from tests.flow.old import DAY, Old
from tests.flow.stage import DIAMOND, WORKER, Stage, nodes
from tocsin.flow import parents, workflow_runs, workflows
from tocsin.flow.shared.failed import Failed
from tocsin.flow.shared.transitions import Family, Key, NewRun
from tocsin.flow.shared.transitions import stage as make_runs
from tocsin.model.ids import new_id, new_ids
from tocsin.model.workflow import CONDUCTOR


async def test_a_diamond_runs_in_order_and_ends(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask(args={"day": "today"})
    run = await stage.play(run_id, lambda node, _: {"result": {"of": node}})
    assert run["state"] == "succeeded"
    assert stage.started[0] == "a" and set(stage.started[1:3]) == {"b", "c"} and stage.started[3:] == ["d"]
    assert [node["result"] for node in run["nodes"]] == [{"of": name} for name in "abcd"]
    assert run["progress"] == {"succeeded": 4}
    assert {"from": "a", "to": "c", "on": "success"} in run["edges"]
    assert run["critical_path"]["nodes"][0] == "a"
    assert run["args"] == {"day": "today"}
    first = await stage.scene.run(run["nodes"][0]["run_id"])
    assert first["args"] == {"day": "today"}
    assert first["workflow_run_id"] == run_id
    assert first["logical_at"] == run["logical_at"]
    assert (await stage.scene.run(run["nodes"][3]["run_id"]))["args"] is None


async def test_all_runs_are_made_in_one_commit_and_wait(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    assert await stage.states(run_id) == dict.fromkeys("abcd", "waiting")
    await stage.turn()
    assert await stage.states(run_id) == {"a": "ready", "b": "waiting", "c": "waiting", "d": "waiting"}
    assert (await stage.get(run_id))["state"] == "running"


async def test_a_failure_skips_what_comes_after_and_a_retry_runs_just_that_again(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    run = await stage.play(run_id, lambda node, _: {"outcome": "failed"} if node == "b" else {})
    assert run["state"] == "dead"
    assert run["error"] == {"class": "workflow_failed", "message": "b is dead"}
    assert await stage.states(run_id) == {
        "a": "succeeded", "b": "dead", "c": "succeeded", "d": "skipped (upstream_failed)"
    }  # fmt: skip
    stage.started.clear()
    again = await stage.api.post(f"/v1/workflow-runs/{run_id}/retry", expect=202)
    assert again["id"] == run_id
    run = await stage.play(run_id)
    assert stage.started == ["b", "d"]
    assert (run["state"], run["retries"], run["error"]) == ("succeeded", 1, None)
    assert await stage.states(run_id) == dict.fromkeys("abcd", "succeeded")
    listed = await stage.api.get("/v1/workflow-runs")
    assert [(each["id"], each["state"]) for each in listed["items"]] == [(run_id, "succeeded")]
    problem = await stage.api.post(f"/v1/workflow-runs/{run_id}/retry", expect=409)
    assert problem["code"] == "nothing_failed"


async def test_compensation_runs_only_after_a_failure(stage: Stage) -> None:
    on = {"job": "a", "on": "failure"}
    jobs = nodes({"a": [], "b": ["a"], "undo": [on], "always": [{"job": "a", "on": "completion"}]})
    await stage.make(jobs)
    failed = await stage.play(await stage.ask(), lambda node, _: {"outcome": "failed"} if node == "a" else {})
    assert failed["state"] == "dead"
    assert {node["name"]: node["state"] for node in failed["nodes"]} == {
        "a": "dead", "b": "skipped", "undo": "succeeded", "always": "succeeded"
    }  # fmt: skip
    well = await stage.play(await stage.ask())
    assert well["state"] == "succeeded"
    assert {node["name"]: (node["state"], node["reason"]) for node in well["nodes"]}["undo"] == (
        "skipped",
        "not_needed",
    )


async def test_an_alarm_that_was_not_needed_is_raised_by_what_a_retry_finds(stage: Stage) -> None:
    await stage.make(nodes({"extract": [], "load": ["extract"], "alarm": [{"job": "load", "on": "failure"}]}))
    run_id = await stage.ask()
    await stage.play(run_id, lambda node, _: {"outcome": "failed"} if node == "extract" else {})
    assert await stage.states(run_id) == {
        "extract": "dead", "load": "skipped (upstream_failed)", "alarm": "skipped (not_needed)"
    }  # fmt: skip
    stage.started.clear()
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    await stage.play(run_id, lambda node, _: {"outcome": "failed"} if node == "load" else {})
    assert stage.started == ["extract", "load", "alarm"]
    assert await stage.states(run_id) == {"extract": "succeeded", "load": "dead", "alarm": "succeeded"}
    stage.started.clear()
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    assert (await stage.play(run_id))["state"] == "succeeded"
    assert stage.started == ["load"], "what was raised stays raised"


async def test_one_run_for_each_element_of_a_result(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"], "sum": ["each"]})
    jobs["each"]["map"] = {"over": "list.files"}
    await stage.make(jobs)
    run_id = await stage.ask()
    run = await stage.play(run_id, lambda node, _: {"result": {"files": ["x", "y", "z"]}} if node == "list" else {})
    assert run["state"] == "succeeded"
    each = run["nodes"][1]
    assert (each["state"], each["reason"], each["elements"]) == ("succeeded", "mapped", {"succeeded": 3})


@pytest.mark.parametrize(("result", "state"), [([], "succeeded"), ("text", "dead"), (None, "dead")])
async def test_what_cannot_be_mapped_fails_and_nothing_is_no_failure(stage: Stage, result: Any, state: str) -> None:
    jobs = nodes({"list": [], "each": ["list"], "sum": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run = await stage.play(await stage.ask(), lambda node, _: {"result": result})
    assert run["nodes"][1]["state"] == state
    assert run["state"] == state


async def test_a_mapped_node_whose_element_fails_is_mapped_anew_by_a_retry(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"], "sum": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id = await stage.ask()

    def says(node: str, _: int) -> dict[str, Any]:
        return {"result": [1, 2]} if node == "list" else {"outcome": "failed"}

    run = await stage.play(run_id, says)
    assert [node["state"] for node in run["nodes"]] == ["succeeded", "dead", "skipped"]
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    await stage.turn()
    for number, (_, row) in enumerate(await stage.claim_all()):
        await stage.end(row, result=number)
    sum_ = (await stage.claim())["sum"]
    told = await parents.handed_over(stage.scene.db, [Key(sum_["tenant_id"], sum_["id"])])
    assert told[sum_["id"]]["each"].result == [0, 1], "and not those of the first try"
    await stage.end(sum_)
    run = await stage.play(run_id)
    assert [node["state"] for node in run["nodes"]] == ["succeeded"] * 3
    assert run["nodes"][1]["elements"] == {"succeeded": 2}


async def test_a_cancel_stops_all_that_lives(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND | {"e": []}))
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    await stage.end(rows["a"])
    assert (await stage.api.post(f"/v1/workflow-runs/{run_id}/cancel", {"reason": "enough"}))["state"] == "stopping"
    await stage.turn()
    assert await stage.states(run_id) == {
        "a": "succeeded", "e": "stopping", "b": "cancelled (cancelled)", "c": "cancelled (cancelled)",
        "d": "cancelled (cancelled)",
    }  # fmt: skip
    assert (await stage.get(run_id))["state"] == "stopping"
    await stage.scene.end(WORKER, end_of(rows["e"], "cancelled"))
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "cancelled"


async def test_one_that_is_cancelled_before_it_began_makes_no_runs(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.scene.node.conductor._claim()
    await stage.api.post(f"/v1/workflow-runs/{run_id}/cancel")
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "cancelled"
    assert await stage.scene.value("select count(*) from runs") == 0


async def test_when_its_time_is_up_it_is_stopped(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND), timeout="PT1H")
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    await stage.scene.sql.execute("update runs set deadline_at = now() where worker_id = $1", CONDUCTOR)
    await stage.turn()
    await stage.scene.end(WORKER, end_of(rows["a"], "cancelled"))
    await stage.turn()
    run = await stage.get(run_id)
    assert (run["state"], run["error"]["class"]) == ("dead", "timeout")


async def test_a_pause_holds_what_has_begun(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.turn()
    await stage.api.post(f"/v1/workflows/{stage.workflow['id']}/pause")
    assert await stage.claim() == {}
    await stage.api.post(f"/v1/workflows/{stage.workflow['id']}/resume")
    assert (await stage.play(run_id))["state"] == "succeeded"


async def test_a_run_keeps_the_graph_it_began_with(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"], "gone": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    new = nodes({"list": [], "each": [], "new": ["each"]}, target={"kind": "python", "function": "a.b"})
    changed = await stage.api.call("PUT", "/v1/workflows/by-name/flow", json={"name": "flow", "jobs": new})
    assert changed["version"] == 2
    await stage.end(rows["list"], result=[1])
    run = await stage.play(run_id)
    assert {node["name"]: node["state"] for node in run["nodes"]} == dict.fromkeys(
        ("list", "each", "gone"), "succeeded"
    )
    assert run["workflow_version"] == 1
    kinds = await stage.scene.rows("select distinct l.kind from history h join lanes l on l.pool = 'default'")
    assert ["process"] in [list(row) for row in kinds]
    # The same document again changes nothing; one that brings a node back does.
    again = await stage.api.call("PUT", "/v1/workflows/by-name/flow", json={"name": "flow", "jobs": new})
    assert again["version"] == 2
    back = await stage.api.call("PUT", "/v1/workflows/by-name/flow", json={"name": "flow", "jobs": jobs})
    assert back["version"] == 3
    assert (await stage.play(await stage.ask(), lambda node, _: {"result": [1]}))["state"] == "succeeded"


async def test_cancelling_the_workflow_cancels_its_jobs_and_runs(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.turn()
    answer = await stage.api.post(f"/v1/workflows/{stage.workflow['id']}/cancel")
    assert answer["state"] == "cancelled"
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "cancelled"
    assert await stage.scene.value("select count(*) from jobs where state <> 'cancelled'") == 0
    # The names are free again.
    await stage.make(nodes(DIAMOND))


async def test_one_that_is_left_running_goes_on_when_its_workflow_is_cancelled(stage: Stage) -> None:
    jobs = nodes({"list": [], "each": ["list"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    await stage.api.post(f"/v1/workflows/{stage.workflow['id']}/cancel", {"running": "leave"})
    await stage.end(rows["list"], result=[1, 2])
    assert (await stage.play(run_id))["state"] == "succeeded"


async def test_its_jobs_are_changed_through_the_workflow_only(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    assert [job["name"] for job in (await stage.api.get("/v1/jobs"))["items"]] == ["flow"]
    node = await stage.api.get("/v1/jobs/by-name/flow.a")
    for method, path in (("POST", "/pause"), ("POST", "/cancel"), ("DELETE", ""), ("POST", "/runs")):
        problem = await stage.api.call(method, f"/v1/jobs/{node['id']}{path}", json={}, expect=409)
        assert problem["code"] == "part_of_workflow"
    await stage.api.call("PATCH", f"/v1/jobs/{node['id']}", json={"priority": 1}, expect=409)
    head = f"/v1/jobs/{stage.workflow['id']}"
    taken = await stage.api.call(
        "PUT", "/v1/jobs/by-name/flow", json={"target": PROCESS, "schedule": {"manual": True}}, expect=409
    )
    assert taken["code"] == "name_taken"
    changed = await stage.api.call("PATCH", head, json={"priority": 900})
    assert changed["priority"] == 900


async def test_the_dead_letter_is_the_workflow_runs_and_is_redriven_as_one(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.play(run_id, lambda node, _: {"outcome": "failed"} if node == "d" else {})
    [letter] = (await stage.api.get("/v1/dead-letters"))["items"]
    assert letter["id"] == run_id
    stage.started.clear()
    await stage.api.post("/v1/dead-letters/redrive", {"ids": [run_id]})
    assert (await stage.play(run_id))["state"] == "succeeded"
    assert stage.started == ["d"]


async def half_failed(stage: Stage) -> str:
    """A workflow run of which `d` failed."""
    await stage.make(nodes(DIAMOND))
    run_id = await stage.ask()
    await stage.play(run_id, lambda node, _: {"outcome": "failed"} if node == "d" else {})
    stage.started.clear()
    return run_id


async def ran_again_once(stage: Stage, run_id: str) -> None:
    run = await stage.play(run_id)
    assert (run["state"], run["error"], run["retries"]) == ("succeeded", None, 1)
    assert stage.started == ["d"]
    [listed] = (await stage.api.get("/v1/workflow-runs"))["items"]
    assert (listed["state"], listed["retries"]) == ("succeeded", 1)


@pytest.mark.parametrize("first", ["retry", "redrive"])
async def test_one_that_is_run_again_is_not_run_again_meanwhile(stage: Stage, first: str) -> None:
    run_id = await half_failed(stage)
    redrive = "/v1/dead-letters/redrive", {"ids": [run_id]}
    await stage.api.post(*(redrive if first == "redrive" else (f"/v1/workflow-runs/{run_id}/retry", {})))
    for _ in range(2):
        assert (await stage.api.post(f"/v1/workflow-runs/{run_id}/retry", expect=409))["code"] == "under_way"
        if first == "retry":
            assert (await stage.api.post(*redrive, expect=409))["code"] == "under_way"
        await stage.turn()
    # Whoever asks for all of them asks for what is not under way; of this one nothing is left to do.
    told = await stage.api.post("/v1/dead-letters/redrive", {"filter": {}})
    assert (told["items"], told["remaining"]) == ([], 0)
    await ran_again_once(stage, run_id)
    assert (await stage.api.get("/v1/dead-letters"))["items"] == []


async def test_of_two_retries_at_once_one_is_refused(stage: Stage) -> None:
    run_id, scene = await half_failed(stage), stage.scene
    waits = "select count(*) from pg_locks where not granted and locktype = 'advisory'"
    async with scene.sql.transaction():
        held = "select pg_advisory_xact_lock(hashtext('tocsin.heads'), hashtext($1::text) & 511)"
        await scene.sql.execute(held, run_id)
        calls = [asyncio.create_task(_retry(stage, run_id)) for _ in range(2)]

        async def both_wait() -> bool:
            return bool(await scene.value(waits) == 2)

        await until("both wait", both_wait)
    assert sorted(await asyncio.gather(*calls)) == ["", "under_way"]
    await ran_again_once(stage, run_id)


async def _retry(stage: Stage, run_id: str) -> str:
    """The code of what is wrong with it."""
    reply = await stage.api.http.post(f"/v1/workflow-runs/{run_id}/retry", json={})
    return str(reply.json().get("code", ""))


async def test_two_letters_of_one_workflow_run_are_redriven_as_one(stage: Stage) -> None:
    run_id = await half_failed(stage)
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    await stage.play(run_id, lambda node, _: {"outcome": "failed"})
    stage.started.clear()
    letters = (await stage.api.get("/v1/dead-letters"))["items"]
    assert len(letters) == 2
    told = await stage.api.post("/v1/dead-letters/redrive", {"ids": [letter["id"] for letter in letters]})
    assert len(told["items"]) == 1
    run = await stage.play(run_id)
    assert (run["state"], run["retries"], stage.started) == ("succeeded", 2, ["d"])
    assert (await stage.api.get("/v1/dead-letters"))["items"] == []


async def test_a_second_head_that_an_earlier_release_made_changes_nothing(stage: Stage) -> None:
    run_id, scene = await half_failed(stage), stage.scene
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    [head] = await scene.rows("select tenant_id, job_id::text, id::text from runs")
    family = Family(await scene.now(), run_id)
    second = NewRun(head["tenant_id"], new_id(await scene.now()), head["job_id"], "retry", None, None, None, run_id)
    async with scene.db.transaction("test") as connection:
        await make_runs(connection, [second._replace(family=family)])
    await stage.turn()
    run = await stage.get(run_id)
    assert (run["state"], run["head_run_id"], run["retries"]) == ("running", head["id"], 1)
    skipped = await scene.run(second.id)
    assert (skipped["state"], skipped["reason"]) == ("skipped", "coalesced")
    await ran_again_once(stage, run_id)
    assert [each["id"] for each in (await stage.api.get("/v1/dead-letters"))["items"]] == [run_id]
    assert (await stage.api.post(f"/v1/workflow-runs/{run_id}/retry", expect=409))["code"] == "nothing_failed"


BAD = [
    ({"a": ["b"], "b": ["a"]}, "dependency_cycle", "a → b → a"),
    ({"a": ["a"]}, "self_dependency", "itself"),
    ({"a": ["x"]}, "unknown_job", "'x'"),
    ({"a": [], "b": ["a", "a"]}, "duplicate_dependency", "already"),
]


@pytest.mark.parametrize(("graph", "code", "words"), BAD)
async def test_bad_graphs_are_refused_and_leave_nothing(stage: Stage, graph: Any, code: str, words: str) -> None:
    problem = await stage.api.post("/v1/workflows", {"name": "flow", "jobs": nodes(graph)}, expect=422)
    assert problem["errors"][0]["code"] == code
    assert words in problem["errors"][0]["message"]
    assert await stage.scene.value("select count(*) from jobs") == 0


async def test_names_that_are_taken_are_refused_and_leave_nothing(stage: Stage) -> None:
    await stage.scene.job(name="flow.b")
    problem = await stage.api.post("/v1/workflows", {"name": "flow", "jobs": nodes(DIAMOND)}, expect=409)
    assert (problem["code"], problem["errors"][0]["path"]) == ("name_taken", "jobs.b")
    await stage.scene.job(name="flow")
    problem = await stage.api.post("/v1/workflows", {"name": "flow", "jobs": nodes({"a": []})}, expect=409)
    assert problem["errors"][0]["path"] == "name"
    problem = await stage.api.call(
        "PUT", "/v1/workflows/by-name/flow", json={"name": "flow", "jobs": nodes({"a": []})}, expect=409
    )
    assert problem["code"] == "name_taken"
    assert await stage.scene.value("select count(*) from jobs") == 2


async def test_a_repeat_answers_the_first_reply(stage: Stage) -> None:
    body = {"name": "flow", "jobs": nodes(DIAMOND)}
    key = {"idempotency-key": "once"}
    first = await stage.api.post("/v1/workflows", body, headers=key)
    assert (await stage.api.post("/v1/workflows", body, headers=key))["id"] == first["id"]
    assert first["jobs"]["d"]["depends_on"] == ["b", "c"]
    assert first["schedule"]["manual"] is True
    assert "target" not in first


async def test_overlap_and_limits_are_the_workflows(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND), max_concurrency=1)
    first, second = await stage.ask(), await stage.ask()
    await stage.turn()
    assert [(await stage.get(id_))["state"] for id_ in (first, second)] == ["running", "waiting"]
    await stage.play(first)
    assert (await stage.play(second))["state"] == "succeeded"


async def test_a_beginning_takes_the_workflow_before_its_run_as_a_cancel_does(stage: Stage) -> None:
    """The other way round, each waited for what the other had."""
    await stage.make(nodes(DIAMOND))
    run_id, scene = await stage.ask(), stage.scene
    await scene.sql.execute("update runs set state = 'running', worker_id = $1", CONDUCTOR)
    tenant_id = await scene.value("select tenant_id from runs")
    async with scene.sql.transaction():
        await scene.sql.execute("select from jobs where id = $1 for no key update", stage.workflow["id"])
        beginning = asyncio.create_task(workflows.begin(scene.db, Key(tenant_id, run_id)))
        waits = "select exists (select from pg_locks where not granted and locktype in ('transactionid', 'tuple'))"
        await until("it waits for the workflow", lambda: scene.value(waits))
        await scene.sql.execute("select from runs where id = $1 for update nowait", run_id)
    await beginning
    assert await stage.states(run_id) == {"a": "ready", "b": "waiting", "c": "waiting", "d": "waiting"}


async def test_one_that_cannot_begin_keeps_no_other_back(stage: Stage) -> None:
    await stage.make(nodes({"a": []}))
    broken = await stage.ask()
    await stage.scene.sql.execute("update jobs set spec = '{}' where id = $1", stage.workflow["id"])
    stage.workflow = await stage.api.post("/v1/workflows", {"name": "other", "jobs": nodes({"b": []})})
    well = await stage.ask()
    with pytest.raises(msgspec.ValidationError):
        await stage.turn()
    [(_, row)] = await stage.claim_all()
    await stage.end(row)
    await stage.turn()  # the broken one is left out for a minute
    assert (await stage.get(well))["state"] == "succeeded"
    assert (await stage.scene.run(broken))["state"] == "running"


async def test_those_in_a_state_are_found_behind_any_number_of_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_runs, "_LOOKED_AT", 2)
    await stage.make(nodes({"a": []}), overlap="allow")
    ids = []
    for outcome in ("failed", "succeeded", "succeeded", "succeeded", "failed", "succeeded"):
        ids.append(await stage.ask())
        await stage.play_all(lambda node, _, outcome=outcome: {"outcome": outcome})  # type: ignore[misc]
    found, cursor, pages = [], "", 0
    while cursor is not None:
        listed = await stage.api.get(f"/v1/workflow-runs?state=dead&limit=1{cursor and f'&cursor={cursor}'}")
        found += [run["id"] for run in listed["items"]]
        cursor, pages = listed["next_cursor"], pages + 1
    assert found == [ids[4], ids[0]]
    assert pages <= 4, "each looks at two"


async def test_workflow_runs_that_cannot_begin_keep_no_other_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "_MOST", 2)
    conductor, begin = stage.scene.node.conductor, workflows.begin
    await stage.make(nodes({"a": []}), overlap="allow")
    broken = {await stage.ask() for _ in range(3)}
    good = await stage.ask()

    async def refuse(db: Any, head: Any) -> Any:
        if head.id in broken:
            raise ValueError("cannot be read")
        return await begin(db, head)

    monkeypatch.setattr(workflows, "begin", refuse)
    for _ in range(3):
        with contextlib.suppress(ValueError):
            await conductor.run_once()
    [(node, row)] = await stage.claim_all()
    assert node == "a" and (await stage.scene.run(row["id"]))["workflow_run_id"] == good


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_those_that_wait_for_proofs_keep_no_other_back(
    stage: Stage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflows, "_MOST", 2)
    await stage.make(nodes({"a": []}), overlap="allow")
    flood = [await stage.ask() for _ in range(4)]
    await stage.turn()
    rows = await stage.claim_all()
    assert len(rows) == 4
    if how == "late":
        await stage.scene.sql.execute("update runs set deadline_at = now() where worker_id = $1", CONDUCTOR)
    else:
        for run_id in flood:
            await stage.api.post(f"/v1/workflow-runs/{run_id}/cancel")
    await stage.turn()
    assert await stage.scene.value("select count(*) from runs where state = 'stopping' and worker_id = $1", WORKER) == 4
    assert await workflows.wanting(stage.scene.db, Failed()) == [], "nothing is done over and over"
    other = await stage.ask()
    await stage.turn()
    [(_, row)] = await stage.claim_all()
    await stage.end(row)
    await stage.turn()
    assert (await stage.get(other))["state"] == "succeeded"
    for _, row in rows:
        await stage.scene.end(WORKER, end_of(row, "cancelled"))
    await stage.turn()
    ended = {(await stage.get(run_id))["state"] for run_id in flood}
    assert ended == {"dead" if how == "late" else "cancelled"}


async def test_one_that_is_archived_is_shown_as_before(stage: Stage, old: Old) -> None:
    jobs = nodes({"list": [], "each": ["list"], "sum": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    await stage.make(jobs)
    run_id = await stage.ask()
    before = await stage.play(
        run_id, lambda node, _: {"result": [1, 2]} if node == "list" else {"outcome": "failed"} if node == "sum" else {}
    )
    await old.make_day(DAY)
    ids = [row["run_id"] for row in await stage.scene.rows("select distinct run_id from history order by run_id")]
    new = dict(zip(ids, new_ids(datetime.combine(DAY, time(1), UTC), len(ids)), strict=True))
    for was, id_ in new.items():
        for column in ("run_id", "workflow_run_id", "origin_run_id"):
            await stage.scene.sql.execute(f"update history set {column} = $2 where {column} = $1", was, id_)
    assert await old.archive() == [DAY]
    assert await old.hot() == 0
    moved = {str(was): id_ for was, id_ in new.items()}
    after = await stage.get(moved[run_id])
    assert after["state"] == before["state"] == "dead"
    for shown in (before, after):
        del shown["now"]
    for node in before["nodes"]:
        node["run_id"] = moved[node["run_id"]]
    assert after == before | {"id": moved[run_id], "head_run_id": moved[run_id]}
    assert await stage.get(after["nodes"][2]["run_id"]) | {"now": ""} == after | {"now": ""}
    problem = await stage.api.post(f"/v1/workflow-runs/{after['id']}/retry", expect=409)
    assert problem["code"] == "archived"
