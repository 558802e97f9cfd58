"""Cron expressions on a real calendar: which instants an expression owes in a time zone.

cronsim reads the expression; the walk is ours, day by day, so that counting a year of missed minutes costs one
multiplication a day and agrees exactly with stepping through them. A local day on which the clock was not moved is
arithmetic; a day on which it was (DST) is enumerated once and remembered. The rules there (PROMISES P9):

gap      a fixed hour that does not exist fires once, at the first instant that does; on a day that the zone left out
         altogether (Apia, 30 December 2011) nothing is owed
overlap  fixed times fire once, the first time
`*` in   the hour field follows the real clock: each real hour once, whatever it is called; `*` in the minute field
         does so within an overlap

Zones come from the pinned tzdata wheel, not from the machine, so that every node computes the same instants.
"""

from __future__ import annotations

import calendar
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from importlib import metadata, resources
from itertools import product
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from cronsim.cronsim import Field

TZDATA_VERSION = metadata.version("tzdata")

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_MINUTE = timedelta(minutes=1)
_ANY_MONDAY = datetime(2024, 1, 1)
# 29 February on a given weekday comes back after 40 years at most (1872–1912, 2072–2112, …).
_FARTHEST_YEARS = 41
_FIELDS = (Field.MINUTE, Field.HOUR, Field.DAY, Field.MONTH, Field.DOW)
_FIELD_NAMES = ("minute", "hour", "day of month", "month", "day of week")
_FIELD_SIZES = (60, 24, 31, 12, 7)
_FIELD_RANGES = ("0-59", "0-23", "1-31", "1-12 or JAN-DEC", "0-7 or SUN-SAT")
_ALPHABET = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ*/,-#?()")
_MACROS = ("@YEARLY", "@ANNUALLY", "@MONTHLY", "@WEEKLY", "@DAILY", "@MIDNIGHT", "@HOURLY")


class BadCron(ValueError):
    """The text is no cron expression; says which field and why."""


class NeverFires(ValueError):
    """Each field is right, but no date fits them all."""


class NotBuilt(ValueError):
    """Right in the contract, not built yet; says what."""


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    """Every zone a schedule may name."""
    listed = resources.files("tzdata").joinpath("zones").read_text("ascii").split()
    refused = ("localtime", "posixrules", "Factory")
    return frozenset(z for z in listed if z not in refused and not z.startswith(("right/", "posix/")))


@lru_cache(maxsize=1024)
def zone(name: str) -> ZoneInfo:
    """The zone of an allowed name; ValueError for any other."""
    if name not in zone_names():
        raise ValueError(f"unknown time zone {name[:64]!r}")
    with resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def resolve(expression: str, seed: str) -> str:
    """The expression checked and in one spelling, each `H` a number that follows from `seed` for ever.

    Plans that are equal come out equal, so that they share one compiled object. Raises BadCron, NeverFires, NotBuilt.
    """
    return " ".join(_parse(expression).parts[1:])


@lru_cache(maxsize=16_384)
def compile_cron(resolved: str, zone_name: str, gap: str = "next_valid", overlap: str = "first") -> CronDays:
    """The owed instants of a resolved expression in a zone; raises as `resolve` does, or ValueError (zone)."""
    if (gap, overlap) != ("next_valid", "first"):
        raise NotBuilt("other rules for daylight saving than next_valid and first are not supported yet")
    return CronDays(_parse(resolved), zone(zone_name))


@lru_cache(maxsize=65_536)
def next_instant(resolved: str, zone_name: str, gap: str, overlap: str, second: datetime) -> datetime | None:
    """The first owed instant after a whole second, shared by every job with the same plan."""
    return compile_cron(resolved, zone_name, gap, overlap).next_after(second)


def explain(expression: str, seed: str = "") -> str:
    """The expression in plain words, each `H` as what it stands for."""
    return CronSim(resolve(expression, seed), _ANY_MONDAY).explain()


