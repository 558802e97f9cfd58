"""What a cron expression owes, by brute force: look at every minute of real time around a move of the clock.

Written apart from the engine and sharing nothing with it: it reads the moves of the clock from the compiled tzdata
files, what the clock shows from zoneinfo, and asks of each date and number whether an item of the expression names it.
The rules are those of PROMISES P9 and of tocsin/model/cron, word by word. Real time is a row of bits, one per minute
(one per second where a zone's clock was not on the minute), so that a rule is an AND of rows.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from importlib import resources
from itertools import pairwise
from zoneinfo import ZoneInfo

AROUND = 26 * 3600
_EPOCH = datetime(1970, 1, 1)
_DAY = timedelta(days=1)
_NAMES = dict(SUN=0, MON=1, TUE=2, WED=3, THU=4, FRI=5, SAT=6)
_NAMES |= dict(JAN=1, FEB=2, MAR=3, APR=4, MAY=5, JUN=6, JUL=7, AUG=8, SEP=9, OCT=10, NOV=11, DEC=12)
_LIMITS = {"second": (0, 59), "minute": (0, 59), "hour": (0, 23), "day": (1, 31), "month": (1, 12), "weekday": (0, 6)}


# ── moves of the clock, from the files ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Move:
    """A zone's clock is moved at a second since 1970; offsets in seconds."""

    zone: str
    at: int
    before: int
    after: int

    def __str__(self) -> str:
        local = _EPOCH + timedelta(seconds=self.at + self.before)
        return f"{self.zone} at {local} by {timedelta(seconds=abs(self.after - self.before))}" + (
            " back" if self.after < self.before else " forward"
        )


def zones() -> list[str]:
    return resources.files("tzdata").joinpath("zones").read_text("ascii").split()


@cache
def moves_of(zone: str) -> list[Move]:
    """Every move of the clock to the end of 2037: those that the file lists, then those that its closing rule makes."""
    listed, last_listed, has_rule = _listed_moves(zone)
    return listed + (_moves_by_rule(zone, last_listed) if has_rule else [])


def _listed_moves(zone: str) -> tuple[list[Move], int, bool]:
    """The moves in the 64-bit block of a file (RFC 8536), its last second, and whether a rule with summers follows."""
    data = resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).read_bytes()

    def counts(start: int) -> tuple[int, ...]:
        return struct.unpack(">4s c 15x 6l", data[start : start + 44])[2:]

    is_ut, is_std, leaps, times, types, letters = counts(0)
    start = 44 + times * 5 + types * 6 + letters + leaps * 8 + is_std + is_ut
    _, _, _, times, types, _ = counts(start)
    start += 44
    ats = struct.unpack(f">{times}q", data[start : start + 8 * times])
    kinds = data[start + 8 * times : start + 9 * times]
    start += 9 * times
    offsets = [struct.unpack(">l", data[start + 6 * i : start + 6 * i + 4])[0] for i in range(types)]
    out, before = [], offsets[0]
    for at, kind in zip(ats, kinds, strict=True):
        if offsets[kind] != before:
            out.append(Move(zone, at, before, offsets[kind]))
        before = offsets[kind]
    return out, ats[-1] if ats else 0, b"," in data.rstrip(b"\n").rpartition(b"\n")[2]


def _moves_by_rule(zone: str, since: int) -> list[Move]:
    """Look every ten days (such a rule moves the clock twice a year, months apart), and then closer."""
    tz, out, stride = _zoneinfo(zone), [], 10 * 86_400

    def offset(second: int) -> int:
        return int((datetime.fromtimestamp(second, tz).utcoffset() or timedelta(0)).total_seconds())

    end = int(datetime(2038, 1, 1, tzinfo=UTC).timestamp())
    for low in range(since, end, stride):
        high = low + stride
        before, after = offset(low), offset(high)
        if before == after:
            continue
        start = low
        while high - start > 1:
            middle = (start + high) // 2
            start, high = (middle, high) if offset(middle) == before else (start, middle)
        out.append(Move(zone, high, before, after))
    return out


