"""Recurrence rules against an oracle that knows nothing but the RFC's table, one date at a time."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import groupby, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import PATIENCE
from tocsin.model import rrule
from tocsin.model.rrule import BadRule, compile_rule, parse
from tocsin.model.timetable import Within

START = datetime(1997, 9, 2, 13, 0, tzinfo=UTC)  # 9:00 in New York: the RFC's own examples begin here
NEW_YORK = "America/New_York"
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)


def table(
    text: str, first: datetime = START, zone: str = "UTC", gap: str = "next_valid", overlap: str = "first"
) -> Within:
    owed = compile_rule(text, first, zone, gap, overlap)
    return Within(owed, owed.first, owed.last)


def listed(text: str, most: int, zone: str = "UTC", first: datetime = START, **dst: str) -> list[str]:
    """The first instants, on the clock of the zone."""
    rule, out, at = table(text, first, zone, **dst), [], first - SECOND
    while len(out) < most and (found := rule.next_after(at)) is not None:
        out.append(found.astimezone(rrule.zone(zone)).strftime("%Y-%m-%d %H:%M"))
        at = found
    return out


def dates(text: str, most: int) -> list[str]:
    return [moment.removesuffix(" 09:00") for moment in listed(text, most, NEW_YORK)]


# ── examples of RFC 5545, 3.8.5.3 ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FREQ=DAILY;COUNT=3", ["1997-09-02", "1997-09-03", "1997-09-04"]),
        ("FREQ=DAILY;INTERVAL=10;COUNT=5", ["1997-09-02", "1997-09-12", "1997-09-22", "1997-10-02", "1997-10-12"]),
        ("FREQ=WEEKLY;INTERVAL=2;WKST=SU", ["1997-09-02", "1997-09-16", "1997-09-30", "1997-10-14"]),
        ("FREQ=WEEKLY;COUNT=4;WKST=SU;BYDAY=TU,TH", ["1997-09-02", "1997-09-04", "1997-09-09", "1997-09-11"]),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=1FR", ["1997-09-05", "1997-10-03", "1997-11-07"]),
        ("FREQ=MONTHLY;INTERVAL=2;COUNT=4;BYDAY=1SU,-1SU", ["1997-09-07", "1997-09-28", "1997-11-02", "1997-11-30"]),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=-2MO", ["1997-09-22", "1997-10-20", "1997-11-17"]),
        ("FREQ=MONTHLY;BYMONTHDAY=-3", ["1997-09-28", "1997-10-29", "1997-11-28", "1997-12-29"]),
        ("FREQ=MONTHLY;COUNT=4;BYMONTHDAY=1,-1", ["1997-09-30", "1997-10-01", "1997-10-31", "1997-11-01"]),
        ("FREQ=MONTHLY;INTERVAL=18;COUNT=3;BYMONTHDAY=10,11,12", ["1997-09-10", "1997-09-11", "1997-09-12"]),
        ("FREQ=YEARLY;COUNT=3;BYMONTH=6,7", ["1998-06-02", "1998-07-02", "1999-06-02"]),
        (
            "FREQ=YEARLY;INTERVAL=3;COUNT=4;BYYEARDAY=1,100,200",
            ["2000-01-01", "2000-04-09", "2000-07-18", "2003-01-01"],
        ),
        ("FREQ=YEARLY;BYDAY=20MO", ["1998-05-18", "1999-05-17", "2000-05-15"]),
        ("FREQ=YEARLY;BYWEEKNO=20;BYDAY=MO", ["1998-05-11", "1999-05-17", "2000-05-15"]),
        ("FREQ=YEARLY;BYMONTH=3;BYDAY=TH", ["1998-03-05", "1998-03-12", "1998-03-19"]),
        ("FREQ=MONTHLY;BYDAY=FR;BYMONTHDAY=13", ["1998-02-13", "1998-03-13", "1998-11-13", "1999-08-13"]),
        ("FREQ=MONTHLY;BYDAY=SA;BYMONTHDAY=7,8,9,10,11,12,13", ["1997-09-13", "1997-10-11", "1997-11-08"]),
        (
            "FREQ=YEARLY;INTERVAL=4;BYMONTH=11;BYDAY=TU;BYMONTHDAY=2,3,4,5,6,7,8",
            ["1997-11-04", "2001-11-06", "2005-11-08"],
        ),
        ("FREQ=MONTHLY;COUNT=3;BYDAY=TU,WE,TH;BYSETPOS=3", ["1997-09-04", "1997-10-07", "1997-11-06"]),
        ("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-2", ["1997-09-29", "1997-10-30", "1997-11-27", "1997-12-30"]),
        ("FREQ=DAILY;UNTIL=19970904", ["1997-09-02", "1997-09-03", "1997-09-04"]),
        ("FREQ=DAILY;UNTIL=19970903T130000Z", ["1997-09-02", "1997-09-03"]),
        ("FREQ=DAILY;UNTIL=19970903T085959", ["1997-09-02"]),
    ],
)
def test_examples_of_the_rfc(text: str, expected: list[str]) -> None:
    over = "COUNT" in text or "UNTIL" in text
    assert dates(text, len(expected) + over) == expected


def test_examples_of_the_rfc_within_a_day() -> None:
    def times(text: str, most: int = 99) -> list[str]:
        return [t.removeprefix("1997-09-02 ") for t in listed(text, most, NEW_YORK)]

    assert times("FREQ=HOURLY;INTERVAL=3;UNTIL=19970902T210000Z") == ["09:00", "12:00", "15:00"]
    assert times("FREQ=MINUTELY;INTERVAL=15;COUNT=6") == ["09:00", "09:15", "09:30", "09:45", "10:00", "10:15"]
    assert times("FREQ=MINUTELY;INTERVAL=90;COUNT=4") == ["09:00", "10:30", "12:00", "13:30"]
    by_day = "FREQ=DAILY;BYHOUR=9,10,11,12,13,14,15,16;BYMINUTE=0,20,40"
    by_minute = "FREQ=MINUTELY;INTERVAL=20;BYHOUR=9,10,11,12,13,14,15,16"
    assert listed(by_day, 60, NEW_YORK) == listed(by_minute, 60, NEW_YORK)


def test_the_start_of_the_week_decides_which_weeks_count() -> None:
    first = datetime(1997, 8, 5, 9, tzinfo=UTC)
    monday = listed("FREQ=WEEKLY;INTERVAL=2;COUNT=4;BYDAY=TU,SU;WKST=MO", 9, first=first)
    sunday = listed("FREQ=WEEKLY;INTERVAL=2;COUNT=4;BYDAY=TU,SU;WKST=SU", 9, first=first)
    assert [t[5:10] for t in monday] == ["08-05", "08-10", "08-19", "08-24"]
    assert [t[5:10] for t in sunday] == ["08-05", "08-17", "08-19", "08-31"]


# ── daylight saving ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rules", "spring", "autumn"),
    [
        ({}, ["03:00-0400"], ["01:30-0400"]),
        ({"gap": "skip", "overlap": "second"}, [], ["01:30-0500"]),
        ({"gap": "skip", "overlap": "both"}, [], ["01:30-0400", "01:30-0500"]),
    ],
)
def test_times_that_are_left_out_or_come_twice(rules: dict[str, str], spring: list[str], autumn: list[str]) -> None:
    def on(day: date, text: str) -> list[str]:
        tz = rrule.zone(NEW_YORK)
        rule = table(text, START, NEW_YORK, **rules)
        start = datetime(day.year, day.month, day.day, tzinfo=tz).astimezone(UTC)
        out, at = [], start - SECOND
        while (found := rule.next_after(at)) is not None and found.astimezone(tz).date() == day:
            out.append(found.astimezone(tz).strftime("%H:%M%z"))
            at = found
        return out

    assert on(date(2026, 3, 8), "FREQ=DAILY;BYHOUR=2;BYMINUTE=0,30") == spring
    assert on(date(2026, 11, 1), "FREQ=DAILY;BYHOUR=1;BYMINUTE=30") == autumn
    hours = on(date(2026, 11, 1), "FREQ=HOURLY;BYMINUTE=0")
    assert len(hours) == 25 and len(on(date(2026, 3, 8), "FREQ=HOURLY;BYMINUTE=0")) == 23


def test_a_gap_before_midnight_carries_into_the_next_day() -> None:
    # Nuuk, 28 March 2026: 23:00 becomes midnight.
    for text in ("FREQ=DAILY;BYHOUR=23;BYMINUTE=30", "FREQ=YEARLY;BYMONTH=3;BYMONTHDAY=28;BYHOUR=23;BYMINUTE=30"):
        rule = table(text, datetime(2026, 1, 1, tzinfo=UTC), "America/Nuuk")
        at = datetime(2026, 3, 29, 1, tzinfo=UTC)
        assert rule.next_after(at - timedelta(hours=20)) == at
        assert rule.last_before(at + SECOND, at - DAY) == at
        assert rule.count(at - SECOND, at + SECOND) == 1


def test_a_day_that_a_zone_left_out_owes_nothing() -> None:
    first = datetime(2011, 12, 28, 12, tzinfo=UTC)
    assert listed("FREQ=DAILY;BYHOUR=12;BYMINUTE=0", 3, "Pacific/Apia", first) == [
        "2011-12-28 12:00",
        "2011-12-29 12:00",
        "2011-12-31 12:00",
    ]


# ── against an oracle ────────────────────────────────────────────────────────────────────────────────────────────


def of(values: tuple[int, ...], place: int, length: int) -> bool:
    return place in values or place - length - 1 in values


def iso_week(day: date, wkst: int) -> tuple[int, int]:
    """By shifting the week to begin on Monday, as Python counts it: Thursday of a week is in the week's year."""
    middle = day + timedelta(days=3 - (day.weekday() - wkst) % 7)
    first = date(middle.year, 1, 1)
    number = (middle - first).days // 7 + 1
    last = date(middle.year, 12, 31)
    middles = [first + timedelta(days=i) for i in range(7)]
    start = next(d for d in middles if (d.weekday() - wkst) % 7 == 3)
    return number, ((last - start).days) // 7 + 1


