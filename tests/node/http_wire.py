"""Drive one HTTP connection without a socket, and read its answers."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import FrameType

from tocsin.errors import ApiProblem
from tocsin.node.server.protocol import HttpConnection, HttpServer, Reply, Request, problem


@dataclass
class Answer:
    """One answer as it was written: its status, its headers in lower case, its body without framing."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class MemoryTransport:
    """A transport that keeps the bytes that the server writes. Bytes that arrive while it is paused wait."""

    written: bytearray = field(default_factory=bytearray)
    paused: bool = False
    closed: bool = False

    def write(self, data: bytes) -> None:
        assert not self.closed, "the server wrote after it had closed the connection"
        self.written += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "192.0.2.1", 1000


class MemoryWire:
    """A connection of a server whose handler the test chooses; records each request that the handler received."""

    def __init__(self, handler: Callable[[Request], Awaitable[Reply]] | None = None) -> None:
        self.handler = handler or echo
        self.handled: list[Request] = []
        self.server = HttpServer(self._respond)
        self.transport = MemoryTransport()
        self.connection = HttpConnection(self.server)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    async def _respond(self, request: Request) -> Reply:
        self.handled.append(request)
        try:
            return await self.handler(request)
        except ApiProblem as error:
            return problem(error)

    async def send(self, *pieces: bytes) -> None:
        """Deliver bytes as the event loop would: nothing while reading is paused, nothing once closed."""
        for piece in pieces:
            await self.settle()
            if self.transport.closed:
                return
            assert not self.transport.paused, "the server never reads on"
            self.connection.data_received(piece)
        await self.settle()

    async def settle(self) -> None:
        """Run the event loop until the handler and the connection need more input."""
        for _ in range(20):
            await asyncio.sleep(0)

    def hang_up(self) -> None:
        """End the connection as the caller."""
        self.transport.closed = True
        self.connection.connection_lost(None)

    @property
    def answers(self) -> list[Answer]:
        """Return every answer written so far. Raise if bytes are left over."""
        methods = [request.method for request in self.handled]
        return read_answers(bytes(self.transport.written), methods)


async def echo(request: Request) -> Reply:
    """Answer with everything that the handler can see of a request."""
    body = await request.body(100_000)
    seen = {"method": request.method, "path": request.path, "query": request.query_string.decode("latin-1")}
    return Reply(json.dumps({**seen, "headers": request.headers, "body": body.decode("latin-1")}).encode())


def read_answers(data: bytes, methods: list[str], *, closed: bool = True) -> list[Answer]:
    """Split answers by their own framing. Raise if bytes are left over.

    `methods`: the methods of the requests, in order, because an answer to HEAD has no body.
    """
    found, rest = split_answers(data, methods, closed=closed)
    assert not rest, f"these bytes are no whole answer: {rest!r}"
    return found


def split_answers(data: bytes, methods: list[str], *, closed: bool) -> tuple[list[Answer], bytes]:
    """Split complete answers from the bytes that follow. A body without framing ends when the connection is
    `closed`."""
    found: list[Answer] = []
    order = iter(methods)
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end or not head.startswith(b"HTTP/1."):
            break
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if status != 100:
            body, after = _body(rest, headers, "HEAD" if status in (204, 304) else next(order, "GET"), closed)
            if after is None:
                break
            found.append(Answer(status, headers, body))
            rest = after
        data = rest
    return found, data


def _body(data: bytes, headers: dict[str, str], method: str, closed: bool) -> tuple[bytes, bytes | None]:
    """Return the body and the bytes that follow it, or None instead of these if the body is not complete."""
    if method == "HEAD":
        return b"", data
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(data)
    if "content-length" not in headers:
        return (data, b"") if closed else (b"", None)
    length = int(headers["content-length"])
    return (data[:length], data[length:]) if len(data) >= length else (b"", None)


def _chunks(data: bytes) -> tuple[bytes, bytes | None]:
    body = b""
    while True:
        size, end, data = data.partition(b"\r\n")
        if not end:
            return b"", None
        length = int(size, 16)
        if len(data) < length + 2:
            return b"", None
        body, end, data = body + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n", "a chunk is longer than its size"
        if not length:
            return body, data


async def counted_calls(wire: MemoryWire, data: bytes) -> int:
    """Return how many calls the connection makes for these bytes, delivered in one piece."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    await wire.settle()
    gc.disable()  # callbacks of the garbage collector would be counted
    sys.setprofile(count)
    try:
        wire.connection.data_received(data)
    finally:
        sys.setprofile(None)
        gc.enable()
    await wire.settle()
    return calls
