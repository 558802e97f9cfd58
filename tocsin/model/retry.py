"""What follows a failed attempt: when it is tried again, or that the run is dead."""

from __future__ import annotations

import random
from typing import NamedTuple

from tocsin.model.job import Retry

# A worker that vanishes under a run is not the run's fault, unless it keeps happening (poison).
LOSS_BUDGET = 3
_GIVE_UP = ("GiveUp",)


class Verdict(NamedTuple):
    """`delay` seconds until the next attempt, or None: the run is dead."""

    delay: float | None


def after_failure(policy: Retry, failures: int, error_class: str | None, rng: random.Random) -> Verdict:
    """`failures` counts this one too."""
    if failures >= policy.max_attempts or not _retried(policy, error_class or ""):
        return Verdict(None)
    return Verdict(backoff(policy, failures, rng))


def after_loss(losses: int, rng: random.Random) -> Verdict:
    """`losses` counts this one too. Take-backs are spread over half a second, so that a lost fleet is no herd."""
    return Verdict(None) if losses >= LOSS_BUDGET else Verdict(rng.uniform(0, 0.5))


def backoff(policy: Retry, failures: int, rng: random.Random) -> float:
    """Seconds to wait after the n-th failure; full jitter draws from [0, that]."""
    base, cap = policy.delay.seconds, policy.max_delay.seconds
    match policy.backoff:
        case "immediate":
            wait = 0.0
        case "fixed":
            wait = base
        case "linear":
            wait = base * failures
        case "exponential":
            # A float power overflows long before max_attempts; past 1,024 doublings every cap is reached.
            wait = base * policy.multiplier ** min(failures - 1, 150)
    wait = min(wait, cap)
    return rng.uniform(0, wait) if policy.jitter == "full" else wait


def _retried(policy: Retry, error_class: str) -> bool:
    if error_class in _GIVE_UP or error_class in policy.give_up_on:
        return False
    return not policy.retry_on or error_class in policy.retry_on
