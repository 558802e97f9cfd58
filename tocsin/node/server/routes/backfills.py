"""Backfills: past ranges of jobs' schedules as runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tocsin.clock import iso
from tocsin.errors import InvalidInput
from tocsin.flow import backfill
from tocsin.flow.backfill import Asked, Past
from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.shared.transitions import Controlled
from tocsin.model.backfill import MOST
from tocsin.model.job import JobSpec, check
from tocsin.model.packed import LARGE
from tocsin.model.targets import ProcessTarget
from tocsin.node.server.http import Call, answer, cursor_of, id_of, limit_of, listed
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, controlled, route
from tocsin.wire import BackfillRequest, Reason, Why, decode_backfill, encode

_reason = msgspec.json.Decoder(Reason).decode
_why = msgspec.json.Decoder(Why).decode


@route("POST", "/v1/jobs/{id}/backfill", "jobs.operate")
async def backfill_job(call: Call) -> Reply:
    return await backfill_of(call)


async def backfill_of(call: Call) -> Reply:
    """Fill a range of the job that the path names, or count it."""
    body = call.decode(decode_backfill)
    if body.schedule is not None:
        check(JobSpec(target=ProcessTarget(command=["true"]), schedule=body.schedule))
    if body.dry_run:
        found = await backfill.look(call.node.db, _past(call), call.who, call.id(), _asked(body))
        first, last = [iso(at) for at in found.first], found.last and iso(found.last)
        told = {"dry_run": True, "total": found.total, "too_many": found.total > MOST, "first": first, "last": last}
        return answer(told)
    return await _begin(call, body)


async def _begin(call: Call, body: BackfillRequest) -> Reply:
    asked, wish, payloads = _asked(body), call.wish, call.node.payloads
    if asked.args is not None and await payloads.is_sensitive(call.who.tenant_id, call.id()):
        sealed = await payloads.pack(call.who.tenant_id, call.id(), asked.args.encode(), sensitive=True)
        asked = asked._replace(sealed=sealed, pepper=await payloads.pepper(call.who.tenant_id))
    await call.node.allowances.admit(call.who, wish, runs=1)
    try:
        id_, headers = await backfill.begin(call.node.db, _past(call), call.who, call.id(), asked, wish), None
    except Replay as first:
        id_, headers = first.ids[0], REPLAYED
    call.node.backfiller.look()
    return answer(await backfill.get(call.node.db, call.who, id_), 202, headers)


def _asked(body: BackfillRequest) -> Asked:
    args = None if body.args is None else encode(body.args).decode()
    if args is not None and len(args) > LARGE // 2:
        raise InvalidInput.field("args", "too_large", f"are {LARGE // 2048} KiB at most, for all its runs have them")
    given = body.schedule, body.max_concurrency, body.priority, body.rerun
    return Asked(body.from_.at, body.to.at, *given, args)


def _past(call: Call) -> Past:
    return Past(call.node.parquet, call.node.settings.runs_days)


@route("GET", "/v1/backfills", "jobs.read")
async def list_backfills(call: Call) -> Reply:
    query = call.query("job", "state", "limit", "cursor")
    limit = limit_of(query)
    found = await backfill.list_backfills(
        call.node.db, call.who, id_of(query, "job"), query.get("state"), cursor_of(query), limit + 1
    )
    return answer(listed(found, limit))


@route("GET", "/v1/backfills/{id}", "jobs.read")
async def get_backfill(call: Call) -> Reply:
    return await _answer(call)


@route("POST", "/v1/backfills/{id}/pause", "jobs.operate")
async def pause_backfill(call: Call) -> Reply:
    reason = call.decode(_why, b"{}").reason
    return await _controlled(call, lambda: backfill.pause(call.node.db, call.who, call.id(), reason, call.wish))


@route("POST", "/v1/backfills/{id}/resume", "jobs.operate")
async def resume_backfill(call: Call) -> Reply:
    reason = call.decode(_why, b"{}").reason
    return await _controlled(call, lambda: backfill.resume(call.node.db, call.who, call.id(), reason, call.wish))


@route("POST", "/v1/backfills/{id}/cancel", "jobs.operate")
async def cancel_backfill(call: Call) -> Reply:
    body = call.decode(_reason, b"{}")
    stop = body.running == "stop"
    return await _controlled(
        call, lambda: backfill.cancel(call.node.db, call.who, call.id(), body.reason, stop, call.wish)
    )


async def _controlled(call: Call, step: Callable[[], Awaitable[Controlled]]) -> Reply:
    replayed = await controlled(call, step)
    call.node.backfiller.look()
    return await _answer(call, REPLAYED if replayed else None)


async def _answer(call: Call, headers: dict[str, str] | None = None) -> Reply:
    return answer(await backfill.get(call.node.db, call.who, call.id()), headers=headers)
