"""What is owed by local time, day by day: the times of a date as bits, laid over the real time of that date in a zone.

A date's times are one integer, bit n for the n-th second after midnight, so that the next, the last and the number of
them cost the same whether a rule names one second of a day or all 86,400. Work grows with the dates that are looked at
(one step each; dates that cannot match are jumped over), never with how much falls due on them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

from tocsin.model.zones import Share, day_at, share_of_day, to_instant, to_seconds

# A rule that names nothing for so long is as good as over: nobody waits for it.
FARTHEST_YEARS, FARTHEST_DAYS = 50, 18_262
# Dates that have times of which none is met (a grid that drifts past them) and that are looked at for one answer.
_FARTHEST_TRIES = 3_000
# What lies behind it is no date any more, with room for the days around one.
_END = datetime.max.toordinal() - 400
_LONGEST_SHARE = 3 * 86_400
_TICK = timedelta(microseconds=1)

Grid = Callable[[int, int], int]  # (first second, how many) → those of them that are on it, as bits


class Pattern(Protocol):
    """Which times of which dates; a date is its ordinal."""

    def times(self, day: int) -> int:
        """The times of a date, as bits."""

    def next_day(self, day: int) -> int | None:
        """The first date from `day` on that may have times."""


class OneTime:
    """One time of one date."""

    def __init__(self, local: datetime) -> None:
        self._day = local.toordinal()
        self._times = 1 << second_of_day(local)

    def times(self, day: int) -> int:
        return self._times if day == self._day else 0

    def next_day(self, day: int) -> int | None:
        return self._day if day <= self._day else None


class LocalDays:
    """The instants of a pattern in a zone.

    `gap`: a time that does not exist is owed at the first instant that does (`next_valid`), or not at all (`skip`).
    `overlap`: of a time that comes twice, the `first`, the `second` or `both` are owed. With a `grid` the pattern only
    chooses from its seconds, which follow the real clock: both rules then have nothing to decide.
    """

    def __init__(self, pattern: Pattern, tz: ZoneInfo, gap: str, overlap: str, grid: Grid | None = None) -> None:
        self._pattern = pattern
        # the two dates that were asked for last, with their times
        self._known: list[tuple[int, int]] = [(0, 0), (0, 0)]
        self._tz = tz
        self._carry = gap == "next_valid" and grid is None
        self._unwanted = None if grid is not None else {"first": "second", "second": "first"}.get(overlap)
        self._grid = grid

    def next_after(self, instant: datetime) -> datetime | None:
        """The first owed instant strictly after `instant`."""
        from_, tries = to_seconds(instant) + 1, 0
        day: int | None = self._day(from_)
        last = self._farthest(self._day(from_))
        while day is not None and day <= last and tries <= _FARTHEST_TRIES:
            if owed := self._owed(day):
                start = self._start(day)
                skipped = max(0, from_ - start)
                later = owed >> skipped
                if later:
                    return to_instant(start + skipped + (later & -later).bit_length() - 1)
            tries += self._times(day) != 0
            day = self._following(day)
        return None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        """The last owed instant strictly before `instant`, if there is one from `not_before` on."""
        end, lowest = _ceil(instant), _ceil(not_before)
        if lowest >= end:
            return None
        first = self._day(lowest)
        for day in range(self._day(end - 1), first - 1, -1):
            if owed := self._owed(day):
                start = self._start(day)
                earlier = owed & _before(end - start)
                if earlier:
                    found = start + earlier.bit_length() - 1
                    return to_instant(found) if found >= lowest else None
        return None

    def count(self, after: datetime, before: datetime) -> int:
        """How many instants are owed strictly between the two."""
        low, high = to_seconds(after) + 1, _ceil(before)
        if low >= high:
            return 0
        total, known, size = 0, 0, 0
        day, last = self._day(low), self._day(high - 1)
        following: int | None = day
        while following is not None and following <= last:
            owed = self._owed(following)
            if following in (day, last):
                start = self._start(following)
                owed = (owed & _before(high - start)) >> max(0, low - start)
            if owed is not known:  # a pattern answers the same object for most of its dates
                known, size = owed, owed.bit_count()
            total += size
            following = self._following(following)
        return total

    def nth(self, start: datetime, number: int) -> datetime | None:
        """The `number`-th instant from `start` on; None if there are not so many within reach."""
        low, left, known, size = _ceil(start), number, 0, 0
        first = self._day(low)
        day: int | None = first
        last = self._farthest(first)
        while day is not None and day <= last:
            owed = self._owed(day)
            if day == first:
                owed = owed >> max(0, low - self._start(day)) << max(0, low - self._start(day))
            if owed is not known:
                known, size = owed, owed.bit_count()
            if left <= size:
                return to_instant(self._start(day) + _nth_bit(owed, left))
            left -= size
            day = self._following(day)
        return None

    def named_on(self, day: int, low: int = 0, high: int = 86_400) -> int:
        """How many times of a date are named, from one second of it to before another, whatever the clock does."""
        return (self._pattern.times(day) >> low & _ones(high - low)).bit_count()

    def _day(self, second: int) -> int:
        return day_at(self._tz, second)

    def _following(self, day: int) -> int | None:
        # What a gap before midnight carries on lies in the share of the date after it.
        return day + 1 if self._times(day) else self._pattern.next_day(day + 1)

    def _times(self, day: int) -> int:
        """Return the times of a date. A search asks several times for each date, and for the date before it."""
        for known, times in self._known:
            if known == day:
                return times
        found = self._pattern.times(day)
        self._known = [(day, found), self._known[0]]
        return found

    def _farthest(self, day: int) -> int:
        """The last date that is looked at; before the pattern begins, nothing has been looked at in vain."""
        return min((self._pattern.next_day(day) or day) + FARTHEST_DAYS, _END)

    def _start(self, day: int) -> int:
        return share_of_day(self._tz, day).start

    def _owed(self, day: int) -> int:
        """The owed seconds of a day's share, bit 0 its first one."""
        if not self._times(day) and not self._times(day - 1):
            return 0
        share = share_of_day(self._tz, day)
        if len(share.stretches) == 1 and not share.stretches[0].skipped and share.stretches[0].passage == "only":
            owed = self._times(day)
        else:
            owed = self._owed_when_moved(share)
        return owed & self._grid(share.start, share.end - share.start) if owed and self._grid else owed

    def _owed_when_moved(self, share: Share) -> int:
        owed = 0
        for stretch in share.stretches:
            bits = 0
            if stretch.passage != self._unwanted:
                bits = self._times(stretch.day) >> stretch.clock & _ones(stretch.end - stretch.start)
            if self._carry and any(
                self._times(lost.day) >> lost.low & _ones(lost.high - lost.low) for lost in stretch.skipped
            ):
                bits |= 1
            owed |= bits << (stretch.start - share.start)
        return owed


def second_of_day(local: datetime) -> int:
    """How many whole seconds after midnight the clock reads."""
    return local.hour * 3600 + local.minute * 60 + local.second


def _ones(count: int) -> int:
    return (1 << count) - 1


def _before(second: int) -> int:
    """The seconds of a share that lie before one of them, or of all time."""
    return _ones(min(max(0, second), _LONGEST_SHARE))


def _ceil(instant: datetime) -> int:
    return to_seconds(instant - _TICK) + 1


def _nth_bit(bits: int, number: int) -> int:
    """The place of the `number`-th bit that is set, counted from 1."""
    low, high = 0, bits.bit_length() - 1
    while low < high:
        middle = (low + high) // 2
        if (bits & _ones(middle + 1)).bit_count() >= number:
            high = middle
        else:
            low = middle + 1
    return low
