"""The two clocks a worker lives by: its lease, and the server's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from tocsin.clock import DRIFT, boottime, lease_margin


class Lease:
    """Until when our runs are surely ours.

    It counts from before the last answered report was sent, on the clock that goes on through suspend, so it ends
    here before it can end on the server.
    """

    def __init__(
        self, seconds: float, sent: float, on_renewal: Callable[[float], None] = lambda deadline: None
    ) -> None:
        self.seconds = seconds
        self._on_renewal = on_renewal
        self.margin = lease_margin(seconds)
        self.deadline = 0.0
        self.renew(sent)

    def renew(self, sent: float) -> None:
        """A report sent at the `boottime` instant `sent` was answered."""
        self.deadline = max(self.deadline, sent + self.seconds - self.margin)
        self._on_renewal(self.deadline)

    @property
    def remaining(self) -> float:
        return self.deadline - boottime()

    @property
    def over(self) -> bool:
        return boottime() >= self.deadline


class ServerClock:
    """The server's time as a lower bound: what it says here has surely passed there, so nothing starts early.

    An answer's `now` was read between sending and receiving. `now - received` therefore bounds the offset from below
    and `now - sent` from above. The best lower bound is kept, and lowered by what the clocks may have run apart since,
    until a reading contradicts it (a stepped clock).
    """

    def __init__(self) -> None:
        self._offset = float("-inf")
        self._read_at = 0.0

    def observe(self, now: str, sent: float, received: float) -> None:
        """Take in the `now` of an answer; the instants are `time.monotonic`."""
        server = instant(now)
        worn = self._offset - DRIFT * (received - self._read_at)
        if server - received >= worn or worn > server - sent:
            self._offset, self._read_at = server - received, received

    def now(self) -> float:
        """Unix seconds that the server's clock has reached."""
        now = time.monotonic()
        return now + self._offset - DRIFT * (now - self._read_at)

    def monotonic_of(self, at: float) -> float:
        """The `time.monotonic` instant at which `at` has surely come."""
        instant = at - self._offset
        return instant + DRIFT * max(instant - self._read_at, 0.0)


def instant(text: str) -> float:
    """An RFC 3339 time as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()
