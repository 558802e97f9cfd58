"""One expression in one zone: walking, stepping back and counting over its owed instants.

Nothing is enumerated. A time of day has a rank among those the expression names, found by arithmetic on its three
fields; so a stretch of clock (model/zones.py), be it a plain day or what a move of the clock made of one, holds a
number of instants that is one subtraction, also of an expression with seconds.
"""

from __future__ import annotations

import calendar
from bisect import bisect_left
from datetime import date, datetime
from functools import lru_cache
from typing import Literal, get_args
from zoneinfo import ZoneInfo

from tocsin.model.cron.syntax import Parsed
from tocsin.model.zones import Stretch, day_at, share_of_day, to_instant, to_seconds

Gap = Literal["next_valid", "skip"]
Overlap = Literal["first", "second", "both"]

# 29 February on a given weekday comes back after 40 years at most (1872–1912, 2072–2112, …).
_FARTHEST_YEARS = 41
_LAST_YEAR = 9998
# The weekday of a month's first (Monday is 0), and its length.
_shape = lru_cache(maxsize=4096)(calendar.monthrange)


class _Times:
    """The times of day that an expression names, in order, each by its number."""

    def __init__(self, parsed: Parsed) -> None:
        self._hours, self._minutes, self._seconds = parsed.hour.values, parsed.minute.values, parsed.second.values
        self._per_hour = len(self._minutes) * len(self._seconds)
        self.count = len(self._hours) * self._per_hour

    def before(self, clock: int) -> int:
        """How many are earlier than `clock`; also the number of the first that is not."""
        minutes, second = divmod(clock, 60)
        hour, minute = divmod(minutes, 60)
        hours = bisect_left(self._hours, hour)
        earlier = hours * self._per_hour
        if hours == len(self._hours) or self._hours[hours] != hour:
            return earlier
        minutes = bisect_left(self._minutes, minute)
        earlier += minutes * len(self._seconds)
        if minutes == len(self._minutes) or self._minutes[minutes] != minute:
            return earlier
        return earlier + bisect_left(self._seconds, second)

    def __getitem__(self, number: int) -> int:
        hours, rest = divmod(number, self._per_hour)
        minutes, seconds = divmod(rest, len(self._seconds))
        return self._hours[hours] * 3600 + self._minutes[minutes] * 60 + self._seconds[seconds]


