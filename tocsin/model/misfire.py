"""What becomes of the occurrences a cursor owes: on time, staged; late, as its misfire rule says."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from tocsin.model.job import Schedule
from tocsin.model.timetable import TICK, Once, Timetable

# An occurrence the planner reaches later than this is a misfire (downtime), not a delay.
LATE = timedelta(seconds=60)


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
    late_end = min(now - LATE, horizon_until + TICK)
    if cursor >= late_end:
        stage, following = due_between(table, cursor, horizon_until, most)
        return Planned(stage, [], following)
    on_time = _following(table, max(cursor, late_end - TICK))
    # One that is due and not late is the latest: it stands for those before it.
    superseded = on_time is not None and on_time <= now
    rescued, missed = _share_late(schedule, _Owed(table, cursor), now, late_end, superseded)
    if on_time is None:
        return Planned(rescued, missed, None)
    stage, following = due_between(table, on_time, horizon_until, most)
    return Planned(rescued + stage, missed, following)


def capped(planned: Planned, most: int) -> Planned:
    """The same with `most` staged at most; the cursor stands on the first that is left."""
    stage, missed, _ = planned
    return planned if len(stage) <= most else Planned(stage[:most], missed, stage[most])


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
        found = None if instant <= self.cursor else self.table.next_after(instant - TICK)
        return found or self.cursor

    def missed(self, reason: str, start: datetime, end: datetime) -> list[Missed]:
        """The occurrences in [start, end) as one row, or none."""
        count = self.count_before(end) - self.count_before(start)
        return [Missed(reason, count, self.first_from(start), self.last_before(end))] if count > 0 else []


def _share_late(
    schedule: Schedule | None, owed: _Owed, now: datetime, late_end: datetime, superseded: bool
) -> tuple[list[datetime], list[Missed]]:
    rule = (schedule or Schedule()).misfire
    window_start = min(max(owed.cursor, minus(now, rule.window.delta)), late_end)
    most = {"latest": 0 if superseded else 1, "all": rule.max, "skip": 0}[rule.policy]
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


def minus(instant: datetime, delta: timedelta) -> datetime:
    """So long before an instant, or the beginning of the calendar."""
    try:
        return instant - delta
    except OverflowError:
        return datetime.min.replace(tzinfo=instant.tzinfo)


def missed_until(table: Timetable, cursor: datetime, now: datetime, reason: str) -> list[Missed]:
    """All that is owed from `cursor` to `now`, as one counted row, or none."""
    return _Owed(table, cursor).missed(reason, cursor, now + TICK)


def still_owed(table: Timetable, cursor: datetime | None, held: datetime | None, now: datetime) -> list[Missed]:
    """What a cursor that is taken away, or one that a pause holds, has not been asked for by `now`."""
    dropped = [] if cursor is None or cursor > now else missed_until(table, cursor, now, "cancelled")
    paused = [] if held is None or held > now else missed_until(table, held, now, "skipped_paused")
    return dropped + paused
