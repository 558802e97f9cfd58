"""Dead letters."""

from __future__ import annotations

from datetime import datetime

import msgspec

from tocsin.errors import InvalidInput, NotFound
from tocsin.flow import dead
from tocsin.flow.dead import Chosen, Redriven
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.ids import parse_id
from tocsin.node.server.http import Call, answer, cursor_of, id_of, limit_of, listed
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import Letters

_letters = msgspec.json.Decoder(Letters).decode


@route("GET", "/v1/dead-letters", "runs.read")
async def list_dead(call: Call) -> Reply:
    query = call.query("job", "error_class", "limit", "cursor")
    limit = limit_of(query)
    found = await dead.list_dead(
        call.node.db, call.who, id_of(query, "job"), query.get("error_class"), cursor_of(query), limit + 1
    )
    return answer(listed(found, limit))


@route("POST", "/v1/dead-letters/redrive", "runs.operate")
async def redrive(call: Call) -> Reply:
    body = call.decode(_letters)
    chosen, now = _chosen(body), call.node.db.clock.now()
    try:
        if body.ids:
            await call.node.allowances.admit(call.who, call.wish, runs=len(body.ids))
            done = await dead.redrive(call.node.db, call.who, chosen, now, _per_second(body.rate), call.wish)
        else:
            done = await _redrive_some(call, chosen, now, _per_second(body.rate))
    except Replay as first:
        left = await dead.remaining(call.node.db, call.who, chosen)
        return answer({"items": [{"id": id_} for id_ in first.ids], "remaining": left}, 200, REPLAYED)
    call.node.tell(done.hints)
    return answer({"items": [{"id": id_} for id_ in done.ids], "remaining": done.remaining})


async def _redrive_some(call: Call, chosen: Chosen, now: datetime, per_second: float | None) -> Redriven:
    """As many of those that match as the tenant has room for: the answer says how many remain."""
    made, allowances = 0, call.node.allowances
    grant = await allowances.admit_some(call.who, call.wish, dead.MOST_PER_CALL)
    try:
        done = await dead.redrive(call.node.db, call.who, chosen, now, per_second, call.wish, grant.most)
        made = len(done.ids)
    finally:
        allowances.made(call.who, grant, made)
    return done


@route("POST", "/v1/dead-letters/discard", "runs.operate")
async def discard(call: Call) -> Reply:
    body = call.decode(_letters)
    if body.rate is not None:
        raise InvalidInput.field("rate", "invalid", "there is nothing to spread when letters are discarded")
    chosen = _chosen(body)
    try:
        count, left = await dead.discard(call.node.db, call.who, chosen, call.wish)
    except Replay as first:
        left = await dead.remaining(call.node.db, call.who, chosen)
        return answer({"discarded": len(first.ids), "remaining": left}, 200, REPLAYED)
    return answer({"discarded": count, "remaining": left})


def _chosen(body: Letters) -> Chosen:
    if (body.ids is None) == (body.filter is None):
        raise InvalidInput("give either ids or a filter", code="invalid_input")
    if body.filter is not None:
        job = None if body.filter.job is None else _id(body.filter.job)
        return Chosen(None, job, body.filter.error_class, body.filter.tag)
    return Chosen([_id(id_) for id_ in body.ids or []])


def _id(text: str) -> str:
    found = parse_id(text)
    if found is None:
        raise NotFound("there is nothing with this id")
    return found


def _per_second(rate: str | None) -> float | None:
    if rate is None:
        return None
    count, _, unit = rate.partition("/")
    return int(count) / {"s": 1, "min": 60, "h": 3600}[unit]
