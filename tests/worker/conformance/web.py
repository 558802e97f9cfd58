"""Requests, to an endpoint that does what its path says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any, ClassVar

from .harness import BINARY, Deed, Harness

_OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
_ANSWERS: dict[str, list[bytes]] = {
    "nothing": [_OK],
    "say": [_OK, "héllo\n".encode()],
    "fail": [b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"],
    "die": [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"],
    "wait": [_OK, b"up\n"],
    "refuse": [_OK, b"up\n"],
    "flood": [_OK, *[(b"x" * 999 + b"\n") * 1000] * 40],
    "binary": [_OK, BINARY],
    "hog": [_OK],
}


class HttpHarness(Harness):
    """What is left of a request is its connection: it must be hung up on, whatever the endpoint does about that."""

    kind = "http"
    fails_as = ("status_5xx", None)
    dies_as = "protocol"
    absent_as = "connect"
    worker: ClassVar[dict[str, Any]] = {"settings": {"http_private": True}}

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._nobody = socket.socket()
        self._nobody.bind(("127.0.0.1", 0))  # and does not listen
        self._waiting: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> HttpHarness:
        self._listening.setblocking(False)
        self._begin(self._accept())
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        for each in (self._listening, self._nobody, *self._waiting):
            each.close()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            peer, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            peer.setblocking(False)
            self._begin(self._serve(peer))

    async def _serve(self, peer: socket.socket) -> None:
        loop, asked = asyncio.get_running_loop(), b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in asked and (data := await loop.sock_recv(peer, 65_536)):
                asked += data
            deed = asked.split(b" ")[1].decode().strip("/")
            if deed in ("wait", "refuse"):
                self._waiting.append(peer)
            for words in _ANSWERS[deed]:
                await loop.sock_sendall(peer, words)
        if peer not in self._waiting:
            peer.close()

    def target(self, deed: Deed) -> dict[str, Any]:
        at = self._nobody if deed == "absent" else self._listening
        return {"kind": "http", "url": f"http://127.0.0.1:{at.getsockname()[1]}/{deed}", "method": "GET"}

    def left(self) -> list[str]:
        return [str(peer.getpeername()) for peer in self._waiting if not _hung_up(peer)]


def _hung_up(peer: socket.socket) -> bool:
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
