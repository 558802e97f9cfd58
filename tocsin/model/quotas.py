"""What a tenant may have at most. Who is over a quota is refused, with a reason; nothing stops in silence."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tocsin.model.limits import Rate


class Quotas(NamedTuple):
    """None: as much as there is room for."""

    max_jobs: int | None = None
    max_queued: int | None = None
    max_running: int | None = None
    submit_rate: str | None = None
    log_bytes_per_day: int | None = None

    @classmethod
    def of(cls, row: Any) -> Quotas:
        """From whatever has them by their names."""
        return cls(*(row[name] for name in cls._fields))

    @classmethod
    def given(cls, row: Any) -> Quotas | None:
        """The same; None if there are none."""
        found = cls.of(row)
        return None if found == NO_QUOTAS else found


NO_QUOTAS = Quotas()


class Meter:
    """How fast one tenant submits. A call passes when its first burst fits, and is then counted as a whole: one larger
    than a burst is possible, and those after it wait the longer."""

    def __init__(self) -> None:
        self._tat: datetime | None = None

    def wait(self, rate: Rate, count: int, now: datetime) -> timedelta:
        """How long until a call with so much in it may pass; nothing if it may now."""
        needed = min(count, rate.burst)
        if rate.room(self._tat, now) >= needed or self._tat is None:
            return timedelta(0)
        return self._tat - (rate.burst - needed) * rate.gap - now

    def count(self, rate: Rate, count: int, now: datetime) -> None:
        """A call with so much in it has passed."""
        self._tat = rate.after(self._tat, now, count)
