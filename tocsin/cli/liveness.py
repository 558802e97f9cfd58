"""Whether a server answers: what `tocsin up` asks the server that it started, and when it gives the server up."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable

_LONGEST_TICK = 5.0


class Liveness:
    """Counts for how long a process has not answered.

    A process is judged from its first answer on, so that one that is starting is left alone. What is counted is the
    time of questions that got no answer, and no more than one interval between them: a machine that was suspended, or a
    supervisor that was stopped, has asked nothing in that time.
    """

    def __init__(self, answers: Callable[[float], bool], patience: float) -> None:
        self._answers, self._patience = answers, patience
        self._tick = min(_LONGEST_TICK, patience / 4)
        self._process: int | None = None
        self._answered = False
        self._silent = 0.0
        self._asked_at = self.next_at = 0.0

    def gave_up(self, process: int) -> float | None:
        """Ask a process if it is time to; the seconds of its silence if they are too many, else None."""
        began = time.monotonic()
        if process != self._process:
            self._process, self._answered, self._silent, self._asked_at = process, False, 0.0, began
        elif began < self.next_at:
            return None
        answered = self._answers(self._tick)
        ended = time.monotonic()
        self.next_at = ended + self._tick
        if answered:
            self._answered, self._silent = True, 0.0
        elif self._answered:
            between = min(began - self._asked_at, self._tick) if self._silent else 0.0
            self._silent += between + min(ended - began, 2 * self._tick)
        self._asked_at = ended
        return self._silent if self._silent >= self._patience else None


def answers(address: str, tls: bool, timeout: float) -> bool:
    """Whether the server at an address reacts. Any answer will do, a refusal or a closed connection, too: whoever
    fills the server's connections must not get it restarted."""
    connection = connect(address, tls, timeout)
    try:
        connection.request("GET", "/healthz")
        connection.getresponse()
    except (TimeoutError, ConnectionRefusedError):
        return False
    except (OSError, http.client.HTTPException):
        return True
    finally:
        connection.close()
    return True


def connect(address: str, tls: bool, timeout: float) -> http.client.HTTPConnection:
    """A connection to a server of our own; nothing is told to it that only the right one may hear."""
    if not tls:
        return http.client.HTTPConnection(address, timeout=timeout)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(address, timeout=timeout, context=anybody)
