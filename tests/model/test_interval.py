"""Repeating intervals: the calendar from the anchor, real time, and both ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tocsin.errors import InvalidInput
from tocsin.model.job import Dst, Schedule
from tocsin.model.schedule import check_schedule, describe, timetable
from tocsin.model.zones import zone

LONG_AGO = datetime(1970, 1, 2, tzinfo=UTC)


def owed(text: str, most: int = 99, timezone: str = "UTC", after: datetime = LONG_AGO, **dst: Any) -> list[str]:
    table = timetable(Schedule(interval=text, timezone=timezone, dst=Dst(**dst)), LONG_AGO)
    out, at = [], after
    while len(out) < most and (found := table.next_after(at)) is not None:
        out.append(found.astimezone(zone(timezone)).strftime("%Y-%m-%d %H:%M%z").removesuffix("+0000"))
        at = found
    return out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("R3/2026-01-01T00:00:00Z/P1D", ["2026-01-01 00:00", "2026-01-02 00:00", "2026-01-03 00:00"]),
        ("R4/2026-01-31/P1M", ["2026-01-31 00:00", "2026-02-28 00:00", "2026-03-31 00:00", "2026-04-30 00:00"]),
        ("R3/2024-02-29T12:00/P1Y", ["2024-02-29 12:00", "2025-02-28 12:00", "2026-02-28 12:00"]),
        ("R2/2026-01-01T00:00:00Z/PT36H", ["2026-01-01 00:00", "2026-01-02 12:00"]),
        ("R3/2026-01-01T00:00:00Z/P1DT12H", ["2026-01-01 00:00", "2026-01-02 12:00", "2026-01-04 00:00"]),
        ("R3/2026-01-01T00:00:00Z/2026-01-01T06:00:00Z", ["2026-01-01 00:00", "2026-01-01 06:00", "2026-01-01 12:00"]),
        ("R3/P1M/2026-03-31T09:00:00Z", ["2026-01-31 09:00", "2026-02-28 09:00", "2026-03-31 09:00"]),
        ("R2/PT1H/2026-03-31T09:00:00Z", ["2026-03-31 08:00", "2026-03-31 09:00"]),
        ("r2/2026-01-01t02:00:00+02:00/p1w", ["2026-01-01 00:00", "2026-01-08 00:00"]),
        ("R1/2026-01-01T00:00:00Z/P1Y2M3DT4H5M6S", ["2026-01-01 00:00"]),
    ],
)
def test_what_an_interval_owes(text: str, expected: list[str]) -> None:
    assert owed(text) == expected


def test_without_a_number_it_goes_on() -> None:
    late = datetime(2126, 3, 1, tzinfo=UTC)
    assert owed("R/2026-01-31T00:00:00Z/P1M", 2, after=late) == ["2126-03-31 00:00", "2126-04-30 00:00"]
    assert owed("R/P1M/2026-03-31T00:00:00Z", 99, after=datetime(2026, 1, 15, tzinfo=UTC)) == [
        "2026-01-31 00:00",
        "2026-02-28 00:00",
        "2026-03-31 00:00",
    ]


def test_days_follow_the_clock_and_hours_do_not() -> None:
    before = datetime(2026, 3, 7, tzinfo=UTC)
    new_york = {"timezone": "America/New_York", "after": before}
    first = "2026-03-07 09:00-0500"
    assert owed("R/2026-01-01T09:00:00-05:00/P1D", 2, **new_york) == [first, "2026-03-08 09:00-0400"]
    assert owed("R/2026-01-01T09:00:00-05:00/PT24H", 2, **new_york) == [first, "2026-03-08 10:00-0400"]
    in_gap = "R/2026-03-01T02:30/P1W"
    assert owed(in_gap, 1, **new_york) == ["2026-03-08 03:00-0400"]
    assert owed(in_gap, 1, **new_york, gap="skip") == ["2026-03-15 02:30-0400"]
    autumn = {"timezone": "America/New_York", "after": before + timedelta(238)}
    twice = owed("R/2026-10-25T01:30/P1W", 2, **autumn, overlap="both")
    assert twice == ["2026-11-01 01:30-0400", "2026-11-01 01:30-0500"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "P1D", "R/P1D", "R5/2026-01-01T00:00:00Z", "R/2026-01-01T00:00:00Z/P1D/x", "Rx/2026-01-01/P1D"),
        *("R0/2026-01-01/P1D", "R-1/2026-01-01/P1D", "R1000001/2026-01-01/P1D", "R/2026-02-30/P1D", "R/x/P1D"),
        *("R/2026-01-01/P", "R/2026-01-01/PT", "R/2026-01-01/P0D", "R/2026-01-01/PT0.5S", "R/2026-01-01/P51Y"),
        *("R/2026-01-01T00:00:00.5Z/P1D", "R/P1D/P1D", "R/2026-01-02/2026-01-01", "R/2026-01-01/2026-01-01"),
        *("R/1969-01-01/P1D", "R/2026-01-01/P99999999999999999999D", "R5/2026-01-01T25:00:00Z/P1D"),
    ],
)
def test_refuses_what_is_none(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_schedule(Schedule(interval=text), LONG_AGO)
    assert caught.value.code == "invalid_interval"


def test_one_that_is_over_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_schedule(Schedule(interval="R5/2026-01-01T00:00:00Z/P1D"), datetime(2026, 1, 6, tzinfo=UTC))
    assert caught.value.code == "never_fires"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("R5/2026-01-01T00:00:00Z/P1D", "5 times, every day, first at 2026-01-01T00:00:00Z (UTC)"),
        ("R/2026-01-01/P1M", "every month, first at 2026-01-01 (UTC)"),
        ("R/2026-01-01/P1Y6M", "every 1 year and 6 months, first at 2026-01-01 (UTC)"),
        ("R1/P2M10D/2026-01-01", "once, every 2 months and 10 days, last at 2026-01-01 (UTC)"),
        ("R/2026-01-01/2026-01-08", "from 2026-01-01 on, as often as from then to 2026-01-08 (UTC)"),
    ],
)
def test_in_words(text: str, words: str) -> None:
    assert describe(Schedule(interval=text)) == words
