"""The client without I/O: calls as data, answers read, retries decided.

    calls.create_job(spec) -> Call[T]          what is asked, as data
    exchange(call)         -> Flow[T]          a generator: yields the Request to send, is sent the Answer

A transport only drives the generator (wait, send, hand the answer back), so the sync and the async client share
every rule. A write carries an `Idempotency-Key` that stays the same over its repeats: that, and nothing else, makes
it safe to repeat.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import msgspec

from tocsin import wire
from tocsin.errors import TocsinError

T = TypeVar("T")
Document = dict[str, Any]

_RETRIED_STATUS = frozenset({429, 502, 503, 504})


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────


class ApiError(TocsinError):
    """The server answered that it will not. `code` is stable; `detail` is for people; `errors` names each field."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Iterable[Document] = (),
        retry_after: float | None = None,
        problem: Document | None = None,
    ) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = list(errors)
        self.retry_after = retry_after
        self.problem = problem or {}


class Unreachable(TocsinError):
    """No answer came, or none that can be read: nobody listens there, or the connection broke."""


# ── what is asked and answered ───────────────────────────────────────────────────────────────────────────────────


class Page(msgspec.Struct, kw_only=True):
    """One page of a list, and where the next one begins: lists go by `next_cursor`, logs by `next_after`."""

    items: list[Document]
    next_cursor: str | None = None
    next_after: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, to be sent after a `pause` of so many seconds."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    content: bytes | None
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP reply; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """What is asked of the server, and how its answer is read."""

    method: str
    path: str
    read: Callable[[bytes], T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    idempotency_key: str | None = None
    if_match: int | None = None
    repeat: bool = True

    def request(self) -> Request:
        """The request of this call. A write without a key of its own gets a fresh one."""
        headers = {"Accept": "application/json"}
        if self.method != "GET":
            headers["Idempotency-Key"] = self.idempotency_key or str(uuid.uuid4())
        if self.if_match is not None:
            headers["If-Match"] = f'"{self.if_match}"'
        if self.body is None:
            return Request(self.method, self.path, self.query, headers, None)
        headers["Content-Type"] = "application/json"
        return Request(self.method, self.path, self.query, headers, wire.encode(self.body))


def next_page(call: Call[Page], page: Page) -> Call[Page] | None:
    """The call for the page behind `page`, or None at the end."""
    if page.next_cursor is not None:
        return replace(call, query={**call.query, "cursor": page.next_cursor})
    if page.next_after is not None and page.items:
        return replace(call, query={**call.query, "after": str(page.next_after)})
    return None


# ── the exchange ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how patiently a call is repeated. Durations are seconds."""

    attempts: int = 5
    first_pause: float = 0.1
    longest_pause: float = 5.0
    longest_retry_after: float = 60.0

    def pause(self, problem: ApiError | Unreachable, attempt: int, chance: float) -> float | None:
        """How long to wait after failed attempt number `attempt`; None: give up. `chance` is random in [0, 1)."""
        if attempt >= self.attempts or not _passing(problem):
            return None
        # Never quite zero: a repeat in the same instant meets the same trouble.
        backoff = min(self.longest_pause, self.first_pause * 2.0 ** min(attempt - 1, 60)) * (0.5 + chance / 2)
        asked = problem.retry_after if isinstance(problem, ApiError) else None
        if asked is None:
            return backoff
        # Clients told the same second would come back together, hence the back-off on top.
        return None if asked > self.longest_retry_after else asked + backoff


def _passing(problem: ApiError | Unreachable) -> bool:
    """Whether the same request may well succeed a moment later."""
    if isinstance(problem, Unreachable):
        return True
    return problem.status in _RETRIED_STATUS or problem.code == "in_flight"


Flow = Generator[Request, Answer | Unreachable, T]


def exchange(call: Call[T], retries: Retries, chance: Callable[[], float] = random.random) -> Flow[T]:
    """Send the call until it is answered for good: returns what was read, or raises ApiError or Unreachable."""
    request = call.request()
    attempt = 1
    while True:
        answer = yield request
        if isinstance(answer, Answer):
            if 200 <= answer.status < 300:
                return _read(call, answer)
            problem: ApiError | Unreachable = refusal(answer)
        else:
            problem = answer
        pause = retries.pause(problem, attempt, chance()) if call.repeat else None
        if pause is None:
            raise problem
        request = replace(request, pause=pause)
        attempt += 1


def _read(call: Call[T], answer: Answer) -> T:
    try:
        return call.read(answer.content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreachable(f"the answer to {call.method} {call.path} is not Tocsin's: {error}") from None


def refusal(answer: Answer, now: datetime | None = None) -> ApiError:
    """What an answer that is not a success says; one from a proxy in between has no problem document."""
    problem: Any = None
    if "json" in answer.headers.get("content-type", ""):
        try:
            problem = msgspec.json.decode(answer.content)
        except msgspec.DecodeError:
            problem = None
    if not isinstance(problem, dict):
        problem = {}
    errors = problem.get("errors")
    return ApiError(
        answer.status,
        str(problem.get("code") or f"http_{answer.status}"),
        str(problem.get("detail") or problem.get("title") or f"the server answered {answer.status}"),
        errors=[e for e in errors if isinstance(e, dict)] if isinstance(errors, list) else (),
        retry_after=_retry_after(answer.headers.get("retry-after"), now),
        problem=problem,
    )


def _retry_after(text: str | None, now: datetime | None = None) -> float | None:
    """Seconds to wait, from a number of seconds or an HTTP date."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        instant = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return max(0.0, (instant - (now or datetime.now(UTC))).total_seconds())
