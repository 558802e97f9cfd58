"""iCalendar: the days that events touch, and a clear word about what cannot be read."""

from __future__ import annotations

import contextlib
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import at_most
from tocsin.model.ical import LONGEST_TEXT, MOST_STEPS, BadCalendar, days_of

TODAY = date(2026, 6, 1)


def calendar(*events: str) -> str:
    whole = "".join(f"BEGIN:VEVENT\r\nUID:{i}@x\r\n{e}\r\nEND:VEVENT\r\n" for i, e in enumerate(events))
    return f"BEGIN:VCALENDAR\r\nVERSION:2.0\r\nPRODID:-//x//y//EN\r\n{whole}END:VCALENDAR\r\n"


@pytest.mark.parametrize(
    ("event", "days"),
    [
        ("DTSTART;VALUE=DATE:20261225", ["2026-12-25"]),
        ("DTSTART;VALUE=DATE:20261225\r\nDTEND;VALUE=DATE:20261227", ["2026-12-25", "2026-12-26"]),
        ("DTSTART;VALUE=DATE:20261225\r\nDURATION:P2D", ["2026-12-25", "2026-12-26"]),
        ("DTSTART;TZID=Europe/Berlin:20261224T180000\r\nDTEND:20261225T020000", ["2026-12-24", "2026-12-25"]),
        ("DTSTART:20261224T000000Z\r\nDTEND:20261225T000000Z", ["2026-12-24"]),
        ('DTSTART;X-A="a:b;c":20261224T000000Z\r\nSUMMARY:Heiligabend\\, um\r\n  sechs', ["2026-12-24"]),
        ("DTSTART:20261224\r\nSTATUS:CANCELLED", []),
        ("DTSTART:20261225\r\nRRULE:FREQ=YEARLY;COUNT=3", ["2026-12-25", "2027-12-25", "2028-12-25"]),
        ("DTSTART:20261225\r\nRRULE:FREQ=YEARLY;UNTIL=20271231", ["2026-12-25", "2027-12-25"]),
        (
            "DTSTART:20261225\r\nRRULE:FREQ=YEARLY;COUNT=3\r\nEXDATE:20271225\r\nRDATE:20270101,20270102",
            ["2026-12-25", "2027-01-01", "2027-01-02", "2028-12-25"],
        ),
        ("DTSTART:20261126\r\nRRULE:FREQ=YEARLY;BYMONTH=11;BYDAY=4TH;COUNT=2", ["2026-11-26", "2027-11-25"]),
        ("DTSTART:20261126\r\nBEGIN:VALARM\r\nTRIGGER:-PT15M\r\nDTSTART:20200101\r\nEND:VALARM", ["2026-11-26"]),
    ],
)
def test_days_of_an_event(event: str, days: list[str]) -> None:
    assert [day.isoformat() for day in days_of(calendar(event), TODAY, 100)] == days


def test_a_repetition_without_an_end_goes_on_for_fifty_years() -> None:
    days = days_of(calendar("DTSTART:20001225\r\nRRULE:FREQ=YEARLY"), TODAY, 100)
    assert (days[0].year, days[-1].year, len(days)) == (2000, 2075, 76)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "line 1: must be NAME:value"),
        ("DTSTART:20261225", "line 1: must stand inside"),
        ("BEGIN:VCALENDAR\nBEGIN:VEVENT\n", "must not end before END:VEVENT"),
        ("BEGIN:VCALENDAR\nEND:VEVENT\n", "line 2: END must follow"),
        (calendar("SUMMARY:x"), "must have a DTSTART"),
        (calendar("DTSTART:99991231"), "line 6: DTSTART must be a date"),
        (calendar("DTSTART:20261325"), "line 6: DTSTART must be a date"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=NEVER"), "line 7: "),
        (calendar("DTSTART:20261225\r\nDURATION:long"), "line 7: DURATION"),
        (calendar("DTSTART:20261225\r\nDTEND:20291225"), "line 6: an event must last at most"),
        (calendar("DTSTART:20261225\r\nRECURRENCE-ID:20261225"), "line 7: must not change single days"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=DAILY"), "at most 100 days"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=SECONDLY;COUNT=1"), "line 7: FREQ must be DAILY, WEEKLY"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=MINUTELY"), "line 7: FREQ must be DAILY, WEEKLY"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=HOURLY;COUNT=2"), "line 7: FREQ must be DAILY, WEEKLY"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=DAILY;BYHOUR=1,2"), "line 7: must not have BYHOUR"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, why: str) -> None:
    with pytest.raises(BadCalendar, match=why):
        days_of(text, TODAY, 100)


