"""When a job owes an occurrence: each kind of schedule as a `Timetable`, and what becomes of late occurrences."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from tocsin.clock import iso
from tocsin.errors import InvalidInput
from tocsin.model import cron
from tocsin.model.job import Schedule

# An occurrence the planner reaches later than this is a misfire (downtime), not a delay.
LATE = timedelta(seconds=60)
SHORTEST_EVERY = timedelta(seconds=1)
LONGEST_DELAY = timedelta(days=3660)
_TICK = timedelta(microseconds=1)


class Timetable(Protocol):
    """The instants a schedule owes, in UTC."""

    def next_after(self, instant: datetime) -> datetime | None:
        """The first owed instant strictly after `instant`."""

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        """The last owed instant strictly before `instant`, if there is one from `not_before` on."""

    def count(self, after: datetime, before: datetime) -> int:
        """How many instants are owed strictly between the two."""


class Never:
    """Owes nothing: by hand only."""

    def next_after(self, instant: datetime) -> datetime | None:
        return None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        return None

    def count(self, after: datetime, before: datetime) -> int:
        return 0


class Once:
    """Owes one instant."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def next_after(self, instant: datetime) -> datetime | None:
        return self.at if self.at > instant else None

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        return self.at if not_before <= self.at < instant else None

    def count(self, after: datetime, before: datetime) -> int:
        return int(after < self.at < before)


