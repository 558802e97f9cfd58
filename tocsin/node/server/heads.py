"""The head of one HTTP message: its limits, its repeated fields, and the checks that refuse ambiguous messages.

Request smuggling needs two programs that read the same bytes differently: a proxy ends a message at one byte, the
server behind it at another, and the rest becomes part of another caller's request. llhttp refuses most such messages.
This module refuses the others, so that a message is either unambiguous or answered with 400.
"""

from __future__ import annotations

import httptools

from tocsin.errors import ApiProblem, BadRequest, HeadersTooLarge

MOST_HEADERS, MOST_HEADER_BYTES = 100, 16_384
MOST_TARGET_BYTES = 16_384
# The server, or a proxy in front of it, uses one value of each of these fields. With a second value, two readers of the
# message may act on different values. Any other field may be repeated; its values are joined to a list.
ONCE = frozenset(
    (
        "access-control-request-method", "authorization", "content-encoding", "content-length", "content-type",
        "cookie", "expect", "host", "idempotency-key", "if-match", "if-none-match", "last-event-id", "origin",
        "sec-fetch-site", "tocsin-protocol", "tocsin-tenant", "transfer-encoding", "x-request-id",
    )
)  # fmt: skip


class Head:
    """The head of one message while it arrives. Each message gets a new object, so no field can reach the next
    message."""

    __slots__ = ("_repeated", "headers", "repeats", "size", "target")

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[str, str] = {}
        self.size = 0  # bytes of all names and values
        self.repeats = 0
        self._repeated: dict[str, list[str]] | None = None

    def add_to_target(self, part: bytes) -> None:
        """Take the next part of the request target; raise 431 if it is too long."""
        self.target += part
        if len(self.target) > MOST_TARGET_BYTES:
            raise HeadersTooLarge(f"a request target must have at most {MOST_TARGET_BYTES} bytes")

    def repeat(self, key: str, text: str) -> None:
        """Take another field with a name that the head already has. Raise 400 if that field must not be repeated."""
        if key in ONCE:
            raise malformed(f"a request must have at most one {key} header")
        self.repeats += 1
        if self._repeated is None:
            self._repeated = {}
        self._repeated.setdefault(key, [self.headers[key]]).append(text)

    def finish(self, version: str) -> tuple[str, bytes]:
        """Return path and query, and complete the headers. Raise 400 if the head is ambiguous."""
        headers = self.headers
        if self._repeated is not None:
            headers |= {key: ", ".join(values) for key, values in self._repeated.items()}
        if version == "1.1":
            if "host" not in headers:
                raise malformed("an HTTP/1.1 request must have a Host header")
        elif version != "1.0":
            raise malformed("the version must be HTTP/1.1 or HTTP/1.0")
        if "transfer-encoding" in headers and (headers["transfer-encoding"].lower() != "chunked" or version == "1.0"):
            raise malformed("Transfer-Encoding must be chunked, and must not be used with HTTP/1.0")
        try:
            url = httptools.parse_url(self.target)
            path = url.path.decode("ascii") if url.path else "/"
            if url.fragment is not None or url.userinfo is not None:
                raise malformed("the request target must have no fragment and no user")
            if url.host:  # replaces the header (RFC 9112, 3.2.2)
                headers["host"] = url.host.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            raise malformed("the request target must be a path or a URL") from None
        return path, url.query or b""


def malformed(text: str) -> ApiProblem:
    """Return the 400 for a message that is malformed or ambiguous."""
    return BadRequest(text, code="malformed_http")


def too_many() -> ApiProblem:
    """Return the 431 for a head with too many fields or bytes."""
    return HeadersTooLarge(f"a request must have at most {MOST_HEADERS} headers of {MOST_HEADER_BYTES} bytes")
