"""`tocsin worker --reload`: the worker as a child that is started anew whenever a Python file changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tocsin.worker import proctree

_LOOK_EVERY = 0.5
_ASK_AGAIN = 2.0  # seconds; the second time means: now
_KILL_AFTER = 15.0
_NOT_OURS = {"__pycache__", "node_modules", "site-packages"}

Seen = dict[str, tuple[int, int]]


def reloading(command: Sequence[str], folder: Path) -> int:
    """Run the command, again whenever a Python file under the folder changes; the exit code of the last one.

    What ends by itself and well has been asked to; what fails is started again when somebody has mended it."""
    seen = _look(folder)  # before it starts: what changes while it does must not go unnoticed
    child = _Child(command)
    while True:
        while child.lives(_LOOK_EVERY):
            now = _look(folder)
            if now != seen:
                _say(f"{', '.join(_changed(seen, now, folder))} changed: starting the worker anew")
                seen = now
                child.restart()
        if child.asked_to_end or child.exit_code == 0:
            return child.exit_code
        _say(f"the worker ended with exit code {child.exit_code}; it is started again when a file changes")
        while (now := _look(folder)) == seen and not child.asked_to_end:
            time.sleep(_LOOK_EVERY)
        seen = now
        if not child.asked_to_end:
            child.start()


class _Child:
    """The command's process, and the signals that are meant for it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self.asked_to_end = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)
        self.start()

    def start(self) -> None:
        """Start it; it does not outlive us."""
        # A session of its own: else a Ctrl-C would reach it twice, which means "now".
        self._process = subprocess.Popen(
            self._command, start_new_session=True, preexec_fn=proctree.die_with_parent(os.getpid())
        )

    def lives(self, seconds: float) -> bool:
        """Whether it still does in so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    @property
    def exit_code(self) -> int:
        return self._process.returncode or 0

    def restart(self) -> None:
        """End it, with a little patience for what it runs, and start it anew."""
        for seconds in (_ASK_AGAIN, _KILL_AFTER):
            self._process.terminate()
            if not self.lives(seconds):
                break
        else:
            self._process.kill()
            self._process.wait()
        if not self.asked_to_end:
            self.start()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_end = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def _look(folder: Path) -> Seen:
    """Every Python file of ours, with what tells that it was written."""
    return dict(_files(str(folder)))


def _files(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # gone, or not ours to see
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _NOT_OURS:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                stat = entry.stat()
                yield entry.path, (stat.st_mtime_ns, stat.st_size)
        except OSError:
            continue


def _changed(before: Seen, now: Seen, folder: Path) -> list[str]:
    changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    return [os.path.relpath(path, folder) for path in changed[:3]] + (["…"] if len(changed) > 3 else [])


def _say(text: str) -> None:
    print(f"tocsin: {text}", file=sys.stderr, flush=True)
