"""The two clocks a worker lives by: its lease, and the server's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from tocsin.clock import boottime


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
        self.margin = min(2.0, seconds / 5)
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
    and `now - sent` from above; the best lower bound is kept until a reading contradicts it (a stepped clock).
    """

    def __init__(self) -> None:
        self._offset = float("-inf")

    def observe(self, now: str, sent: float, received: float) -> None:
        """Take in the `now` of an answer; the instants are `time.monotonic`."""
        server = instant(now)
        if self._offset > server - sent:
            self._offset = server - received
        else:
            self._offset = max(self._offset, server - received)

    def now(self) -> float:
        """Unix seconds that the server's clock has reached."""
        return time.monotonic() + self._offset

    def monotonic_of(self, at: float) -> float:
        """The `time.monotonic` instant at which `at` has surely come."""
        return at - self._offset


def instant(text: str) -> float:
    """An RFC 3339 time as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()
