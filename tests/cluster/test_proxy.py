"""The proxy does to a connection what its names say, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests import PATIENCE

from .proxy import Link, Requests


class Echo:
    """An HTTP server of a few lines that remembers what it was asked and answers it back."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.arrived = asyncio.Event()
        self.ended = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = Requests()
        try:
            while data := await reader.read(65536):
                for request in requests.feed(data):
                    self.asked.append(request)
                    self.arrived.set()
                    body = request.partition(b"\r\n\r\n")[2]
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        finally:
            self.ended += 1
            writer.close()

    async def count(self, wanted: int) -> None:
        while len(self.asked) < wanted:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), PATIENCE)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()


@pytest.fixture
async def link(echo: Echo) -> AsyncIterator[Link]:
    link = await Link([("127.0.0.1", echo.port)], http=True).open()
    yield link
    await link.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def ask(self, body: bytes) -> None:
        self._writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def answer(self, seconds: float = 5) -> bytes:
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), seconds)
        return await asyncio.wait_for(self._reader.readexactly(int(head.split(b": ")[1].split(b"\r")[0])), seconds)

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self._reader.read(), PATIENCE)

    def close(self) -> None:
        self._writer.close()


async def client(link: Link) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", link.port))


async def test_without_a_fault_it_is_not_there(link: Link, echo: Echo) -> None:
    one, other = await client(link), await client(link)
    one.ask(b"a" * 300_000)
    other.ask(b"b")
    assert await one.answer() == b"a" * 300_000
    assert await other.answer() == b"b"
    one.close()
    assert len(echo.asked) == 2


async def test_an_upstream_that_is_down_is_passed_over(echo: Echo) -> None:
    nobody = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = nobody.sockets[0].getsockname()[1]
    nobody.close()
    link = await Link([("127.0.0.1", port), ("127.0.0.1", echo.port)]).open()
    for _ in range(8):
        one = await client(link)
        one.ask(b"x")
        assert await one.answer() == b"x"
    link.upstreams = [("127.0.0.1", port)]
    assert await (await client(link)).rest() == b""
    await link.close()


async def test_replies_that_are_held_come_late(link: Link, echo: Echo) -> None:
    one = await client(link)
    link.hold(down=True)
    one.ask(b"held")
    await echo.count(1)
    with pytest.raises(TimeoutError):
        await one.answer(0.05)
    link.release()
    assert await one.answer() == b"held"


async def test_a_request_that_is_held_arrives_although_nobody_waits_any_more(link: Link, echo: Echo) -> None:
    one = await client(link)
    link.hold(up=True)
    one.ask(b"late")
    await asyncio.sleep(0.05)
    one.close()
    assert echo.asked == []
    link.release()
    await echo.count(1)


async def test_a_stranded_connection_says_nothing_for_ever_and_a_new_one_works(link: Link, echo: Echo) -> None:
    one = await client(link)
    one.ask(b"before")
    assert await one.answer() == b"before"
    assert link.strand() == 1
    one.ask(b"lost")
    with pytest.raises(TimeoutError):
        await one.answer(0.05)
    one.close()
    new = await client(link)
    new.ask(b"new")
    assert await new.answer() == b"new"
    assert [r[-6:] for r in echo.asked] == [b"before", b"\n\r\nnew"]
    assert echo.ended == 0, "the server still believes in the stranded connection"
    link.heal()
    new.ask(b"newer")
    assert await new.answer() == b"newer"
    assert echo.ended == 1


async def test_a_reply_is_cut_in_its_middle(link: Link, echo: Echo) -> None:
    one = await client(link)
    link.cut_next()
    one.ask(b"0123456789")
    got = await one.rest()
    assert 0 < len(got) < len(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789")
    again = await client(link)
    again.ask(b"whole")
    assert await again.answer() == b"whole"


async def test_delayed_pieces_keep_their_order(link: Link) -> None:
    link.delay = 0.02
    one = await client(link)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for n in range(20):
        one.ask(b"%d" % n)
        await asyncio.sleep(0.002)
    assert [int(await one.answer()) for _ in range(20)] == list(range(20))
    assert loop.time() - began >= 0.04


async def test_whole_requests_are_sent_again_and_answered_once(link: Link, echo: Echo) -> None:
    link.duplicates = 1.0
    one = await client(link)
    one.ask(b"twice")
    assert await one.answer() == b"twice"
    await echo.count(2)
    assert len(set(echo.asked)) == 1
    with pytest.raises(TimeoutError):
        await one.answer(0.05)


def test_requests_are_cut_wherever_the_bytes_were() -> None:
    stream = b"".join(
        b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (n, b"\r\n\r\n" * (n // 4)) for n in (0, 4, 40)
    )
    stream += b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    for size in (1, 3, 7, 1000):
        requests, found = Requests(), []
        for at in range(0, len(stream), size):
            found += requests.feed(stream[at : at + size])
        assert b"".join(found) == stream
        assert len(found) == 4


def test_what_comes_in_chunks_is_let_through_unseen() -> None:
    requests = Requests()
    assert requests.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n") == []
    assert requests.feed(b"GET / HTTP/1.1\r\n\r\n") == []
