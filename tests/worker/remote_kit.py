"""What tests of executors need that have no worker around them: attempts, and a sink that writes down what it hears."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from tests import PATIENCE
from tocsin import wire
from tocsin.worker.executors import Attempt
from tocsin.worker.executors.remote import RemoteExecutor
from tocsin.worker.targets import Resources, Spec, Target

_numbers = itertools.count(1)


class Book:
    """A sink. `ends` and `lines` by run id and fence; `handed`: those that were handed back."""

    def __init__(self) -> None:
        self.ends: dict[wire.RunKey, wire.Finished] = {}
        self.lines: dict[wire.RunKey, list[str]] = {}
        self.handed: set[wire.RunKey] = set()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self, ends: Iterable[tuple[Attempt, wire.Finished]]) -> None:
        for attempt, end in ends:
            assert attempt.key not in self.ends, "it ends once"
            self.ends[attempt.key] = end
        self._tell()

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        self.handed.update(attempt.key for attempt in attempts)
        self._tell()

    def output(self, attempt: Attempt, lines: list[wire.LogLine], dropped: int = 0) -> None:
        self.lines.setdefault(attempt.key, []).extend(f"{stream}: {text}" for _, stream, _, text in lines)
        self._tell()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.ensure_future(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], Any], within: float = PATIENCE) -> Any:
        async with asyncio.timeout(within), self._changed:
            await self._changed.wait_for(condition)
            return condition()

    async def end_of(self, attempt: Attempt) -> tuple[str, str | None, str]:
        """Outcome, error class, message."""
        end: wire.Finished = await self.until(lambda: self.ends.get(attempt.key))
        return (end.outcome, end.error.class_, end.error.message) if end.error else (end.outcome, None, "")

    async def line_of(self, attempt: Attempt, text: str) -> None:
        await self.until(lambda: any(text in line for line in self.lines.get(attempt.key, [])))


def attempt_of(
    executor: RemoteExecutor,
    target: Target,
    *,
    run_id: str = "",
    fence: int = 0,
    timeout: float = 60.0,
    resources: Resources | None = None,
    **more: Any,
) -> Attempt:
    """An attempt, begun."""
    number = next(_numbers)
    run = wire.ClaimedRun(
        run_id=run_id or f"run-{number}",
        attempt=1,
        fence=fence or (1 << 40) + number,
        start_at="2026-01-01T00:00:00.000000Z",
        timeout_ms=int(timeout * 1000),
        job_id="the-job",
        scheduled_for="2026-01-01T00:00:00.000000Z",
        token="the-token-of-the-run",
        **more,
    )
    attempt = Attempt(run, Spec(target=target, resources=resources or Resources()), executor, time.monotonic_ns())
    executor.start([attempt])
    return attempt
