"""What workflows do when a server dies, told as `test_failpoints.py` wants it."""

from __future__ import annotations

from typing import Any

from .cluster import until
from .evidence import instant
from .play import STORIES, Document, Play, end, story

_BEFORE = set(STORIES)


DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


class Workflow:
    """A workflow run that is worked at by hand, asked for again and again with one key."""

    def __init__(self, play: Play, graph: dict[str, list[str]] = DIAMOND) -> None:
        self._play, self._graph = play, graph
        self._held: dict[str, Document] = {}
        self._last = 0
        self.id = ""
        self.run: Document = {}
        self.failing: set[str] = set()
        self.results: dict[str, Any] = {}

    async def make(self, **more: Document) -> str:
        """Its id; `more`: what else the documents of some of its jobs say."""
        await self._play.register()
        target = {"kind": "process", "command": ["true"]}
        once = {"target": target, "retry": {"max_attempts": 1}}
        jobs = {name: once | {"depends_on": own} | more.get(name, {}) for name, own in self._graph.items()}
        made = await self._play.post("/v1/workflows", {"name": "flow", "jobs": jobs}, key="make")
        self.id = str(made["id"])
        return self.id

    async def work(self, workflow_id: str) -> Document:
        """Ask for the run, report what was taken, take more."""
        self.run = await self._play.post(f"/v1/workflows/{workflow_id}/runs", {}, key="run")
        ends = [self._end(run) for run in self._held.values()]
        await self._play.report(last_claim=self._last, finished=ends)
        self._held.clear()
        answer = await self._play.ask(self._last)
        self._last = answer["claim_id"]
        self._held.update((run["run_id"], run) for run in answer["runs"])
        return await self._play.get(f"/v1/workflow-runs/{self.run['id']}")

    async def worked_until(self, state: str) -> None:
        async def reached() -> bool:
            return bool((await self.work(self.id))["state"] == state)

        await until(f"it is {state}", reached, 30)

    def _end(self, run: Document) -> Document:
        name = run["spec"]["name"].removeprefix("flow.")
        return end(run, "failed" if name in self.failing else "succeeded") | {"result": self.results.get(name)}


@story("workflow_begin.before_commit", "workflow_begin.after_commit")
async def begin_a_workflow_run(play: Play) -> None:
    await _worked_to_its_end(play)


@story("report.before_commit", "report.after_commit", "report.before_commit", "report.after_commit")
async def release_what_waits_for_a_job_of_a_workflow(play: Play) -> None:
    await _worked_to_its_end(play)


@story("workflow_why.before_commit", "workflow_why.after_commit")
async def end_a_workflow_run(play: Play) -> None:
    await _worked_to_its_end(play)


async def _worked_to_its_end(play: Play) -> None:
    workflow = Workflow(play)
    workflow_id = await workflow.make()
    await play.survive(lambda: workflow.work(workflow_id))

    await workflow.worked_until("succeeded")
    run = await play.get(f"/v1/workflow-runs/{workflow.run['id']}")
    assert {node["name"]: node["state"] for node in run["nodes"]} == dict.fromkeys(DIAMOND, "succeeded")
    for node in run["nodes"]:
        assert len(await play.runs(node["job_id"])) == 1, "each of its jobs has one run"
        attempts = (await play.get(f"/v1/runs/{node['run_id']}/attempts"))["items"]
        assert [attempt["outcome"] for attempt in attempts] == ["succeeded"]
    assert len(await play.runs(workflow_id)) == 1
    ends = {node["name"]: instant(node["finished_at"]) for node in run["nodes"]}
    starts = {node["name"]: instant(node["started_at"]) for node in run["nodes"]}
    assert all(starts[name] >= ends[parent] for name, parents in DIAMOND.items() for parent in parents)


@story("dead.before_commit", "dead.after_commit")
async def retry_a_job_of_a_workflow_run(play: Play) -> None:
    await _tried_again(play)


@story("workflow_begin.before_commit=kill:2", "workflow_begin.after_commit")
async def begin_what_is_tried_again_of_a_workflow_run(play: Play) -> None:
    await _tried_again(play)


async def _tried_again(play: Play) -> None:
    """Each of its jobs that did not succeed has one more run."""
    workflow = Workflow(play)
    workflow_id = await workflow.make()
    workflow.failing = {"b"}
    await workflow.worked_until("dead")
    workflow.failing = set()
    shown = await play.get(f"/v1/workflow-runs/{workflow.run['id']}")
    [was] = [node["run_id"] for node in shown["nodes"] if node["name"] == "b"]

    async def ask() -> Document:
        made = await play.post(f"/v1/runs/{was}/retry", {}, key="retry")
        await workflow.work(workflow_id)
        return made

    made = await play.survive(ask)
    assert made["origin_run_id"] == was

    await workflow.worked_until("succeeded")
    shown = await play.get(f"/v1/workflow-runs/{workflow.run['id']}")
    runs = {node["name"]: len(await play.runs(node["job_id"])) for node in shown["nodes"]}
    assert runs == {"a": 1, "b": 2, "c": 1, "d": 2}
    assert len(await play.runs(workflow_id)) == 2


@story("workflow_stop.before_commit", "workflow_stop.after_commit")
async def cancel_a_workflow_run(play: Play) -> None:
    workflow = Workflow(play)
    workflow_id = await workflow.make()

    async def begun() -> bool:
        shown = await workflow.work(workflow_id)
        return any(node["state"] == "running" for node in shown["nodes"])

    await until("its first job runs", begun)
    await play.survive(lambda: play.post(f"/v1/workflow-runs/{workflow.run['id']}/cancel", {}, key="cancel"))

    await workflow.worked_until("cancelled")
    shown = await play.get(f"/v1/workflow-runs/{workflow.run['id']}")
    states = {node["name"]: node["state"] for node in shown["nodes"]}
    assert (states["b"], states["c"], states["d"]) == ("cancelled",) * 3


@story("unfold.before_commit", "unfold.after_commit")
async def make_the_runs_of_a_job_that_is_mapped_over_a_large_result(play: Play) -> None:
    workflow = Workflow(play, {"list": [], "each": ["list"]})
    workflow_id = await workflow.make(each={"map": {"over": "list"}})
    workflow.results["list"] = [{"n": n, "text": "x" * 40_000} for n in range(3)]
    await play.survive(lambda: workflow.work(workflow_id))

    await workflow.worked_until("succeeded")
    shown = await play.get(f"/v1/workflow-runs/{workflow.run['id']}")
    [each] = [node["job_id"] for node in shown["nodes"] if node["name"] == "each"]
    runs = [run for run in await play.runs(each) if run["args"]]
    assert sorted(run["args"]["n"] for run in runs) == [0, 1, 2], "one for each element"
    assert {(run["state"], run["attempt"]) for run in runs} == {("succeeded", 1)}


WORKFLOWS = STORIES.keys() - _BEFORE
