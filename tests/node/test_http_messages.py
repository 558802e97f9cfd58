"""One connection, many messages: nothing of one message reaches another, and each message has bounds."""

from __future__ import annotations

import asyncio
import json
import re
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE
from tests.node.http_wire import MemoryWire, counted_calls
from tocsin.node.server import heads
from tocsin.node.server.protocol import Reply, Request

ROOT = Path(__file__).parents[2]
CHUNKED = b"POST /first HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
NEXT = b"GET /second HTTP/1.1\r\nhost: localhost\r\n\r\n"
DANGEROUS = [b"tocsin-tenant", b"authorization", b"idempotency-key", b"if-match", b"x-forwarded-for", b"cookie", b"a"]


def code_of(body: bytes) -> str:
    return str(json.loads(body).get("code"))


def seen_by(answer: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer)
    return found


@pytest.mark.parametrize("name", DANGEROUS)
@pytest.mark.parametrize("split", [False, True])
async def test_a_trailer_is_refused_and_reaches_no_other_request(name: bytes, split: bool) -> None:
    wire = MemoryWire()
    data = CHUNKED + name + b": victim\r\n\r\n" + NEXT
    await wire.send(*([data] if not split else [data[at : at + 1] for at in range(len(data))]))
    assert [(answer.status, code_of(answer.body)) for answer in wire.answers] == [(400, "malformed_http")]
    assert "trailer" in json.loads(wire.answers[0].body)["detail"]
    assert [request.path for request in wire.handled] == ["/first"]
    assert wire.answers[0].headers["connection"] == "close"


async def test_a_megabyte_of_trailers_is_neither_held_nor_read() -> None:
    wire = MemoryWire()
    message = CHUNKED + b"a:b\r\n" * 210_000
    tracemalloc.start()
    steps = await counted_calls(wire, message)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert steps < 2000, "the parser goes on after the first trailer"
    assert peak < 200_000, "trailers are held"
    assert [answer.status for answer in wire.answers] == [400]


@pytest.mark.parametrize("piece", [b"a", b"a: b", b";a=" + b"b" * 100])
async def test_a_trailer_or_chunk_extension_without_end_is_refused(piece: bytes) -> None:
    """The parser does not hand out an unfinished field, so its bytes are counted as they arrive."""
    wire = MemoryWire()
    await wire.send(CHUNKED[:-3] if piece.startswith(b";") else CHUNKED)
    sent = 0
    await wire.send(b"1;a=" if piece.startswith(b";") else b"x")
    while not wire.transport.closed and not wire.answers and sent < 1_000_000:
        await wire.send(b"b" * 1000)
        sent += 1000
    assert sent < 100_000 and [answer.status for answer in wire.answers] == [400]


