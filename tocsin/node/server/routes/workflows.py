"""Workflows and their runs."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tocsin.errors import ApiProblem, Conflict, InvalidInput, NotFound, PreconditionFailed
from tocsin.flow import catalog, control, dead, edit, workflow_runs
from tocsin.flow.catalog import JobFilter
from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.shared.nodes import Nodes
from tocsin.flow.shared.transitions import Controlled
from tocsin.flow.submit import Stored, job_request
from tocsin.model.graph import MOST_NODES
from tocsin.model.states import LIVE
from tocsin.model.targets import WORKFLOW_POOL
from tocsin.model.workflow import WorkflowSpec, check, head_spec, node_specs
from tocsin.node.server.http import Call, answer, cursor_of, decode_json, id_of, limit_of, listed
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.backfills import backfill_of
from tocsin.node.server.routes.edits import documents_again, located
from tocsin.node.server.routes.jobs import submit_runs_of
from tocsin.node.server.routes.named import new_name, versioned
from tocsin.node.server.routes.table import REPLAYED, controlled, route
from tocsin.wire import (
    Nothing,
    Reason,
    decode_node,
    decode_raw_nodes,
    decode_run_request,
    decode_workflow_spec,
)

_reason = msgspec.json.Decoder(Reason).decode
_nothing = msgspec.json.Decoder(Nothing).decode
# What a job's document says and a workflow's does not, because it is the same for all.
_OF_JOBS_ALONE = {
    *("target", "pool", "resources", "placement", "retry", "concurrency_key", "rate_limit", "circuit", "depends_on"),
    *("secrets", "notify", "sensitive"),
}


# ── workflows ────────────────────────────────────────────────────────────────────────────────────────────────────


@route("POST", "/v1/workflows", "jobs.write")
async def create_workflow(call: Call) -> Reply:
    spec = _decode(call)
    check(spec)
    try:
        return await _create(call, spec)
    except Replay as replay:
        return await _again(call, replay)


@route("PUT", "/v1/workflows/by-name/{name}", "jobs.write")
async def put_workflow(call: Call) -> Reply:
    name = new_name(call)
    spec = _decode(call)
    if spec.name != name:
        raise InvalidInput.field("name", "invalid", f"is not {name!r}, as the path says")
    check(spec)
    try:
        for _ in range(5):
            done = await _put(call, spec)
            if done is not None:
                return done
    except Replay as replay:
        return await _again(call, replay)
    raise Conflict(f"others made and ended workflows named {name!r} all the while", code="name_taken")


async def _put(call: Call, spec: WorkflowSpec) -> Reply | None:
    """Replace the workflow of this name, or make it; None if somebody else made it at the same moment."""
    node = call.node
    nodes = await Nodes.prepare(node.lanes, call.who, node_specs(spec))
    given = spec.name, head_spec(spec), call.wish, call.version, node.horizon, node.contents, nodes
    done = await edit.replace_named(node.db, node.lanes, call.who, *given)
    if done is not None:
        node.tell(done.hints)
        return await _workflow(call, done.job_id)
    if "if-match" in call.request.headers:
        raise PreconditionFailed(f"there is no workflow named {spec.name!r}")
    try:
        return await _create(call, spec)
    except Conflict as conflict:
        # That of one of its jobs stays taken, however often it is tried.
        if conflict.code != "name_taken" or conflict.errors is None or conflict.errors[0]["path"] != "name":
            raise
        return None


async def _create(call: Call, spec: WorkflowSpec) -> Reply:
    """Store it, or raise `Replay`."""
    node = call.node
    request = job_request(call.who, head_spec(spec), None, node.db.clock.now(), of_workflow=True)
    nodes = await Nodes.prepare(node.lanes, call.who, node_specs(spec))
    await node.allowances.admit(call.who, call.wish, jobs=1 + len(spec.jobs))
    try:
        stored = await node.submit_batch([request], call.wish, nodes)
    except ApiProblem as problem:
        # There is one document, not a batch of them.
        problem.errors = [
            each | {"path": each["path"].removeprefix("jobs[0].")} for each in problem.errors or ()
        ] or None
        raise
    if isinstance(stored, Replay):
        raise stored
    return await _workflow(call, stored.ids[0], 201)


def _decode(call: Call) -> WorkflowSpec:
    try:
        return call.decode(decode_workflow_spec)
    except InvalidInput as problem:
        # The decoder does not say which of the jobs it was.
        with contextlib.suppress(msgspec.MsgspecError):
            for name, raw in list(decode_raw_nodes(call.body).jobs.items())[:MOST_NODES]:
                try:
                    decode_json(decode_node, bytes(raw))
                except ApiProblem as found:
                    raise located(f"jobs.{name[:64]}", found) from None
        raise problem


@route("GET", "/v1/workflows", "jobs.read")
async def list_workflows(call: Call) -> Reply:
    query = call.query("state", "q", "limit", "cursor")
    limit = limit_of(query)
    wanted = JobFilter(query.get("state"), WORKFLOW_POOL, query.get("q"))
    found = await catalog.list_jobs(call.node.db, call.who, wanted, cursor_of(query), limit + 1, call.estimates)
    return answer(listed(found._replace(items=[_document(job) for job in found.items]), limit))


@route("GET", "/v1/workflows/{id}", "jobs.read")
async def get_workflow(call: Call) -> Reply:
    return await _workflow(call, call.id())


@route("DELETE", "/v1/workflows/{id}", "jobs.write")
async def delete_workflow(call: Call) -> Reply:
    return await _cancel(call, "job.delete", Reason())


@route("POST", "/v1/workflows/{id}/cancel", "jobs.operate")
async def cancel_workflow(call: Call) -> Reply:
    return await _cancel(call, "job.cancel", call.decode(_reason, b"{}"))


async def _cancel(call: Call, action: str, body: Reason) -> Reply:
    given = body.reason, body.running == "stop", call.wish, action, call.version
    return await _controlled(call, lambda: control.cancel(call.node.db, call.who, call.id(), *given))


@route("POST", "/v1/workflows/{id}/pause", "jobs.operate")
async def pause_workflow(call: Call) -> Reply:
    given = call.decode(_reason, b"{}").reason, call.wish, call.version
    return await _controlled(call, lambda: control.pause(call.node.db, call.who, call.id(), *given))


@route("POST", "/v1/workflows/{id}/resume", "jobs.operate")
async def resume_workflow(call: Call) -> Reply:
    given = call.decode(_reason, b"{}").reason, call.wish, call.version
    return await _controlled(call, lambda: control.resume(call.node.db, call.who, call.id(), *given))


async def _controlled(call: Call, step: Callable[[], Awaitable[Controlled]]) -> Reply:
    await _workflow(call, call.id())  # not any job
    replayed = await controlled(call, step)
    return await _workflow(call, call.id(), headers=REPLAYED if replayed else None)


async def _workflow(call: Call, workflow_id: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return _answer(await catalog.get_job(call.node.db, call.who, workflow_id, call.estimates), status, headers)


async def _again(call: Call, replay: Replay) -> Reply:
    [job] = await documents_again(call, replay)
    return _answer(job, replay.status, REPLAYED)


def _answer(job: dict[str, Any], status: int, headers: dict[str, str] | None) -> Reply:
    if job["target"]["kind"] != "workflow":
        raise NotFound("there is no such workflow")
    return versioned(_document(job), status, headers)


def _document(job: dict[str, Any]) -> dict[str, Any]:
    """A workflow's document, of that of the job that stands for it."""
    return {name: value for name, value in job.items() if name not in _OF_JOBS_ALONE} | {"jobs": job["target"]["jobs"]}


