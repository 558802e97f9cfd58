"""Cron: what may be written, what it owes by example and against cronsim, and its words. tests/time has the proof."""

from __future__ import annotations

import re
import sys
from datetime import UTC, date, datetime, timedelta

import pytest
from cronsim import CronSim
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.time.expressions import ANY_EXPRESSION, EXPRESSIONS, each
from tocsin.model import cron

MINUTE = timedelta(minutes=1)


def owed(expression: str, zone: str, start: datetime, end: datetime, **rules: str) -> list[str]:
    """What is owed in (start, end), as local times with their offset."""
    days, out, at = cron.compile_cron(expression, zone, **rules), [], start
    while (found := days.next_after(at)) is not None and found < end:
        out.append(found)
        at = found
    return [t.astimezone(cron.zone(zone)).strftime("%d %H:%M%z") for t in out]


def on(expression: str, zone: str, day: date, **rules: str) -> list[str]:
    tz = cron.zone(zone)
    start = datetime(day.year, day.month, day.day, tzinfo=tz).astimezone(UTC) - MINUTE
    end = datetime(day.year, day.month, day.day, tzinfo=tz) + timedelta(days=1)
    return [t.split(" ")[1] for t in owed(expression, zone, start, end.astimezone(UTC), **rules)]


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


@pytest.mark.parametrize(
    ("expression", "day", "rules", "expected"),
    [
        ("30 2 * * *", date(2026, 3, 8), {"gap": "skip"}, []),
        ("0,30 2,3 * * *", date(2026, 3, 8), {"gap": "skip"}, ["03:00-0400", "03:30-0400"]),
        ("0 */2 * * *", date(2026, 3, 8), {"gap": "next_valid"}, ["00:00-0500", "04:00-0400"]),
        ("30 1 * * *", date(2026, 11, 1), {"overlap": "second"}, ["01:30-0500"]),
        ("30 1 * * *", date(2026, 11, 1), {"overlap": "both"}, ["01:30-0400", "01:30-0500"]),
        ("0 1-2 * * *", date(2026, 11, 1), {"overlap": "second"}, ["01:00-0500", "02:00-0500"]),
        (
            "*/30 1 * * *",
            date(2026, 11, 1),
            {"overlap": "second"},
            ["01:00-0400", "01:30-0400", "01:00-0500", "01:30-0500"],
        ),
        ("59 59 1 * * *", date(2026, 11, 1), {"overlap": "both"}, ["01:59-0400", "01:59-0500"]),
    ],
)
def test_a_schedule_chooses_what_becomes_of_a_gap_and_an_overlap(
    expression: str, day: date, rules: dict[str, str], expected: list[str]
) -> None:
    assert [t for t in on(expression, "America/New_York", day, **rules) if t < "05"] == expected


def test_the_second_time_of_an_overlap_over_midnight() -> None:
    # At 00:01 on Sunday the clock was put back to 23:01 on Saturday.
    start, end = datetime(2010, 11, 6, 12, tzinfo=UTC), datetime(2010, 11, 7, 12, tzinfo=UTC)
    for overlap, expected in (("first", ["06 23:30-0230"]), ("second", ["06 23:30-0330"])):
        assert owed("30 23 * * *", "America/St_Johns", start, end, overlap=overlap) == expected


@pytest.mark.parametrize(("gap", "overlap"), [("next", "first"), ("skip", "last"), ("", "")])
def test_refuses_rules_that_it_does_not_know(gap: str, overlap: str) -> None:
    with pytest.raises(ValueError, match="daylight saving"):
        cron.compile_cron("0 2 * * *", "UTC", gap, overlap)


def test_what_is_always_skipped_comes_to_an_end() -> None:
    days = cron.compile_cron("30 2 ? 3 SUNL", "Europe/Berlin", "skip")
    assert days.next_after(datetime(2026, 1, 1, tzinfo=UTC)) is None


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


@pytest.mark.parametrize(
    ("dates", "days"),
    [
        ("L * ?", (31, 28, 31)),
        ("L-3 * ?", (28, 25, 28)),
        ("LW * ?", (30, 27, 31)),
        ("1W * ?", (1, 2, 2)),
        ("15W * ?", (15, 16, 16)),
        ("31W * ?", (30, 31)),
        ("? * FRIL", (30, 27, 27)),
        ("? * 5L", (30, 27, 27)),
        ("? * MON#2", (12, 9, 9)),
        ("? * 7#5", (29,)),
        ("1,LW * ?", (1, 30, 1, 27, 1, 31)),
    ],
)
def test_days_that_depend_on_the_month(dates: str, days: tuple[int, ...]) -> None:
    start, end = datetime(2026, 1, 1, tzinfo=UTC) - MINUTE, datetime(2026, 4, 1, tzinfo=UTC)
    assert owed(f"0 0 {dates}", "UTC", start, end) == [f"{d:02} 00:00+0000" for d in days]


