"""Reads from object storage for claims. A claim waits only briefly, so that a slow payload delays only its own
tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

from tocsin.errors import ApiProblem, Unavailable

_LONGEST = 30.0  # seconds that one read may take
_KEPT_FOR = 30.0  # seconds for which the result of a finished read is kept for the next claim
_MOST_BYTES = 64 * 1024 * 1024  # of all reads that no claim waits for at the moment
_Key = TypeVar("_Key", bound=Hashable)


class Read(NamedTuple):
    """A function that begins a read, and the size of the object in bytes."""

    begin: Callable[[], Awaitable[Any]]
    size: int


class Reads:
    """Reads that continue after the claim has stopped waiting. The next claim for the same object finds the result, so
    that storage that is always slow delays its own runs and does not stop them."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, tuple[asyncio.Task[Any], int]] = {}

    async def within(self, wanted: Mapping[_Key, Read], patience: float | None) -> dict[_Key, Any]:
        """Return what can be read within `patience` seconds. The other reads continue while there is room for their
        results."""
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
        """Cancel the oldest reads while the total size exceeds the limit."""
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
