"""Reading cron expressions: what may be written, what each field means, and which days of a month it names.

Five fields, or six with seconds first. Every field takes `*`, numbers, names, `a-b`, and steps `*/n`, `a/n` (from a to
the end), `a-b/n`, in lists; day fields also `?`, which is `*`. Day of month: `L` (last), `L-3` (three before the last),
`LW` (last Monday to Friday), `15W` (the Monday to Friday nearest to the 15th, within the month). Day of week: `FRIL`
(last Friday), `MON#2` (second Monday). `H` is a number that follows from a seed for ever, `H(a-b)` one of that range,
`H/n` each n-th from such a number. A range that runs backwards (`FRI-MON`, `22-2`) is refused: half of all readers
take it for a slip.

Days: when neither day field begins with `*`, a date fits if either names it (OR); else it must fit both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Literal, NamedTuple

MOST_CHARACTERS = 256
MACROS = {
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
    "@MONTHLY": "0 0 1 * *",
    "@WEEKLY": "0 0 * * 0",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@HOURLY": "0 * * * *",
}

_ALPHABET = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ*/,-#?()")
_PLAIN = re.compile(r"(?:\*|(?P<low>[0-9]{1,2}|[A-Z]{3})(?:-(?P<high>[0-9]{1,2}|[A-Z]{3}))?)(?:/(?P<step>[0-9]{1,9}))?")
_HASHED = re.compile(r"H(?:\((?P<low>[0-9]{1,2})-(?P<high>[0-9]{1,2})\))?(?:/(?P<step>[0-9]{1,9}))?")
_DAY_SPECIAL = re.compile(r"(?P<last>L)(?:-(?P<before>[0-9]{1,2}))?|(?P<last_workday>LW)|(?P<near>[0-9]{1,2})W")
_WEEKDAY_SPECIAL = re.compile(r"(?P<weekday>[0-9]|[A-Z]{3})(?:(?P<last>L)|#(?P<nth>[0-9]{1,2}))")


class BadCron(ValueError):
    """The text is no cron expression; says which field and why."""


class NeverFires(ValueError):
    """Each field is right, but no date fits them all."""


@dataclass(frozen=True, eq=False)
class _Field:
    """What one field may hold: `low` to `high`; `*` and open steps end at `top`, and `H` chooses up to `hash_top`."""

    name: str
    low: int
    high: int
    top: int
    hash_top: int
    shown: str
    names: Mapping[str, int] = field(default_factory=dict)


_MONTHS = dict(JAN=1, FEB=2, MAR=3, APR=4, MAY=5, JUN=6, JUL=7, AUG=8, SEP=9, OCT=10, NOV=11, DEC=12)
_WEEKDAYS = dict(SUN=0, MON=1, TUE=2, WED=3, THU=4, FRI=5, SAT=6)
_SECOND = _Field("second", 0, 59, 59, 59, "0-59")
_MINUTE = _Field("minute", 0, 59, 59, 59, "0-59")
_HOUR = _Field("hour", 0, 23, 23, 23, "0-23")
# A day that H chooses comes every month.
_DAY = _Field("day of month", 1, 31, 31, 28, "1-31")
_MONTH = _Field("month", 1, 12, 12, 12, "1-12 or JAN-DEC", _MONTHS)
# Sunday is 0 and 7.
_WEEKDAY = _Field("day of week", 0, 7, 6, 6, "0-7 or SUN-SAT", _WEEKDAYS)
_FIELDS = (_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)


class Item(NamedTuple):
    """One of a field's list: `low` to `high` by `step`; `open` if written without an end (`*`, `*/n`, `a/n`)."""

    low: int
    high: int
    step: int
    open: bool
    star: bool


class Special(NamedTuple):
    """A day that depends on the month: `last` (n before it), `last_workday`, `near` (n), and of `weekday` (Monday is 0)
    the `nth` or, for n = 0, the last."""

    kind: Literal["last", "last_workday", "near", "nth"]
    n: int = 0
    weekday: int = 0

    def day(self, length: int, first: int) -> int:
        """The day in a month of that length whose first is that weekday; 0 if there is none."""
        if self.kind == "last":
            return max(0, length - self.n)
        if self.kind == "last_workday":
            return length - max(0, (first + length - 1) % 7 - 4)
        if self.kind == "near":
            return _nearest_workday(self.n, length, first) if self.n <= length else 0
        day = 1 + (self.weekday - first) % 7 + 7 * ((self.n or 5) - 1)
        if day <= length:
            return day
        return 0 if self.n else day - 7


