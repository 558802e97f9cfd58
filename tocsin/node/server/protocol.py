"""HTTP/1.1 on sockets: llhttp (httptools) reads the bytes; this module holds callers to their limits and answers.

Ours, because no ASGI server answers 408 to a slow caller or 431 before it has read headers without end, and because an
answer here is one write without a chain of wrappers: a third of the CPU of a small call went into those.

What a caller may cost: headers and bodies are bounded, a request has to arrive within a time, a caller that stops
reading is cut, and what it sends ahead of its turn stays in the kernel. Connections are counted, in all and by address;
when they become many, those that rest are closed sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from email.utils import formatdate
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

import httptools

from tocsin.errors import ApiProblem, BadRequest, HeadersTooLarge, RequestTimeout, TooLarge, Unavailable
from tocsin.node.server.listen import Caller, TlsListener
from tocsin.telemetry import CONNECTIONS_REFUSED, get_logger
from tocsin.wire import encode

log = get_logger("server")

MOST_HEADERS, MOST_HEADER_BYTES = 100, 16_384
_MOST_HEAD = MOST_HEADER_BYTES + 16_384  # the request line and the headers as they arrive
_AHEAD = 262_144  # bytes of a body that are read before anybody asks for them
_HEAD_SECONDS = 10.0
_BODY_SECONDS, _BODY_RATE = 30.0, 16_384  # a body has so long, and a second more for each so many bytes that came
_IDLE_SECONDS, _CROWDED_IDLE_SECONDS = 75.0, 5.0
_CROWDED = 0.75  # of all connections that may be
_ONE_ADDRESS = 0.25  # of them may come from one
_STALLED_SECONDS = 30.0  # a caller that does not read its answer
_LINGER_SECONDS = 1.0
_TICK = 1.0
_STATUS = {int(s): f"HTTP/1.1 {int(s)} {s.phrase}\r\n".encode() for s in http.HTTPStatus} | {
    499: b"HTTP/1.1 499 Client Closed Request\r\n"
}


class ClientGone(Exception):
    """The caller hung up: nobody will read an answer."""


class Reply:
    """An answer: its whole body, or parts that come over time."""

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
    """An error as its document."""
    return Reply(encode(error.body()), error.status, error.headers, "application/problem+json")


Respond = Callable[["Request"], Awaitable[Reply]]


class Request:
    """One call as it came. The body may still be on its way."""

    __slots__ = (
        "_arrived", "_complete", "_failed", "_gone", "_line", "_parts", "_query", "_size",
        "chunks", "headers", "keep_alive", "method", "of_worker", "params", "path", "query_string",
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
        self.path = path  # as it was sent: segments are decoded one by one, after they were told apart
        self.query_string = query_string
        self.headers = headers
        self.params: dict[str, str] = {}
        self.keep_alive = True
        self.chunks = True  # whether the caller can read an answer in chunks
        self.of_worker = False  # whether it has shown a good worker key where workers call
        self._line = line
        self._query: list[tuple[str, str]] | None = None
        self._parts = [body] if body else []
        self._size = len(body or b"")
        self._complete = line is None
        self._arrived: asyncio.Future[None] | None = None
        self._failed: Exception | None = None
        self._gone: asyncio.Future[None] | None = None

    @property
    def query(self) -> list[tuple[str, str]]:
        """The query's parameters in order, decoded."""
        if self._query is None:
            try:
                text = self.query_string.decode("ascii", "replace")
                self._query = parse_qsl(text, keep_blank_values=True, max_num_fields=100)
            except ValueError:
                raise BadRequest("the query has too many parameters", code="unknown_parameter") from None
        return self._query

    @property
    def address(self) -> str:
        """Of the caller, or of the proxy in front of us."""
        return "" if self._line is None else self._line.peer

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done when the caller hangs up."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            if isinstance(self._failed, ClientGone):
                self._gone.set_result(None)
        return self._gone

    async def body(self, most: int) -> bytes:
        """The whole body, refused as soon as it is known to be longer than `most`."""
        declared = self.headers.get("content-length", "0")
        too_large = TooLarge(f"a body has at most {most} bytes here")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            raise too_large
        if not self._complete and self._line is not None:
            self._line.invite(self)
        while not self._complete and self._failed is None and self._size <= most:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        if self._size > most:
            raise too_large
        if self._failed is not None:
            raise self._failed
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    # ── what the connection tells ────────────────────────────────────────────────────────────────────────────────

    @property
    def complete(self) -> bool:
        return self._complete

    @property
    def far_ahead(self) -> bool:
        """Whether so much came before anybody asked for it that the rest may wait."""
        return self._size > _AHEAD and self._arrived is None

    def more(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        self._wake()

    def end(self) -> None:
        self._complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """No more of it will come."""
        self._failed = error
        if isinstance(error, ClientGone) and self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class HttpConnection(Caller):
    """One caller. Its requests are answered one after the other, in the order they came."""

    def __init__(self, server: HttpServer, counted_from: str | None = None) -> None:
        """`counted_from`: the address from which it was counted in already."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_count = self._header_bytes = 0
        self._head_bytes = 0  # of a head that is not whole yet
        self._reading: Request | None = None
        self._serving: Request | None = None
        self._next: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._streaming = False
        self._paused = False
        self._resting = False
        self._deaf = False  # nothing more is read: the connection ends with an answer given or under way
        self._last: ApiProblem | None = None  # said after the answer under way
        self._can_write: asyncio.Future[None] | None = None
        self.lost = False
        self.admitted = counted_from is not None
        self.peer = counted_from or ""
        self.deadline = time.monotonic() + _HEAD_SECONDS

    # ── the transport ────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.met = True
        if not self.admitted:
            self.peer = str((transport.get_extra_info("peername") or [""])[0])
            self.admitted = self._server.admit(self.peer)
        if self.admitted:
            self._server.connections.add(self)
        else:
            text = "there are too many connections, in all or from this address"
            self._refuse(Unavailable(text, code="too_many_connections", headers={"retry-after": "5"}))
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        self._server.forget(self)
        self._next.clear()
        if self._serving is not None:
            self._serving.fail(ClientGone())
        if self._streaming and self._task is not None:
            self._task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._can_write = self._loop.create_future()
        self.deadline = time.monotonic() + _STALLED_SECONDS

    def resume_writing(self) -> None:
        if self._can_write is not None:
            if not self._can_write.done():
                self._can_write.set_result(None)
            self._can_write = None
            self._rest()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._reading is None:
            if self._head_bytes == 0 and self._serving is None:
                self.deadline = time.monotonic() + _HEAD_SECONDS
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # we speak no other protocol: this answer is the last
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"this is not HTTP/1.1: {error}", code="malformed_http"))
        if self._head_bytes > _MOST_HEAD:
            self._refuse(HeadersTooLarge(f"a request line and headers have at most {_MOST_HEAD} bytes"))

    # ── the parser ───────────────────────────────────────────────────────────────────────────────────────────────

    def on_url(self, part: bytes) -> None:
        self._url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._header_count += 1
        self._header_bytes += len(name) + len(value)
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        if self._header_count > MOST_HEADERS or self._header_bytes > MOST_HEADER_BYTES:
            self._refuse(HeadersTooLarge(f"a request has at most {MOST_HEADERS} headers of {MOST_HEADER_BYTES} bytes"))
            return
        try:
            url = httptools.parse_url(self._url)
            path = url.path.decode("ascii") if url.path else "/"
            if url.host:  # what a whole URL names goes before the header (RFC 9112, 3.2.2)
                self._headers["host"] = url.host.decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            self._refuse(BadRequest("this is not a URL", code="malformed_http"))
            return
        method = self._parser.get_method().decode("ascii")
        request = self._reading = Request(method, path, url.query or b"", self._headers, self)
        request.chunks = self._parser.get_http_version() == "1.1"
        request.keep_alive = request.chunks and self._parser.should_keep_alive()
        self._url, self._headers = b"", {}
        self._header_count = self._header_bytes = self._head_bytes = 0
        if self._serving is None:
            self._serve(request)
        else:
            self._next.append(request)
            self._pause()

    def on_body(self, part: bytes) -> None:
        if self._reading is not None and not self._deaf:
            self.deadline += len(part) / _BODY_RATE
            self._reading.more(part)
            if self._reading.far_ahead:
                self._pause()

    def on_message_complete(self) -> None:
        request, self._reading = self._reading, None
        if request is not None and not self._deaf:
            request.end()
            self._rest()

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def invite(self, request: Request) -> None:
        """Somebody wants the rest of a body."""
        if request.headers.pop("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request is self._reading:
            self._resume()

    def _serve(self, request: Request) -> None:
        self._serving = request
        self._rest()
        self._task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            reply = await self._server.respond(request)
            if self.lost:
                return
            if reply.stream is None:
                self._write(request, reply)
            else:
                await self._write_stream(request, reply, reply.stream)
            if self._can_write is not None:  # who asks on without reading gets nothing more
                await self._can_write
            if self.lost:
                return
        except ClientGone:
            return
        except ApiProblem as error:  # in the midst of a stream: its last part does not come, so it is known to be cut
            log.info("an answer was cut", path=request.path, why=str(error))
            request.keep_alive = False
        except Exception as error:
            log.error("answer failed", path=request.path, error=repr(error), exc_info=error)
            request.keep_alive = False
        finally:
            self._task = self._serving = None
        self._go_on(request)

    def _go_on(self, last: Request) -> None:
        if self._last is not None:
            self._last_words(self._last)
        elif not last.keep_alive or self._deaf or self._server.leaving:
            self._linger()
        elif self._next:
            self._serve(self._next.popleft())
        else:
            self._resume()
            self._rest()

    def _write(self, request: Request, reply: Reply) -> None:
        body = reply.body
        head = self._head(request, reply, b"content-length: %d\r\n" % len(body))
        self._transport.write(head if request.method == "HEAD" else head + body)

    async def _write_stream(self, request: Request, reply: Reply, parts: AsyncGenerator[bytes, None]) -> None:
        self._streaming = True
        request.keep_alive = request.keep_alive and request.chunks
        framing = b"transfer-encoding: chunked\r\n" if request.chunks else b""
        async with contextlib.aclosing(parts):
            self._transport.write(self._head(request, reply, framing))
            if request.method == "HEAD":
                return
            async for part in parts:
                self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if request.chunks else part)
                if self._can_write is not None:
                    await self._can_write
        if request.chunks:
            self._transport.write(b"0\r\n\r\n")
        self._streaming = False

    def _head(self, request: Request, reply: Reply, length: bytes) -> bytes:
        lines = f"content-type: {reply.media_type}\r\n" + self._server.head_lines(reply.headers)
        if reply.cookies:
            lines += "".join(f"set-cookie: {cookie}\r\n" for cookie in reply.cookies)
        if not request.keep_alive or not request.complete or self._deaf or self._server.leaving:
            request.keep_alive = False
            lines += "connection: close\r\n"
        return b"%b%b%b%b\r\n" % (_STATUS[reply.status], self._server.date, length, lines.encode("latin-1", "replace"))

    # ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _pause(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self.lost:
            self._paused = False
            self._transport.resume_reading()

    def _rest(self) -> None:
        """Until when the caller must have done what we wait for: read, send the rest of a body, or something new."""
        if self._can_write is not None:
            return
        self._resting = self._serving is None
        if self._serving is None:
            self.deadline = time.monotonic() + _IDLE_SECONDS
        elif self._serving.complete:
            self.deadline = float("inf")
        else:
            self.deadline = time.monotonic() + _BODY_SECONDS

    def _refuse(self, error: ApiProblem) -> None:
        """Say why and hang up; an answer under way comes first."""
        if self._deaf:
            return
        self._deaf = True
        if self._serving is None:
            self._last_words(error)
        elif self._serving is self._reading:
            self._serving.fail(error)
        else:
            self._last = error

    def _last_words(self, error: ApiProblem) -> None:
        request = Request("GET", "", b"", {})
        request.keep_alive = False
        self._write(request, problem(error))
        self._linger()

    def _linger(self) -> None:
        """Hang up. What still comes is dropped for a moment first: a socket closed with unread bytes in it takes an
        answer along that is still on its way."""
        whole = self._reading is None and not self._deaf
        self._deaf = True
        if whole:
            self._transport.close()
        else:
            self._resume()
            self._loop.call_later(_LINGER_SECONDS, self._transport.close)

    def look_at_clock(self, now: float, hurry: float = 0.0) -> None:
        """Cut a caller whose time is up; one that rests, `hurry` seconds before that."""
        rests = self._resting and not self._head_bytes
        if now < self.deadline - (hurry if rests else 0.0):
            return
        self.deadline = float("inf")
        if self._can_write is not None:
            self._transport.abort()
        elif self._reading is not None or self._head_bytes:
            self._refuse(RequestTimeout("the request did not arrive in time"))
        else:
            self._transport.close()

    def leave(self) -> None:
        """The server goes: an answer under way is the last."""
        if self._serving is None:
            self._transport.close()

    def abort(self) -> None:
        """Wait for nothing."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


class HttpServer:
    """Listens, and passes each request to `respond`.

    `common`: headers of every answer that has none of its own by that name; `most`: how many connections there may be
    at once; `trusted`: whether an address may have all of them, because a proxy is there.
    """

    def __init__(
        self,
        respond: Respond,
        *,
        common: Mapping[str, str] = MappingProxyType({}),
        most: int = 10_000,
        trusted: Callable[[str], bool] = lambda _address: False,
    ) -> None:
        self.respond = respond
        self._common, self._common_lines = common, _lines(common)
        self.connections: set[HttpConnection] = set()
        self.leaving = False
        self.date = b""
        self._most, self._most_of_one = most, max(1, int(most * _ONE_ADDRESS))
        self._trusted = trusted
        self._by_address: Counter[str] = Counter()
        self._open = 0
        self._emptied = asyncio.Event()
        self._listener: asyncio.Server | TlsListener | None = None
        self._clock: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Accept callers; answers the port, which the system chooses if it is 0."""
        loop = asyncio.get_running_loop()
        self._tick(loop)
        if tls is not None:
            listener = self._listener = TlsListener(self, lambda peer: HttpConnection(self, peer), tls)
            return await listener.start(host, port)
        server = self._listener = await loop.create_server(lambda: HttpConnection(self), host, port, backlog=2048)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> None:
        """Accept nobody any more, let what is under way end within `grace` seconds, then cut what is left."""
        self.leaving = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.leave()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), grace)
        for connection in list(self.connections):
            connection.abort()
        if self._clock is not None:
            self._clock.cancel()

    def admit(self, peer: str) -> bool:
        """Count a new connection from there in, unless there are too many."""
        of_one = self._by_address.get(peer, 0)
        if self._open >= self._most or (of_one >= self._most_of_one and not self._trusted(peer)):
            CONNECTIONS_REFUSED.inc()
            return False
        self._by_address[peer] = of_one + 1
        self._open += 1
        return True

    def release(self, peer: str) -> None:
        """One from there is closed."""
        self._open -= 1
        self._by_address[peer] -= 1
        if not self._by_address[peer]:
            del self._by_address[peer]

    def head_lines(self, own: Mapping[str, str] | None) -> str:
        """The lines of an answer's own headers and of the common ones."""
        if not own:
            return self._common_lines
        if self._common.keys().isdisjoint(own):
            return self._common_lines + _lines(own)
        return _lines({**self._common, **own})

    def forget(self, connection: HttpConnection) -> None:
        """It is closed."""
        if not connection.admitted:
            return
        self.connections.discard(connection)
        self.release(connection.peer)
        if self.leaving and not self.connections:
            self._emptied.set()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once a second, for all: a timer per request would cost more than the request's headers."""
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        now = time.monotonic()
        crowded = self._open > self._most * _CROWDED
        hurry = _IDLE_SECONDS - _CROWDED_IDLE_SECONDS if crowded else 0.0
        for connection in list(self.connections):
            connection.look_at_clock(now, hurry)
        self._clock = loop.call_later(_TICK, self._tick, loop)
