"""What follows a failed attempt: when it is tried again, or that the run is dead."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from tocsin.model.job import Retry

# A worker that vanishes under a run is not the run's fault, unless it keeps happening (poison).
LOSS_BUDGET = 3
SHORTEST_SPREAD = 0.5
COMING_BACK = 1_000  # lost runs a second, on average
_INSTANT = 1e-6  # what adding up fractions of seconds may be wrong by
_GIVE_UP = ("GiveUp", "arguments")
_LONGEST_ASKED = 7 * 86_400.0


class Verdict(NamedTuple):
    """`delay` seconds until the next attempt, or None: the run is dead."""

    delay: float | None


def after_failure(
    policy: Retry,
    failures: int,
    error_class: str | None,
    rng: random.Random,
    *,
    asked: float | None = None,
    give_up: bool = False,
    not_before: float = 0.0,
) -> Verdict:
    """`failures` counts this one too. What failed may have `asked` to be tried again in so many seconds, whatever its
    class, or to `give_up`. What it called may ask to be left alone for a while (`not_before`), up to `max_delay`."""
    if failures >= policy.max_attempts or give_up:
        return Verdict(None)
    if asked is not None:
        return Verdict(min(max(asked, 0.0), _LONGEST_ASKED))
    if not _retried(policy, error_class or ""):
        return Verdict(None)
    return Verdict(max(backoff(policy, failures, rng), min(not_before, policy.max_delay.seconds)))


def after_loss(losses: int, rng: random.Random, spread: float = SHORTEST_SPREAD) -> Verdict:
    """`losses` counts this one too. Take-backs are spread over so many seconds, so that a lost fleet is no herd."""
    return Verdict(None) if losses >= LOSS_BUDGET else Verdict(rng.uniform(0, spread))


def loss_spread(lost: int) -> float:
    """Over how many seconds so many runs, lost at once, come back."""
    return max(SHORTEST_SPREAD, lost / COMING_BACK)


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
    if error_class in _GIVE_UP or _named(error_class, policy.give_up_on):
        return False
    # Whoever is told that his request is wrong sends it again only if its job says so.
    return _named(error_class, policy.retry_on) if policy.retry_on else error_class != "status_4xx"


def _named(error_class: str, names: list[str]) -> bool:
    """Whether a list names a class, in full or by its last part: `Timeout` means `requests.exceptions.Timeout`, too, as
    `status_4xx` means `status_429`."""
    if error_class in names or error_class.rpartition(".")[2] in names:
        return True
    return error_class.startswith("status_4") and "status_4xx" in names


# ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────────


class RetryBudget:
    """How much may be retried: a fifth (`RATIO`) of the first attempts, and so many a second besides (`floor`), of
    which a minute's worth can be saved up. Kept as one instant (GCRA): until when what was granted has used up the
    floor."""

    RATIO = 0.2
    SAVED = 60.0

    def __init__(self, floor: float) -> None:
        self._gap = 1 / floor
        self._used_until = float("-inf")

    def started(self, first_attempts: int, now: float) -> None:
        """First attempts pay for retries."""
        self._used_until = max(self._used_until - self.RATIO * self._gap * first_attempts, now - self.SAVED)

    def grant(self, now: float) -> float:
        """One retry more; answers by how many seconds it must be put off."""
        self._used_until = max(self._used_until, now - self.SAVED) + self._gap
        late = self._used_until - now
        return late if late > _INSTANT else 0.0

    def is_whole(self, now: float) -> bool:
        """Whether nothing is missing from it: then it need not be remembered."""
        return self._used_until <= now - self.SAVED


class RetryBudgets:
    """The budgets of each job and each tenant, as far as one server sees them, and the share of retries in all it does.

    What is over budget is not dropped but put off. What its job's own budget puts off does not use up its tenant's, so
    that one job in trouble leaves the others theirs."""

    JOB_FLOOR = 5.0
    TENANT_FLOOR = 10.0
    LONGEST_STRETCH = 3_600.0
    _HALF_LIFE = 300.0
    _MANY = 10_000

    def __init__(self) -> None:
        self._budgets: dict[int | str, RetryBudget] = {}
        self._most = self._MANY
        self._attempts = self._retries = 0.0
        self._faded = 0.0

    def started(self, first: Iterable[tuple[int, str]], attempts: int, now: float) -> None:
        """So many attempts went to workers; the first ones by (tenant, job)."""
        self._count(attempts, 0, now)
        # Whose budget is not remembered has a whole one, to which nothing can be added.
        for tenant, job in first if self._budgets else ():
            for key in (tenant, job):
                if (budget := self._budgets.get(key)) is not None:
                    budget.started(1, now)

    def stretch(self, tenant: int, job: str, now: float) -> float:
        """A run is to be tried again: by how many seconds its back-off must grow."""
        self._count(0, 1, now)
        self._forget(now)
        late = self._of(job, self.JOB_FLOOR).grant(now) or self._of(tenant, self.TENANT_FLOOR).grant(now)
        return min(late, self.LONGEST_STRETCH)

    def _count(self, attempts: int, retries: int, now: float) -> None:
        fade = 0.5 ** ((now - self._faded) / self._HALF_LIFE)
        self._attempts, self._retries = self._attempts * fade + attempts, self._retries * fade + retries
        self._faded = now

    @property
    def share(self) -> float:
        """Retries in all attempts of the last minutes."""
        return min(1.0, self._retries / self._attempts) if self._attempts >= 1 else 0.0

    def _of(self, key: int | str, floor: float) -> RetryBudget:
        return self._budgets.setdefault(key, RetryBudget(floor))

    def _forget(self, now: float) -> None:
        if len(self._budgets) > self._most:
            self._budgets = {key: budget for key, budget in self._budgets.items() if not budget.is_whole(now)}
            self._most = max(self._MANY, 2 * len(self._budgets))  # so that looking through them stays rare
