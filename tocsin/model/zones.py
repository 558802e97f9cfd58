"""Time zones of the pinned tzdata wheel, and a local day as stretches of real time.

Zones never come from the machine, so that every node computes the same instants. A local day is a share of real time,
from its first midnight (or the first instant after a gap that swallowed it) to that of the next day; shares tile time
without holes, wherever clocks are put forward or back. Within a share, a stretch is a run of real time during which
the clock just ticks: it reads one date, starts at one time of day, and is met once, or is the first or the second
passage of an overlap. Nearly every share is one stretch of 24 hours.

This relies on what tests/time holds every zone to: moves of the clock are days apart and never longer than a day.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from importlib import metadata, resources
from itertools import pairwise
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

TZDATA_VERSION = metadata.version("tzdata")
DAY_SECONDS = 86_400

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = _EPOCH.toordinal()
_SECOND = timedelta(seconds=1)
_HOUR_SECONDS = 3_600

Passage = Literal["only", "first", "second"]


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


@lru_cache(maxsize=1024)
def rules_of(name: str) -> str | None:
    """By which rules this node reads a zone: its name, what its file holds, and the release it came in. Of UTC there is
    nothing to say."""
    if name == "UTC":
        return None
    held = resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).read_bytes()
    return f"{name} {hashlib.sha256(held).hexdigest()[:12]} {TZDATA_VERSION}"


def release_of(rules: str | None) -> str | None:
    """The release of tzdata that rules came in."""
    return None if rules is None else rules.rpartition(" ")[2]


@lru_cache(maxsize=4096)
def is_newer(rules: str) -> bool:
    """Whether rules differ from this node's and come from a later release: what follows from them is not for it."""
    return _differ(rules) and _release(rules) > _release(TZDATA_VERSION)


@lru_cache(maxsize=4096)
def is_outdated(rules: str) -> bool:
    """Whether rules differ from this node's and come from an earlier release: what follows from them is out of date."""
    return _differ(rules) and _release(rules) < _release(TZDATA_VERSION)


def _differ(rules: str) -> bool:
    name, digest, _ = rules.split(" ")
    return (rules_of(name) or "").split(" ")[1:2] != [digest]


def _release(rules: str) -> tuple[int, ...]:
    return tuple(map(int, (release_of(rules) or "").split(".")))


def first_valid(tz: ZoneInfo, local: datetime) -> datetime:
    """The instant of a local time: the first of two, or the first after a gap."""
    aware = local.replace(tzinfo=tz)
    instant = aware.astimezone(UTC)
    if instant.astimezone(tz).replace(tzinfo=None) == local:
        return instant
    # In a gap: the clock is moved between the two readings of the time that never was.
    low, high = aware.replace(fold=1).astimezone(UTC), instant
    return to_instant(_move_between(tz, to_seconds(low), to_seconds(high)))


def to_seconds(instant: datetime) -> int:
    """The whole second that holds an instant, counted from 1970."""
    since = instant - _EPOCH
    return since.days * DAY_SECONDS + since.seconds


def to_instant(seconds: int) -> datetime:
    """The instant of a whole second counted from 1970."""
    return _EPOCH + timedelta(seconds=seconds)


class Readings(NamedTuple):
    """Times of day of one date (its ordinal): from `low`, before `high`, in seconds after midnight."""

    day: int
    low: int
    high: int


class Stretch(NamedTuple):
    """Real time [start, end) during which the clock reads `day` (a date's ordinal) and ticks on from `clock`."""

    start: int
    end: int
    day: int
    clock: int
    passage: Passage = "only"
    skipped: tuple[Readings, ...] = ()  # what the gap just before it left out, dates that never were excepted


class Share(NamedTuple):
    """Real time [start, end) of a local day; empty where the zone left the whole day out."""

    start: int
    end: int
    stretches: tuple[Stretch, ...]


