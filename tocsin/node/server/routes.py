"""The routes of API v1 for people and programs: thin, each a few lines around one step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from tocsin.errors import NotFound, NotSupported
from tocsin.flow import catalog, control, dead, fleet, history, keys, logs
from tocsin.flow.catalog import JobFilter
from tocsin.flow.history import RunFilter
from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.submit import RunsRequest, Stored, job_request
from tocsin.model.ids import parse_id
from tocsin.model.job import RunRequest
from tocsin.node.server.http import (
    Call,
    Handler,
    answer,
    cursor_of,
    id_of,
    instant_of,
    limit_of,
    number_of,
    page,
    tag_of,
)
from tocsin.wire import (
    DeadLetterIds,
    NewKey,
    NewTenant,
    Nothing,
    Reason,
    decode_job_spec,
    decode_run_batch,
    decode_run_request,
)

ROUTES: list[tuple[str, str, str, Handler]] = []
_REPLAYED = {"idempotent-replayed": "true"}
_reason = msgspec.json.Decoder(Reason).decode
_dead_ids = msgspec.json.Decoder(DeadLetterIds).decode
_new_tenant = msgspec.json.Decoder(NewTenant).decode
_nothing = msgspec.json.Decoder(Nothing).decode
_new_key = msgspec.json.Decoder(NewKey).decode


def route(method: str, path: str, permission: str) -> Callable[[Handler], Handler]:
    """Register a handler under the permission it needs."""

    def register(handler: Handler) -> Handler:
        ROUTES.append((method, path, permission, handler))
        return handler

    return register


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@route("POST", "/v1/jobs", "jobs.write")
async def create_job(call: Call) -> Response:
    spec = call.decode(decode_job_spec)
    request = job_request(call.who, spec, call.wish, call.node.db.clock.now())
    stored = await call.node.submit_job(request)
    job = await catalog.get_job(call.node.db, call.who, stored.ids[0])
    return _job_answer(job, 201, isinstance(stored, Replay))


@route("GET", "/v1/jobs", "jobs.read")
async def list_jobs(call: Call) -> Response:
    query = call.query("state", "tag", "q", "pool", "limit", "cursor")
    limit = limit_of(query)
    wanted = JobFilter(query.get("state"), query.get("pool"), query.get("q"), tag_of(query))
    return answer(page(await catalog.list_jobs(call.node.db, call.who, wanted, cursor_of(query), limit + 1), limit))


@route("GET", "/v1/jobs/{id}", "jobs.read")
async def get_job(call: Call) -> Response:
    return _job_answer(await catalog.get_job(call.node.db, call.who, call.id()))


@route("DELETE", "/v1/jobs/{id}", "jobs.write")
async def delete_job(call: Call) -> Response:
    return await _cancel_job(call, "job.delete", Reason())


@route("POST", "/v1/jobs/{id}/cancel", "jobs.operate")
async def cancel_job(call: Call) -> Response:
    return await _cancel_job(call, "job.cancel", call.decode(_reason, b"{}"))


async def _cancel_job(call: Call, action: str, body: Reason) -> Response:
    async def step() -> control.Controlled:
        return await control.cancel(
            call.node.db, call.who, call.id(), body.reason, body.running == "stop", call.wish, action, call.version
        )

    return await _controlled_job(call, step)


@route("POST", "/v1/jobs/{id}/pause", "jobs.operate")
async def pause_job(call: Call) -> Response:
    reason = call.decode(_reason, b"{}").reason
    return await _controlled_job(
        call, lambda: control.pause(call.node.db, call.who, call.id(), reason, call.wish, call.version)
    )


@route("POST", "/v1/jobs/{id}/resume", "jobs.operate")
async def resume_job(call: Call) -> Response:
    reason = call.decode(_reason, b"{}").reason
    return await _controlled_job(
        call, lambda: control.resume(call.node.db, call.who, call.id(), reason, call.wish, call.version)
    )


async def _controlled_job(call: Call, step: Callable[[], Awaitable[control.Controlled]]) -> Response:
    replayed = await _controlled(call, step)
    return _job_answer(await catalog.get_job(call.node.db, call.who, call.id()), replayed=replayed)


async def _controlled(call: Call, step: Callable[[], Awaitable[control.Controlled]]) -> bool:
    """Take a control step and pass on what it woke and whom it stops; True if it was a replay."""
    try:
        done = await step()
    except Replay:
        return True
    call.node.tell(done.hints, done.stops)
    return False


def _job_answer(job: dict[str, Any], status: int = 200, replayed: bool = False) -> Response:
    return answer(job, status, {"etag": f'"{job["version"]}"'} | (_REPLAYED if replayed else {}))


@route("POST", "/v1/jobs/{id}/runs", "jobs.operate")
async def run_job(call: Call) -> Response:
    request = call.decode(decode_run_request, b"{}")
    ids, replayed = await _submit_runs(call, [request], 202)
    run = await history.get_run(call.node.db, call.who, ids[0])
    return answer(run, 202, _REPLAYED if replayed else None)


@route("POST", "/v1/jobs/{id}/runs/batch", "jobs.operate")
async def run_job_batch(call: Call) -> Response:
    ids, replayed = await _submit_runs(call, call.decode(decode_run_batch).runs, 202)
    return answer({"ids": ids, "items": [{"id": id_} for id_ in ids]}, 202, _REPLAYED if replayed else None)


async def _submit_runs(call: Call, runs: list[RunRequest], status: int) -> tuple[list[str], bool]:
    stored = await call.node.submit_runs(RunsRequest(call.who, call.id(), runs, "api", call.wish, status))
    return stored.ids, not isinstance(stored, Stored)


@route("GET", "/v1/jobs/{id}/runs", "runs.read")
async def list_job_runs(call: Call) -> Response:
    await catalog.get_job(call.node.db, call.who, call.id())
    return await _list_runs(call, call.id())


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@route("GET", "/v1/runs", "runs.read")
async def list_runs(call: Call) -> Response:
    return await _list_runs(call, None)


async def _list_runs(call: Call, job: str | None) -> Response:
    names = ("state", "outcome", "error_class", "worker", "tag", "from", "to", "limit", "cursor")
    query = call.query(*names, *(("job",) if job is None else ()))
    limit = limit_of(query)
    wanted = RunFilter(
        job or id_of(query, "job"),
        query.get("state"),
        query.get("outcome"),
        query.get("error_class"),
        id_of(query, "worker"),
        tag_of(query),
        instant_of(query, "from"),
        instant_of(query, "to"),
    )
    return answer(page(await history.list_runs(call.node.db, call.who, wanted, cursor_of(query), limit + 1), limit))


@route("GET", "/v1/runs/{id}", "runs.read")
async def get_run(call: Call) -> Response:
    return answer(await history.get_run(call.node.db, call.who, call.id()))


@route("GET", "/v1/runs/{id}/attempts", "runs.read")
async def get_attempts(call: Call) -> Response:
    return answer({"items": await history.attempts(call.node.db, call.who, call.id()), "next_cursor": None})


@route("POST", "/v1/runs/{id}/cancel", "runs.operate")
async def cancel_run(call: Call) -> Response:
    reason = call.decode(_reason, b"{}").reason
    replayed = await _controlled(call, lambda: control.cancel_run(call.node.db, call.who, call.id(), reason, call.wish))
    run = await history.get_run(call.node.db, call.who, call.id())
    return answer(run, 200, _REPLAYED if replayed else None)


@route("POST", "/v1/runs/{id}/retry", "runs.operate")
async def retry_run(call: Call) -> Response:
    call.decode(_nothing, b"{}")
    try:
        new, hints = await dead.retry(call.node.db, call.who, call.id(), call.node.db.clock.now(), call.wish)
    except Replay as first:
        return answer(await history.get_run(call.node.db, call.who, first.ids[0]), 202, _REPLAYED)
    call.node.tell(hints)
    return answer(await history.get_run(call.node.db, call.who, new), 202)


@route("GET", "/v1/runs/{id}/logs", "runs.read")
async def get_logs(call: Call) -> Response:
    query = call.query("attempt", "stream", "after", "limit")
    run = await history.get_run(call.node.db, call.who, call.id())
    limit = limit_of(query)
    attempt, after = number_of(query, "attempt"), number_of(query, "after") or 0
    lines, more = await logs.read(
        call.node.db, call.node.objects, call.who, run["id"], attempt, query.get("stream"), after, limit
    )
    return answer({"items": lines, "next_after": more})


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────


@route("GET", "/v1/dead-letters", "runs.read")
async def list_dead(call: Call) -> Response:
    query = call.query("job", "error_class", "limit", "cursor")
    limit = limit_of(query)
    letters = await dead.list_dead(
        call.node.db, call.who, id_of(query, "job"), query.get("error_class"), cursor_of(query), limit + 1
    )
    return answer(page(letters, limit))


@route("POST", "/v1/dead-letters/redrive", "runs.operate")
async def redrive(call: Call) -> Response:
    ids = _letter_ids(call)
    try:
        made, hints = await dead.redrive(call.node.db, call.who, ids, call.node.db.clock.now(), call.wish)
    except Replay as first:
        return answer({"items": [{"id": id_} for id_ in first.ids]}, 200, _REPLAYED)
    call.node.tell(hints)
    return answer({"items": [{"id": id_} for id_ in made]})


@route("POST", "/v1/dead-letters/discard", "runs.operate")
async def discard(call: Call) -> Response:
    ids = _letter_ids(call)
    try:
        return answer({"discarded": await dead.discard(call.node.db, call.who, ids, call.wish)})
    except Replay as first:
        return answer({"discarded": len(first.ids)}, 200, _REPLAYED)


def _letter_ids(call: Call) -> list[str]:
    if b'"filter"' in call.body:
        raise NotSupported("redrive and discard by filter are not supported yet: give ids")
    ids = [parse_id(id_) for id_ in call.decode(_dead_ids).ids]
    if None in ids:
        raise NotFound("there is nothing with this id")
    return [id_ for id_ in ids if id_ is not None]


# ── fleet, tenants, keys ─────────────────────────────────────────────────────────────────────────────────────────


@route("GET", "/v1/workers", "fleet.read")
async def list_workers(call: Call) -> Response:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    return answer(page(await fleet.list_workers(call.node.db, call.who, cursor_of(query), limit + 1), limit))


@route("GET", "/v1/workers/{id}", "fleet.read")
async def get_worker(call: Call) -> Response:
    return answer(await fleet.get_worker(call.node.db, call.who, call.id()))


@route("POST", "/v1/workers/{id}/drain", "fleet.operate")
async def drain_worker(call: Call) -> Response:
    await fleet.drain(call.node.db, call.who, call.id())
    return answer(await fleet.get_worker(call.node.db, call.who, call.id()))


@route("POST", "/v1/tenants", "tenants.manage")
async def create_tenant(call: Call) -> Response:
    return answer(await keys.create_tenant(call.node.db, call.who, call.decode(_new_tenant)), 201)


@route("GET", "/v1/tenants", "tenants.manage")
async def list_tenants(call: Call) -> Response:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    items = await keys.list_tenants(call.node.db, number_of(query, "cursor"), limit + 1)
    return answer(page(items, limit))


@route("POST", "/v1/keys", "keys.manage")
async def create_key(call: Call) -> Response:
    return answer(await keys.create_key(call.node.db, call.who, call.decode(_new_key)), 201)


@route("GET", "/v1/keys", "keys.manage")
async def list_keys(call: Call) -> Response:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    return answer(page(await keys.list_keys(call.node.db, call.who, cursor_of(query), limit + 1), limit))


@route("DELETE", "/v1/keys/{id}", "keys.manage")
async def revoke_key(call: Call) -> Response:
    await keys.revoke_key(call.node.db, call.who, call.id())
    return Response(status_code=204)


# ── named by the contract, not built yet ─────────────────────────────────────────────────────────────────────────


def _not_yet(method: str, path: str, permission: str) -> None:
    @route(method, path, permission)
    async def not_yet(call: Call) -> Response:
        raise NotSupported(f"{method} {path} is not supported yet")


for _method, _path, _permission in (
    ("PUT", "/v1/jobs/by-name/{name}", "jobs.write"),
    ("POST", "/v1/jobs/batch", "jobs.write"),
    ("PATCH", "/v1/jobs/{id}", "jobs.write"),
    ("POST", "/v1/jobs/{id}/backfill", "jobs.operate"),
    ("GET", "/v1/jobs/{id}/versions", "jobs.read"),
    ("GET", "/v1/jobs/{id}/occurrences", "jobs.read"),
    ("POST", "/v1/schedules/preview", "jobs.read"),
    ("GET", "/v1/runs/{id}/explain", "runs.read"),
    ("GET", "/v1/runs/{id}/logs/stream", "runs.read"),
    ("GET", "/v1/runs/{id}/logs/download", "runs.read"),
    ("GET", "/v1/logs/search", "runs.read"),
    ("GET", "/v1/events", "runs.read"),
    ("POST", "/v1/workflows", "jobs.write"),
    ("GET", "/v1/workflows/{id}", "jobs.read"),
    ("POST", "/v1/workflows/{id}/runs", "jobs.operate"),
    ("GET", "/v1/workflow-runs/{id}", "runs.read"),
    ("GET", "/v1/pools", "fleet.read"),
    ("PATCH", "/v1/pools/{name}", "fleet.operate"),
    ("POST", "/v1/pools/{name}/pause", "fleet.operate"),
    ("PATCH", "/v1/tenants/{slug}", "tenants.manage"),
    ("PUT", "/v1/secrets/{name}", "jobs.write"),
    ("GET", "/v1/secrets/{name}", "jobs.read"),
    ("DELETE", "/v1/secrets/{name}", "jobs.write"),
    ("PUT", "/v1/calendars/{name}", "jobs.write"),
    ("GET", "/v1/calendars/{name}", "jobs.read"),
    ("DELETE", "/v1/calendars/{name}", "jobs.write"),
    ("PUT", "/v1/channels/{name}", "jobs.write"),
    ("GET", "/v1/channels/{name}", "jobs.read"),
    ("DELETE", "/v1/channels/{name}", "jobs.write"),
    ("GET", "/v1/audit", "keys.manage"),
    ("GET", "/v1/audit/verify", "keys.manage"),
    ("GET", "/v1/reports/{kind}", "runs.read"),
    ("GET", "/v1/circuits", "fleet.read"),
    ("POST", "/v1/circuits/{name}/{verb}", "jobs.operate"),
):
    _not_yet(_method, _path, _permission)
