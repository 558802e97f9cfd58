"""What follows a failed or lost attempt."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.job import Retry
from tocsin.model.retry import LOSS_BUDGET, Verdict, after_failure, after_loss, backoff
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
    ],
)
def test_which_errors_are_tried_again(given: dict[str, object], error: str | None, again: bool) -> None:
    assert (after_failure(policy(**given), 1, error, random.Random(0)).delay is not None) == again


def test_losses_have_a_budget_of_their_own() -> None:
    verdicts = [after_loss(n, random.Random(0)) for n in range(1, LOSS_BUDGET + 2)]
    assert all(v.delay is not None and 0 <= v.delay <= 0.5 for v in verdicts[: LOSS_BUDGET - 1])
    assert verdicts[LOSS_BUDGET - 1 :] == [Verdict(None), Verdict(None)]
