"""quotas: submissions come no faster than their rate and one burst, whatever their size, and never wait for ever."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.limits import Rate, parse_rate
from tocsin.model.quotas import Meter

START = datetime(2026, 12, 1, tzinfo=UTC)
calls = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3000)), min_size=1, max_size=60)


@given(calls, st.integers(1, 20), st.integers(1, 1000))
def test_no_more_than_the_rate_and_one_burst_before_the_last_call(
    calls: list[tuple[int, int]], burst: int, gap_ms: int
) -> None:
    rate, meter, now, passed = Rate(timedelta(milliseconds=gap_ms), burst), Meter(), START, 0
    for count, later in calls:
        now += timedelta(milliseconds=later)
        if not meter.wait(rate, count, now):
            # What had passed before this call, and the part of it that had to fit, is within the rate.
            assert passed + min(count, burst) <= burst + (now - START) / rate.gap + 1e-6
            meter.count(rate, count, now)
            passed += count


@given(calls, st.integers(1, 20), st.integers(1, 1000))
def test_who_waits_as_long_as_told_passes(calls: list[tuple[int, int]], burst: int, gap_ms: int) -> None:
    rate, meter, now = Rate(timedelta(milliseconds=gap_ms), burst), Meter(), START
    for count, later in calls:
        now += timedelta(milliseconds=later)
        now += meter.wait(rate, count, now)
        assert not meter.wait(rate, count, now)
        meter.count(rate, count, now)


def test_a_call_larger_than_a_burst_passes_and_makes_the_next_wait() -> None:
    rate, meter = parse_rate("10/s"), Meter()
    assert not meter.wait(rate, 100, START)
    meter.count(rate, 100, START)
    assert meter.wait(rate, 1, START) == timedelta(seconds=9.1)
