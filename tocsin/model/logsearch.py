"""Searching log lines: what words are, what a query asks for, and a small filter that tells where a word is not.

A word is a run of letters, digits and underscores (and anything beyond ASCII); ASCII is compared without case. All
rules work on UTF-8 bytes, because a gigabyte of lines goes through them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789_"
_TABLE = bytes(
    byte if byte >= 0x80 else low if (low := bytes([byte]).lower()[0]) in _LETTERS else ord(" ") for byte in range(256)
)
_PIECE = 16_384
_BITS_PER_WORD = 12
_ONE = ord("1")
_MIX = 0x9E3779B1  # makes a second hash of the first
_TERM = re.compile(r'"([^"]*)("?)|(\S+)')
_MOST_TERMS = 20
_MOST_WORDS = 50  # of all terms: a phrase is compared with every line, word by word


def folded(data: bytes) -> bytes:
    """Words as they are compared, with blanks for all between them."""
    return data.translate(_TABLE)


def words(data: bytes) -> set[bytes]:
    """The words of a text."""
    text, found, start = data.translate(_TABLE), set[bytes](), 0
    while start < len(text):
        # A piece's words still lie in the processor's cache when the set looks at them: nearly twice as fast.
        end = text.find(b" ", start + _PIECE)
        end = len(text) if end < 0 else end
        found.update(text[start:end].split())
        start = end
    return found


class Query(NamedTuple):
    """What a line must have: words that a filter can tell, parts that it holds, and those with the blanks that make
    them whole words, phrases, or beginnings."""

    words: frozenset[bytes] = frozenset()
    parts: tuple[bytes, ...] = ()
    needles: tuple[bytes, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Query:
        """`word`, `begin*`, `"a phrase"`; all of them must be there. Raises ValueError if there is nothing to find."""
        found = [cls._term(match[1] if match[3] is None else match[3]) for match in _TERM.finditer(text)]
        if not found:
            raise ValueError("there is nothing to look for")
        if len(found) > _MOST_TERMS:
            raise ValueError(f"has more than {_MOST_TERMS} terms")
        if sum(len(parts) for _, parts, _ in found) > _MOST_WORDS:
            raise ValueError(f"must have at most {_MOST_WORDS} words")
        return cls(
            frozenset(word for words, _, _ in found for word in words),
            tuple(part for _, parts, _ in found for part in parts),
            tuple(needle for _, _, needle in found),
        )

    @staticmethod
    def _term(text: str) -> tuple[list[bytes], list[bytes], bytes]:
        whole = not text.endswith("*")
        parts = folded(text.encode("utf-8", "replace")).split()
        if not parts:
            raise ValueError(f"{text!r} has no letter and no digit")
        return parts if whole else parts[:-1], parts, b" " + b" ".join(parts) + (b" " if whole else b"")

    def may_be_in(self, text: bytes) -> bool:
        """Whether a folded text of many lines may have such a line."""
        return all(part in text for part in self.parts)

    def fits(self, text: str) -> bool:
        """Whether a line is one."""
        if not self.needles:
            return True
        line = b" " + b" ".join(folded(text.encode("utf-8", "replace")).split()) + b" "
        return all(needle in line for needle in self.needles)


class Filter:
    """Tells of most words that are not in a text that they are not, in about two bytes a word."""

    def __init__(self, bits: bytes) -> None:
        self.bits = bits

    @classmethod
    def of(cls, words: Iterable[bytes]) -> Filter:
        """The filter of a text's words."""
        found = list(words)
        size = max(8, (len(found) * _BITS_PER_WORD + 7) // 8)
        # A letter for each bit, and one conversion: twice as fast as to set bits.
        most, letters = size * 8, bytearray(b"0") * (size * 8)
        for value in map(zlib.crc32, found):
            letters[value % most] = letters[(value * _MIX >> 13) % most] = _ONE
        return cls(int(letters, 2).to_bytes(size, "big"))

    def may_have(self, words: Iterable[bytes]) -> bool:
        """False if one of the words is certainly not there."""
        most = len(self.bits) * 8
        for word in words:
            value = zlib.crc32(word)
            if not all(self.bits[at >> 3] << (at & 7) & 0x80 for at in (value % most, (value * _MIX >> 13) % most)):
                return False
        return True