def _parse(expression: str) -> CronSim:
    fields = expression.upper().replace("\t", " ").split(" ") if expression.isascii() else []
    fields = [f for f in fields if f]
    if len(fields) == 1 and fields[0].startswith("@"):
        if fields[0] in _MACROS:
            raise NotBuilt(f"{expression.strip()} is not supported yet; write the five fields")
        raise BadCron(f"{expression[:32]!r} is not a cron expression; write five fields such as 0 9 * * MON-FRI")
    if not fields or any(not set(f) <= _ALPHABET for f in fields):
        raise BadCron("only ASCII digits, names, and * / , - separated by spaces can stand in a cron expression")
    if len(fields) == 6:
        raise NotBuilt("six fields (seconds first) are not supported yet; write five")
    if len(fields) != 5:
        raise BadCron(f"has {len(fields)} fields; five are needed: {', '.join(_FIELD_NAMES)}")
    for position, text in enumerate(fields):
        _check_field(position, text)
    try:
        return CronSim(" ".join(fields), _ANY_MONDAY)
    except CronSimError:
        raise NeverFires(f"no month named has a day {fields[2]}") from None


def _check_field(position: int, text: str) -> None:
    name, size = _FIELD_NAMES[position], _FIELD_SIZES[position]
    for item in text.split(","):
        extension = _extension(position, item)
        if extension:
            raise NotBuilt(f"{extension} in the {name} field ({item}) is not supported yet")
        _, slash, step = item.partition("/")
        try:
            _FIELDS[position].parse(item)
        except (CronSimError, AssertionError, RecursionError):
            raise BadCron(
                f"{item[:32]!r} is not a {name}; it can be {_FIELD_RANGES[position]}, *, a-b, a-b/n, */n"
            ) from None
        if slash and int(step) > size:
            raise BadCron(f"the step of {item[:32]!r} is longer than the {name} field ({size})")


