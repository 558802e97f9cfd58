"""What a schedule will do, before anybody has it: its words, its next instants, and what may surprise."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple, Protocol, runtime_checkable
from zoneinfo import ZoneInfo

from tocsin.model.calendars import Calendar
from tocsin.model.job import JobSpec, Schedule, check
from tocsin.model.scalars import LATEST
from tocsin.model.schedule import check_calendar, check_schedule, describe, hashes, seed_of, spread, timetable
from tocsin.model.targets import ProcessTarget
from tocsin.model.timetable import Once, Timetable, Within
from tocsin.model.words import clock, length
from tocsin.model.zones import DAY_SECONDS, Share, day_at, share_of_day, to_instant, to_seconds, zone

# How far ahead moves of the clock are looked for.
_WATCHED_DAYS = 731
# What comes so often in a day loses and gains some with the hours that the day has: nobody is surprised.
_OFTEN = 24
_SECOND = timedelta(seconds=1)


class Preview(NamedTuple):
    """A schedule in words, its next instants, and what may surprise whoever wrote it."""

    description: str
    runs: list[datetime]
    warnings: list[str]


@runtime_checkable
class _ByTheClock(Protocol):
    """A timetable that names times of dates."""

    def named_on(self, day: int, low: int = 0, high: int = DAY_SECONDS) -> int:
        """How many times of a date are named, whatever the clock does on it."""


def preview(
    schedule: Schedule, after: datetime, count: int, tenant: str, name: str | None, calendar: Calendar | None = None
) -> Preview:
    """What a job made at `after` would do; raises what would be refused."""
    check(JobSpec(target=ProcessTarget(command=["true"]), schedule=schedule))
    seed = seed_of(tenant, name, "")
    check_schedule(schedule, after, seed)
    if calendar is not None:
        check_calendar(schedule, calendar, after, seed)
    table = timetable(schedule, after, seed, calendar)
    most = min(count, schedule.max_runs or count)
    runs = [max(table.at, after)] if isinstance(table, Once) else list(_next(table, after, most))
    warnings = [*_about_spacing(schedule, runs, seed, name), *_about_moves(table, after, schedule.timezone)]
    return Preview(describe(schedule, seed), runs, warnings)


def _next(table: Timetable, after: datetime, count: int) -> Iterator[datetime]:
    at = table.next_after(after)
    for _ in range(count):
        if at is None or at > LATEST:
            return
        yield at
        at = table.next_after(at)


def _about_spacing(schedule: Schedule, runs: list[datetime], seed: str, name: str | None) -> Iterator[str]:
    if len(runs) > 1 and runs[1] - runs[0] <= _SECOND:
        yield "fires every second"
    if name is None and (hashes(schedule) or schedule.jitter is not None):
        yield "H and jitter follow from the job's name: give its name to see its own instants"
    elif schedule.jitter is not None:
        yield f"each run begins {length(spread(schedule, seed))} after these instants (jitter)"


def _about_moves(table: Timetable, after: datetime, zone_name: str) -> Iterator[str]:
    """Dates of the next two years on which the clock is moved over times that the schedule names."""
    named = table
    while isinstance(named, Within):
        named = named.table
    if not isinstance(named, _ByTheClock) or after > LATEST:
        return
    shares = dict(_moved_days(zone(zone_name), after))
    carried: set[int] = set()
    for share in shares.values():
        for days, where in _carried(named, table, share):
            carried |= days
            yield f"moved to {where} (the clock is put forward)"
    for day, share in shares.items():
        start, end = to_instant(share.start) - _SECOND, to_instant(share.end)
        begun_and_not_over = table.next_after(start) is not None and table.last_before(end, after) is not None
        if begun_and_not_over and day not in carried:
            yield from _changed(day, named.named_on(day), table.count(start, end))


def _moved_days(tz: ZoneInfo, after: datetime) -> Iterator[tuple[int, Share]]:
    """The next days on which the clock is moved."""
    today = day_at(tz, to_seconds(after))
    for day in range(today + 1, today + _WATCHED_DAYS):
        share = share_of_day(tz, day)
        if share.end - share.start != DAY_SECONDS or len(share.stretches) > 1 or share.stretches[0].skipped:
            yield day, share


def _carried(named: _ByTheClock, table: Timetable, share: Share) -> Iterator[tuple[set[int], str]]:
    """Times of a date that are left out and owed where the clock goes on: from which dates, and where."""
    for stretch in share.stretches:
        at = to_instant(stretch.start)
        for lost in stretch.skipped:
            if named.named_on(lost.day) >= _OFTEN or not named.named_on(lost.day, lost.low, lost.high):
                continue
            if table.count(at - _SECOND, at + _SECOND):
                yield {lost.day, stretch.day}, f"{clock(stretch.clock)} on {date.fromordinal(stretch.day)}"


def _changed(day: int, named: int, owed: int) -> Iterator[str]:
    on = date.fromordinal(day).isoformat()
    if named == owed or named >= _OFTEN:
        return
    if not owed:
        yield f"skipped on {on} (the clock is put forward)"
    elif (named, owed) == (1, 2):
        yield f"fires twice on {on} (the clock is put back)"
    else:
        yield f"fires {owed} times instead of {named} on {on} (the clock is moved)"


def minute_of(instant: datetime) -> datetime:
    """The minute that an instant lies in."""
    return instant.astimezone(UTC).replace(second=0, microsecond=0)
