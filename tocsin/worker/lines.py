"""Bytes that a program writes, made into lines that can be stored: bounded, decoded, escaped."""

from __future__ import annotations

from tocsin.model.loglines import BREAKING, clean

LINE_BYTES = 16 * 1024
ATTEMPT_BYTES = 10 * 1024 * 1024  # output of one attempt beyond this is dropped
_PER_LINE = 32  # so that empty lines are not free


class LineSplitter:
    """Cuts a byte stream into lines; a line longer than `LINE_BYTES` becomes several."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        whole, newline, rest = data.rpartition(b"\n")
        if not newline:
            return self._hold(rest)
        out = [part for line in (self._rest + whole).split(b"\n") for part in pieces(line)]
        self._rest = b""
        return out + self._hold(rest)

    def end(self) -> list[str]:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return list(pieces(rest)) if rest else []

    def _hold(self, data: bytes) -> list[str]:
        self._rest += data
        out = []
        while len(self._rest) > LINE_BYTES:
            cut = _cut(self._rest)
            out.append(_text(self._rest[:cut]))
            self._rest = self._rest[cut:]
        return out


def pieces(line: bytes) -> list[str]:
    """A line as one or, if it is longer than `LINE_BYTES`, several."""
    line = line.removesuffix(b"\r")
    out = []
    while len(line) > LINE_BYTES:
        cut = _cut(line)
        out.append(_text(line[:cut]))
        line = line[cut:]
    return [*out, _text(line)]


def _cut(line: bytes) -> int:
    """Where to cut a long line: not inside a UTF-8 character."""
    cut = LINE_BYTES
    while cut > LINE_BYTES - 4 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _text(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return clean(text) if BREAKING.search(text) else text


class OutputLimit:
    """How much one attempt may still write."""

    def __init__(self) -> None:
        self._left = ATTEMPT_BYTES

    @property
    def reached(self) -> bool:
        return self._left <= 0

    def take(self, lines: list[str]) -> tuple[list[str], int]:
        """The lines that still fit (and, once, one that says so), and how many do not."""
        if self._left <= 0:
            return [], len(lines)
        for i, line in enumerate(lines):
            self._left -= len(line) + _PER_LINE
            if self._left <= 0:
                note = f"[tocsin: output beyond {ATTEMPT_BYTES // 1048576} MiB is dropped]"
                return [*lines[:i], note], len(lines) - i
        return lines, 0
