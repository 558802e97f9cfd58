"""Recurrence rules of RFC 5545, whole: which instants `FREQ=MONTHLY;BYDAY=-1FR` owes in a zone, from a start on.

Rules by the day or longer name times on the local clock, as the RFC does; what of a time that the clock leaves out or
shows twice, the schedule's `dst` says. `HOURLY`, `MINUTELY` and `SECONDLY` count real time from the start, so that
their spacing is even whatever the clock does, and their BY-parts look at what it shows.

Where the RFC leaves a choice: parts that are missing come from the start (`BYWEEKNO` alone: its weekday); the start
itself is owed only if the rule names it; `UNTIL` with a date alone takes in that whole local day.
"""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import product
from zoneinfo import ZoneInfo

from tocsin.model.localdays import FARTHEST_DAYS, FARTHEST_YEARS, Grid, LocalDays, second_of_day
from tocsin.model.zones import DAY_SECONDS, first_valid, to_seconds, zone

WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
FREQUENCIES = ("SECONDLY", "MINUTELY", "HOURLY", "DAILY", "WEEKLY", "MONTHLY", "YEARLY")
_UNIT_SECONDS = {"SECONDLY": 1, "MINUTELY": 60, "HOURLY": 3600}
_LONGEST_INTERVAL = {"DAILY": FARTHEST_DAYS, "WEEKLY": 2_600, "MONTHLY": 600, "YEARLY": FARTHEST_YEARS}
_MOST_COUNT = 10_000
_PERIOD_DAYS = {"DAILY": 1, "WEEKLY": 7, "MONTHLY": 31, "YEARLY": 366}
# Periods that a search examines for one with a named month. FREQ=MONTHLY;INTERVAL=12;BYMONTH=2 from a January on never
# has one.
_MOST_PERIODS = 100
# Choices of BYSETPOS that a rule caches: dates are asked for in order, and a search examines two periods at a time.
_PERIODS_KEPT = 4
# Part → lowest, highest, whether it also counts back from the end.
_NUMBERS = {
    "BYSECOND": (0, 59, False),
    "BYMINUTE": (0, 59, False),
    "BYHOUR": (0, 23, False),
    "BYMONTHDAY": (1, 31, True),
    "BYYEARDAY": (1, 366, True),
    "BYWEEKNO": (1, 53, True),
    "BYMONTH": (1, 12, False),
    "BYSETPOS": (1, 366, True),
}
_NOT_WITH = {
    "BYWEEKNO": FREQUENCIES[:6],
    "BYYEARDAY": ("DAILY", "WEEKLY", "MONTHLY"),
    "BYMONTHDAY": ("WEEKLY",),
}
_BY_DAY = re.compile(r"([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU)", re.ASCII)
_UNTIL = re.compile(r"(\d{8})(?:T(\d{6})(Z?))?", re.ASCII)
_ONE_DAY = timedelta(days=1)
_LAST_DAY = date.max.toordinal() - 800


class BadRule(ValueError):
    """The text is no recurrence rule; says which part and why."""


@dataclass(frozen=True)
class Rule:
    """A rule as it is written; an empty part was not given."""

    freq: str
    interval: int = 1
    count: int | None = None
    until: str | None = None
    by_second: tuple[int, ...] = ()
    by_minute: tuple[int, ...] = ()
    by_hour: tuple[int, ...] = ()
    by_day: tuple[tuple[int, int], ...] = ()  # (which of them, 0: all; weekday)
    by_monthday: tuple[int, ...] = ()
    by_yearday: tuple[int, ...] = ()
    by_weekno: tuple[int, ...] = ()
    by_month: tuple[int, ...] = ()
    by_setpos: tuple[int, ...] = ()
    wkst: int = 0

    @property
    def by_real_time(self) -> bool:
        """Whether it counts seconds, minutes or hours."""
        return self.freq in _UNIT_SECONDS

    @property
    def says_it_all(self) -> bool:
        """Whether nothing of it comes from the start but that it begins there: then all jobs with it share it."""
        times = self.by_hour and self.by_minute and self.by_second
        dates = self.freq == "DAILY" or self.by_day or self.by_monthday or self.by_yearday
        return bool(times and dates) and self.interval == 1 and self.count is None and not self.by_real_time


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=4096)
def parse(text: str) -> Rule:
    """Read a rule; raises BadRule."""
    parts = _parts(text)
    freq = parts.pop("FREQ", "")
    if freq not in FREQUENCIES:
        raise BadRule(f"needs a FREQ: one of {', '.join(FREQUENCIES)}")
    found: dict[str, object] = {"freq": freq}
    for name, value in parts.items():
        field = "by_" + name[2:].lower() if name.startswith("BY") else name.lower()
        found[field] = _value(name, value)
    rule = Rule(**found)  # type: ignore[arg-type]
    _refuse_mixtures(rule, parts)
    return rule


