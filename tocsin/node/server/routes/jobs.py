"""Jobs, and runs asked for by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tocsin.flow import catalog, control, history
from tocsin.flow.catalog import JobFilter
from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.shared.transitions import Controlled
from tocsin.flow.submit import NotSealed, RunsRequest, Stored, job_request
from tocsin.model.job import RunRequest
from tocsin.model.packed import LARGE
from tocsin.node.server.http import Call, answer, cursor_of, limit_of, listed, tag_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.edits import documents_again
from tocsin.node.server.routes.keeping import kept, may_be_apart
from tocsin.node.server.routes.named import versioned
from tocsin.node.server.routes.runs import list_runs_of
from tocsin.node.server.routes.table import REPLAYED, controlled, route
from tocsin.wire import Reason, decode_job_spec, decode_run_batch, decode_run_request, encode

_reason = msgspec.json.Decoder(Reason).decode


@route("POST", "/v1/jobs", "jobs.write")
async def create_job(call: Call) -> Reply:
    spec = await kept(call, call.decode(decode_job_spec), may_be_apart(call.body))
    request = job_request(call.who, spec, call.wish, call.node.db.clock.now())
    await call.node.allowances.admit(call.who, request.wish, jobs=1, runs=int(spec.once))
    stored = await call.node.submit_job(request)
    if isinstance(stored, Stored):
        if request.by_calendar:
            return _job_answer(await catalog.get_job(call.node.db, call.who, stored.ids[0], call.estimates), 201)
        made = (stored.ids[0], spec, request.spec_json, request.schedule_json)
        [job_text] = catalog.new_documents(call.who, [made], stored.at, call.estimates)
        return answer(job_text, 201, {"etag": '"1"'})
    [job] = await documents_again(call, stored)
    return _job_answer(job, 201, True)


@route("GET", "/v1/jobs", "jobs.read")
async def list_jobs(call: Call) -> Reply:
    query = call.query("state", "tag", "q", "pool", "limit", "cursor")
    limit = limit_of(query)
    wanted = JobFilter(query.get("state"), query.get("pool"), query.get("q"), tag_of(query))
    found = await catalog.list_jobs(call.node.db, call.who, wanted, cursor_of(query), limit + 1, call.estimates)
    return answer(listed(found, limit))


@route("GET", "/v1/jobs/{id}", "jobs.read")
async def get_job(call: Call) -> Reply:
    return _job_answer(await catalog.get_job(call.node.db, call.who, call.id(), call.estimates))


@route("DELETE", "/v1/jobs/{id}", "jobs.write")
async def delete_job(call: Call) -> Reply:
    return await _cancel_job(call, "job.delete", Reason())


@route("POST", "/v1/jobs/{id}/cancel", "jobs.operate")
async def cancel_job(call: Call) -> Reply:
    return await _cancel_job(call, "job.cancel", call.decode(_reason, b"{}"))


async def _cancel_job(call: Call, action: str, body: Reason) -> Reply:
    async def step() -> Controlled:
        return await control.cancel(
            call.node.db, call.who, call.id(), body.reason, body.running == "stop", call.wish, action, call.version
        )

    return await _controlled_job(call, step)


@route("POST", "/v1/jobs/{id}/pause", "jobs.operate")
async def pause_job(call: Call) -> Reply:
    reason = call.decode(_reason, b"{}").reason
    return await _controlled_job(
        call, lambda: control.pause(call.node.db, call.who, call.id(), reason, call.wish, call.version)
    )


@route("POST", "/v1/jobs/{id}/resume", "jobs.operate")
async def resume_job(call: Call) -> Reply:
    reason = call.decode(_reason, b"{}").reason
    return await _controlled_job(
        call, lambda: control.resume(call.node.db, call.who, call.id(), reason, call.wish, call.version)
    )


async def _controlled_job(call: Call, step: Callable[[], Awaitable[Controlled]]) -> Reply:
    replayed = await controlled(call, step)
    return _job_answer(await catalog.get_job(call.node.db, call.who, call.id(), call.estimates), replayed=replayed)


def _job_answer(job: dict[str, Any], status: int = 200, replayed: bool = False) -> Reply:
    return versioned(job, status, REPLAYED if replayed else None)


@route("POST", "/v1/jobs/{id}/runs", "jobs.operate")
async def run_job(call: Call) -> Reply:
    request = call.decode(decode_run_request, b"{}")
    stored = await submit_runs_of(call, [request])
    if isinstance(stored, Stored):
        return answer(stored.run, 202)
    return answer(await history.get_run(call.node.db, call.who, stored.ids[0]), 202, REPLAYED)


@route("POST", "/v1/jobs/{id}/runs/batch", "jobs.operate")
async def run_job_batch(call: Call) -> Reply:
    stored = await submit_runs_of(call, call.decode(decode_run_batch).runs)
    body = {"ids": stored.ids, "items": [{"id": id_} for id_ in stored.ids]}
    return answer(body, 202, None if isinstance(stored, Stored) else REPLAYED)


async def submit_runs_of(call: Call, runs: list[RunRequest]) -> Stored | Replay:
    """Make runs of the job that the path names."""
    now = call.node.db.clock.now()
    request = RunsRequest(call.who, call.id(), [run.asked_at(now) for run in runs], "api", call.wish)
    await call.node.allowances.admit(call.who, request.wish, runs=len(runs), of=request.job_id)
    if len(call.body) > LARGE or any(run.sensitive for run in runs):
        sensitive = await _is_sensitive(call)
        if sensitive is not None:  # else nothing comes of it, and nothing is to be left behind
            request = await _packed(call, request, sensitive)
    try:
        return await call.node.submit_runs(request)
    except NotSealed:
        return await call.node.submit_runs(await _packed(call, request, sensitive=True))


async def _is_sensitive(call: Call) -> bool | None:
    return await call.node.payloads.is_sensitive(call.who.tenant_id, call.id())


async def _packed(call: Call, request: RunsRequest, sensitive: bool) -> RunsRequest:
    """The same request with all arguments packed that are sensitive (by the job, or by their own word) or large."""
    packed = dict(request.packed)
    for place, run in enumerate(request.runs):
        args = encode(run.args) if isinstance(run.args, dict) else b""
        if args and (sensitive or run.sensitive or len(args) > LARGE):
            packed[place] = await call.node.payloads.pack(
                call.who.tenant_id, request.job_id, args, sensitive or run.sensitive
            )
            await asyncio.sleep(0)  # thousands of them are not sealed at a stretch
    sealed = any(each.data_key for each in packed.values())
    pepper = await call.node.payloads.pepper(call.who.tenant_id) if sealed else b""
    return request._replace(packed=packed, pepper=pepper)


@route("GET", "/v1/jobs/{id}/runs", "runs.read")
async def list_job_runs(call: Call) -> Reply:
    await catalog.get_job(call.node.db, call.who, call.id(), call.estimates)
    return await list_runs_of(call, call.id())
