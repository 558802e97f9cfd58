"""Check whether a server answers. `tocsin up` asks the server that it started and restarts it after a long silence."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable

_LONGEST_TICK = 5.0


class Liveness:
    """Counts for how long a process has not answered.

    The count begins with the first answer of a process, so that a process that is starting is left alone. It counts the
    duration of requests without an answer, and at most one interval between them: a machine that was suspended, or a
    supervisor that was stopped, sent no requests in that time.
    """

    def __init__(self, answers: Callable[[float], bool], patience: float) -> None:
        self._answers, self._patience = answers, patience
        self._tick = min(_LONGEST_TICK, patience / 4)
        self._process: int | None = None
        self._answered = False
        self._silent = 0.0
        self._asked_at = self.next_at = 0.0

    def gave_up(self, process: int) -> float | None:
        """Ask the process if a request is due. Return the seconds of its silence if they exceed the limit, otherwise
        None."""
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
    """Return whether the server at an address reacts. An error or a closed connection also counts: a caller that uses
    up the server's connections must not cause a restart."""
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
    """Open a connection to our own server. It does not verify the certificate, so no secret may be sent over it."""
    if not tls:
        return http.client.HTTPConnection(address, timeout=timeout)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(address, timeout=timeout, context=anybody)
