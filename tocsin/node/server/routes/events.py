"""Live events, as server-sent events."""

from __future__ import annotations

from tocsin.errors import BadRequest
from tocsin.flow.events import EventId
from tocsin.node.events import Wanted
from tocsin.node.server.http import Call, id_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route

# Neither a browser nor a proxy is to keep any of it back.
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@route("GET", "/v1/events", "runs.read")
async def stream_events(call: Call) -> Reply:
    query = call.query("job", "type", "after")
    wanted = Wanted(query.get("type"), id_of(query, "job"))
    # A client that connects again gives what it saw last, while its address still has where it once began.
    resume = _event_id(call.request.headers.get("last-event-id") or query.get("after"))
    call.node.events.refuse_crowd(call.who.tenant_id)
    return Reply(
        headers=_HEADERS,
        media_type="text/event-stream",
        stream=call.node.events.stream(call.who, wanted, resume),
    )


def _event_id(text: str | None) -> EventId | None:
    if text is None:
        return None
    found = EventId.parse(text)
    if found is None:
        raise BadRequest("this is not the id of an event of ours", code="invalid_event_id")
    return found
