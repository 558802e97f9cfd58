"""A place on disk for what has to wait and is too much for memory. Nothing of it outlives the worker.

The file has no name, so whoever dies leaves nothing behind; it is written at its end only, and given up when nothing in
it is wanted any more. Threads read and write it: a slow disk holds nobody up.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import IO, NamedTuple

from tocsin.telemetry import get_logger

log = get_logger("worker")


class Piece(NamedTuple):
    """Where something lies."""

    position: int
    length: int


class Spool:
    """At most `most` bytes, in the folder for temporary files."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._file: IO[bytes] | None = None
        self._end = 0
        self._pieces = 0

    @property
    def room(self) -> int:
        """Bytes that still fit."""
        return self._most - self._end

    async def put(self, data: bytes) -> Piece | None:
        """Keep it; None if there is no room, or the disk refuses."""
        if len(data) > self.room:
            return None
        piece = Piece(self._end, len(data))
        self._end += len(data)
        self._pieces += 1
        try:
            if self._file is None:
                self._file = await asyncio.to_thread(tempfile.TemporaryFile)
            if await asyncio.to_thread(os.pwrite, self._file.fileno(), data, piece.position) < len(data):
                raise OSError("the disk took only a part")
        except OSError as error:
            log.warning("log lines cannot wait on disk", why=str(error))
            self.drop(piece)
            return None
        return piece

    async def take(self, piece: Piece) -> bytes:
        """Read it, and forget it."""
        if self._file is None:
            raise LookupError("nothing lies here")
        try:
            return await asyncio.to_thread(os.pread, self._file.fileno(), piece.length, piece.position)
        finally:
            self.drop(piece)

    def drop(self, piece: Piece) -> None:
        """It is not wanted any more."""
        self._pieces -= 1
        if not self._pieces:
            file, self._file, self._end = self._file, None, 0
            if file is not None:  # what it took is free when it is closed, which takes a while
                asyncio.get_running_loop().run_in_executor(None, file.close)
