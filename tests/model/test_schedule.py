"""Timetables, what is refused, and what becomes of late occurrences."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.errors import InvalidInput
from tocsin.model.job import Dst, Misfire, Schedule
from tocsin.model.misfire import Missed, Outage, Planned, due_between, merge_outages, plan_occurrences
from tocsin.model.scalars import Duration, Instant, decode_scalar
from tocsin.model.schedule import check_schedule, describe, first_fire, hashes, spread, timetable
from tocsin.model.timetable import TICK, Every, Timetable

NOW = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
SECOND, MINUTE, HOUR, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
HORIZON = 10 * SECOND


def schedule(**given: Any) -> Schedule:
    return msgspec.convert(given, Schedule, dec_hook=decode_scalar)


def moments(low: datetime = datetime(2000, 1, 1), high: datetime = datetime(2060, 1, 1)) -> st.SearchStrategy[datetime]:
    return st.datetimes(low, high).map(lambda d: d.replace(tzinfo=UTC))


STEPS = st.one_of(
    st.timedeltas(SECOND, 5 * MINUTE), st.timedeltas(MINUTE, 40 * DAY), st.sampled_from([SECOND, MINUTE, HOUR, DAY])
)
ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
CRONS = [
    "* * * * *",
    "*/5 * * * *",
    "0 * * * *",
    "30 2 * * *",
    "30 1 * * *",
    "0 9 * * MON-FRI",
    "0 0 1 * *",
    "*/30 1,2 * * *",
    "H * * * *",
]
RULES = [
    "FREQ=SECONDLY;INTERVAL=50",
    "FREQ=MINUTELY;INTERVAL=7;BYHOUR=1,2,3,12",
    "FREQ=HOURLY;BYMINUTE=0,30",
    "FREQ=DAILY;BYHOUR=1,2;BYMINUTE=0,30;BYSETPOS=1,4",
    "FREQ=WEEKLY;INTERVAL=2;BYDAY=SU,MO;BYHOUR=2;BYMINUTE=30",
    "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=18;BYMINUTE=0;BYSECOND=0",
]
INTERVALS = [
    "R/2020-01-31T01:30:00Z/P1M",
    "R/2020-01-01T02:30/P1D",
    "R/2020-01-01T00:00:00Z/PT37M",
    "R/P1DT1H/2090-01-01T00:00:00Z",
]
TEXTS = [
    "every weekday at 1:30 and 2:15",
    "every 15 minutes between 1:00 and 4:00",
    "every 2 hours",
    "hourly on weekends",
    "every 3 days at midnight",
]
KINDS = [("every", []), ("cron", CRONS), ("rrule", RULES), ("interval", INTERVALS), ("text", TEXTS)]


@st.composite
def recurring(draw: st.DrawFn, near: datetime = NOW) -> tuple[Schedule, Timetable]:
    """A recurring schedule and its timetable, made some time before or after `near`."""
    anchor = near - draw(st.timedeltas(-DAY, 400 * DAY))
    starting_at = draw(st.none() | st.timedeltas(-30 * DAY, 30 * DAY).map(lambda d: Instant(anchor + d)))
    rule = Misfire(
        policy=draw(st.sampled_from(["latest", "all", "skip"])),
        window=Duration(draw(st.timedeltas(timedelta(0), 2 * HOUR) | st.timedeltas(timedelta(0), 500 * DAY))),
        max=draw(st.integers(1, 20)),
    )
    dst = Dst(
        gap=draw(st.sampled_from(["next_valid", "skip"])), overlap=draw(st.sampled_from(["first", "second", "both"]))
    )
    kind, values = draw(st.sampled_from(KINDS))
    value = Duration(draw(STEPS)) if kind == "every" else draw(st.sampled_from(values))
    made = Schedule(**{kind: value}, timezone=draw(ZONES), starting_at=starting_at, dst=dst, misfire=rule)
    return made, timetable(made, anchor, "tenant/job")


# ── timetables ───────────────────────────────────────────────────────────────────────────────────────────────────


@given(anchor=moments(), step=STEPS, k=st.integers(0, 10_000), part=st.floats(0, 0.999))
@settings(max_examples=300)
def test_every_is_exact(anchor: datetime, step: timedelta, k: int, part: float) -> None:
    table = timetable(Schedule(every=Duration(step)), anchor)
    assert table.next_after(anchor + k * step) == anchor + (k + 1) * step
    assert table.next_after(anchor + k * step + part * step) == anchor + (k + 1) * step
    assert table.next_after(anchor - k * step - SECOND) == anchor + step
    assert table.count(anchor, anchor + k * step) == max(0, k - 1)


def test_every_starts_at_its_start() -> None:
    table = timetable(schedule(every="PT5M", starting_at="2026-06-01T12:02:00Z"), NOW)
    assert due_between(table, NOW.replace(minute=2, second=0), NOW + 15 * MINUTE, 10)[0] == [
        NOW.replace(minute=m, second=0) for m in (2, 7, 12)
    ]
    assert table.next_after(NOW - 400 * DAY) == NOW.replace(minute=2, second=0)


def test_every_ends_with_the_calendar() -> None:
    assert timetable(schedule(every="PT1H"), NOW).next_after(datetime.max.replace(tzinfo=UTC) - MINUTE) is None


def test_every_shorter_than_a_second_is_refused_even_unchecked() -> None:
    with pytest.raises(InvalidInput):
        timetable(schedule(every="999ms"), NOW)


@given(pair=recurring(), at=st.timedeltas(-500 * DAY, 500 * DAY), ahead=st.timedeltas(timedelta(0), 50 * DAY))
@settings(max_examples=200)
def test_next_is_after_now_and_never_goes_back(
    pair: tuple[Schedule, Timetable], at: timedelta, ahead: timedelta
) -> None:
    made, table = pair
    first, second = table.next_after(NOW + at), table.next_after(NOW + at + ahead)
    assert first is not None and second is not None
    assert NOW + at < first <= second
    assert second > NOW + at + ahead
    assert made.starting_at is None or first >= made.starting_at.at
    assert first.tzinfo is UTC


@given(pair=recurring(), most=st.integers(0, 30), width=st.timedeltas(timedelta(0), 3 * HOUR))
@settings(max_examples=200)
def test_due_between_is_repeated_next_after(pair: tuple[Schedule, Timetable], most: int, width: timedelta) -> None:
    _, table = pair
    cursor = table.next_after(NOW)
    assert cursor is not None
    due, following = due_between(table, cursor, cursor + width, most)
    expected, at = [], cursor
    while at is not None and at <= cursor + width and len(expected) < most:
        expected.append(at)
        at = table.next_after(at)
    assert (due, following) == (expected, at)


@given(pair=recurring(), at=st.timedeltas(-100 * DAY, 400 * DAY), width=st.timedeltas(timedelta(0), 3 * DAY))
@settings(max_examples=300)
def test_counting_and_looking_back_agree_with_stepping(
    pair: tuple[Schedule, Timetable], at: timedelta, width: timedelta
) -> None:
    _, table = pair
    start, end = NOW + at, NOW + at + width
    stepped, found = [], table.next_after(start)
    while found is not None and found < end:
        stepped.append(found)
        found = table.next_after(found)
    assert table.count(start, end) == len(stepped)
    assert table.last_before(end, start + TICK) == (stepped[-1] if stepped else None)
    if stepped:
        assert table.last_before(stepped[-1], start + TICK) == (stepped[-2] if len(stepped) > 1 else None)
        assert table.count(stepped[0] - TICK, stepped[-1] + TICK) == len(stepped)


@given(pair=recurring(), cut=st.timedeltas(timedelta(0), 5 * DAY), at=st.timedeltas(-DAY, 6 * DAY))
@settings(max_examples=150)
def test_until_ends_it_and_takes_nothing_else_away(
    pair: tuple[Schedule, Timetable], cut: timedelta, at: timedelta
) -> None:
    made, _ = pair
    whole = timetable(made, NOW, "s")
    last = whole.next_after(NOW + cut)
    assert last is not None
    ended = timetable(msgspec.structs.replace(made, until=Instant(last)), NOW, "s")
    found = whole.next_after(NOW + at)
    assert found is not None
    assert ended.next_after(NOW + at) == (found if found <= last else None)
    assert ended.next_after(last) is None
    assert ended.last_before(last + 400 * DAY, last - DAY) == last
    assert ended.count(NOW, last + 400 * DAY) == whole.count(NOW, last) + 1


def test_jitter_is_the_same_for_ever_and_within_its_bound() -> None:
    made = schedule(cron="0 * * * *", jitter="PT5M")
    drawn = [spread(made, f"tenant/job-{i}") for i in range(500)]
    assert drawn == [spread(made, f"tenant/job-{i}") for i in range(500)]
    assert min(drawn) >= timedelta(0) and max(drawn) <= 5 * MINUTE
    assert min(drawn) < 10 * SECOND and max(drawn) > 4 * MINUTE + 50 * SECOND and len(set(drawn)) > 490
    assert spread(schedule(cron="0 * * * *"), "tenant/job") == timedelta(0)


def test_h_follows_from_the_job() -> None:
    made = schedule(cron="H H * * *")
    times = {timetable(made, NOW, f"t/{i}").next_after(NOW) for i in range(50)}
    assert len(times) > 40
    assert timetable(made, NOW, "t/1").next_after(NOW) == timetable(made, NOW + DAY, "t/1").next_after(NOW)
    assert (hashes(made), hashes(schedule(cron="0 9 * * THU"))) == (True, False)


def test_a_rule_begins_with_the_job_or_when_told() -> None:
    rule = schedule(rrule="FREQ=DAILY;COUNT=2")
    assert first_fire(rule, NOW) == NOW
    assert timetable(rule, NOW + SECOND / 2).next_after(NOW) == NOW + SECOND
    late = schedule(rrule="FREQ=DAILY;COUNT=2", starting_at="2026-07-01T00:00:00Z")
    table = timetable(late, NOW)
    assert table.count(NOW, NOW + 400 * DAY) == 2
    assert table.next_after(NOW) == datetime(2026, 7, 1, tzinfo=UTC)


def test_first_fire_of_each_kind() -> None:
    assert first_fire(None, NOW) == NOW
    assert first_fire(schedule(manual=True), NOW) is None
    assert first_fire(schedule(delay="PT10M"), NOW) == NOW + 10 * MINUTE
    assert first_fire(schedule(at="2026-06-01T13:00:00Z"), NOW) == NOW.replace(hour=13, second=0)
    assert first_fire(schedule(at="2026-06-01T11:30:00Z"), NOW) == NOW
    assert first_fire(schedule(cron="* * * * *"), NOW) == NOW.replace(minute=1, second=0)
    assert first_fire(schedule(cron="0 12 * * *", starting_at="2026-06-03T12:00:00Z"), NOW) == datetime(
        2026, 6, 3, 12, tzinfo=UTC
    )
    assert first_fire(schedule(every="PT5M"), NOW) == NOW + 5 * MINUTE
    assert first_fire(schedule(every="PT5M", starting_at="2026-06-01T12:00:30Z"), NOW) == NOW
    assert first_fire(schedule(every="PT5M", starting_at="2026-06-01T12:00:00Z"), NOW) == NOW + 4.5 * MINUTE


def test_a_one_time_job_owes_once() -> None:
    for made in (None, schedule(delay="PT0S"), schedule(at="2026-06-01T12:00:30Z")):
        table = timetable(made, NOW)
        assert due_between(table, NOW, NOW + DAY, 10) == ([NOW], None)
    assert timetable(schedule(manual=True), NOW).next_after(NOW) is None


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "path", "code"),
    [
        ({"cron": "0 9 * * *", "timezone": "utc"}, "schedule.timezone", "unknown_timezone"),
        ({"at": "2026-06-02T00:00:00Z", "timezone": "America"}, "schedule.timezone", "unknown_timezone"),
        ({"cron": "* * * *"}, "schedule.cron", "invalid_cron"),
        ({"cron": "*/61 * * * *"}, "schedule.cron", "invalid_cron"),
        ({"cron": "0 0 31 2 *"}, "schedule.cron", "never_fires"),
        ({"at": "2026-06-01T11:00:29Z"}, "schedule.at", "in_the_past"),
        ({"at": "2016-06-01T11:00:29Z"}, "schedule.at", "in_the_past"),
        ({"every": "999ms"}, "schedule.every", "invalid"),
        ({"every": "PT0S"}, "schedule.every", "invalid"),
        ({"delay": "P3661D"}, "schedule.delay", "invalid"),
        ({"at": "2026-06-02T00:00:00Z", "starting_at": "2026-06-02T00:00:00Z"}, "schedule.starting_at", "invalid"),
        ({"manual": True, "starting_at": "2026-06-02T00:00:00Z"}, "schedule.starting_at", "invalid"),
        ({"delay": "PT1M", "until": "2026-06-02T00:00:00Z"}, "schedule.until", "invalid"),
        ({"text": "tomorrow at noon", "jitter": "PT1M"}, "schedule.jitter", "invalid"),
        ({"every": "PT1M", "jitter": "PT0S"}, "schedule.jitter", "invalid"),
        ({"every": "PT1M", "jitter": "P2D"}, "schedule.jitter", "invalid"),
        ({"every": "PT1M", "until": "2026-06-01T12:00:31Z"}, "schedule.until", "never_fires"),
        ({"cron": "0 9 * * *", "until": "2020-06-02T00:00:00Z"}, "schedule.until", "never_fires"),
        (
            {"every": "PT1M", "starting_at": "2027-01-01T00:00:00Z", "until": "2026-07-01T00:00:00Z"},
            *("schedule.until", "invalid"),
        ),
        ({"rrule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"}, "schedule.rrule", "never_fires"),
        ({"rrule": "FREQ=DAILY;UNTIL=20200101"}, "schedule.rrule", "never_fires"),
        ({"rrule": "FREQ=NEVER"}, "schedule.rrule", "invalid_rrule"),
        ({"interval": "R3/2020-01-01/P1D"}, "schedule.interval", "never_fires"),
        ({"text": "on 2020-01-01 at 9:00"}, "schedule.text", "in_the_past"),
        ({"text": "in 999999 weeks"}, "schedule.text", "invalid"),
        (
            {"text": "on 2027-03-14 at 2:30", "timezone": "America/New_York", "dst": {"gap": "skip"}},
            *("schedule.text", "never_fires"),
        ),
    ],
)
def test_refuses_and_names_the_field(given: dict[str, Any], path: str, code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_schedule(schedule(**given), NOW)
    assert caught.value.code == code
    assert caught.value.errors is not None
    assert [(e["path"], e["code"]) for e in caught.value.errors] == [(path, code)]


@pytest.mark.parametrize(
    "given",
    [
        {"manual": True},
        {"at": "2026-06-01T11:00:30Z"},
        {"at": "1970-01-01T00:00:00Z", "misfire": {"window": "P36500D"}},
        {"delay": "P3650D"},
        {"every": "PT1S", "starting_at": "1970-01-01T00:00:00Z"},
        {"cron": "0 9 * * MON-FRI", "timezone": "America/New_York"},
    ],
)
def test_takes_what_is_right(given: dict[str, Any]) -> None:
    check_schedule(schedule(**given), NOW)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "once, now"),
        ({"manual": True}, "by hand only"),
        ({"at": "2026-06-01T13:00:00Z"}, "once at 2026-06-01T13:00:00.000000Z"),
        ({"delay": "PT10M"}, "once, 10 minutes from now"),
        ({"delay": "PT0S"}, "once, 0 seconds from now"),
        ({"every": "PT5M"}, "every 5 minutes"),
        ({"every": "PT1H"}, "every hour"),
        (
            {"every": "PT1H", "starting_at": "2026-06-01T13:00:00Z", "until": "2026-07-01T13:00:00Z", "jitter": "5m"},
            "every hour, starting at 2026-06-01T13:00:00.000000Z, until 2026-07-01T13:00:00.000000Z, "
            "each run up to 5 minutes later",
        ),
        ({"rrule": "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=18;BYMINUTE=0"}, "every month on the last Friday at 18:00 (UTC)"),
        (
            {"rrule": "FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,FR;COUNT=5"},
            "every 2 weeks on Monday and Friday at the time of day of its start, 5 times (UTC)",
        ),
        (
            {"rrule": "FREQ=YEARLY;BYMONTH=1,7;BYMONTHDAY=1;BYHOUR=9,10,11;BYMINUTE=0,5,10;UNTIL=20300101"},
            "every year on the 1st day of the month in January and July at minute 0, 5 and 10 at hour 9-11, "
            "until 2030-01-01 (UTC)",
        ),
        (
            {"rrule": "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1;BYHOUR=9;BYMINUTE=0"},
            "every month on Monday, Tuesday, Wednesday, Thursday and Friday at 09:00 "
            "only the last of these each month (UTC)",
        ),
        ({"every": "P1DT1H5M1.5S"}, "every 1 day, 1 hour, 5 minutes and 1.5 seconds"),
        ({"cron": "0 9 * * MON-FRI", "timezone": "Asia/Tokyo"}, "at 09:00 on Monday through Friday (Asia/Tokyo)"),
    ],
)
def test_describes_in_plain_words(given: dict[str, Any] | None, words: str) -> None:
    assert describe(None if given is None else schedule(**given)) == words


# ── late occurrences ─────────────────────────────────────────────────────────────────────────────────────────────


def plan(made: Schedule, cursor: datetime, now: datetime = NOW) -> Planned:
    """Plan after an outage that began before the cursor and ends now."""
    outage = Outage(cursor - MINUTE, now)
    return plan_occurrences(made, timetable(made, cursor - HOUR), cursor, now + HORIZON, [outage], 100_000)


def minute(hour: int, minute: int) -> datetime:
    return NOW.replace(hour=hour, minute=minute, second=0)


def test_latest_stages_the_newest_and_counts_the_others() -> None:
    got = plan(schedule(cron="5/10 * * * *"), minute(9, 5))
    assert got == Planned(
        [minute(11, 55)],
        [
            Missed("misfire_expired", 12, minute(9, 5), minute(10, 55)),
            Missed("coalesced", 5, minute(11, 5), minute(11, 45)),
        ],
        minute(12, 5),
    )


def test_latest_is_the_last_one_before_the_end_of_the_outage() -> None:
    got = plan(schedule(cron="* * * * *"), minute(9, 0))
    assert got == Planned(
        [minute(12, 0)],
        [
            Missed("misfire_expired", 121, minute(9, 0), minute(11, 0)),
            Missed("coalesced", 59, minute(11, 1), minute(11, 59)),
        ],
        minute(12, 1),
    )


def test_all_stages_the_newest_up_to_max() -> None:
    got = plan(schedule(cron="*/10 * * * *", misfire={"policy": "all", "max": 2}), minute(9, 0))
    assert got == Planned(
        [minute(11, 50), minute(12, 0)],
        [Missed("misfire_expired", 17, minute(9, 0), minute(11, 40))],
        minute(12, 10),
    )


def test_skip_counts_them_all() -> None:
    got = plan(schedule(cron="*/10 * * * *", misfire={"policy": "skip"}), minute(11, 40))
    assert got == Planned([], [Missed("misfire_expired", 3, minute(11, 40), minute(12, 0))], minute(12, 10))


def test_a_one_time_job_found_late() -> None:
    for made, staged in ((schedule(at="2026-06-01T11:30:00Z"), True), (schedule(at="2026-06-01T10:30:00Z"), False)):
        assert made.at is not None
        at = made.at.at
        missed = [] if staged else [Missed("misfire_expired", 1, at, at)]
        assert plan(made, at) == Planned([at] if staged else [], missed, None)


@pytest.mark.parametrize("late", [timedelta(0), 5 * MINUTE, DAY])
@pytest.mark.parametrize("apart", [-SECOND / 100, timedelta(0), SECOND / 100])
def test_a_one_time_job_owes_its_cursor_only_whatever_made_it(apart: timedelta, late: timedelta) -> None:
    made = schedule(delay="PT10M")
    cursor = NOW - late
    table, outage = timetable(made, cursor + apart - 10 * MINUTE), Outage(cursor - MINUTE, NOW)
    got = plan_occurrences(made, table, cursor, NOW + HORIZON, [outage])
    assert len(got.stage) + sum(m.count for m in got.missed) == 1
    assert got.cursor is None


def test_without_an_outage_nothing_is_missed_however_late_it_is() -> None:
    made = schedule(cron="* * * * *", misfire={"policy": "skip"})
    got = plan_occurrences(made, timetable(made, minute(9, 0)), minute(10, 0), NOW + HORIZON)
    assert got == Planned([minute(10, 0) + i * MINUTE for i in range(121)], [], minute(12, 1))


def test_only_what_fell_due_during_an_outage_is_missed() -> None:
    made = schedule(cron="*/10 * * * *", misfire={"policy": "skip"})
    table = timetable(made, minute(9, 0))
    two = [Outage(minute(10, 0), minute(10, 30)), Outage(minute(11, 5), minute(11, 35))]
    got = plan_occurrences(made, table, minute(9, 40), NOW + HORIZON, two)
    staged = [(9, 40), (9, 50), (10, 30), (10, 40), (10, 50), (11, 0), (11, 40), (11, 50), (12, 0)]
    assert got == Planned(
        [minute(*at) for at in staged],
        [
            Missed("misfire_expired", 3, minute(10, 0), minute(10, 20)),
            Missed("misfire_expired", 3, minute(11, 10), minute(11, 30)),
        ],
        minute(12, 10),
    )


def test_a_cursor_beyond_the_horizon_stays() -> None:
    assert plan(schedule(cron="* * * * *"), minute(12, 30)) == Planned([], [], minute(12, 30))


def test_a_cursor_the_timetable_no_longer_names_is_still_owed_once() -> None:
    stray = minute(11, 0) + 17 * SECOND
    got = plan(schedule(cron="0 * * * *", misfire={"policy": "skip"}), stray)
    assert got == Planned([], [Missed("misfire_expired", 2, stray, minute(12, 0))], minute(13, 0))


def test_a_year_of_missed_minutes_is_counted_exactly() -> None:
    for zone in ("UTC", "America/New_York", "Australia/Lord_Howe"):
        got = plan(schedule(cron="* * * * *", timezone=zone), NOW.replace(second=0) - 365 * DAY)
        assert sum(m.count for m in got.missed) + len(got.stage) == 365 * 1440 + 1


def test_a_century_of_missed_seconds_is_arithmetic() -> None:
    got = plan(schedule(every="PT1S", misfire={"policy": "all", "max": 10_000}), NOW - 36_500 * DAY)
    assert sum(m.count for m in got.missed) + len(got.stage) == 36_500 * 86_400 + 11


@st.composite
def outages_of_an_afternoon(draw: st.DrawFn) -> list[Outage]:
    """Return some outages before NOW."""
    starts = draw(st.lists(st.timedeltas(timedelta(0), 3 * HOUR), max_size=4))
    lengths = draw(st.lists(st.timedeltas(MINUTE, 2 * HOUR), min_size=len(starts), max_size=len(starts)))
    spans = zip(starts, lengths, strict=True)
    return merge_outages(Outage(NOW - ago, min(NOW, NOW - ago + length)) for ago, length in spans if ago)


@given(pair=recurring(), ago=st.timedeltas(-2 * HORIZON, 3 * HOUR), outages=outages_of_an_afternoon())
@settings(max_examples=200)
def test_each_owed_occurrence_has_exactly_one_fate(
    pair: tuple[Schedule, Timetable], ago: timedelta, outages: list[Outage]
) -> None:
    made, table = pair
    cursor = table.next_after(NOW - ago)
    assert cursor is not None
    got = plan_occurrences(made, table, cursor, NOW + HORIZON, outages, most=100_000)
    owed, following = due_between(table, cursor, NOW + HORIZON, 1_000_000)
    assert (got.cursor, got.kept_until) == (following, None)
    assert got == Planned(*by_the_rule(made.misfire, owed, outages), following)


def by_the_rule(rule: Misfire, owed: list[datetime], outages: list[Outage]) -> tuple[list[datetime], list[Missed]]:
    """Return the staged and the missed occurrences, computed one by one."""
    staged = [at for at in owed if not any(o.start <= at < o.end for o in outages)]
    missed: list[Missed] = []
    for outage in outages:
        mine = [at for at in owed if outage.start <= at < outage.end]
        recent = [at for at in mine if at >= outage.end - rule.window.delta]
        kept = {"latest": recent[-1:], "all": recent[-rule.max :], "skip": []}[rule.policy]
        staged += kept
        if rule.policy == "latest":
            rows = [("misfire_expired", mine[: len(mine) - len(recent)]), ("coalesced", recent[:-1])]
        else:
            rows = [("misfire_expired", mine[: len(mine) - len(kept)])]
        missed += [Missed(reason, len(left), left[0], left[-1]) for reason, left in rows if left]
    return sorted(staged), missed


@given(
    pair=recurring(),
    ago=st.timedeltas(timedelta(0), 3 * HOUR),
    outages=outages_of_an_afternoon(),
    pieces=st.lists(st.integers(1, 50), min_size=1),
)
@settings(max_examples=200)
def test_many_turns_give_the_result_of_one_turn(
    pair: tuple[Schedule, Timetable], ago: timedelta, outages: list[Outage], pieces: list[int]
) -> None:
    """The time between the turns does not matter, and neither does a planner that forgets earlier decisions."""
    made, table = pair
    first = table.next_after(NOW - ago)
    assert first is not None
    whole = plan_occurrences(made, table, first, NOW + HORIZON, outages, most=1_000_000)
    stage: list[datetime] = []
    missed: list[Missed] = []
    cursor: datetime | None = first
    kept_until: datetime | None = None
    for turn in itertools.count():
        assert cursor is not None
        piece = pieces[turn % len(pieces)]
        got = plan_occurrences(made, table, cursor, NOW + HORIZON, outages, piece, kept_until)
        assert len(got.stage) <= piece
        stage, missed = stage + got.stage, missed + got.missed
        cursor, kept_until = got.cursor, got.kept_until if turn % 3 else None
        if got.kept_until is None:
            break
        assert got.stage or got.missed, "each turn gets on"
    assert (stage, missed, cursor) == (whole.stage, whole.missed, whole.cursor)


def test_the_newest_of_very_many_are_found_without_a_step_for_each() -> None:
    class Counting(Every):
        steps = 0

        def count(self, after: datetime, before: datetime) -> int:
            Counting.steps += 1
            return super().count(after, before)

        def last_before(self, instant: datetime, not_before: datetime) -> datetime | None:
            Counting.steps += 1
            return super().last_before(instant, not_before)

    made = schedule(every="PT1S", misfire={"policy": "all", "max": 10_000, "window": "P30D"})
    first = NOW - 20 * DAY
    got = plan_occurrences(made, Counting(first, SECOND), first, NOW, [Outage(first, NOW)], most=1)
    assert got.stage == [NOW - 10_000 * SECOND]
    assert [(row.reason, row.count) for row in got.missed] == [("misfire_expired", 20 * 86_400 - 10_000)]
    assert (got.cursor, got.kept_until) == (NOW - 9_999 * SECOND, NOW)
    assert Counting.steps < 200


def test_outages_that_touch_are_one() -> None:
    a, b, c, d = (NOW + i * HOUR for i in range(4))
    assert merge_outages([Outage(c, d), Outage(a, b), Outage(b, c)]) == [Outage(a, d)]
    assert merge_outages([Outage(a, c), Outage(b, c), Outage(a, b)]) == [Outage(a, c)]
    assert merge_outages([Outage(c, d), Outage(a, b)]) == [Outage(a, b), Outage(c, d)]


def test_no_more_than_asked_for_at_once() -> None:
    made = schedule(every="PT1S")
    table = timetable(made, NOW - SECOND)
    got = plan_occurrences(made, table, NOW, NOW + HOUR, most=5)
    after = NOW + 5 * SECOND
    assert got == Planned([NOW + i * SECOND for i in range(5)], [], after, after)
