"""What the JSON decoder lets pass and we do not: see `refuse_heavy` and `refuse_odd`.

All at the speed of C, in a few µs per job. The decoder itself refuses NaN, lone surrogates, invalid UTF-8, numbers out
of range, and `5.0`, `true` or `"5"` where an integer belongs.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tocsin.errors import BadRequest, InvalidInput

DEPTH = 64
MOST_LEVELS = 920  # of what user code returns: the interpreter reads about 1,000, less the calls around it
MOST_PARTS = 250_000  # arrays and objects of one body: memory and time go by them, not by bytes
_NUL = b"\\u0000"  # the escape of U+0000, which PostgreSQL cannot store


def refuse_heavy(body: bytes) -> None:
    """Refuse, before anything is decoded, what is no object or holds too many parts (or brackets, in texts)."""
    if body.lstrip(b" \t\r\n")[:1] != b"{":
        raise BadRequest("the body is not a JSON object", code="malformed_json")
    if len(body) > MOST_PARTS and body.count(b"[") + body.count(b"{") > MOST_PARTS:
        raise BadRequest(f"the body has more than {MOST_PARTS} arrays and objects", code="too_many_parts")


def refuse_nul(body: bytes) -> None:
    """Refuse U+0000 in JSON, which escapes it."""
    # After an escaped backslash these letters are plain text.
    if _NUL in body and _NUL in body.replace(b"\\\\", b"  "):
        raise InvalidInput("the character U+0000 cannot be stored", code="nul_character")


def refuse_odd(body: bytes) -> None:
    """Refuse U+0000, a key that stands twice in one object, nesting deeper than `DEPTH`, and integers that no worker
    could be told, in JSON that decodes."""
    refuse_nul(body)
    value = msgspec.json.decode(body)
    if is_deep(body, value, DEPTH):
        raise BadRequest(f"the body is nested deeper than {DEPTH} levels", code="too_deep")
    try:
        msgspec.msgpack.encode(value)  # what a worker would be told
    except OverflowError:
        raise untold() from None
    # A decoder keeps the last of two equal keys. If one fell away, so did its quotes: what is written again has less.
    # A quote that came as \u0022 would come back as one more; such a body is read slowly.
    if msgspec.json.encode(value).count(b'"') != body.count(b'"') or b"\\u0022" in body:
        json.loads(body, object_pairs_hook=_once)


def untold() -> InvalidInput:
    """What is wrong with an integer that msgpack does not have."""
    text = "an integer below -2^63 or above 2^64 - 1 can be told to no worker: write it as a string"
    return InvalidInput(text, code="integer_out_of_range")


def is_deep(body: bytes, value: Any, most: int) -> bool:
    """Return whether a value, which this JSON decodes to, is nested deeper than `most` levels."""
    return body.count(b"[") + body.count(b"{") > most and _is_deeper(value, most)


def _is_deeper(value: Any, most: int) -> bool:
    """Look at one level after the other."""
    level = [value]
    for _ in range(most):
        level = [
            part
            for whole in level
            for part in (whole.values() if type(whole) is dict else whole)
            if type(part) is dict or type(part) is list
        ]
        if not level:
            return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadRequest(f"the key {key[:64]!r} stands twice in one object", code="duplicate_key")
        found[key] = value
    return found
