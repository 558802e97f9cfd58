"""Bounded computing that takes longer than a turn of the event loop should, in a thread beside it.

One thread for all tenants, so that the event loop never competes with more than one; one piece of each tenant at a
time, so that a tenant that asks for much waits for itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """The thread, and the tenants that wait for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tocsin-aside")
        self._turns: dict[int, asyncio.Lock] = {}
        self._callers: Counter[int] = Counter()

    async def run(self, tenant_id: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that is bounded by itself; a caller that leaves while it waits gives up its turn."""
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        self._callers[tenant_id] += 1
        try:
            async with turn:
                work = partial(function, *args, **kwargs)
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._callers[tenant_id] -= 1
            if not self._callers[tenant_id]:
                del self._callers[tenant_id], self._turns[tenant_id]

    def close(self) -> None:
        """Let the piece under way finish, and drop those that wait."""
        self._thread.shutdown(wait=True, cancel_futures=True)
