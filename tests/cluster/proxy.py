"""A small TCP proxy that a nemesis can turn against whoever speaks through it.

    link = Link([("127.0.0.1", port)], http=True)
    await link.open()                # clients go to 127.0.0.1:link.port
    link.hold(down=True)             # replies are lost on their way …
    link.release()                   # … or come late, all at once
    link.strand()                    # what is open now is half-open for ever; nobody is told
    link.cut_next()                  # the next reply breaks off in its middle
    link.delay = 0.2                 # each piece takes that long, in order
    link.duplicates = 0.5            # every second whole request is sent again, by a connection of its own

Several upstreams are a load balancer: a connection goes to whichever of them takes it. An upstream may also be the path
of a Unix socket. Bytes that are held are not lost: a network repeats them once it can, whether or not anybody still
waits for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import cast

Upstream = tuple[str, int] | str

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_REPLAY_LISTENS = 3.0
_LATEST_REPLAY = 2.0


class Requests:
    """Cuts what a client sends into whole HTTP/1.1 requests: bodies by Content-Length, which is all our clients use.

    One in chunks would need more than this; from there on the connection has no whole requests."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._lost = False

    def feed(self, data: bytes) -> list[bytes]:
        """The requests that these bytes complete."""
        if self._lost:
            return []
        self._buffer += data
        whole = []
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            headers = bytes(self._buffer[: head + 4])
            if _CHUNKED.search(headers):
                self._lost = True
                self._buffer.clear()
                break
            length = _LENGTH.search(headers)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < end:
                break
            whole.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
        return whole


class Link:
    """One listening port, what stands behind it, and what is wrong with the way there."""

    def __init__(self, upstreams: Sequence[Upstream], *, http: bool = False, rng: random.Random | None = None) -> None:
        self.upstreams, self.http = list(upstreams), http
        self.rng = rng or random.Random()
        self.port = 0
        self.delay = 0.0
        self.duplicates = 0.0
        self.held = {"up": False, "down": False}
        self.counted: Counter[str] = Counter()
        self._cuts = 0
        self._pairs: set[_Pair] = set()
        self._replays: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Where HTTP clients go."""
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> Link:
        """Listen, on a port that the kernel chooses."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Side(_Pair(self), "down"), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """Stop listening and cut everything."""
        if self._server is not None:
            self._server.close()
        for pair in list(self._pairs):
            pair.abort()
        for replay in list(self._replays):
            replay.cancel()
        await asyncio.gather(*self._replays, return_exceptions=True)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, *, up: bool = False, down: bool = False) -> None:
        """Let nothing through towards the server (`up`), the client (`down`), or either."""
        self.held = {"up": up, "down": down}

    def release(self) -> None:
        """The way is free; what was held arrives now."""
        self.held = {"up": False, "down": False}
        for pair in list(self._pairs):
            pair.pump()

    def strand(self) -> int:
        """Make every open connection half-open; how many there were."""
        for pair in self._pairs:
            pair.stranded = True
        return len(self._pairs)

    def cut_next(self) -> None:
        """Break the next reply off in its middle, and the connection with it."""
        self._cuts += 1

    def heal(self) -> None:
        """Nothing is wrong any more; whoever still holds a stranded connection is told that it is none."""
        self.delay = self.duplicates = 0.0
        self._cuts = 0
        for pair in [p for p in self._pairs if p.stranded]:
            pair.abort()
        self.release()

    # ── what the connections ask ─────────────────────────────────────────────────────────────────────────────────

    def opened(self, pair: _Pair) -> None:
        self._pairs.add(pair)

    def closed(self, pair: _Pair) -> None:
        self._pairs.discard(pair)

    def takes_a_cut(self) -> bool:
        """Whether this reply is the one to be cut."""
        if not self._cuts:
            return False
        self._cuts -= 1
        self.counted["replies cut"] += 1
        return True

    async def connect(self, factory: Callable[[], asyncio.Protocol]) -> bool:
        """Reach one of the upstreams, in any order; False if none answers."""
        loop = asyncio.get_running_loop()
        for upstream in self.rng.sample(self.upstreams, len(self.upstreams)):
            with contextlib.suppress(OSError):
                if isinstance(upstream, str):
                    await loop.create_unix_connection(factory, upstream)
                else:
                    await loop.create_connection(factory, *upstream)
                return True
        return False

    def maybe_duplicate(self, request: bytes) -> None:
        """Send a whole request again, once or twice, at the same time or late."""
        if self.rng.random() < self.duplicates:
            for _ in range(self.rng.choice((1, 1, 2, 4))):
                replay = asyncio.create_task(self._replay(request, self.rng.choice((0, 0, _LATEST_REPLAY))))
                self._replays.add(replay)
                replay.add_done_callback(self._replays.discard)

    async def _replay(self, request: bytes, after: float) -> None:
        await asyncio.sleep(after * self.rng.random())
        listener = _Listener(request)
        if await self.connect(lambda: listener):
            self.counted["requests duplicated"] += 1
            await listener.listen(_REPLAY_LISTENS)


class _Listener(asyncio.Protocol):
    """Sends a request and lets the answer go by."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._gone = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    async def listen(self, seconds: float) -> None:
        try:
            await asyncio.wait([self._gone], timeout=seconds)
        finally:
            if self._transport is not None:
                self._transport.abort()


