"""What functions print and log, on its way to the run's log."""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from tocsin.model.loglines import clean, joined
from tocsin.worker.frames import Output
from tocsin.worker.lines import LINE_BYTES, OutputLimit, pieces
from tocsin.worker.runner.run import CURRENT, Run

_LEVELS = {name: name for name in ("debug", "info", "warning", "error", "critical")}
_BACKLOG_LINES = 100_000


class OutputBuffer:
    """Lines of all runs until the next frame; bounded, so a flood costs lines and not memory."""

    def __init__(self, wake: Callable[[], None]) -> None:
        # Never another one in its place: a thread that is about to append to this would tell nobody.
        self._lines: deque[tuple[Run, Output]] = deque()
        self._wake = wake
        self.choked = False  # the agent does not keep up

    def take(self) -> list[Output]:
        """Everything gathered since the last time. What a thread still had to say when its run's end was told already
        is dropped: it would be taken for another run's."""
        taken = (self._lines.popleft() for _ in range(len(self._lines)))
        return [line for run, line in taken if not run.told]

    def emit(self, run: Run, level: str, text: str, about: str) -> None:
        """A record of the run's logger. What it carries stands with its first line."""
        self.add(run, "log", _LEVELS.get(level, "info"), _exact(text).split("\n"), clean(_exact(about)))

    def add(self, run: Run, stream: str, level: str, lines: list[str], about: str = "") -> bool:
        """Append lines, within the limits of the run and the buffer. Return whether all of them fit."""
        if run.ended:
            return False
        if run.limit is None:
            run.limit = OutputLimit()
        parts = [part for line in lines for part in _pieces(line)]
        kept, dropped = run.limit.take([joined(parts[0], about), *parts[1:]] if about else parts)
        if self.choked or len(self._lines) + len(kept) > _BACKLOG_LINES:
            kept, dropped = [], dropped + len(kept)
        at = time.time()
        self._lines.extend([(run, Output(*run.ref, at, stream, level, line)) for line in kept])
        if dropped:
            self._lines.append((run, Output(*run.ref, at, "", "", "", dropped)))
        self._wake()
        return not dropped

    def end(self, run: Run) -> None:
        """Add the line that a run has begun and not finished."""
        for stream, text in (run.partial or {}).items():
            if text:
                self.add(run, stream, "info", [text])


def _exact(text: str) -> str:
    """Return the text as an exact `str`: methods of a subclass could run code later, outside of its run."""
    return text if type(text) is str else str.__str__(text)


def _pieces(line: str) -> list[str]:
    line = clean(line)
    return [line] if len(line) <= LINE_BYTES // 4 else pieces(line.encode())  # no character has more than 4 bytes


class RunStream(io.TextIOBase):
    """Stands in for `sys.stdout` or `sys.stderr`: what a run prints goes to its log, the rest to the worker's."""

    def __init__(self, name: str, real: TextIO, buffer: OutputBuffer) -> None:
        self._stream, self._real, self._output = name, real, buffer

    def write(self, text: str) -> int:
        text = _exact(text)
        run = CURRENT.get()
        if run is None or run.ended:
            return self._real.write(text)
        if run.partial is None:
            run.partial = {}
        size = len(text)
        if run.torn and self._stream in run.torn:
            # A piece of this line was dropped. A secret could not be recognised by the rest of the line.
            _, newline, text = text.partition("\n")
            if not newline:
                return size
            run.torn.discard(self._stream)
        whole, newline, rest = (run.partial.get(self._stream, "") + text).rpartition("\n")
        if newline:
            self._output.add(run, self._stream, "info", whole.split("\n"))
        if len(rest) > LINE_BYTES:
            if not self._output.add(run, self._stream, "info", [rest]):
                run.torn = {*(run.torn or ()), self._stream}
            rest = ""
        run.partial[self._stream] = rest
        return size

    def flush(self) -> None:
        if not self._real.closed:
            self._real.flush()

    def fileno(self) -> int:
        return self._real.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> object:
        """The bytes underneath, which cannot be told apart by run."""
        return self._real.buffer
