"""What functions say of themselves through their context: progress and checkpoints, on their way to the agent."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import UTC, datetime
from typing import Any

import msgspec

from tocsin.client.context import Saving
from tocsin.client.failures import Superseded
from tocsin.worker.frames import Note, ProtocolViolation, RunRef
from tocsin.worker.runner.output import OutputBuffer
from tocsin.worker.runner.run import Run, repacked

CHECKPOINT_BYTES = 64 * 1024


class Notes:
    """Notes of all runs until the next frame, and the checkpoints whose answer is still to come. From any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._progress: deque[tuple[Run, float]] = deque()
        self._checkpoints: deque[tuple[Run, Note]] = deque()
        self._numbers = itertools.count(1)
        self._unanswered: dict[int, tuple[Run, Future[None]]] = {}

    def progressed(self, run: Run, fraction: float) -> None:
        """Only the latest of a frame is told."""
        if not run.ended:
            self._progress.append((run, fraction))
            self._wake()

    def keep(self, run: Run, state: Any) -> Saving:
        """Send a checkpoint on its way."""
        text = msgspec.json.encode(state)
        if len(text) > CHECKPOINT_BYTES:
            raise ValueError(
                f"a checkpoint holds at most {CHECKPOINT_BYTES:,} bytes of JSON, and this is {len(text):,}"
            )
        # Through JSON and back: only what survives that comes back to the next attempt as it was.
        packed = repacked(text)
        number, kept = next(self._numbers), Future[None]()
        kept.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it: the answer still arrives
        self._unanswered[number] = run, kept
        self._checkpoints.append((run, Note(*run.ref, None, number, packed)))
        self._wake()
        return Saving(kept)

    def take(self) -> list[Note]:
        """Everything since the last time. A run whose end is told has nothing more to say, whatever it has left
        running."""
        if not self._progress and not self._checkpoints:
            return []
        notes: list[Note] = []
        for _ in range(len(self._checkpoints)):
            run, note = self._checkpoints.popleft()
            if run.told:
                self.answered(run.ref, note.number, "the run has ended")
            else:
                notes.append(note)
        latest = dict(self._progress.popleft() for _ in range(len(self._progress)))
        return notes + [Note(*run.ref, fraction) for run, fraction in latest.items() if not run.ended]

    def answered(self, ref: RunRef, number: int, refusal: str) -> None:
        """Give a function the result of its checkpoint."""
        run, kept = self._unanswered.pop(number, (None, None))
        if run is None or kept is None or run.ref != ref:
            raise ProtocolViolation(f"run {ref[1]} has no checkpoint with the number {number}")
        with contextlib.suppress(InvalidStateError):  # the function has the future and may have settled it itself
            if refusal:
                kept.set_exception(Superseded(refusal))
            else:
                kept.set_result(None)


class RunHost:
    """The `Host` of a run's context: only a function that wants a context pays for it."""

    __slots__ = ("_notes", "_output", "_run")

    def __init__(self, run: Run, output: OutputBuffer, notes: Notes) -> None:
        self._run, self._output, self._notes = run, output, notes

    def emit(self, level: str, text: str, about: str = "") -> None:
        """A record of the run's logger."""
        self._output.emit(self._run, level, text, about)

    def keep(self, state: Any) -> Saving:
        """Keep a checkpoint."""
        return self._notes.keep(self._run, state)

    def progressed(self, fraction: float) -> None:
        """So much of the work is done."""
        self._notes.progressed(self._run, fraction)

    def seconds_left(self) -> float:
        """Until the time-out."""
        return (self._run.started_ns - time.monotonic_ns()) / 1e9 + self._run.call.timeout_ms / 1e3

    def stop_event(self) -> threading.Event:
        """Set when the run is asked to stop; who has it is given time to heed it."""
        if self._run.stop_event is None:
            self._run.stop_event = threading.Event()
            if self._run.asked_to_stop:
                self._run.stop_event.set()
        return self._run.stop_event

    @property
    def now(self) -> datetime:
        """The present, by this machine's clock."""
        return datetime.now(UTC)