class _Pipe:
    """One direction of one connection: pieces in order, each not before its time; None is the end."""

    def __init__(self, pair: _Pair, direction: str) -> None:
        self._pair, self._direction = pair, direction
        self._pieces: deque[tuple[float, bytes | None]] = deque()
        self._wakes_at = 0.0
        self.target: asyncio.Transport | None = None

    def put(self, piece: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self._pieces.append((loop.time() + self._pair.link.delay, piece))
        self.pump()

    def pump(self) -> None:
        """Deliver what may be delivered."""
        if self.target is None or self._pair.link.held[self._direction]:
            return
        loop = asyncio.get_running_loop()
        while self._pieces:
            due, piece = self._pieces[0]
            if due > loop.time():
                if not loop.time() < self._wakes_at <= due:
                    self._wakes_at = due
                    loop.call_at(due, self.pump)
                return
            self._pieces.popleft()
            if self.target.is_closing():
                continue
            if piece is None:
                self.target.close()
            elif self._direction == "down" and self._pair.link.takes_a_cut():
                self.target.write(piece[: len(piece) // 2])
                self.target.close()
                self._pair.abort()
            else:
                self.target.write(piece)


class _Pair:
    """A client's connection and the one that was made for it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.stranded = False
        self.pipes = {"up": _Pipe(self, "up"), "down": _Pipe(self, "down")}
        self._requests = Requests()
        self._reaching: asyncio.Task[None] | None = None

    def made(self, side: str, transport: asyncio.Transport) -> None:
        """`side` names the pipe that ends at this transport."""
        self.pipes[side].target = transport
        if side == "down":
            self.link.opened(self)
            self._reaching = asyncio.create_task(self._reach())
        else:
            self.pump()

    async def _reach(self) -> None:
        if not await self.link.connect(lambda: _Side(self, "up")):
            self.abort()

    def received(self, side: str, data: bytes) -> None:
        if self.stranded:
            return
        towards = "up" if side == "down" else "down"
        self.pipes[towards].put(data)
        if towards == "up" and self.link.http:
            for request in self._requests.feed(data):
                self.link.maybe_duplicate(request)

    def lost(self, side: str) -> None:
        """One end has closed; the other learns of it, behind all that was sent, unless nobody is ever told."""
        if not self.stranded:
            self.pipes["up" if side == "down" else "down"].put(None)
        if all(p.target is None or p.target.is_closing() for p in self.pipes.values()):
            self.link.closed(self)

    def pump(self) -> None:
        for pipe in self.pipes.values():
            pipe.pump()

    def abort(self) -> None:
        """Cut both ends."""
        if self._reaching is not None and not self._reaching.done() and self._reaching is not asyncio.current_task():
            self._reaching.cancel()
        for pipe in self.pipes.values():
            if pipe.target is not None and not pipe.target.is_closing():
                pipe.target.abort()
        self.link.closed(self)


class _Side(asyncio.Protocol):
    """One end of a pair. Its bytes go to the other pipe; what comes out of the pipe named `side` is written here."""

    def __init__(self, pair: _Pair, side: str) -> None:
        self._pair, self._side = pair, side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pair.made(self._side, cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._pair.received(self._side, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pair.lost(self._side)
