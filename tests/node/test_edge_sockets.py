"""Callers who cost more than they may, over real sockets: others go on meanwhile, and memory does not grow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import PATIENCE
from tests.cluster.cluster import until
from tests.node.test_edge_tls import House
from tests.node.test_edge_tls import ask as shaken
from tests.node.test_protocol import Desk, Line
from tocsin.node.server import listen, protocol
from tocsin.node.server.protocol import HttpServer, Reply, Request

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    """A server for twenty connections, of which one address may have them all."""
    monkeypatch.setattr(protocol, "_TICK", 0.02)
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 0.2)
    desk = Desk()
    desk.http = HttpServer(desk._respond, most=20, trusted=lambda _address: True)
    desk.port = await desk.http.start("127.0.0.1", 0)
    yield desk
    await desk.http.stop(grace=1.0)


async def reached(desk: Desk, number: int) -> None:
    """There are so many connections, as the server sees it."""

    async def counted() -> bool:
        return len(desk.http.connections) == number

    await until(f"{number} connections", counted)


async def fill(desk: Desk, number: int) -> list[Line]:
    """So many more callers."""
    before = len(desk.http.connections)
    lines = [await desk.call() for _ in range(number)]
    await reached(desk, before + number)
    return lines


async def test_one_connection_too_many_is_told_so(desk: Desk) -> None:
    lines = await fill(desk, 20)
    late = await desk.call()
    status, headers, body = await late.hear()
    assert (status, headers["retry-after"]) == (503, "5") and b"too_many_connections" in body
    assert await late.is_over()
    lines[0].writer.close()
    await reached(desk, 19)
    assert (await (await desk.call()).say(GET).hear())[0] == 200


async def test_one_address_does_not_take_all(desk: Desk) -> None:
    desk.http._trusted = lambda _address: False
    lines = await fill(desk, 5)
    assert (await (await desk.call()).hear())[0] == 503, "a quarter is for one"
    lines.pop().writer.close()
    await reached(desk, 4)
    assert (await (await desk.call()).say(GET).hear())[0] == 200


async def test_with_tls_who_never_shakes_hands_is_counted_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "_HANDSHAKE_SECONDS", 0.5)
    house = House(tmp_path)
    house.http = HttpServer(house._respond, most=20)
    house.port = await house.http.start("127.0.0.1", 0, house.certificate.context)
    silent = [await asyncio.open_connection("127.0.0.1", house.port) for _ in range(30)]

    async def over() -> bool:
        return sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent) >= 25

    await until("25 of them are sent away, for a quarter of 20 is for one address", over)
    assert house.http._open <= 5 and not house.http.connections

    async def forgotten() -> bool:
        return house.http._open == 0 and not house.http._by_address

    await until("the others had their time", forgotten)
    lines = [await house.call() for _ in range(5)]
    with pytest.raises(OSError, match=r".*"):
        await house.call()
    assert [(await shaken(*line)).startswith(b"HTTP/1.1 200") for line in lines] == [True] * 5
    for _, writer in (*lines, *silent):
        writer.close()
    await until("all are gone", forgotten)
    await house.http.stop(grace=1.0)


async def test_with_tls_a_server_that_leaves_lets_go_of_who_has_not_shaken_hands(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.port = await house.http.start("127.0.0.1", 0, house.certificate.context)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)

    async def counted() -> bool:
        return house.http._open == 1

    await until("it is counted", counted)
    await house.http.stop(grace=PATIENCE)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", house.port)


async def test_many_slow_heads_are_cut_and_others_go_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.3)
    slow = [(await desk.call()).say(b"GET / HTTP/1.1\r\nx-slow: ") for _ in range(18)]
    other = await desk.call()
    assert (await other.say(GET).hear())[0] == 200
    assert [(await line.hear())[0] for line in slow] == [408] * 18
    assert all([await line.is_over() for line in slow])
    assert (await (await desk.call()).say(GET).hear())[0] == 200


async def test_a_byte_now_and_then_does_not_keep_a_head_alive(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.3)
    line = await desk.call()
    line.say(b"GET / HTTP/1.1\r\nx: ")
    answer = asyncio.ensure_future(line.hear())
    while not answer.done():
        line.say(b"a")
        await asyncio.wait([answer], timeout=0.05)
    assert answer.result()[0] == 408


async def test_a_byte_now_and_then_does_not_keep_a_body_alive(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_BODY_SECONDS", 0.3)
    line = await desk.call()
    line.say(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
    answer = asyncio.ensure_future(line.hear())
    while not answer.done():
        line.say(b"a")
        await asyncio.wait([answer], timeout=0.05)
    assert answer.result()[0] == 408


async def test_who_rests_goes_sooner_when_there_are_many(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_CROWDED_IDLE_SECONDS", 0.1)
    resting = await fill(desk, 2)
    for line in resting:
        assert (await line.say(GET).hear())[0] == 200
    silent = [await desk.call() for _ in range(16)]  # a crowd even without those who rest
    assert all([await line.is_over() for line in resting]), "they would have had more than a minute"
    await reached(desk, len(silent))  # who has just come has time to say something


async def test_who_asks_on_without_reading_is_answered_no_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_STALLED_SECONDS", 0.3)

    async def much(_request: Request) -> Reply:
        return Reply(b"a" * 1_000_000)

    desk.handler = much
    line = await desk.call()
    line.say(GET * 1000)
    await asyncio.wait_for(desk.called.wait(), PATIENCE)
    await reached(desk, 0)
    assert len(desk.seen) < 20, "no more than the kernel's buffers took"
