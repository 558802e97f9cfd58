"""Repeating intervals of ISO-8601: `R5/2026-01-01T00:00:00Z/P1D`.

`Rn` owes n occurrences, `R` any number. With a start they begin there, with an end the last is there. Hours, minutes
and seconds are real time; years, months, weeks and days follow the calendar on the local clock, and each occurrence is
counted from the anchor, not from the one before: a month after 31 January is the end of February, two months are
31 March.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from tocsin.model.localdays import FARTHEST_DAYS, FARTHEST_YEARS, second_of_day
from tocsin.model.scalars import EARLIEST, LATEST
from tocsin.model.words import counted, every_length, length, listed
from tocsin.model.zones import first_valid

_FORM = "R/2026-01-01T09:00:00Z/P1D, R5/start/period, R5/start/end or R5/period/end"
_PERIOD = re.compile(
    r"P(?:(?P<y>\d+)Y)?(?:(?P<mo>\d+)M)?(?:(?P<w>\d+)W)?(?:(?P<d>\d+)D)?"
    r"(?:T(?=\d)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+)S)?)?",
    re.ASCII,
)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d(?::\d\d)?(?P<offset>Z|[+-]\d\d:\d\d)?)?", re.ASCII)
_MOST_TIMES = 1_000_000
_LONGEST = timedelta(days=FARTHEST_DAYS)
_MONTH = timedelta(days=30.436875)  # on the average of the Gregorian calendar


class BadInterval(ValueError):
    """The text is no repeating interval; says why."""


@dataclass(frozen=True)
class Period:
    """A length of time: months by the calendar, and the rest."""

    months: int
    rest: timedelta
    by_calendar: bool  # has years, months, weeks or days

    @property
    def about(self) -> timedelta:
        return self.months * _MONTH + self.rest


@dataclass(frozen=True)
class Interval:
    """A repeating interval as it is written. A moment without an offset is on the clock of the schedule's zone."""

    times: int | None
    start: str | None
    period: Period | None  # None: from start to end
    end: str | None


@lru_cache(maxsize=4096)
def parse(text: str) -> Interval:
    """Read a repeating interval; raises BadInterval."""
    repeat, *parts = text.strip().upper().split("/")
    if len(parts) != 2 or not re.fullmatch(r"R\d{0,7}", repeat, re.ASCII):
        raise BadInterval(f"is not a repeating interval such as {_FORM}")
    times = int(repeat[1:]) if repeat[1:] else None
    if times is not None and not 1 <= times <= _MOST_TIMES:
        raise BadInterval(f"repeats 1 to {_MOST_TIMES:,} times, or without end (R/…)")
    first, second = parts
    if first.startswith("P"):
        return Interval(times, None, _period(first), _checked(second))
    if second.startswith("P"):
        return Interval(times, _checked(first), _period(second), None)
    return Interval(times, _checked(first), None, _checked(second))


def _checked(text: str) -> str:
    if not _MOMENT.fullmatch(text):
        raise BadInterval(f"{text[:40]!r} is not a time in whole seconds such as 2026-01-01T09:00:00Z")
    moment(text, UTC)
    return text


def _period(text: str) -> Period:
    match = len(text) <= 40 and _PERIOD.fullmatch(text)
    if not match or not any(match.groupdict().values()):
        raise BadInterval(f"{text[:40]!r} is not a period in whole seconds such as P1M, P1D or PT15M")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    months = 12 * part["y"] + part["mo"]
    try:
        days = timedelta(weeks=part["w"], days=part["d"])
        period = Period(
            months, days + timedelta(hours=part["h"], minutes=part["m"], seconds=part["s"]), bool(months or days)
        )
        too_long = period.about > _LONGEST
    except OverflowError:
        too_long = True
    if too_long:
        raise BadInterval(f"a period is at most {FARTHEST_YEARS} years")
    if not period.about:
        raise BadInterval("a period is at least 1 second")
    return period


def moment(text: str, tz: tzinfo) -> datetime:
    """A moment as the clock of a zone shows it."""
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None:
            found = found.astimezone(tz).replace(tzinfo=None)
    except (ValueError, OverflowError):
        raise BadInterval(f"{text} is not a date and time that exists") from None
    if not EARLIEST.year <= found.year <= LATEST.year:
        raise BadInterval("the year must lie between 1970 and 2999")
    return found


