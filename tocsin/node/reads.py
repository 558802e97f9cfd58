"""Reads from object storage that claims wait for, for a moment only: one tenant's slow payload delays nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

from tocsin.errors import ApiProblem, Unavailable

_LONGEST = 30.0  # seconds that one read may take
_KEPT_FOR = 30.0  # seconds for which a read that has come to its end waits for the next claim
_MOST_BYTES = 64 * 1024 * 1024  # of reads that nobody waits for now
_Key = TypeVar("_Key", bound=Hashable)


class Read(NamedTuple):
    """How to read something, and how many bytes it has."""

    begin: Callable[[], Awaitable[Any]]
    size: int


class Reads:
    """Reads that go on when nobody waits any more. Who asks for the same again finds what has come meanwhile, so that
    storage that is always slow delays its own runs, and does not stop them."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, tuple[asyncio.Task[Any], int]] = {}

    async def within(self, wanted: Mapping[_Key, Read], patience: float | None) -> dict[_Key, Any]:
        """Return what can be read within so many seconds. The rest goes on, as far as there is room to keep it."""
        if not wanted:
            return {}
        tasks = {key: self._task(key, read) for key, read in wanted.items()}
        done, _ = await asyncio.wait(tasks.values(), timeout=patience)
        for key, task in tasks.items():
            if task in done:
                self._under_way.pop(key, None)
        self._make_room()
        return {key: task.result() for key, task in tasks.items() if task in done and not task.cancelled()}

    def _task(self, key: Hashable, read: Read) -> asyncio.Task[Any]:
        if key not in self._under_way:
            task = asyncio.ensure_future(_bounded(read))
            self._under_way[key] = task, read.size
            asyncio.get_running_loop().call_later(_LONGEST + _KEPT_FOR, self._forget, key, task)
        return self._under_way[key][0]

    def _forget(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if key in self._under_way and self._under_way[key][0] is task:
            del self._under_way[key]

    def _make_room(self) -> None:
        """Give up the oldest reads while all of them together are too large."""
        size = sum(size for _, size in self._under_way.values())
        while size > _MOST_BYTES:
            task, freed = self._under_way.pop(next(iter(self._under_way)))
            task.cancel()
            size -= freed


async def _bounded(read: Read) -> Any | ApiProblem:
    try:
        async with asyncio.timeout(_LONGEST):
            return await read.begin()
    except TimeoutError:
        return Unavailable("object storage did not answer in time")
