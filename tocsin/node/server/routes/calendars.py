"""Named calendars."""

from __future__ import annotations

import contextlib

import msgspec

from tocsin.errors import BadRequest, Contention, InvalidInput, TooLarge
from tocsin.flow import calendars, replan
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.calendars import MOST_DAYS, Calendar
from tocsin.model.ical import LONGEST_TEXT, BadCalendar, days_of
from tocsin.node.server.http import Call, answer, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.named import deleted, name_before, name_of, new_name, versioned
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import CalendarRequest

_request = msgspec.json.Decoder(CalendarRequest).decode


@route("PUT", "/v1/calendars/{name}", "jobs.write")
async def put_calendar(call: Call) -> Reply:
    name = new_name(call)
    calendar = await _calendar(call, _body(call))
    try:
        done = await calendars.put(call.node.db, call.who, name, calendar, call.wish, call.version)
    except Replay as first:
        return await _answer(call, name, first.status, REPLAYED)
    with contextlib.suppress(Contention):  # it is stored; its jobs follow by the loop, too
        call.node.tell((await replan.follow(call.node.db)).hints)
    return await _answer(call, name, 201 if done.made else 200)


def _body(call: Call) -> CalendarRequest:
    mode = call.query("mode").get("mode")
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "text/calendar":
        if mode is not None:
            raise BadRequest("mode goes into the body, unless that is text/calendar", code="unknown_parameter")
        return call.decode(_request)
    if len(call.body) > LONGEST_TEXT:
        raise TooLarge(f"an iCalendar file has at most {LONGEST_TEXT:,} bytes")
    try:
        return CalendarRequest(mode=mode or "skip", ical=call.body.decode("utf-8-sig"))  # type: ignore[arg-type]
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8", code="malformed_text") from None


async def _calendar(call: Call, request: CalendarRequest) -> Calendar:
    days = list(request.days)
    if request.ical is not None:
        today = call.node.db.clock.now().date()
        try:
            days += await call.node.aside.run(call.who.tenant_id, days_of, request.ical, today, MOST_DAYS)
        except BadCalendar as error:
            raise InvalidInput.field("ical", "invalid_ical", str(error)) from None
    calendar = Calendar(mode=request.mode, days=tuple(days), weekdays=tuple(request.weekdays)).tidy()
    if len(calendar.days) > MOST_DAYS:
        raise InvalidInput.field("days", "invalid", f"must be at most {MOST_DAYS:,}")
    return calendar


@route("GET", "/v1/calendars", "jobs.read")
async def list_named_calendars(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit, after = limit_of(query), name_before(query)
    return answer(page(await calendars.list_calendars(call.node.db, call.who, after, limit + 1), limit, "name"))


@route("GET", "/v1/calendars/{name}", "jobs.read")
async def get_calendar(call: Call) -> Reply:
    return await _answer(call, name_of(call, "calendar"))


@route("DELETE", "/v1/calendars/{name}", "jobs.write")
async def delete_calendar(call: Call) -> Reply:
    name = name_of(call, "calendar")
    return await deleted(lambda: calendars.delete(call.node.db, call.who, name, call.wish, call.version))


async def _answer(call: Call, name: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return versioned(await calendars.get(call.node.db, call.who, name), status, headers)
