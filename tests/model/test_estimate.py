"""The estimator: what makes a wait longer never makes its estimate earlier."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.estimate import (
    MOMENT,
    Estimate,
    Pace,
    ahead_of,
    at_once,
    at_rate,
    behind_run,
    in_queue,
    latest,
    not_before,
    under_limit,
)
from tocsin.model.limits import Rate

NOW = datetime(2031, 3, 1, 12, tzinfo=UTC)
COUNTS = st.integers(0, 20_000)
PACES = st.builds(Pace, st.integers(1, 1_000_000), st.floats(1, 60))
SPANS = st.timedeltas(timedelta(milliseconds=1), timedelta(days=2))
OTHERS = st.lists(st.tuples(st.integers(1, 1000), COUNTS), max_size=6)


def furthest(estimate: Estimate | None) -> datetime:
    assert estimate is not None
    assert estimate.error >= MOMENT
    return estimate.at + estimate.error


@given(COUNTS, COUNTS, st.integers(0, 100), PACES)
def test_more_ahead_is_never_earlier(ahead: int, more: int, free: int, pace: Pace) -> None:
    one, other = in_queue(NOW, ahead, free, pace), in_queue(NOW, ahead + more, free, pace)
    assert one is not None and other is not None
    assert NOW <= one.at <= other.at
    assert furthest(one) <= furthest(other)


@given(COUNTS, st.integers(0, 100), st.integers(0, 100), PACES, st.integers(0, 1_000_000))
def test_more_slots_and_a_higher_pace_are_never_later(ahead: int, free: int, more: int, pace: Pace, extra: int) -> None:
    slow = in_queue(NOW, ahead, free, pace)
    roomy = in_queue(NOW, ahead, free + more, pace)
    fast = in_queue(NOW, ahead, free, Pace(pace.starts + extra, pace.seconds))
    assert furthest(roomy) <= furthest(slow)
    assert furthest(fast) <= furthest(slow)


def test_who_finds_a_free_slot_starts_at_once_whatever_the_pace() -> None:
    assert in_queue(NOW, 3, 4, None) == at_once(NOW)
    assert in_queue(NOW, 4, 4, None) is None, "nobody knows when the next slot comes free"
    assert in_queue(NOW, 4, 4, Pace(0, 60.0)) is None


def test_a_queue_is_as_long_as_it_is_deep() -> None:
    found = in_queue(NOW, 599, 0, Pace(600, 60.0))
    assert found is not None
    assert found.at == NOW + timedelta(seconds=60)
    assert found.error < timedelta(seconds=8), "600 starts are enough to go by"


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 50), SPANS)
def test_under_a_limit_more_waiting_is_never_earlier(ahead: int, more: int, places: int, lasts: timedelta) -> None:
    one, other = under_limit(NOW, ahead, places, lasts), under_limit(NOW, ahead + more, places, lasts)
    assert furthest(one) <= furthest(other)
    assert furthest(under_limit(NOW, ahead, places + 1, lasts)) <= furthest(one)
    assert under_limit(NOW, ahead, places, None) is None


@given(st.integers(0, 1000), st.integers(0, 50), SPANS, st.integers(1, 20))
def test_by_a_rate_the_next_token_is_known(ahead: int, used: int, gap: timedelta, burst: int) -> None:
    rate = Rate(gap, burst)
    tat = NOW + used * gap
    found = at_rate(NOW, ahead, rate, tat)
    assert found.at == max(NOW, tat - (burst - 1) * gap) + ahead * gap
    assert at_rate(NOW, ahead + 1, rate, tat).at > found.at


@given(SPANS, SPANS)
def test_a_run_in_front_is_over_when_it_has_lasted(lasts: timedelta, age: timedelta) -> None:
    found = behind_run(NOW, NOW - age, lasts)
    assert found is not None
    assert NOW <= found.at <= NOW + lasts
    assert behind_run(NOW, NOW - age, None) is None


@given(
    st.lists(st.builds(Estimate, st.just(NOW).flatmap(lambda n: st.builds(lambda s: n + s, SPANS)), SPANS), min_size=1)
)
def test_all_of_it_must_come_to_pass(estimates: list[Estimate]) -> None:
    found = latest(estimates)
    assert found is not None
    assert found.at == max(one.at for one in estimates)
    assert found.at + found.error == max(one.at + one.error for one in estimates)
    assert latest([*estimates, None]) is None, "what is not known for one part is not known for the whole"


def test_nothing_to_wait_for_is_no_estimate() -> None:
    assert latest([]) is None
    assert not_before(NOW + timedelta(hours=1)).at == NOW + timedelta(hours=1)


@given(COUNTS, st.integers(1, 1000), OTHERS)
def test_tenants_share_by_weight(mine: int, weight: int, others: list[tuple[int, int]]) -> None:
    ahead = ahead_of(mine, weight, others)
    assert mine <= ahead <= mine + sum(queued for _, queued in others)
    assert ahead <= ahead_of(mine + 1, weight, others)
    assert ahead >= ahead_of(mine, weight + 1, others)


@pytest.mark.parametrize(("mine", "others", "ahead"), [(0, [(1, 200_000)], 1), (9, [(1, 5), (2, 500)], 34)])
def test_one_tenants_flood_does_not_stand_before_anothers_run(
    mine: int, others: list[tuple[int, int]], ahead: int
) -> None:
    assert ahead_of(mine, 1, others) == ahead
