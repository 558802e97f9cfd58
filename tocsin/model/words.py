"""Plain English for people: lengths of time, lists, ordinals, times of day, and whole recurrence rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import product

from tocsin.model.rrule import Rule, places

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_UNITS = {
    **{"SECONDLY": "second", "MINUTELY": "minute", "HOURLY": "hour"},
    **{"DAILY": "day", "WEEKLY": "week", "MONTHLY": "month", "YEARLY": "year"},
}
_MOST_TIMES = 6  # that are listed one by one


def listed(items: Iterable[object]) -> str:
    """`a, b and c`."""
    words = [str(item) for item in items]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def ordinal(number: int) -> str:
    """`1st`, `22nd`, `13th`; from the end: `last`, `2nd to last`."""
    if number < 0:
        return "last" if number == -1 else f"{ordinal(-number)} to last"
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def clock(second: int) -> str:
    """`09:00`, and `09:00:30` where the seconds matter."""
    text = f"{second // 3600:02}:{second // 60 % 60:02}"
    return f"{text}:{second % 60:02}" if second % 60 else text


def counted(number: int | float, unit: str) -> str:
    """`1 day`, `3 days`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def each(number: int, unit: str) -> str:
    """`every day`, `every 3 days`."""
    return f"every {unit}" if number == 1 else f"every {counted(number, unit)}"


def length(delta: timedelta) -> str:
    """`1 day, 1 hour and 5 minutes`."""
    seconds = delta.seconds % 60 + delta.microseconds / 1_000_000
    parts = [
        (delta.days, "day"),
        (delta.seconds // 3600, "hour"),
        (delta.seconds // 60 % 60, "minute"),
        (int(seconds) if seconds == int(seconds) else seconds, "second"),
    ]
    return listed(counted(n, unit) for n, unit in parts if n) or "0 seconds"


def every_length(delta: timedelta) -> str:
    """`every hour`, `every 5 minutes`."""
    words = length(delta)
    alone = words.startswith("1 ") and " " not in words[2:]
    return f"every {words[2:] if alone else words}"


# ── recurrence rules ─────────────────────────────────────────────────────────────────────────────────────────────


def rule_in_words(rule: Rule) -> str:
    """A rule, part by part."""
    unit = _UNITS[rule.freq]
    parts = [each(rule.interval, unit), *_dates(rule), *_times(rule)]
    if rule.by_setpos and not (rule.freq == "DAILY" and _listed_times(rule)):
        parts.append(f"only the {listed(map(ordinal, rule.by_setpos))} of these each {unit}")
    words = " ".join(parts)
    if rule.count is not None:
        words += ", once" if rule.count == 1 else f", {rule.count:,} times"
    return words + (f", until {_until(rule.until)}" if rule.until else "")


def _dates(rule: Rule) -> list[str]:
    parts = []
    if rule.by_day:
        parts.append(f"on {listed(_weekday(n, day) for n, day in sorted(rule.by_day, key=lambda d: d[::-1]))}")
    if rule.by_monthday:
        parts.append(f"on the {listed(map(ordinal, rule.by_monthday))} day of the month")
    if rule.by_yearday:
        parts.append(f"on the {listed(map(ordinal, rule.by_yearday))} day of the year")
    if rule.by_weekno:
        parts.append(f"in the {listed(map(ordinal, rule.by_weekno))} week of the year")
    if rule.by_month:
        parts.append(f"in {listed(MONTHS[m - 1] for m in rule.by_month)}")
    return parts


def _weekday(number: int, day: int) -> str:
    return f"the {ordinal(number)} {WEEKDAYS[day]}" if number else WEEKDAYS[day]


def _times(rule: Rule) -> list[str]:
    named = _listed_times(rule)
    if named:
        return [f"at {listed(map(clock, named))}"]
    parts = [
        f"at {what} {_ranges(numbers)}"
        for what, numbers in (("second", rule.by_second), ("minute", rule.by_minute), ("hour", rule.by_hour))
        if numbers
    ]
    return parts or ([] if rule.by_real_time else ["at the time of day of its start"])


def _listed_times(rule: Rule) -> list[int]:
    """Seconds after midnight, if they are few and the rule says them all."""
    if rule.by_real_time or not (rule.by_hour and rule.by_minute) or len(rule.by_second) > 1:
        return []
    times = sorted(h * 3600 + m * 60 + s for h, m, s in product(rule.by_hour, rule.by_minute, rule.by_second or (0,)))
    if rule.by_setpos and rule.freq == "DAILY":
        # Within a day the positions choose from the times alone.
        times = [times[place] for place in places(rule.by_setpos, len(times))]
    return times if len(times) <= _MOST_TIMES else []


def _ranges(numbers: Sequence[int]) -> str:
    """`9-16`, `0, 15, 30 and 45`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return listed(numbers)


def _until(text: str) -> str:
    day = f"{text[:4]}-{text[4:6]}-{text[6:8]}"
    return day if len(text) == 8 else f"{day}T{text[9:11]}:{text[11:13]}:{text[13:]}"
