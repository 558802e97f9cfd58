"""Requests that two HTTP programs may read differently, and what this server must answer to each.

One table for three runs: in memory, over a socket, and behind real proxies. `~` stands for the name of the case. Each
message names itself in its path and in `x-tag`, and the handler answers with what it saw, so that an answer shows to
which message it belongs. `/smuggled` is a request inside the bytes of another one: no handler may ever see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.node.http_wire import Answer, split_answers
from tocsin.node.server.protocol import Reply, Request

MOST_BODY = 100_000
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\nx-poison: yes\r\n\r\n"
POISON = ("tocsin-tenant", "authorization", "idempotency-key", "if-match", "x-poison")
END = b"GET /echo/end HTTP/1.1\r\nhost: localhost\r\nx-tag: end\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True)
class Case:
    """Bytes of one connection, the statuses that answer its messages, and how the caller closes it."""

    name: str
    expected: tuple[int, ...]
    data: bytes
    methods: tuple[str, ...] = ()
    end: Literal["read", "close", "half-close"] = "read"
    may_close: bool = False  # whether the server may close before it has answered all messages

    def allows(self, statuses: Sequence[int]) -> bool:
        """Return whether these statuses answer the messages correctly."""
        found = tuple(statuses)
        return found == self.expected or (self.may_close and found == self.expected[: len(found)])

    @property
    def sent(self) -> bytes:
        """Return the bytes, with the name of the case inserted."""
        return self.data.replace(b"~", self.name.encode())

    def tag(self, number: int) -> str:
        """Return the tag of one message."""
        return f"{self.name}-{number}"


def message(number: int, *lines: bytes, method: bytes = b"GET", where: bytes = b"echo", body: bytes = b"") -> bytes:
    """Return one message: its own tag, the lines that the case adds, and an unchanged body."""
    first = b"%b /%b/~-%d HTTP/1.1" % (method, where, number)
    return b"\r\n".join((first, b"host: localhost", b"x-tag: ~-%d" % number, *lines, b"", body))


def post(number: int, *lines: bytes, body: bytes = b"", where: bytes = b"echo") -> bytes:
    """Return a POST whose framing is in `lines`."""
    return message(number, *lines, method=b"POST", where=where, body=body)


def bare(*lines: bytes) -> bytes:
    """Return a message that consists only of the lines of the case."""
    return b"\r\n".join((*lines, b"", b""))


TE = b"transfer-encoding: chunked"
LAST = b"0\r\n\r\n"
CHUNKS = b"7\r\nbody of\r\n3\r\n it\r\n"
WHOLE = post(0, b"content-length: 4", body=b"body")
GET0, GET1, GET2 = message(0), message(1), message(2)
HOST, TAG = b"host: localhost", b"x-tag: ~-0"


def _each(name: str, messages: Iterable[bytes]) -> Iterator[Case]:
    """Return a case for each of these messages. All of them must be refused."""
    return (Case(f"{name}-{number}", (400,), data) for number, data in enumerate(messages))


def _framing() -> list[Case]:
    unread = post(0, b"content-length: %d" % len(SMUGGLED), body=SMUGGLED, where=b"early")
    both = post(0, b"content-length: %d" % (5 + len(SMUGGLED)), TE, body=LAST + SMUGGLED)
    swapped = post(0, TE, b"content-length: 4", body=b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED) + LAST)
    codings = [
        b"xchunked",
        b"identity",
        b"gzip, chunked",
        b"chunked, identity",
        b",chunked",
        b"chunked;a=b",
        b'"chunked"',
    ]
    codings += [
        b"chunked\r\ntransfer-encoding: identity",
        b"identity\r\ntransfer-encoding: chunked",
        b"chunked, chunked",
    ]
    lengths = [b"+4", b"-4", b"0x4", b"4,4", b"4 4", b"", b"4e0", b"1_0", b"\xb2", b"99999999999999999999", b"4\x0b"]
    return [
        Case("both-cl-first", (400,), both),
        Case("both-te-first", (400,), swapped),
        *_each("coding", (post(0, b"transfer-encoding: " + coding, body=LAST + SMUGGLED) for coding in codings)),
        Case("coding-space-before-colon", (400,), post(0, b"transfer-encoding : chunked", body=LAST + SMUGGLED)),
        Case("coding-vertical-tab", (400,), post(0, b"transfer-encoding: \x0bchunked", body=LAST + SMUGGLED)),
        Case("coding-folded", (400,), post(0, b"transfer-encoding:\r\n chunked", body=LAST + SMUGGLED)),
        Case("coding-after-tab", (200, 200), post(0, b"transfer-encoding:\tchunked", body=LAST) + GET1),
        Case("coding-in-capitals", (200, 200), post(0, b"Transfer-Encoding: CHUNKED", body=LAST) + GET1),
        Case("coding-in-1.0", (400,), bare(b"POST /echo/~-0 HTTP/1.0", HOST, TAG, TE) + LAST + SMUGGLED),
        Case("two-lengths", (400,), post(0, b"content-length: 4", b"content-length: 0", body=SMUGGLED)),
        Case("two-equal-lengths", (400,), post(0, b"content-length: 4", b"content-length: 4", body=b"body" + SMUGGLED)),
        *_each("length", (post(0, b"content-length: " + length, body=b"body" + SMUGGLED) for length in lengths)),
        Case("length-with-space-after", (200, 200), post(0, b"content-length: 4 ", body=b"body") + GET1),
        Case("length-with-zeros", (200, 200), post(0, b"content-length: 00004", body=b"body") + GET1),
        Case("get-with-body", (200, 200), message(0, b"content-length: %d" % len(SMUGGLED), body=SMUGGLED) + GET1),
        Case("body-that-nobody-reads", (200, 200), unread + GET1, may_close=True),
    ]  # fmt: skip


def _lines() -> list[Case]:
    return [
        Case("folded-line", (400,), message(0, b"x-a: b", b" x-more: yes") + GET1),
        Case("folded-first-line", (400,), bare(b"GET /echo/~-0 HTTP/1.1", b" x: y", HOST, TAG) + GET1),
        Case("bare-lf-everywhere", (400,), GET0.replace(b"\r\n", b"\n") + SMUGGLED),
        Case("bare-lf-in-header", (400,), message(0, b"x-a: b\nx-more: yes") + GET1),
        Case("bare-lf-before-end", (400,), bare(b"GET /echo/~-0 HTTP/1.1", HOST, TAG)[:-2] + b"\n" + SMUGGLED),
        Case("bare-cr-in-header", (400,), message(0, b"x-a: b\rx-more: yes") + GET1),
        Case("two-cr", (400,), message(0, b"x-a: b\r") + GET1),
        Case("nul-in-header", (400,), message(0, b"x-a: \0b") + GET1),
        Case("control-in-header", (400,), message(0, b"x-a: \x01\x7f") + GET1),
        Case("space-in-name", (400,), message(0, b"x a: b") + GET1),
        Case("no-colon", (400,), message(0, b"x-a") + GET1),
        Case("no-name", (400,), message(0, b": b") + GET1),
        Case("no-host", (400,), bare(b"GET /echo/~-0 HTTP/1.1", TAG) + GET1),
        Case("two-hosts", (400,), message(0, b"host: evil") + GET1),
        Case("two-equal-hosts", (400,), message(0, b"host: localhost") + GET1),
        *_each("two", (message(0, b"%b: 1" % name.encode(), b"%b: 1" % name.encode()) + GET1 for name in POISON[:-1])),
        Case("repeated-list", (200, 200), message(0, b"accept: a/b", b"accept: c/d") + GET1),
        Case("no-version", (400,), bare(b"GET /echo/~-0", HOST, TAG) + GET1),
        Case("version-2", (400,), bare(b"GET /echo/~-0 HTTP/2.0", HOST, TAG) + GET1),
        Case("version-0.9", (400,), bare(b"GET /echo/~-0 HTTP/0.9", HOST, TAG) + GET1),
        Case("version-1.2", (400,), bare(b"GET /echo/~-0 HTTP/1.2", HOST, TAG) + GET1),
        Case("preface-of-http2", (400,), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED),
        Case("tls-hello", (400,), b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n" + SMUGGLED),
        Case("unknown-method", (400,), message(0, method=b"BREW") + GET1),
        Case("method-in-small-letters", (400,), message(0, method=b"get") + GET1),
        Case("tab-in-request-line", (400,), bare(b"GET\t/echo/~-0 HTTP/1.1", HOST, TAG) + GET1),
        Case("space-in-target", (400,), bare(b"GET /echo/~-0 x HTTP/1.1", HOST, TAG) + GET1),
        Case("control-in-target", (400,), bare(b"GET /echo/~-0\x01 HTTP/1.1", HOST, TAG) + GET1),
        Case("empty-lines-before", (200, 200), b"\r\n\r\n" + GET0 + b"\r\n" + GET1),
    ]  # fmt: skip


def _chunks() -> list[Case]:
    def chunked(*parts: bytes) -> bytes:
        return post(0, TE, body=b"".join(parts))

    trailers = [b"%b: poison\r\n" % name.encode() for name in POISON] + [b"content-length: 5\r\n", b"x-empty:\r\n"]
    trailers += [TE + b"\r\n", b"host: evil\r\n", b"connection: close\r\n"]
    announced = post(0, TE, b"trailer: tocsin-tenant", b"te: trailers", body=b"0\r\ntocsin-tenant: poison\r\n\r\n")
    sizes = [
        b"0x7",
        b"+7",
        b"-7",
        b"7 ",
        b" 7",
        b"",
        b"g",
        b"fffffffffffffffff",
        b"7;",
        b"7;a\rb",
        b'7;a="\n"',
        b"7\x00",
    ]
    return [
        Case("chunks", (200, 200), chunked(CHUNKS, LAST) + GET1),
        Case("chunk-extension", (200, 200), chunked(b"7;a=b;c\r\nbody of\r\n", b"0;d\r\n\r\n") + GET1),
        Case("zeros-before-size", (200, 200), chunked(b"0007\r\nbody of\r\n0000\r\n\r\n") + GET1),
        *_each("trailer", (chunked(CHUNKS, b"0\r\n", trailer, b"\r\n") + GET1 for trailer in trailers)),
        Case("trailer-announced", (400,), announced + GET1),
        Case("trailer-is-a-request", (400,), chunked(b"0\r\n", SMUGGLED)),
        *_each("size", (chunked(size + b"\r\nbody of\r\n", LAST) + SMUGGLED for size in sizes)),
        Case("chunk-longer-than-its-size", (400,), chunked(b"4\r\nbody of\r\n", LAST) + SMUGGLED),
        Case("chunk-without-end", (400,), chunked(b"7\r\nbody ofXX", LAST) + SMUGGLED),
        Case("bare-lf-after-size", (400,), chunked(b"7\nbody of\r\n", LAST) + SMUGGLED),
        Case("bare-lf-after-chunk", (400,), chunked(b"7\r\nbody of\n", LAST) + SMUGGLED),
        Case("bare-lf-in-extension", (400,), chunked(b"7;a\nbody of\r\n", LAST) + SMUGGLED),
        Case("bare-lf-after-last-chunk", (400,), chunked(b"0\r\n\n") + SMUGGLED),
    ]  # fmt: skip


def _connections() -> list[Case]:
    upgrade, expect = (b"connection: upgrade", b"upgrade: h2c"), (b"expect: 100-continue", b"content-length: 4")
    absolute = b"GET http://localhost/echo/~-0 HTTP/1.1"
    head = message(0, method=b"HEAD", where=b"stream")
    return [
        Case("pipelined", (200, 200, 200), WHOLE + GET1 + GET2),
        Case("pipelined-after-404", (404, 200), message(0, where=b"none") + GET1),
        Case("pipelined-after-413", (413,), post(0, b"content-length: 100001", body=SMUGGLED)),
        Case("pipelined-after-early-answer", (200,), post(0, b"content-length: 1000", body=SMUGGLED, where=b"early")),
        Case("malformed-after-two", (200, 200, 400), GET0 + GET1 + b"x\r\n\r\n" + SMUGGLED),
        Case("trailer-after-one", (200, 400), GET0 + post(1, TE, body=b"0\r\ntocsin-tenant: poison\r\n\r\n") + GET2),
        Case("closed", (200,), message(0, b"connection: close") + SMUGGLED),
        Case("closed-or-kept", (200,), message(0, b"connection: close, keep-alive") + SMUGGLED),
        Case("kept-in-1.0", (200,), bare(b"GET /echo/~-0 HTTP/1.0", HOST, TAG, b"connection: keep-alive") + SMUGGLED),
        Case("not-kept-in-1.0", (200,), bare(b"GET /echo/~-0 HTTP/1.0", HOST, TAG) + SMUGGLED),
        Case("no-host-in-1.0", (200,), bare(b"GET /echo/~-0 HTTP/1.0", TAG)),
        Case("hop-by-hop", (200, 200), message(0, b"connection: x-tag, host", b"keep-alive: max=1000") + GET1),
        Case("absolute", (200, 200), bare(absolute, HOST, TAG) + GET1),
        Case("absolute-with-other-host", (200, 200), bare(absolute, b"host: evil", TAG) + GET1),
        Case("absolute-with-user", (400,), bare(b"GET http://user@localhost/echo/x HTTP/1.1", HOST) + GET1),
        Case("authority", (400,), bare(b"GET localhost:80 HTTP/1.1", HOST) + GET1),
        Case("asterisk", (404, 200), bare(b"OPTIONS * HTTP/1.1", HOST) + GET1),
        Case("fragment", (400,), bare(b"GET /echo/~-0#x HTTP/1.1", HOST, TAG) + GET1),
        Case("tunnel", (400,), bare(b"CONNECT localhost:80 HTTP/1.1", HOST) + SMUGGLED),
        Case("expect", (200, 200), post(0, *expect, body=b"body") + GET1),
        Case("expect-in-1.0", (200,), bare(b"POST /echo/~-0 HTTP/1.0", HOST, TAG, *expect) + b"body"),
        Case("expect-something-else", (200, 200), post(0, b"expect: x", b"content-length: 4", body=b"body") + GET1),
        Case("expect-refused", (413,), post(0, b"expect: 100-continue", b"content-length: 100001") + SMUGGLED),
        Case("upgrade", (200,), message(0, *upgrade) + SMUGGLED),
        Case("upgrade-with-body", (200,), post(0, *upgrade, b"content-length: 4", body=b"body") + SMUGGLED),
        Case("upgrade-with-chunks", (400,), post(0, *upgrade, TE, body=CHUNKS + LAST) + SMUGGLED),
        Case("head", (200, 200), message(0, method=b"HEAD") + GET1, ("HEAD", "GET")),
        Case("head-on-stream", (200, 200), head + GET1, ("HEAD", "GET")),
        Case("head-with-body", (200, 200), message(0, *expect[1:], method=b"HEAD", body=b"body") + GET1, ("HEAD",)),
        Case("stream", (200, 200), message(0, where=b"stream") + GET1),
        Case("stream-in-1.0", (200,), bare(b"GET /stream/~-0 HTTP/1.0", HOST, TAG)),
        Case("no-content", (204, 200), message(0, where=b"empty") + GET1),
        Case("close-in-head", (), GET0[:-7], end="close"),
        Case("close-in-body", (), post(0, b"content-length: 1000", body=SMUGGLED), end="close"),
        Case("close-in-chunk", (), post(0, TE, body=b"3e8\r\n" + SMUGGLED), end="close"),
        Case("close-in-stream", (200,), message(0, where=b"stream"), end="close"),
        Case("half-close-after-request", (200,), GET0, end="half-close", may_close=True),
        Case("half-close-in-body", (), post(0, b"content-length: 1000", body=SMUGGLED), end="half-close"),
    ]  # fmt: skip


def _oversize() -> list[Case]:
    many = [b"x-%d: a" % number for number in range(1000)]
    return [
        Case("many-headers", (431,), message(0, *many) + GET1),
        Case("many-equal-headers", (431,), message(0, *[b"x:y"] * 50_000) + GET1),
        Case("large-header", (431,), message(0, b"x: " + b"a" * 20_000) + GET1),
        Case("large-name", (431,), message(0, b"a" * 20_000 + b": b") + GET1),
        Case("large-target", (431,), bare(b"GET /echo/" + b"a" * 20_000 + b" HTTP/1.1", HOST, TAG) + GET1),
        Case("large-head", (431,), message(0, b"x: " + b"a" * 1_000_000) + GET1),
        Case("empty-lines", (431,), b"\r\n" * 500_000 + SMUGGLED),
        Case("large-body", (413,), post(0, b"content-length: 1000000", body=b"a" * 1_000_000)),
        Case("large-body-in-chunks", (413,), post(0, TE, body=b"2710\r\n%b\r\n" % (b"a" * 10_000) * 100 + LAST)),
        Case("large-trailers", (400,), post(0, TE, body=b"0\r\n" + b"a:b\r\n" * 200_000 + b"\r\n") + GET1),
        Case("large-trailer", (400,), post(0, TE, body=b"0\r\na: " + b"b" * 1_000_000 + b"\r\n\r\n") + GET1),
        Case("large-extension", (400,), post(0, TE, body=b"1;a=" + b"b" * 1_000_000 + b"\r\na\r\n" + LAST) + GET1),
        Case("tiny-chunks", (200, 200), post(0, TE, body=b"1\r\na\r\n" * 20_000 + LAST) + GET1),
    ]  # fmt: skip


CORPUS: Sequence[Case] = [*_framing(), *_lines(), *_chunks(), *_connections(), *_oversize()]


class TaggedHandler:
    """Answers each message with what the handler saw, and keeps every request that it received."""

    def __init__(self) -> None:
        self.handled: list[Request] = []

    async def __call__(self, request: Request) -> Reply:
        """Answer a request by the first segment of its path."""
        self.handled.append(request)
        where, tag = request.path[1:].partition("/")[0], tag_of(request)
        if where == "none" or request.path == "*":
            return Reply(status=404)
        if where == "empty":
            return Reply(status=204)
        body = b"" if where == "early" else await request.body(MOST_BODY)
        if where == "stream":
            return Reply(stream=_parts(tag))
        seen = {"tag": tag, "headers": request.headers, "size": len(body), "body": body[:100].decode("latin-1")}
        return Reply(json.dumps(seen).encode(), headers={"x-tag": tag})

    def check(self, *, behind_proxy: bool = False) -> None:
        """Raise if the handler received a request that no caller sent, or a field of one message in another message.

        A proxy may take the smuggled bytes for a request of the same caller, and pass it on as one. It adds a name to
        each request that it passes on, so a request without its own name is one that the proxy has not seen.
        """
        names = [request.headers.get("x-front", "") for request in self.handled]
        if behind_proxy:
            assert all(names) and len(set(names)) == len(names), "the server saw a request that the proxy did not"
        for request in self.handled:
            own = tag_of(request)
            if own == "smuggled":
                assert behind_proxy, f"a smuggled request was served: {request.headers}"
            else:
                assert request.headers.get("x-tag", own) == own, f"{request.path} has {request.headers}"
            poison = [name for name in POISON if request.headers.get(name) == "poison"]
            assert not poison, f"{request.path} was given {poison}"
            assert own == "smuggled" or "x-poison" not in request.headers, f"{request.path} was given x-poison"


def tag_of(request: Request) -> str:
    """Return the tag that a request contains."""
    return request.path.rpartition("/")[2]


async def _parts(tag: str) -> AsyncGenerator[bytes, None]:
    for part in (b'{"tag": "', tag.encode(), b'"}'):
        yield part


def check_answers(case: Case, answers: Sequence[Answer]) -> None:
    """Raise if an answer does not belong to its message: the n-th answer belongs to the n-th message."""
    methods = (*case.methods, *["GET"] * len(answers))
    tags = [case.tag(number) for number in range(len(case.expected))] + ["end"]
    assert len(answers) <= len(tags), f"more answers than messages: {answers}"
    for tag, answer, method in zip(tags, answers, methods, strict=False):
        assert own_tag(answer, method) in (None, tag), f"the answer to {tag} belongs to another message: {answer}"


def check_proxied_answers(case: Case, answers: Sequence[Answer]) -> None:
    """Raise if an answer belongs to another caller, or if the answers come out of order.

    A proxy may answer by itself, close early, or read more messages in the bytes than this server would.
    """
    methods = (*case.methods, *["GET"] * len(answers))
    tags = [*(case.tag(number) for number in range(3)), "smuggled", "end"]
    found = [own_tag(answer, method) for answer, method in zip(answers, methods, strict=False)]
    places = [tags.index(tag) for tag in found if tag is not None]
    assert places == sorted(set(places)), f"{found}: {answers}"


def own_tag(answer: Answer, method: str) -> str | None:
    """Return the tag of the message that an answer names, if it names one."""
    if answer.status == 200 and method != "HEAD":
        return str(json.loads(answer.body)["tag"])
    return answer.headers.get("x-tag")


async def talk(port: int, case: Case) -> list[Answer]:
    """Send a case over one connection and return every answer.

    Only a proxy may add bytes that are not an HTTP/1 answer: it knows HTTP/0.9 and HTTP/2. When all messages are
    answered and the connection is still open, one more request closes it, so that a surplus answer would be read, too.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    methods = [*case.methods, *["GET"] * (len(case.expected) - len(case.methods))]
    data = b""
    try:
        writer.write(case.sent)
        if case.end == "close":
            return []
        if case.end == "half-close":
            writer.write_eof()
        asked = case.end == "half-close"
        while part := await _read(reader):
            data += part
            if not asked and len(split_answers(data, methods, closed=False)[0]) >= len(case.expected):
                writer.write(END)
                asked = True
        answers, rest = split_answers(data, methods, closed=True)
        assert not rest.startswith(b"HTTP/1"), f"an answer was cut: {rest!r}"
        return answers
    finally:
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65_536)
    except ConnectionError:
        return b""
