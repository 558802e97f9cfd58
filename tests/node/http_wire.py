"""Drive one HTTP connection without a socket, and read what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

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
    """A transport that keeps what the server writes. Bytes that arrive while it is paused wait."""

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
        """Let the handler and the connection do everything they can without more input."""
        for _ in range(20):
            await asyncio.sleep(0)

    def hang_up(self) -> None:
        """End the connection as the caller."""
        self.transport.closed = True
        self.connection.connection_lost(None)

    @property
    def answers(self) -> list[Answer]:
        """Every answer written so far; raises if bytes are left over."""
        methods = [request.method for request in self.handled]
        return read_answers(bytes(self.transport.written), methods)


async def echo(request: Request) -> Reply:
    """Answer with everything that the handler can see of a request."""
    body = await request.body(100_000)
    seen = {"method": request.method, "path": request.path, "query": request.query_string.decode("latin-1")}
    return Reply(json.dumps({**seen, "headers": request.headers, "body": body.decode("latin-1")}).encode())


def read_answers(data: bytes, methods: list[str]) -> list[Answer]:
    """Split answers by their own framing; `methods`: of the requests, in order, because HEAD has no body."""
    found: list[Answer] = []
    order = iter(methods)
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, f"a head that does not end: {head!r}"
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if status == 100:
            continue
        body, data = _body(data, headers, status, next(order, "GET"))
        found.append(Answer(status, headers, body))
    return found


def _body(data: bytes, headers: dict[str, str], status: int, method: str) -> tuple[bytes, bytes]:
    if method == "HEAD" or status in (204, 304):
        return b"", data
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(data)
    if "content-length" not in headers:
        return data, b""
    length = int(headers["content-length"])
    assert len(data) >= length, f"a body that is cut: {data!r}"
    return data[:length], data[length:]


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, end, data = body + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n", "a chunk that is cut"
        if not length:
            return body, data