def oracle(text: str, first: datetime, end: datetime) -> list[datetime]:
    """Every instant of a rule by the day or longer in UTC, by looking at each date and each period."""
    rule = parse(text)
    hours, minutes = rule.by_hour or (first.hour,), rule.by_minute or (first.minute,)
    times = sorted(product(hours, minutes, rule.by_second or (first.second,)))
    by_days = rule.by_weekno or rule.by_yearday or rule.by_monthday or rule.by_day

    def period(day: date) -> int:
        weeks = (day - date(1900, 1, 1) - timedelta(days=rule.wkst)).days // 7  # 1 January 1900 was a Monday
        return {"YEARLY": day.year, "MONTHLY": day.year * 12 + day.month, "WEEKLY": weeks}.get(
            rule.freq, day.toordinal()
        )

    def matches(day: date) -> bool:
        month_length = calendar.monthrange(day.year, day.month)[1]
        year_day, year_length = day.timetuple().tm_yday, 365 + calendar.isleap(day.year)
        if rule.by_month and day.month not in rule.by_month:
            return False
        if not by_days:
            if rule.freq == "YEARLY":
                return day.day == first.day and (bool(rule.by_month) or day.month == first.month)
            if rule.freq == "MONTHLY":
                return day.day == first.day
            return rule.freq == "DAILY" or day.weekday() == first.weekday()
        if rule.by_weekno and not of(rule.by_weekno, *iso_week(day, rule.wkst)):
            return False
        if rule.by_yearday and not of(rule.by_yearday, year_day, year_length):
            return False
        if rule.by_monthday and not of(rule.by_monthday, day.day, month_length):
            return False
        if rule.by_weekno and not (rule.by_day or rule.by_monthday or rule.by_yearday):
            return day.weekday() == first.weekday()
        return not rule.by_day or any(named(day, n, weekday) for n, weekday in rule.by_day)

    def named(day: date, n: int, weekday: int) -> bool:
        if day.weekday() != weekday or not n:
            return day.weekday() == weekday
        whole_year = rule.freq == "YEARLY" and not rule.by_month
        low = date(day.year, 1 if whole_year else day.month, 1)
        high = (
            date(day.year, 12, 31)
            if whole_year
            else date(day.year, day.month, calendar.monthrange(day.year, day.month)[1])
        )
        same = [d for i in range((high - low).days + 1) if (d := low + timedelta(days=i)).weekday() == weekday]
        return 0 <= (n - 1 if n > 0 else len(same) + n) < len(same) and same[n - 1 if n > 0 else n] == day

    def instants() -> Iterator[datetime]:
        low = date(first.year, 1, 1) - timedelta(days=7)
        days = [low + timedelta(days=i) for i in range((end.date() - low).days + 370)]
        for number, group in groupby(days, period):
            found = [datetime(d.year, d.month, d.day, *t, tzinfo=UTC) for d in group if matches(d) for t in times]
            if (number - period(first.date())) % rule.interval == 0:
                if rule.by_setpos:
                    yield from sorted({found[p - 1 if p > 0 else p] for p in rule.by_setpos if abs(p) <= len(found)})
                else:
                    yield from found

    out = [t for t in instants() if t >= first]
    return [t for t in (out if rule.count is None else out[: rule.count]) if t < end]


