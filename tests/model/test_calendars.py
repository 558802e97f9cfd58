"""Calendars against brute force: every instant of the wrapped timetable, one by one, on local days."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.steps import at_most
from tocsin.errors import InvalidInput
from tocsin.model import rrule
from tocsin.model.calendars import MOST_IN_A_ROW, MOST_MOVED, WEEKDAYS, Calendar
from tocsin.model.timetable import TICK, Cron, Every, Timetable
from tocsin.model.zones import first_valid, zone

ZONES = ("UTC", "America/New_York", "Europe/Berlin", "Asia/Kathmandu", "Asia/Beirut", "Africa/Cairo")
CRONS = (
    "0 9 * * *",
    "30 2 * * *",
    "15 0,1,2,3,23 * * *",
    "0 12 * * MON",
    "0 0 1 * *",
    "0 */6 * * SAT,SUN",
    "*/10 * * * SAT,TUE",
)


def brute(calendar: Calendar, table: Timetable, zone_name: str, low: datetime, high: datetime) -> list[datetime]:
    """What is owed in [low, high), by looking at every instant from a month before."""
    tz, out = zone(zone_name), set()

    def named(day: date) -> bool:
        return day in calendar.days or WEEKDAYS[day.weekday()] in calendar.weekdays

    every, at = [], table.next_after(low - timedelta(days=40))
    while at is not None and at < high:
        every.append(at)
        at = table.next_after(at)
    per_day = Counter(at.astimezone(tz).date() for at in every)
    for at in every:
        local = at.astimezone(tz)
        day = local.date()
        if calendar.mode == "next_business_day" and named(day):
            if per_day[day] > MOST_MOVED:
                continue
            while named(day):
                day += timedelta(days=1)
            out.add(first_valid(tz, datetime.combine(day, local.time())))
        elif calendar.mode == "next_business_day" or named(day) == (calendar.mode == "only"):
            out.add(at)
    return sorted(at for at in out if low <= at < high)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Calendar, Timetable, str, datetime, datetime]:
    zone_name = draw(st.sampled_from(ZONES))
    # Around moves of the clock, too: spring and autumn of 2026.
    start = draw(st.sampled_from([date(2026, 3, 1), date(2026, 4, 18), date(2026, 10, 15), date(2026, 12, 20)]))
    calendar = Calendar(
        mode=draw(st.sampled_from(["skip", "next_business_day", "only"])),
        days=tuple(start + timedelta(days=d) for d in draw(st.lists(st.integers(-5, 25), max_size=8, unique=True))),
        weekdays=tuple(draw(st.lists(st.sampled_from(WEEKDAYS), max_size=3, unique=True))),
    )
    low = datetime(start.year, start.month, start.day, tzinfo=UTC) + draw(
        st.timedeltas(timedelta(0), timedelta(days=9))
    )
    table: Timetable
    if draw(st.booleans()):
        table = Cron(draw(st.sampled_from(CRONS)), zone_name, "next_valid", draw(st.sampled_from(["first", "both"])))
    else:
        step = draw(st.sampled_from([timedelta(hours=5), timedelta(hours=7, minutes=1, seconds=0.5)]))
        table = Every(low - timedelta(days=50), step)
    return calendar, table, zone_name, low, low + timedelta(days=14)


@given(cases())
@settings(max_examples=150)
def test_next_last_and_count_agree_with_brute_force(
    case: tuple[Calendar, Timetable, str, datetime, datetime],
) -> None:
    calendar, table, zone_name, low, high = case
    expected = brute(calendar, table, zone_name, low, high)
    wrapped = calendar.of(table, zone(zone_name))
    found, at = [], wrapped.next_after(low - TICK)
    while at is not None and at < high:
        found.append(at)
        at = wrapped.next_after(at)
    assert found == expected
    back, at = [], wrapped.last_before(high, low)
    while at is not None:
        back.append(at)
        at = wrapped.last_before(at, low)
    assert back[::-1] == expected
    assert wrapped.count(low - TICK, high) == len(expected)
    for i, at in enumerate(expected):
        assert wrapped.count(low - TICK, at) == i
        assert wrapped.next_after(at - TICK) == at == wrapped.last_before(at + TICK, low)


def daily(zone_name: str = "Europe/Berlin") -> Timetable:
    return Cron("0 9 * * *", zone_name, "next_valid", "first")


def local_days(table: Timetable, first: date, count: int) -> list[int]:
    at: datetime | None = datetime(first.year, first.month, first.day, tzinfo=UTC) - timedelta(hours=12)
    days = []
    for _ in range(count):
        at = table.next_after(at) if at else None
        days.append(at.day if at else 0)
    return days


def test_the_three_modes() -> None:
    given: dict[str, Any] = {"days": (date(2026, 12, 25),), "weekdays": ("SAT", "SUN")}
    tz = zone("Europe/Berlin")
    # 2026-12-24 is a Thursday; 25 a holiday, 26 and 27 the weekend.
    assert local_days(Calendar(**given).of(daily(), tz), date(2026, 12, 24), 3) == [24, 28, 29]
    assert local_days(Calendar(**given, mode="only").of(daily(), tz), date(2026, 12, 24), 4) == [25, 26, 27, 2]
    monthly = Cron("0 9 25 * *", "Europe/Berlin", "next_valid", "first")
    moved = Calendar(**given, mode="next_business_day").of(monthly, tz)
    assert moved.next_after(datetime(2026, 12, 20, tzinfo=UTC)) == datetime(2026, 12, 28, 8, tzinfo=UTC)


def test_what_never_comes_is_found_out() -> None:
    mondays = Cron("0 9 * * MON", "UTC", "next_valid", "first")
    assert Calendar(mode="only", weekdays=("SAT",)).of(mondays, zone("UTC")).next_after(datetime.now(UTC)) is None
    past = Calendar(mode="only", days=(date(2020, 1, 1),)).of(daily("UTC"), zone("UTC"))
    assert past.next_after(datetime(2026, 1, 1, tzinfo=UTC)) is None
    assert past.last_before(datetime(2026, 1, 1, tzinfo=UTC), datetime(2019, 1, 1, tzinfo=UTC)) is not None


def test_a_year_of_minutes_is_counted_by_the_day() -> None:
    minutes = Cron("* * * * *", "UTC", "next_valid", "first")
    weekends = Calendar(weekdays=("SAT", "SUN")).of(minutes, zone("UTC"))
    year = datetime(2026, 1, 1, tzinfo=UTC)
    assert weekends.count(year - TICK, year.replace(year=2027)) == 261 * 24 * 60


def test_tidy() -> None:
    twice = Calendar(days=(date(2026, 5, 2), date(2026, 5, 1), date(2026, 5, 2)), weekdays=("SUN", "MON", "SUN"))
    assert twice.tidy() == Calendar(days=(date(2026, 5, 1), date(2026, 5, 2)), weekdays=("MON", "SUN"))
    for empty in (Calendar(), Calendar(weekdays=WEEKDAYS)):
        with pytest.raises(InvalidInput):
            empty.tidy()


def days_from(first: date, *ahead: int) -> tuple[date, ...]:
    return tuple(first + timedelta(days=n) for n in ahead)


def test_days_in_a_row_that_are_moved_are_bounded() -> None:
    first = date(2026, 6, 1)
    fits = days_from(first, *range(MOST_IN_A_ROW))
    assert Calendar(mode="next_business_day", days=fits).tidy().days == fits
    for calendar in (
        Calendar(mode="next_business_day", days=days_from(first, *range(MOST_IN_A_ROW + 1))),
        Calendar(mode="next_business_day", days=days_from(first, *range(0, 70, 7)), weekdays=WEEKDAYS[1:]),
    ):
        with pytest.raises(InvalidInput, match="must leave a business day"):
            calendar.tidy()
        assert Calendar(mode="skip", days=calendar.days, weekdays=calendar.weekdays).tidy()


START = datetime(2026, 1, 1, tzinfo=UTC)
ALTERNATE = rrule.compile_rule("FREQ=DAILY;INTERVAL=2", START, "UTC", "skip", "first")
MINUTES = Cron("* * * * *", "UTC", "next_valid", "first")
NEVER = {
    "every other day is left out": (Calendar(days=days_from(START.date(), *range(0, 20_000, 2))), ALTERNATE),
    "only the other days are left": (
        Calendar(mode="only", days=days_from(START.date(), *range(1, 20_000, 2))),
        ALTERNATE,
    ),
    "only another weekday": (Calendar(mode="only", weekdays=("SAT",)), Cron("0 9 * * MON", "UTC", "skip", "first")),
    "years are left out": (Calendar(days=days_from(START.date(), *range(10_000))), MINUTES),
}


@pytest.mark.parametrize(("calendar", "table"), NEVER.values(), ids=NEVER)
def test_a_calendar_that_leaves_nothing_is_found_out_in_bounded_steps(calendar: Calendar, table: Timetable) -> None:
    wrapped = calendar.tidy().of(table, zone("UTC"))
    with at_most(250_000):
        found = wrapped.next_after(START)
    assert found is None or found.year > 2050


def test_moved_occurrences_are_collected_in_bounded_steps() -> None:
    days = days_from(START.date(), *range(1, MOST_IN_A_ROW + 1))
    for table in (MINUTES, Cron("*/15 * * * *", "UTC", "next_valid", "first")):
        moved = Calendar(mode="next_business_day", days=days).tidy().of(table, zone("UTC"))
        with at_most(1_000_000):
            assert moved.next_after(START + timedelta(days=1)) == START + timedelta(days=MOST_IN_A_ROW + 1)
            assert moved.count(START, START + timedelta(days=MOST_IN_A_ROW + 2)) > 0
