"""The reader of phrases: one pass over the words, with a way back where two forms begin alike."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable
from datetime import date
from typing import Literal

from tocsin.model.phrases.said import (
    ALL,
    UNITS,
    WEEKEND,
    WORKDAYS,
    After,
    AtTimes,
    Days,
    OnDay,
    Phrase,
    Steps,
    on_weekdays,
)
from tocsin.model.rrule import WEEKDAYS as DAY_CODES
from tocsin.model.words import MONTHS, WEEKDAYS, each, listed, ordinal

_NTH = {"first": 1, "1st": 1, "second": 2, "2nd": 2, "third": 3, "3rd": 3, "fourth": 4, "4th": 4, "last": -1}
_DAY_NAMES = {
    name: number for number, day in enumerate(WEEKDAYS) for name in (day.lower(), day.lower() + "s", day[:3].lower())
} | {"tues": 1, "thur": 3, "thurs": 3}
_MONTH_NAMES = {name: n for n, month in enumerate(MONTHS, 1) for name in (month.lower(), month[:3].lower())}
# "every second friday" is no step of a second.
_AFTER_SECOND = {"day", "week", "month", "weekday", *_DAY_NAMES}
_MOST_TIMES = 24


class Unclear(ValueError):
    """Not in the grammar, or with two meanings; says how to write it."""


class Reader:
    """One pass over the words of a phrase."""

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
            if unit not in UNITS or number is None:
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
        if hours is None and weekdays == ALL:
            return steps
        whole = {"second": 60, "minute": 60, "hour": 24}[steps.unit]
        if whole % steps.number:
            raise Unclear(f"on some hours or days only, {whole} {steps.unit}s must be a multiple of the step")
        if hours is not None and hours[1] % 24 <= hours[0] and hours[1] != 24 and weekdays != ALL:
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
                return ALL
            if self._peek() in ("weekday", "weekend"):
                return WORKDAYS if self._next() == "weekday" else WEEKEND
        self._place = start
        return ALL

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
            return Days("WEEKLY", f"{words} {on_weekdays(days)}", _by_day(days), number)
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
        if days == ALL:
            return Days("DAILY", "every day")
        words = {WORKDAYS: "every weekday", WEEKEND: "every weekend"}.get(days)
        return Days("DAILY", words or f"every {listed(WEEKDAYS[d] for d in days)}", _by_day(days))

    # ── lists ──

    def _weekdays(self) -> tuple[int, ...]:
        """`monday, wednesday and friday`, `weekdays`, `weekends`, `monday to friday`."""
        found: set[int] = set()
        while True:
            word = self._next()
            if word in ("weekday", "weekdays"):
                found.update(WORKDAYS)
            elif word in ("weekend", "weekends"):
                found.update(WEEKEND)
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
        if short in (*UNITS, "month", "year"):
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
        return Days("MONTHLY", f"{which} weekday of every month", _by_day(WORKDAYS), edge=1 if nth > 0 else -1)
    day = _DAY_NAMES[kind]
    return Days("MONTHLY", f"{which} {WEEKDAYS[day]} of every month", f"BYDAY={nth}{DAY_CODES[day]}")
