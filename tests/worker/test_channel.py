"""Each frame reaches its handler once, wherever the bytes are cut and whatever the handler does."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.worker.channel import MOST_FRAME, Channel, FrameTooLarge


class QuietLoop:
    """Stands in for an event loop: the test says when there is something to read."""

    def add_reader(self, *args: Any) -> None: ...

    def remove_reader(self, *args: Any) -> None: ...

    def remove_writer(self, *args: Any) -> None: ...


class Fault(Exception):
    """The exception that a handler raises."""


class Reader:
    """A channel whose handler raises at one frame."""

    def __init__(self, raise_at: int | None = None) -> None:
        ours, self.peer = socket.socketpair()
        self.raise_at = raise_at
        self.frames: list[bytes] = []
        self.faults: list[Exception] = []
        self.closed = 0
        loop = cast(asyncio.AbstractEventLoop, QuietLoop())
        self.channel = Channel(ours, loop, self._on_frame, self._on_close, self.faults.append)

    def _on_frame(self, frame: bytes) -> None:
        self.frames.append(frame)
        if len(self.frames) - 1 == self.raise_at:
            raise Fault

    def _on_close(self) -> None:
        self.closed += 1

    def read(self, data: bytes) -> None:
        self.peer.sendall(data)
        if not self.faults:  # otherwise the channel does not read any more
            self.channel._readable()

    def close(self) -> None:
        self.peer.close()
        self.channel.drain()


def packed(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=6), st.lists(st.integers(0, 100), max_size=8), st.data())
def test_each_frame_is_handed_over_once(frames: list[bytes], cuts: list[int], data: st.DataObject) -> None:
    stream = packed(frames)
    raise_at = data.draw(st.none() | st.integers(0, len(frames) - 1))
    reader = Reader(raise_at)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in pairwise(places):
        reader.read(stream[start:end])
    reader.close()
    expected = frames if raise_at is None else frames[: raise_at + 1]
    assert reader.frames == expected
    assert len(reader.faults) == (raise_at is not None)
    assert reader.closed == (raise_at is None)


@pytest.mark.parametrize("raise_at", [None, 0, 1, 2])
def test_cut_at_every_byte(raise_at: int | None) -> None:
    frames = [b"first", b"", b"the third"]
    stream = packed(frames)
    for cut in range(1, len(stream)):
        reader = Reader(raise_at)
        reader.read(stream[:cut])
        reader.read(stream[cut:])
        reader.close()
        assert reader.frames == (frames if raise_at is None else frames[: raise_at + 1])


def test_a_frame_that_is_too_large_is_a_fault_before_it_is_gathered() -> None:
    reader = Reader()
    reader.read(packed([b"fine"]) + (MOST_FRAME + 1).to_bytes(4, "little"))
    assert reader.frames == [b"fine"]
    assert [type(fault) for fault in reader.faults] == [FrameTooLarge]
    reader.close()
