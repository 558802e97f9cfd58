"""Named calendars."""

from __future__ import annotations

import contextlib
import re
from typing import get_args

import msgspec

from tocsin.errors import BadRequest, Contention, InvalidInput, NotFound, TooLarge
from tocsin.flow import calendars, replan
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.calendars import MOST_DAYS, Calendar, Mode
from tocsin.model.ical import LONGEST_TEXT, BadCalendar, days_of
from tocsin.model.job import NAME
from tocsin.node.server.http import Call, answer, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import CalendarRequest

_request = msgspec.json.Decoder(CalendarRequest).decode


@route("PUT", "/v1/calendars/{name}", "jobs.write")
async def put_calendar(call: Call) -> Reply:
    name = call.request.params["name"]
    if not re.fullmatch(NAME, name):
        raise InvalidInput.field("name", "invalid", "a name has 1 to 128 of the characters a-z A-Z 0-9 . _ -")
    calendar = _calendar(call, _body(call))
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
    if mode not in (None, *get_args(Mode)):
        raise BadRequest(f"mode is one of {', '.join(get_args(Mode))}", code="invalid_mode")
    if len(call.body) > LONGEST_TEXT:
        raise TooLarge(f"an iCalendar file has at most {LONGEST_TEXT:,} bytes")
    try:
        return CalendarRequest(mode=mode or "skip", ical=call.body.decode("utf-8-sig"))  # type: ignore[arg-type]
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8", code="malformed_text") from None


def _calendar(call: Call, request: CalendarRequest) -> Calendar:
    days = list(request.days)
    if request.ical is not None:
        try:
            days += days_of(request.ical, call.node.db.clock.now().date(), MOST_DAYS)
        except BadCalendar as error:
            raise InvalidInput.field("ical", "invalid_ical", str(error)) from None
    calendar = Calendar(mode=request.mode, days=tuple(days), weekdays=tuple(request.weekdays)).tidy()
    if len(calendar.days) > MOST_DAYS:
        raise InvalidInput.field("days", "invalid", f"are more than {MOST_DAYS:,}")
    return calendar


@route("GET", "/v1/calendars", "jobs.read")
async def list_named_calendars(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    after = query.get("cursor")
    if after is not None and not re.fullmatch(NAME, after):
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    return answer(page(await calendars.list_calendars(call.node.db, call.who, after, limit + 1), limit, "name"))


@route("GET", "/v1/calendars/{name}", "jobs.read")
async def get_calendar(call: Call) -> Reply:
    return await _answer(call, _name(call))


@route("DELETE", "/v1/calendars/{name}", "jobs.write")
async def delete_calendar(call: Call) -> Reply:
    try:
        await calendars.delete(call.node.db, call.who, _name(call), call.wish, call.version)
    except Replay:
        return Reply(status=204, headers=REPLAYED)
    return Reply(status=204)


def _name(call: Call) -> str:
    """A name from the path; what is not one does not exist."""
    name = call.request.params["name"]
    if not re.fullmatch(NAME, name):
        raise NotFound("there is no such calendar")
    return name


async def _answer(call: Call, name: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    found = await calendars.get(call.node.db, call.who, name)
    return answer(found, status, {"etag": f'"{found["version"]}"'} | (headers or {}))
