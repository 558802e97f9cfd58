"""Server-sent events without I/O: bytes to events, and how a stream goes on after it broke.

A transport sends `request()`, hands each part of the answer to `feed`, and tells `broke` how it ended; then it begins
again. The server's ids make sure that nothing is lost or comes twice over such a break.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tocsin.client.core import ApiError, Call, Document, Request, Retries, Unreachable
from tocsin.model.states import FINAL

if TYPE_CHECKING:
    from tocsin.client.job import Run

# The server says something every 15 seconds; who hears nothing for this long listens to nobody.
SILENCE_SECONDS = 45.0


class Event(msgspec.Struct, frozen=True):
    """What changed. `kind`: run or job; `open` before the first, and `reset` where some were missed, so that lists
    must be read anew. `id` is where to go on after it."""

    id: str
    kind: str
    data: Document


class Stream:
    """One call's events, over as many connections as it takes."""

    def __init__(self, call: Call[Document], retries: Retries, chance: Callable[[], float] = random.random) -> None:
        self._call = call
        self._retries = retries
        self._chance = chance
        self._last_id = ""
        self._pause = 0.0
        self._attempt = 0
        self._heard_before = False
        self._begin()

    def _begin(self) -> None:
        self._rest = b""
        self._id = self._last_id
        self._kind = ""
        self._data: list[bytes] = []

    def request(self) -> Request:
        """What to send to go on where the stream is."""
        self._begin()
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": self._last_id} if self._last_id else {})
        return Request("GET", self._call.path, self._call.query, headers, None, self._pause)

    def feed(self, part: bytes) -> Iterator[Event]:
        """The events that are whole with this part."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            event = self._line(line.removesuffix(b"\r"))
            if event is not None:
                yield event

    def _line(self, line: bytes) -> Event | None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"id":
                self._id = value.decode()
            case b"event":
                self._kind = value.decode()
            case b"data":
                self._data.append(value)
            case b"" if not line:
                return self._whole()
        return None

    def _whole(self) -> Event | None:
        """An empty line: what was gathered is one event, or only moves the place to go on from."""
        self._last_id, kind, data = self._id, self._kind, b"\n".join(self._data)
        self._kind, self._data = "", []
        if not data:
            return None
        self._attempt, self._heard_before = 0, True
        return None if kind == "end" else Event(self._last_id, kind, self._call.read(data))

    def broke(self, problem: ApiError | Unreachable) -> None:
        """The connection ended. Raises `problem` if it is for good; a server that was there once is waited for."""
        self._attempt += 1
        attempt = self._attempt
        if self._heard_before:
            attempt = max(1, min(attempt, self._retries.attempts - 1))
        pause = self._retries.pause(problem, attempt, self._chance())
        if pause is None:
            raise problem
        self._pause = pause


# ── waiting for a run ────────────────────────────────────────────────────────────────────────────────────────────────

LOOK_AGAIN = 1.0  # seconds between two looks at a run, where no stream is to be had
_SILENT_FOR = 10.0


def id_of(run: str | Mapping[str, Any] | Run[Any]) -> str:
    """A run's id, from whatever stands for the run."""
    if isinstance(run, str):
        return run
    return str(run["id"]) if isinstance(run, Mapping) else run.id


def is_over(run: Document) -> bool:
    """Whether a run has ended for good."""
    return run["state"] in FINAL


def may_end(event: Event, run_id: str) -> bool:
    """Whether a run may have ended by this event: it says so, or something may have been missed."""
    return event.kind in ("open", "reset") or (event.data.get("id") == run_id and event.data.get("state") in FINAL)


class Patience:
    """How long a blocking read may last: `timeout` seconds in all, and never so long that its end is passed by."""

    def __init__(self, timeout: float | None) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout

    def __call__(self) -> float:
        """Seconds for one read; raises `TimeoutError` when none are left."""
        if self._until is None:
            return SILENCE_SECONDS
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the run has not ended in time")
        return min(left, _SILENT_FOR)
