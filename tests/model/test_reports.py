"""The rules of reports: percentiles from buckets, stretches of time."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.errors import InvalidInput
from tocsin.model.reports import SHORTEST, bucket, grouping, percentile, span, success_rate
from tocsin.model.scalars import EARLIEST

NOW = datetime(2026, 3, 1, tzinfo=UTC)
durations = st.lists(st.floats(0, 1e9), min_size=1, max_size=200)


@given(durations, st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_percentile_of_buckets_is_near_that_of_the_durations(ms: list[float], share: float) -> None:
    exact = max(sorted(ms)[math.ceil(share * len(ms)) - 1], SHORTEST)
    found = percentile(Counter(map(bucket, ms)), share)
    assert found == pytest.approx(exact, rel=0.026, abs=0.006)


@given(durations, durations)
def test_what_is_counted_apart_can_be_added(some: list[float], others: list[float]) -> None:
    together = Counter(map(bucket, some)) + Counter(map(bucket, others))
    assert percentile(together, 0.95) == percentile(Counter(map(bucket, some + others)), 0.95)


def test_nothing_has_no_percentile() -> None:
    assert percentile({}, 0.5) is None


def test_only_what_was_to_end_by_itself_counts_for_success() -> None:
    assert success_rate({"succeeded": 3, "dead": 1, "cancelled": 5, "skipped": 9}) == 0.75
    assert success_rate({"expired": 1}) == 0
    assert success_rate({"skipped": 1}) is None


def test_a_stretch_is_the_last_day_unless_told() -> None:
    assert span(None, None, "job", NOW) == (NOW - timedelta(days=1), NOW)
    assert span(NOW - timedelta(days=366), NOW, "day", NOW).start == NOW - timedelta(days=366)
    assert span(None, EARLIEST + timedelta(hours=1), "day", NOW).start == EARLIEST


@pytest.mark.parametrize(
    ("start", "by"),
    [(NOW, "day"), (NOW + timedelta(1), "day"), (NOW - timedelta(367), "day"), (NOW - timedelta(32), "hour")],
)
def test_a_stretch_that_is_none_or_too_long_is_refused(start: datetime, by: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        span(start, NOW, by, NOW)
    assert refused.value.code == "invalid_range"


def test_each_report_has_its_groups() -> None:
    assert (grouping("runs", None), grouping("failures", None), grouping("failures", "job")) == (
        "total",
        "class",
        "job",
    )
    with pytest.raises(InvalidInput, match="worker, pool, tenant"):
        grouping("utilisation", "day")
