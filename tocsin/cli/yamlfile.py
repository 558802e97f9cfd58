"""Documents from YAML, read as JSON would have them: the core schema of YAML 1.2 and nothing that could do something.

`on: failure` is a key named "on" and no truth, `12:30` and `2026-12-01` are texts. A key that stands twice, a tag, or
aliases that would unfold to more than anybody writes are refused. Each value is remembered with its line, so that the
server's word on `jobs.load.timeout` can be told with it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from tocsin.errors import TocsinError

DEEPEST = 64
_LONGEST_NUMBER = 100  # digits
MOST_PARTS = 250_000  # values of one file, with what aliases stand for
_TEXT = "tag:yaml.org,2002:str"
_TAGS = (None, "!", _TEXT, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
_INTEGER = re.compile(r"[-+]?[0-9]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)


class BadYaml(TocsinError):
    """What cannot be read, and where."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line, self.message = line, message


@dataclass(frozen=True)
class Loaded:
    """A document, and the line of each of its values, by the path that the server would name it by."""

    value: Any
    lines: dict[str, int]

    def line_of(self, path: str) -> int | None:
        """The line of a path, or of the nearest thing around it that stands in the file."""
        while path not in self.lines and path:
            path = re.sub(r"(\.[^.\[\]]*|\[\d+\]|^[^.\[\]]+)$", "", path)
        return self.lines.get(path)


@dataclass
class _Open:
    """A list or object on its way. `key`: the one whose value comes next."""

    value: list[Any] | dict[str, Any]
    path: str
    anchor: str | None
    parts: int = 1
    key: str | None = None
    merged: dict[str, Any] = field(default_factory=dict)


def dump(document: Any) -> str:
    """A document as `load` reads it back."""
    import yaml

    def of_text(dumper: Any, text: str) -> Any:
        # What would be read as something else without quotes; the library's own idea of that is YAML 1.1.
        odd = text in _WORDS or _FLOAT.fullmatch(text) or not text.replace("\n", "").isprintable()
        return dumper.represent_scalar(_TEXT, text, '"' if odd else "|" if "\n" in text else None)

    kind: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    kind.add_representer(str, of_text)
    return str(yaml.dump(document, Dumper=kind, default_flow_style=None, sort_keys=False, allow_unicode=True))


def load(text: str) -> list[Loaded]:
    """Every document of a file; raises `BadYaml`."""
    import yaml

    # Event by event, not as a tree: what is too deep or unfolds too far is refused before it is there.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    reader = _Reader()
    try:
        for event in yaml.parse(text, Loader=loader):
            reader.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ", ".join(filter(None, (error.context, error.problem)))
        raise BadYaml(mark.line + 1 if mark else 1, told) from None
    except yaml.YAMLError as error:
        raise BadYaml(1, str(error)) from None
    return reader.documents


class _Reader:
    """Builds values from events."""

    def __init__(self) -> None:
        self.documents: list[Loaded] = []
        self._begin()

    def _begin(self) -> None:
        self._stack: list[_Open] = []
        self._lines: dict[str, int] = {}
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._parts = 0

    def take(self, event: Any) -> None:
        """One event of the parser."""
        line = event.start_mark.line + 1
        match type(event).__name__:
            case "DocumentStartEvent":
                self._begin()
            case "ScalarEvent":
                self._scalar(event, line)
            case "SequenceStartEvent":
                self._open([], event, line)
            case "MappingStartEvent":
                self._open({}, event, line)
            case "SequenceEndEvent" | "MappingEndEvent":
                self._close(line)
            case "AliasEvent":
                self._alias(event.anchor, line)

    def _scalar(self, event: Any, line: int) -> None:
        _refuse_tag(event, line)
        if self._wants_key:
            self._key(event.value, line)
            return
        is_text = event.style or event.tag in ("!", _TEXT)
        self._put(event.value if is_text else _plain(event.value, line), 1, event.anchor, line)

    def _open(self, value: list[Any] | dict[str, Any], event: Any, line: int) -> None:
        _refuse_tag(event, line)
        if self._wants_key:
            raise BadYaml(line, "a key must be a text")
        if len(self._stack) == DEEPEST:
            raise BadYaml(line, f"is nested deeper than {DEEPEST} levels")
        path = self._place()
        self._lines.setdefault(path, line)
        self._stack.append(_Open(value, path, event.anchor))

    def _close(self, line: int) -> None:
        closed = self._stack.pop()
        if isinstance(closed.value, dict):
            for key, value in closed.merged.items():
                closed.value.setdefault(key, value)
        self._put(closed.value, closed.parts, closed.anchor, line)

    def _alias(self, anchor: str, line: int) -> None:
        if self._wants_key:
            raise BadYaml(line, "a key must be a text")
        if anchor not in self._anchors:
            raise BadYaml(line, f"the anchor {anchor!r} is not known here, or stands around its own alias")
        value, parts = self._anchors[anchor]
        self._put(value, parts, None, line)

    def _put(self, value: Any, parts: int, anchor: str | None, line: int) -> None:
        """A value is whole: into what is around it."""
        self._lines.setdefault(self._place(), line)
        if anchor is not None:
            self._anchors[anchor] = value, parts
        if not self._stack:
            self.documents.append(Loaded(value, self._lines))
            return
        around = self._stack[-1]
        around.parts += parts
        self._parts = max(self._parts, sum(each.parts for each in self._stack))
        if self._parts > MOST_PARTS:
            raise BadYaml(line, f"more than {MOST_PARTS:,} values, with what aliases stand for")
        if isinstance(around.value, list):
            around.value.append(value)
        elif around.key == "<<":
            _merge(around, value, line)
        else:
            assert around.key is not None
            around.value[around.key] = value
        around.key = None

    @property
    def _wants_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1].value, dict) and self._stack[-1].key is None

    def _key(self, key: str, line: int) -> None:
        around = self._stack[-1]
        if key in around.value:
            raise BadYaml(line, f"the key {key!r} stands twice")
        around.key = key

    def _place(self) -> str:
        """The path of the value that comes next."""
        if not self._stack:
            return ""
        around = self._stack[-1]
        if isinstance(around.value, list):
            return f"{around.path}[{len(around.value)}]"
        return f"{around.path}.{around.key}".lstrip(".")


def _refuse_tag(event: Any, line: int) -> None:
    if event.tag not in _TAGS:
        raise BadYaml(line, f"the tag {event.tag} means nothing here")


def _merge(around: _Open, value: Any, line: int) -> None:
    for part in value if isinstance(value, list) else [value]:
        if not isinstance(part, dict):
            raise BadYaml(line, "<< takes an object, or a list of objects")
        for key, inner in part.items():
            around.merged.setdefault(key, inner)


def _plain(text: str, line: int) -> Any:
    """A word without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if _FLOAT.fullmatch(text) is None:
        return text
    number = float(text)
    if not math.isfinite(number) or len(text) > _LONGEST_NUMBER:
        raise BadYaml(line, "is a number that JSON does not hold; if it is a text, it needs quotes")
    return int(text) if _INTEGER.fullmatch(text) else number