def some(low: int, high: int, most: int = 3, backwards: bool = False) -> st.SearchStrategy[str]:
    numbers = st.integers(low, high) | st.integers(-high, -low) if backwards else st.integers(low, high)
    return st.lists(numbers, min_size=1, max_size=most).map(lambda ns: ",".join(map(str, ns)))


@st.composite
def rules(draw: st.DrawFn) -> str:
    freq = draw(st.sampled_from(["DAILY", "WEEKLY", "MONTHLY", "YEARLY"]))
    parts = {"FREQ": freq}
    weekdays = st.sampled_from(rrule.WEEKDAYS)
    if freq in ("MONTHLY", "YEARLY") and draw(st.booleans()):
        weekdays = st.tuples(st.sampled_from(["", "1", "-1", "2", "5", "-5", "20"]), weekdays).map("".join)
    offered = {
        "INTERVAL": st.integers(1, 4).map(str),
        "BYMONTH": some(1, 12),
        "BYDAY": st.lists(weekdays, min_size=1, max_size=3).map(",".join),
        "BYHOUR": some(0, 23, 2),
        "BYMINUTE": some(0, 59, 2),
        "BYSETPOS": some(1, 5, 2, True),
        "WKST": st.sampled_from(rrule.WEEKDAYS),
        "COUNT": st.integers(1, 20).map(str),
    }
    if freq != "WEEKLY":
        offered["BYMONTHDAY"] = some(1, 31, 3, True)
    if freq == "YEARLY":
        offered["BYYEARDAY"] = some(1, 366, 3, True)
        offered["BYWEEKNO"] = some(1, 53, 3, True)
    for name in draw(st.lists(st.sampled_from(sorted(offered)), max_size=5, unique=True)):
        parts[name] = draw(offered[name])
    return ";".join(f"{name}={value}" for name, value in parts.items())