def _nearest_workday(day: int, length: int, first: int) -> int:
    weekday = (first + day - 1) % 7
    if weekday == 5:
        return day - 1 if day > 1 else day + 2
    if weekday == 6:
        return day + 1 if day < length else day - 2
    return day


@dataclass(frozen=True, slots=True)
class Part:
    """One field: what is in its list, and the numbers that its plain items name."""

    items: tuple[Item, ...]
    specials: tuple[Special, ...] = ()

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(sorted({v for item in self.items for v in range(item.low, item.high + 1, item.step)}))

    @property
    def starred(self) -> bool:
        """Whether `*` or `*/n` is among the items."""
        return any(item.star for item in self.items)

    @property
    def open(self) -> bool:
        """Whether an item has no end of its own: `*`, `*/n` or `a/n`."""
        return any(item.open for item in self.items)


@dataclass(frozen=True, slots=True)
class Parsed:
    """An expression, field by field."""

    second: Part
    minute: Part
    hour: Part
    day: Part
    month: Part
    weekday: Part

    @property
    def either_day(self) -> bool:
        """Whether a date fits that only one of the day fields names."""
        return not (self.day.starred or self.weekday.starred)

    def days(self, length: int, first: int) -> int:
        """The days that fit, as bits, in a month of that length whose first is that weekday (Monday is 0)."""
        by_date, by_weekday = 0, 0
        for value in self.day.values:
            by_date |= 1 << value
        for value in self.weekday.values:
            by_weekday |= _every_week(1 + (value - 1 - first) % 7)
        for special in self.day.specials:
            by_date |= 1 << special.day(length, first)
        for special in self.weekday.specials:
            by_weekday |= 1 << special.day(length, first)
        fitting = by_date | by_weekday if self.either_day else by_date & by_weekday
        # Bit 0 is the day that a special did not find.
        return fitting & ((2 << length) - 2)

    def may_fire(self) -> bool:
        """Whether there is a date that fits; each month begins on each weekday, in leap years too, one day."""
        lengths = {length for month in self.month.values for length in _lengths(month)}
        return any(self.days(length, first) for length in lengths for first in range(7))


def _lengths(month: int) -> tuple[int, ...]:
    return (28, 29) if month == 2 else (30,) if month in (4, 6, 9, 11) else (31,)


def _every_week(day: int) -> int:
    return sum(1 << d for d in range(day, 32, 7))


def resolve(expression: str, seed: str) -> str:
    """The expression checked and written out: upper case, single spaces, no macro, no `?`, no `H`."""
    if len(expression) > MOST_CHARACTERS:
        raise BadCron(f"is longer than {MOST_CHARACTERS} characters")
    # Where there is no H, all jobs share one answer.
    return _resolved(expression, seed if "H" in expression or "h" in expression else "")


@lru_cache(maxsize=65_536)
def _resolved(expression: str, seed: str) -> str:
    fields = _split(expression)
    text = " ".join(
        ",".join(_written_out(kind, item, seed) for item in text.split(","))
        for kind, text in zip(_FIELDS[-len(fields) :], fields, strict=True)
    )
    parse(text)
    return text


@lru_cache(maxsize=1024)
def parse(expression: str) -> Parsed:
    """What an expression without `H` means; raises BadCron, NeverFires."""
    fields = _split(expression)
    parts = [_part(kind, text) for kind, text in zip(_FIELDS[-len(fields) :], fields, strict=True)]
    if len(parts) == 5:
        parts.insert(0, Part((Item(0, 0, 1, open=False, star=False),)))
    parsed = Parsed(*parts)
    if not parsed.may_fire():
        day, month, weekday = fields[-3:]
        raise NeverFires(f"no date has day of month {day}, month {month} and day of week {weekday}")
    return parsed


def _split(expression: str) -> list[str]:
    """Five or six fields in upper case, macros written out."""
    # An H takes up to twice its space when it is written out.
    if len(expression) > 2 * MOST_CHARACTERS:
        raise BadCron(f"is longer than {MOST_CHARACTERS} characters")
    fields = expression.upper().replace("\t", " ").split(" ") if expression.isascii() else []
    fields = [f for f in fields if f]
    if len(fields) == 1 and fields[0].startswith("@"):
        if fields[0] not in MACROS:
            raise BadCron(f"{expression[:32]!r} is not known; there are {', '.join(MACROS).lower()}")
        return MACROS[fields[0]].split(" ")
    if not fields or any(not set(f) <= _ALPHABET for f in fields):
        raise BadCron("only ASCII digits, names, and * / , - ? # ( ) separated by spaces stand in a cron expression")
    if len(fields) not in (5, 6):
        names = ", ".join(f.name for f in _FIELDS[1:])
        raise BadCron(f"has {len(fields)} fields; five are needed: {names}; or six, with the second first")
    return fields


