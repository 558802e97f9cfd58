"""Target `python`: functions of the worker's module, called in a runner process of their own.

User code never runs in the agent, so a function that blocks, hogs the interpreter or crashes cannot stop heartbeats.
The runner enforces time-outs and stops by itself; here they are enforced on the runner when it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker.executors import (
    KILL_PATIENCE,
    LOST,
    Answer,
    Attempt,
    Executor,
    Sink,
    Why,
)
from tocsin.worker.executors.runner_process import Owner, RunnerProcess, greet
from tocsin.worker.frames import Hello, Note
from tocsin.worker.proctree import Family

log = get_logger("runner")

_BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0)  # after this many starts in a row that failed, the module is hopeless
_HEALTHY_AFTER = 10.0
_BRANDS = 1 << 20  # calls of a runner that can be told apart at a time
_FEW_BRANDS = 1 << 8  # of one that has a call at a time


class PythonExecutor(Executor):
    """Keeps a runner alive and calls functions in it."""

    kind = "python"
    head_start = 0.03  # to write and read a frame of some thousand calls

    def __init__(self, module: str, slots: int, url: str, family: Family) -> None:
        super().__init__()
        self.functions: list[str] = []
        self.jobs: list[dict[str, Any]] = []  # as the module declares them
        self.workflows: list[dict[str, Any]] = []
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._command = [sys.executable, "-m", "tocsin.worker.runner", module, url]
        self._family = family
        self._slots = slots
        self._isolated: frozenset[str] = frozenset()
        self._pool = _Pool(self)
        self._runner: RunnerProcess | None = None
        self._waiting: dict[Attempt, None] = {}  # until there is a runner
        self._upkeep: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the runner, if there is none, and learn what it can call."""
        if self._runner is None:
            self._runner = self.spawn(self._slots, self)
            self._learn(await greet(self._runner))
        if self._upkeep is None or self._upkeep.done():
            self._upkeep = asyncio.ensure_future(self._keep_alive())

    def _learn(self, hello: Hello) -> None:
        self.functions, self.jobs, self._isolated = hello.functions, hello.jobs, frozenset(hello.isolated)
        self.workflows = hello.workflows

    def start(self, attempts: list[Attempt]) -> None:
        if self._isolated:
            for attempt in attempts:
                if attempt.target.function in self._isolated:
                    self._pool.start(attempt)
            attempts = [attempt for attempt in attempts if attempt.target.function not in self._isolated]
        if self._runner is not None and self._runner.ready:
            self._runner.start(attempts)
        else:
            self._waiting.update(dict.fromkeys(attempts))

    def stop(self, attempt: Attempt) -> None:
        if self._pool.stop(attempt):
            return
        if attempt in self._waiting:
            del self._waiting[attempt]
            self.sink.ended([(attempt, attempt.finished("cancelled"))])
        elif self._runner is not None:
            self._runner.stop(attempt)

    async def kill_all(self, why: Why = LOST) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
        waiting, self._waiting = self._waiting, {}
        self.sink.handed_back(waiting)
        runner, self._runner = self._runner, None
        ends = self._pool.kill_all(why) + ([] if runner is None else [asyncio.ensure_future(runner.kill(why))])
        if ends:
            await asyncio.wait(ends, timeout=KILL_PATIENCE)

    def spawn(self, slots: int, owner: Owner, brands: int = _BRANDS) -> RunnerProcess:
        """Start a process for so many calls at a time."""
        return RunnerProcess([*self._command, str(slots)], slots, self._family, owner, brands)

    async def _keep_alive(self) -> None:
        """Watch the runner; when it is gone, start another, later and later if it keeps dying young."""
        young_deaths = 0
        while True:
            assert self._runner is not None
            born = time.monotonic()
            await self._runner.watch()
            young_deaths = 0 if time.monotonic() - born > _HEALTHY_AFTER else young_deaths + 1
            log.warning("the module's process ended", how=self._runner.how_it_ended())
            await asyncio.sleep(_BACK_OFF[min(young_deaths, len(_BACK_OFF)) - 1] if young_deaths else 0)
            await self._restart()
            waiting, self._waiting = self._waiting, {}
            self._runner.start(list(waiting))

    async def _restart(self) -> None:
        for pause in (*_BACK_OFF, None):
            try:
                self._runner = self.spawn(self._slots, self)
                return self._learn(await greet(self._runner))
            except (SetupError, OSError) as exc:
                if pause is None:
                    self.hopeless.set_result(str(exc))
                    await asyncio.Event().wait()
                log.error("the module's process does not start", why=str(exc))
                await asyncio.sleep(pause or 0)