class Every:
    """Owes `first + k × step`, k ≥ 0; arithmetic only."""

    def __init__(self, first: datetime, step: timedelta) -> None:
        self.first = first
        self.step = step

    def next_after(self, instant: datetime) -> datetime | None:
        return self._at(self._index(instant) + 1)

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        index = self._index(instant - _TICK)
        found = self._at(index) if index >= 0 else None
        return found if found is not None and found >= not_before else None

    def count(self, after: datetime, before: datetime) -> int:
        return max(0, self._index(before - _TICK) - self._index(after))

    def _index(self, instant: datetime) -> int:
        """The number of the last occurrence up to and including `instant`; −1 before the first."""
        return max(-1, (instant - self.first) // self.step)

    def _at(self, index: int) -> datetime | None:
        try:
            return self.first + index * self.step
        except OverflowError:
            return None


class Cron:
    """Owes what a cron expression names in its zone, from `starting_at` on."""

    def __init__(self, expression: str, zone: str, starting_at: datetime | None) -> None:
        self._key = (expression, zone, "next_valid", "first")
        self._days = cron.compile_cron(expression, zone)
        self._starting_at = starting_at

    def next_after(self, instant: datetime) -> datetime | None:
        # Occurrences stand on whole seconds, so that the answer depends on the whole second only.
        return cron.next_instant(*self._key, self._from(instant).replace(microsecond=0))

    def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
        return self._days.last_before(instant, max(not_before, self._starting_at or not_before))

    def count(self, after: datetime, before: datetime) -> int:
        return self._days.count(self._from(after), before)

    def _from(self, after: datetime) -> datetime:
        return after if self._starting_at is None else max(after, self._starting_at - _TICK)


def timetable(schedule: Schedule | None, anchor: datetime) -> Timetable:
    """The instants a checked schedule owes; `anchor` is when the job was made."""
    if schedule is None:
        return Once(anchor)
    if schedule.at is not None:
        return Once(schedule.at.at)
    if schedule.delay is not None:
        return Once(anchor + schedule.delay.delta)
    starting_at = schedule.starting_at.at if schedule.starting_at else None
    if schedule.every is not None:
        step = schedule.every.delta
        if step < SHORTEST_EVERY:
            raise InvalidInput.field("schedule.every", "invalid", "must be at least 1 second")
        return Every(starting_at or anchor + step, step)
    if schedule.cron is not None:
        return Cron(schedule.cron, schedule.timezone, starting_at)
    return Never()


def first_fire(schedule: Schedule | None, now: datetime, anchor: datetime | None = None) -> datetime | None:
    """When a job made at `now` is first due: never before `now`, so that an `at` a little in the past runs at once."""
    table = timetable(schedule, anchor or now)
    if isinstance(table, Once):
        return max(table.at, now)
    if isinstance(table, Every):
        return table.first if table.first >= now else table.next_after(now)
    return table.next_after(now)


def due_between(
    table: Timetable, cursor: datetime, until: datetime, most: int
) -> tuple[list[datetime], datetime | None]:
    """The owed instants from the cursor (itself owed) up to and including `until`, `most` at most; the next cursor."""
    due: list[datetime] = []
    following: datetime | None = cursor
    while following is not None and following <= until and len(due) < most:
        due.append(following)
        following = _following(table, following)
    return due, following


def _following(table: Timetable, cursor: datetime) -> datetime | None:
    # The cursor of a one-time job is its only occurrence, even where it was set by another clock's `now`.
    return None if isinstance(table, Once) else table.next_after(cursor)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


def check_schedule(schedule: Schedule, now: datetime) -> None:
    """Refuse a schedule that decodes and has exactly one kind, but names no instants, or none that are left."""
    try:
        cron.zone(schedule.timezone)
    except ValueError:
        message = f"{schedule.timezone!r} is not a time zone of the tz database, such as Europe/Berlin or UTC"
        raise InvalidInput.field("schedule.timezone", "unknown_timezone", message) from None
    if schedule.starting_at is not None and schedule.kind not in ("cron", "every"):
        raise InvalidInput.field("schedule.starting_at", "invalid", "goes with cron or every only")
    if schedule.at is not None and schedule.at.at < _minus(now, schedule.misfire.window.delta):
        message = f"{schedule.at} is longer ago than misfire.window ({schedule.misfire.window})"
        raise InvalidInput.field("schedule.at", "in_the_past", message)
    if schedule.delay is not None and schedule.delay.delta > LONGEST_DELAY:
        raise InvalidInput.field("schedule.delay", "invalid", "must be at most 10 years")
    if schedule.every is not None and schedule.every.delta < SHORTEST_EVERY:
        raise InvalidInput.field("schedule.every", "invalid", "must be at least 1 second")
    if schedule.cron is not None:
        _check_cron(schedule.cron, schedule.timezone)


def _check_cron(expression: str, zone: str) -> None:
    try:
        cron.compile_cron(expression, zone)
    except cron.NeverFires as e:
        raise InvalidInput.field("schedule.cron", "never_fires", str(e)) from None
    except cron.BadCron as e:
        raise InvalidInput.field("schedule.cron", "invalid_cron", str(e)) from None


def describe(schedule: Schedule | None) -> str:
    """The schedule in plain words."""
    if schedule is None:
        return "once, now"
    if schedule.at is not None:
        return f"once at {iso(schedule.at.at)}"
    if schedule.delay is not None:
        return f"once, {_in_words(schedule.delay.delta)} from now"
    start = f", starting at {schedule.starting_at}" if schedule.starting_at else ""
    if schedule.every is not None:
        return f"every {_in_words(schedule.every.delta, each=True)}{start}"
    if schedule.cron is not None:
        words = cron.explain(schedule.cron)
        return f"{words[0].lower()}{words[1:]} ({schedule.timezone}){start}"
    return "by hand only"


def _in_words(delta: timedelta, each: bool = False) -> str:
    """`5 minutes`; with `each`, one unit alone is just its name: `hour`."""
    seconds = delta.seconds % 60 + delta.microseconds / 1_000_000
    parts = [
        (delta.days, "day"),
        (delta.seconds // 3600, "hour"),
        (delta.seconds // 60 % 60, "minute"),
        (int(seconds) if seconds == int(seconds) else seconds, "second"),
    ]
    words = [(n, f"{n} {unit}{'' if n == 1 else 's'}") for n, unit in parts if n]
    if each and len(words) == 1 and words[0][0] == 1:
        return words[0][1].removeprefix("1 ")
    return (
        " and ".join([", ".join(w for _, w in words[:-1])] * (len(words) > 1) + [words[-1][1]])
        if words
        else "0 seconds"
    )


# ── late occurrences ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Missed:
    """Occurrences that are not run, as one counted row."""

    reason: str
    count: int
    first: datetime
    last: datetime


class Planned(NamedTuple):
    """What to do with the occurrences a cursor owes, and where it stands afterwards."""

    stage: list[datetime]
    missed: list[Missed]
    cursor: datetime | None


def misfire(
    schedule: Schedule | None,
    table: Timetable,
    cursor: datetime,
    now: datetime,
    horizon_until: datetime,
    most: int = 1000,
) -> Planned:
    """Share out what is owed from `cursor` to `horizon_until`: each occurrence is staged or counted as missed, once.

    Those more than a minute late go through the schedule's misfire rule. The work does not grow with how many were
    missed (cron: one step a day). At most `most` that are on time are staged; the cursor then stands on the next.
    """
    late_end = min(now - LATE, horizon_until + _TICK)
    if cursor >= late_end:
        stage, following = due_between(table, cursor, horizon_until, most)
        return Planned(stage, [], following)
    rescued, missed = _share_late(schedule, _Owed(table, cursor), now, late_end)
    on_time = _following(table, max(cursor, late_end - _TICK))
    if on_time is None:
        return Planned(rescued, missed, None)
    stage, following = due_between(table, on_time, horizon_until, most)
    return Planned(rescued + stage, missed, following)


class _Owed:
    """What is owed from a cursor on. The cursor itself is owed even if the timetable has moved from under it."""

    def __init__(self, table: Timetable, cursor: datetime) -> None:
        self.table = table
        self.cursor = cursor

    def count_before(self, instant: datetime) -> int:
        if isinstance(self.table, Once):
            return int(instant > self.cursor)
        return 1 + self.table.count(self.cursor, instant) if instant > self.cursor else 0

    def last_before(self, instant: datetime) -> datetime:
        found = None if isinstance(self.table, Once) else self.table.last_before(instant, self.cursor)
        return found or self.cursor

    def first_from(self, instant: datetime) -> datetime:
        found = None if instant <= self.cursor else self.table.next_after(instant - _TICK)
        return found or self.cursor

    def missed(self, reason: str, start: datetime, end: datetime) -> list[Missed]:
        """The occurrences in [start, end) as one row, or none."""
        count = self.count_before(end) - self.count_before(start)
        return [Missed(reason, count, self.first_from(start), self.last_before(end))] if count > 0 else []


def _share_late(
    schedule: Schedule | None, owed: _Owed, now: datetime, late_end: datetime
) -> tuple[list[datetime], list[Missed]]:
    rule = (schedule or Schedule()).misfire
    window_start = min(max(owed.cursor, _minus(now, rule.window.delta)), late_end)
    most = {"latest": 1, "all": rule.max, "skip": 0}[rule.policy]
    rescued: list[datetime] = []
    rescued_from = late_end
    while len(rescued) < most and rescued_from > window_start:
        latest = owed.last_before(rescued_from)
        if latest < window_start:
            break
        rescued.append(latest)
        rescued_from = latest
    rescued.reverse()
    if rule.policy != "latest":
        return rescued, owed.missed("misfire_expired", owed.cursor, rescued_from)
    expired = owed.missed("misfire_expired", owed.cursor, window_start)
    return rescued, expired + owed.missed("coalesced", window_start, rescued_from)


def _minus(instant: datetime, delta: timedelta) -> datetime:
    try:
        return instant - delta
    except OverflowError:
        return datetime.min.replace(tzinfo=instant.tzinfo)


def missed_until(table: Timetable, cursor: datetime, now: datetime, reason: str) -> list[Missed]:
    """All that is owed from `cursor` to `now`, as one counted row, or none."""
    return _Owed(table, cursor).missed(reason, cursor, now + _TICK)
