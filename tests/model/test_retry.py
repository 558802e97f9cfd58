"""What follows a failed or lost attempt."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.job import Retry
from tocsin.model.retry import (
    LOSS_BUDGET,
    RetryBudget,
    RetryBudgets,
    Verdict,
    after_failure,
    after_loss,
    backoff,
    loss_spread,
)
from tocsin.model.scalars import Duration


def policy(**given: object) -> Retry:
    return Retry(**{"delay": Duration.parse("1s"), "max_delay": Duration.parse("1m"), "jitter": "none"} | given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("exponential", [1, 2, 4, 8, 16, 32, 60, 60]),
        ("linear", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("fixed", [1] * 8),
        ("immediate", [0] * 8),
    ],
)
def test_waits_of_each_backoff(kind: str, waits: list[float]) -> None:
    assert [backoff(policy(backoff=kind), n, random.Random(0)) for n in range(1, 9)] == waits


@given(
    kind=st.sampled_from(["exponential", "linear", "fixed", "immediate"]),
    failures=st.integers(1, 1000),
    multiplier=st.floats(1, 100),
    jitter=st.sampled_from(["full", "none"]),
    seed=st.integers(0, 100),
)
def test_never_negative_nor_over_the_cap(kind: str, failures: int, multiplier: float, jitter: str, seed: int) -> None:
    given_ = policy(backoff=kind, multiplier=multiplier, jitter=jitter)
    assert 0 <= backoff(given_, failures, random.Random(seed)) <= 60


def test_full_jitter_spreads_and_can_be_repeated() -> None:
    full = policy(jitter="full", backoff="fixed", delay=Duration.parse("10s"))
    rng = random.Random(1)
    waits = [backoff(full, 1, rng) for _ in range(200)]
    assert min(waits) < 1 and max(waits) > 9
    assert waits[0] == backoff(full, 1, random.Random(1))


@pytest.mark.parametrize("most", [1, 2, 4])
def test_failures_never_pass_max_attempts(most: int) -> None:
    verdicts = [after_failure(policy(max_attempts=most), n, None, random.Random(0)) for n in range(1, most + 2)]
    assert [v.delay is None for v in verdicts] == [False] * (most - 1) + [True, True]


@pytest.mark.parametrize(
    ("given", "error", "again"),
    [
        ({}, "ValueError", True),
        ({}, None, True),
        ({}, "GiveUp", False),
        ({"give_up_on": ["ValueError"]}, "ValueError", False),
        ({"give_up_on": ["ValueError"]}, "KeyError", True),
        ({"retry_on": ["ValueError"]}, "ValueError", True),
        ({"retry_on": ["ValueError"]}, "KeyError", False),
        ({"retry_on": ["ValueError"]}, None, False),
        ({"retry_on": ["GiveUp"]}, "GiveUp", False),
        ({"retry_on": ["ValueError"], "give_up_on": ["ValueError"]}, "ValueError", False),
        ({}, "arguments", False),
        ({"give_up_on": ["Timeout"]}, "requests.exceptions.Timeout", False),
        ({"give_up_on": ["requests.exceptions.Timeout"]}, "requests.exceptions.Timeout", False),
        ({"give_up_on": ["requests.exceptions.Timeout"]}, "httpx.Timeout", True),
        ({"retry_on": ["Timeout"]}, "requests.exceptions.Timeout", True),
    ],
)
def test_which_errors_are_tried_again(given: dict[str, object], error: str | None, again: bool) -> None:
    assert (after_failure(policy(**given), 1, error, random.Random(0)).delay is not None) == again


@given(
    failures=st.integers(1, 6),
    asked=st.one_of(st.none(), st.floats(allow_nan=False)),
    give_up=st.booleans(),
    error=st.sampled_from(["GiveUp", "ValueError", "Other"]),
)
def test_what_failed_may_ask_when_to_be_tried_again(
    failures: int, asked: float | None, give_up: bool, error: str
) -> None:
    given_ = policy(max_attempts=4, give_up_on=["ValueError"])
    delay = after_failure(given_, failures, error, random.Random(0), asked=asked, give_up=give_up).delay
    if failures >= 4 or give_up or (asked is None and error != "Other"):
        assert delay is None
    elif asked is None:
        assert delay == backoff(given_, failures, random.Random(0))
    else:
        assert delay is not None and delay == sorted((0.0, asked, 7 * 86_400.0))[1]


def test_losses_have_a_budget_of_their_own() -> None:
    verdicts = [after_loss(n, random.Random(0)) for n in range(1, LOSS_BUDGET + 2)]
    assert all(v.delay is not None and 0 <= v.delay <= 0.5 for v in verdicts[: LOSS_BUDGET - 1])
    assert verdicts[LOSS_BUDGET - 1 :] == [Verdict(None), Verdict(None)]


# ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_never_more_than_the_budget_is_retried(steps: list[tuple[float, int, int]]) -> None:
    """Whatever comes, up to any instant no more retries fall due than the floor, the saved minute and a fifth of the
    first attempts allow."""
    budget, now, first, due = RetryBudget(10), 1000.0, 0, []
    for wait, attempts, retries in steps:
        now += wait
        budget.started(attempts, now)
        first += attempts
        due += [now + budget.grant(now) for _ in range(retries)]
    for n, at in enumerate(sorted(due), 1):
        assert n <= 10 * (at - 1000) + 600 + first / 5 + 1e-3


def test_what_is_over_budget_comes_at_the_pace_of_the_floor() -> None:
    budget = RetryBudget(10)
    waits = [budget.grant(0.0) for _ in range(700)]
    assert waits[:600] == [0.0] * 600
    assert [round(wait, 6) for wait in waits[600:603]] == [0.1, 0.2, 0.3]
    budget.started(500, 0.0)
    assert budget.grant(0.0) == pytest.approx(0.1), "five first attempts pay for a retry"
    assert not budget.is_whole(60.0) and budget.is_whole(60.2)


def test_a_job_in_trouble_leaves_the_others_of_its_tenant_their_budget() -> None:
    budgets = RetryBudgets()
    waits = [budgets.stretch(1, "bad", 0.0) for _ in range(50_000)]
    assert waits[299] == 0 and waits[-1] == RetryBudgets.LONGEST_STRETCH
    assert budgets.stretch(1, "good", 0.0) == 0 and budgets.stretch(2, "other", 0.0) == 0


def test_many_jobs_of_one_tenant_share_its_budget() -> None:
    budgets = RetryBudgets()
    waits = [budgets.stretch(1, f"job-{n}", 0.0) for n in range(20_000)]
    assert waits[:600] == [0.0] * 600 and waits[-1] == pytest.approx((20_000 - 600) / 10)
    assert budgets.stretch(2, "other", 0.0) == 0


def test_the_share_of_retries_fades() -> None:
    budgets = RetryBudgets()
    assert budgets.share == 0
    budgets.started([], 100, 0.0)
    for _ in range(25):
        budgets.stretch(1, "job", 0.0)
    assert budgets.share == pytest.approx(0.25)
    budgets.started([], 1000, 3000.0)
    assert budgets.share < 0.001


def test_a_lost_fleet_comes_back_over_a_while() -> None:
    assert (loss_spread(10), loss_spread(20_000)) == (0.5, 20.0)
    rng = random.Random(3)
    waits = [after_loss(1, rng, loss_spread(20_000)).delay for _ in range(20_000)]
    per_second = [sum(n <= (wait or 0) < n + 1 for wait in waits) for n in range(20)]
    assert max(per_second) < 1_200 and min(per_second) > 800