def _parts(text: str) -> dict[str, str]:
    body = text.strip().upper().removeprefix("RRULE:")
    if not body.isascii() or any(c.isspace() for c in body):
        raise BadRule("is one rule such as FREQ=MONTHLY;BYDAY=-1FR; its start is `starting_at`, its zone `timezone`")
    parts: dict[str, str] = {}
    for item in body.removesuffix(";").split(";"):
        name, equals, value = item.partition("=")
        if not equals or not value or name not in ("FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYDAY", *_NUMBERS):
            raise BadRule(f"{item[:32]!r} is no part of a rule")
        if name in parts:
            raise BadRule(f"{name} stands twice")
        parts[name] = value
    return parts


def _value(name: str, value: str) -> object:
    if name in ("INTERVAL", "COUNT"):
        if not value.isdigit() or len(value) > 9 or int(value) < 1:
            raise BadRule(f"{name} is a number from 1 on")
        return int(value)
    if name == "UNTIL":
        if not _UNTIL.fullmatch(value):
            raise BadRule("UNTIL is written 20261224, 20261224T180000 or 20261224T180000Z")
        return value
    if name == "WKST":
        if value not in WEEKDAYS:
            raise BadRule(f"WKST is one of {', '.join(WEEKDAYS)}")
        return WEEKDAYS.index(value)
    if name == "BYDAY":
        return tuple(sorted({_weekday(item) for item in value.split(",")}))
    return tuple(sorted({_number(name, item) for item in value.split(",")}))


def _weekday(item: str) -> tuple[int, int]:
    match = _BY_DAY.fullmatch(item)
    if match is None or (match[1] is not None and not 1 <= abs(int(match[1])) <= 53):
        raise BadRule(f"{item[:16]!r} in BYDAY is no weekday such as MO, 1MO or -1FR")
    return int(match[1] or 0), WEEKDAYS.index(match[2])


def _number(name: str, item: str) -> int:
    low, high, backwards = _NUMBERS[name]
    digits = item.removeprefix("-" if backwards and item.startswith("-") else "+")
    if not digits.isdigit() or len(digits) > 3 or not low <= int(digits) <= high:
        raise BadRule(f"{item[:16]!r} in {name} is not {low} to {high}" + (f" or -{high} to -1" if backwards else ""))
    return -int(digits) if item.startswith("-") else int(digits)


