"""Named calendars: days that a schedule leaves out, moves to the next business day, or keeps to.

A day is a local day of the schedule's time zone, and in here its ordinal. A calendar wraps any timetable, so that the
steps never see that there is one; the work grows with the days it opens and closes, not with what falls due on them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from msgspec import Meta, Struct

from tocsin.errors import InvalidInput
from tocsin.model.localdays import FARTHEST_DAYS
from tocsin.model.scalars import EARLIEST, LATEST
from tocsin.model.timetable import TICK, Timetable
from tocsin.model.zones import DAY_SECONDS, Stretch, day_at, share_of_day, to_instant, to_seconds

WEEKDAYS = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
Weekday = Literal["MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"]
Mode = Literal["skip", "next_business_day", "only"]
MOST_DAYS = 10_000
# How many days in a row may be moved to the business day after them, and how many occurrences of each day: that
# business day collects the occurrences of all of them. A day with more is left out as in the mode `skip`.
MOST_IN_A_ROW, MOST_MOVED = 62, 100
# Days with occurrences that a search examines for one that the calendar allows. After that many, the search ends.
_MOST_TRIES = 1_000
# Business days that a search examines for one with an occurrence. It fails if the days before have too many to be
# moved.
_MOST_MOVES_TRIED = 100
_SECOND = timedelta(seconds=1)


class Calendar(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Days by date and by weekday; `mode` says what becomes of occurrences on them (or, `only`, on all others)."""

    mode: Mode = "skip"
    days: Annotated[tuple[date, ...], Meta(max_length=MOST_DAYS)] = ()
    weekdays: Annotated[tuple[Weekday, ...], Meta(max_length=7)] = ()

    def tidy(self) -> Calendar:
        """The same in order and without repetition; refuses one that names no day, or leaves none."""
        days, weekdays = sorted(set(self.days)), sorted(set(self.weekdays), key=WEEKDAYS.index)
        if not days and not weekdays:
            raise InvalidInput.field("days", "invalid", "must name at least one day, by its date or as a weekday")
        if days and not EARLIEST.date() <= days[0] <= days[-1] <= LATEST.date():
            raise InvalidInput.field("days", "invalid", "must lie between 1970 and 2999")
        if len(weekdays) == 7:
            raise InvalidInput.field("weekdays", "invalid", "must leave at least one day of the week")
        tidied = Calendar(mode=self.mode, days=tuple(days), weekdays=tuple(weekdays))
        if self.mode == "next_business_day" and tidied.longest_row() > MOST_IN_A_ROW:
            message = (
                f"must leave a business day after at most {MOST_IN_A_ROW} days; use the mode `skip` for longer ones"
            )
            raise InvalidInput.field("days", "invalid", message)
        return tidied

    def longest_row(self) -> int:
        """Return the length of the longest row of named days that contains a date. Rows of weekdays alone do not
        count."""
        named, longest, day = _named(self.days, self.weekdays), 0, 0
        for date_ in self.days:
            if date_.toordinal() >= day:
                day = named.next(date_.toordinal(), False) or 0
                longest = max(longest, day - (named.last(date_.toordinal(), False) or 0) - 1)
        return longest

    def of(self, table: Timetable, tz: ZoneInfo) -> Timetable:
        """A timetable as this calendar leaves it."""
        named = _named(self.days, self.weekdays)
        if self.mode == "next_business_day":
            return _Moved(table, tz, named)
        return _Open(table, tz, named, self.mode == "only")


