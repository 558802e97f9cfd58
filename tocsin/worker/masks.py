"""Masks: what a run was told in confidence is blotted out of all that it tells, before it leaves the worker.

Text is looked through as if lines had no ends, so that a value that is cut into lines, by itself (a key in PEM), by a
program (base64 in columns of 76) or by us (a line too long), is found all the same. Nothing waits for what may come
next: an end that begins a value is blotted out at once from `_TELLING` characters on, and the rest when it comes. So
at most a few first characters of a value that was cut there are ever seen.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec

from tocsin.wire import ClaimedRun, Finished, LogLine
from tocsin.worker.lines import clean

BLOT = "***"
_MOST_TEXTS = 100  # of sensitive arguments: each is looked for in each line, in a score of forms
_SAYS = ("args", "kwargs", "body", "stdin")  # of a target
_TELLING = 4  # characters; fewer are found everywhere, and tell nothing
_WHOLE_LINE = 8  # characters from which on a part of what is confidential is looked for by itself


class Mask:
    """Blots out some values, in all the ways they are commonly written, from the output and the end of one attempt."""

    def __init__(self, values: Iterable[str]) -> None:
        written = {form for value in values for form in forms(value)}
        self._forms = sorted(form for form in written if len(form) >= _TELLING)
        self._longest = max(map(len, self._forms), default=1)
        self._tails: dict[str, str] = {}

    def output(self, lines: list[LogLine]) -> list[LogLine]:
        """Lines of output as they may be seen; those before them are remembered, for a value may go on here."""
        told: dict[str, Iterator[str]] = {}
        for stream in {line[1] for line in lines}:
            texts = [line[3] for line in lines if line[1] == stream]
            told[stream] = iter(self._blotted(self._tails.get(stream, ""), texts))
            self._tails[stream] = (self._tails.get(stream, "") + "".join(texts))[-self._longest :]
        return [(at, stream, level, next(told[stream])) for at, stream, level, _ in lines]

    def end(self, end: Finished) -> None:
        """Blot out what the end of the attempt tells."""
        if end.error is not None:
            end.error.class_, end.error.message = self.text(end.error.class_), self.text(end.error.message)
        if end.result is not None:
            told = self.value(msgspec.msgpack.decode(end.result))
            end.result = msgspec.Raw(msgspec.msgpack.encode(told))  # packed like any other: reports go by its size

    def text(self, text: str) -> str:
        """One text that stands alone."""
        return "\n".join(self._blotted("", text.split("\n")))

    def value(self, value: Any) -> Any:
        """All texts of a value that is made of JSON's types."""
        match value:
            case str():
                return self.text(value)
            case list() | tuple():
                return [self.value(item) for item in value]
            case dict():
                return {self.value(key): self.value(item) for key, item in value.items()}
            case _:
                return value

    def _blotted(self, before: str, lines: list[str]) -> list[str]:
        spans = _merged(self._found(before + "".join(lines)))
        if not spans:
            return lines
        out, start = [], len(before)
        for line in lines:
            out.append(_without(line, start, spans))
            start += len(line)
        return out

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        """Where a value stands, and where one may begin at the very end."""
        for form in self._forms:
            at = text.find(form)
            while at >= 0:
                yield at, at + len(form)
                at = text.find(form, at + 1)
            at = text.find(form[:_TELLING], max(0, len(text) - len(form) + 1))
            while at >= 0:
                if form.startswith(text[at:]):
                    yield at, len(text)
                    break
                at = text.find(form[:_TELLING], at + 1)


def mask_of(run: ClaimedRun, target: Any) -> Mask:
    """The mask of what a run is told in confidence: its secrets and, if they are sensitive, the texts among its
    arguments and in what its target says, but not the short ones, which are words like any other."""
    told = [run.args, *(getattr(target, name, None) for name in _SAYS)] if run.sensitive else []
    texts = (text for text in _texts(told) if len(text) >= _WHOLE_LINE)
    return Mask([*run.secrets.values(), *itertools.islice(texts, _MOST_TEXTS)])


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for item in value.values():
                yield from _texts(item)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def _without(line: str, start: int, spans: list[tuple[int, int]]) -> str:
    """The line that stands at `start`, with each span in it blotted out."""
    out, at = [], 0
    for begins, ends in spans:
        first, last = max(begins - start, 0), min(ends - start, len(line))
        if first < last:
            out += [line[at:first], BLOT]
            at = last
    return "".join([*out, line[at:]])


def forms(value: str) -> Iterator[str]:
    """How a value may be written, without ends of lines: as it is, in URLs, in JSON, in base64 wherever it begins."""
    for text in (value, *_escaped(value)):
        yield "".join(_lines(text))
        # Where the line is read with its carriage return, that is shown.
        yield "".join(clean(line) for line in text.split("\n"))
    lines = _lines(value)
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _WHOLE_LINE)
    data = value.encode()
    for before in range(3):
        standard = base64.b64encode(bytes(before) + data)
        # Characters that other bytes have a part in are another matter each time.
        sure = standard[(before * 8 + 5) // 6 : (before + len(data)) * 8 // 6].decode()
        yield sure
        yield sure.translate(_URL_SAFE)


_URL_SAFE = str.maketrans("+/", "-_")


def _lines(text: str) -> list[str]:
    return [clean(line.removesuffix("\r")) for line in text.split("\n")]


def _escaped(value: str) -> Iterator[str]:
    for ascii_only in (True, False):
        yield json.dumps(value, ensure_ascii=ascii_only)[1:-1]
    for quoted in (quote(value, safe=""), quote(value), quote_plus(value)):
        yield quoted
        yield _lower_escapes(quoted)


def _lower_escapes(quoted: str) -> str:
    first, *rest = quoted.split("%")
    return "%".join([first, *(part[:2].lower() + part[2:] for part in rest)])
