"""What a log line may carry beside its text, and how text from anywhere is made harmless.

Beside the text stand the logger's name and values by name, as a JSON object behind a U+001F at its end. So they are
masked, counted, compressed and searched like the text itself, and who knows nothing of them shows a longer line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

MOST_ABOUT = 4096  # characters; what is longer is left out, for the text says it, too
BEHIND = "\x1f"  # between the text of a line and its fields
BREAKING = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# As above without the newline, and lone surrogates: Python decodes undecodable bytes to them.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class About(msgspec.Struct, omit_defaults=True):
    """What a line carries beside its text."""

    logger: str = ""
    fields: dict[str, Any] = {}


_decode = msgspec.json.Decoder(About).decode


def about(logger: str, fields: Mapping[str, Any]) -> str:
    """The JSON of it; empty if there is nothing, or too much."""
    if not logger and not fields:
        return ""
    try:
        text = msgspec.json.encode(About(logger, dict(fields)), enc_hook=str).decode()
    except Exception:  # whatever a value's `str` does: the text of the line is what counts
        return ""
    text = _CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
    return text if len(text) <= MOST_ABOUT else ""


def joined(text: str, told: str) -> str:
    """A line's text with what `about` made."""
    return f"{text}{BEHIND}{told}" if told else text


def parted(text: str) -> tuple[str, About | None]:
    """The text alone and what it carries; whatever is no work of ours is text."""
    head, behind, told = text.rpartition(BEHIND)
    if not behind:
        return text, None
    try:
        return head, _decode(told)
    except msgspec.DecodeError:
        return text, None


def harmless(text: str) -> str:
    """One line that neither moves a cursor nor turns text around, whatever it is shown on: such characters are written
    out."""
    return _CONTROL.sub(_written_out, text)


def clean(text: str) -> str:
    """The same of what would break a line or a store: control characters and lone surrogates."""
    return BREAKING.sub(_written_out, text.encode("utf-8", "backslashreplace").decode())


def from_outside(text: str) -> str:
    """Return text from outside (a header, the text of an error) in a form that can be encoded, stored and shown:
    control characters, lone surrogates and undecoded bytes are escaped. Newlines stay."""
    return text if text.isascii() and text.isprintable() else _ODD.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x80 or code != ord(match[0]) else f"\\u{code:04x}"