class _Seat:
    """A runner of one call at a time. It is the runner's sink, so that the pool knows when it is free again."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self.runner = pool.executor.spawn(1, self, _FEW_BRANDS)

    @property
    def sink(self) -> Sink:
        return self

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        if told := list(ends):  # nothing has ended while what it forked is cleared away
            self._pool.executor.sink.ended(told)
            self._pool.left(self, [attempt for attempt, _ in told])

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        if told := list(attempts):
            self._pool.executor.sink.handed_back(told)
            self._pool.left(self, told)

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        self._pool.executor.sink.output(attempt, lines, dropped)

    def note(self, attempt: Attempt, note: Note, answer: Answer | None) -> None:
        self._pool.executor.sink.note(attempt, note, answer)


class _Pool:
    """Processes for functions that want one of their own while they run: as many as there are such calls; the next ones
    use them again."""

    def __init__(self, executor: PythonExecutor) -> None:
        self.executor = executor
        self._seats: set[_Seat] = set()
        self._idle: list[_Seat] = []
        self._taken: dict[Attempt, _Seat | None] = {}  # None: its process is being started
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self, attempt: Attempt) -> None:
        """Call it in a process that is free, or in a new one."""
        while self._idle:
            seat = self._idle.pop()
            if seat.runner.ready:
                self._sit(attempt, seat)
                return
        self._taken[attempt] = None
        self._do(self._seat_anew(attempt))

    def stop(self, attempt: Attempt) -> bool:
        """Stop it if it is here."""
        if attempt not in self._taken:
            return False
        seat = self._taken[attempt]
        if seat is not None:
            seat.runner.stop(attempt)
        else:
            del self._taken[attempt]
            self.executor.sink.ended([(attempt, attempt.finished("cancelled"))])
        return True

    def left(self, seat: _Seat, attempts: Iterable[Attempt]) -> None:
        """These have ended: the next one may have the seat, unless there are more than are worth keeping."""
        for attempt in attempts:
            self._taken.pop(attempt, None)
        if len(self._idle) < (os.cpu_count() or 1) and seat.runner.ready:
            self._idle.append(seat)
        else:
            self._do(seat.runner.kill())

    def kill_all(self, why: Why) -> list[asyncio.Future[None]]:
        """Kill every process; what was still to be called goes back."""
        waiting = [attempt for attempt, seat in self._taken.items() if seat is None]
        for task in self._tasks:
            task.cancel()
        seats, self._seats, self._idle = self._seats, set(), []
        for attempt in waiting:
            del self._taken[attempt]
        self.executor.sink.handed_back(waiting)
        return [self._do(seat.runner.kill(why)) for seat in seats]

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sit(self, attempt: Attempt, seat: _Seat) -> None:
        self._taken[attempt] = seat
        seat.runner.start([attempt])

    async def _seat_anew(self, attempt: Attempt) -> None:
        try:
            seat = _Seat(self)
            self._seats.add(seat)
            self._do(self._attend(seat))
            await greet(seat.runner)
        except (SetupError, OSError) as exc:
            if attempt in self._taken:
                del self._taken[attempt]
                end = attempt.finished("failed", error_class="start", message=str(exc))
                self.executor.sink.ended([(attempt, end)])
            return
        if attempt in self._taken:
            self._sit(attempt, seat)
        else:  # stopped meanwhile
            self.left(seat, ())

    async def _attend(self, seat: _Seat) -> None:
        await seat.runner.watch()
        self._seats.discard(seat)