def _extension(position: int, item: str) -> str | None:
    """Which planned extension of the five-field syntax an item uses."""
    if item == "H" or item.startswith(("H/", "H(")):
        return "H"
    if item == "?" and position in (2, 4):
        return "?"
    if position == 2 and (item in ("L", "LW") or item.startswith("L-") or (item[:-1].isdigit() and item[-1] == "W")):
        return "W" if item.endswith("W") else "L"
    if position == 4 and "#" in item:
        return "#"
    if (
        position == 4
        and item.endswith("L")
        and item[:-1] in ("", *"01234567", "SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
    ):
        return "L"
    return None


@lru_cache(maxsize=65_536)
def day_share(tz: ZoneInfo, day: date) -> tuple[datetime, bool]:
    """Where a local day (or the next that exists) begins, and whether its clock is left alone."""
    start, end = _midnight(tz, day), _midnight(tz, day + _DAY)
    return start, end - start == _DAY and start.astimezone(tz).date() == day


def _midnight(tz: ZoneInfo, day: date) -> datetime:
    return first_valid(tz, datetime(day.year, day.month, day.day))


def first_valid(tz: ZoneInfo, local: datetime) -> datetime:
    """The instant of a local time: the first of two, or the first after a gap."""
    aware = local.replace(tzinfo=tz)
    instant = aware.astimezone(UTC)
    if instant.astimezone(tz).replace(tzinfo=None) == local:
        return instant
    # In a gap: the clock is moved between the two readings of the time that never was.
    low, high = aware.replace(fold=1).astimezone(UTC), instant
    after = high.astimezone(tz).utcoffset()
    while high - low > _SECOND:
        middle = low + (high - low) // 2 // _SECOND * _SECOND
        low, high = (low, middle) if middle.astimezone(tz).utcoffset() == after else (middle, high)
    return high


class CronDays:
    """One expression in one zone, as a partition of time into local days."""

    def __init__(self, fields: CronSim, tz: ZoneInfo) -> None:
        self._fields = fields
        self._tz = tz
        # Minutes after midnight, of a day on which the clock is left alone.
        self._plain = sorted(60 * h + m for h, m in product(fields.hours, fields.minutes))
        # parts: second, minute, hour, …
        self._real_hours = fields.parts[2].startswith("*")
        self._real_minutes = fields.parts[1].startswith("*")
        self._moved: dict[date, list[datetime]] = {}

    def next_after(self, instant: datetime) -> datetime | None:
        """The first owed instant strictly after `instant`."""
        for day in self._days_from(self._local_day(instant)):
            found = self._first_in(day, instant)
            if found is not None:
                return found
        return None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        """The last owed instant strictly before `instant`, if there is one from `not_before` on."""
        day, lowest = self._local_day(instant), self._local_day(not_before)
        while day >= lowest:
            found = self._last_in(day, instant)
            if found is not None:
                return found if found >= not_before else None
            day -= _DAY
        return None

    def count(self, after: datetime, before: datetime) -> int:
        """How many instants are owed strictly between the two."""
        if before <= after:
            return 0
        first, last = self._local_day(after), self._local_day(before)
        total = -bisect_right(self._owed(first), after)
        day = first
        while day < last:
            total += self._size(day)
            day += _DAY
        return total + bisect_left(self._owed(last), before)

    def _local_day(self, instant: datetime) -> date:
        """The day whose share of time holds `instant`."""
        day = instant.astimezone(self._tz).date()
        # Where the clock is put back over midnight, a date comes twice; its share is the first stretch up to the next.
        while self._start(day) > instant:
            day -= _DAY
        while self._start(day + _DAY) <= instant:
            day += _DAY
        return day

    def _start(self, day: date) -> datetime:
        return day_share(self._tz, day)[0]

    def _is_plain(self, day: date) -> bool:
        return day_share(self._tz, day)[1]

    def _matches(self, day: date) -> bool:
        return day.month in self._fields.months and self._fields.match_day(day)

    def _size(self, day: date) -> int:
        if self._is_plain(day):
            return len(self._plain) if self._matches(day) else 0
        return len(self._owed(day))

    def _first_in(self, day: date, after: datetime) -> datetime | None:
        if self._is_plain(day):
            if not self._matches(day):
                return None
            start = self._start(day)
            place = bisect_right(self._plain, (after - start) // _MINUTE) if after >= start else 0
            return start + self._plain[place] * _MINUTE if place < len(self._plain) else None
        owed = self._owed(day)
        place = bisect_right(owed, after)
        return owed[place] if place < len(owed) else None

    def _last_in(self, day: date, before: datetime) -> datetime | None:
        if self._is_plain(day):
            if not self._matches(day):
                return None
            start = self._start(day)
            # −(−a // b) rounds up: what lies before 12:30:30 is what lies before 12:31.
            place = bisect_left(self._plain, -((start - before) // _MINUTE))
            return start + self._plain[place - 1] * _MINUTE if place else None
        owed = self._owed(day)
        place = bisect_left(owed, before)
        return owed[place - 1] if place else None

    def _owed(self, day: date) -> list[datetime]:
        """Every owed instant in a day's share of time, in order."""
        if self._is_plain(day):
            start = self._start(day)
            return [start + m * _MINUTE for m in self._plain] if self._matches(day) else []
        if day not in self._moved:
            if len(self._moved) > 256:
                self._moved.clear()
            self._moved[day] = sorted(set(self._owed_when_moved(day)))
        return self._moved[day]

    def _owed_when_moved(self, day: date) -> Iterator[datetime]:
        start, end = self._start(day), self._start(day + _DAY)
        if self._real_hours or self._real_minutes:
            yield from self._on_the_real_clock(start, end)
        if not self._real_hours:
            # A gap over midnight carries yesterday's times into today's share of time.
            for nominal in (day - _DAY, day):
                if self._matches(nominal) and self._start(nominal) < self._start(nominal + _DAY):
                    yield from (t for t in self._at_fixed_hours(nominal) if start <= t < end)

    def _on_the_real_clock(self, start: datetime, end: datetime) -> Iterator[datetime]:
        instant = start
        while instant < end:
            local = instant.astimezone(self._tz)
            if (
                local.minute in self._fields.minutes
                and local.hour in self._fields.hours
                and self._matches(local.date())
            ):
                yield instant
            instant += _MINUTE

    def _at_fixed_hours(self, day: date) -> Iterator[datetime]:
        midnight = datetime(day.year, day.month, day.day)
        for minutes in self._plain:
            yield first_valid(self._tz, midnight + minutes * _MINUTE)

    def _days_from(self, day: date) -> Iterator[date]:
        """`day` and those after it that may owe something, skipping months that cannot."""
        last_year = min(day.year + _FARTHEST_YEARS, 9998)
        while day.year <= last_year:
            yield day
            if day.month not in self._fields.months:
                day = day.replace(day=calendar.monthrange(day.year, day.month)[1])
            day += _DAY