async def test_many_fields_of_one_name_cost_no_more_steps_than_the_limit_allows() -> None:
    few, many = MemoryWire(), MemoryWire()
    steps = [
        await counted_calls(wire, b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x:y\r\n" * count + b"\r\n")
        for wire, count in ((few, 10_000), (many, 52_000))
    ]
    assert [answer.status for answer in (*few.answers, *many.answers)] == [431, 431]
    assert max(steps) < 2000, f"every field of the message was read: {steps}"


async def test_repeated_fields_are_joined_in_order() -> None:
    wire = MemoryWire()
    lines = (
        b"X-Forwarded-For: 1.1.1.1",
        b"accept: a/b",
        b"x-forwarded-for: 2.2.2.2 ",
        b"Accept:",
        b"X-Forwarded-For: 3",
    )
    await wire.send(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"\r\n".join(lines) + b"\r\n\r\n")
    headers = seen_by(wire.answers[0].body)["headers"]
    assert headers["x-forwarded-for"] == "1.1.1.1, 2.2.2.2, 3" and headers["accept"] == "a/b, "


@pytest.mark.parametrize("name", sorted(heads.ONCE - {"content-length", "transfer-encoding"}))
async def test_a_field_that_decides_is_refused_when_it_is_repeated(name: str) -> None:
    wire = MemoryWire()
    host = "" if name == "host" else "host: x\r\n"
    await wire.send(f"GET / HTTP/1.1\r\n{host}{name}: 1\r\n{name.upper()}: 1\r\n\r\n".encode())
    assert [(answer.status, code_of(answer.body)) for answer in wire.answers] == [(400, "malformed_http")]
    assert name in json.loads(wire.answers[0].body)["detail"] and not wire.handled


def test_every_header_that_is_read_is_single_or_listed() -> None:
    """A header that the server reads and that may be repeated must have a list as its value."""
    sources = (ROOT / "tocsin" / "node").rglob("*.py")
    read = {
        name
        for source in sources
        for name in re.findall(r"request\.headers\.(?:get|pop)\(\s*[\"']([a-z-]+)[\"']", source.read_text())
        + re.findall(r"[\"']([a-z-]+)[\"'] (?:not )?in request\.headers", source.read_text())
    }
    assert read >= {"host", "authorization", "idempotency-key", "if-match", "tocsin-tenant", "x-forwarded-for"}
    assert read - heads.ONCE == {"accept", "x-forwarded-for"}


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: y\r\nHOST: evil\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: x\r\nhost: y\r\n", 400),
        (b"GET / HTTP/1.0\r\n", 200),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", 200),
    ],
)
async def test_a_request_names_one_host(lines: bytes, status: int) -> None:
    wire = MemoryWire()
    await wire.send(lines + b"\r\n")
    assert [answer.status for answer in wire.answers] == [status]
    assert len(wire.handled) == (status == 200)


async def test_the_host_is_asked_for_on_each_request_of_a_connection() -> None:
    wire = MemoryWire()
    await wire.send(NEXT, b"GET /third HTTP/1.1\r\n\r\n")
    assert [answer.status for answer in wire.answers] == [200, 400]


async def test_no_state_of_a_message_outlives_it() -> None:
    """Each request sees its own headers, target and body, whatever came before on the connection."""
    wire = MemoryWire()
    body = b"POST /a?b=c HTTP/1.1\r\nhost: one\r\nif-match: 1\r\ncontent-length: 2\r\n\r\n{}"
    await wire.send(body, NEXT, body + NEXT)
    seen = [seen_by(answer.body) for answer in wire.answers]
    assert seen[0] == seen[2] and seen[1] == seen[3]
    assert seen[1] == {"method": "GET", "path": "/second", "query": "", "headers": {"host": "localhost"}, "body": ""}


