"""The days of an iCalendar file (RFC 5545): all days that its events touch, with repetitions expanded.

Of an event, these properties are read: DTSTART, DTEND or DURATION, RRULE, RDATE, EXDATE, STATUS. A time with a date
counts for the written day, whatever its zone: a calendar names days, and a schedule names the zone. For the same reason
an event must repeat by the day or longer, at one time of day.

The work is bounded for the whole file, not for each event: every line that is read and every date that is examined uses
one of MOST_STEPS, before the work is done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from tocsin.model import rrule
from tocsin.model.localdays import FARTHEST_DAYS

LONGEST_TEXT = 1_000_000
MOST_EVENTS = 5_000
MOST_STEPS = 200_000
LONGEST_EVENT = timedelta(days=366)
_WHEN = re.compile(r"((?:19|2\d)\d\d)(\d\d)(\d\d)(?:T(\d\d)(\d\d)(\d\d)Z?)?", re.ASCII)
_DURATION = re.compile(r"\+?P(?:(?P<weeks>\d{1,3})W|(?P<days>\d{1,3})D(?:T.*)?|T.*)", re.ASCII)
_DAY = timedelta(days=1)
_OF_THE_CLOCK = ("BYHOUR", "BYMINUTE", "BYSECOND")

Take = Callable[[int], None]  # uses that many steps, or raises BadCalendar


class BadCalendar(ValueError):
    """The text is no iCalendar file that we can read; says where and why."""


class _Line(NamedTuple):
    number: int
    name: str
    value: str


class _Steps:
    """The steps that remain for a file."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        """Use steps before the work is done. Raise BadCalendar if too few remain."""
        self._left -= count
        if self._left < 0:
            raise BadCalendar(f"must expand in at most {self._most:,} steps; repeat less often, or give fewer events")


def days_of(text: str, today: date, most: int, most_steps: int = MOST_STEPS) -> list[date]:
    """Return the days of all events, in order. Endless repetitions stop where schedules stop looking ahead."""
    found: set[date] = set()
    take = _Steps(most_steps).take
    for number, event in enumerate(_events(text), 1):
        if number > MOST_EVENTS:
            raise BadCalendar(f"must have at most {MOST_EVENTS:,} events")
        for day in _days(event, today + timedelta(days=FARTHEST_DAYS), take):
            found.add(day)
            if len(found) > most:
                raise BadCalendar(f"must name at most {most:,} days; give repetitions an end")
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
                raise BadCalendar(f"line {line.number}: END must follow its BEGIN")
            if line.value.upper() == "VEVENT":
                yield event
                event = []
        elif inside[-1:] == ["VEVENT"]:
            event.append(line)
        elif not inside:
            raise BadCalendar(f"line {line.number}: must stand inside BEGIN:VCALENDAR")
    if inside:
        raise BadCalendar(f"must not end before END:{inside[-1][:32]}")


def _lines(text: str) -> Iterator[_Line]:
    """Yield the unfolded content lines, without parameters."""
    number, parts = 0, [""]
    for at, line in enumerate(re.split(r"\r?\n", text), 1):
        if line[:1] in (" ", "\t") and number:
            parts.append(line[1:])
        elif line:
            yield from _content(number, parts)
            number, parts = at, [line]
    yield from _content(number, parts)


def _content(number: int, parts: list[str]) -> Iterator[_Line]:
    """Yield one content line, joined from the lines that it was folded into. Yield nothing before the first."""
    if not number:
        return
    match = re.match(r'([A-Za-z0-9-]+)(?:;(?:[^":;]|"[^"]*"|;)*)?:(.*)', "".join(parts), re.DOTALL)
    if match is None:
        raise BadCalendar(f"line {number}: must be NAME:value")
    yield _Line(number, match[1].upper(), match[2].strip())


def _days(event: list[_Line], farthest: date, take: Take) -> Iterator[date]:
    take(len(event))
    values = {line.name: line for line in event}
    if values.get("STATUS", _Line(0, "", "")).value.upper() == "CANCELLED":
        return
    if "DTSTART" not in values:
        raise BadCalendar("every event must have a DTSTART")
    if "RECURRENCE-ID" in values:
        number = values["RECURRENCE-ID"].number
        raise BadCalendar(f"line {number}: must not change single days of a repetition (RECURRENCE-ID)")
    start = _when(values["DTSTART"])
    length = _length(values, start)
    starts = {start.date(), *_repeated(values, start, farthest, take)}
    starts |= _named(event, "RDATE", take)
    starts -= _named(event, "EXDATE", take)
    take(len(starts) * length.days)
    for day in starts:
        yield from (day + i * _DAY for i in range(length.days))


def _named(event: list[_Line], name: str, take: Take) -> set[date]:
    """Return the days that all lines with this name list."""
    found: set[date] = set()
    for line in event:
        if line.name == name:
            values = line.value.split(",")
            take(len(values))
            found.update(_when(line._replace(value=value)).date() for value in values)
    return found


def _when(line: _Line) -> datetime:
    match = _WHEN.fullmatch(line.value)
    try:
        if match is None:
            raise ValueError
        return datetime(*map(int, match.groups(default="0")), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        raise BadCalendar(f"line {line.number}: {line.name} must be a date such as 20261225") from None


def _length(values: dict[str, _Line], start: datetime) -> timedelta:
    """How many days an event touches, as whole days."""
    end = start + _DAY
    if "DTEND" in values:
        end = _when(values["DTEND"])
    elif "DURATION" in values:
        match = _DURATION.fullmatch(values["DURATION"].value)
        if match is None:
            raise BadCalendar(f"line {values['DURATION'].number}: DURATION must be a length such as P1D")
        end = start + max(_DAY, timedelta(weeks=int(match["weeks"] or 0), days=int(match["days"] or 0)))
    # An end at midnight is that of the day before; what is over in a moment is on its day.
    touched = (end - timedelta(microseconds=1)).date() - start.date() + _DAY
    if touched > LONGEST_EVENT:
        raise BadCalendar(f"line {values['DTSTART'].number}: an event must last at most a year")
    return max(_DAY, touched)


def _repeated(values: dict[str, _Line], start: datetime, farthest: date, take: Take) -> Iterator[date]:
    if "RRULE" not in values:
        return
    line = values["RRULE"]
    try:
        rule = rrule.parse(line.value)
        _refuse_times(rule)
        yield from rrule.dates(rule, start, farthest, take)
    except rrule.BadRule as error:
        raise BadCalendar(f"line {line.number}: {error}") from None


def _refuse_times(rule: rrule.Rule) -> None:
    """Refuse repetitions within a day: a calendar consists of days, and there can be 86,400 such repetitions."""
    if rule.by_real_time:
        raise rrule.BadRule("FREQ must be DAILY, WEEKLY, MONTHLY or YEARLY in a calendar of days")
    if rule.by_hour or rule.by_minute or rule.by_second:
        raise rrule.BadRule(f"must not have {', '.join(_OF_THE_CLOCK)} in a calendar of days")