def in_words(interval: Interval) -> str:
    """`5 times, every month, first at …`."""
    times = "" if interval.times is None else "once, " if interval.times == 1 else f"{interval.times:,} times, "
    if interval.period is None:
        return f"{times}from {interval.start} on, as often as from then to {interval.end}"
    end = f"first at {interval.start}" if interval.start else f"last at {interval.end}"
    return f"{times}{_period_in_words(interval.period)}, {end}"


def _period_in_words(period: Period) -> str:
    years, months = divmod(period.months, 12)
    parts = [counted(n, unit) for n, unit in ((years, "year"), (months, "month")) if n]
    if not parts:
        return every_length(period.rest)
    told = listed([*parts, *([length(period.rest)] if period.rest else [])])
    return f"every {told.removeprefix('1 ') if len(parts) == 1 and not period.rest else told}"


def elapsed(interval: Interval, tz: ZoneInfo) -> tuple[datetime, timedelta, datetime | None] | None:
    """First, step and last of an interval in real time; None if it goes by the calendar."""
    start = interval.start and _instant(interval.start, tz)
    end = interval.end and _instant(interval.end, tz)
    if interval.period is None:
        assert start and end
        step = end - start
        if step < timedelta(seconds=1):
            raise BadInterval("its end must lie behind its start")
    elif interval.period.by_calendar:
        return None
    else:
        step = interval.period.rest
    if not start:
        assert end
        times = interval.times or (end - EARLIEST) // step + 1
        return _back(end, (times - 1) * step), step, end
    return start, step, None if interval.times is None else _ahead(start, (interval.times - 1) * step)


def _instant(text: str, tz: ZoneInfo) -> datetime:
    found = datetime.fromisoformat(text)
    return found.astimezone(UTC) if found.tzinfo is not None else first_valid(tz, found)


def _ahead(instant: datetime, delta: timedelta) -> datetime | None:
    try:
        return instant + delta
    except OverflowError:
        return None


def _back(instant: datetime, delta: timedelta) -> datetime:
    try:
        return instant - delta
    except OverflowError:
        raise BadInterval("begins before there were dates") from None


class CalendarSteps:
    """The pattern (see `localdays`) of an interval by the calendar: the k-th is the anchor plus k periods."""

    def __init__(self, interval: Interval, tz: ZoneInfo) -> None:
        assert interval.period is not None
        self._period = interval.period
        self._anchor = moment(interval.start or interval.end or "", tz)
        before = 0 if interval.start else None
        if interval.end and interval.times is not None:
            before = 1 - interval.times
        self._lowest = before
        self._highest = 0 if interval.end else None if interval.times is None else interval.times - 1

    def times(self, day: int) -> int:
        number = self._number_from(day)
        found = self._at(number) if self._has(number) else None
        return 1 << second_of_day(found) if found is not None and found.toordinal() == day else 0

    def next_day(self, day: int) -> int | None:
        number = self._number_from(day)
        if self._lowest is not None:
            number = max(number, self._lowest)
        found = self._at(number) if self._has(number) else None
        return None if found is None else found.toordinal()

    def _has(self, number: int) -> bool:
        return (self._lowest is None or number >= self._lowest) and (self._highest is None or number <= self._highest)

    def _number_from(self, day: int) -> int:
        """The number of the first occurrence from the midnight of a date on."""
        midnight = datetime.fromordinal(day)
        number = (midnight - self._anchor) // self._period.about
        # The average is off by days at most, and a period has at least one.
        while (found := self._at(number)) is not None and found >= midnight:
            number -= 1
        while (found := self._at(number)) is not None and found < midnight:
            number += 1
        return number

    def _at(self, number: int) -> datetime | None:
        """The `number`-th occurrence on the clock; None if there is no such date."""
        month = self._anchor.year * 12 + self._anchor.month - 1 + number * self._period.months
        year, month = divmod(month, 12)
        if not 1 <= year <= 9999:
            return None
        day = min(self._anchor.day, calendar.monthrange(year, month + 1)[1])
        try:
            return self._anchor.replace(year=year, month=month + 1, day=day) + number * self._period.rest
        except OverflowError:
            return None
