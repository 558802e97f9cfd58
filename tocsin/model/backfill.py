"""A past range of a schedule, run again or for the first time: which occurrences there are in it, and how many there
may be.

What a backfill goes by (`Plan`) is frozen when it is asked for: an edit of the job, its calendar or its name changes
nothing of which occurrences a backfill owes, only what its runs do.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime, timedelta
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from tocsin.errors import InvalidInput
from tocsin.model import rrule
from tocsin.model.calendars import Calendar
from tocsin.model.job import ONCE_KINDS, Schedule
from tocsin.model.misfire import due_between
from tocsin.model.scalars import decode_scalar, encode_scalar
from tocsin.model.schedule import timetable, understood
from tocsin.model.timetable import TICK, Among, Stretch, Timetable, Within
from tocsin.model.zones import zone

MOST = 100_000  # occurrences of one backfill
LONGEST = timedelta(days=3_660)  # of a range: what is counted day by day is to end
SHOWN = 5
MOST_AT_ONCE = 100
# One at a time, because most jobs are not written to run beside themselves; behind all that is due within the next
# seconds, because nobody waits for the past.
DEFAULT_CONCURRENCY, DEFAULT_PRIORITY = 1, 100
State = Literal["running", "paused", "completed", "cancelled"]
OPEN_STATES = ("running", "paused")
# Which occurrences of the range: all, those that never ran, or those that never succeeded.
Rerun = Literal["all", "missing", "failed"]
Concurrency = Annotated[int, Meta(ge=1, le=MOST_AT_ONCE)]
# In so many years the days of the week and of the month come round together.
_ROUND = 28


class Plan(Struct, frozen=True, kw_only=True):
    """From what the occurrences of a backfill follow; `seed` and `anchor` as in `model.schedule`. `only`: just those in
    these stretches."""

    schedule: Schedule
    anchor: datetime
    seed: str
    calendar: Calendar | None = None
    only: list[Stretch] | None = None

    def between(self, from_: datetime, to: datetime) -> Timetable:
        """What is owed from one instant on and before the other."""
        table = Within(timetable(self.schedule, self.anchor, self.seed, self.calendar), from_, to - TICK)
        return table if self.only is None else Among(table, self.only)


class Counted(NamedTuple):
    """How many occurrences there are, the first ones, and the last."""

    total: int
    first: list[datetime]
    last: datetime | None


def plan_of(schedule: Schedule | None, anchor: datetime, seed: str, calendar: Calendar | None) -> Plan:
    """What to go by for a job's schedule; raises if it never recurs. A schedule that only counts from when the job
    was made is taken to have counted before."""
    meant = understood(schedule, anchor) if schedule is not None and schedule.text is not None else schedule
    if meant is None or meant.kind == "manual" or meant.kind in ONCE_KINDS:
        message = "the job has no schedule that recurs: say in `schedule` by which one to fill the range"
        raise InvalidInput.field("schedule", "no_schedule", message)
    return Plan(schedule=meant, anchor=_looking_back(meant, anchor), seed=seed, calendar=calendar)


def _looking_back(schedule: Schedule, anchor: datetime) -> datetime:
    """An anchor that lies before any range, from which the same instants follow; the same if there is none."""
    if schedule.starting_at is not None:
        return anchor
    if schedule.every is not None:
        step = schedule.every.delta
        return anchor - (2 * LONGEST // step + 1) * step
    if schedule.rrule is None:
        return anchor
    rule, tz = rrule.parse(schedule.rrule), zone(schedule.timezone)
    if rule.count is not None or rule.interval != 1 or rule.by_real_time:
        return anchor
    local = anchor.astimezone(tz)
    before = local.replace(year=local.year - _ROUND)
    again = before.astimezone(anchor.tzinfo).astimezone(tz)
    return before.astimezone(anchor.tzinfo) if again.replace(tzinfo=None) == before.replace(tzinfo=None) else anchor


def check_range(from_: datetime, to: datetime, now: datetime) -> None:
    """Refuse a range that is none, is too long, or is not past yet."""
    if from_ >= to:
        raise InvalidInput.field("to", "invalid_range", "lies after from")
    if to - from_ > LONGEST:
        raise InvalidInput.field("from", "invalid_range", f"lies at most {LONGEST.days} days before to")
    if to > now:
        message = "lies in the future: what is still to come, the schedule itself brings"
        raise InvalidInput.field("to", "in_the_future", message)


def counted(plan: Plan, from_: datetime, to: datetime) -> Counted:
    """What there is in a range. The work grows with its days."""
    table = plan.between(from_, to)
    following = table.next_after(from_ - TICK)
    if following is None:
        return Counted(0, [], None)
    first, _ = due_between(table, following, to, SHOWN)
    return Counted(table.count(from_ - TICK, to), first, table.last_before(to, from_))


def without(plan: Plan, from_: datetime, to: datetime, done: Container[datetime]) -> tuple[Plan, Counted]:
    """A plan for those occurrences of a range that are not done, and what there is of them. Each is looked at: raises
    if there are too many in all."""
    table = plan.between(from_, to)
    _refuse_too_many(table.count(from_ - TICK, to))
    left: list[datetime] = []
    only: list[Stretch] = []
    after_one = False  # of those that are left
    at = table.next_after(from_ - TICK)
    while at is not None:
        if at not in done:
            left.append(at)
            if after_one:
                only[-1] = (only[-1][0], at)
            else:
                only.append((at, at))
        after_one = at not in done
        at = table.next_after(at)
    return msgspec.structs.replace(plan, only=only), Counted(len(left), left[:SHOWN], left[-1] if left else None)


def check_counted(found: Counted, rerun: Rerun = "all") -> None:
    """Refuse a backfill of nothing, or of too much."""
    if not found.total and rerun != "all":
        what = "ran, or is about to" if rerun == "missing" else "succeeded, or is under way"
        raise InvalidInput.field("rerun", "nothing_owed", f"leaves nothing: each occurrence of the range {what}")
    if not found.total:
        message = "has no occurrence; one that counts from a beginning owes nothing before it (`starting_at`)"
        raise InvalidInput.field("from", "nothing_owed", message)
    _refuse_too_many(found.total)


def _refuse_too_many(total: int) -> None:
    if total > MOST:
        raise InvalidInput.field("from", "too_many", f"has {total:,} occurrences; {MOST:,} at most, so ask for less")


def encode_plan(plan: Plan) -> str:
    """As it is kept."""
    return msgspec.json.encode(plan, enc_hook=encode_scalar).decode()


_decode = msgspec.json.Decoder(Plan, dec_hook=decode_scalar).decode


def decode_plan(text: str) -> Plan:
    """What `encode_plan` has written."""
    return _decode(text)
