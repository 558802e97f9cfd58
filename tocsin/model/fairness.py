"""Who goes first. Priority is a head start, so that everything is first one day; and fair shares with memory: tenants
share a pool by weight, whatever one of them has queued.

Each tenant has a virtual time that rises by what it was given, divided by its weight. Slots go to whoever is behind.
A tenant that was idle starts level with the others: its share was lent, not saved up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

HEAD_START = timedelta(milliseconds=20)  # what one point of priority is worth, unless the pool says otherwise
_MIDDLE, _HIGHEST = 500, 1000


def furthest_forward(head_start: timedelta) -> timedelta:
    """How far before the instant at which it falls due a run of the highest priority stands."""
    return (_HIGHEST - _MIDDLE) * head_start


def worst_case_wait(head_start: timedelta) -> timedelta:
    """After so long nothing that comes later, of whatever priority, goes before a run of the lowest priority."""
    return _HIGHEST * head_start


def allot(slots: int, behind: Mapping[int, float], weights: Mapping[int, int]) -> dict[int, int]:
    """Share `slots` among the tenants of `behind` (tenant → virtual time), so that all end as level as can be."""
    order = sorted(behind, key=lambda t: (behind[t], t))
    exact = _fill(slots, [(behind[t], weights.get(t, 1)) for t in order])
    shares = {t: int(x) for t, x in zip(order, exact, strict=True)}
    # The rest, less than one slot each, goes to whoever is furthest behind after what it got.
    left = slots - sum(shares.values())
    by_need = sorted(order, key=lambda t: (behind[t] + shares[t] / weights.get(t, 1), t))
    for i in range(left):
        shares[by_need[i % len(by_need)]] += 1
    return {t: n for t, n in shares.items() if n > 0}


def _fill(slots: int, tenants: list[tuple[float, int]]) -> list[float]:
    """Raise the lowest to a common level, as water fills a vessel: who stands above it gets nothing."""
    left, weight, level, reached = float(slots), 0, tenants[0][0] if tenants else 0.0, 0
    for time, w in tenants:
        if (time - level) * weight > left:
            break
        left -= (time - level) * weight
        level, weight, reached = time, weight + w, reached + 1
    level += left / weight if weight else 0.0
    return [max(0.0, (level - t) * w) if i < reached else 0.0 for i, (t, w) in enumerate(tenants)]


class VirtualTime:
    """The memory of one pool."""

    def __init__(self) -> None:
        self._time: dict[int, float] = {}

    def of(self, tenants: Iterable[int]) -> dict[int, float]:
        """The virtual times of the tenants that want slots now. One that was away is brought level."""
        wanted = list(tenants)
        known = [self._time[t] for t in wanted if t in self._time]
        level = min(known, default=0.0)
        for tenant in wanted:
            self._time[tenant] = max(self._time.get(tenant, level), level)
        return {t: self._time[t] for t in wanted}

    def charge(self, tenant: int, count: int, weight: int) -> None:
        """`tenant` was given `count` slots."""
        self._time[tenant] = self._time.get(tenant, 0.0) + count / weight

    def lift(self, tenants: Iterable[int], level: float) -> None:
        """Bring up to `level` whoever is below it and gets nothing for a reason of its own: what it does not take is
        lent, not saved up."""
        for tenant in tenants:
            if tenant in self._time:
                self._time[tenant] = max(self._time[tenant], level)

    def forget_idle(self, active: set[int]) -> None:
        """Drop tenants that want nothing; if they come back they start level."""
        for tenant in self._time.keys() - active:
            del self._time[tenant]
