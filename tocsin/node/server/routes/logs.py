"""The logs of runs: read, followed, downloaded, searched."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from tocsin.errors import BadRequest
from tocsin.flow import history, logs, search
from tocsin.model.loglines import harmless
from tocsin.model.logsearch import Query
from tocsin.node.server.http import Call, answer, id_of, instant_of, limit_of, number_of, tag_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route
from tocsin.node.tails import Place
from tocsin.wire import encode

_PAGE = 500
_LIVE = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nobody is to keep any of it back


@route("GET", "/v1/runs/{id}/logs", "runs.read")
async def get_logs(call: Call) -> Reply:
    query = call.query("attempt", "stream", "after", "limit")
    run_id = await _known(call)
    limit = limit_of(query)
    attempt, after = number_of(query, "attempt"), number_of(query, "after") or 0
    found = await _read(call, run_id, attempt, query.get("stream"), after, limit)
    return answer({"items": found.items, "next_after": found.upto if found.more else None})


@route("GET", "/v1/runs/{id}/logs/stream", "runs.read")
async def stream_logs(call: Call) -> Reply:
    query = call.query("attempt", "stream", "after")
    only = number_of(query, "attempt")
    # A client that connects again gives what it saw last, while its address still has where it once began.
    resume = _place(call.request.headers.get("last-event-id") or query.get("after"))
    run_id = await _known(call)
    call.node.tails.refuse_crowd(call.who.tenant_id)
    lines = call.node.tails.stream(call.who, run_id, only, query.get("stream"), resume)
    return Reply(headers=_LIVE, media_type="text/event-stream", stream=lines)


@route("GET", "/v1/runs/{id}/logs/download", "runs.read")
async def download_logs(call: Call) -> Reply:
    query = call.query("attempt", "stream", "format")
    kind = query.get("format", "text")
    run_id, attempt = await _known(call), number_of(query, "attempt")
    first = await _read(call, run_id, attempt, query.get("stream"), 0, _PAGE)
    name = f"run-{run_id}-{first.attempt}.{'log' if kind == 'text' else 'ndjson'}"
    return Reply(
        # Never for a browser to show: what programs write is not ours.
        headers={"content-disposition": f'attachment; filename="{name}"', "x-content-type-options": "nosniff"},
        media_type="text/plain; charset=utf-8" if kind == "text" else "application/x-ndjson",
        stream=_written(call, run_id, query.get("stream"), first, kind),
    )


@route("GET", "/v1/logs/search", "runs.read")
async def search_logs(call: Call) -> Reply:
    query = call.query("q", "job", "run", "tag", "from", "to", "level", "error_class", "limit", "cursor")
    try:
        words = Query.parse(query["q"]) if "q" in query else Query()
    except ValueError as error:
        raise BadRequest(f"q: {error}", code="invalid_query") from None
    wanted = search.Wanted(
        words,
        id_of(query, "job"),
        id_of(query, "run"),
        tag_of(query),
        instant_of(query, "from"),
        instant_of(query, "to"),
        query.get("level"),
        query.get("error_class"),
    )
    node, limit = call.node, limit_of(query)
    cursor = search.parse_cursor(query["cursor"], node.db.clock.now()) if "cursor" in query else None
    stores = search.Stores(node.db, node.objects, node.parquet)
    found = await search.search(stores, call.who.tenant_id, wanted, cursor, limit)
    lines = await call.in_scope(found.lines)
    following = None if found.cursor is None else str(found.cursor)
    return answer({"items": lines, "next_cursor": following, "incomplete": found.incomplete})


async def _written(
    call: Call, run_id: str, stream: str | None, page: logs.Lines, kind: str
) -> AsyncGenerator[bytes, None]:
    """All pages from this one on; the next is read when the last has been taken."""
    while True:
        if page.items:
            yield b"".join(map(_text if kind == "text" else _document, page.items))
        if not page.more:
            return
        await call.check_welcome()
        page = await _read(call, run_id, page.attempt, stream, page.upto, _PAGE)


def _text(line: dict[str, Any]) -> bytes:
    return f"{harmless(line['text'])}\n".encode()


def _document(line: dict[str, Any]) -> bytes:
    return encode(line) + b"\n"


async def _known(call: Call) -> str:
    """The run's id, if the caller has such a run."""
    return str((await history.get_run(call.node.db, call.who, call.id(), call.node.parquet))["id"])


async def _read(call: Call, run_id: str, attempt: int | None, stream: str | None, after: int, limit: int) -> logs.Lines:
    node = call.node
    return await logs.read(node.db, node.objects, call.who.tenant_id, run_id, attempt, stream, after, limit)


def _place(text: str | None) -> Place | None:
    if text is None:
        return None
    place = Place.parse(text)
    if place is None:
        raise BadRequest("this is not the id of a line of ours", code="invalid_event_id")
    return place
