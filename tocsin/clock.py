"""Clocks. Only the database clock decides anything; node clocks are for display and for waiting.

`DatabaseClock` remembers how far the database's clock is from this node's monotonic clock, so that a node
can name an instant (an id, a wake-up) in database time without asking each time.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DRIFT = 200e-6  # by how much two clocks that are both kept in order may run apart, per second
_RESOLUTION = 2e-6  # what is lost when an instant is written in microseconds
_UNREAD = 3600.0  # a clock that was never read: nothing is sure


def boottime() -> float:
    """Seconds since boot, including suspend: the clock of leases on a worker."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def lease_margin(seconds: float) -> float:
    """How long before its lease ends a worker stops what it runs, so that nothing of it is left when it does."""
    return min(2.0, seconds / 5)


def iso(instant: datetime) -> str:
    """RFC 3339 in UTC with microseconds, the one form the API answers."""
    if instant.tzinfo is not UTC:
        instant = instant.astimezone(UTC)
    return instant.isoformat(timespec="microseconds")[:-6] + "Z"


class DatabaseClock:
    """The database's time, as seen from here: its last reading carried forward by the monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._error = float("inf")
        self._read_at = 0.0
        self._stepped = 0.0

    def observe(self, database_now: datetime, sent: float, received: float) -> None:
        """Take in a reading made between two `time.monotonic` instants. The tightest is kept; but it wears out, and
        falls when another contradicts it: then the clock was set."""
        error, offset = (received - sent) / 2, database_now.timestamp() - (sent + received) / 2
        unsure = self._error + DRIFT * (received - self._read_at)
        was_set = abs(offset - self._offset) > error + unsure + _RESOLUTION
        if was_set:
            self._stepped = max(self._stepped, offset - self._offset, key=abs)
        if error <= unsure or was_set:
            self._offset, self._error, self._read_at = offset, error, received

    def now(self) -> datetime:
        """The database's present, to within half a round trip."""
        return EPOCH + timedelta(seconds=time.monotonic() + self._offset)

    def reached(self) -> datetime:
        """An instant that the database's clock has surely reached, unless it was set back since it was last read:
        whoever acts on an answer of the database lets `observe` see the time in that answer first."""
        now = time.monotonic()
        unsure = self._error + DRIFT * (now - self._read_at)
        return EPOCH + timedelta(seconds=now + self._offset - min(unsure, _UNREAD))

    def seconds_until(self, instant: datetime) -> float:
        """How long from now until `instant` (negative once it has passed)."""
        return (instant - self.now()).total_seconds()

    def skew(self) -> float:
        """This node's wall clock minus the database's, in seconds."""
        return time.time() - (time.monotonic() + self._offset)

    def take_step(self) -> float:
        """By how many seconds the database's clock was set since this was last asked (0: it was not); of several steps
        the widest."""
        stepped, self._stepped = self._stepped, 0.0
        return stepped
