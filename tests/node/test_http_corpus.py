"""The smuggling corpus against the server itself: in memory, however the bytes are split, and over a socket."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from tests import PATIENCE
from tests.node.http_corpus import CORPUS, END, SMUGGLED, Case, TaggedHandler, check_answers, talk
from tests.node.http_wire import MemoryWire, counted_calls
from tocsin.node.server import protocol
from tocsin.node.server.protocol import HttpServer, Reply, Request

IN_MEMORY = [case for case in CORPUS if case.end == "read"]


def name_of(case: Case) -> str:
    return case.name


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CORPUS}) == len(CORPUS) > 100


@pytest.mark.parametrize("case", IN_MEMORY, ids=name_of)
async def test_a_case_is_answered_the_same_however_it_is_split(case: Case) -> None:
    data = case.sent
    for size in (1, 3, 1000, len(data)):
        handler = TaggedHandler()
        wire = MemoryWire(handler)
        size = max(size, len(data) // 200)  # large cases in 200 pieces at most
        await wire.send(*(data[at : at + size] for at in range(0, len(data), size)))
        answers = wire.answers
        assert case.allows([answer.status for answer in answers]), (size, answers)
        check_answers(case, answers)
        handler.check()


@pytest.fixture
async def handler() -> TaggedHandler:
    return TaggedHandler()


@pytest.fixture
async def port(handler: TaggedHandler, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 0.2)
    server = HttpServer(MemoryWire(handler)._respond)
    yield await server.start("127.0.0.1", 0)
    await server.stop(grace=0)


async def test_the_corpus_over_sockets(port: int, handler: TaggedHandler) -> None:
    found = await asyncio.wait_for(asyncio.gather(*(talk(port, case) for case in CORPUS)), PATIENCE)
    for case, answers in zip(CORPUS, found, strict=True):
        statuses = [answer.status for answer in answers[: len(case.expected)]]
        assert case.end == "close" or case.allows(statuses), (case.name, answers)
        check_answers(case, answers)
    handler.check()


ENDLESS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"x-%d: y\r\n"),
    "equal headers": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x:y\r\n"),
    "a header name": (b"GET / HTTP/1.1\r\n", b"a"),
    "a header": (b"GET / HTTP/1.1\r\nx: ", b"a"),
    "a target": (b"GET /", b"a"),
    "empty lines": (b"", b"\r\n"),
    "requests": (b"", b"GET /echo/a HTTP/1.1\r\nhost:x\r\n\r\n"),
    "requests that wait": (b"GET /wait HTTP/1.1\r\nhost:x\r\n\r\n", b"GET /echo/a HTTP/1.1\r\nhost:x\r\n\r\n"),
    "a body": (b"POST /echo/a HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n", b"a"),
    "a body that waits": (b"POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n", b"a"),
    "chunks": (b"POST /echo/a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\nab\r\n"),
    "chunks that wait": (b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\nab\r\n"),
    "trailers": (b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n"),
    "a trailer": (b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\na:", b"b"),
    "an extension": (b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;a=", b"b"),
    "extensions": (b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"1;a=b\r\nc\r\n"),
    "garbage": (b"", b"\x00"),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_bytes_without_end_cost_bounded_memory_and_steps(name: str) -> None:
    """Send two megabytes, in pieces as large as the event loop reads. Count calls for each byte, and the bytes held."""
    first, unit = ENDLESS[name]
    piece = b"".join(unit % n for n in range(25_000)) if b"%d" in unit else unit * (250_000 // len(unit))
    wire = MemoryWire(_waits_or_echoes)
    await wire.send(first)
    tracemalloc.start()
    calls = sent = 0
    while sent < 2_000_000 and not wire.transport.closed and not wire.transport.paused and not wire.connection._deaf:
        calls += await counted_calls(wire, piece)
        sent += len(piece)
        wire.transport.written.clear()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert calls < 10 * sent + 1000, f"{calls / sent:.1f} calls for each byte"
    assert peak < 5_000_000 and held < 3_000_000, f"{held} bytes are held, {peak} at the peak"
    wire.hang_up()


async def _waits_or_echoes(request: Request) -> Reply:
    if request.path == "/wait":
        await request.gone
    return await TaggedHandler()(request)


async def test_the_checks_find_a_lie(port: int, handler: TaggedHandler) -> None:
    """A check that cannot fail proves nothing."""
    with pytest.raises(AssertionError, match="another message"):
        check_answers(Case("wrong", (200,), b""), await talk(port, Case("wrong", (200,), END)))
    await talk(port, Case("smuggled", (404,), SMUGGLED))
    with pytest.raises(AssertionError, match="smuggled"):
        handler.check()
