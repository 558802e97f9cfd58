"""Reads from object storage for claims: a claim waits briefly, and reads are shared and bounded in bytes."""

from __future__ import annotations

import asyncio
from typing import Any

from tocsin.errors import Unavailable
from tocsin.node import reads
from tocsin.node.reads import Read, Reads


class Slow:
    """A read that ends when the test says so."""

    def __init__(self) -> None:
        self.open, self.begun, self.cancelled = asyncio.Event(), 0, 0

    async def __call__(self) -> str:
        self.begun += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "read"


async def test_finished_reads_are_returned_and_the_others_continue() -> None:
    fast, slow = Slow(), Slow()
    fast.open.set()
    some = Reads()
    assert await some.within({"fast": Read(fast, 1), "slow": Read(slow, 1)}, 0.01) == {"fast": "read"}
    slow.open.set()
    assert await some.within({"slow": Read(slow, 1)}, None) == {"slow": "read"}
    assert slow.begun == 1
    assert await some.within({"slow": Read(slow, 1)}, None) == {"slow": "read"}
    assert slow.begun == 2, "an answer is given once"


async def test_the_oldest_are_given_up_when_all_are_too_large() -> None:
    slow = [Slow() for _ in range(4)]
    some = Reads()
    for n, each in enumerate(slow):
        assert await some.within({n: Read(each, reads._MOST_BYTES // 2)}, 0.001) == {}
    await asyncio.sleep(0)
    assert [each.cancelled for each in slow] == [1, 1, 0, 0]


async def test_a_read_that_never_ends_is_a_problem(monkeypatch: Any) -> None:
    monkeypatch.setattr(reads, "_LONGEST", 0.01)
    found = await Reads().within({"slow": Read(Slow(), 1)}, None)
    assert isinstance(found["slow"], Unavailable)