@given(text=rules(), offset=st.integers(0, 1500))
@settings(max_examples=100)
def test_agrees_with_the_oracle(text: str, offset: int) -> None:
    first = datetime(2023, 1, 1, 10, 20, 30, tzinfo=UTC) + offset * DAY
    end = first + 3 * 366 * DAY
    try:
        rule = table(text, first)
    except BadRule:
        return  # a mixture that is refused, or a COUNT that is never reached
    expected = oracle(text, first, end)
    found, at = [], first - SECOND
    while len(found) < 200 and (following := rule.next_after(at)) is not None and following < end:
        found.append(following)
        at = following
    assert found == expected[:200]
    assert rule.count(first - SECOND, end) == len(expected)
    assert rule.last_before(end, first) == (expected[-1] if expected else None)


@given(
    freq=st.sampled_from(["HOURLY", "MINUTELY", "SECONDLY"]),
    interval=st.integers(1, 500),
    hours=st.none() | some(0, 23),
    minutes=st.none() | some(0, 59),
    zone=st.sampled_from(["UTC", NEW_YORK, "Australia/Lord_Howe"]),
    days=st.integers(0, 800),
)
@settings(max_examples=25)
def test_rules_by_real_time_are_evenly_spaced_seconds_that_the_clock_names(
    freq: str, interval: int, hours: str | None, minutes: str | None, zone: str, days: int
) -> None:
    given_ = {"BYHOUR": hours, "BYMINUTE": minutes}
    text = ";".join([f"FREQ={freq};INTERVAL={interval}", *(f"{k}={v}" for k, v in given_.items() if v)])
    first, rule = START + days * DAY, parse(text)
    unit, tz = {"HOURLY": 3600, "MINUTELY": 60, "SECONDLY": 1}[freq], rrule.zone(zone)
    start = first.astimezone(tz)
    origin = first - timedelta(seconds=(start.minute * 60 + start.second) % unit)
    low, span = first + 3 * DAY, 8_000

    def named(at: datetime) -> bool:
        local = at.astimezone(tz)
        return (
            (at - origin) // (unit * SECOND) % interval == 0
            and (not rule.by_hour or local.hour in rule.by_hour)
            and local.minute in (rule.by_minute or ((start.minute,) if unit == 3600 else range(60)))
            and (unit == 1 or local.second == start.second)
        )

    expected = [at for i in range(1, span) if named(at := low + i * SECOND)]
    rule_table = table(text, first, zone)
    assert rule_table.count(low, low + span * SECOND) == len(expected)
    if expected:
        assert rule_table.next_after(low) == expected[0]
        assert rule_table.last_before(low + span * SECOND, low) == expected[-1]


