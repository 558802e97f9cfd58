"""HTTP/1.1 over real sockets: what a caller may do, and what it may cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import pytest

from tests import PATIENCE
from tocsin.errors import ApiProblem
from tocsin.node.server import protocol
from tocsin.node.server.protocol import ClientGone, HttpServer, Reply, Request, problem

Handler = Callable[[Request], Awaitable[Reply]]


class Desk:
    """A server whose answers the test gives, and what it saw."""

    def __init__(self) -> None:
        self.handler: Handler = self.echo
        self.seen: list[Request] = []
        self.called, self.dropped = asyncio.Event(), asyncio.Event()
        self.http = HttpServer(self._respond)
        self.port = 0

    async def _respond(self, request: Request) -> Reply:
        self.seen.append(request)
        self.called.set()
        try:
            return await self.handler(request)
        except ApiProblem as error:
            return problem(error)
        except ClientGone:
            self.dropped.set()
            raise

    @staticmethod
    async def echo(request: Request) -> Reply:
        body = await request.body(1000)
        return Reply(json.dumps([request.method, request.path, body.decode()]).encode())

    async def call(self) -> Line:
        return Line(*await asyncio.open_connection("127.0.0.1", self.port))


class Line:
    """A caller's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, *words: bytes) -> Line:
        self.writer.write(b"".join(words))
        return self

    async def hear(self) -> tuple[int, dict[str, str], bytes]:
        """One answer."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE)).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        body = await asyncio.wait_for(self.reader.readexactly(int(headers.get("content-length", "0"))), PATIENCE)
        return int(first.split(" ")[1]), headers, body

    async def is_over(self) -> bool:
        """Whether the server hangs up, after nothing more."""
        try:
            return await asyncio.wait_for(self.reader.read(1), PATIENCE) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(protocol, "_TICK", 0.02)
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 0.2)
    desk = Desk()
    desk.port = await desk.http.start("127.0.0.1", 0)
    yield desk
    await desk.http.stop(0)


def post(body: bytes, more: bytes = b"") -> bytes:
    return b"POST /a HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)


async def test_answers_come_in_the_order_of_the_questions(desk: Desk) -> None:
    line = await desk.call()
    line.say(*(post(b"%d" % i) for i in range(300)), b"GET /end?x=%20 HTTP/1.1\r\nhost: x\r\n\r\n")
    for i in range(300):
        status, headers, body = await line.hear()
        assert status == 200 and "date" in headers and json.loads(body) == ["POST", "/a", str(i)]
    assert json.loads((await line.hear())[2])[1] == "/end" and desk.seen[-1].query == [("x", " ")]


async def test_a_body_in_pieces(desk: Desk) -> None:
    line = await desk.call()
    for byte in post(b"hello"):
        line.say(bytes([byte]))
        await line.writer.drain()
    assert json.loads((await line.hear())[2])[2] == "hello"
    line.say(b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n")
    assert json.loads((await line.hear())[2]) == ["POST", "/b", "abc"]


async def test_a_body_is_invited(desk: Desk) -> None:
    line = await desk.call()
    head, _, body = post(b"hello", b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    line.say(head, b"\r\n\r\n")
    assert (await line.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    assert json.loads((await line.say(body).hear())[2])[2] == "hello"


async def test_a_body_that_is_too_long_is_refused_before_it_came(desk: Desk) -> None:
    line = await desk.call()
    status, headers, body = await line.say(post(b"")[:-2].replace(b": 0", b": 1001"), b"\r\n").hear()
    assert status == 413 and json.loads(body)["code"] == "too_large" and headers["connection"] == "close"
    assert await line.is_over()


async def test_an_endless_body_is_not_read_to_its_end(desk: Desk) -> None:
    line = await desk.call()
    line.say(b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")

    async def sends() -> None:
        for _ in range(100_000):
            line.say(b"1000\r\n", b" " * 0x1000, b"\r\n")
            await line.writer.drain()
            await asyncio.sleep(0)

    sending = asyncio.ensure_future(sends())
    assert (await line.hear())[0] == 413
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(sending, PATIENCE)


async def test_what_nobody_asks_for_stays_in_the_kernel(desk: Desk) -> None:
    ask = asyncio.Event()

    async def slow(request: Request) -> Reply:
        await ask.wait()
        return Reply(b"%d" % len(await request.body(1 << 26)))

    desk.handler = slow
    line = await desk.call()
    line.say(post(b"a" * (1 << 25)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(line.writer.drain(), 0.5)
    [request] = desk.seen
    assert request.far_ahead and not request.complete
    ask.set()
    assert (await line.hear())[2] == b"%d" % (1 << 25)


async def test_a_head_that_does_not_come(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.1)
    line = await desk.call()
    status, _, body = await line.say(b"GET / HTTP/1.1\r\nhost: x\r\nx: ").hear()
    assert status == 408 and json.loads(body)["code"] == "request_timeout"
    assert await line.is_over() and not desk.seen


async def test_a_body_that_does_not_come(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_BODY_SECONDS", 0.1)
    line = await desk.call()
    status, headers, _ = await line.say(post(b"hello")[:-1]).hear()
    assert status == 408 and headers["connection"] == "close" and await line.is_over()


async def test_who_says_nothing_is_sent_away_without_a_word(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.1)
    monkeypatch.setattr(protocol, "_IDLE_SECONDS", 0.1)
    assert await (await desk.call()).is_over()
    line = await desk.call()
    assert (await line.say(post(b"")).hear())[0] == 200
    assert await line.is_over()


async def test_who_does_not_read_is_cut(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_STALLED_SECONDS", 0.2)
    ended = asyncio.Event()

    async def flood() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"a" * 65_536
        finally:
            ended.set()

    async def streams(_request: Request) -> Reply:
        return Reply(stream=flood())

    desk.handler = streams
    line = await desk.call()
    line.say(post(b""))
    await asyncio.wait_for(ended.wait(), PATIENCE)
    assert not desk.http.connections


async def test_a_stream_ends_with_its_reader(desk: Desk) -> None:
    ended = asyncio.Event()

    async def parts() -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            yield b"two"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def streams(_request: Request) -> Reply:
        return Reply(media_type="text/plain", stream=parts())

    desk.handler = streams
    line = await desk.call()
    line.say(post(b""))
    assert (await line.hear())[1]["transfer-encoding"] == "chunked"
    assert await line.reader.readexactly(16) == b"3\r\none\r\n3\r\ntwo\r\n"
    line.writer.close()
    await asyncio.wait_for(ended.wait(), PATIENCE)


async def test_a_stream_that_ends_leaves_the_line_open(desk: Desk) -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"one"

    async def streams(_request: Request) -> Reply:
        return Reply(stream=parts())

    desk.handler = streams
    line = await desk.call()
    for _ in range(2):
        await line.say(post(b"")).hear()
        assert await line.reader.readexactly(13) == b"3\r\none\r\n0\r\n\r\n"[:13]
    old = await desk.call()
    old.say(b"GET / HTTP/1.0\r\n\r\n")
    assert (await old.reader.read()).endswith(b"\r\n\r\none"), "HTTP/1.0 knows no chunks"


async def test_the_caller_hangs_up(desk: Desk) -> None:
    told = asyncio.Event()

    async def waits(request: Request) -> Reply:
        await request.gone
        told.set()
        return Reply()

    desk.handler = waits
    (await desk.call()).say(post(b"")).writer.close()
    await asyncio.wait_for(told.wait(), PATIENCE)
    desk.handler = desk.echo
    (await desk.call()).say(post(b"hello")[:-1]).writer.close()
    await asyncio.wait_for(desk.dropped.wait(), PATIENCE)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 17_000 + b"\r\n\r\n", 431),
        (b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_what_is_not_http_is_told_so_after_what_was(desk: Desk, said: bytes, status: int) -> None:
    line = await desk.call()
    line.say(post(b"first"), said)
    assert (await line.hear())[0] == 200
    assert await refused(line, status)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 40_000, b"GET /" + b"a" * 40_000])
async def test_a_head_without_end(desk: Desk, said: bytes) -> None:
    assert await refused((await desk.call()).say(said), 431)


async def refused(line: Line, status: int) -> bool:
    found, headers, body = await line.hear()
    assert (found, headers["content-type"], json.loads(body)["status"]) == (status, "application/problem+json", status)
    return headers["connection"] == "close" and await line.is_over()


async def test_head_upgrade_and_close(desk: Desk) -> None:
    line = await desk.call()
    line.say(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head = (await line.reader.readuntil(b"\r\n\r\n")).decode()
    assert int(head.partition("content-length: ")[2].split("\r\n")[0]) > 0, "HEAD tells the length and sends nothing"
    assert (await line.hear())[1]["connection"] == "close" and await line.is_over()
    line = await desk.call()
    line.say(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await line.hear())[1]["connection"] == "close" and await line.is_over()


async def test_a_server_that_goes_ends_what_is_under_way(desk: Desk) -> None:
    go = asyncio.Event()

    async def waits(_request: Request) -> Reply:
        await go.wait()
        return Reply(b"done")

    desk.handler = waits
    busy, idle = (await desk.call()).say(post(b"")), await desk.call()
    await asyncio.wait_for(desk.called.wait(), PATIENCE)
    stopping = asyncio.ensure_future(desk.http.stop(5))
    assert await idle.is_over()
    go.set()
    assert (await busy.hear())[1]["connection"] == "close"
    await asyncio.wait_for(stopping, PATIENCE)
    with pytest.raises(ConnectionRefusedError):
        await desk.call()