@lru_cache(maxsize=65_536)
def share_of_day(tz: ZoneInfo, day: int) -> Share:
    """The share of a local day, given by its ordinal."""
    start, end = _midnight(tz, day), _midnight(tz, day + 1)
    # An overlap in the next share may repeat the end of this one, but reaches back a day at most.
    watched = end + DAY_SECONDS
    if _offset(tz, start - 1) == _offset(tz, end) == _offset(tz, watched):
        return Share(start, end, (Stretch(start, end, day, 0),))
    return Share(start, end, tuple(_stretches(tz, start, end, _moves(tz, start - 1, watched))))


def day_at(tz: ZoneInfo, second: int) -> int:
    """The ordinal of the day whose share holds a second."""
    day = (second + _offset(tz, second)) // DAY_SECONDS + _EPOCH_DAY
    # Where the clock is put back over midnight, a date comes twice; its share is the first stretch up to the next.
    while share_of_day(tz, day).start > second:
        day -= 1
    while share_of_day(tz, day).end <= second:
        day += 1
    return day


def _midnight(tz: ZoneInfo, day: int) -> int:
    midnight = datetime.combine(date.fromordinal(day), datetime.min.time())
    return to_seconds(first_valid(tz, midnight))


def _offset(tz: ZoneInfo, second: int) -> int:
    offset = to_instant(second).astimezone(tz).utcoffset() or timedelta(0)
    return offset.days * DAY_SECONDS + offset.seconds


class _Move(NamedTuple):
    """The clock is moved at `at`: the offset was `before`, and is `after`."""

    at: int
    before: int
    after: int


def _moves(tz: ZoneInfo, low: int, high: int) -> list[_Move]:
    """Every move of the clock in (low, high]."""
    found, before = [], _offset(tz, low)
    for probe in [*range(low + _HOUR_SECONDS, high, _HOUR_SECONDS), high]:
        after = _offset(tz, probe)
        if after != before:
            found.append(_Move(_move_between(tz, probe - _HOUR_SECONDS, probe), before, after))
        before = after
    return found


def _move_between(tz: ZoneInfo, low: int, high: int) -> int:
    """The first second of the offset that holds at `high`, where another holds at `low`."""
    after = _offset(tz, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _offset(tz, middle) == after else (middle, high)
    return high


def _stretches(tz: ZoneInfo, start: int, end: int, moves: list[_Move]) -> list[Stretch]:
    """The share [start, end), cut at moves, at the edges of overlaps, and at midnights."""
    cuts = {start, end}
    for move in moves:
        shift = abs(move.after - move.before)
        cuts.update(c for c in (move.at - shift, move.at, move.at + shift) if start < c < end)
    bounds = sorted(cuts)
    return [
        stretch
        for low, high in pairwise(bounds)
        for stretch in _cut_at_midnight(low, high, _offset(tz, low), _passage(low, moves), _skipped_before(low, moves))
    ]


def _passage(second: int, moves: list[_Move]) -> Passage:
    for at, before, after in moves:
        if after < before and at - (before - after) <= second < at:
            return "first"
        if after < before and at <= second < at + (before - after):
            return "second"
    return "only"


def _skipped_before(second: int, moves: list[_Move]) -> tuple[Readings, ...]:
    for at, before, after in moves:
        if at == second and after > before:
            parts = _by_date(at + before, at + after)
            # A date that never was is not owed; one that lost some of its hours is.
            return tuple(part for part in parts if part.high - part.low < DAY_SECONDS)
    return ()


def _cut_at_midnight(
    low: int, high: int, offset: int, passage: Passage, skipped: tuple[Readings, ...]
) -> list[Stretch]:
    out: list[Stretch] = []
    for part in _by_date(low + offset, high + offset):
        end = low + part.high - part.low
        out.append(Stretch(low, end, part.day, part.low, passage, skipped))
        low, skipped = end, ()
    return out


def _by_date(low: int, high: int) -> list[Readings]:
    """Local seconds [low, high), date by date."""
    out = []
    while low < high:
        number, clock = divmod(low, DAY_SECONDS)
        length = min(high - low, DAY_SECONDS - clock)
        out.append(Readings(number + _EPOCH_DAY, clock, clock + length))
        low += length
    return out