def test_leap_days_across_a_century_without_one() -> None:
    assert cron.compile_cron("0 0 29 2 *", "UTC").next_after(datetime(2096, 3, 1, tzinfo=UTC)) == datetime(
        2104, 2, 29, tzinfo=UTC
    )


# ── in general ───────────────────────────────────────────────────────────────────────────────────────────────────


ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"])
RULES = st.tuples(st.sampled_from(["next_valid", "skip"]), st.sampled_from(["first", "second", "both"]))
MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2060, 1, 1)).map(lambda d: d.replace(tzinfo=UTC))


def resolved(expression: str, seed: str = "acme/report") -> str | None:
    """None where it never fires."""
    try:
        return cron.resolve(expression, seed)
    except cron.NeverFires:
        return None


RESOLVED = ANY_EXPRESSION.map(resolved).filter(bool)


def understood_alike(expression: str) -> bool:
    """Whether cronsim means the same: it lacks W and L-3, takes a-a/n for a/n, and lets weekdays run to 7."""
    odd = re.search(r"W|L-|[A-Z]L|\b(\d+)-\1/|(?<=,)\*| \S*\d/\d+\S*$", expression)
    return not odd


@given(expression=RESOLVED.filter(understood_alike), start=MOMENTS)
@settings(max_examples=100)
def test_agrees_with_cronsim_where_no_clock_is_moved(expression: str, start: datetime) -> None:
    assert cron.compile_cron(expression, "UTC").next_after(start) == next(CronSim(expression, start))


@given(
    expression=RESOLVED, zone=ZONES, rules=RULES, early=MOMENTS, ahead=st.timedeltas(timedelta(0), timedelta(days=60))
)
@settings(max_examples=100)
def test_next_is_after_now_and_never_goes_back(
    expression: str, zone: str, rules: tuple[str, str], early: datetime, ahead: timedelta
) -> None:
    days = cron.compile_cron(expression, zone, *rules)
    first, second = days.next_after(early), days.next_after(early + ahead)
    assert first is not None and second is not None
    assert first > early and second > early + ahead
    assert first <= second
    assert (first == second) == (days.count(early, second) == 0)
    assert days.last_before(first + MINUTE / 60, early) == first


@given(expression=RESOLVED, zone=ZONES, rules=RULES, early=MOMENTS, steps=st.integers(1, 30))
@settings(max_examples=100)
def test_count_is_what_stepping_meets(
    expression: str, zone: str, rules: tuple[str, str], early: datetime, steps: int
) -> None:
    days, met = cron.compile_cron(expression, zone, *rules), [early]
    while len(met) <= steps and (found := days.next_after(met[-1])) is not None:
        met.append(found)
    assume(len(met) > 2)
    assert days.count(early, met[-1]) == len(met) - 2
    assert days.last_before(met[-1], early) == met[-2]


@given(expression=ANY_EXPRESSION, seed=st.text(st.characters(codec="utf-8")))
@settings(max_examples=150)
def test_resolving_leaves_one_spelling_without_hash_and_words_for_it(expression: str, seed: str) -> None:
    once = resolved(expression, seed)
    if once is None:
        return
    assert cron.resolve(once, "another seed") == once == cron.resolve(f" {expression.lower()}\t", seed)
    assert not set("H?@") & set(re.sub("THU|MARCH", "", once))
    words = cron.explain(expression, seed)
    assert words == cron.explain(once) and words[0].isupper() and "  " not in words


def test_a_year_of_seconds_is_counted_without_meeting_them() -> None:
    days, start = cron.compile_cron("* * * * * *", "America/New_York"), datetime(2026, 1, 1, tzinfo=UTC)
    assert days.count(start, start + timedelta(days=365)) == 365 * 86_400 - 1


def test_one_computation_for_a_hundred_thousand_jobs() -> None:
    key = ("0 9 * * *", "Asia/Tokyo", "next_valid", "first", datetime(2026, 6, 1, 12, 0, 7, tzinfo=UTC))
    cron.next_instant(*key)
    before = cron.next_instant.cache_info().misses
    assert {cron.next_instant(*key) for _ in range(100_000)} == {datetime(2026, 6, 2, tzinfo=UTC)}
    assert cron.next_instant.cache_info().misses == before