def distinct_moves(first: int = 1970, last: int = 2037) -> list[Move]:
    """Every move of those years, one zone for each (offset before, offset after, local time)."""
    low, high = ((datetime(year, 1, 1) - _EPOCH) // timedelta(seconds=1) for year in (first, last + 1))
    found: dict[tuple[int, int, int], Move] = {}
    for zone in zones():
        for move in moves_of(zone):
            if low <= move.at < high:
                found.setdefault((move.before, move.after, move.at + move.before), move)
    return sorted(found.values(), key=lambda move: (move.zone, move.at))


# ── what an expression names ─────────────────────────────────────────────────────────────────────────────────────


def _number(text: str) -> int:
    return _NAMES[text] if text in _NAMES else int(text)


def _item_names(field: str, item: str, value: int) -> bool:
    """Whether a plain item names a number."""
    low, high = _LIMITS[field]
    body, _, step = item.partition("/")
    if body in ("*", "?"):
        start, end = low, high
    elif "-" in body:
        start, end = map(_number, body.split("-"))
    else:
        start = _number(body)
        end = max(start, high) if step else start
    return start <= value <= end and (value - start) % int(step or 1) == 0


def _month_of(day: date) -> list[date]:
    first = day.replace(day=1)
    return [d for d in (first + n * _DAY for n in range(31)) if d.month == day.month]


def _names_date(item: str, day: date) -> bool:
    """Whether an item of the day-of-month field names a date."""
    month = _month_of(day)
    workdays = [d for d in month if d.weekday() < 5]
    if item == "L":
        return day == month[-1]
    if item == "LW":
        return day == workdays[-1]
    if item.startswith("L-"):
        return day == month[-1] - int(item[2:]) * _DAY
    if item.endswith("W"):
        wanted = int(item[:-1])
        return wanted <= len(month) and day == min(workdays, key=lambda d: abs(d.day - wanted))
    return _item_names("day", item, day.day)


def _names_weekday(item: str, day: date) -> bool:
    """Whether an item of the day-of-week field names a date."""
    sundays_first = day.isoweekday() % 7
    if "#" in item:
        name, nth = item.split("#")
        return _number(name) % 7 == sundays_first and (day.day + 6) // 7 == int(nth)
    if item.endswith("L"):
        return _number(item[:-1]) % 7 == sundays_first and (day + 7 * _DAY).month != day.month
    # Sunday is 0 and 7.
    return _item_names("weekday", item, sundays_first) or (sundays_first == 0 and _item_names("weekday", item, 7))


@dataclass(frozen=True)
class Expression:
    """An expression without H or macro, field by field as it is written."""

    second: str
    minute: str
    hour: str
    day: str
    month: str
    weekday: str

    @staticmethod
    @cache
    def read(text: str) -> Expression:
        fields = text.upper().split()
        return Expression(*(["0"] if len(fields) == 5 else []), *fields)

    @property
    def per_second(self) -> bool:
        return self.second != "0"


@lru_cache(maxsize=100_000)
def fits(days: str, months: str, weekdays: str, day: date) -> bool:
    """Whether the three fields of the date name it."""
    if not any(_item_names("month", item, day.month) for item in months.split(",")):
        return False
    by_date = any(_names_date(item, day) for item in days.split(","))
    by_weekday = any(_names_weekday(item, day) for item in weekdays.split(","))
    unrestricted = any(item[0] in "*?" for item in f"{days},{weekdays}".split(","))
    return (by_date and by_weekday) if unrestricted else (by_date or by_weekday)


@cache
def named_numbers(field: str, text: str) -> tuple[int, ...]:
    low, high = _LIMITS[field]
    return tuple(v for v in range(low, high + 1) if any(_item_names(field, item, v) for item in text.split(",")))


def is_open(text: str) -> bool:
    """Whether a field has an item without an end: `*`, `*/n`, `a/n`."""
    return any(re.fullmatch(r"\*(/\d+)?|\d+/\d+", item) for item in text.split(","))


# ── real time around a move ──────────────────────────────────────────────────────────────────────────────────────


class Row:
    """Readings of a clock in a row, and where among them each number stands, as bits."""

    def __init__(self, readings: list[datetime]) -> None:
        self.readings = readings
        places: dict[tuple[str, int | date], list[int]] = defaultdict(list)
        for place, reading in enumerate(readings):
            for key in (
                ("second", reading.second),
                ("minute", reading.minute),
                ("hour", reading.hour),
                ("date", reading.date()),
            ):
                places[key].append(place)
        self._bits = {key: _bits_at(where, len(readings)) for key, where in places.items()}
        self.dates = sorted({reading.date() for reading in readings})
        self._of_field: dict[tuple[str, str], int] = {}

    def of_field(self, field: str, text: str) -> int:
        """The places at which a field of the clock reads what an expression names."""
        key = (field, text)
        if key not in self._of_field:
            self._of_field[key] = 0
            for number in named_numbers(field, text):
                self._of_field[key] |= self._bits.get((field, number), 0)
        return self._of_field[key]

    def matching(self, expression: Expression) -> int:
        """The places whose reading fits, to the minute."""
        dates = 0
        for day in self.dates:
            if fits(expression.day, expression.month, expression.weekday, day):
                dates |= self._bits[("date", day)]
        if not dates:
            return 0
        return dates & self.of_field("minute", expression.minute) & self.of_field("hour", expression.hour)


def _bits_at(places: list[int], length: int) -> int:
    digits = bytearray(b"0" * (length + 1))
    for place in places:
        digits[-1 - place] = ord("1")
    return int(digits, 2)


class Window:
    """Real time from 26 hours before a move to 26 hours after it, minute by minute (or second by second)."""

    def __init__(self, move: Move) -> None:
        self.move = move
        self.start = move.at - AROUND
        on_the_minute = all(n % 60 == 0 for n in (move.at, move.before, move.after))
        self.step = 60 if on_the_minute else 1
        tz = _zoneinfo(move.zone)
        instants = range(self.start, move.at + AROUND, self.step)
        self.end = instants.stop
        self.row = Row([datetime.fromtimestamp(at, tz).replace(tzinfo=None, fold=0) for at in instants])
        self.place_of_move = AROUND // self.step
        self._look_for_repeats()
        self._look_for_a_gap()

    def _look_for_repeats(self) -> None:
        """`earlier`: the clock has shown this before; `later`: it will show it again."""
        seen: dict[datetime, int] = {}
        earlier, later = [], []
        for place, reading in enumerate(self.row.readings):
            if reading in seen:
                earlier.append(place)
                later.append(seen[reading])
            seen[reading] = place
        length = len(self.row.readings)
        self.earlier, self.later = _bits_at(earlier, length), _bits_at(later, length)

    def _look_for_a_gap(self) -> None:
        """What the clock should have shown before it jumped, without dates that it did not show at all."""
        step, missing = timedelta(seconds=self.step), []
        for before, after in pairwise(self.row.readings):
            reading = before + step
            while reading < after:
                missing.append(reading)
                reading += step
        shown = {reading.date() for reading in self.row.readings}
        self.missing = Row([reading for reading in missing if reading.date() in shown])

    def owed(self, text: str, gap: str, overlap: str) -> Owed:
        """Every second of the window that is owed."""
        expression = Expression.read(text)
        fitting = self.row.matching(expression)
        lands = False
        if not is_open(expression.hour):
            if not (is_open(expression.minute) or is_open(expression.second)):
                fitting &= ~{"first": self.earlier, "second": self.later, "both": 0}[overlap]
            lands = gap == "next_valid" and self._in_the_gap(expression)
        return self._to_seconds(expression, fitting, lands)

    def _in_the_gap(self, expression: Expression) -> bool:
        fitting = self.missing.matching(expression)
        return bool(fitting if self.step == 60 else fitting & self.missing.of_field("second", expression.second))

    def _to_seconds(self, expression: Expression, fitting: int, lands: bool) -> Owed:
        if self.step == 1:
            fitting &= self.row.of_field("second", expression.second)
            return Owed(self.start, 1, fitting | lands << self.place_of_move)
        if not expression.per_second:
            return Owed(self.start, 60, fitting | lands << self.place_of_move)
        # Each minute that fits becomes sixty places, with the seconds that are named.
        spread = int(bin(fitting)[2:].replace("0", "0" * 60).replace("1", "0" * 59 + "1"), 2) if fitting else 0
        seconds = sum(1 << s for s in named_numbers("second", expression.second))
        return Owed(self.start, 1, spread * seconds | lands << self.place_of_move * 60)


class Owed:
    """Owed instants as bits: place n is `start + n × step`."""

    def __init__(self, start: int, step: int, bits: int) -> None:
        self._start, self._step, self._bits = start, step, bits
        self.count = bits.bit_count()

    def first_from(self, second: int) -> int | None:
        left = self._bits >> self._place(second)
        return self._at(self._place(second) + (left & -left).bit_length() - 1) if left else None

    def last_before(self, second: int) -> int | None:
        left = self._bits & ((1 << self._place(second)) - 1)
        return self._at(left.bit_length() - 1) if left else None

    def count_before(self, second: int) -> int:
        return (self._bits & ((1 << self._place(second)) - 1)).bit_count()

    def __iter__(self) -> Iterator[int]:
        left = self._bits
        while left:
            lowest = left & -left
            yield self._at(lowest.bit_length() - 1)
            left ^= lowest

    def _place(self, second: int) -> int:
        """The first place that is not before a second."""
        return -((self._start - second) // self._step)

    def _at(self, place: int) -> int:
        return self._start + place * self._step


@cache
def _zoneinfo(zone: str) -> ZoneInfo:
    with resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=zone)


def instant(second: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second)
