"""The watchdog reports code that holds the event loop of a server for more than a second.

The loop beats four times a second, and a thread checks the time of the last beat. The watchdog logs each late beat
once, with the stack of the loop's thread at that moment, and observes how long the loop was held. Code that also holds
the interpreter (a regular expression, for example) keeps the thread from running. In that case faulthandler, which does
not need the interpreter, has written the stack by the time the thread runs again. If the whole process stood still
(SIGSTOP, a suspended machine), it used no processor time, and the watchdog reports nothing.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tocsin.telemetry import LOOP_HELD, get_logger

log = get_logger("watchdog")
HELD_SECONDS = 1.0  # a beat that is later than this counts as held
_TICK = 0.25
_SPEAK_SECONDS = 10.0  # seconds between two log lines
_MOST_FRAMES = 40
_HOUSE = Path(__file__).parents[2]
_DUMPED_THREAD = re.compile(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+)\b")
_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Watchdog:
    """Watches the running loop from `start` to `stop`."""

    def __init__(self, held_seconds: float = HELD_SECONDS, speak_seconds: float = _SPEAK_SECONDS) -> None:
        self._held, self._speak = held_seconds, speak_seconds
        self._tick = min(_TICK, held_seconds / 4)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beaten = 0.0
        self._told_at = float("-inf")
        self._untold = 0

    def start(self) -> None:
        """Begin to watch the loop that runs in this thread."""
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="tocsin-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the beat."""
        self._stopping.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._timer = self._loop.call_later(self._tick, self._beat)

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self) -> None:
        with tempfile.TemporaryFile() as dump:
            try:
                while not self._stopping.is_set():
                    try:
                        self._look(dump)
                    except Exception as error:  # keep watching even if a report fails
                        log.error("the watchdog failed", error=f"{type(error).__name__}: {error}")
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _look(self, dump: Any) -> None:
        """Wait for one tick, then check whether the loop has beaten."""
        faulthandler.dump_traceback_later(self._held, file=dump)
        looked_at, used = time.monotonic(), time.process_time()
        self._stopping.wait(self._tick)
        slept, used = time.monotonic() - looked_at, time.process_time() - used
        if slept > self._held:
            stack = _dumped(dump, self._watched)
            if used > slept / 10:  # other processes may have used the processor, too
                self._tell(stack, slept)
                LOOP_HELD.observe(slept)
        elif time.monotonic() - self._beaten > self._held + self._tick:
            self._tell(_stack_of(self._watched), time.monotonic() - self._beaten)
            self._await_beat()

    def _await_beat(self) -> None:
        """Wait until the loop beats again and observe how long it was held. Log nothing more about this hold."""
        began = self._beaten
        while self._beaten == began and not self._stopping.wait(self._tick):
            pass
        LOOP_HELD.observe(time.monotonic() - began)

    def _tell(self, stack: list[str], seconds: float) -> None:
        if time.monotonic() - self._told_at < self._speak:
            self._untold += 1
            return
        task = asyncio.current_task(self._loop)
        log.warning(
            "the event loop is held: the server answers no request",
            handler=next((frame for frame in reversed(stack) if frame.startswith("tocsin/")), "not known"),
            task=None if task is None else task.get_name(),
            seconds=round(seconds, 2),
            not_told=self._untold,
            calls=stack,  # `stack` has a meaning of its own to structlog
        )
        self._told_at, self._untold = time.monotonic(), 0


def _stack_of(thread: int) -> list[str]:
    """Return the stack of a thread, the innermost call last."""
    frame = sys._current_frames().get(thread)
    found = [] if frame is None else traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    # `walk_stack` begins with the innermost.
    return [_told(f.filename, f.lineno, f.name) for f in list(found)[:_MOST_FRAMES]][::-1]


def _dumped(dump: Any, thread: int) -> list[str]:
    """Return the stack of a thread that faulthandler has written, the innermost call last, and empty the file."""
    dump.seek(0)
    lines = dump.read(1_000_000).decode(errors="replace").splitlines()
    dump.seek(0)
    os.ftruncate(dump.fileno(), 0)
    found: list[str] = []
    ours = False
    for line in lines:
        if head := _DUMPED_THREAD.match(line):
            ours = int(head[1], 16) == thread
        elif ours and (frame := _DUMPED_FRAME.match(line)) and len(found) < _MOST_FRAMES:
            found.append(_told(frame[1], int(frame[2]), frame[3]))
    return found[::-1]


def _told(file: str, line: int | None, function: str) -> str:
    """Return one call: the path from the repository for Tocsin's code, otherwise the name of the file and its
    folder."""
    path = Path(file)
    short = path.relative_to(_HOUSE) if path.is_relative_to(_HOUSE / "tocsin") else Path(*path.parts[-2:])
    return f"{short}:{line} {function}"
