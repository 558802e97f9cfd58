"""Decide about the occurrences that a cursor owes.

An occurrence that fell due during an outage (no planner ran, or no node could plan its schedule) is a misfire, and the
misfire rule of its schedule applies. Every other occurrence is staged, however late the planner reaches it. The
decision about an outage depends only on the outage, the schedule and the cursor, never on the time of the decision: a
planner that catches up in any number of turns writes the same rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from tocsin.model.job import Misfire, Schedule
from tocsin.model.timetable import TICK, Once, Timetable

# A shorter time without a planner, or without a worker, is a delay and not an outage.
SHORTEST_OUTAGE = timedelta(seconds=60)


class Outage(NamedTuple):
    """A span of time in which a schedule was not planned; its start is included, its end is excluded."""

    start: datetime
    end: datetime


def merge_outages(outages: Iterable[Outage]) -> list[Outage]:
    """Return the same time as outages that are in order and do not touch."""
    merged: list[Outage] = []
    for outage in sorted(outages):
        if merged and outage.start <= merged[-1].end:
            merged[-1] = Outage(merged[-1].start, max(merged[-1].end, outage.end))
        else:
            merged.append(outage)
    return merged


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
    """Occurrences to stage, occurrences to count as missed, and the cursor after that.

    `kept_until` is set if the cursor still owes occurrences that could be staged now: those before `kept_until` were
    judged and must run.
    """

    stage: list[datetime]
    missed: list[Missed]
    cursor: datetime | None
    kept_until: datetime | None = None


def plan_occurrences(
    schedule: Schedule | None,
    table: Timetable,
    cursor: datetime,
    until: datetime,
    outages: Sequence[Outage] = (),
    most: int = 1000,
    kept_until: datetime | None = None,
) -> Planned:
    """Stage or count each occurrence from `cursor` up to and including `until`, once. Stage at most `most` of them.

    `outages` are in order and do not touch. The work grows with the number of staged occurrences, not with the number
    of missed ones (cron: one step a day).
    """
    rule = (schedule or Schedule()).misfire
    stage: list[datetime] = []
    missed: list[Missed] = []
    at: datetime | None = cursor
    while at is not None and at <= until and len(stage) < most:
        kept = kept_until is not None and at < kept_until
        place = bisect_right(outages, at, key=lambda o: o.end)
        outage = outages[place] if place < len(outages) else None
        if outage is not None and outage.start <= at and not kept:
            at, rows = _judge(rule, _Owed(table, at), outage.end)
            missed += rows
            kept_until = outage.end
        else:
            end = kept_until if kept else outage and outage.start
            due, at = due_between(table, at, until if end is None else min(until, end - TICK), most - len(stage))
            stage += due
    if at is None or at > until:
        return Planned(stage, missed, at)
    return Planned(stage, missed, at, at if kept_until is None else max(at, kept_until))


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

    def count_between(self, start: datetime, end: datetime) -> int:
        """Return how many occurrences are owed from `start`, which is after the cursor, to before `end`."""
        return self.table.count(start - TICK, end)

    def next_from(self, instant: datetime) -> datetime | None:
        """Return the first occurrence that is owed at or after an instant."""
        if instant <= self.cursor:
            return self.cursor
        return None if isinstance(self.table, Once) else self.table.next_after(instant - TICK)

    def missed(self, reason: str, start: datetime, end: datetime) -> list[Missed]:
        """The occurrences in [start, end) as one row, or none."""
        count = self.count_before(end) - self.count_before(start)
        return [Missed(reason, count, self.first_from(start), self.last_before(end))] if count > 0 else []


def _judge(rule: Misfire, owed: _Owed, end: datetime) -> tuple[datetime | None, list[Missed]]:
    """Apply the misfire rule to the occurrences before the end of an outage. Return the next position of the cursor and
    the missed occurrences. The window is measured from the end of the outage, so the duration of catching up does not
    matter."""
    window_start = min(max(owed.cursor, minus(end, rule.window.delta)), end)
    kept_from = _kept_from(rule, owed, window_start, end)
    if rule.policy == "latest":
        missed = owed.missed("misfire_expired", owed.cursor, window_start)
        missed += owed.missed("coalesced", window_start, kept_from)
    else:
        missed = owed.missed("misfire_expired", owed.cursor, kept_from)
    return owed.next_from(kept_from), missed


def _kept_from(rule: Misfire, owed: _Owed, start: datetime, end: datetime) -> datetime:
    """Return the instant from which occurrences before `end` are kept, or `end` if none is kept."""
    if rule.policy == "skip":
        return end
    if rule.policy == "latest":
        latest = owed.last_before(end)
        return latest if latest >= start else end
    if owed.count_before(end) - owed.count_before(start) <= rule.max:
        return start
    # There are more. Look back in steps that double until they hold more than enough, then bisect.
    step = timedelta(seconds=1)
    low, high = max(end - step, start), end
    while low > start and owed.count_between(low, end) <= rule.max:
        step *= 2
        low, high = max(minus(end, step), start), low
    while high - low > TICK:
        middle = low + (high - low) / 2
        low, high = (middle, high) if owed.count_between(middle, end) > rule.max else (low, middle)
    return high


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
