"""Threads for functions that are not async.

A frame may bring hundreds of calls, most of them short. Waking a thread for each would cost more than the calls, so
one thread works through the queue and every millisecond that calls still wait, twice as many threads come to help:
short calls share a thread, and blocking ones have one each a few milliseconds later.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from tocsin.worker.frames import Done
from tocsin.worker.runner.run import Run, broken
from tocsin.worker.runner.vital import vital

_HELP_AFTER = 0.001
_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Interrupted(BaseException):
    """Raised inside a function whose run has timed out or was cancelled."""


class _Thread(threading.Thread):
    def __init__(self, pool: Threads) -> None:
        super().__init__(daemon=True, name="tocsin-call")
        self.pool = pool
        self.lock = threading.Lock()
        self.current: Run | None = None
        self.owed: Run | None = None  # begun, and its end not yet handed over
        self.spent = False  # was interrupted: the exception may still be on its way, so the thread must not be reused
        self.bell: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        try:
            self.pool.work(self)
        except BaseException:  # an interruption between the function's end and ours, or a fault of ours
            self.pool.retire(self)


class Threads:
    """At most `size` threads; `perform` makes the call and says how it ended."""

    def __init__(
        self,
        size: int,
        loop: asyncio.AbstractEventLoop,
        perform: Callable[[Run], Done],
        deliver: Callable[[Run, Done], None],
    ) -> None:
        self._size, self._loop = size, loop
        self._perform, self._deliver = perform, deliver
        self._queue: deque[Run] = deque()
        self._ended: deque[tuple[Run, Done]] = deque()
        self._parked: deque[_Thread] = deque()
        self._count = 0
        self._helpers = 1
        self._ramp: asyncio.TimerHandle | None = None
        self._told = False

    def submit(self, run: Run) -> None:
        """Queue a call; from the loop's thread."""
        self._queue.append(run)
        if self._ramp is None:
            self._helpers = 1
            self._call_help()

    def withdraw(self, run: Run) -> bool:
        """Take a call back that no thread has begun."""
        try:
            self._queue.remove(run)
        except ValueError:
            return False
        return True

    def interrupt(self, run: Run) -> None:
        """Raise `Interrupted` in the function, if it is still running; it takes effect between bytecodes."""
        thread: _Thread | None = run.thread
        if thread is None or thread.ident is None:
            return
        with thread.lock:
            if thread.current is run:
                thread.spent = True
                _raise_in_thread(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))

    def work(self, thread: _Thread) -> None:
        """A thread's life: work through the queue, then park."""
        while not thread.spent:
            try:
                run = self._queue.popleft()
            except IndexError:
                self._parked.append(thread)
                thread.bell.get()
                continue
            self._one(thread, run)
        self.retire(thread)

    def _one(self, thread: _Thread, run: Run) -> None:
        run.thread = thread
        thread.owed = run
        with thread.lock:
            thread.current = run
        done = self._perform(run)
        with thread.lock:
            thread.current = None
        self._ended.append((run, done))
        thread.owed = None
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._collect)

    def retire(self, thread: _Thread) -> None:
        """A thread that was interrupted ends, and hands over what it still owes."""
        if thread.owed is not None:
            self._ended.append((thread.owed, broken(thread.owed, 0)))
        self._loop.call_soon_threadsafe(self._one_less)
        self._loop.call_soon_threadsafe(self._collect)

    def _one_less(self) -> None:
        self._count -= 1

    @vital
    def _collect(self) -> None:
        self._told = False
        while self._ended:
            run, done = self._ended.popleft()
            if not run.ended:
                self._deliver(run, done)

    @vital
    def _call_help(self) -> None:
        """Wake or start threads while calls wait."""
        self._ramp = None
        if not self._queue:
            return
        for _ in range(min(self._helpers, len(self._queue))):
            if self._parked:
                self._parked.pop().bell.put(None)
            elif self._count < self._size:
                self._count += 1
                _Thread(self).start()
            else:
                break
        self._helpers *= 2
        self._ramp = self._loop.call_later(_HELP_AFTER, self._call_help)