def _refuse_mixtures(rule: Rule, parts: Iterable[str]) -> None:
    """What the RFC forbids, or what could not be bounded."""
    if rule.count is not None and rule.until is not None:
        raise BadRule("COUNT and UNTIL cannot stand together")
    if rule.count is not None and rule.count > _MOST_COUNT:
        raise BadRule(f"COUNT is at most {_MOST_COUNT:,}; use UNTIL")
    for name, frequencies in _NOT_WITH.items():
        if name in parts and rule.freq in frequencies:
            raise BadRule(f"{name} cannot stand with FREQ={rule.freq}")
    if any(n for n, _ in rule.by_day) and (rule.freq not in ("MONTHLY", "YEARLY") or rule.by_weekno):
        raise BadRule("BYDAY with numbers goes with MONTHLY, or with YEARLY without BYWEEKNO")
    if rule.by_setpos and not any(name.startswith("BY") and name != "BYSETPOS" for name in parts):
        raise BadRule("BYSETPOS chooses from what another BY-part names; there is none")
    longest = _LONGEST_INTERVAL.get(rule.freq, FARTHEST_DAYS * DAY_SECONDS // _UNIT_SECONDS.get(rule.freq, 1))
    if rule.interval > longest:
        raise BadRule(f"INTERVAL is longer than {FARTHEST_YEARS} years")


# ── what a rule owes ─────────────────────────────────────────────────────────────────────────────────────────────


class Owed(LocalDays):
    """The instants of a rule that starts at `first`, a whole second; `last` is the last that COUNT or UNTIL allow."""

    def __init__(self, rule: Rule, first: datetime, zone_name: str, gap: str, overlap: str) -> None:
        tz = zone(zone_name)
        start = first.astimezone(tz).replace(tzinfo=None)
        if rule.by_real_time:
            pattern = _Ticks(rule, start)
            super().__init__(pattern, tz, gap, overlap, pattern.grid(to_seconds(first)))
        else:
            super().__init__(_Dates(rule, start), tz, gap, overlap)
        self.first = first
        self.last = self._last(rule, tz)

    def _last(self, rule: Rule, tz: ZoneInfo) -> datetime | None:
        if rule.until is not None:
            return _until(rule.until, tz)
        if rule.count is None:
            return None
        last = self.nth(self.first, rule.count)
        if last is None and self.next_after(self.first - timedelta(seconds=1)) is not None:
            raise BadRule(
                f"its {rule.count:,} occurrences (COUNT) are not over within {FARTHEST_YEARS} years; use UNTIL"
            )
        return last


@lru_cache(maxsize=4096)
def compile_rule(text: str, first: datetime, zone_name: str, gap: str, overlap: str) -> Owed:
    """The owed instants of a rule; raises BadRule, or ValueError (zone)."""
    return Owed(parse(text), first, zone_name, gap, overlap)


def _until(text: str, tz: ZoneInfo) -> datetime:
    try:
        if "T" not in text:
            return first_valid(tz, datetime.strptime(text, "%Y%m%d") + timedelta(days=1)) - timedelta(seconds=1)
        found = datetime.strptime(text.removesuffix("Z"), "%Y%m%dT%H%M%S")
        return found.replace(tzinfo=UTC) if text.endswith("Z") else first_valid(tz, found)
    except (ValueError, OverflowError):
        raise BadRule(f"UNTIL={text} is not a date and time that exists") from None


def dates(rule: Rule, start: datetime, farthest: date, take: Callable[[int], None]) -> Iterator[date]:
    """Yield the dates of a rule by days or longer, from its start up to a date. Call `take` with the number of dates to
    be examined next; it raises if they are too many."""
    pattern = _Dates(rule, start)
    end = min(farthest, _until(rule.until, zone("UTC")).date()) if rule.until is not None else farthest
    left, last = rule.count, end.toordinal()
    take(_MOST_PERIODS if rule.interval > 1 and rule.by_month else _PERIOD_DAYS[rule.freq] if rule.by_setpos else 1)
    day = pattern.next_day(start.toordinal())
    while day is not None and day <= last and left != 0:
        take(pattern.work(day))
        if pattern.has(day):
            yield date.fromordinal(day)
            left = None if left is None else left - 1
        day = pattern.next_day(day + 1)


class _Filter:
    """Which dates the parts of a rule let through, each for itself."""

    def __init__(self, rule: Rule, start: datetime) -> None:
        self._yeardays, self._weeks, self._wkst = frozenset(rule.by_yearday), frozenset(rule.by_weekno), rule.wkst
        by_days = rule.by_weekno or rule.by_yearday or rule.by_monthday or rule.by_day
        self._months = frozenset(rule.by_month)
        self._monthdays = frozenset(rule.by_monthday)
        self._weekdays = frozenset(rule.by_day)
        if not by_days and rule.freq == "YEARLY" and not rule.by_month:
            self._months = frozenset({start.month})
        if not by_days and rule.freq in ("YEARLY", "MONTHLY"):
            self._monthdays = frozenset({start.day})
        week = rule.freq == "WEEKLY" or rule.by_weekno
        if week and not (rule.by_day or rule.by_monthday or rule.by_yearday):
            self._weekdays = frozenset({(0, start.weekday())})
        self._within_year = rule.freq == "YEARLY" and not rule.by_month

    def has_month(self, month: int) -> bool:
        return not self._months or month in self._months

    def lets_through(self, day: date) -> bool:
        """Whether a date has times."""
        if not self.has_month(day.month):
            return False
        if self._monthdays and not self._monthdays & {day.day, day.day - _month_length(day) - 1}:
            return False
        if self._weekdays and not self._has_weekday(day):
            return False
        if self._yeardays and not _either(self._yeardays, day.timetuple().tm_yday, _year_length(day)):
            return False
        return not self._weeks or _either(self._weeks, *week_of(day, self._wkst))

    def _has_weekday(self, day: date) -> bool:
        weekday = day.weekday()
        if (0, weekday) in self._weekdays:
            return True
        place, length = day.day, _month_length(day)
        if self._within_year:
            place, length = day.timetuple().tm_yday, _year_length(day)
        return bool(self._weekdays & {((place - 1) // 7 + 1, weekday), (-((length - place) // 7 + 1), weekday)})

    def next_day(self, day: int) -> int | None:
        """Return the first date from `day` on that may pass: its month is named, and BYMONTHDAY may name its day."""
        if day > _LAST_DAY:
            return None
        found = date.fromordinal(day)
        if self.has_month(found.month):
            later = self._monthday_from(found)
            if later is not None:
                return later
            found = found.replace(day=_month_length(found)) + _ONE_DAY
        month = found.year * 12 + found.month - 1
        while not self.has_month(month % 12 + 1):
            month += 1
        return date(month // 12, month % 12 + 1, 1).toordinal()

    def _monthday_from(self, day: date) -> int | None:
        """Return the first date from `day` to the end of its month that BYMONTHDAY may name."""
        if not self._monthdays or min(self._monthdays) < 0:
            return day.toordinal()
        later = [n for n in self._monthdays if day.day <= n <= _month_length(day)]
        return day.replace(day=min(later)).toordinal() if later else None


class _Dates:
    """The pattern of a rule by days, weeks, months or years."""

    def __init__(self, rule: Rule, start: datetime) -> None:
        self._rule = rule
        self._filter = _Filter(rule, start)
        self._clock = (
            rule.by_hour or (start.hour,),
            rule.by_minute or (start.minute,),
            rule.by_second or (start.second,),
        )
        self._per_day = math.prod(map(len, self._clock))
        self._period = self._period_of(start.date())
        self._chosen = lru_cache(maxsize=_PERIODS_KEPT)(self._choose)
        self._reached: int | None = None  # the period whose choice is already counted
        longest = _PERIOD_DAYS[rule.freq] * self._per_day
        self._never = bool(rule.by_setpos) and not places(rule.by_setpos, longest)

    @cached_property
    def _times(self) -> int:
        return bits(h * 3600 + m * 60 + s for h, m, s in product(*self._clock))

    def _second(self, number: int) -> int:
        """Return the time of day with this number, from 0 on. Each part of the clock is in order."""
        hours, minutes, seconds = self._clock
        rest, second = divmod(number, len(seconds))
        hour, minute = divmod(rest, len(minutes))
        return hours[hour] * 3600 + minutes[minute] * 60 + seconds[second]

    def times(self, day: int) -> int:
        found = date.fromordinal(day)
        period = self._period_of(found)
        if (period - self._period) % self._rule.interval:
            return 0
        if self._rule.by_setpos:
            chosen = self._chosen(period).get(day)
            return bits(chosen) if chosen else 0
        return self._times if self._filter.lets_through(found) else 0

    def has(self, day: int) -> bool:
        """Return whether a date of a period that counts has times."""
        found = date.fromordinal(day)
        if self._rule.by_setpos:
            return day in self._chosen(self._period_of(found))
        return self._filter.lets_through(found)

    def work(self, day: int) -> int:
        """Return how many dates `has` examines for this one: with BYSETPOS the whole period, on its first date."""
        if not self._rule.by_setpos:
            return 1
        period = self._period_of(date.fromordinal(day))
        known, self._reached = self._reached == period, period
        return 1 if known else _PERIOD_DAYS[self._rule.freq]

    def next_day(self, day: int) -> int | None:
        for _ in range(0 if self._never else _MOST_PERIODS):
            found = self._filter.next_day(day)
            if found is None:
                return None
            period = self._period_of(date.fromordinal(found))
            beyond = (self._period - period) % self._rule.interval
            if not beyond:
                return self._chosen_from(found, period) if self._rule.by_setpos else found
            following = self._first_day(period + beyond)
            if following is None:
                return None
            day = following
        return None

    def _chosen_from(self, day: int, period: int) -> int | None:
        """Return the first date from `day` on that BYSETPOS keeps of a period, or else the start of the next period
        that counts."""
        later = [d for d in self._chosen(period) if d >= day]
        return min(later) if later else self._first_day(period + self._rule.interval)

    def _choose(self, period: int) -> dict[int, list[int]]:
        """Return what BYSETPOS keeps of a period: date → its times. As numbers: as bits they would take 10 KiB per
        date."""
        start, end = self._first_day(period), self._first_day(period + 1)
        if start is None or end is None:
            return {}
        days = [d for d in range(start, end) if self._filter.lets_through(date.fromordinal(d))]
        chosen: dict[int, list[int]] = {}
        for place in places(self._rule.by_setpos, len(days) * self._per_day):
            day, number = divmod(place, self._per_day)
            chosen.setdefault(days[day], []).append(self._second(number))
        return chosen

    def _period_of(self, day: date) -> int:
        match self._rule.freq:
            case "YEARLY":
                return day.year
            case "MONTHLY":
                return day.year * 12 + day.month - 1
            case "WEEKLY":
                return (day.toordinal() - 1 - self._rule.wkst) // 7  # ordinal 1 was a Monday
            case _:
                return day.toordinal()

    def _first_day(self, period: int) -> int | None:
        match self._rule.freq:
            case "YEARLY":
                return date(period, 1, 1).toordinal() if period < date.max.year else None
            case "MONTHLY":
                return date(period // 12, period % 12 + 1, 1).toordinal() if period < date.max.year * 12 else None
            case "WEEKLY":
                return period * 7 + 1 + self._rule.wkst
            case _:
                return period


class _Ticks:
    """The pattern of a rule by hours, minutes or seconds; `grid` has its spacing."""

    def __init__(self, rule: Rule, start: datetime) -> None:
        self._filter = _Filter(rule, start)
        self._start = start
        self._unit = _UNIT_SECONDS[rule.freq]
        self._step = rule.interval * self._unit
        minutes: Sequence[int] = rule.by_minute or ((start.minute,) if self._unit > 60 else range(60))
        seconds: Sequence[int] = rule.by_second or ((start.second,) if self._unit > 1 else range(60))
        if rule.by_setpos and self._unit < 3600:
            seconds = _set_positions(rule.by_setpos, seconds, self._unit)
        within_hour = [m * 60 + s for m, s in product(minutes, seconds)]
        if rule.by_setpos and self._unit == 3600:
            within_hour = [within_hour[place] for place in places(rule.by_setpos, len(within_hour))]
        hour = bits(within_hour)
        self._times = sum(hour << h * 3600 for h in rule.by_hour or range(24))

    def times(self, day: int) -> int:
        return self._times if self._filter.lets_through(date.fromordinal(day)) else 0

    def next_day(self, day: int) -> int | None:
        return self._filter.next_day(day) if self._times else None

    def grid(self, start: int) -> Grid:
        """The seconds that lie in a period that counts."""
        if self._step == self._unit:
            return _everything
        origin = start - second_of_day(self._start) % self._unit

        def on_grid(low: int, length: int) -> int:
            return _comb(self._unit, self._step, (origin - low) % self._step, length)

        return on_grid


def _everything(_low: int, length: int) -> int:
    return (1 << length) - 1


@lru_cache(maxsize=512)
def _comb(unit: int, step: int, phase: int, length: int) -> int:
    """`unit` bits every `step`, from `phase` on, and what of those before reaches in; `length` bits in all."""
    tooth = (1 << unit) - 1
    comb, reach = tooth, step
    while reach < length - phase:
        comb |= comb << reach
        reach *= 2
    return (comb << phase | tooth >> (step - phase)) & ((1 << length) - 1)


def bits(places_: Iterable[int]) -> int:
    """The integer with these bits set."""
    out = bytearray(DAY_SECONDS // 8)
    for place in places_:
        out[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(out, "little")


def places(positions: Sequence[int], length: int) -> list[int]:
    """What BYSETPOS names of so many things: places from 0 on, in order."""
    return sorted({p - 1 if p > 0 else length + p for p in positions if 1 <= abs(p) <= length})


def _set_positions(positions: Sequence[int], seconds: Iterable[int], unit: int) -> list[int]:
    """BYSETPOS within a minute, or within a second, which has one instant."""
    known = list(seconds)
    if unit == 1:
        return known if places(positions, 1) else []
    return [known[place] for place in places(positions, len(known))]


def _either(named: frozenset[int], place: int, length: int) -> bool:
    return place in named or place - length - 1 in named


def _month_length(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def _year_length(day: date) -> int:
    return 366 if calendar.isleap(day.year) else 365


@lru_cache(maxsize=4096)
def _first_week(year: int, wkst: int) -> int:
    """The ordinal of the first day of a year's week 1: the first week with four days of the year in it."""
    fourth = date(year, 1, 4).toordinal()
    return fourth - (fourth - 1 - wkst) % 7


def week_of(day: date, wkst: int) -> tuple[int, int]:
    """The number of the week that a date lies in, and how many the week's year has."""
    ordinal, year = day.toordinal(), day.year
    if ordinal < _first_week(year, wkst):
        year -= 1
    elif ordinal >= _first_week(year + 1, wkst):
        year += 1
    start, end = _first_week(year, wkst), _first_week(year + 1, wkst)
    return (ordinal - start) // 7 + 1, (end - start) // 7
