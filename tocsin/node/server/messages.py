"""One HTTP message each way: the request as the handler sees it, and the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from tocsin.errors import ApiProblem, BadRequest, TooLarge
from tocsin.node.server.heads import malformed
from tocsin.wire import encode

if TYPE_CHECKING:
    from tocsin.node.server.protocol import HttpConnection

_AHEAD = 262_144  # bytes of a body that are read before the handler asks for the body
_MOST_FRAMING, _FRAMING_RATE = 16_384, 8  # bytes of chunk framing: a base, and more for each byte of content
_SMALL = 4_096  # smaller parts of a body are joined: one object for each would need more memory than the body


class ClientGone(Exception):
    """The caller closed the connection and will not read an answer."""


class Reply:
    """An answer with a whole body, or with parts that follow over time."""

    __slots__ = ("body", "cookies", "headers", "media_type", "status", "stream")

    def __init__(
        self,
        body: bytes = b"",
        status: int = 200,
        headers: dict[str, str] | None = None,
        media_type: str = "application/json",
        stream: AsyncGenerator[bytes, None] | None = None,
        cookies: Sequence[str] = (),
    ) -> None:
        self.body = body
        self.cookies = cookies
        self.status = status
        self.headers = headers
        self.media_type = media_type
        self.stream = stream


def problem(error: ApiProblem) -> Reply:
    """Return the answer that carries an error as a problem document."""
    return Reply(encode(error.body()), error.status, error.headers, "application/problem+json")


Respond = Callable[["Request"], Awaitable[Reply]]


class Request:
    """One call as it arrived. The body may not be complete yet."""

    __slots__ = (
        "_arrived", "_complete", "_failed", "_framing", "_gone", "_line", "_parts", "_query", "_wanted",
        "chunks", "headers", "keep_alive", "method", "of_worker", "params", "path", "query_string", "size", "streaming",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        path: str,
        query_string: bytes,
        headers: dict[str, str],
        line: HttpConnection | None = None,
        body: bytes | None = None,
    ) -> None:
        self.method = method
        self.path = path  # as sent: the path is split into segments first, and then each segment is decoded
        self.query_string = query_string
        self.headers = headers
        self.params: dict[str, str] = {}
        self.keep_alive = True
        self.chunks = True  # whether the caller can read a chunked answer
        self.of_worker = False  # whether the call has shown a valid worker key on a worker route
        self._line = line
        self._query: list[tuple[str, str]] | None = None
        self.streaming = False  # whether the answer is a stream, which ends when the caller closes the connection
        self._parts: list[bytes | bytearray] = [body] if body else []
        self.size = len(body or b"")  # bytes of the body that have arrived
        self._framing = 0  # bytes of chunk framing
        self._wanted = False  # whether the handler has asked for the body
        self._complete = line is None
        self._arrived: asyncio.Future[None] | None = None
        self._failed: Exception | None = None
        self._gone: asyncio.Future[None] | None = None

    @property
    def query(self) -> list[tuple[str, str]]:
        """Return the decoded query parameters in order."""
        if self._query is None:
            try:
                text = self.query_string.decode("ascii", "replace")
                self._query = parse_qsl(text, keep_blank_values=True, max_num_fields=100)
            except ValueError:
                raise BadRequest("the query has too many parameters", code="unknown_parameter") from None
        return self._query

    @property
    def address(self) -> str:
        """Return the address of the caller, or of the proxy in front of the server."""
        return "" if self._line is None else self._line.peer

    @property
    def gone(self) -> asyncio.Future[None]:
        """Return a future that is done when the caller closes the connection."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            if isinstance(self._failed, ClientGone):
                self._gone.set_result(None)
        return self._gone

    async def body(self, most: int) -> bytes:
        """Return the whole body. Refuse it as soon as it is known to be longer than `most`."""
        declared = self.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            raise _too_large(most)
        self._wanted = True
        if not self._complete and self._failed is None and self._line is not None:
            self._line.invite(self)
        while not self._complete and self._failed is None and self.size <= most:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if self.size > most:
            raise _too_large(most)
        if self._failed is not None:
            raise self._failed
        return bytes(self._parts[0]) if len(self._parts) == 1 else b"".join(self._parts)

    # ── what the connection tells ────────────────────────────────────────────────────────────────────────────────

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def far_ahead(self) -> bool:
        """Return whether so much arrived before the handler asked for it that the rest may wait."""
        return self.size > _AHEAD and not self._wanted

    def more(self, part: bytes) -> None:
        """Take the next part of the body."""
        self.size += len(part)
        if not self._parts or len(part) >= _SMALL:
            self._parts.append(part)
        elif isinstance(last := self._parts[-1], bytearray):
            last += part
        else:
            self._parts.append(bytearray(part))
        self._wake()

    def frame(self, length: int) -> None:
        """Count bytes that came with the body and do not belong to it. Raise 400 if they are out of proportion.

        Chunk extensions and an unfinished trailer are such bytes. The parser does not bound them.
        """
        self._framing += length
        if self._framing > _MOST_FRAMING + _FRAMING_RATE * self.size:
            raise malformed("the body has too many bytes around its chunks")

    def end(self) -> None:
        self._complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Record that no more of the body will arrive."""
        self._failed = error
        if isinstance(error, ClientGone) and self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


def _too_large(most: int) -> ApiProblem:
    return TooLarge(f"a body must have at most {most} bytes here")
