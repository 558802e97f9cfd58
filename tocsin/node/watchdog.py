"""The watchdog: names what holds the event loop of a server for more than a second.

The loop beats four times a second, and a thread looks at when it last did. A beat that is late is told once, with the
stack of the loop's thread at that moment, and counted by how long it lasted. Code that holds the interpreter as well (a
regular expression, for example) keeps the thread from looking: then faulthandler, which needs no interpreter, has
written the stack down by the time the thread runs again. Time in which the whole process stood still (SIGSTOP, a
machine that was suspended) took none of a processor, and is not told.
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
HELD_SECONDS = 1.0  # from here on the loop is held
_TICK = 0.25
_SPEAK_SECONDS = 10.0  # at most one line in this time
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
                    except Exception as error:  # who cannot tell goes on to look
                        log.error("the watchdog failed", error=f"{type(error).__name__}: {error}")
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _look(self, dump: Any) -> None:
        """Wait for a tick, and see whether the loop has beaten."""
        faulthandler.dump_traceback_later(self._held, file=dump)
        looked_at, used = time.monotonic(), time.process_time()
        self._stopping.wait(self._tick)
        slept, used = time.monotonic() - looked_at, time.process_time() - used
        if slept > self._held:
            stack = _dumped(dump, self._watched)
            if used > slept / 10:  # other processes may have taken their part
                self._tell(stack, slept)
                LOOP_HELD.observe(slept)
        elif time.monotonic() - self._beaten > self._held + self._tick:
            self._tell(_stack_of(self._watched), time.monotonic() - self._beaten)
            self._await_beat()

    def _await_beat(self) -> None:
        """Count for how long the loop is held; what has been told is not told again."""
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
            "the event loop is held: nobody is answered",
            handler=next((frame for frame in reversed(stack) if frame.startswith("tocsin/")), "not known"),
            task=None if task is None else task.get_name(),
            seconds=round(seconds, 2),
            not_told=self._untold,
            calls=stack,  # `stack` has a meaning of its own to structlog
        )
        self._told_at, self._untold = time.monotonic(), 0


def _stack_of(thread: int) -> list[str]:
    """Where a thread is, the innermost call last."""
    frame = sys._current_frames().get(thread)
    found = [] if frame is None else traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    # `walk_stack` begins with the innermost.
    return [_told(f.filename, f.lineno, f.name) for f in list(found)[:_MOST_FRAMES]][::-1]


def _dumped(dump: Any, thread: int) -> list[str]:
    """The stack of a thread that faulthandler has written, the innermost call last; the file is empty afterwards."""
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
    """One call: within Tocsin by its path from the repository, else by the name of the file and its folder."""
    path = Path(file)
    short = path.relative_to(_HOUSE) if path.is_relative_to(_HOUSE / "tocsin") else Path(*path.parts[-2:])
    return f"{short}:{line} {function}"
