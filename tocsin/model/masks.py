"""Masks: what a run was told in confidence is blotted out of all that it tells.

Text is looked through as if lines had no ends, so that a value that is cut into lines, by itself (a key in PEM), by a
program (base64 in columns of 76) or by us (a line too long), is found all the same. Nothing waits for what may come
next: an end that begins a value is blotted out at once from `_TELLING` characters on, and the rest when it comes. So
at most a few first characters of a value that was cut there are ever seen.

A long value is known by its beginning and followed for as long as it goes on, so that no text, however like a value it
is made, costs more than to read it a few times: who writes it must not be able to hold up the worker that reads it.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus

from tocsin.model.loglines import clean

BLOT = "***"
_MOST_TEXTS = 100  # of sensitive arguments: each is looked for in each line, in a score of forms
_MOST_CHARACTERS = 128 * 1024  # of them together: of what is longer the beginning is looked for
_SAYS = ("args", "kwargs", "body", "stdin")  # of a target
_TELLING = 4  # characters; fewer are found everywhere, and tell nothing
_WHOLE_LINE = 8  # characters from which on a part of what is confidential is looked for by itself
_BEGINNING = 256  # characters by which a value is known


@dataclass
class Trail:
    """What came before, as far as a value may go on from there: the last characters, and the values in whose midst
    they end, each with how much of it has passed."""

    text: str = ""
    begun: dict[str, int] = field(default_factory=dict)


class Mask:
    """Blots out some values, in all the ways they are commonly written."""

    def __init__(self, values: Iterable[str]) -> None:
        written = {form for value in values for form in forms(value)}
        self._forms = sorted(form for form in written if len(form) >= _TELLING)

    def text(self, text: str) -> str:
        """One text that stands alone."""
        return "\n".join(self.lines(text.split("\n"), Trail()))

    def value(self, value: Any) -> Any:
        """All texts of a value that is made of JSON's types; without recursion, for it may be nested deeply."""
        root = [value]
        boxes: list[list[Any] | dict[Any, Any]] = [root]
        while boxes:
            box = boxes.pop()
            keys = {key: self.text(key) for key in box if isinstance(key, str)} if isinstance(box, dict) else {}
            for at, item in list(box.items() if isinstance(box, dict) else enumerate(box)):
                match item:
                    case str():
                        box[at] = self.text(item)
                    case list() | tuple():
                        box[at] = [*item]
                        boxes.append(box[at])
                    case dict():
                        box[at] = {**item}
                        boxes.append(box[at])
            if isinstance(box, dict) and any(key != shown for key, shown in keys.items()):
                renamed = {keys.get(key, key): item for key, item in box.items()}
                box.clear()
                box.update(renamed)
        return root[0]

    def lines(self, lines: list[str], trail: Trail) -> list[str]:
        """The next lines of a text, as they may be seen."""
        before, text = len(trail.text), trail.text + "".join(lines)
        spans = _merged(self._found(text, before, trail))
        trail.text = text[-_BEGINNING:]
        if not spans:
            return lines
        out, start = [], before
        for line in lines:
            out.append(_without(line, start, spans))
            start += len(line)
        return out

    def _found(self, text: str, before: int, trail: Trail) -> Iterator[tuple[int, int]]:
        """Where a value stands or goes on, and where one may begin at the very end."""
        going_on, trail.begun = trail.begun, {}
        for form, passed in going_on.items():
            if (end := _followed(text, before, form, passed, trail)) > before:
                yield before, end
        for form in self._forms:
            beginning = form[:_BEGINNING]
            at = text.find(beginning)
            while at >= 0:
                end = _followed(text, at + len(beginning), form, len(beginning), trail)
                yield at, end
                at = text.find(beginning, end - len(beginning) + 1)
            at = text.find(form[:_TELLING], max(0, len(text) - len(beginning) + 1))
            while at >= 0:
                if beginning.startswith(text[at:]):
                    yield at, len(text)
                    break
                at = text.find(form[:_TELLING], at + 1)


def _followed(text: str, at: int, form: str, passed: int, trail: Trail) -> int:
    """How far a value goes on from here, of which so much has passed: in steps that grow while they are right."""
    step = 1
    while step and passed < len(form):
        part = form[passed : passed + step]
        if text.startswith(part, at):
            passed, at, step = passed + len(part), at + len(part), step * 2
        else:
            step //= 2
    if at == len(text) and passed < len(form):
        trail.begun.setdefault(form, passed)
    return at


def confidential(secrets: Mapping[str, str], args: Any, target: Any, sensitive: bool, token: str = "") -> list[str]:
    """What a run is told in confidence: its token, its secrets and, if they are sensitive, the texts among its
    arguments and in what its target says, but not the short ones, which are words like any other."""
    told = [*secrets.values(), token] if token else [*secrets.values()]
    if sensitive:
        texts = _texts([args, *(getattr(target, name, None) for name in _SAYS)])
        long = (text for text in texts if len(text) >= _WHOLE_LINE)
        told += _together(itertools.islice(long, _MOST_TEXTS), _MOST_CHARACTERS)
    return told


def _together(texts: Iterable[str], left: int) -> Iterator[str]:
    for text in texts:
        yield text[:left]
        left = max(0, left - len(text))


def _texts(value: Any) -> Iterator[str]:
    """The texts of a value in their order; without recursion, for it may be nested deeply."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case list() as items:
                left += reversed(items)
            case dict() as items:
                left += reversed(items.values())


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