async def test_head_on_a_stream_does_not_mark_the_calls_after_it() -> None:
    """A closed connection cancels a stream. It must not cancel a call that came after a HEAD on a stream."""
    started, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"one"

    async def handler(request: Request) -> Reply:
        if request.method == "HEAD":
            return Reply(stream=parts())
        started.set()
        await may_end.wait()
        ended.set()
        return Reply()

    wire = MemoryWire(handler)
    await wire.send(b"HEAD /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    assert wire.transport.written.endswith(b"\r\n\r\n") and b"chunked" in wire.transport.written
    wire.connection.data_received(b"POST /change HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    await started.wait()
    task = wire.connection._task
    wire.hang_up()
    may_end.set()
    assert task is not None
    await task
    assert ended.is_set(), "the call was cancelled midway"


# ── order, ends and upgrades ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_before_a_malformed_one_gets_its_own_answer() -> None:
    """Three requests in one piece, the third malformed: the second must not get the answer of the third."""
    wire = MemoryWire()
    await wire.send(NEXT + NEXT.replace(b"second", b"third") + b"GET /fourth HTTP/1.1\r\nno colon\r\n\r\n")
    first, second, third = wire.answers
    assert [seen_by(answer.body)["path"] for answer in (first, second)] == ["/second", "/third"]
    assert third.status == 400 and third.headers["connection"] == "close"
    assert "connection" not in first.headers and "connection" not in second.headers, "an answer follows"


async def test_a_waiting_request_whose_body_is_malformed_gets_the_error() -> None:
    wire = MemoryWire()
    await wire.send(NEXT + CHUNKED + b"a: b\r\n\r\n" + NEXT)
    assert [answer.status for answer in wire.answers] == [200, 400]
    assert [request.path for request in wire.handled] == ["/second", "/first"]


@pytest.mark.parametrize("lines", [b"HTTP/1.1\r\nhost: x\r\nconnection: close", b"HTTP/1.0\r\nconnection: keep-alive"])
async def test_nothing_is_served_after_the_last_request_of_a_connection(lines: bytes) -> None:
    wire = MemoryWire()
    await wire.send(b"GET /last " + lines + b"\r\n\r\n" + NEXT + b"GARBAGE")
    assert [seen_by(answer.body)["path"] for answer in wire.answers] == ["/last"]
    assert wire.answers[0].headers["connection"] == "close"
    assert not wire.transport.closed, "bytes are unread: closed at once, the answer would be lost on its way"


async def test_a_connection_is_closed_at_once_when_nothing_is_unread() -> None:
    wire = MemoryWire()
    await wire.send(b"GET /last HTTP/1.0\r\n\r\n")
    assert wire.transport.closed


@pytest.mark.parametrize("split", [1, 7, 1000])
async def test_a_request_that_asks_to_upgrade_keeps_its_body(split: int) -> None:
    """The Java client sends such a request first on each connection. llhttp skips the body of such a request."""
    wire = MemoryWire()
    lines = b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\ncontent-length: 5\r\n"
    data = b"POST /a HTTP/1.1\r\n" + lines + b"\r\nhello" + NEXT
    await wire.send(*(data[at : at + split] for at in range(0, len(data), split)))
    assert [seen_by(answer.body)["body"] for answer in wire.answers] == ["hello"]
    assert wire.answers[0].headers["connection"] == "close"


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT /a HTTP/1.1\r\nhost: x\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: ,chunked\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: identity\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: identity\r\ntransfer-encoding: chunked\r\n",
        b"POST /a HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n",
        b"GET /a HTTP/2.0\r\nhost: x\r\n",
        b"GET /a HTTP/0.9\r\nhost: x\r\n",
        b"GET /a#b HTTP/1.1\r\nhost: x\r\n",
        b"GET http://user@x/a HTTP/1.1\r\nhost: x\r\n",
    ],
)
async def test_a_head_that_two_readers_may_read_differently_is_refused(head: bytes) -> None:
    wire = MemoryWire()
    await wire.send(head + b"\r\n5\r\nhello\r\n0\r\n\r\n" + NEXT)
    assert [(answer.status, code_of(answer.body)) for answer in wire.answers] == [(400, "malformed_http")]
    assert not wire.handled


async def test_requests_sent_ahead_are_not_parsed_before_their_turn() -> None:
    """A request object takes far more memory than its bytes. Only the requests of one piece may wait."""
    go = asyncio.Event()

    async def handler(_request: Request) -> Reply:
        await go.wait()
        return Reply()

    wire = MemoryWire(handler)
    small = b"GET / HTTP/1.1\r\nhost:x\r\n\r\n"
    wire.connection.data_received(small * 10_000)
    await wire.settle()
    assert len(wire.connection._next) <= 16_384 // len(small) and wire.transport.paused
    go.set()
    while len(wire.handled) < 10_000:
        await asyncio.wait_for(wire.settle(), PATIENCE)
    await wire.settle()
    assert len(wire.answers) == 10_000 and not wire.transport.paused


async def test_a_body_in_tiny_chunks_is_held_in_few_objects() -> None:
    wire = MemoryWire()
    await wire.send(CHUNKED[:-3])
    for _ in range(100):
        await wire.send(b"2\r\nab\r\n" * 100)
    [request] = wire.handled
    assert request.size == 20_002 and len(request._parts) < 5
    await wire.send(b"0\r\n\r\n")
    assert seen_by(wire.answers[0].body)["body"] == "{}" + "ab" * 10_000


async def test_an_answer_without_content_has_no_length() -> None:
    async def handler(_request: Request) -> Reply:
        return Reply(status=204)

    wire = MemoryWire(handler)
    await wire.send(NEXT, NEXT)
    assert [(answer.status, answer.headers.get("content-length")) for answer in wire.answers] == [(204, None)] * 2
