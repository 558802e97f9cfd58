"""Which occurrences a past range has: those the schedule's own timetable names, no more and no less."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.errors import InvalidInput
from tocsin.model.backfill import (
    LONGEST,
    SHOWN,
    Plan,
    check_counted,
    check_range,
    counted,
    decode_plan,
    encode_plan,
    plan_of,
    without,
)
from tocsin.model.calendars import Calendar
from tocsin.model.job import Schedule
from tocsin.model.misfire import due_between
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import timetable
from tocsin.model.timetable import TICK

NOW = datetime(2026, 11, 16, 10, 20, 30, 123456, tzinfo=UTC)
DAY = timedelta(days=1)
BERLIN = {"timezone": "Europe/Berlin"}


def plan(calendar: Calendar | None = None, anchor: datetime = NOW, **schedule: Any) -> Plan:
    return plan_of(msgspec.convert(schedule, Schedule, dec_hook=decode_scalar), anchor, "acme/job", calendar)


def all_of(plan: Plan, from_: datetime, to: datetime) -> list[datetime]:
    table = plan.between(from_, to)
    first = table.next_after(from_ - TICK)
    return [] if first is None else due_between(table, first, to, 1_000_000)[0]


def refused(what: Any, *args: Any) -> str:
    with pytest.raises(InvalidInput) as raised:
        what(*args)
    return raised.value.code


def test_a_range_holds_its_beginning_and_not_its_end() -> None:
    midnight = datetime(2026, 3, 1, tzinfo=UTC)
    daily = plan(cron="0 0 * * *")
    assert all_of(daily, midnight, midnight + 2 * DAY) == [midnight, midnight + DAY]
    assert counted(daily, midnight, midnight + 2 * DAY)[::2] == (2, midnight + DAY)
    assert counted(daily, midnight + TICK, midnight + DAY) == (0, [], None)


def test_clocks_that_are_moved_and_calendars_are_the_jobs_own() -> None:
    march = datetime(2026, 3, 27, tzinfo=UTC), datetime(2026, 3, 31, tzinfo=UTC)
    told = [at.isoformat()[5:16] for at in all_of(plan(cron="30 2 * * *", **BERLIN), *march)]
    assert told == ["03-27T01:30", "03-28T01:30", "03-29T01:00", "03-30T00:30"]
    weekends = Calendar(weekdays=("SAT", "SUN"))
    assert [at.day for at in all_of(plan(weekends, cron="30 2 * * *", **BERLIN), *march)] == [27, 30]


@pytest.mark.parametrize(
    "schedule",
    [
        {"every": "PT7M"},
        {"every": "P1D"},
        {"cron": "H 3 * * *", **BERLIN},
        {"rrule": "FREQ=DAILY", **BERLIN},
        {"rrule": "FREQ=MONTHLY", **BERLIN},
        {"rrule": "FREQ=WEEKLY;BYHOUR=2;BYMINUTE=30", **BERLIN},
        {"rrule": "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=3;BYMINUTE=0;BYSECOND=0"},
        {"text": "every weekday at 9am", **BERLIN},
        {"text": "every 90 minutes"},
    ],
)
def test_what_counts_from_the_jobs_making_is_taken_to_have_counted_before(schedule: dict[str, Any]) -> None:
    """The same rule, made long before, names the same instants after the job was made, and some before it."""
    back = plan(**schedule)
    own = timetable(msgspec.convert(schedule, Schedule, dec_hook=decode_scalar), NOW, "acme/job")
    first = own.next_after(NOW)
    assert first is not None
    assert all_of(back, NOW + TICK, NOW + 100 * DAY)[:50] == due_between(own, first, NOW + 100 * DAY, 50)[0]
    assert counted(back, NOW - LONGEST, NOW).total >= 119


def test_a_beginning_that_was_said_is_kept() -> None:
    began = {"starting_at": "2026-11-10T00:00:00Z"}
    for schedule in ({"every": "P1D"}, {"rrule": "FREQ=DAILY"}, {"cron": "0 0 * * *"}):
        assert counted(plan(**schedule, **began), NOW - 30 * DAY, NOW).total == 7
    # Every other day, or ten times: where it would have begun before nobody can say.
    assert counted(plan(rrule="FREQ=DAILY;INTERVAL=2"), NOW - 30 * DAY, NOW).total == 0
    assert counted(plan(rrule="FREQ=DAILY;COUNT=10"), NOW - 30 * DAY, NOW).total == 0


@given(
    st.sampled_from([{"cron": "*/7 2,3 * * *"}, {"every": "PT13M"}, {"rrule": "FREQ=DAILY;BYHOUR=1,2,3"}]),
    st.integers(0, 700),
    st.integers(1, 60 * 24 * 3),
    st.sampled_from([None, "skip", "next_business_day", "only"]),
)
def test_what_is_counted_is_what_is_there(schedule: dict[str, str], day: int, minutes: int, mode: Any) -> None:
    calendar = None if mode is None else Calendar(mode=mode, weekdays=("SAT", "SUN"))
    backfill = plan(calendar, **schedule, **BERLIN)
    from_ = NOW - timedelta(days=day + 5)
    to = from_ + timedelta(minutes=minutes)
    there = all_of(backfill, from_, to)
    assert all(from_ <= at < to for at in there)
    assert counted(backfill, from_, to) == (len(there), there[:SHOWN], there[-1] if there else None)
    assert decode_plan(encode_plan(backfill)) == backfill


@given(st.sampled_from([{"cron": "*/7 2,3 * * *"}, {"every": "PT13M"}]), st.integers(1, 60 * 24 * 2), st.data())
def test_what_is_done_is_left_out(schedule: dict[str, str], minutes: int, data: st.DataObject) -> None:
    whole = plan(**schedule, **BERLIN)
    from_, to = NOW - timedelta(days=5), NOW - timedelta(days=5) + timedelta(minutes=minutes)
    there = all_of(whole, from_, to)
    done = {at for at in there if data.draw(st.booleans())}
    left = [at for at in there if at not in done]
    some, found = without(whole, from_, to, done)
    assert found == (len(left), left[:SHOWN], left[-1] if left else None) == counted(some, from_, to)
    assert all_of(some, from_, to) == left
    assert decode_plan(encode_plan(some)) == some
    table, half = some.between(from_, to), from_ + (to - from_) / 2
    assert table.count(half, to) == sum(half < at for at in left)
    assert table.last_before(half, from_) == max((at for at in left if at < half), default=None)
    assert table.last_before(to, half) == max((at for at in left if at >= half), default=None)


def test_what_is_refused() -> None:
    assert refused(check_range, NOW, NOW, NOW) == "invalid_range"
    assert refused(check_range, NOW - LONGEST - TICK, NOW, NOW) == "invalid_range"
    assert refused(check_range, NOW - DAY, NOW + TICK, NOW) == "in_the_future"
    check_range(NOW - LONGEST, NOW, NOW)
    for schedule in (None, Schedule(manual=True), Schedule(text="tomorrow at 9am")):
        assert refused(plan_of, schedule, NOW, "", None) == "no_schedule"
    assert refused(check_counted, counted(plan(cron="0 0 29 2 *"), NOW - DAY, NOW)) == "nothing_owed"
    assert refused(check_counted, counted(plan(cron="* * * * * *"), NOW - 2 * DAY, NOW)) == "too_many"
    assert refused(without, plan(cron="* * * * * *"), NOW - 2 * DAY, NOW, ()) == "too_many"
    day = datetime(2026, 11, 10, tzinfo=UTC)
    everything = without(plan(cron="0 0 * * *"), day, day + DAY, {day})[1]
    assert refused(check_counted, everything, "missing") == "nothing_owed"
    check_counted(counted(plan(cron="* * * * * *"), NOW - DAY, NOW))
