"""Masks: secrets and sensitive arguments of a run are masked in all text that the run produces.

Text is searched as if it had no line ends. Thus a value is also found if it is split into lines: by itself (a key in
PEM), by a program (base64 in columns of 76) or by the worker (a line that is too long). Masking never waits for later
text: if a text ends with the first `_TELLING` or more characters of a value, they are masked at once, and the rest when
it arrives. So at most a few first characters of a value that was cut there are ever visible.

A text must be masked before it is cut: if a cut goes through a value, the part after the cut cannot be recognised any
more. If a text must be cut first, it must be cut at its end.

Most texts hold no value, and most forms of a value begin alike. So a text is first searched for the beginnings of
forms, `_TELLING` characters each. A long value is recognised by its beginning and followed while it matches, so that no
text, even one made to resemble a value, costs more than a few reads for each form: the author of a text must not be
able to slow down the worker that reads it.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
_MOST_ODD = 512  # characters of a value that is also searched for in rarely used forms
_MOST_DIGITS = 40  # digits of a value that may be printed as a number

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")  # written the same way wherever nothing is encoded
_NUMERIC = re.compile(r"[-+0-9.eE]+")
# `clean` writes these characters differently
_CLEANED = re.compile("[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-f]{4})|.)", re.DOTALL)


@dataclass
class Trail:
    """What came before, as far as a value may go on from there: the last characters, and the values in whose midst
    they end, each with how much of it has passed."""

    text: str = ""
    begun: dict[str, int] = field(default_factory=dict)


class Mask:
    """Blots out some values, in all the ways they are commonly written."""

    def __init__(self, values: Iterable[str]) -> None:
        values = list(values)
        self._starts: dict[str, list[str]] = {}  # forms by their first characters
        for form in sorted({form for value in values for form in forms(value) if len(form) >= _TELLING}):
            self._starts.setdefault(form[:_TELLING], []).append(form)
        self._numbers = {number for value in values for number in _numbers(value)}
        self._counts = any(_NUMERIC.fullmatch(start) for start in self._starts)

    def text(self, text: str) -> str:
        """Mask a single text, which may have been cut at its end."""
        return "\n".join(self.lines(text.split("\n"), Trail()))

    def may_be_in(self, packed: bytes) -> bool:
        """Return whether a value may be in this msgpack. This is cheaper than unpacking it."""
        flat = bytes(packed).replace(b"\n", b"")
        return self._counts or any(start.encode("utf-8", "surrogatepass") in flat for start in self._starts)

    def value(self, value: Any) -> Any:
        """Mask all texts of a value of JSON types, in place, and numbers that equal one of the masked values. Works
        without recursion, because the value may be deeply nested."""
        root = [value]
        leaves = _Leaves(root, self._counts)
        self._mask_leaves(leaves)
        leaves.rename()
        return root[0]

    def _mask_leaves(self, leaves: _Leaves) -> None:
        """Mask the leaves in one pass over all their texts."""
        flat = "\n".join(text.replace("\n", "") for text in leaves.texts)  # no form contains a line end
        spans = deque(_merged(self._whole(flat)))
        start = 0
        for n, text in enumerate(leaves.texts):
            if not spans:
                break
            end = start + len(text) - text.count("\n")
            if spans[0][0] < end:
                leaves.put(n, "\n".join(_blotted(text.split("\n"), start, spans)))
            start = end + 1
        for n, number in leaves.numbers.items():
            if number in self._numbers or -number in self._numbers:
                leaves.put(n, BLOT)

    def lines(self, lines: list[str], trail: Trail) -> list[str]:
        """The next lines of a text, as they may be seen."""
        before, text = len(trail.text), trail.text + "".join(lines)
        spans = _merged(self._found(text, before, trail))
        trail.text = text[-_BEGINNING:]
        return _blotted(lines, before, deque(spans)) if spans else lines

    def _found(self, text: str, before: int, trail: Trail) -> Iterator[tuple[int, int]]:
        """Where a value stands or goes on, and where one may begin at the very end."""
        going_on, trail.begun = trail.begun, {}
        for form, passed in going_on.items():
            if (end := _followed(text, before, form, passed, trail)) > before:
                yield before, end
        for form in self._begun_in(text):
            yield from _occurrences(text, form, trail)
            beginning = form[:_BEGINNING]
            at = text.find(form[:_TELLING], max(0, len(text) - len(beginning) + 1))
            while at >= 0:
                if beginning.startswith(text[at:]):
                    yield at, len(text)
                    break
                at = text.find(form[:_TELLING], at + 1)

    def _whole(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the spans of whole values, and of the beginnings of long values."""
        for form in self._begun_in(text):
            yield from _occurrences(text, form, Trail())

    def _begun_in(self, text: str) -> Iterator[str]:
        for start, written in self._starts.items():
            if start in text:
                yield from written


