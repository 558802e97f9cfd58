"""What an attempt was told in confidence is blotted out of its output and its end before they leave the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tocsin.model.loglines import BEHIND
from tocsin.model.masks import Mask, Trail, confidential
from tocsin.wire import ClaimedRun, Finished, LogLine


class AttemptMask(Mask):
    """A mask for one attempt, from its first line to its end."""

    def __init__(self, values: list[str]) -> None:
        super().__init__(values)
        self._trails: dict[str, Trail] = {}

    def output(self, lines: list[LogLine]) -> list[LogLine]:
        """Return lines of output with secrets masked. Earlier lines are remembered, because a value may continue here.
        The fields of a line are masked separately: they must not come between two parts of a value."""
        told: dict[str, Iterator[str]] = {}
        for stream in {line[1] for line in lines}:
            texts = [line[3].partition(BEHIND)[0] for line in lines if line[1] == stream]
            told[stream] = iter(self.lines(texts, self._trails.setdefault(stream, Trail())))
        return [(at, stream, level, self._with_about(next(told[stream]), text)) for at, stream, level, text in lines]

    def _with_about(self, shown: str, text: str) -> str:
        _, behind, about = text.partition(BEHIND)
        return f"{shown}{behind}{self.text(about)}" if behind else shown

    def end(self, end: Finished) -> None:
        """Blot out what the end of the attempt tells."""
        if end.error is not None:
            end.error.class_, end.error.message = self.text(end.error.class_), self.text(end.error.message)
        if end.result is not None and self.may_be_in(end.result):
            told = self.value(msgspec.msgpack.decode(end.result))
            end.result = msgspec.Raw(msgspec.msgpack.encode(told))  # packed like any other: reports go by its size


def mask_of(run: ClaimedRun, target: Any) -> AttemptMask:
    """The mask of what a run is told in confidence."""
    return AttemptMask(confidential(run.secrets, run.args, target, run.sensitive, run.token))
