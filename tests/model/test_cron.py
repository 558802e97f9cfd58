"""Cron on a real calendar, against a brute-force reference and against cronsim."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import product

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.model import cron

MINUTE = timedelta(minutes=1)

# A day before and a day after each: where clocks were moved by an hour, by half an hour, over midnight, by a day.
MOVES = {
    "spring New York": ("America/New_York", datetime(2026, 3, 8, tzinfo=UTC)),
    "autumn New York": ("America/New_York", datetime(2026, 11, 1, tzinfo=UTC)),
    "spring Berlin": ("Europe/Berlin", datetime(2026, 3, 29, tzinfo=UTC)),
    "autumn Berlin": ("Europe/Berlin", datetime(2026, 10, 25, tzinfo=UTC)),
    "spring Lord Howe": ("Australia/Lord_Howe", datetime(2026, 10, 3, tzinfo=UTC)),
    "autumn Lord Howe": ("Australia/Lord_Howe", datetime(2026, 4, 4, tzinfo=UTC)),
    "Apia loses a day": ("Pacific/Apia", datetime(2011, 12, 30, tzinfo=UTC)),
    "Beirut at midnight": ("Asia/Beirut", datetime(2026, 3, 28, tzinfo=UTC)),
    "Havana back over 1:00": ("America/Havana", datetime(2026, 11, 1, tzinfo=UTC)),
    "São Paulo back over midnight": ("America/Sao_Paulo", datetime(2018, 2, 18, tzinfo=UTC)),
    "Toronto over midnight": ("America/Toronto", datetime(1919, 3, 31, tzinfo=UTC)),
}


def owed(expression: str, zone: str, start: datetime, end: datetime) -> list[str]:
    """What is owed in (start, end), as local times with their offset."""
    days, out, at = cron.compile_cron(expression, zone), [], start
    while (found := days.next_after(at)) is not None and found < end:
        out.append(found)
        at = found
    return [t.astimezone(cron.zone(zone)).strftime("%d %H:%M%z") for t in out]


def on(expression: str, zone: str, day: date) -> list[str]:
    tz = cron.zone(zone)
    start = datetime(day.year, day.month, day.day, tzinfo=tz).astimezone(UTC) - MINUTE
    end = datetime(day.year, day.month, day.day, tzinfo=tz) + timedelta(days=1)
    return [t.split(" ")[1] for t in owed(expression, zone, start, end.astimezone(UTC))]


@pytest.mark.parametrize(
    ("expression", "zone", "day", "expected"),
    [
        ("30 2 * * *", "America/New_York", date(2026, 3, 8), ["03:00-0400"]),
        ("0,30 2 * * *", "America/New_York", date(2026, 3, 8), ["03:00-0400"]),
        ("30 2,3 * * *", "America/New_York", date(2026, 3, 8), ["03:00-0400", "03:30-0400"]),
        ("*/20 2 * * *", "America/New_York", date(2026, 3, 8), ["03:00-0400"]),
        ("30 1 * * *", "America/New_York", date(2026, 11, 1), ["01:30-0400"]),
        (
            "*/30 1 * * *",
            "America/New_York",
            date(2026, 11, 1),
            ["01:00-0400", "01:30-0400", "01:00-0500", "01:30-0500"],
        ),
        ("30 2 * * *", "Europe/Berlin", date(2026, 3, 29), ["03:00+0200"]),
        ("30 2 * * *", "Europe/Berlin", date(2026, 10, 25), ["02:30+0200"]),
        ("15 2 * * *", "Australia/Lord_Howe", date(2026, 10, 4), ["02:30+1100"]),
        ("45 1 * * *", "Australia/Lord_Howe", date(2026, 4, 5), ["01:45+1100"]),
        ("*/30 2 * * *", "Australia/Lord_Howe", date(2026, 4, 5), ["02:00+1030", "02:30+1030"]),
        ("30 0 * * *", "Asia/Beirut", date(2026, 3, 29), ["01:00+0300"]),
        ("0 0 * * *", "America/Havana", date(2026, 11, 1), ["00:00-0400"]),
    ],
)
def test_fixed_times_where_the_clock_is_moved(expression: str, zone: str, day: date, expected: list[str]) -> None:
    assert on(expression, zone, day) == expected


def test_star_hours_come_once_every_real_hour() -> None:
    spring = on("0 * * * *", "America/New_York", date(2026, 3, 8))
    autumn = on("0 * * * *", "America/New_York", date(2026, 11, 1))
    assert (len(spring), len(autumn)) == (23, 25)
    assert spring[1:3] == ["01:00-0500", "03:00-0400"]
    assert autumn[1:3] == ["01:00-0400", "01:00-0500"]


def test_a_day_that_a_zone_left_out_owes_nothing() -> None:
    start, end = datetime(2011, 12, 28, 12, tzinfo=UTC), datetime(2011, 12, 31, 12, tzinfo=UTC)
    assert owed("0 12 * * *", "Pacific/Apia", start, end) == ["28 12:00-1000", "29 12:00-1000", "31 12:00+1400"]


def test_day_of_month_or_day_of_week_when_both_are_named() -> None:
    start, end = datetime(2026, 2, 1, tzinfo=UTC) - MINUTE, datetime(2026, 3, 1, tzinfo=UTC)
    assert owed("0 0 13 * FRI", "UTC", start, end) == [f"{d:02} 00:00+0000" for d in (6, 13, 20, 27)]
    assert owed("0 0 */10 * SUN", "UTC", start, end) == ["01 00:00+0000"]


def test_leap_days_across_a_century_without_one() -> None:
    assert cron.compile_cron("0 0 29 2 *", "UTC").next_after(datetime(2096, 3, 1, tzinfo=UTC)) == datetime(
        2104, 2, 29, tzinfo=UTC
    )


# ── against a reference that looks at every minute ───────────────────────────────────────────────────────────────


@cache
def minutes_around(move: str) -> tuple[tuple[datetime, datetime], ...]:
    """(instant, local wall time) of each minute, three days before to three days after."""
    zone, about = MOVES[move]
    tz, start = cron.zone(zone), about - timedelta(days=3)
    instants = (start + i * MINUTE for i in range(6 * 1440))
    return tuple((t, t.astimezone(tz).replace(tzinfo=None)) for t in instants)


def reference(expression: str, move: str) -> list[datetime]:
    """What P9 says is owed from two days before to two days after, slowly."""
    fields = CronSim(expression, datetime(2024, 1, 1))
    star_minute, star_hour = (p.startswith("*") for p in expression.split()[:2])
    timeline = minutes_around(move)
    wanted = {h * 60 + m for h, m in product(fields.hours, fields.minutes)}

    def matches(local: datetime) -> bool:
        day = local.date()
        return local.hour * 60 + local.minute in wanted and day.month in fields.months and fields.match_day(day)

    out = {t for t, local in timeline if matches(local)} if star_minute or star_hour else set()
    if not star_hour:
        first_time = {local: t for t, local in reversed(timeline)}
        for day in {local.date() for local in first_time}:
            for minute in wanted:
                local = datetime(day.year, day.month, day.day) + minute * MINUTE
                if matches(local):
                    later = local
                    while later not in first_time and later < timeline[-1][1]:
                        later += MINUTE
                    out.add(first_time.get(later, timeline[-1][0]))
    low, high = timeline[1440][0], timeline[-1440][0]
    return sorted(t for t in out if low < t < high)


def field(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    pair = st.tuples(number, number).map(sorted)
    return st.one_of(
        st.just("*"),
        st.integers(1, (high - low) // 2).map(lambda n: f"*/{n}"),
        st.lists(number, min_size=1, max_size=3).map(lambda ns: ",".join(map(str, ns))),
        pair.map(lambda p: f"{p[0]}-{p[1]}"),
        st.tuples(pair, st.integers(1, 5)).map(lambda p: f"{p[0][0]}-{p[0][1]}/{p[1]}"),
    )


NIGHT_HOURS = st.one_of(
    field(0, 23), st.lists(st.sampled_from([0, 1, 2, 3, 23]), min_size=1).map(lambda h: ",".join(map(str, h)))
)
EXPRESSIONS = st.tuples(
    field(0, 59), NIGHT_HOURS, st.one_of(st.just("*"), field(1, 28)), st.just("*"), st.one_of(st.just("*"), field(0, 7))
).map(" ".join)


@pytest.mark.parametrize("move", MOVES)
@given(expression=EXPRESSIONS)
@settings(max_examples=25, deadline=None)
def test_agrees_with_looking_at_every_minute(move: str, expression: str) -> None:
    expected = reference(expression, move)
    days = cron.compile_cron(expression, MOVES[move][0])
    low, high = minutes_around(move)[1440][0], minutes_around(move)[-1440][0]
    walked, at = [], low
    while (found := days.next_after(at)) is not None and found < high:
        walked.append(found)
        at = found
    assert walked == expected
    assert days.count(low, high) == len(expected)
    back, at = [], high
    while (found := days.last_before(at, low + MINUTE / 60)) is not None:
        back.append(found)
        at = found
    assert back[::-1] == expected


@given(expression=EXPRESSIONS, start=st.datetimes(datetime(2000, 1, 1), datetime(2060, 1, 1)))
@settings(max_examples=200, deadline=None)
def test_agrees_with_cronsim_where_no_clock_is_moved(expression: str, start: datetime) -> None:
    at = start.replace(tzinfo=UTC)
    assert cron.compile_cron(expression, "UTC").next_after(at) == next(CronSim(expression, at))


@given(
    expression=EXPRESSIONS,
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
    start=st.datetimes(datetime(2000, 1, 1), datetime(2060, 1, 1)),
    ahead=st.timedeltas(timedelta(0), timedelta(days=60)),
)
@settings(max_examples=150, deadline=None)
def test_next_is_after_now_and_never_goes_back(expression: str, zone: str, start: datetime, ahead: timedelta) -> None:
    days, early = cron.compile_cron(expression, zone), start.replace(tzinfo=UTC)
    first, second = days.next_after(early), days.next_after(early + ahead)
    assert first is not None and second is not None
    assert first > early and second > early + ahead
    assert first <= second
    assert (first == second) == (days.count(early, second) == 0)
    assert days.last_before(first + MINUTE / 60, early) == first


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "* * * *",
            "* * * * * * *",
            "",
            " ",
            "@reboot",
            "@",
            "R R * * *",
            "* * * * *\n",
            "*\u00a0* * * *",
            "ſUN * * * *",
        ),
        *("*/0 * * * *", "*/61 * * * *", "60 * * * *", "5-1 * * * *", "-1 * * * *", "* 24 * * *", "* */25 * * *"),
        *("* * 0 * *", "* * 32 * *", "* * * 13 *", "* * * 0 *", "* * * * 8", "* * * * FRI-SUN", "JAN * * * *"),
        *("٣ * * * *", "1, * * * *", "*/ * * * *", "/5 * * * *", "*-5 * * * *", "1-2-3 * * * *", "*/5/5 * * * *"),
        *(
            "1/9999999999999999999999 * * * *",
            "1e1 * * * *",
            "0x1 * * * *",
            "+1 * * * *",
            "1.5 * * * *",
            "* * * * MONDAY",
        ),
    ],
)
def test_refuses_what_is_no_cron(expression: str) -> None:
    with pytest.raises(cron.BadCron):
        cron.compile_cron(expression, "UTC")


@pytest.mark.parametrize("expression", ["0 0 31 2 *", "0 0 30 FEB *", "0 0 31 4,6,9,11 *", "0 0 31 2 */2"])
def test_refuses_dates_that_never_come(expression: str) -> None:
    with pytest.raises(cron.NeverFires):
        cron.compile_cron(expression, "UTC")


@pytest.mark.parametrize(
    "expression",
    [
        *("* * * * * *", "0 0 9 * * MON", "@daily", "@Hourly", "H * * * *", "H/15 * * * *", "H(0-29) 2 * * *"),
        *("0 0 L * *", "0 0 LW * *", "0 0 L-3 * *", "0 0 15W * *", "0 0 ? * MON", "0 0 * * MON#1", "0 0 * * 5L"),
    ],
)
def test_says_what_is_not_built_yet(expression: str) -> None:
    with pytest.raises(cron.NotBuilt):
        cron.compile_cron(expression, "UTC")


@pytest.mark.parametrize(
    "expression", ["0 0 31 2 MON", "5/10 * * * *", "0 0 * jan-mar sun", "0\t9 * * *", " 0  9 * * 7 "]
)
def test_takes_what_is_cron(expression: str) -> None:
    assert cron.compile_cron(expression, "UTC").next_after(datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "America",
            "../../etc/passwd",
            "/etc/passwd",
            "x" * 5000,
            "localtime",
            "posixrules",
            "right/UTC",
            "posix/UTC",
        ),
        *("utc", "europe/berlin", "Factory", "", "Europe/Berlin\0", "tzdata.zi", "zone.tab"),
    ],
)
def test_refuses_what_is_no_zone(name: str) -> None:
    with pytest.raises(ValueError):
        cron.zone(name)


def test_every_zone_on_the_list_loads() -> None:
    assert {"UTC", "Europe/Berlin", "America/Argentina/Ushuaia", "Etc/GMT+5"} <= cron.zone_names()
    assert all(cron.zone(name).key == name for name in cron.zone_names())