class _Leaves:
    """The texts in a value, each with its position. `root` holds the value."""

    def __init__(self, root: list[Any], with_numbers: bool) -> None:
        self.texts: list[str] = []
        self.numbers: dict[int, float] = {}  # by the position of their text
        self._places: list[tuple[Any, Any, bool]] = []  # container, key, whether the text is the key itself
        self._renamed: dict[int, tuple[dict[Any, Any], dict[str, str]]] = {}
        boxes: list[Any] = [root]
        while boxes:
            box = boxes.pop()
            for at, item in box.items() if isinstance(box, dict) else enumerate(box):
                if isinstance(at, str):
                    self._add(box, at, at, True)
                if isinstance(item, str):
                    self._add(box, at, item)
                elif isinstance(item, list | dict):
                    boxes.append(item)
                elif with_numbers and type(item) in (int, float):
                    self.numbers[len(self.texts)] = item
                    self._add(box, at, repr(item))

    def _add(self, box: Any, at: Any, text: str, key: bool = False) -> None:
        self._places.append((box, at, key))
        self.texts.append(text)

    def put(self, n: int, text: str) -> None:
        """Replace a text."""
        box, at, key = self._places[n]
        if key:
            self._renamed.setdefault(id(box), (box, {}))[1][at] = text
        else:
            box[at] = text

    def rename(self) -> None:
        """Rename the keys whose texts were replaced."""
        for box, names in self._renamed.values():
            items = [(names.get(key, key), item) for key, item in box.items()]
            box.clear()
            box.update(items)


def _occurrences(text: str, form: str, trail: Trail) -> Iterator[tuple[int, int]]:
    """Yield the spans of a form. Overlapping occurrences become one span."""
    beginning = form[:_BEGINNING]
    size = len(beginning)
    first = last = previous = -1
    at = text.find(beginning)
    while at >= 0:
        if at <= last and size == len(form):  # it overlaps itself, possibly thousands of times
            end = _repeated(text, at + size, form[previous - at :])
        else:
            end = _followed(text, at + size, form, size, trail)
        if at > last:
            if first >= 0:
                yield first, last
            first = at
        previous, last = at, max(last, end)
        at = text.find(beginning, end - size + 1)
    if first >= 0:
        yield first, last


def _repeated(text: str, at: int, unit: str) -> int:
    """Return how far a text repeats a unit from here. The step grows while it matches."""
    times = 1
    while times:
        if text.startswith(unit * times, at):
            at, times = at + len(unit) * times, min(times * 2, 1 + _BEGINNING)
        else:
            times //= 2
    return at


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
    """Return the confidential texts of a run: its token, its secrets and, if they are sensitive, the texts in its
    arguments and in its target. Short texts are left out: they are ordinary words."""
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
    """Yield the texts of a value in order. Works without recursion, because the value may be deeply nested."""
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


def _blotted(lines: list[str], start: int, left: deque[tuple[int, int]]) -> list[str]:
    """Return lines, the first of which begins at `start`, with each span of `left` masked. Masked spans are removed
    from `left`."""
    shown = []
    for line in lines:
        out, at, end = [], 0, start + len(line)
        while left and left[0][0] < end:
            first, last = max(left[0][0] - start, 0), min(left[0][1] - start, len(line))
            if first < last:
                out += [line[at:first], BLOT]
                at = last
            if left[0][1] > end:  # it continues in the next line
                break
            left.popleft()
        shown.append("".join([*out, line[at:]]) if out else line)
        start = end
    return shown


# ── how a value may be written ───────────────────────────────────────────────────────────────────────────────────────


