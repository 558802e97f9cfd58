"""iCalendar: the days that events touch, and a clear word about what cannot be read."""

from __future__ import annotations

import contextlib
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.ical import BadCalendar, days_of

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
        ("hello", "line 1: is not NAME:value"),
        ("DTSTART:20261225", "line 1: is not inside"),
        ("BEGIN:VCALENDAR\nBEGIN:VEVENT\n", "ends before END:VEVENT"),
        ("BEGIN:VCALENDAR\nEND:VEVENT\n", "line 2: END without"),
        (calendar("SUMMARY:x"), "no DTSTART"),
        (calendar("DTSTART:99991231"), "line 6: DTSTART is not a date"),
        (calendar("DTSTART:20261325"), "line 6: DTSTART is not a date"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=NEVER"), "line 7: "),
        (calendar("DTSTART:20261225\r\nDURATION:long"), "line 7: DURATION"),
        (calendar("DTSTART:20261225\r\nDTEND:20291225"), "line 6: lasts longer"),
        (calendar("DTSTART:20261225\r\nRECURRENCE-ID:20261225"), "line 7: single changes"),
        (calendar("DTSTART:20261225\r\nRRULE:FREQ=DAILY"), "more than 100 days"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, why: str) -> None:
    with pytest.raises(BadCalendar, match=why):
        days_of(text, TODAY, 100)


@given(st.lists(st.sampled_from([*calendar("DTSTART:20261225\r\nRRULE:FREQ=YEARLY").split("\r\n"), "", " x", ":"])))
def test_nothing_but_days_or_a_refusal(lines: list[str]) -> None:
    with contextlib.suppress(BadCalendar):
        days_of("\n".join(lines), TODAY, 100)
