"""The runner's loop: takes orders, drives calls, sends replies.

A call that never waits costs no task of its own. Async functions are driven inside a *pump* task that works through
the queue; when one suspends, the pump task becomes that call's task and a new pump takes over the queue. So every
function runs inside a real task from its first step (`asyncio.timeout`, task groups), and only waiting ones pay for it.
Each call has a context of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any

import msgspec

from tocsin.client.app import Function
from tocsin.worker.channel import GOOD_FRAME, Channel
from tocsin.worker.frames import ENDED, Call, CallTarget, Done, Hello, Orders, ProtocolViolation, Replies, RunRef, Table
from tocsin.worker.runner.notes import Notes, RunHost
from tocsin.worker.runner.output import OutputBuffer
from tocsin.worker.runner.run import CURRENT, Run, broken, failed, stopped, succeeded
from tocsin.worker.runner.threads import Threads
from tocsin.worker.runner.vital import vital

_TURN_NS = 2_000_000  # after this long the pump lets the loop look around, and what has ended is sent
_CHOKED_BYTES = 16 * 1024 * 1024
_HEED_WITHIN = 2.0  # who looks at `ctx.cancelled` has so long; well within the agent's patience with a stop
_decode = msgspec.msgpack.Decoder(Orders).decode
_encode = msgspec.msgpack.Encoder().encode


class Calls:
    """All calls of this runner."""

    def __init__(
        self, functions: dict[str, Function], slots: int, table: Table, url: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._functions, self._url, self._loop = functions, url, loop
        self._cells = table.cells
        self._queue: deque[Run] = deque()
        self._live: dict[int, Run] = {}
        self._done: list[Done] = []
        self._ending: list[Run] = []  # whose end is not told yet
        self._pump: asyncio.Task[None] | None = None
        self._deadlines = _Deadlines(loop, self._live, self._time_out)
        self._early = _Early(loop, self._enqueue, self._set_going)
        self._flushing = False
        self._threads = Threads(slots, loop, self._perform, self._settle)
        self.output = OutputBuffer(self._wake_from_anywhere)
        self.notes = Notes(self._wake_from_anywhere)
        self.channel: Channel | None = None

    def greet(
        self, error: str = "", jobs: Iterable[dict[str, Any]] = (), workflows: Iterable[dict[str, Any]] = ()
    ) -> None:
        """The first frame."""
        assert self.channel is not None
        isolated = sorted(name for name, function in self._functions.items() if function.isolated)
        hello = Hello(sorted(self._functions), error, isolated, list(jobs), list(workflows))
        self.channel.send(_encode(Replies(hello=hello)))

    def on_frame(self, frame: bytes) -> None:
        """Process orders of the agent. An exception means that this runner is in doubt; `__main__` then ends the
        process."""
        orders = _decode(frame)
        for call in orders.calls:
            if call.cell in self._live:
                raise ProtocolViolation(f"cell {call.cell} has a run already")
            self._accept(call, orders.targets[call.target])
        for ref, number, refusal in orders.kept:
            self.notes.answered(ref, number, refusal)
        for ref in orders.stops:
            # The run may have ended since. Its cell goes to no other run before the agent has read the end.
            if (run := self._found(ref)) is not None:
                self._stop(run, "cancelled")
        self._set_going()

    def _accept(self, call: Call, target: CallTarget) -> None:
        function = self._functions.get(target.function)
        if function is None:
            why = f"no function {target.function}"
            self._done.append(Done(call.cell, call.run_id, call.fence, 0, 0, "failed", "start", why))
            self._flush_soon()
            return
        run = self._live[call.cell] = Run(call, target, function)
        if call.start_ns > time.monotonic_ns():
            self._early.add(run)
        else:
            self._enqueue(run)

    def _found(self, ref: RunRef) -> Run | None:
        """Return the run that the reference names, if it has not ended."""
        run = self._live.get(ref[0])
        if run is not None and run.ref != ref:
            raise ProtocolViolation(f"cell {ref[0]} has another run than {ref[1]}")
        return run

    def _enqueue(self, run: Run) -> None:
        if run.function.is_async:
            self._queue.append(run)
        else:
            self._deadlines.add(run)
            self._threads.submit(run)

    def _set_going(self) -> None:
        if self._queue and self._pump is None:
            self._start_pump()

    # ── async functions ──────────────────────────────────────────────────────────────────────────────────────────

    def _start_pump(self) -> None:
        self._pump = self._loop.create_task(self._work_through())

    async def _work_through(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        try:
            await self._drive(me)
        finally:
            if self._pump is me:  # a function has cancelled all tasks that it found
                self._pump = None
                self._set_going()

    async def _drive(self, me: asyncio.Task[None]) -> None:
        turn_ends = time.monotonic_ns() + _TURN_NS
        while self._queue:
            ended_ns = await _within(self._queue.popleft(), self)
            # A call that suspended has taken this task; one that cancelled its task has spoilt it.
            if self._pump is not me:
                return
            if me.cancelling():
                return self._start_pump()
            if ended_ns > turn_ends:
                self.flush()
                await asyncio.sleep(0)
                turn_ends = time.monotonic_ns() + _TURN_NS
        self._pump = None
        self.flush()

    def begin(self, run: Run) -> Coroutine[Any, Any, Any]:
        """Mark the start of an async call and make its coroutine."""
        run.started_ns = self._cells[run.call.cell] = time.monotonic_ns()
        coroutine: Coroutine[Any, Any, Any] = run.invoke(self._url, self._host)
        return coroutine

    def _host(self, run: Run) -> RunHost:
        return RunHost(run, self.output, self.notes)

    def suspended(self, run: Run) -> None:
        """The call waits: the pump's task is now its task, and somebody else must work through the queue."""
        run.task = asyncio.current_task()
        self._deadlines.add(run)
        self._pump = None
        if self._queue:
            self._start_pump()
        else:
            self._flush_soon()

    def settle_async(self, run: Run, result: Any, exc: BaseException | None) -> int:
        """The call is over; when."""
        ended_ns = time.monotonic_ns()
        self._settle(run, _end(run, ended_ns - run.started_ns, result, exc))
        return ended_ns

    # ── sync functions ───────────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, run: Run) -> Done:
        """Make a call, on a thread of the pool."""
        context = contextvars.Context()
        context.run(CURRENT.set, run)
        used_ns = time.thread_time_ns()
        run.started_ns = self._cells[run.call.cell] = time.monotonic_ns()
        try:
            result = context.run(run.invoke, self._url, self._host)
        except BaseException as exc:
            done = _end(run, time.monotonic_ns() - run.started_ns, None, exc)
        else:
            done = _end(run, time.monotonic_ns() - run.started_ns, result, None)
        done.cpu_ns = time.thread_time_ns() - used_ns
        return done

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop(self, run: Run, why: str) -> None:
        if run.asked_to_stop:
            return
        run.asked_to_stop = why
        if self._early.withdraw(run):
            self._settle(run, stopped(run, 0))
        elif run.function.is_async and run.task is None:
            if run in self._queue:
                self._queue.remove(run)
                self._settle(run, stopped(run, 0))
        elif not run.function.is_async and self._threads.withdraw(run):
            self._settle(run, stopped(run, 0))
        elif run.stop_event is not None:
            run.stop_event.set()
            self._loop.call_later(_HEED_WITHIN, self._interrupt, run)
        else:
            self._interrupt(run)

    def _interrupt(self, run: Run) -> None:
        if run.ended:
            return
        if run.task is not None:
            run.task.cancel()
        else:
            self._threads.interrupt(run)

    def _time_out(self, run: Run) -> None:
        self._stop(run, "timeout")

    @vital
    def _settle(self, run: Run, done: Done) -> None:
        if run.partial is not None:
            self.output.end(run)
        # Of a call that ends by itself among others, what it forked may be a pool that the next ones use.
        if run.forked and (run.asked_to_stop or run.function.isolated):
            done.left_children = run.call.brand
        run.ended = True
        self._cells[run.call.cell] = ENDED
        del self._live[run.call.cell]
        self._done.append(done)
        self._ending.append(run)
        if self._pump is None:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def _wake_from_anywhere(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon_threadsafe(self.flush)

    @vital
    def flush(self) -> None:
        """Send what has gathered."""
        self._flushing = False
        assert self.channel is not None
        output, notes = self.output.take(), self.notes.take()
        if output or self._done or notes:
            done, self._done = self._done, []
            for run in self._ending:
                run.told = True
            self._ending.clear()
            self._send(Replies(None, output, done, notes))
            self.output.choked = self.channel.backlog > _CHOKED_BYTES

    def _send(self, replies: Replies) -> None:
        assert self.channel is not None
        frame = _encode(replies)
        halves = replies.halves() if len(frame) > GOOD_FRAME else None
        if halves is None:
            self.channel.send(frame)
        else:
            for half in halves:
                self._send(half)


def _end(run: Run, ran_ns: int, result: Any, exc: BaseException | None) -> Done:
    """Return the end of a call, whatever it returned or raised."""
    try:
        return succeeded(run, ran_ns, result) if exc is None else failed(run, ran_ns, exc)
    except BaseException:  # for example no memory, or an interruption that arrives only now
        return broken(run, ran_ns)


@types.coroutine
def _within(run: Run, calls: Calls) -> Generator[Any, Any, int]:
    """Drive one async call inside the current task, each step in the call's own context; when it ended."""
    CURRENT.set(run)
    context = contextvars.copy_context()
    try:
        coroutine = context.run(calls.begin, run)
    except BaseException as exc:
        return calls.settle_async(run, None, exc)
    try:
        waits_for = context.run(coroutine.send, None)
    except StopIteration as end:
        return calls.settle_async(run, end.value, None)
    except BaseException as exc:
        return calls.settle_async(run, None, exc)
    calls.suspended(run)
    while True:
        step: Callable[[Any], Any] = coroutine.send
        try:
            given = yield waits_for
        except BaseException as exc:
            if isinstance(exc, GeneratorExit) and not _runs(run.task):  # the task is discarded, not resumed
                coroutine.close()
                raise
            step, given = coroutine.throw, exc
        try:
            waits_for = context.run(step, given)
        except StopIteration as end:
            return calls.settle_async(run, end.value, None)
        except BaseException as exc:
            return calls.settle_async(run, None, exc)


def _runs(task: asyncio.Task[None] | None) -> bool:
    """Return whether the caller runs inside a step of the task."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop is running any more
        return False


class _Early:
    """Calls that came before their instant: all is ready, and one timer sets them going."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, enqueue: Callable[[Run], None], set_going: Callable[[], None]
    ) -> None:
        self._loop, self._enqueue, self._set_going = loop, enqueue, set_going
        self._heap: list[tuple[int, int, Run]] = []
        self._serial = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, run: Run) -> None:
        """Keep a call for later."""
        heapq.heappush(self._heap, (run.call.start_ns, next(self._serial), run))
        if self._heap[0][2] is run:
            self._arm()

    def withdraw(self, run: Run) -> bool:
        """Take a call out; False if it is not here."""
        kept = [entry for entry in self._heap if entry[2] is not run]
        if len(kept) == len(self._heap):
            return False
        heapq.heapify(kept)
        self._heap = kept
        return True

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = (self._heap[0][0] - time.monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(max(delay, 0), self._fire)

    @vital
    def _fire(self) -> None:
        self._timer = None
        now = time.monotonic_ns()
        while self._heap and self._heap[0][0] <= now:
            self._enqueue(heapq.heappop(self._heap)[2])
        self._set_going()
        if self._heap:
            self._arm()


class _Deadlines:
    """One heap and one timer for the time-outs of all calls that take time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, live: dict[int, Run], on_late: Any) -> None:
        self._loop, self._live, self._on_late = loop, live, on_late
        self._heap: list[tuple[float, int, Run]] = []
        self._serial = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, run: Run) -> None:
        """Watch a call; its time counts from its start, or from now if a thread is still to begin it."""
        started = run.started_ns or time.monotonic_ns()
        entry = (started / 1e9 + run.call.timeout_ms / 1e3, next(self._serial), run)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 1000 + 2 * len(self._live):
            self._heap = [e for e in self._heap if not e[2].ended]
            heapq.heapify(self._heap)
        if self._heap[0] is entry:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = self._heap[0][0] - time.monotonic()
        self._timer = self._loop.call_later(max(delay, 0), self._fire)

    @vital
    def _fire(self) -> None:
        self._timer = None
        now = time.monotonic()
        while self._heap and (self._heap[0][2].ended or self._heap[0][0] <= now):
            run = heapq.heappop(self._heap)[2]
            if not run.ended:
                self._expire(run, now)
        if self._heap:
            self._arm()

    def _expire(self, run: Run, now: float) -> None:
        started = run.started_ns / 1e9
        if started and started + run.call.timeout_ms / 1e3 > now:
            self.add(run)  # it waited for its thread, and its time began later
        elif started or run.function.is_async:
            self._on_late(run)
        else:
            self.add(run)
