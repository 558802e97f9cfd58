"""Dead letters."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from tocsin.errors import NotFound, NotSupported
from tocsin.flow import dead
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.ids import parse_id
from tocsin.node.server.http import Call, answer, cursor_of, id_of, limit_of, page
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import DeadLetterIds

_dead_ids = msgspec.json.Decoder(DeadLetterIds).decode


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
        return answer({"items": [{"id": id_} for id_ in first.ids]}, 200, REPLAYED)
    call.node.tell(hints)
    return answer({"items": [{"id": id_} for id_ in made]})


@route("POST", "/v1/dead-letters/discard", "runs.operate")
async def discard(call: Call) -> Response:
    ids = _letter_ids(call)
    try:
        return answer({"discarded": await dead.discard(call.node.db, call.who, ids, call.wish)})
    except Replay as first:
        return answer({"discarded": len(first.ids)}, 200, REPLAYED)


def _letter_ids(call: Call) -> list[str]:
    if b'"filter"' in call.body:
        raise NotSupported("redrive and discard by filter are not supported yet: give ids")
    ids = [parse_id(id_) for id_ in call.decode(_dead_ids).ids]
    if None in ids:
        raise NotFound("there is nothing with this id")
    return [id_ for id_ in ids if id_ is not None]