@given(text=rules(), days=st.integers(0, 4000), at=st.integers(0, 2000))
@settings(max_examples=100)
def test_a_rule_that_says_it_all_does_not_depend_on_its_start(text: str, days: int, at: int) -> None:
    given_ = {part.partition("=")[0] for part in text.split(";")}
    text += "".join(f";{name}=7,8" for name in ("BYHOUR", "BYMINUTE", "BYSECOND") if name not in given_)
    try:
        rule = parse(text)
    except BadRule:
        return
    if rule.says_it_all:
        after = START + (days + at) * DAY
        assert table(text).next_after(after) == table(text, START + days * DAY + SECOND).next_after(after)


# ── what is refused, and what anything may cost ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no part"),
        ("BYDAY=MO", "FREQ"),
        ("FREQ=FORTNIGHTLY", "FREQ"),
        ("FREQ=DAILY;FREQ=DAILY", "twice"),
        ("FREQ=DAILY;INTERVAL=0", "INTERVAL"),
        ("FREQ=DAILY;COUNT=2;UNTIL=20300101", "together"),
        ("FREQ=DAILY;UNTIL=20300230", "UNTIL"),
        ("FREQ=DAILY;UNTIL=tomorrow", "UNTIL"),
        ("FREQ=DAILY;BYHOUR=24", "BYHOUR"),
        ("FREQ=DAILY;BYMONTHDAY=0", "BYMONTHDAY"),
        ("FREQ=DAILY;BYSECOND=60", "BYSECOND"),
        ("FREQ=DAILY;BYDAY=1MO", "BYDAY"),
        ("FREQ=YEARLY;BYWEEKNO=1;BYDAY=1MO", "BYDAY"),
        ("FREQ=MONTHLY;BYDAY=XX", "BYDAY"),
        ("FREQ=MONTHLY;BYWEEKNO=1", "BYWEEKNO"),
        ("FREQ=WEEKLY;BYMONTHDAY=1", "BYMONTHDAY"),
        ("FREQ=MONTHLY;BYYEARDAY=1", "BYYEARDAY"),
        ("FREQ=DAILY;BYSETPOS=1", "BYSETPOS"),
        ("FREQ=YEARLY;INTERVAL=51", "INTERVAL"),
        ("FREQ=SECONDLY;INTERVAL=4000000000", "INTERVAL"),
        ("FREQ=DAILY;COUNT=10001", "COUNT"),
        ("FREQ=YEARLY;COUNT=500", "COUNT"),
        ("FREQ=DAILY;X-RAY=1", "no part"),
        ("DTSTART:19970902T090000\nRRULE:FREQ=DAILY", "starting_at"),
        ("FREQ=DAILY;BYHOUR=٩", "starting_at"),
    ],
)
def test_refuses_and_says_which_part(text: str, says: str) -> None:
    with pytest.raises(BadRule, match=says):
        compile_rule(text, START, "UTC", "next_valid", "first")


@pytest.mark.parametrize(
    "text",
    [
        "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=DAILY;INTERVAL=7;BYDAY=MO",
        "FREQ=YEARLY;INTERVAL=4;BYYEARDAY=366",
        "FREQ=YEARLY;BYWEEKNO=53;BYMONTH=6",
        "FREQ=MONTHLY;BYDAY=FR;BYSETPOS=6",
        "FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30",
        "FREQ=SECONDLY;INTERVAL=2;BYSECOND=1",
        "FREQ=SECONDLY;INTERVAL=86402;BYSECOND=1",
        "FREQ=MINUTELY;INTERVAL=1440;BYHOUR=3",
        "FREQ=SECONDLY;BYSECOND=1;BYSETPOS=2",
        "FREQ=HOURLY;INTERVAL=48;BYDAY=MO,TU;BYHOUR=12;BYMINUTE=1;BYMONTHDAY=31;BYMONTH=2",
    ],
)
def test_what_never_fires_is_found_out_soon(text: str) -> None:
    started = time.process_time()
    assert table(text).next_after(START) is None
    assert time.process_time() - started < PATIENCE, "hours, by trying one after the other"


@pytest.mark.parametrize(
    "text",
    ["FREQ=SECONDLY", "FREQ=MINUTELY;INTERVAL=7;BYHOUR=9", "FREQ=DAILY;BYSECOND=0,30", "FREQ=DAILY;COUNT=10000"],
)
def test_counting_decades_is_a_step_a_day(text: str) -> None:
    started = time.process_time()
    rule = table(text, zone=NEW_YORK)
    assert rule.count(START, START + 30 * 365 * DAY) >= 9_999
    assert time.process_time() - started < PATIENCE, "hours, by trying one after the other"
