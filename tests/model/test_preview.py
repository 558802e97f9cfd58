"""What a schedule would do, and what may surprise."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tests import PATIENCE
from tocsin.errors import InvalidInput
from tocsin.model.job import Schedule
from tocsin.model.preview import preview
from tocsin.model.scalars import decode_scalar

NOW = datetime(2026, 1, 15, 12, tzinfo=UTC)
NEW_YORK = {"timezone": "America/New_York"}


def look(count: int = 2, name: str | None = "job", **schedule: Any) -> Any:
    return preview(msgspec.convert(schedule, Schedule, dec_hook=decode_scalar), NOW, count, "acme", name)


def warned(**schedule: Any) -> list[str]:
    return [warning.partition(" (")[0] for warning in look(**schedule).warnings]


def test_words_and_instants() -> None:
    found = look(text="every weekday at 9am", **NEW_YORK)
    assert found.description == "every weekday at 09:00 (America/New_York)"
    assert found.runs == [datetime(2026, 1, day, 14, tzinfo=UTC) for day in (15, 16)]
    assert found.warnings == []
    assert look(at="2026-01-15T11:30:00Z").runs == [NOW]
    assert look(manual=True).runs == []
    assert len(look(99, interval="R5/2026-01-01T00:00:00Z/P1W").runs) == 2


@pytest.mark.parametrize("kind", [{"cron": "30 2 * * *"}, {"rrule": "FREQ=DAILY;BYHOUR=2;BYMINUTE=30"}])
def test_a_time_that_is_left_out(kind: dict[str, str]) -> None:
    assert warned(**kind, **NEW_YORK) == ["moved to 03:00 on 2026-03-08", "moved to 03:00 on 2027-03-14"]
    skip = warned(**kind, **NEW_YORK, dst={"gap": "skip"})
    assert skip == ["skipped on 2026-03-08", "skipped on 2027-03-14"]


@pytest.mark.parametrize("kind", [{"cron": "30 1 * * *"}, {"text": "every day at 1:30"}])
def test_a_time_that_comes_twice(kind: dict[str, str]) -> None:
    assert warned(**kind, **NEW_YORK) == []
    both = warned(**kind, **NEW_YORK, dst={"overlap": "both"})
    assert both == ["fires twice on 2026-11-01", "fires twice on 2027-11-07"]
    assert warned(**kind, **NEW_YORK, dst={"overlap": "both"}, until="2026-12-01T00:00:00Z") == both[:1]
    assert warned(cron="*/20 1 * * *", **NEW_YORK)[0] == "fires 6 times instead of 3 on 2026-11-01"


def test_a_gap_before_midnight_moves_to_the_next_day() -> None:
    assert warned(text="every saturday at 23:30", timezone="America/Nuuk")[0] == "moved to 00:00 on 2026-03-29"


def test_what_nobody_is_surprised_by() -> None:
    for schedule in (
        {"cron": "*/5 * * * *"},
        {"every": "PT1H"},
        {"cron": "0 9 * * *"},
        {"interval": "R/2026-01-01/PT1H"},
    ):
        assert warned(**schedule, **NEW_YORK) == []


def test_other_warnings() -> None:
    assert warned(cron="* * * * * *") == ["fires every second"]
    assert warned(every="PT1H", jitter="PT5M")[0].startswith("each run begins ")
    assert warned(cron="H * * * *") == []
    assert "name" in look(cron="H * * * *", name=None).warnings[0]
    assert "name" in look(every="PT1H", jitter="PT5M", name=None).warnings[0]


def test_refuses_what_a_job_would_be_refused_for() -> None:
    with pytest.raises(InvalidInput):
        look(cron="0 9 * * *", every="PT1H")
    with pytest.raises(InvalidInput):
        look(text="every other day at 9:00")
    with pytest.raises(InvalidInput):
        look(delay="PT1H", max_runs=3)


def test_no_more_is_shown_than_may_be() -> None:
    assert len(look(9, cron="0 9 * * *", max_runs=3).runs) == 3


@pytest.mark.parametrize(
    "schedule",
    [
        {"rrule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29;BYDAY=MO"},
        {"rrule": "FREQ=SECONDLY;INTERVAL=80003;BYHOUR=3;BYMINUTE=0"},
        {"cron": "0 0 29 2 *"},
    ],
)
def test_a_hundred_instants_of_anything_are_soon_found(schedule: dict[str, str]) -> None:
    started = time.process_time()
    assert 0 < len(look(100, **schedule, **NEW_YORK).runs) <= 100
    assert time.process_time() - started < PATIENCE, "hours, by trying one after the other"
