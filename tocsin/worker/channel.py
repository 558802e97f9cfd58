"""Length-prefixed frames over a socket pair, written at once and read in one piece.

This is not an asyncio transport, for two reasons: a frame leaves in the same turn of the loop, so that a crash a moment
later cannot lose it; and everything that a dead peer had sent can still be read.

Each frame is consumed before its handler is called, so no handler can make a frame arrive twice. If a handler raises,
the peer is in doubt: the channel delivers nothing more and reports the fault once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

MOST_FRAME = 1 << 30  # bytes; senders split frames larger than `GOOD_FRAME` where they can
GOOD_FRAME = 1 << 24
_READ = 1 << 18
_HEADER = 4


class FrameTooLarge(ValueError):
    """A frame is larger than `MOST_FRAME`."""


class Channel:
    """One end of the channel. `on_frame` gets each frame once. `on_close` is called once, after the last frame.
    `on_fault` is called once if a frame cannot be handled; after that neither of the others is called."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[[bytes], None],
        on_close: Callable[[], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._sock, self._loop = sock, loop
        self._on_frame, self._on_close, self._on_fault = on_frame, on_close, on_fault
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._closed = False
        self._faulty = False
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    @property
    def backlog(self) -> int:
        """Bytes the peer has not taken yet."""
        return len(self._outbox)

    def send(self, frame: bytes) -> None:
        """Write a frame now; what the socket does not take is written when it does."""
        if len(frame) > MOST_FRAME:
            raise FrameTooLarge(f"a frame has {len(frame):,} bytes and must have at most {MOST_FRAME:,}")
        if self._closed:
            return
        waiting = bool(self._outbox)
        self._outbox += len(frame).to_bytes(_HEADER, "little")
        self._outbox += frame
        if not waiting and not self._flush():
            self._loop.add_writer(self._sock, self._writable)

    def close(self) -> None:
        """Stop both ways without a word to `on_close`."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def drain(self) -> None:
        """Read all that a peer has sent before it died, then close."""
        while not self._closed and not self._faulty and self._read():
            pass
        self.close()

    def _writable(self) -> None:
        if self._flush():
            self._loop.remove_writer(self._sock)

    def _flush(self) -> bool:
        """True when nothing is left to write. A broken pipe shows on the reading side, after the last frame."""
        try:
            while self._outbox:
                sent = self._sock.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            return False
        except OSError:
            self._outbox.clear()
        return True

    def _readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Take in what is there; False if there was nothing."""
        try:
            data = self._sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if data:
            self._inbox += data
            self._split()
        else:
            self.close()
            self._on_close()
        return True

    def _split(self) -> None:
        try:
            while not self._closed and (frame := self._next()) is not None:
                self._on_frame(frame)
        except Exception as exc:
            self._faulty = True
            self._inbox.clear()
            if not self._closed:
                self._loop.remove_reader(self._sock)
            self._on_fault(exc)

    def _next(self) -> bytes | None:
        """Remove the first frame from the inbox and return it, or None if it is not complete."""
        inbox = self._inbox
        if len(inbox) < _HEADER:
            return None
        end = _HEADER + int.from_bytes(inbox[:_HEADER], "little")
        if end > MOST_FRAME + _HEADER:
            raise FrameTooLarge(f"the peer announced a frame of {end - _HEADER:,} bytes")
        if len(inbox) < end:
            return None
        frame = bytes(inbox[_HEADER:end])
        del inbox[:end]
        return frame
