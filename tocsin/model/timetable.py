"""The instants a schedule owes, in UTC: one interface, however they are told, and what narrows any of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Protocol, TypeAlias

from tocsin.model import cron

TICK = timedelta(microseconds=1)
Stretch: TypeAlias = tuple[datetime, datetime]  # from one instant to another, both included


class Timetable(Protocol):
    """The instants a schedule owes, in UTC."""

    def next_after(self, instant: datetime) -> datetime | None:
        """The first owed instant strictly after `instant`."""

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        """The last owed instant strictly before `instant`, if there is one from `not_before` on."""

    def count(self, after: datetime, before: datetime) -> int:
        """How many instants are owed strictly between the two."""


class Never:
    """Owes nothing: by hand only."""

    def next_after(self, instant: datetime) -> datetime | None:
        return None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        return None

    def count(self, after: datetime, before: datetime) -> int:
        return 0


class Once:
    """Owes one instant."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def next_after(self, instant: datetime) -> datetime | None:
        return self.at if self.at > instant else None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        return self.at if not_before <= self.at < instant else None

    def count(self, after: datetime, before: datetime) -> int:
        return int(after < self.at < before)


class Every:
    """Owes `first + k × step`, k ≥ 0; arithmetic only."""

    def __init__(self, first: datetime, step: timedelta) -> None:
        self.first = first
        self.step = step

    def next_after(self, instant: datetime) -> datetime | None:
        return self._at(self._index(instant) + 1)

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        index = self._index(instant - TICK)
        found = self._at(index) if index >= 0 else None
        return found if found is not None and found >= not_before else None

    def count(self, after: datetime, before: datetime) -> int:
        return max(0, self._index(before - TICK) - self._index(after))

    def _index(self, instant: datetime) -> int:
        """The number of the last occurrence up to and including `instant`; −1 before the first."""
        return max(-1, (instant - self.first) // self.step)

    def _at(self, index: int) -> datetime | None:
        try:
            return self.first + index * self.step
        except OverflowError:
            return None


class Cron:
    """Owes what a cron expression, resolved, names in its zone."""

    def __init__(self, resolved: str, zone: str, gap: str, overlap: str) -> None:
        self._key = (resolved, zone, gap, overlap)
        self._days = cron.compile_cron(*self._key)

    def next_after(self, instant: datetime) -> datetime | None:
        # Occurrences stand on whole seconds, so that the answer depends on the whole second only.
        return cron.next_instant(*self._key, instant.replace(microsecond=0))

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        return self._days.last_before(instant, not_before)

    def count(self, after: datetime, before: datetime) -> int:
        return self._days.count(after, before)

    def named_on(self, day: int, low: int = 0, high: int = 86_400) -> int:
        """How many times of a date are named, from one second of it to before another, whatever the clock does."""
        midnight = datetime.combine(date.fromordinal(day), datetime.min.time(), tzinfo=UTC)
        plain = cron.compile_cron(self._key[0], "UTC")
        return plain.count(midnight + timedelta(seconds=low) - TICK, midnight + timedelta(seconds=high))


class Within:
    """Of another's instants those from `first` to `last`, both included where they are given."""

    def __init__(self, table: Timetable, first: datetime | None, last: datetime | None) -> None:
        self.table = table
        self._first = first
        self._last = last

    def next_after(self, instant: datetime) -> datetime | None:
        found = self.table.next_after(instant if self._first is None else max(instant, self._first - TICK))
        return None if found is None or (self._last is not None and found > self._last) else found

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        end = instant if self._last is None else min(instant, self._last + TICK)
        start = not_before if self._first is None else max(not_before, self._first)
        return self.table.last_before(end, start) if start < end else None

    def count(self, after: datetime, before: datetime) -> int:
        start = after if self._first is None else max(after, self._first - TICK)
        end = before if self._last is None else min(before, self._last + TICK)
        return self.table.count(start, end) if start < end else 0


class Among:
    """Of another's instants those in stretches, which come in order and each begin and end with one."""

    def __init__(self, table: Timetable, stretches: Sequence[Stretch]) -> None:
        self.table = table
        self._stretches = stretches
        self._firsts = [first for first, _ in stretches]
        self._lasts = [last for _, last in stretches]

    def next_after(self, instant: datetime) -> datetime | None:
        place = bisect_right(self._lasts, instant)
        if place == len(self._stretches):
            return None
        return self.table.next_after(max(instant, self._firsts[place] - TICK))

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        place = bisect_left(self._firsts, instant) - 1
        return Within(self.table, *self._stretches[place]).last_before(instant, not_before) if place >= 0 else None

    def count(self, after: datetime, before: datetime) -> int:
        reached = self._stretches[bisect_right(self._lasts, after) : bisect_left(self._firsts, before)]
        return sum(Within(self.table, *stretch).count(after, before) for stretch in reached)


def within(table: Timetable, first: datetime | None, last: datetime | None) -> Timetable:
    """The same, if nothing narrows it the table itself."""
    return table if first is None and last is None else Within(table, first, last)