class CronDays:
    """One expression in one zone, as a partition of time into local days."""

    def __init__(self, parsed: Parsed, tz: ZoneInfo, gap: str, overlap: str) -> None:
        if gap not in get_args(Gap) or overlap not in get_args(Overlap):
            raise ValueError(f"no such rule for daylight saving: {gap[:32]!r}, {overlap[:32]!r}")
        self._parsed = parsed
        self._tz = tz
        self._times = _Times(parsed)
        self._months = frozenset(parsed.month.values)
        self._days_by_shape: dict[tuple[int, int], int] = {}
        follows_clock = parsed.second.open or parsed.minute.open or parsed.hour.open
        self._left_out = None if follows_clock else {"first": "second", "second": "first"}.get(overlap)
        self._lands = gap == "next_valid" and not parsed.hour.open

    def next_after(self, instant: datetime) -> datetime | None:
        """The first owed instant strictly after `instant`; None if there is none within 41 years."""
        if instant.year > _LAST_YEAR:
            return None
        low = to_seconds(instant) + 1
        day: int | None = day_at(self._tz, low)
        last = date(min(instant.year + _FARTHEST_YEARS, _LAST_YEAR), 12, 31).toordinal()
        while day is not None:
            for stretch in share_of_day(self._tz, day).stretches:
                if stretch.end > low:
                    found = self._first_in(stretch, low)
                    if found is not None:
                        return to_instant(found)
            day = self._day_after(day, last)
        return None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        """The last owed instant strictly before `instant`, if there is one from `not_before` on."""
        low, high = _second_from(not_before), _second_from(instant)
        if low >= high:
            return None
        day, first = day_at(self._tz, high - 1), day_at(self._tz, low)
        while day >= first:
            for stretch in reversed(share_of_day(self._tz, day).stretches):
                if stretch.start < high:
                    found = self._last_in(stretch, high)
                    if found is not None:
                        return to_instant(found) if found >= low else None
            day = self._day_before(day, first)
        return None

    def count(self, after: datetime, before: datetime) -> int:
        """How many instants are owed strictly between the two."""
        low, high = to_seconds(after) + 1, _second_from(before)
        if low >= high:
            return 0
        total = 0
        day: int | None = day_at(self._tz, low)
        last = day_at(self._tz, high - 1)
        while day is not None:
            total += sum(self._count_in(stretch, low, high) for stretch in share_of_day(self._tz, day).stretches)
            day = self._day_after(day, last)
        return total

    # ── within a stretch ─────────────────────────────────────────────────────────────────────────────────────────

    def _first_in(self, stretch: Stretch, low: int) -> int | None:
        """The first owed second of a stretch from `low` on."""
        if low <= stretch.start:
            if stretch.skipped and self._lands_at_start(stretch):
                return stretch.start
            low = stretch.start
        if not self._ticks(stretch):
            return None
        shift = stretch.start - stretch.clock
        number = self._times.before(low - shift)
        if number == self._times.count:
            return None
        found = self._times[number] + shift
        return found if found < stretch.end else None

    def _last_in(self, stretch: Stretch, high: int) -> int | None:
        """The last owed second of a stretch before `high`."""
        if self._ticks(stretch):
            shift = stretch.start - stretch.clock
            number = self._times.before(min(high, stretch.end) - shift)
            if number and self._times[number - 1] >= stretch.clock:
                return self._times[number - 1] + shift
        return stretch.start if stretch.skipped and self._lands_at_start(stretch) else None

    def _count_in(self, stretch: Stretch, low: int, high: int) -> int:
        """How many seconds of a stretch are owed from `low` on and before `high`."""
        first, end = max(low, stretch.start), min(high, stretch.end)
        if first >= end:
            return 0
        shift, times = stretch.start - stretch.clock, self._times
        ticks = self._ticks(stretch)
        count = times.before(end - shift) - times.before(first - shift) if ticks else 0
        if stretch.skipped and first == stretch.start and self._lands_at_start(stretch):
            # What lands on an instant that is owed by itself is one with it.
            own = ticks and times.before(stretch.clock + 1) > times.before(stretch.clock)
            count += not own
        return count

    def _ticks(self, stretch: Stretch) -> bool:
        """Whether the readings of a stretch are owed as they come."""
        return stretch.passage != self._left_out and self._fits(stretch.day)

    def _lands_at_start(self, stretch: Stretch) -> bool:
        """Whether a fixed time that the gap before a stretch left out is made up for at its start."""
        before = self._times.before
        return self._lands and any(before(s.high) > before(s.low) and self._fits(s.day) for s in stretch.skipped)

    # ── from day to day ──────────────────────────────────────────────────────────────────────────────────────────

    def _fits(self, day: int) -> bool:
        named = date.fromordinal(day)
        return bool(self._days_of_month(named.year, named.month) >> named.day & 1)

    def _days_of_month(self, year: int, month: int) -> int:
        """The days of a month that fit, as bits."""
        if month not in self._months:
            return 0
        shape = _shape(year, month)
        if shape not in self._days_by_shape:
            first, length = shape
            self._days_by_shape[shape] = self._parsed.days(length, first)
        return self._days_by_shape[shape]

    def _day_after(self, day: int, last: int) -> int | None:
        """The next day, up to `last`, whose share may owe something: one that fits, or the one after it, since a move
        of the clock over midnight can carry a day's times into the share of the next."""
        if day >= last:
            return None
        if self._fits(day):
            return day + 1
        start, end = date.fromordinal(day + 1), date.fromordinal(last)
        year, month, days_left = start.year, start.month, -1 << start.day
        while (year, month) <= (end.year, end.month):
            days = self._days_of_month(year, month) & days_left
            if days:
                found = date(year, month, (days & -days).bit_length() - 1).toordinal()
                return found if found <= last else None
            year, month, days_left = (year, month + 1, -1) if month < 12 else (year + 1, 1, -1)
        return None

    def _day_before(self, day: int, first: int) -> int:
        """The day before, down to `first`, whose share may owe something; `first - 1` if there is none."""
        start, end = date.fromordinal(day - 1), date.fromordinal(first)
        year, month, days_left = start.year, start.month, (2 << start.day) - 1
        while (year, month) >= (end.year, end.month):
            days = self._days_of_month(year, month) & days_left
            if days:
                fitting = date(year, month, days.bit_length() - 1).toordinal()
                return min(day - 1, fitting + 1)
            year, month, days_left = (year, month - 1, -1) if month > 1 else (year - 1, 12, -1)
        # The share of the first may hold times of a day before it.
        return first if day > first else first - 1


def _second_from(instant: datetime) -> int:
    """The first whole second from an instant on."""
    return to_seconds(instant) + bool(instant.microsecond)
