"""What no client library sends, over a socket to a real server: it answers or hangs up, and goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import PATIENCE
from tests.cluster.cluster import Server, Site
from tests.conftest import Cluster


@pytest.fixture
async def server(cluster: Cluster, database_url: str, tmp_path: Path) -> AsyncIterator[Server]:
    with Site(tmp_path, database_url, cluster.keys) as site:
        yield await site.server("one")


async def said(server: Server, *parts: bytes) -> bytes:
    """What the server answers to these bytes; nothing if it hangs up without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answer = asyncio.ensure_future(heard(reader))  # it may come before all was said
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        return await asyncio.wait_for(answer, PATIENCE)
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = re.findall(rb"\ncontent-length: (\d+)", head)
    return head + await reader.readexactly(int(length))


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/1.1 ") else 0


async def test_odd_bytes(server: Server, cluster: Cluster) -> None:
    key = b"Authorization: Bearer " + cluster.keys["key"].encode() + b"\r\n"
    host = b"Host: localhost\r\nConnection: close\r\n" + key
    post = b"POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\n" + host
    kept = post.replace(b"Connection: close\r\n", b"")
    many = b"".join(b"x-%d: a\r\n" % i for i in range(1000))
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    # (row of PROMISES.md section 3, statuses, what is sent)
    cases: list[tuple[str, tuple[int, ...], list[bytes]]] = [
        ("2 no length", (400,), [post + b"\r\n"]),
        ("2 two lengths", (400,), [post + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x"]),
        ("2 length and chunks", (400,), [post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"]),
        ("2 negative length", (400,), [post + b"Content-Length: -1\r\n\r\n"]),
        ("2 length beyond all", (400, 413), [post + b"Content-Length: 99999999999999999999999\r\n\r\n"]),
        ("1 too long by its word", (413,), [post + b"Content-Length: 9000000\r\n\r\n"]),
        ("2 chunks without end", (413,), [kept + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 12]),
        ("2 bad chunk", (400,), [post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"]),
        ("7 1,000 headers", (431,), [b"GET /v1/jobs HTTP/1.1\r\n" + host + many + b"\r\n"]),
        ("7 large header", (431,), [b"GET /v1/jobs HTTP/1.1\r\n" + host + b"x: " + b"a" * 20_000 + b"\r\n\r\n"]),
        (
            "7 large header, open to all",
            (431,),
            [b"GET /healthz HTTP/1.1\r\n" + host + b"x: " + b"a" * 20_000 + b"\r\n\r\n"],
        ),
        ("9 no method", (400, 405), [b"BREW /v1/jobs HTTP/1.1\r\n" + host + b"\r\n"]),
        ("9 no HTTP", (0, 400), [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"]),
        ("11 dots", (404,), [b"GET /v1/jobs/../../etc/passwd HTTP/1.1\r\n" + host + b"\r\n"]),
        ("11 NUL", (0, 400, 404), [b"GET /v1/jobs/\0 HTTP/1.1\r\n" + host + b"\r\n"]),
        ("11 no ASCII", (0, 400, 404), [b"GET /v1/jobs/\xff\xfe HTTP/1.1\r\n" + host + b"\r\n"]),
        ("11 10 KB", (404, 414), [b"GET /v1/jobs/" + b"a" * 10_240 + b" HTTP/1.1\r\n" + host + b"\r\n"]),
        ("11 a whole URL", (421,), [b"GET http://evil/v1/jobs HTTP/1.1\r\n" + host + b"\r\n"]),
        ("62 two keys", (400,), [b"GET /v1/jobs HTTP/1.1\r\n" + host + key + b"\r\n"]),
        (
            "62 odd bytes in the key",
            (400, 401),
            [b"GET /v1/jobs HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"],
        ),
    ]
    for row, expected, parts in cases:
        reply = await said(server, *parts)
        assert status(reply) in expected, f"row {row}: {reply[:300]!r}"
        if status(reply) in (413, 431):
            assert b"application/problem+json" in reply and json.loads(reply.partition(b"\r\n\r\n")[2])["code"], row
    assert status(await said(server, b"GET /v1/jobs HTTP/1.1\r\n" + host + b"\r\n")) == 200
    assert server.said("request failed") == 0


async def test_a_slow_caller_holds_up_nobody(server: Server) -> None:
    """8 (slow loris): others go on meanwhile; that it is cut off with a 408 is in tests/node/test_protocol.py."""
    crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(200)]
    for _, writer in crowd:
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nx: ")
    assert status(await said(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")) == 200
    for _, writer in crowd:
        writer.close()
