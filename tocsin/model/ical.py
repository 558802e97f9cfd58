"""Days out of an iCalendar file (RFC 5545): those that its events touch, repetitions written out.

What is read of an event: DTSTART, DTEND or DURATION, RRULE, RDATE, EXDATE, STATUS. A time with a date counts for the
day that is written, whatever its zone: a calendar names days, and a schedule says where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from tocsin.model import rrule
from tocsin.model.localdays import FARTHEST_DAYS

LONGEST_TEXT = 1_000_000
MOST_EVENTS = 5_000
LONGEST_EVENT = timedelta(days=366)
_WHEN = re.compile(r"((?:19|2\d)\d{6})(?:T(\d{6})Z?)?", re.ASCII)
_DURATION = re.compile(r"\+?P(?:(?P<weeks>\d{1,3})W|(?P<days>\d{1,3})D(?:T.*)?|T.*)", re.ASCII)
_DAY = timedelta(days=1)


class BadCalendar(ValueError):
    """The text is no iCalendar file that we can read; says where and why."""


class _Line(NamedTuple):
    number: int
    name: str
    value: str


def days_of(text: str, today: date, most: int) -> list[date]:
    """The days of all events, in order; repetitions without an end go on for as long as a schedule looks ahead."""
    found: set[date] = set()
    for number, event in enumerate(_events(text), 1):
        if number > MOST_EVENTS:
            raise BadCalendar(f"has more than {MOST_EVENTS} events")
        for day in _days(event, today + timedelta(days=FARTHEST_DAYS)):
            found.add(day)
            if len(found) > most:
                raise BadCalendar(f"names more than {most} days; give repetitions an end")
    return sorted(found)


def _events(text: str) -> Iterator[list[_Line]]:
    """The lines of each event, without those of what stands inside it."""
    inside: list[str] = []
    event: list[_Line] = []
    for line in _lines(text):
        if line.name == "BEGIN":
            inside.append(line.value.upper())
        elif line.name == "END":
            if not inside or inside.pop() != line.value.upper():
                raise BadCalendar(f"line {line.number}: END without its BEGIN")
            if line.value.upper() == "VEVENT":
                yield event
                event = []
        elif inside[-1:] == ["VEVENT"]:
            event.append(line)
        elif not inside:
            raise BadCalendar(f"line {line.number}: is not inside BEGIN:VCALENDAR")
    if inside:
        raise BadCalendar(f"ends before END:{inside[-1][:32]}")


def _lines(text: str) -> Iterator[_Line]:
    """Content lines, unfolded; parameters are left out, but for quoted ones that hold a colon nobody needs them."""
    whole: list[tuple[int, str]] = []
    for number, line in enumerate(re.split(r"\r?\n", text), 1):
        if line[:1] in (" ", "\t") and whole:
            whole[-1] = whole[-1][0], whole[-1][1] + line[1:]
        elif line:
            whole.append((number, line))
    for number, line in whole:
        match = re.match(r'([A-Za-z0-9-]+)(?:;(?:[^":;]|"[^"]*"|;)*)?:(.*)', line, re.DOTALL)
        if match is None:
            raise BadCalendar(f"line {number}: is not NAME:value")
        yield _Line(number, match[1].upper(), match[2].strip())


def _days(event: list[_Line], farthest: date) -> Iterator[date]:
    values = {line.name: line for line in event}
    if values.get("STATUS", _Line(0, "", "")).value.upper() == "CANCELLED":
        return
    if "DTSTART" not in values:
        raise BadCalendar("an event has no DTSTART")
    if "RECURRENCE-ID" in values:
        raise BadCalendar(f"line {values['RECURRENCE-ID'].number}: single changes of a repetition are not read")
    start = _when(values["DTSTART"])
    length = _length(values, start)
    starts = {start.date(), *_repeated(values, start, farthest)}
    starts |= {_when(line._replace(value=v)).date() for line in event if line.name == "RDATE" for v in _list(line)}
    starts -= {_when(line._replace(value=v)).date() for line in event if line.name == "EXDATE" for v in _list(line)}
    for day in starts:
        yield from (day + i * _DAY for i in range(length.days))


def _list(line: _Line) -> list[str]:
    return line.value.split(",")


def _when(line: _Line) -> datetime:
    match = _WHEN.fullmatch(line.value)
    try:
        if match is None:
            raise ValueError
        return datetime.strptime(match[1] + (match[2] or "000000"), "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        raise BadCalendar(f"line {line.number}: {line.name} is not a date such as 20261225") from None


def _length(values: dict[str, _Line], start: datetime) -> timedelta:
    """How many days an event touches, as whole days."""
    end = start + _DAY
    if "DTEND" in values:
        end = _when(values["DTEND"])
    elif "DURATION" in values:
        match = _DURATION.fullmatch(values["DURATION"].value)
        if match is None:
            raise BadCalendar(f"line {values['DURATION'].number}: DURATION is not a length such as P1D")
        end = start + max(_DAY, timedelta(weeks=int(match["weeks"] or 0), days=int(match["days"] or 0)))
    # An end at midnight is that of the day before; what is over in a moment is on its day.
    touched = (end - timedelta(microseconds=1)).date() - start.date() + _DAY
    if touched > LONGEST_EVENT:
        raise BadCalendar(f"line {values['DTSTART'].number}: lasts longer than a year")
    return max(_DAY, touched)


def _repeated(values: dict[str, _Line], start: datetime, farthest: date) -> Iterator[date]:
    if "RRULE" not in values:
        return
    line = values["RRULE"]
    try:
        rule = rrule.compile_rule(line.value, start, "UTC", "skip", "first")
    except rrule.BadRule as error:
        raise BadCalendar(f"line {line.number}: {error}") from None
    at: datetime | None = start
    while at is not None and at.date() <= farthest and (rule.last is None or at <= rule.last):
        yield at.date()
        at = rule.next_after(at)
