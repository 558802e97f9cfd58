"""HTTP/1.1 on sockets: llhttp (httptools) reads the bytes; this module holds callers to their limits and answers.

This module is our own for the reasons and figures in docs/decisions/0005: other servers do not cut a slow body, do not
bound connections per address and do not count a connection before its TLS handshake.

Limits for each caller: heads, bodies and the framing of chunks are bounded. A request must arrive within a time limit.
A caller that stops reading is disconnected. Bytes of further requests stay unparsed until their turn. Connections are
counted, in total and by address; when there are many, idle connections are closed sooner.

All fields of a message live in objects that are created for it: a `Head` when it begins (`on_message_begin`), then a
`Request`. The connection keeps no field of a message, so none can reach the next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from email.utils import formatdate
from types import MappingProxyType
from typing import Any

import httptools

from tocsin.errors import ApiProblem, HeadersTooLarge, RequestTimeout, ServerFault, Unavailable
from tocsin.node.server.heads import MOST_HEADER_BYTES, MOST_HEADERS, MOST_TARGET_BYTES, Head, malformed, too_many
from tocsin.node.server.listen import Caller, TlsListener
from tocsin.node.server.messages import ClientGone, Reply, Request, Respond, problem
from tocsin.telemetry import CONNECTIONS_REFUSED, get_logger

__all__ = ["ClientGone", "HttpConnection", "HttpServer", "Reply", "Request", "Respond", "problem"]

log = get_logger("server")

_MOST_HEAD = MOST_TARGET_BYTES + MOST_HEADER_BYTES  # bytes of the request line and the headers
_PIECE = 16_384  # bytes that are parsed at once: the limits are checked between pieces
_HEAD_SECONDS = 10.0
_BODY_SECONDS, _BODY_RATE = 30.0, 16_384  # a body has so long, and a second more for each so many bytes that came
_IDLE_SECONDS, _CROWDED_IDLE_SECONDS = 75.0, 5.0
_CROWDED = 0.75  # of all connections that may be
_ONE_ADDRESS = 0.25  # of them may come from one
_STALLED_SECONDS = 30.0  # a caller that does not read its answer
_LINGER_SECONDS = 1.0
_TICK = 1.0
_NEVER = float("inf")
_STATUS = {int(s): f"HTTP/1.1 {int(s)} {s.phrase}\r\n".encode() for s in http.HTTPStatus} | {
    499: b"HTTP/1.1 499 Client Closed Request\r\n"
}


class HttpConnection(Caller):
    """One caller. Its requests are answered one after the other, in the order they came."""

    def __init__(self, server: HttpServer, counted_from: str | None = None) -> None:
        """`counted_from`: the address from which it was counted in already."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._head: Head | None = None  # of the message whose head is arriving
        self._head_bytes = 0  # bytes that have arrived of a head that is not complete
        self._reading: Request | None = None
        self._plain = 0  # bytes of a body that the parser does not read: it skips the body of an upgrade request
        self._unparsed = memoryview(b"")
        self._serving: Request | None = None
        self._next: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._resting = False
        self._deaf = False  # nothing more is parsed: the connection ends after the current answer
        self._unread = False  # bytes have arrived, or may arrive, that are never parsed
        self._last: ApiProblem | None = None  # the error that is sent after the current answers
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
            if self._serving.streaming and self._task is not None:
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
            self._unread = True
        elif len(data) <= _PIECE and not self._unparsed:
            self._parse(data)
        else:
            self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
            self._parse_on()

    def _parse_on(self) -> None:
        """Parse the received bytes, piece by piece, until a request has to wait for its turn."""
        while self._unparsed and not self._paused and not self._deaf:
            piece, self._unparsed = self._unparsed[:_PIECE], self._unparsed[_PIECE:]
            self._parse(piece)
        if self._deaf and self._unparsed:
            self._unread, self._unparsed = True, memoryview(b"")

    def _parse(self, data: bytes | memoryview) -> None:
        request = self._reading
        try:
            if request is None:
                self._parse_head(data)
            else:
                size = request.size
                if self._plain:
                    self._take_plain(data)
                else:
                    self._parser.feed_data(data)
                if request is self._reading:
                    request.frame(len(data) - (request.size - size))
        except httptools.HttpParserUpgrade as upgrade:
            self._take_plain(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            self._refuse(_cause(error))
        except httptools.HttpParserError as error:
            self._refuse(malformed(f"this is not HTTP/1.1: {error}"))
        except ApiProblem as error:
            self._refuse(error)

    def _parse_head(self, data: bytes | memoryview) -> None:
        """Parse bytes that begin with a head or a part of one."""
        before = self._head
        self._head_bytes += len(data)
        self._parser.feed_data(data)
        if self._head_bytes > _MOST_HEAD:
            raise HeadersTooLarge(f"a request line and headers must have at most {_MOST_HEAD} bytes")
        if self._head is not before and self._head is not None and self._serving is None:
            self.deadline = time.monotonic() + _HEAD_SECONDS

    def _take_plain(self, data: bytes | memoryview) -> None:
        """Read the bytes after the head of an upgrade request, which is served as a normal request: its body, if it has
        one."""
        if self._plain:
            part = bytes(data[: self._plain])
            self._plain -= len(part)
            data = data[len(part) :]
            self.on_body(part)
            if not self._plain:
                self.on_message_complete()
        self._unread = self._unread or len(data) > 0

    # ── the parser ───────────────────────────────────────────────────────────────────────────────────────────────
    # An exception from one of these methods stops the parser for good, and the connection ends.

    def on_message_begin(self) -> None:
        if self._deaf:
            raise malformed("nothing may follow the last request of a connection")
        self._head = Head()

    def on_url(self, part: bytes) -> None:
        assert self._head is not None
        self._head.add_to_target(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        head = self._head
        if head is None:
            raise malformed("a body must not have trailer fields after its chunks")
        # Inlined instead of a method of the head: one more call per field would cost a small request 3 % of its time
        # here.
        headers, key, text = head.headers, name.decode("latin-1").lower(), value.rstrip().decode("latin-1")
        if key in headers:
            head.repeat(key, text)
        else:
            headers[key] = text
        head.size += len(name) + len(value)
        if head.size > MOST_HEADER_BYTES or len(headers) + head.repeats > MOST_HEADERS:
            raise too_many()

    def on_headers_complete(self) -> None:
        head, self._head, self._head_bytes = self._head, None, 0
        assert head is not None
        parser = self._parser
        version = parser.get_http_version()
        path, query = head.finish(version)
        method = parser.get_method().decode("ascii")
        request = self._reading = Request(method, path, query, head.headers, self)
        request.chunks = version == "1.1"
        request.keep_alive = request.chunks and parser.should_keep_alive()
        if parser.should_upgrade():
            self._ignore_upgrade(request)
        if self._serving is None:
            self._serve(request)
        else:
            self._next.append(request)
            self._pause()

    def _ignore_upgrade(self, request: Request) -> None:
        """Serve an upgrade request as a normal request, and as the last one of the connection."""
        if request.method == "CONNECT" or "transfer-encoding" in request.headers:
            self._reading = None
            raise malformed("a request must not be CONNECT, and must not upgrade and have a body in chunks")
        self._plain = int(request.headers.get("content-length", "0"))
        request.keep_alive = False

    def on_body(self, part: bytes) -> None:
        request = self._reading
        assert request is not None
        self.deadline += len(part) / _BODY_RATE
        request.more(part)
        if request.far_ahead:
            self._pause()

    def on_message_complete(self) -> None:
        if self._plain:
            return
        request, self._reading = self._reading, None
        assert request is not None
        request.end()
        if not request.keep_alive:  # bytes after the last request of a connection are not a request
            self._deaf = True
        if request is self._serving and self._can_write is None:
            self.deadline = _NEVER

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def invite(self, request: Request) -> None:
        """Somebody wants the rest of a body."""
        if request.headers.pop("expect", "").lower() == "100-continue" and request.chunks:
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
        if not last.keep_alive or self._server.leaving:
            self._linger()
        elif self._next:  # it arrived before the refused bytes
            self._serve(self._next.popleft())
        elif self._last is not None:
            self._last_words(self._last)
        elif self._deaf:
            self._linger()
        else:
            if self._paused:
                self._resume()
            self._rest()

    def _write(self, request: Request, reply: Reply) -> None:
        body = reply.body
        length = b"" if reply.status == 204 else b"content-length: %d\r\n" % len(body)
        head = self._head_of(request, reply, length)
        self._transport.write(head if request.method == "HEAD" else head + body)

    async def _write_stream(self, request: Request, reply: Reply, parts: AsyncGenerator[bytes, None]) -> None:
        request.streaming = True
        request.keep_alive = request.keep_alive and request.chunks
        framing = b"transfer-encoding: chunked\r\n" if request.chunks else b""
        async with contextlib.aclosing(parts):
            self._transport.write(self._head_of(request, reply, framing))
            if request.method == "HEAD":
                return
            async for part in parts:
                self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if request.chunks else part)
                if self._can_write is not None:
                    await self._can_write
        if request.chunks:
            self._transport.write(b"0\r\n\r\n")

    def _head_of(self, request: Request, reply: Reply, length: bytes) -> bytes:
        lines = f"content-type: {reply.media_type}\r\n" + self._server.head_lines(reply.headers)
        if reply.cookies:
            lines += "".join(f"set-cookie: {cookie}\r\n" for cookie in reply.cookies)
        ends = self._deaf and not self._next and self._last is None  # otherwise another answer follows
        if ends or not request.keep_alive or not request.complete or self._server.leaving:
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
            self._parse_on()

    def _rest(self) -> None:
        """Until when the caller must have done what we wait for: read, send the rest of a body, or something new."""
        if self._can_write is not None:
            return
        self._resting = self._serving is None
        if self._serving is None:
            self.deadline = time.monotonic() + (_IDLE_SECONDS if self._head is None else _HEAD_SECONDS)
        elif self._serving.complete:
            self.deadline = _NEVER
        else:
            self.deadline = time.monotonic() + _BODY_SECONDS

    def _refuse(self, error: ApiProblem) -> None:
        """Send the error, then close the connection. Answers to earlier requests come first. A request whose body is
        refused gets this error as its answer."""
        self._unread = True
        if self._deaf:
            return
        self._deaf = True
        if self._reading is not None:
            self._reading.fail(error)
        elif self._serving is not None:
            self._last = error
        else:
            self._last_words(error)

    def _last_words(self, error: ApiProblem) -> None:
        request = Request("GET", "", b"", {})
        request.keep_alive = False
        self._write(request, problem(error))
        self._linger()

    def _linger(self) -> None:
        """Hang up. What still comes is dropped for a moment first: a socket closed with unread bytes in it takes an
        answer along that is still on its way."""
        whole = self._reading is None and not self._unread and not self._paused
        self._deaf = True
        if whole:
            self._transport.close()
        else:
            self._resume()
            self._loop.call_later(_LINGER_SECONDS, self._transport.close)

    def look_at_clock(self, now: float, hurry: float = 0.0) -> None:
        """Cut a caller whose time is up; one that rests, `hurry` seconds before that."""
        rests = self._resting and self._head is None
        if now < self.deadline - (hurry if rests else 0.0):
            return
        self.deadline = _NEVER
        if self._can_write is not None:
            self._transport.abort()
        elif self._reading is not None or self._head is not None:
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


def _cause(error: httptools.HttpParserCallbackError) -> ApiProblem:
    """Return the exception that a callback of the parser raised."""
    if isinstance(error.__context__, ApiProblem):
        return error.__context__
    log.error("a request could not be read", error=repr(error.__context__), exc_info=error)
    return ServerFault("the server could not read this request; the cause was logged")


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