def forms(value: str) -> Iterator[str]:
    """Yield the forms in which a value may be written, without line ends: unchanged, as a number, in JSON, in Python,
    in URLs, in base64 at any offset."""
    for text in [value] if _PLAIN.fullmatch(value) else dict.fromkeys(_written(value)):
        yield text.replace("\n", "")
        if _CLEANED.search(text):
            yield "".join(_lines(text))
            # If the line is read with its carriage return, the carriage return is shown.
            yield "".join(clean(line) for line in text.split("\n"))
    lines = _lines(value)
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _WHOLE_LINE)
    yield from map(str, _numbers(value))
    yield from _in_base64(value.encode("utf-8", "surrogatepass"))


def _written(value: str) -> Iterator[str]:
    yield value
    if len(value) > _MOST_ODD:
        yield from (_json(value, True), _json(value, False), quote_plus(value, errors="surrogatepass"))
        yield from _python(value, repr)
        return
    yield from _in_json(value)
    yield from _in_python(value)
    yield from _in_urls(value)
    # Twice: JSON in JSON, or `repr` of a dict as a field of a record.
    for once in {_json(value, True), _json(value, False), *_python(value, repr)}:
        yield from (_json(once, True), _json(once, False))
        yield from _python(once, repr)


def _lines(text: str) -> list[str]:
    return [clean(line.removesuffix("\r")) for line in text.split("\n")]


def _numbers(value: str) -> list[int | float]:
    """Return the numbers as which a value may be printed, if it has enough digits to be recognised."""
    if len(value) > _MOST_DIGITS or not _NUMERIC.fullmatch(value):
        return []
    mantissa = re.split("[eE]", value)[0]
    if len(mantissa.replace(".", "").lstrip("+-0")) < _TELLING:
        return []
    try:
        number = float(value)
    except ValueError:
        return []
    whole: list[int | float] = [int(value)] if "." not in value and mantissa == value else []
    return [*whole, number] if math.isfinite(number) else whole


# Beyond what JSON requires, some writers escape characters that have a meaning in HTML.
_HTML = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&"})
_MORE_HTML = str.maketrans({letter: f"\\u{ord(letter):04x}" for letter in "<>&'+`"})


def _json(value: str, ascii_only: bool) -> str:
    return json.dumps(value, ensure_ascii=ascii_only)[1:-1]


def _in_json(value: str) -> Iterator[str]:
    for ascii_only in (True, False):
        plain = _json(value, ascii_only)
        quotes = plain.replace('\\"', "\\u0022")
        for text in (plain, plain.translate(_HTML), plain.translate(_MORE_HTML), quotes.translate(_MORE_HTML)):
            for slashes in (text, text.replace("/", "\\/")):
                yield slashes
                yield _ESCAPE.sub(_upper, slashes)


def _upper(match: re.Match[str]) -> str:
    return f"\\u{match[1].upper()}" if match[1] else match[0]


def _in_python(value: str) -> Iterator[str]:
    """Yield a text and its bytes as `repr` and `ascii` write them, between quotes of either kind."""
    for written in (repr, ascii, _bytes_repr):
        yield from _python(value, written)


def _python(value: str, written: Callable[[str], str]) -> tuple[str, str]:
    # If both quotes occur later in the text, it is written between ' and every ' is escaped.
    escaped = written(value + "'\"")[1:-4]
    return escaped, escaped.replace("\\'", "'")


def _bytes_repr(text: str) -> str:
    return repr(text.encode("utf-8", "surrogatepass"))[1:]


def _in_urls(value: str) -> Iterator[str]:
    data = value.encode("utf-8", "surrogatepass")
    for safe in ("", "/", "!'()*", ";/?:@&=+$,#!'()*"):  # forms, paths, encodeURIComponent, encodeURI
        quoted = quote(data, safe=safe)
        yield quoted
        yield _lower_escapes(quoted)
    quoted = quote_plus(data)
    yield quoted
    yield _lower_escapes(quoted)


def _lower_escapes(quoted: str) -> str:
    first, *rest = quoted.split("%")
    return "%".join([first, *(part[:2].lower() + part[2:] for part in rest)])


_URL_SAFE = str.maketrans("+/", "-_")


def _in_base64(data: bytes) -> Iterator[str]:
    for before in range(3):
        standard = base64.b64encode(bytes(before) + data)
        # Characters that also encode bits of neighbouring bytes differ each time.
        sure = standard[(before * 8 + 5) // 6 : (before + len(data)) * 8 // 6].decode()
        yield sure
        yield sure.translate(_URL_SAFE)
