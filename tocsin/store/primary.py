"""Which server to write to: the one primary among the hosts of a URL, and never an older one again.

A promotion begins a new timeline. The server to use is the one that takes writes and has the highest timeline, so that
an old primary that comes back (nobody has told it that it is one no longer) gets nothing from us, whatever its place in
the URL. The driver alone would take the first host that takes writes, and would spend all its time on one that is
silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from tocsin.errors import Unavailable

Connection = Any
CONNECT_SECONDS = 3.0  # for one host
# A server that went without a word: how long unacknowledged bytes may be under way, and when to ask a quiet one.
_SOCKET_OPTIONS = {
    "TCP_USER_TIMEOUT": 5000,
    "TCP_KEEPIDLE": 3,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
}


class Host(NamedTuple):
    """Where a PostgreSQL listens; without a name: wherever the URL says."""

    name: str | None = None
    port: int | None = None


def hosts_of(url: str) -> list[Host]:
    """The hosts of a URL that names several; else one, left to the driver."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    named = parts.netloc.rpartition("@")[2] or query.get("host", [""])[0]
    if "," not in named:
        return [Host()]
    ports = [int(port) for port in query.get("port", ["5432"])[0].split(",")]
    found = []
    for number, word in enumerate(named.split(",")):
        name, colon, port = word.rpartition(":")
        if not colon or "]" in port:  # no port, or the end of an IPv6 address
            name, port = word, ""
        usual = ports[number] if number < len(ports) else ports[-1]
        found.append(Host(unquote(name).strip("[]"), int(port) if port else usual))
    return found


class Primary:
    """Connects to the primary. `examine` looks at each new connection: it raises what speaks against using it, and
    answers its timeline. `moved` is called when another server has become the one to use."""

    def __init__(
        self,
        url: str,
        examine: Callable[[Connection], Awaitable[int]],
        moved: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._url = url
        self._hosts = hosts_of(url)
        self._examine = examine
        self._moved = moved
        self._host: Host | None = self._hosts[0] if len(self._hosts) == 1 else None
        self._timeline = 0

    async def connect(self, settings: dict[str, str], command_timeout: float, **options: Any) -> Connection:
        """A connection to the server to use; all hosts are asked when that is not known, or not there."""
        how = {"server_settings": settings, "command_timeout": command_timeout, **options}
        if self._host is not None:
            try:
                return await self._accept(self._host, *await self._open(self._host, how))
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, Unavailable):
                others = [host for host in self._hosts if host != self._host]
                if not others:
                    raise
                return await self._choose(others, how)
        return await self._choose(self._hosts, how)

    async def look_around(self, settings: dict[str, str]) -> None:
        """Ask the other hosts, if there are any, whether one of them has become the server to use."""
        if len(self._hosts) > 1:
            how = {"server_settings": settings, "command_timeout": CONNECT_SECONDS}
            connection = await self._choose(self._hosts, how)
            connection.terminate()

    async def _choose(self, hosts: list[Host], how: dict[str, Any]) -> Connection:
        asked = await asyncio.gather(*(self._open(host, how) for host in hosts), return_exceptions=True)
        opened = [(host, *found) for host, found in zip(hosts, asked, strict=True) if isinstance(found, tuple)]
        if not opened:
            raise next((error for error in asked if _tells_most(error)), asked[0])  # type: ignore[misc]
        best = max(opened, key=lambda found: found[2])
        for found in opened:
            if found is not best:
                found[1].terminate()
        return await self._accept(*best)

    async def _open(self, host: Host, how: dict[str, Any]) -> tuple[Connection, int]:
        connection = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                where = {"host": host.name, "port": host.port}
                connection = await asyncpg.connect(self._url, **where, target_session_attrs="read-write", **how)
                _notice_silence(connection)
                return connection, await self._examine(connection)
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if isinstance(error, TimeoutError):  # not to be mistaken for a caller's own time that is up
                raise ConnectionError("it does not answer") from error
            raise

    async def _accept(self, host: Host, connection: Connection, timeline: int) -> Connection:
        if timeline < self._timeline:
            connection.terminate()
            raise Unavailable(
                f"the PostgreSQL that answers is on timeline {timeline}, but we have written to timeline "
                f"{self._timeline}: it is an old primary; take it away (or restart the servers if this is meant)",
                code="database_unavailable",
            )
        known, self._host, self._timeline = self._timeline, host, timeline
        if self._moved is not None and 0 < known < timeline:
            await self._moved()
        return connection


def _tells_most(error: object) -> bool:
    """A server that answers says more than one that does not, or one that is only a standby."""
    return not isinstance(error, OSError | asyncpg.TargetServerAttributeNotMatched)


def _notice_silence(connection: Connection) -> None:
    """Have the kernel end a connection whose other side is gone. The driver has no option for it, nor a public way to
    its socket; libpq's `tcp_user_timeout` it would pass on to the server, which refuses it."""
    shared = connection._transport.get_extra_info("socket")
    if shared is None or shared.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # A duplicate, because uvloop lends out no socket that takes options.
    with contextlib.closing(socket.socket(fileno=os.dup(shared.fileno()))) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SOCKET_OPTIONS.items():
            if hasattr(socket, name):  # macOS has not all of them
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
