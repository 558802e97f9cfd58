"""Schedules in plain English: a small strict grammar. What it reads becomes another kind of schedule; what could be
meant in two ways is refused, with the words that would be clear.

    in 10 minutes
    today | tomorrow | on 2026-12-24            at TIME
    every 15 minutes | every 2 hours            [between 9:00 and 17:00] [DAYS]
    hourly                                      [DAYS]
    DAYS at TIME[, TIME and TIME]

    DAYS    every day, daily · every weekday, on weekdays · every weekend, on weekends
            every monday and thursday, on mondays · every 2 days · every 2 weeks on monday
            on the 1st and 15th [of every month] · on the last day of the month · every 3 months on the 1st
            first monday of every month, last friday of the month · first | last weekday of the month
            every january 1st, every year on july 4th
    TIME    9:00, 17:30, 9am, 5:30 pm, noon, midnight (the day's first instant)

A phrase that is read can be written again (`str`), in one form that reads as the same: that is what a job answers.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from tocsin.model.rrule import WEEKDAYS as DAY_CODES
from tocsin.model.words import MONTHS, WEEKDAYS, clock, counted, each, listed, ordinal

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_NTH = {"first": 1, "1st": 1, "second": 2, "2nd": 2, "third": 3, "3rd": 3, "fourth": 4, "4th": 4, "last": -1}
_WORKDAYS, _WEEKEND, _ALL = (0, 1, 2, 3, 4), (5, 6), tuple(range(7))
_DAY_NAMES = {
    name: number for number, day in enumerate(WEEKDAYS) for name in (day.lower(), day.lower() + "s", day[:3].lower())
} | {"tues": 1, "thur": 3, "thurs": 3}
_MONTH_NAMES = {name: n for n, month in enumerate(MONTHS, 1) for name in (month.lower(), month[:3].lower())}
_TOKEN = re.compile(r"\d{4}-\d\d-\d\d(?!\d)|\d{1,2}:\d\d(?::\d\d)?|\d+|[a-z]+|,", re.ASCII)
# "every second friday" is no step of a second.
_AFTER_SECOND = {"day", "week", "month", "weekday", *_DAY_NAMES}
_MOST_TIMES = 24


class Unclear(ValueError):
    """Not in the grammar, or with two meanings; says how to write it."""


class Meaning(NamedTuple):
    """The kind of schedule a phrase becomes, and its value."""

    kind: Literal["delay", "at", "every", "cron", "rrule"]
    value: str | timedelta | datetime


# ── what can be said ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class After:
    """Once, so long after it was said."""

    number: int
    unit: str
    once = True

    def meaning(self, _said: datetime) -> Meaning:
        return Meaning("delay", timedelta(seconds=self.number * _UNITS[self.unit]))

    def __str__(self) -> str:
        return f"in {counted(self.number, self.unit)}".replace(",", "")


@dataclass(frozen=True)
class OnDay:
    """Once, at a time of a date, or of the day it was said or the one after."""

    day: date | Literal["today", "tomorrow"]
    time: int
    once = True

    def meaning(self, said: datetime) -> Meaning:
        day = self.day if isinstance(self.day, date) else said.date() + timedelta(days=self.day == "tomorrow")
        return Meaning("at", datetime(day.year, day.month, day.day) + timedelta(seconds=self.time))

    def __str__(self) -> str:
        return f"{'on ' if isinstance(self.day, date) else ''}{self.day} at {clock(self.time)}"


@dataclass(frozen=True)
class Steps:
    """Evenly spaced: by the real clock from when it was said, or, on some hours or days, by the clock on the wall."""

    number: int
    unit: str
    hours: tuple[int, int] | None = None  # from, until before
    weekdays: tuple[int, ...] = _ALL
    aligned: bool = False  # `hourly`: on the hour
    once = False

    @property
    def by_real_time(self) -> bool:
        """Whether it counts from when it was said, whatever the clock shows."""
        return self.hours is None and self.weekdays == _ALL and not self.aligned

    def meaning(self, _said: datetime) -> Meaning:
        if self.by_real_time:
            return Meaning("every", timedelta(seconds=self.number * _UNITS[self.unit]))
        low, high = self.hours or (0, 24)
        hours = "*" if self.hours is None else ",".join(map(str, _hours(low, high)))
        days = "*" if self.weekdays == _ALL else ",".join(str((day + 1) % 7) for day in self.weekdays)
        match self.unit:
            case "second":
                return Meaning("cron", f"{_step(self.number)} * {hours} * * {days}")
            case "minute":
                return Meaning("cron", f"{_step(self.number)} {hours} * * {days}")
        stepped = "*" if self.hours is None and self.number == 1 else f"*/{self.number}"
        if self.hours is not None:
            stepped = ",".join(map(str, _hours(low, high)[:: self.number]))
        return Meaning("cron", f"0 {stepped} * * {days}")

    def __str__(self) -> str:
        words = ["hourly" if self.aligned else each(self.number, self.unit).replace(",", "")]
        if self.hours is not None:
            words.append(f"from {clock(self.hours[0] * 3600)} until before {clock(self.hours[1] % 24 * 3600)}")
        if self.weekdays != _ALL:
            words.append(_on_weekdays(self.weekdays))
        return " ".join(words)


@dataclass(frozen=True)
class Days:
    """Which dates: the date parts of a recurrence rule, and the words for them."""

    freq: Literal["DAILY", "WEEKLY", "MONTHLY"]
    words: str
    parts: str = ""
    interval: int = 1
    edge: Literal[0, 1, -1] = 0  # only the first or the last of the month's dates


@dataclass(frozen=True)
class AtTimes:
    """Times of day on some dates."""

    days: Days
    times: tuple[int, ...]
    once = False

    def meaning(self, _said: datetime) -> Meaning:
        days = self.days
        hours, minutes, seconds = (
            sorted({part(time) for time in self.times}) for part in (_hour_of, _minute_of, _second_of)
        )
        every = [h * 3600 + m * 60 + s for h, m, s in product(hours, minutes, seconds)]
        rule = [f"FREQ={days.freq}"]
        rule += [f"INTERVAL={days.interval}"] * (days.interval > 1) + [days.parts] * bool(days.parts)
        rule += [f"BY{n}={','.join(map(str, v))}" for n, v in zip(_CLOCK, (hours, minutes, seconds), strict=True)]
        if days.edge or len(every) > len(self.times):
            places = [every.index(time) for time in self.times]
            # Hours and minutes name each other's product; positions choose the times that were said.
            rule.append(f"BYSETPOS={','.join(str(p - len(every) if days.edge < 0 else p + 1) for p in places)}")
        return Meaning("rrule", ";".join(rule))

    def __str__(self) -> str:
        return f"{self.days.words} at {listed(map(clock, self.times))}"


_CLOCK = ("HOUR", "MINUTE", "SECOND")
Phrase = After | OnDay | Steps | AtTimes


def _hour_of(time: int) -> int:
    return time // 3600


def _minute_of(time: int) -> int:
    return time // 60 % 60


def _second_of(time: int) -> int:
    return time % 60


def _step(number: int) -> str:
    return "*" if number == 1 else f"*/{number}"


def _hours(low: int, high: int) -> list[int]:
    """From one hour until before another, past midnight if that is smaller."""
    return [hour % 24 for hour in range(low, high if high > low else high + 24)]


def _on_weekdays(days: Sequence[int]) -> str:
    known = {_WORKDAYS: "on weekdays", _WEEKEND: "on weekends"}
    return known.get(tuple(days)) or f"on {listed(WEEKDAYS[day] + 's' for day in days)}"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=16_384)
def parse(text: str) -> Phrase:
    """Read a phrase; raises Unclear."""
    lowered = " ".join(text.lower().split()).replace("a.m.", "am").replace("p.m.", "pm").removesuffix(".")
    tokens = _TOKEN.findall(lowered)
    if "".join(tokens) != lowered.replace(" ", ""):
        raise Unclear("is written with words, numbers and times such as 9:00 only")
    return _Reader(tokens).phrase()


def is_once(text: str) -> bool:
    """Whether a phrase names one instant; one that cannot be read does not."""
    try:
        return parse(text).once
    except Unclear:
        return False


class _Reader:
    """One pass over the words."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    def phrase(self) -> Phrase:
        """The whole of it."""
        found = self._once() or self._steps() or self._at_times()
        if self._place < len(self._tokens):
            raise self._unclear()
        return found

    # ── one time ──

    def _once(self) -> Phrase | None:
        if self._take("in"):
            number, unit = self._number(), self._unit()
            if unit not in _UNITS or number is None:
                raise Unclear('how long is told in seconds, minutes, hours, days or weeks: "in 10 minutes"')
            return After(number, unit)
        if self._peek() in ("today", "tomorrow"):
            day: Literal["today", "tomorrow"] = "today" if self._next() == "today" else "tomorrow"
            return OnDay(day, self._one_time(day))
        if self._peek() == "next":
            raise Unclear('"next …" is this one or the one after it; write the date: "on 2026-12-24 at 9:00"')
        start = self._place
        if self._take("on") and re.match(r"\d{4}-", self._peek()):
            return self._on_date(self._next())
        self._place = start
        return None

    def _on_date(self, text: str) -> OnDay:
        try:
            day = date.fromisoformat(text)
        except ValueError:
            raise Unclear(f"{text} is not a date that exists") from None
        if not 1970 <= day.year <= 2999:
            raise Unclear("the year must lie between 1970 and 2999")
        return OnDay(day, self._one_time(f"on {text}"))

    def _one_time(self, day: str) -> int:
        times = self._times(day)
        if len(times) > 1:
            raise Unclear(f'"{day}" is one day, and one time of it; make a job for each, or write "every day at …"')
        return times[0]

    # ── evenly spaced ──

    def _steps(self) -> Phrase | None:
        start = self._place
        if self._take("hourly"):
            return self._where_and_when(Steps(1, "hour", aligned=True))
        if not self._take("every", "each"):
            return None
        number, unit = self._number(), self._unit()
        if unit not in ("second", "minute", "hour") or self._peek() in _AFTER_SECOND:
            self._place = start
            return None
        return self._where_and_when(Steps(1 if number is None else number, unit))

    def _where_and_when(self, steps: Steps) -> Steps:
        hours, weekdays = self._between(), self._weekdays_of_steps()
        hours = hours or self._between()
        if self._peek() == "at":
            raise Unclear(f'"{steps}" has times already; write "hourly", "every day at 9:00", or a cron expression')
        if hours is None and weekdays == _ALL:
            return steps
        whole = {"second": 60, "minute": 60, "hour": 24}[steps.unit]
        if whole % steps.number:
            raise Unclear(f"on some hours or days only, {whole} {steps.unit}s must be a multiple of the step")
        if hours is not None and hours[1] % 24 <= hours[0] and hours[1] != 24 and weekdays != _ALL:
            raise Unclear("hours that pass midnight lie on two days; leave the days out, or write two jobs")
        return Steps(steps.number, steps.unit, hours, weekdays, steps.aligned)

    def _between(self) -> tuple[int, int] | None:
        if self._take("between"):
            word = "and"
        elif self._take("from"):
            word = "to"
        else:
            return None
        low = self._time()
        if not (self._take(word) or (word == "to" and self._take("until", "till"))):
            raise self._unclear()
        self._take("before")
        high = self._time()
        if low % 3600 or high % 3600:
            raise Unclear('from and until are whole hours: "every 15 minutes between 9:00 and 17:00"')
        if low == high:
            raise Unclear("from and until are the same hour; leave them out for the whole day")
        return low // 3600, high // 3600 or 24

    def _weekdays_of_steps(self) -> tuple[int, ...]:
        if self._take("on") or self._peek() in ("weekdays", "weekends"):
            return self._weekdays()
        start = self._place
        if self._take("every"):
            if self._take("day"):
                return _ALL
            if self._peek() in ("weekday", "weekend"):
                return _WORKDAYS if self._next() == "weekday" else _WEEKEND
        self._place = start
        return _ALL

    # ── times of day ──

    def _at_times(self) -> AtTimes:
        days = self._days()
        return AtTimes(days, self._times(days.words))

    def _days(self) -> Days:
        for rule in (self._simple_days, self._every_so_many, self._of_year, self._of_month, self._named_days):
            start = self._place
            found = rule()
            if found is not None:
                return found
            self._place = start
        raise self._unclear()

    def _simple_days(self) -> Days | None:
        if self._take("daily") or (self._take("every", "each") and self._take("day")):
            return Days("DAILY", "every day")
        if self._peek() in ("weekly", "monthly", "yearly", "annually") and self._peek(1) != "on":
            word = self._next()
            example = {"weekly": "every monday at 9:00", "monthly": "on the 1st at 9:00"}.get(word)
            raise Unclear(f'"{word}" does not say on which day; write "{example or "every january 1st at 9:00"}"')
        return None

    def _every_so_many(self) -> Days | None:
        if not self._take("every", "each"):
            return None
        if (other := self._peek()) in ("other", "second") and self._peek(2) not in ("of", "in"):
            word = self._peek(1)
            how = f"every 2 weeks on {word}" if word in _DAY_NAMES else f"every 2 {word}s"
            raise Unclear(f'"every {other} {word}" does not say from when; write "{how} at 9:00" with starting_at')
        number, unit = self._number(), self._unit()
        if number is None or unit not in ("day", "week", "month"):
            return None
        words = each(number, unit)
        if unit == "day":
            return Days("DAILY", words, interval=number)
        if not self._take("on"):
            on = "on monday" if unit == "week" else "on the 1st"
            raise Unclear(f'"{words}" does not say on which day; write "{words} {on} at 9:00"')
        if unit == "week":
            days = self._weekdays()
            return Days("WEEKLY", f"{words} {_on_weekdays(days)}", _by_day(days), number)
        self._take("the")
        numbers = self._monthdays()
        if numbers is None:
            raise self._unclear()
        return Days("MONTHLY", f"{words} on the {_monthday_words(numbers)}", _by_monthday(numbers), number)

    def _of_year(self) -> Days | None:
        if self._take("every", "each"):
            if self._take("year"):
                self._take("on")
        elif not (self._take("yearly", "annually") and self._take("on")):
            return None
        self._take("the")
        day = self._ordinal()
        if day is not None:
            self._take("of")
        month = _MONTH_NAMES.get(self._next())
        day = day if day is not None else self._ordinal() or self._number()
        if month is None or day is None:
            return None
        name = MONTHS[month - 1]
        if day > calendar.monthrange(2024, month)[1] or day < 1:
            raise Unclear(f"{name} has no {ordinal(day)} day")
        if (month, day) == (2, 29):
            raise Unclear('29 February comes in leap years only; write "every february 28th", or a cron expression')
        return Days("DAILY", f"every {name} {ordinal(day)}", f"BYMONTH={month};BYMONTHDAY={day}")

    def _of_month(self) -> Days | None:
        monthly = self._take("monthly") or self._take_all("every", "month")
        self._take("on") or self._take("every")
        self._take("the")
        nth = _NTH.get(self._peek())
        if nth is not None and (kind := self._peek(1)) in ("day", "weekday", *_DAY_NAMES):
            self._place += 2
            self._month_words(needed=not monthly)
            return _nth_of_month(nth, kind)
        if self._peek() in ("fifth", "5th") and self._peek(1) in _DAY_NAMES:
            raise Unclear(f'not every month has a fifth {self._peek(1)}; write "last {self._peek(1)} of the month"')
        numbers = self._monthdays()
        if numbers is None:
            return None
        self._month_words(needed=False)
        return Days("DAILY", f"on the {_monthday_words(numbers)} of every month", _by_monthday(numbers))

    def _month_words(self, needed: bool) -> None:
        start = self._place
        if self._take("of", "in"):
            if self._take("the", "every", "each") and self._take("month"):
                return
        elif self._take("every", "each") and self._take("month"):
            return
        self._place = start
        if needed:
            raise Unclear('say of what: "last friday of the month at 18:00"')

    def _named_days(self) -> Days | None:
        word = self._peek()
        if self._take("weekly") or self._take_all("every", "week"):
            word = "weekly"
        if self._take("on"):
            if word == "on" and self._peek() in _DAY_NAMES and not self._peek().endswith("days"):
                day = self._peek()
                raise Unclear(f'"on {day}" is once or every week; write "every {day} at …" or "on 2026-12-24 at …"')
        elif not self._take("every", "each") and word not in ("weekdays", "weekends"):
            return None
        days = self._weekdays()
        if days == _ALL:
            return Days("DAILY", "every day")
        words = {_WORKDAYS: "every weekday", _WEEKEND: "every weekend"}.get(days)
        return Days("DAILY", words or f"every {listed(WEEKDAYS[d] for d in days)}", _by_day(days))

    # ── lists ──

    def _weekdays(self) -> tuple[int, ...]:
        """`monday, wednesday and friday`, `weekdays`, `weekends`, `monday to friday`."""
        found: set[int] = set()
        while True:
            word = self._next()
            if word in ("weekday", "weekdays"):
                found.update(_WORKDAYS)
            elif word in ("weekend", "weekends"):
                found.update(_WEEKEND)
            elif word in _DAY_NAMES:
                found.update(self._weekday_range(_DAY_NAMES[word]))
            else:
                self._place -= 1
                raise self._unclear()
            if not self._comma_or_and(lambda word: word in _DAY_NAMES):
                return tuple(sorted(found))

    def _weekday_range(self, first: int) -> list[int]:
        if self._peek() in ("to", "through") and self._peek(1) in _DAY_NAMES:
            self._place += 1
            last = _DAY_NAMES[self._next()]
            return [day % 7 for day in range(first, last + 1 if last >= first else last + 8)]
        return [first]

    def _monthdays(self) -> tuple[int, ...] | None:
        """`1st`, `1st and 15th`, `1st, 10th and last day`; None if it is no list of days."""
        found: list[int] = []
        while True:
            if self._peek() == "last" and self._peek(1) == "day":
                self._place += 2
                found.append(-1)
            elif (day := self._ordinal()) is not None:
                self._take("day")
                found.append(day)
            else:
                return None
            if not self._comma_or_and(lambda word: word in ("the", "last") or word.isdigit()):
                break
            self._take("the")
        for day in found:
            if day > 31 or day == 0:
                raise Unclear(f"no month has a {ordinal(day)} day")
            if day > 28:
                raise Unclear(
                    f"not every month has a {ordinal(day)}; write "
                    f'"on the last day of the month at …", or a cron expression for the months that have one'
                )
        return tuple(sorted(set(found), key=lambda day: (day < 0, day)))

    def _times(self, days: str) -> tuple[int, ...]:
        if not self._take("at"):
            if self._place < len(self._tokens):
                raise self._unclear()
            raise Unclear(f'"{days}" does not say when; write "{days} at 9:00"')
        found = [self._time()]
        while self._comma_or_and(lambda word: word[0].isdigit() or word in ("noon", "midnight")):
            found.append(self._time())
        if len(set(found)) > _MOST_TIMES:
            raise Unclear(f"names more than {_MOST_TIMES} times of day")
        return tuple(sorted(set(found)))

    def _comma_or_and(self, goes_on: Callable[[str], bool]) -> bool:
        """Whether a list goes on."""
        start = self._place
        comma, and_ = self._take(","), self._take("and")
        if (comma or and_) and self._peek() and goes_on(self._peek()):
            return True
        self._place = start
        return False

    # ── words ──

    def _time(self) -> int:
        word = self._next()
        if word in ("noon", "midnight"):
            return 43_200 if word == "noon" else 0
        hours, *rest = word.split(":")
        if not hours.isdigit():
            self._place -= 1
            raise self._unclear()
        hour, minute, second = int(hours), *(int(part) for part in (*rest, "0", "0")[:2])
        half = self._next() if self._peek() in ("am", "pm") else ""
        if half:
            return self._of_half_day(hour, minute, second, half[0], bool(rest))
        if not rest and 1 <= hour <= 12:
            raise Unclear(f'"at {hour}" is morning or evening; write {hour}:00, {hour}am, {hour}pm, noon or midnight')
        if hour > 23 or minute > 59 or second > 59:
            raise Unclear(f"{word} is no time of day")
        return hour * 3600 + minute * 60 + second

    def _of_half_day(self, hour: int, minute: int, second: int, half: str, exact: bool) -> int:
        if not 1 <= hour <= 12 or minute > 59 or second > 59:
            raise Unclear(f"{hour}{half}m is no time of day; hours before noon and after it go from 1 to 12")
        if hour == 12 and not (exact and minute):
            raise Unclear(f'"12 {half}m" is read as noon by some, as midnight by others; write noon or midnight')
        return (hour % 12 + 12 * (half == "p")) * 3600 + minute * 60 + second

    def _number(self) -> int | None:
        if not self._peek().isdigit() or len(self._peek()) > 6:
            return None
        if self._peek(1) in ("st", "nd", "rd", "th"):
            return None
        number = int(self._next())
        if number == 0:
            raise Unclear("0 is no number of times or days")
        return number

    def _ordinal(self) -> int | None:
        if self._peek() == "first":
            self._place += 1
            return 1
        if self._peek().isdigit() and len(self._peek()) <= 3 and self._peek(1) in ("st", "nd", "rd", "th"):
            number = int(self._next())
            if ordinal(number) != f"{number}{self._next()}":
                raise Unclear(f"{number} is written {ordinal(number)}")
            return number
        return None

    def _unit(self) -> str:
        word = self._peek()
        short = {"sec": "second", "secs": "second", "min": "minute", "mins": "minute"}.get(word, word.removesuffix("s"))
        if short in (*_UNITS, "month", "year"):
            self._place += 1
            return short
        return ""

    def _peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else ""

    def _next(self) -> str:
        word = self._peek()
        self._place += 1
        return word

    def _take(self, *words: str) -> bool:
        if self._peek() in words:
            self._place += 1
            return True
        return False

    def _take_all(self, *words: str) -> bool:
        if tuple(self._tokens[self._place : self._place + len(words)]) == words:
            self._place += len(words)
            return True
        return False

    def _unclear(self) -> Unclear:
        word = self._peek()
        there = f"at {word[:32]!r}" if word else "at its end"
        return Unclear(
            f'is not understood {there}; phrases are such as "every weekday at 9:00", "every 15 minutes between 9:00 '
            'and 17:00 on weekdays", "last friday of the month at 18:00" or "tomorrow at noon"'
        )


def _by_day(days: Iterable[int]) -> str:
    return f"BYDAY={','.join(DAY_CODES[day] for day in days)}"


def _by_monthday(days: Iterable[int]) -> str:
    return f"BYMONTHDAY={','.join(map(str, days))}"


def _monthday_words(days: Iterable[int]) -> str:
    return listed("last day" if day < 0 else ordinal(day) for day in days)


def _nth_of_month(nth: int, kind: str) -> Days:
    if kind == "day":
        return Days("DAILY", f"on the {_monthday_words([nth])} of every month", _by_monthday([nth]))
    which = {1: "first", 2: "second", 3: "third", 4: "fourth", -1: "last"}[nth]
    if kind == "weekday":
        if abs(nth) > 1:
            raise Unclear('only the first and the last weekday of a month can be named; write "first weekday …"')
        return Days("MONTHLY", f"{which} weekday of every month", _by_day(_WORKDAYS), edge=1 if nth > 0 else -1)
    day = _DAY_NAMES[kind]
    return Days("MONTHLY", f"{which} {WEEKDAYS[day]} of every month", f"BYDAY={nth}{DAY_CODES[day]}")