# ── H ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_hashed_numbers_are_for_ever() -> None:
    assert cron.resolve("H H H H H H", "acme/report") == "10 15 20 3 8 0"
    assert cron.resolve("H(0-29)/10 H/4 H/9 H/5 H", "acme/report") == "5-29/10 0/4 5-28/9 4/5 0"


def test_the_length_of_what_is_written_counts() -> None:
    assert len(cron.resolve(f"{'H/7,' * 20}{'H,' * 80}H * H * *", "acme/report")) > 256
    with pytest.raises(cron.BadCron, match="longer"):
        cron.resolve(f"{'1,' * 125}1 * * * *", "")


def test_hashed_minutes_spread() -> None:
    minutes = [int(cron.resolve("H * * * *", f"acme/job-{n}").split()[0]) for n in range(6000)]
    assert set(minutes) == set(range(60))
    assert all(60 <= minutes.count(m) <= 140 for m in range(60))


@given(seed=st.text(max_size=20), low=st.integers(0, 59), length=st.integers(0, 59), step=st.integers(1, 60))
def test_hashed_ranges_keep_within(seed: str, low: int, length: int, step: int) -> None:
    high = min(59, low + length)
    assert low <= int(cron.resolve(f"H({low}-{high}) * * * *", seed).split()[0]) <= high
    stepped = re.fullmatch(r"(\d+)-(\d+)/(\d+) \* \* \* \*", cron.resolve(f"H({low}-{high})/{step} * * * *", seed))
    assert stepped is not None
    assert low <= int(stepped[1]) <= min(high, low + step - 1) and stepped.groups()[1:] == (str(high), str(step))


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("* * * * *", "Every minute"),
        ("*/15 * * * *", "Every 15 minutes"),
        ("7/15 * * * *", "Every 15 minutes from minute 7 on"),
        ("*/7 * * * *", "At every 7th minute from 0 to 56 of every hour"),
        ("@hourly", "Every hour"),
        ("5 * * * *", "At minute 5 of every hour"),
        ("0 */2 * * *", "Every 2 hours"),
        ("30 9,17 * * *", "At 09:30 and 17:30 every day"),
        ("0 9-17 * * MON-FRI", "Every hour from 09:00 to 17:00 on Monday through Friday"),
        ("*/15 9-17 * * 6,7", "Every 15 minutes from 09:00 to 17:59 on Saturday and Sunday"),
        ("* * * * * *", "Every second"),
        ("30 * * * * *", "At second 30 of every minute"),
        ("15 30 9 * * ?", "At 09:30:15 every day"),
        ("*/10 5 * * * *", "Every 10 seconds in minute 5 of every hour"),
        ("0 0 L * ?", "At 00:00 on the last day of the month"),
        ("0 0 L-3 * ?", "At 00:00 on the 3rd day before the last of the month"),
        ("0 0 LW * ?", "At 00:00 on the last weekday (Monday to Friday) of the month"),
        ("0 0 15W * ?", "At 00:00 on the weekday nearest to the 15th of the month"),
        ("0 18 ? * FRIL", "At 18:00 on the last Friday of the month"),
        ("0 9 ? * MON#2", "At 09:00 on the second Monday of the month"),
        ("0 9 13 * FRI", "At 09:00 on the 13th of the month or on Friday"),
        ("0 9 */10 * SUN", "At 09:00 on the 1st, the 11th, the 21st and the 31st of the month if it is Sunday"),
        ("0 0 1 JAN,JUN-AUG *", "At 00:00 on the 1st of the month in January and June through August"),
        ("H H * * *", "At 20:15 every day"),
    ],
)
def test_says_it_in_plain_words(expression: str, words: str) -> None:
    assert cron.explain(expression, "acme/report") == words


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "* * * * *\n", "*\u00a0* * * *", "ſUN * * * *", "٣ * * * *", f"{'1,' * 256}1 * * * *"),
        *each("""
            * * * * | * * * * * * * | * * * * * * 2026 | @ | @reboot | @every 5m | @daily @daily | @DAILY *
            */0 * * * * | */61 * * * * | 60 * * * * | 5-1 * * * * | -1 * * * * | * 24 * * * | * */25 * * * | R R * * *
            * * 0 * * | * * 32 * * | * * * 13 * | * * * 0 * | * * * * 8 | * * * * FRI-SUN | JAN * * * * | * * * * MONDAY
            1, * * * * | */ * * * * | /5 * * * * | *-5 * * * * | 1-2-3 * * * * | */5/5 * * * * | 1.5 * * * *
            1/9999999999999999999999 * * * * | 1e1 * * * * | 0x1 * * * * | 60 * * * * * | */61 * * * * * | MON * * * * *
            0 0 22-2 * * | * * * NOV-FEB * | * * * * 6-1 | ? * * * * | * * * ? * | * L * * * | * * * LW *
            * * L-31 * * | * * 0W * * | * * 32W * * | * * W * * | * * LW-1 * * | * * L/2 * * | * * 1-5W * *
            * * * * L | * * * * MON#0 | * * * * MON#6 | * * * * 8L | * * * * MON# | * * * * #2 | * * * * MON-FRIL
            H(5-3) * * * * | H(0-60) * * * * | H/0 * * * * | H/61 * * * * | H() * * * * | H(1) * * * * | HH * * * *
            +1 * * * * | H-5 * * * * | H#2 * * * * | * * * * H#2 | H(0-29 * * * *
        """),
    ],
)
def test_refuses_what_is_no_cron(expression: str) -> None:
    with pytest.raises(cron.BadCron):
        cron.compile_cron(expression, "UTC")
    with pytest.raises(cron.BadCron):
        cron.resolve(expression, "acme/report")


