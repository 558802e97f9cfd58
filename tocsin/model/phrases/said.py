"""What can be said: each form of a phrase, what it means as another kind of schedule, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import product
from typing import Literal, NamedTuple

from tocsin.model.words import WEEKDAYS, clock, counted, each, listed

UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
WORKDAYS, WEEKEND, ALL = (0, 1, 2, 3, 4), (5, 6), tuple(range(7))


class Meaning(NamedTuple):
    """The kind of schedule a phrase becomes, and its value."""

    kind: Literal["delay", "at", "every", "cron", "rrule"]
    value: str | timedelta | datetime


@dataclass(frozen=True)
class After:
    """Once, so long after it was said."""

    number: int
    unit: str
    once = True

    def meaning(self, _said: datetime) -> Meaning:
        return Meaning("delay", timedelta(seconds=self.number * UNITS[self.unit]))

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
    weekdays: tuple[int, ...] = ALL
    aligned: bool = False  # `hourly`: on the hour
    once = False

    @property
    def by_real_time(self) -> bool:
        """Whether it counts from when it was said, whatever the clock shows."""
        return self.hours is None and self.weekdays == ALL and not self.aligned

    def meaning(self, _said: datetime) -> Meaning:
        if self.by_real_time:
            return Meaning("every", timedelta(seconds=self.number * UNITS[self.unit]))
        low, high = self.hours or (0, 24)
        hours = "*" if self.hours is None else ",".join(map(str, _hours(low, high)))
        days = "*" if self.weekdays == ALL else ",".join(str((day + 1) % 7) for day in self.weekdays)
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
        if self.weekdays != ALL:
            words.append(on_weekdays(self.weekdays))
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


def on_weekdays(days: Sequence[int]) -> str:
    """`on weekdays`, `on Mondays and Fridays`."""
    known = {WORKDAYS: "on weekdays", WEEKEND: "on weekends"}
    return known.get(tuple(days)) or f"on {listed(WEEKDAYS[day] + 's' for day in days)}"
