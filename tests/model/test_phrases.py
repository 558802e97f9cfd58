"""Plain English: what is read, as what; what is refused, with which advice; and that a reading reads the same again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.errors import InvalidInput
from tocsin.model.job import Schedule
from tocsin.model.phrases import Unclear, is_once, parse
from tocsin.model.schedule import check_schedule, describe, timetable
from tocsin.model.zones import zone

NOW = datetime(2026, 6, 3, 12, 0, tzinfo=UTC)  # a Wednesday


def owed(text: str, most: int, timezone: str = "UTC") -> list[str]:
    table, out, at = timetable(Schedule(text=text, timezone=timezone), NOW), [], NOW
    while len(out) < most and (found := table.next_after(at)) is not None:
        out.append(found.astimezone(zone(timezone)).strftime("%m-%d %H:%M"))
        at = found
    return out


@pytest.mark.parametrize(
    ("text", "understood", "first"),
    [
        ("every weekday at 9am", "every weekday at 09:00", ["06-04 09:00", "06-05 09:00", "06-08 09:00"]),
        ("Every Weekday at 9 AM.", "every weekday at 09:00", ["06-04 09:00"]),
        ("weekdays at 5:30 p.m.", "every weekday at 17:30", ["06-03 17:30"]),
        (
            "every 15 minutes between 9:00 and 17:00 on weekdays",
            "every 15 minutes from 09:00 until before 17:00 on weekdays",
            ["06-03 12:15", "06-03 12:30"],
        ),
        (
            "every 2 hours between 8:00 and 15:00",
            "every 2 hours from 08:00 until before 15:00",
            ["06-03 14:00", "06-04 08:00"],
        ),
        (
            "every hour between 22:00 and 2:00",
            "every hour from 22:00 until before 02:00",
            ["06-03 22:00", "06-03 23:00"],
        ),
        ("last friday of the month at 6pm", "last Friday of every month at 18:00", ["06-26 18:00", "07-31 18:00"]),
        ("tomorrow at noon", "tomorrow at 12:00", ["06-04 12:00"]),
        ("today at 18:00", "today at 18:00", ["06-03 18:00"]),
        ("every day at 9:00 and 17:30", "every day at 09:00 and 17:30", ["06-03 17:30", "06-04 09:00", "06-04 17:30"]),
        ("every monday and thursday at 08:15", "every Monday and Thursday at 08:15", ["06-04 08:15", "06-08 08:15"]),
        ("first monday of every month at 10am", "first Monday of every month at 10:00", ["07-06 10:00"]),
        ("every second friday of the month at 9:00", "second Friday of every month at 09:00", ["06-12 09:00"]),
        (
            "on the 1st and 15th at midnight",
            "on the 1st and 15th of every month at 00:00",
            ["06-15 00:00", "07-01 00:00"],
        ),
        ("monthly on the last day at 9:00", "on the last day of every month at 09:00", ["06-30 09:00", "07-31 09:00"]),
        ("every month on the last friday at 9:00", "last Friday of every month at 09:00", ["06-26 09:00"]),
        (
            "last weekday of the month at 9:30 and 17:00",
            "last weekday of every month at 09:30 and 17:00",
            ["06-30 09:30", "06-30 17:00", "07-31 09:30"],
        ),
        ("every 2 hours", "every 2 hours", ["06-03 14:00", "06-03 16:00"]),
        ("every 7 minutes", "every 7 minutes", ["06-03 12:07"]),
        ("every minute on mondays", "every minute on Mondays", ["06-08 00:00"]),
        ("hourly", "hourly", ["06-03 13:00"]),
        ("daily at noon", "every day at 12:00", ["06-04 12:00"]),
        ("in 10 minutes", "in 10 minutes", ["06-03 12:10"]),
        ("on 2026-12-24 at 18:00", "on 2026-12-24 at 18:00", ["12-24 18:00"]),
        ("every january 1st at 00:00", "every January 1st at 00:00", ["01-01 00:00"]),
        ("every year on july 4th at 9am", "every July 4th at 09:00", ["07-04 09:00"]),
        ("every weekend at 10:00", "every weekend at 10:00", ["06-06 10:00", "06-07 10:00", "06-13 10:00"]),
        (
            "every monday to wednesday at 0:30",
            "every Monday, Tuesday and Wednesday at 00:30",
            ["06-08 00:30", "06-09 00:30"],
        ),
        ("every week on friday at 9:00", "every Friday at 09:00", ["06-05 09:00"]),
        ("every 2 weeks on monday at 9:00", "every 2 weeks on Mondays at 09:00", ["06-15 09:00", "06-29 09:00"]),
        ("every 2 days at 13:00", "every 2 days at 13:00", ["06-03 13:00", "06-05 13:00"]),
        ("every 3 months on the 1st at 9am", "every 3 months on the 1st at 09:00", ["09-01 09:00", "12-01 09:00"]),
        ("every day at 12:30am", "every day at 00:30", ["06-04 00:30"]),
        ("every day at 21", "every day at 21:00", ["06-03 21:00"]),
    ],
)
def test_what_is_understood(text: str, understood: str, first: list[str]) -> None:
    assert str(parse(text)) == understood
    assert parse(understood) == parse(text)
    assert owed(text, len(first)) == first
    check_schedule(Schedule(text=text), NOW)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("every weekend at 10", "10am"),
        ("every day at 12pm", "noon or midnight"),
        ("every day", "every day at 9:00"),
        ("daily", "every day at 9:00"),
        ("monthly", "on the 1st"),
        ("weekly", "every monday"),
        ("every other day at 9:00", "every 2 days"),
        ("every other monday at 9:00", "every 2 weeks on monday"),
        ("every second friday at 9:00", "every 2 weeks on friday"),
        ("monthly on the 31st at 9:00", "last day of the month"),
        ("on the 32nd at 9:00", "no month"),
        ("every february 29th at 9:00", "february 28th"),
        ("every june 31st at 9:00", "no 31st"),
        ("fifth friday of the month at 9:00", "last friday"),
        ("last friday at 9:00", "of the month"),
        ("on monday at 9:00", "every monday"),
        ("next monday at 9:00", "on 2026-12-24"),
        ("every 2 weeks at 9:00", "on monday"),
        ("every 7 minutes on weekdays", "multiple"),
        ("every 15 minutes between 9:30 and 17:00", "whole hours"),
        ("every 15 minutes between 9:00 and 9:00", "whole day"),
        ("every hour between 22:00 and 6:00 on mondays", "midnight"),
        ("every 2 hours at 9:00", "cron"),
        ("tomorrow at 9:00 and 10:00", "one time"),
        ("tomorrow", "tomorrow at 9:00"),
        ("on 2026-02-30 at 9:00", "exists"),
        ("every day at 25:00", "time of day"),
        ("every day at 13pm", "1 to 12"),
        ("every 0 minutes", "0"),
        ("on the 1th at 9:00", "1st"),
        ("every day at 9:00 please", "not understood at 'please'"),
        ("whenever", "not understood"),
        ("every day at 9:00; drop table", "words, numbers"),
        ("", "not understood"),
        ("every day at", "not understood at its end"),
        ("at 9:00", "not understood"),
    ],
)
def test_what_is_refused_says_how_to_write_it(text: str, advice: str) -> None:
    with pytest.raises(Unclear, match=advice):
        parse(text)
    with pytest.raises(InvalidInput) as caught:
        check_schedule(Schedule(text=text), NOW)
    assert (caught.value.code, is_once(text)) == ("unclear_text", False)


WORDS = st.sampled_from(
    [
        *(
            "every",
            "each",
            "on",
            "at",
            "the",
            "of",
            "in",
            "and",
            ",",
            "between",
            "from",
            "to",
            "until",
            "before",
            "other",
        ),
        *("1st", "4th", "15th", "31st", "last", "first", "second", "third", "next", "2", "15", "30", "2026-12-24"),
        *(
            "weekday",
            "weekdays",
            "weekend",
            "monday",
            "fridays",
            "day",
            "days",
            "week",
            "weeks",
            "month",
            "hours",
            "hour",
        ),
        *("minutes", "9:00", "17:30", "9am", "12pm", "noon", "midnight", "tomorrow", "today", "daily", "hourly"),
        *("monthly", "yearly", "january", "july"),
    ]
)


@given(st.lists(WORDS, min_size=1, max_size=9).map(" ".join) | st.text(max_size=40))
@settings(max_examples=1500)
def test_whatever_is_read_reads_the_same_again(text: str) -> None:
    try:
        phrase = parse(text)
    except Unclear:
        return
    assert parse(str(phrase)) == phrase
    assert is_once(text) == phrase.once
    assert describe(Schedule(text=text))


@given(
    days=st.sampled_from(
        ["every day", "every weekday", "every Monday and Friday", "on the 1st and last day of the month"]
    ),
    times=st.sets(st.tuples(st.integers(0, 23), st.integers(0, 59)), min_size=1, max_size=5),
)
@settings(max_examples=100)
def test_exactly_the_times_that_were_said(days: str, times: set[tuple[int, int]]) -> None:
    text = f"{days} at " + ", ".join(f"{h}:{m:02}" for h, m in times)
    found = {moment.split()[1] for moment in owed(text, 4 * len(times))}
    assert found == {f"{h:02}:{m:02}" for h, m in times}


def test_one_time_phrases_count_from_when_they_were_said_in_their_zone() -> None:
    late = datetime(2026, 6, 3, 23, 30, tzinfo=UTC)  # the 4th in Tokyo
    table = timetable(Schedule(text="tomorrow at noon", timezone="Asia/Tokyo"), late)
    assert table.next_after(late) == datetime(2026, 6, 5, 3, tzinfo=UTC)
    assert timetable(Schedule(text="in 90 minutes"), late).next_after(late) == late + timedelta(minutes=90)
    with pytest.raises(InvalidInput) as caught:
        check_schedule(Schedule(text="today at 9:00"), late)
    assert caught.value.code == "in_the_past"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("every weekday at 9am", "every weekday at 09:00 (Asia/Tokyo)"),
        ("every 2 hours", "every 2 hours"),
        ("in 10 minutes", "once, in 10 minutes, seen from when it was made"),
        ("tomorrow at noon", "once, tomorrow at 12:00 (Asia/Tokyo), seen from when it was made"),
        ("on 2026-12-24 at 18:00", "once, on 2026-12-24 at 18:00 (Asia/Tokyo)"),
    ],
)
def test_a_job_answers_what_was_understood(text: str, words: str) -> None:
    assert describe(Schedule(text=text, timezone="Asia/Tokyo")) == words
