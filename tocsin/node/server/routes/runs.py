"""Runs and their attempts."""

from __future__ import annotations

import msgspec

from tocsin.errors import NotFound
from tocsin.flow import control, dead, explain, history, parents
from tocsin.flow.history import RunFilter
from tocsin.flow.shared.idempotency import Replay
from tocsin.node.server.http import Call, answer, cursor_of, id_of, instant_of, limit_of, listed, tag_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, controlled, route
from tocsin.wire import Completion, Nothing, Reason

_reason = msgspec.json.Decoder(Reason).decode
_nothing = msgspec.json.Decoder(Nothing).decode
_completion = msgspec.json.Decoder(Completion).decode


@route("GET", "/v1/runs", "runs.read")
async def list_runs(call: Call) -> Reply:
    return await list_runs_of(call, None)


async def list_runs_of(call: Call, job: str | None) -> Reply:
    """A page of runs, of one job or of all."""
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
    node = call.node
    found = await history.list_runs(node.db, node.parquet, call.who, wanted, cursor_of(query), limit + 1)
    shown = listed(found, limit)
    return answer(shown | {"items": await call.in_scope(shown["items"])})


@route("GET", "/v1/runs/{id}", "runs.read")
async def get_run(call: Call) -> Reply:
    node = call.node
    return answer(await history.get_run(node.db, call.who, call.id(), node.parquet, node.parcels))


@route("GET", "/v1/runs/{id}/attempts", "runs.read")
async def get_attempts(call: Call) -> Reply:
    found = await history.attempts(call.node.db, call.who, call.id(), call.node.parquet)
    return answer({"items": found, "next_cursor": None})


@route("GET", "/v1/runs/{id}/explain", "runs.read")
async def explain_run(call: Call) -> Reply:
    call.query()
    node = call.node
    return answer(await explain.explain(node.db, node.parquet, call.who, call.id(), node.pools.pace))


@route("POST", "/v1/runs/{id}/cancel", "runs.operate")
async def cancel_run(call: Call) -> Reply:
    reason = call.decode(_reason, b"{}").reason
    try:
        step = control.cancel_run
        replayed = await controlled(call, lambda: step(call.node.db, call.who, call.id(), reason, call.wish))
    except NotFound:
        replayed = False  # one in the archive has long ended; there may be none, which is said below
    run = await history.get_run(call.node.db, call.who, call.id(), call.node.parquet)
    return answer(run, 200, REPLAYED if replayed else None)


@route("POST", "/v1/runs/{id}/retry", "runs.operate")
async def retry_run(call: Call) -> Reply:
    call.decode(_nothing, b"{}")
    await call.node.allowances.admit(call.who, call.wish, runs=1, of=call.id())
    try:
        new, hints = await dead.retry(
            call.node.db, call.who, call.id(), call.node.db.clock.now(), call.wish, call.node.parquet
        )
    except Replay as first:
        return answer(await history.get_run(call.node.db, call.who, first.ids[0]), 202, REPLAYED)
    call.node.tell(hints)
    return answer(await history.get_run(call.node.db, call.who, new), 202)


@route("GET", "/v1/runs/{id}/parents", "run.read")
async def get_parents(call: Call) -> Reply:
    call.query()
    return answer(await parents.told(call.node.db, call.node.parcels, call.who))


@route("POST", "/v1/runs/{id}/complete", "run.complete")
async def complete_run(call: Call) -> Reply:
    body = call.decode(_completion, b"{}")
    call.node.tell([], await call.node.gateway.complete(call.who, body))
    return answer({"id": call.id(), "outcome": body.outcome})
