"""Callers who come with TLS, counted when they come: one that never shakes hands costs a connection, too.

The event loop's own listener tells nobody of a caller before the handshake is done, so that any number of silent ones
could be had beside those that are counted. Without TLS it tells at once, and is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tocsin.telemetry import get_logger

log = get_logger("server")
_BACKLOG = 2048
_HANDSHAKE_SECONDS, _SHUTDOWN_SECONDS = 10.0, 1.0
_OUT_OF_FILES_SECONDS = 1.0  # until somebody has hung up


class Caller(asyncio.Protocol):
    """Who is spoken to once hands are shaken."""

    met = False  # whether that was done: then it is he who says when he goes


class Counts(Protocol):
    """Who counts connections."""

    def admit(self, peer: str) -> bool:
        """Count one more from there, unless there are too many."""

    def release(self, peer: str) -> None:
        """One from there is closed."""


class TlsListener:
    """Accepts callers on every address of a host, and shakes hands with those that are let in."""

    def __init__(self, counts: Counts, caller: Callable[[str], Caller], tls: ssl.SSLContext) -> None:
        """`caller`: made for one who comes from an address."""
        self._counts, self._caller, self._tls = counts, caller, tls
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Accept callers; answers the port."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, kind, number, _, address in dict.fromkeys(found):
                self._sockets.append(_listening(family, kind, number, address))
        except OSError:
            for each in self._sockets:
                each.close()
            raise
        for each in self._sockets:
            self._begin(self._accept(loop, each))
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept nobody any more; who has not shaken hands yet is let go."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        with listening:  # closed when nobody waits at it any more
            while True:
                try:
                    accepted, address = await loop.sock_accept(listening)
                except ConnectionError:
                    continue  # gone before it was accepted
                except OSError as error:
                    log.error("nobody can be accepted", error=error.strerror or str(error))
                    await asyncio.sleep(_OUT_OF_FILES_SECONDS)
                    continue
                peer = str(address[0])
                if self._counts.admit(peer):
                    self._begin(self._greet(loop, accepted, peer))
                else:
                    accepted.close()

    async def _greet(self, loop: asyncio.AbstractEventLoop, accepted: socket.socket, peer: str) -> None:
        caller = self._caller(peer)
        try:
            with contextlib.suppress(OSError):  # ssl's errors are such, too: a caller's affair
                await loop.connect_accepted_socket(
                    lambda: caller,
                    accepted,
                    ssl=self._tls,
                    ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
                )
        finally:
            if not caller.met:
                self._counts.release(peer)


def _listening(family: int, kind: int, number: int, address: Any) -> socket.socket:
    made = socket.socket(family, kind, number)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made
