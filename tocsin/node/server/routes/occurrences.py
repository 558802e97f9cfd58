"""What jobs owed, and what became of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from tocsin.clock import iso
from tocsin.errors import BadRequest
from tocsin.flow.occurrences import Asked, occurrences
from tocsin.model.ids import parse_id
from tocsin.model.occurrences import Place, Told
from tocsin.model.scalars import Instant
from tocsin.node.server.http import Call, answer, instant_of, limit_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route

LONGEST = timedelta(days=366)
_DAY = timedelta(days=1)


@route("GET", "/v1/jobs/{id}/occurrences", "jobs.read")
async def list_occurrences(call: Call) -> Reply:
    query = call.query("from", "to", "limit", "cursor")
    from_, to = _range(instant_of(query, "from"), instant_of(query, "to"), call.node.db.clock.now())
    place = _place(query["cursor"]) if "cursor" in query else None
    asked, node = Asked(call.id(), from_, to, place, limit_of(query)), call.node
    page = await occurrences(node.db, node.parquet, call.who, asked, node.settings.runs_days)
    return answer({"items": list(map(_document, page.told)), "next_cursor": page.more and _cursor(page.more)})


def _range(from_: datetime | None, to: datetime | None, now: datetime) -> tuple[datetime, datetime]:
    to = to or max(now, from_ or now)
    from_ = from_ or to - _DAY
    if not timedelta(0) <= to - from_ <= LONGEST:
        raise BadRequest(f"from lies before to, {LONGEST.days} days at most", code="invalid_range")
    return from_, to


def _document(told: Told) -> dict[str, Any]:
    return {
        "status": told.status,
        "from": iso(told.first),
        "to": iso(told.last),
        "count": told.how_many,
        "reason": told.reason,
        "run_id": told.run_id,
        "state": told.state,
    }


def _cursor(place: Place) -> str:
    return f"{iso(place.first)}~{iso(place.seen)}~{place.id}"


def _place(text: str) -> Place:
    try:
        first, seen, id_ = text.split("~")
        found = parse_id(id_)
        if found is None:
            raise ValueError(id_)
        return Place(Instant.parse(first).at, found, Instant.parse(seen).at)
    except ValueError:
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor") from None