def test_a_hash_without_a_seed_is_no_plan() -> None:
    with pytest.raises(cron.BadCron, match="seed"):
        cron.compile_cron("H * * * *", "UTC")


def test_says_how_to_write_a_range_that_runs_backwards() -> None:
    with pytest.raises(cron.BadCron, match="FRI-SAT,SUN-MON"):
        cron.resolve("0 9 * * FRI-MON", "")
    with pytest.raises(cron.BadCron, match="22-23,0-2"):
        cron.resolve("0 22-2 * * *", "")


@pytest.mark.parametrize(
    "expression",
    [
        *("0 0 31 2 *", "0 0 30 FEB *", "0 0 31 4,6,9,11 *", "0 0 31 2 */2", "0 0 31W 2 ?", "0 0 30W 2 *"),
        *("0 0 L-30 2,4 ?", "0 0 L-29 2 ?", "0 0 */9 2 TUE#5,MON#5,WED#5", "* * * 31 SEP *"),
    ],
)
def test_refuses_dates_that_never_come(expression: str) -> None:
    with pytest.raises(cron.NeverFires):
        cron.resolve(expression, "acme/report")


def test_what_comes_once_in_decades_is_found() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    assert cron.compile_cron("0 0 ? 2 MON#5", "UTC").next_after(at) == datetime(2044, 2, 29, tzinfo=UTC)
    at = datetime(2072, 3, 1, tzinfo=UTC)
    assert cron.compile_cron("0 0 ? 2 MON#5", "UTC").next_after(at) == datetime(2112, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    "expression",
    [
        *("0 0 31 2 */2", "0 0 ? 2 MON#5", "59 59 23 31 12 ?", ",".join(["0-59/1"] * 20) + " * * * * *"),
        *("0 0 " + ",".join(f"{n}W" for n in range(1, 32)) + " 2 " + ",".join(f"{d}#5" for d in range(7)),),
        *("0 0 " + ",".join(f"L-{n}" for n in range(1, 31)) + " 2 ?", "1," * 115 + "1 * * * *"),
    ],
)
def test_hostile_expressions_cost_little(expression: str) -> None:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        text = resolved(expression)
        if text is not None:
            days = cron.compile_cron(text, "America/St_Johns", "skip", "both")
            at = days.next_after(datetime(2026, 3, 1, 0, 0, 1, tzinfo=UTC))
            days.last_before(at or datetime(2066, 1, 1, tzinfo=UTC), datetime(1986, 1, 1, tzinfo=UTC))
    finally:
        sys.setprofile(None)
    # Each costs well under a microsecond or two: this is the bar of 50 ms without a clock.
    assert calls < 25_000


@pytest.mark.parametrize(
    "expression", [*EXPRESSIONS, "0 0 31 2 MON", "5/10 * * * *", "0 0 * jan-mar sun", "0\t9 * * *", " 0  9 * * 7 "]
)
def test_takes_what_is_cron(expression: str) -> None:
    days = cron.compile_cron(cron.resolve(expression, "acme/report"), "UTC")
    assert days.next_after(datetime(2026, 1, 1, tzinfo=UTC))


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
