"""A cron expression in plain English."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tocsin.model.cron.syntax import Parsed, Part, Special

_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_NTH = ("last", "first", "second", "third", "fourth", "fifth")
# More than these times of day are told by their rule, not one by one.
_MOST_TIMES = 6


def describe(parsed: Parsed) -> str:
    """When it fires, as one sentence without its full stop."""
    time, days, months = _time(parsed), _days(parsed), _months(parsed)
    if time.startswith("at ") and not days and not months and len(parsed.hour.values) < 24:
        days = " every day"
    words = f"{time}{days}{months}"
    return words[0].upper() + words[1:]


# ── the time of day ──────────────────────────────────────────────────────────────────────────────────────────────


def _time(parsed: Parsed) -> str:
    second, minute, hour = parsed.second, parsed.minute, parsed.hour
    few = _few_times(parsed)
    if few:
        return few
    if second.values == (0,):
        if len(minute.values) == 1 and len(hour.values) > 1:
            return _once_an_hour(minute.values[0], hour)
        return _pace_or_places("minute", minute, 60) + _in_hours(hour, _is_paced(minute, 60))
    lead = _pace_or_places("second", second, 60)
    if len(minute.values) == 60:
        return f"{lead}{'' if _is_paced(second, 60) else ' of every minute'}{_in_hours(hour, True)}"
    return f"{lead} in {_places('minute', minute, 60)}{_in_hours(hour, False)}"


def _few_times(parsed: Parsed) -> str:
    """`at 09:00 and 17:30`, where all times of day are few and fixed."""
    parts = (parsed.hour, parsed.minute, parsed.second)
    hours, minutes, seconds = (part.values for part in parts)
    if any(part.open for part in parts) or len(hours) * len(minutes) * len(seconds) > _MOST_TIMES:
        return ""
    with_seconds = seconds != (0,)
    times = (f"{h:02}:{m:02}" + f":{s:02}" * with_seconds for h in hours for m in minutes for s in seconds)
    return f"at {_and(times)}"


def _once_an_hour(minute: int, hour: Part) -> str:
    hours, pace = hour.values, _pace(hour, 24)
    if pace == 1:
        return "every hour" if minute == 0 else f"at minute {minute} of every hour"
    if pace:
        start = f" from {hours[0]:02}:{minute:02} on" if minute or hours[0] else ""
        return f"every {pace} hours{start}"
    if _is_run(hours):
        return f"every hour from {hours[0]:02}:{minute:02} to {hours[-1]:02}:{minute:02}"
    return f"at {_and(f'{h:02}:{minute:02}' for h in hours)}"


def _in_hours(hour: Part, paced: bool) -> str:
    hours, pace = hour.values, _pace(hour, 24)
    if len(hours) == 24:
        return "" if paced else " of every hour"
    if pace:
        return f" in every {_ordinal(pace)} hour" + (f" from {hours[0]:02}:00 on" if hours[0] else "")
    if _is_run(hours):
        return f" from {hours[0]:02}:00 to {hours[-1]:02}:59"
    return f" in the hours {_and(_runs(hours, str))}"


def _pace_or_places(unit: str, part: Part, size: int) -> str:
    """`every 15 minutes`, or `at minutes 0 and 30`."""
    pace = _pace(part, size)
    if not pace:
        return f"at {_places(unit, part, size)}"
    start = f" from {unit} {part.values[0]} on" if part.values[0] else ""
    return f"every {unit}" if pace == 1 else f"every {pace} {unit}s{start}"


def _places(unit: str, part: Part, size: int) -> str:
    """`minute 5`, `minutes 0 to 10`, `every 5th minute`, `every 2nd minute from 0 to 20`."""
    values, pace = part.values, _pace(part, size)
    if pace and pace > 1:
        return f"every {_ordinal(pace)} {unit}" + (f" from {values[0]} on" if values[0] else "")
    if len(part.items) == 1 and part.items[0].step > 1 and len(values) > _MOST_TIMES:
        return f"every {_ordinal(part.items[0].step)} {unit} from {values[0]} to {values[-1]}"
    return f"{unit}{'' if len(values) == 1 else 's'} {_and(_runs(values, str))}"


def _pace(part: Part, size: int) -> int:
    """The step of an item without an end that goes evenly round the clock; 0 for all else."""
    if len(part.values) == size:
        return 1
    item = part.items[0]
    even = len(part.items) == 1 and item.open and size % item.step == 0 and len(part.values) == size // item.step
    return item.step if even else 0


def _is_paced(part: Part, size: int) -> bool:
    return _pace(part, size) > 0


# ── the date ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _days(parsed: Parsed) -> str:
    dates, weekdays = _dates(parsed.day), _weekdays(parsed.weekday)
    if dates and weekdays:
        return f" on {dates} or on {weekdays}" if parsed.either_day else f" on {dates} if it is {weekdays}"
    return f" on {dates or weekdays}" if dates or weekdays else ""


def _dates(part: Part) -> str:
    if len(part.values) == 31:
        return ""
    plain = [f"the {run}" for run in _runs(part.values, _ordinal)]
    return f"{_and(plain + [_special_date(s) for s in part.specials])} of the month"


def _special_date(special: Special) -> str:
    if special.kind == "near":
        return f"the weekday nearest to the {_ordinal(special.n)}"
    if special.kind == "last_workday":
        return "the last weekday (Monday to Friday)"
    return f"the {_ordinal(special.n)} day before the last" if special.n else "the last day"


def _weekdays(part: Part) -> str:
    numbers = sorted({(value - 1) % 7 for value in part.values})
    if len(numbers) == 7:
        return ""
    specials = [f"the {_NTH[s.n]} {_WEEKDAYS[s.weekday]} of the month" for s in part.specials]
    return _and(_runs(numbers, _WEEKDAYS.__getitem__) + specials)


def _months(parsed: Parsed) -> str:
    months = parsed.month.values
    return "" if len(months) == 12 else f" in {_and(_runs(months, lambda m: _MONTHS[m - 1]))}"


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_run(values: Sequence[int]) -> bool:
    return values[-1] - values[0] == len(values) - 1


def _runs(values: Sequence[int], word: Callable[[int], str]) -> list[str]:
    """Each value by its word; three and more in a row as `a through b`."""
    out: list[str] = []
    start = 0
    for place, value in enumerate(values):
        if place + 1 < len(values) and values[place + 1] == value + 1:
            continue
        run = values[start : place + 1]
        out += [f"{word(run[0])} through {word(run[-1])}"] if len(run) > 2 else map(word, run)
        start = place + 1
    return out


def _and(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _ordinal(n: int) -> str:
    ending = "th" if 10 < n % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
