"""A thread for bounded computations that take longer than one turn of the event loop should.

There is one thread for all tenants, so that the event loop competes with one thread at most. Each tenant has at most
one computation in it at a time, so that a tenant with many computations delays only itself.
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
    """Holds the thread and the tenants that wait for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tocsin-aside")
        self._turns: dict[int, asyncio.Lock] = {}
        self._callers: Counter[int] = Counter()

    async def run(self, tenant_id: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that bounds its own work. A caller that is cancelled while it waits gives up its turn."""
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
        """Wait for the current computation, and drop those that wait."""
        self._thread.shutdown(wait=True, cancel_futures=True)