@given(st.lists(st.sampled_from([*calendar("DTSTART:20261225\r\nRRULE:FREQ=YEARLY").split("\r\n"), "", " x", ":"])))
def test_nothing_but_days_or_a_refusal(lines: list[str]) -> None:
    with contextlib.suppress(BadCalendar):
        days_of("\n".join(lines), TODAY, 100)


def repeated(count: int, rule: str) -> str:
    """Return events of one rule, each with its own start."""
    return calendar(*(f"DTSTART:19{i % 90 + 10}{i % 12 + 1:02}15\r\nRRULE:{rule}" for i in range(count)))


WEEK = "MO,TU,WE,TH,FR,SA,SU"
WORST = {
    "every second": calendar("DTSTART:20260101\r\nRRULE:FREQ=SECONDLY"),
    "many equal events": calendar(*["DTSTART:20260101\r\nRRULE:FREQ=DAILY;COUNT=9999"] * 300),
    "every day of a century": repeated(5000, "FREQ=DAILY;COUNT=9999"),
    "dates that never come": repeated(5000, "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30,-30"),
    "months that never come": repeated(5000, "FREQ=MONTHLY;INTERVAL=12;BYMONTH=1,2"),
    "weeks that never come": repeated(5000, "FREQ=YEARLY;BYWEEKNO=53;BYMONTH=6;BYDAY=MO;WKST=SU"),
    "choices that never come": repeated(5000, f"FREQ=YEARLY;BYDAY={WEEK};BYMONTH=2;BYMONTHDAY=-30;BYSETPOS=-1"),
    "choices of whole years": repeated(5000, f"FREQ=YEARLY;BYDAY={WEEK};BYSETPOS=-366,-1"),
    "long events": calendar("DTSTART:20260101\r\nDURATION:P366D\r\nRRULE:FREQ=DAILY;COUNT=9000"),
    "lists of days": calendar("DTSTART:20260101\r\nRDATE:" + ",".join(["20260101"] * 111_000)),
    "folded lines": calendar("DTSTART:20260101\r\nSUMMARY:x\r\n" + " y\n" * 330_000),
    "deep nesting": "BEGIN:V\n" * 124_000,
    "open quotes": calendar("DTSTART:20260101\r\nX;" + '"a' * 490_000),
    "parameters": calendar("DTSTART:20260101\r\nX" + ";" * 990_000),
}


@pytest.mark.parametrize("text", WORST.values(), ids=WORST)
def test_the_work_is_bounded_for_the_worst_files(text: str) -> None:
    """A step of the file's budget is about 25 calls, and a line of the file about 20. The budget here is a quarter."""
    with at_most(2_500_000), contextlib.suppress(BadCalendar):
        days_of(text[:LONGEST_TEXT], TODAY, 10_000, MOST_STEPS // 4)


def test_public_holidays_of_several_countries_fit() -> None:
    fixed = [f"DTSTART:1990{i % 12 + 1:02}{i % 28 + 1:02}\r\nRRULE:FREQ=YEARLY" for i in range(100)]
    moving = [f"DTSTART:1990{m:02}01\r\nRRULE:FREQ=YEARLY;BYMONTH={m};BYDAY=4TH" for m in range(1, 13)]
    assert len(days_of(calendar(*fixed, *moving), TODAY, 10_000)) > 1_000
