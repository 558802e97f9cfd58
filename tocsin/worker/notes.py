"""What runs say of themselves, on its way to the server: checkpoints at once, progress now and then.

Of each run only the latest counts, so that a flood of notes costs as much as one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from tocsin.wire import RunKey, RunNote
from tocsin.worker.executors import Answer
from tocsin.worker.frames import Note
from tocsin.worker.link import Link, Refused, Unreachable

PROGRESS_AFTER = 1.0
_TIMEOUT = 4.0
_MOST_FAILURES = 8  # in a row; by then a server that is only down would have cost us our lease
_MOST_A_TIME = 500
_MOST_BYTES = 1024 * 1024


class _Latest:
    """The latest of one run, and who wants to know when it is kept."""

    __slots__ = ("answers", "checkpoint", "progress")

    def __init__(self) -> None:
        self.progress: float | None = None
        self.checkpoint: Any = UNSET
        self.answers: list[Answer] = []

    def put_under(self, newer: _Latest) -> None:
        """This was not sent after all: what `newer` does not say anew still holds."""
        newer.progress = self.progress if newer.progress is None else newer.progress
        newer.checkpoint = self.checkpoint if newer.checkpoint is UNSET else newer.checkpoint
        newer.answers[:0] = self.answers


class NoteShipper:
    """One shipment at a time, of whatever has gathered."""

    def __init__(self, link: Link, worker_id: str, may_send: Callable[[], None]) -> None:
        self._link, self._worker_id, self._may_send = link, worker_id, may_send
        self._latest: dict[RunKey, _Latest] = {}
        self._something, self._urgent = asyncio.Event(), asyncio.Event()

    def add(self, key: RunKey, note: Note, answer: Answer | None) -> None:
        """Take a note in."""
        latest = self._latest.setdefault(key, _Latest())
        if answer is None:
            latest.progress = note.progress
        else:
            latest.checkpoint = note.checkpoint
            latest.answers.append(answer)
            self._urgent.set()
        self._something.set()

    async def run(self) -> None:
        """Ship for as long as the session lives."""
        failures = 0
        while True:
            await self._something.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), PROGRESS_AFTER)
            batch = self._take()
            try:
                await self._ship(batch)
                failures = 0
            except Unreachable as exc:
                failures += 1
                if failures == _MOST_FAILURES:  # the ends of runs wait for this
                    _answer(batch, set(), str(exc))
                    failures = 0
                else:
                    self._put_back(batch)
                    await asyncio.sleep(random.uniform(0.5, 1) * min(0.1 * 2**failures, 2.0))

    def _put_back(self, batch: dict[RunKey, _Latest]) -> None:
        for key, latest in batch.items():
            latest.put_under(self._latest.setdefault(key, _Latest()))
        self._something.set()
        self._urgent.set()

    def _take(self) -> dict[RunKey, _Latest]:
        batch: dict[RunKey, _Latest] = {}
        size = 0
        while self._latest and len(batch) < _MOST_A_TIME and size < _MOST_BYTES:
            key = next(iter(self._latest))
            latest = batch[key] = self._latest.pop(key)
            size += 0 if latest.checkpoint is UNSET else len(latest.checkpoint)
        if not self._latest:
            self._something.clear()
            self._urgent.clear()
        return batch

    async def _ship(self, batch: dict[RunKey, _Latest]) -> None:
        self._may_send()
        notes = [
            RunNote(run_id=run_id, fence=fence, progress=latest.progress, checkpoint=latest.checkpoint)
            for (run_id, fence), latest in batch.items()
        ]
        try:
            kept = set(await self._link.note(self._worker_id, notes, _TIMEOUT))
            refusal = "this attempt is not its run's any more"
        except Refused as exc:  # by a server that cannot keep them, for one
            if len(batch) > 1:  # one run's note must not prevent the notes of other runs from being stored
                for key in list(batch):
                    await self._ship({key: batch[key]})
                    del batch[key]  # answered
                return
            kept, refusal = set(), str(exc)
        _answer(batch, kept, refusal)


def _answer(batch: dict[RunKey, _Latest], kept: set[RunKey], refusal: str) -> None:
    for key, latest in batch.items():
        for answer in latest.answers:
            answer("" if key in kept else refusal)