def _part(kind: _Field, text: str) -> Part:
    items: list[Item] = []
    specials: list[Special] = []
    for item in text.split(","):
        special = _special(kind, item)
        if special:
            specials.append(special)
        else:
            items.append(_item(kind, item))
    return Part(tuple(items), tuple(specials))


def _item(kind: _Field, text: str) -> Item:
    if text == "?" and kind in (_DAY, _WEEKDAY):
        text = "*"
    match = _PLAIN.fullmatch(text)
    if not match:
        raise _bad(kind, text)
    step = _step(kind, match["step"], text)
    if match["low"] is None:
        return Item(kind.low, kind.top, step, open=True, star=True)
    low = _number(kind, match["low"], text)
    if match["high"] is not None:
        high = _number(kind, match["high"], text)
        if high < low:
            raise BadCron(f"the {kind.name} {text!r} runs backwards; write it in two: {_in_two(kind, match)}")
        return Item(low, high, step, open=False, star=False)
    if match["step"] is None:
        return Item(low, low, 1, open=False, star=False)
    return Item(low, max(low, kind.top), step, open=True, star=False)


def _in_two(kind: _Field, match: re.Match[str]) -> str:
    """A range over the end of a field as two: FRI-SAT,SUN-MON."""
    named = {number: name for name, number in kind.names.items()} if match["low"].isalpha() else {}
    return f"{match['low']}-{named.get(kind.top, kind.top)},{named.get(kind.low, kind.low)}-{match['high']}"


def _special(kind: _Field, text: str) -> Special | None:
    if kind is _DAY and (match := _DAY_SPECIAL.fullmatch(text)):
        if match["last_workday"]:
            return Special("last_workday")
        if match["near"]:
            return Special("near", _number(kind, match["near"], text))
        before = int(match["before"] or 0)
        if before > 30:
            raise BadCron(f"{text!r} is before every month's first day; L-30 is the farthest")
        return Special("last", before)
    if kind is _WEEKDAY and (match := _WEEKDAY_SPECIAL.fullmatch(text)):
        weekday = (_number(kind, match["weekday"], text) - 1) % 7
        nth = int(match["nth"] or 0)
        if match["nth"] and not 1 <= nth <= 5:
            raise BadCron(f"{text!r} names no day of week; # takes 1 to 5")
        return Special("nth", nth, weekday)
    return None


def _written_out(kind: _Field, text: str, seed: str) -> str:
    """An item with its `H` as a number."""
    if text == "?" and kind in (_DAY, _WEEKDAY):
        return "*"
    match = _HASHED.fullmatch(text)
    if not match:
        return text
    step, low, high = _step(kind, match["step"], text), kind.low, kind.hash_top
    if match["low"] is not None:
        low, high = (_number(kind, match[end], text) for end in ("low", "high"))
        if high < low:
            raise BadCron(f"the range of {text!r} runs backwards")
    choices = high - low + 1
    digest = int.from_bytes(sha256(f"{kind.name}\n{seed}".encode()).digest()[:8])
    if match["step"] is None:
        return str(low + digest % choices)
    start = low + digest % min(step, choices)
    # Without an end of its own it stays without, so that H/15 is treated as */15 is where clocks are moved.
    is_open = match["low"] is None and high == kind.top
    return f"{start}/{step}" if is_open else f"{start}-{high}/{step}"


def _step(kind: _Field, text: str | None, item: str) -> int:
    step, size = int(text or 1), kind.top - kind.low + 1
    if not 1 <= step <= size:
        raise BadCron(f"the step of {item[:32]!r} must be 1 to {size} in the {kind.name} field")
    return step


def _number(kind: _Field, text: str, item: str) -> int:
    value = kind.names.get(text, -1) if text.isalpha() else int(text)
    if not kind.low <= value <= kind.high:
        raise _bad(kind, item)
    return value


def _bad(kind: _Field, text: str) -> BadCron:
    if text.startswith("H") and _HASHED.fullmatch(text):
        return BadCron(f"{text!r} in the {kind.name} field is not resolved; H needs a seed")
    more = {_DAY: ", ?, L, L-n, LW, nW", _WEEKDAY: ", ?, FRIL, MON#2"}.get(kind, "")
    return BadCron(f"{text[:32]!r} is not a {kind.name}; it can be {kind.shown}, *, a-b, a-b/n, */n, H{more}")
