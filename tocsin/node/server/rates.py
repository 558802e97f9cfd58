"""Rates: how often somebody may ask of this process, as one instant for each (GCRA) in bounded memory.

In this process alone, because a question to the database would cost more than most of the requests that it would spare:
a key has its rate at each server. What holds for the whole cluster are the quotas of a tenant, but for `submit_rate`,
which each server keeps for itself, too.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from tocsin.errors import TooManyRequests
from tocsin.telemetry import RATE_REFUSED

_MOST_KNOWN = 50_000  # about 10 MB; who was not seen for longest is forgotten first


class Rate:
    """So many a second, and a burst at once."""

    __slots__ = ("_interval", "_known", "_most_known", "_name", "_refused", "_tolerance", "policy")

    def __init__(self, name: str, per_second: float, burst: float, most_known: int = _MOST_KNOWN) -> None:
        """`burst` in seconds' worth; a rate of 0 refuses nobody."""
        self._name = name
        self._interval = 1 / per_second if per_second > 0 else 0.0
        quota = max(1, int(per_second * burst))
        self._tolerance = (quota - 1) * self._interval
        self._most_known = most_known
        self._known: OrderedDict[str, float] = OrderedDict()
        self._refused = RATE_REFUSED.labels(name)
        self.policy = f'"{name}";q={quota};w={math.ceil(quota * self._interval)}' if self._interval else ""

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._known)

    def take(self, who: str, now: float) -> float:
        """Count one in, or refuse it; answers how many seconds' worth are left."""
        if not self._interval:
            return 0.0
        known = self._known
        ahead = max(known.get(who, 0.0) - now, 0.0)
        room = self._tolerance - ahead
        if room < 0:
            raise self._refusal(-room)
        known[who] = now + ahead + self._interval
        known.move_to_end(who)
        if len(known) > self._most_known:
            known.popitem(last=False)
        return room

    def check(self, who: str, now: float) -> None:
        """Refuse who has nothing left, and count nothing."""
        wait = self._known.get(who, 0.0) - now - self._tolerance
        if wait > 0:
            raise self._refusal(wait)

    def left(self, room: float) -> str:
        """What `take` answered as the value of a `RateLimit` header."""
        whole = math.ceil(self._tolerance - room + self._interval)
        return f'"{self._name}";r={int(room / self._interval)};t={whole}'

    def _refusal(self, wait: float) -> TooManyRequests:
        self._refused.inc()
        seconds = max(1, math.ceil(wait))
        headers = {"retry-after": str(seconds), "ratelimit": f'"{self._name}";r=0;t={seconds}'}
        return TooManyRequests(
            f"too many requests (limit: {self._name}); try again in {seconds} s",
            code="rate_limited",
            headers=headers | {"ratelimit-policy": self.policy},
        )