class _Named:
    """The days a calendar names."""

    def __init__(self, days: tuple[date, ...], weekdays: tuple[str, ...]) -> None:
        self._days = sorted(day.toordinal() for day in days)
        self._known = frozenset(self._days)
        self._weekdays = frozenset(WEEKDAYS.index(name) for name in weekdays)

    def __contains__(self, day: int) -> bool:
        return day in self._known or (day - 1) % 7 in self._weekdays

    def next(self, day: int, named: bool) -> int | None:
        """The first day from `day` on that is named, or is not."""
        if not named:
            while day in self:
                day += 1
            return day
        place = bisect_left(self._days, day)
        dates = self._days[place : place + 1]
        weekdays = [d for d in range(day, day + 7) if (d - 1) % 7 in self._weekdays][:1]
        return min(dates + weekdays, default=None)

    def last(self, day: int, named: bool) -> int | None:
        """The last day up to `day` that is named, or is not."""
        if not named:
            while day in self:
                day -= 1
            return day
        place = bisect_right(self._days, day)
        dates = self._days[:place][-1:]
        weekdays = [d for d in range(day, day - 7, -1) if (d - 1) % 7 in self._weekdays][:1]
        return max(dates + weekdays, default=None)


_named = lru_cache(maxsize=4096)(_Named)


class _OnDays:
    """What both wrappers know of days."""

    def __init__(self, table: Timetable, tz: ZoneInfo, named: _Named) -> None:
        self._table = table
        self._tz = tz
        self._days = named

    def _day(self, instant: datetime) -> int:
        return day_at(self._tz, to_seconds(instant))

    def _start(self, day: int) -> datetime:
        return to_instant(share_of_day(self._tz, day).start)

    def _count_on(self, after: datetime, before: datetime, named: bool) -> int:
        """How many of the timetable's instants between the two lie on days that are named, or are not."""
        total = 0
        day = self._days.next(self._day(after), named)
        while day is not None and self._start(day) < before:
            beyond = self._days.next(day, not named)
            end = before if beyond is None else min(before, self._start(beyond))
            start = max(after, self._start(day) - TICK)
            if start < end:
                total += self._table.count(start, end)
            day = None if beyond is None else self._days.next(beyond, named)
        return total


class _Open(_OnDays):
    """Of another's instants those on days that are named, or are not."""

    def __init__(self, table: Timetable, tz: ZoneInfo, named: _Named, only: bool) -> None:
        super().__init__(table, tz, named)
        self._only = only

    def next_after(self, instant: datetime) -> datetime | None:
        found = self._table.next_after(instant)
        farthest = 0 if found is None else self._day(found) + FARTHEST_DAYS
        for _ in range(_MOST_TRIES):
            if found is None:
                return None
            day = self._day(found)
            opens = self._days.next(day, self._only)
            if opens == day:
                return found
            if opens is None or opens > farthest:
                return None
            found = self._table.next_after(self._start(opens) - TICK)
        return None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        found = self._table.last_before(instant, not_before)
        while found is not None:
            day = self._day(found)
            opens = self._days.last(day, self._only)
            if opens == day:
                return found
            if opens is None or self._start(opens + 1) <= not_before:
                return None
            found = self._table.last_before(self._start(opens + 1), not_before)
        return None

    def count(self, after: datetime, before: datetime) -> int:
        return self._count_on(after, before, self._only)