# ── their runs ───────────────────────────────────────────────────────────────────────────────────────────────────


@route("POST", "/v1/workflows/{id}/runs", "jobs.operate")
async def run_workflow(call: Call) -> Reply:
    request = call.decode(decode_run_request, b"{}")
    await _workflow(call, call.id())
    stored = await submit_runs_of(call, [request])
    return await _run(call, stored.ids[0], 202, None if isinstance(stored, Stored) else REPLAYED)


@route("POST", "/v1/workflows/{id}/backfill", "jobs.operate")
async def backfill_workflow(call: Call) -> Reply:
    await _workflow(call, call.id())
    return await backfill_of(call)


@route("GET", "/v1/workflow-runs", "runs.read")
async def list_workflow_runs(call: Call) -> Reply:
    query = call.query("workflow", "state", "limit", "cursor")
    limit = limit_of(query)
    wanted = id_of(query, "workflow"), query.get("state"), cursor_of(query)
    found = await workflow_runs.list_(call.node.db, call.who, *wanted, limit + 1)
    return answer(listed(found, limit))


@route("GET", "/v1/workflow-runs/{id}", "runs.read")
async def get_workflow_run(call: Call) -> Reply:
    return await _run(call, call.id())


@route("POST", "/v1/workflow-runs/{id}/cancel", "runs.operate")
async def cancel_workflow_run(call: Call) -> Reply:
    reason = call.decode(_reason, b"{}").reason
    run = await workflow_runs.get(call.node.db, call.who, call.id(), call.node.parquet)
    given = run["head_run_id"], reason, call.wish
    replayed = await controlled(call, lambda: control.cancel_run(call.node.db, call.who, *given))
    return await _run(call, run["id"], headers=REPLAYED if replayed else None)


@route("POST", "/v1/workflow-runs/{id}/retry", "runs.operate")
async def retry_workflow_run(call: Call) -> Reply:
    call.decode(_nothing, b"{}")
    node = call.node
    run = await workflow_runs.get(node.db, call.who, call.id(), node.parquet)
    if run["state"] in LIVE:
        raise Conflict("this workflow run is under way", code="under_way")
    await node.allowances.admit(call.who, call.wish, runs=1, of=run["head_run_id"])
    headers = None
    try:
        now = node.db.clock.now()
        _, hints = await dead.retry(node.db, call.who, run["head_run_id"], now, call.wish, node.parquet)
        node.tell(hints)
    except Replay:
        headers = REPLAYED
    return await _run(call, run["id"], 202, headers)


async def _run(call: Call, run_id: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return answer(await workflow_runs.get(call.node.db, call.who, run_id, call.node.parquet), status, headers)
