"""Jobs changed, replaced by name, or made many at once; and what they were before."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from tocsin.errors import ApiProblem, BadRequest, Conflict, InvalidInput, PreconditionFailed, TooLarge
from tocsin.flow import catalog, edit
from tocsin.flow.edit import Edited
from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.submit import job_request
from tocsin.model.job import JobSpec
from tocsin.node.server.http import Call, answer, decode_json, limit_of, number_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.keeping import kept, may_be_apart
from tocsin.node.server.routes.named import name_of, new_name, versioned
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import decode_job_batch, decode_job_spec, decode_raw_job_batch, encode

_patch = msgspec.json.Decoder(dict[str, Any]).decode
MOST_JOBS = 1000  # of a batch, as `wire.JobBatch` says
_TURN_SECONDS, _MOST_SECONDS = 0.005, 2.0  # for the checks of a batch: at a stretch, and in all
READ_ONLY = {
    *("id", "tenant", "version", "state", "created_at", "updated_at", "next_run_at", "estimated_start_at"),
    *("last_run", "stats", "feeds"),
}


@route("PATCH", "/v1/jobs/{id}", "jobs.write")
async def change_job(call: Call) -> Reply:
    patch = call.decode(_patch)
    wrong = [_refused(path) for path in _unknown(patch, JobSpec)]
    if wrong:
        raise InvalidInput("; ".join(f"{e['path']}: {e['message']}" for e in wrong), errors=wrong)

    if may_be_apart(call.body):
        patch = await call.node.contents.merging(call.who.tenant_id, patch)

    def change(stored: bytes) -> JobSpec:
        return decode_json(decode_job_spec, encode(merged(msgspec.json.decode(stored), patch)))

    node = call.node
    try:
        done = await edit.edit(
            node.db, node.lanes, call.who, call.id(), change, call.wish, call.version, node.horizon, node.contents
        )
    except Replay as replay:
        return await _again(call, replay)
    return await _changed(call, done)


@route("GET", "/v1/jobs/by-name/{name}", "jobs.read")
async def get_named_job(call: Call) -> Reply:
    return versioned(await catalog.get_named(call.node.db, call.who, name_of(call, "job"), call.estimates))


@route("PUT", "/v1/jobs/by-name/{name}", "jobs.write")
async def put_job(call: Call) -> Reply:
    name = new_name(call)
    spec = call.decode(decode_job_spec)
    if spec.name not in (None, name):
        raise InvalidInput.field("name", "invalid", f"is not {name!r}, as the path says; leave it out")
    spec = msgspec.structs.replace(spec, name=name)
    only_new = call.request.headers.get("if-none-match") == "*"
    must_be = "if-match" in call.request.headers
    try:
        for _ in range(5):
            done = await _put(call, spec, name, only_new, must_be)
            if done is not None:
                return done
    except Replay as replay:
        return await _again(call, replay)
    raise Conflict(f"others made and ended jobs named {name!r} all the while", code="name_taken")


async def _put(call: Call, spec: JobSpec, name: str, only_new: bool, must_be: bool) -> Reply | None:
    """Replace the job of this name, or make it; None if somebody else made it at the same moment."""
    node = call.node
    wish = call.wish
    if not only_new:
        done = await edit.replace_named(
            node.db, node.lanes, call.who, name, spec, wish, call.version, node.horizon, node.contents
        )
        if done is not None:
            return await _changed(call, done)
        if must_be:
            raise PreconditionFailed(f"there is no job named {name!r}")
    try:
        request = job_request(call.who, await kept(call, spec, may_be_apart(call.body)), wish, node.db.clock.now())
        await node.allowances.admit(call.who, request.wish, jobs=1, runs=int(spec.once))
        stored = await node.submit_job(request)
    except Conflict as conflict:
        if conflict.code != "name_taken":
            raise
        if only_new:
            raise PreconditionFailed(f"there is a job named {name!r} already") from None
        return None
    if isinstance(stored, Replay):
        raise stored
    return versioned(await catalog.get_job(node.db, call.who, stored.ids[0], call.estimates), 201)


async def _changed(call: Call, done: Edited) -> Reply:
    call.node.tell(done.hints)
    return versioned(await catalog.get_job(call.node.db, call.who, done.job_id, call.estimates))


async def _again(call: Call, replay: Replay) -> Reply:
    [job] = await documents_again(call, replay)
    return versioned(job, replay.status, REPLAYED)


async def documents_again(call: Call, replay: Replay) -> list[dict[str, Any]]:
    """What a call answered, at the version it answered; state and times are those of today."""
    jobs = await catalog.get_jobs(call.node.db, call.who, replay.ids, call.estimates)
    behind = [job["id"] for job in jobs if replay.version not in (None, job["version"])]
    then = await edit.replaced(call.node.db, call.who, behind, replay.version or 1) if behind else {}
    return [job | then.get(job["id"], {}) for job in jobs]


@route("GET", "/v1/jobs/{id}/versions", "jobs.read")
async def list_versions(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    try:
        before = number_of(query, "cursor")
    except BadRequest:
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor") from None
    found = await edit.versions(call.node.db, call.who, call.id(), before, limit + 1)
    if not found:
        await catalog.get_job(call.node.db, call.who, call.id(), call.estimates)
    return answer(page(found, limit, "version"))


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────


@route("POST", "/v1/jobs/batch", "jobs.write")
async def create_jobs(call: Call) -> Reply:
    now = call.node.db.clock.now()
    requests = []
    specs = _batch(call)
    apart = may_be_apart(call.body)
    spent, began = 0.0, time.perf_counter()
    for i, spec in enumerate(specs):
        try:
            if (stored := await kept(call, spec, apart)) is not spec:
                began = time.perf_counter()  # what storing takes is not time for checks
            requests.append(job_request(call.who, stored, None, now))
        except ApiProblem as problem:
            raise located(f"jobs[{i}]", problem) from None
        if (turn := time.perf_counter() - began) > _TURN_SECONDS:
            spent += turn
            if spent > _MOST_SECONDS:
                raise TooLarge("these schedules take too long to check in one call: send fewer jobs at a time")
            await asyncio.sleep(0)  # others want an answer, too
            began = time.perf_counter()
    wish = call.wish
    await call.node.allowances.admit(call.who, wish, jobs=len(specs), runs=sum(spec.once for spec in specs))
    done = await call.node.submit_batch(requests, wish)
    if isinstance(done, Replay):
        return answer({"items": await documents_again(call, done)}, done.status, REPLAYED)
    if any(request.by_calendar or request.spec.depends_on for request in requests):
        return answer({"items": await catalog.get_jobs(call.node.db, call.who, done.ids, call.estimates)}, 201)
    made = ((id_, r.spec, r.spec_json, r.schedule_json) for id_, r in zip(done.ids, requests, strict=True))
    return answer({"items": catalog.new_documents(call.who, made, done.at, call.estimates)}, 201)


def _batch(call: Call) -> list[JobSpec]:
    try:
        return call.decode(decode_job_batch).jobs
    except InvalidInput as problem:
        # The decoder does not say which of the jobs it was.
        with contextlib.suppress(msgspec.MsgspecError):
            for i, raw in enumerate(decode_raw_job_batch(call.body).jobs[:MOST_JOBS]):
                try:
                    decode_json(decode_job_spec, bytes(raw))
                except ApiProblem as found:
                    raise located(f"jobs[{i}]", found) from None
        raise problem


def located(at: str, problem: ApiProblem) -> ApiProblem:
    """The same problem, saying which job of many has it."""
    whole = [{"path": "", "code": problem.code, "message": problem.detail}]
    errors = [e | {"path": ".".join(filter(None, (at, e["path"])))} for e in problem.errors or whole]
    kind = type(problem) if isinstance(problem, InvalidInput) else InvalidInput
    return kind("; ".join(f"{e['path']}: {e['message']}" for e in errors), code=problem.code, errors=errors)


# ── merge patch ──────────────────────────────────────────────────────────────────────────────────────────────────


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386: objects are merged, null takes away, anything else replaces."""
    if not isinstance(patch, dict):
        return patch
    out = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


def _unknown(patch: dict[str, Any], *kinds: type) -> Iterator[str]:
    """Paths that a job does not have. The decoder refuses those with a value; a null would pass unseen."""
    known = {field.encode_name: field.type for kind in kinds for field in msgspec.structs.fields(kind)}
    tags = {kind.__struct_config__.tag_field for kind in kinds}  # type: ignore[attr-defined]
    for key, value in patch.items():
        if key not in known and key not in tags:
            yield key
        elif isinstance(value, dict) and (parts := _parts(known.get(key))):
            yield from (f"{key}.{path}" for path in _unknown(value, *parts))


def _parts(kind: Any) -> list[type]:
    """The structs that a field may hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [part for inner in get_args(kind) for part in _parts(inner)]


def _refused(path: str) -> dict[str, str]:
    read_only = path in READ_ONLY or path in ("schedule.description", "schedule.tzdata")
    return {
        "path": path[:300],
        "code": "read_only" if read_only else "invalid",
        "message": "is told by the server and cannot be set" if read_only else "is no field of a job",
    }