class _Moved(_OnDays):
    """Another's instants; those on named days at the same local time of the next day that is not named.

    What is moved to an instant that is owed there already is owed once.
    """

    def next_after(self, instant: datetime) -> datetime | None:
        day = self._business(self._day(instant))
        found = self._first_on(day, instant)
        for _ in range(_MOST_MOVES_TRIED):
            source = None if found else self._table.next_after(self._start(day + 1) - TICK)
            if source is None:
                break
            day = self._business(self._day(source))
            found = self._first_on(day, self._start(day) - TICK)
        return found

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        if not_before >= instant:
            return None
        day = self._days.last(self._day(instant - TICK), False) or 0
        found = self._last_on(day, min(instant, self._start(day + 1)))
        lowest = self._start(self._first_source(self._business(self._day(not_before))))
        for _ in range(_MOST_MOVES_TRIED):
            source = None if found else self._table.last_before(self._start(self._first_source(day)), lowest)
            if source is None:
                break
            day = self._business(self._day(source))
            found = self._last_on(day, self._start(day + 1))
        return found if found is not None and found >= not_before else None

    def count(self, after: datetime, before: datetime) -> int:
        total = self._count_on(after, before, False)
        holiday = self._days.next(self._first_source(self._business(self._day(after))), True)
        while holiday is not None:
            day = self._business(holiday)
            if self._start(day) >= before:
                break
            moved = {at for at in self._all_moved_to(day) if after < at < before}
            total += sum(1 for at in moved if not self._owns(at))
            holiday = self._days.next(day, True)
        return total

    def _business(self, day: int) -> int:
        """The day itself if it is not named, else the next that is not."""
        return self._days.next(day, False) or day

    def _first_source(self, day: int) -> int:
        """The first of the named days just before a day, or that day."""
        return (self._days.last(day - 1, False) or 0) + 1

    def _owns(self, at: datetime) -> bool:
        return self._table.next_after(at - TICK) == at

    def _first_on(self, day: int, after: datetime) -> datetime | None:
        """The first instant owed on a business day, and after an instant."""
        own = self._table.next_after(max(after, self._start(day) - TICK))
        found = [own] if own is not None and own < self._start(day + 1) else []
        reached = self._reached(day, after)
        for stretch, first in self._sources(day):
            lowest = first - TICK if reached is None else max(first - TICK, first + reached - _clock(stretch))
            source = self._table.next_after(lowest)
            if source is not None and source < to_instant(stretch.end):
                found.append(self._placed(day, _clock(stretch) + (source - first)))
        return min((at for at in found if at > after), default=None)

    def _last_on(self, day: int, before: datetime) -> datetime | None:
        """The last instant owed on a business day, and before an instant of it."""
        own = self._table.last_before(before, self._start(day))
        found = [own] if own is not None else []
        reached = self._reached(day, before - TICK)
        for stretch, first in self._sources(day):
            if reached is None:
                continue
            highest = to_instant(stretch.end)
            if before <= self._start(day + 1) - _SECOND:
                highest = min(highest, first + reached - _clock(stretch) + TICK)
            source = self._table.last_before(highest, first) if first < highest else None
            if source is not None:
                found.append(self._placed(day, _clock(stretch) + (source - first)))
        return max((at for at in found if at < before), default=None)

    def _all_moved_to(self, day: int) -> Iterator[datetime]:
        for stretch, first in self._sources(day):
            source = self._table.next_after(first - TICK)
            while source is not None and source < to_instant(stretch.end):
                yield self._placed(day, _clock(stretch) + (source - first))
                source = self._table.next_after(source)

    def _sources(self, day: int) -> Iterator[tuple[Stretch, datetime]]:
        """The stretches of real time that are moved to a business day, and when they begin."""
        for source in range(self._first_source(day), day):
            share = share_of_day(self._tz, source)
            if self._table.count(to_instant(share.start) - TICK, to_instant(share.end)) > MOST_MOVED:
                continue
            for stretch in share.stretches:
                yield stretch, to_instant(stretch.start)

    def _reached(self, day: int, instant: datetime) -> timedelta | None:
        """The latest time of day that the clock of a day has shown by an instant; None before it."""
        shown = [
            _clock(stretch) + min(instant - to_instant(stretch.start), timedelta(seconds=_length(stretch)) - TICK)
            for stretch in share_of_day(self._tz, day).stretches
            if to_instant(stretch.start) <= instant
        ]
        return max(shown, default=None)

    def _placed(self, day: int, clock: timedelta) -> datetime:
        """When the clock of a day first shows a time or a later one; a moment before its end if it never does."""
        for stretch in share_of_day(self._tz, day).stretches:
            if clock < _clock(stretch) + timedelta(seconds=_length(stretch)):
                return to_instant(stretch.start) + max(timedelta(0), clock - _clock(stretch))
        return self._start(day + 1) - _SECOND


def _clock(stretch: Stretch) -> timedelta:
    return timedelta(seconds=min(stretch.clock, DAY_SECONDS))


def _length(stretch: Stretch) -> int:
    return stretch.end - stretch.start
