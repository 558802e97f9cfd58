"""Pure words for people: text made harmless, instants, lengths of time."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

# Whole escape sequences first (CSI, OSC and its kin, two-character ones), so that no "[31m" stays behind.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
# Characters that must not be printed: control and format characters (which reverse, hide or join text), surrogates,
# private and unassigned characters, and line separators. Two of them are needed: the joiners of emoji and of several
# scripts stay between non-ASCII characters, where they cannot make two names that a person could type look alike.
_JOINERS = "\u200c\u200d"
_STRAY_JOINERS = re.compile(rf"(?<![^\x00-\x7f{_JOINERS}])[{_JOINERS}]|[{_JOINERS}](?![^\x00-\x7f{_JOINERS}])")
# Format characters with a visible shape: signs before numbers.
_SHOWN = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
# Letters and marks without a visible shape, which Unicode allows every program to omit.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
_HIDDEN = frozenset(("Cc", "Cf", "Cs"))
_UNKNOWN = frozenset(("Co", "Cn"))
_BREAKS = re.compile(r"[\t\n\r\u2028\u2029]+")


def is_plain(character: str) -> bool:
    """Return whether a character is visible and has no other effect. Characters unknown to our Unicode version are not
    plain."""
    if character in _SHOWN:
        return True
    kind = unicodedata.category(character)
    return kind not in _HIDDEN and kind not in _UNKNOWN and kind not in ("Zl", "Zp") and character not in _BLANK


class _Table(dict[int, str]):
    """A table for `str.translate`. It computes the replacement of a character when the character first occurs."""

    def __init__(self, instead: Callable[[str], str]) -> None:
        super().__init__()
        self._instead = instead

    def __missing__(self, code: int) -> str:
        character = chr(code)
        found = self[code] = character if is_plain(character) else self._instead(character)
        return found


def _cleaned(character: str) -> str:
    """Return an empty string for a hidden character, and a replacement sign for a character that cannot be shown."""
    if character in _JOINERS:
        return character
    return "\ufffd" if unicodedata.category(character) in _UNKNOWN else ""


def _escaped(character: str) -> str:
    if character in "\t\n\r":  # they separate the parts of a document
        return character
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


_CLEANED, _ESCAPED = _Table(_cleaned), _Table(_escaped)


def plain(value: object) -> str:
    """Return foreign text as one line that cannot control a terminal and shows all of its content."""
    text = _ESCAPES.sub("", str(value))
    return _STRAY_JOINERS.sub("", _BREAKS.sub(" ", text).translate(_CLEANED))


def json_safe(text: str) -> str:
    """Return a JSON document in which characters are escaped that JSON allows but that control a terminal or are
    invisible."""
    return text.translate(_ESCAPED)


def instant(text: str | None) -> datetime | None:
    """An instant of the API in local time, or None."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
    except (ValueError, OverflowError):
        return None


def local(text: str | None) -> str:
    """An instant in local time with its offset."""
    at = instant(text)
    return plain(text or "") if at is None else at.isoformat(sep=" ", timespec="seconds")


def relative(text: str | None, now: datetime) -> str:
    """How far an instant is from now: `in 3 m`, `2 h ago`."""
    at = instant(text)
    if at is None:
        return plain(text or "")
    away = at - now
    if abs(away) < timedelta(seconds=1):
        return "now"
    return f"in {length(away)}" if away > timedelta(0) else f"{length(-away)} ago"


def when(text: str | None, now: datetime) -> str:
    """An instant both ways."""
    return f"{local(text)} ({relative(text, now)})" if instant(text) else plain(text or "")


def length(span: timedelta) -> str:
    """A length of time to the precision somebody cares about: `350 ms`, `4.2 s`, `3 m`, `2 h 5 m`, `12 d`."""
    seconds = span.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{int(seconds * 10) / 10:g} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two(whole // 60, "m", whole % 60 if whole < 600 else 0, "s")
    if whole < 86_400:
        return _two(whole // 3600, "h", whole // 60 % 60, "m")
    return _two(whole // 86_400, "d", whole // 3600 % 24 if whole < 864_000 else 0, "h")


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit}" + (f" {small} {small_unit}" if small else "")


def milliseconds(value: float | None) -> str:
    """A length given in milliseconds."""
    return "" if value is None else length(timedelta(milliseconds=value))


def size(count: int) -> str:
    """Bytes, to three digits: `512 B`, `1.5 MB`, `120 GB`."""
    number, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.3g} {unit}"


def pairs(mapping: Mapping[str, Any] | None) -> str:
    """A small mapping on one line."""
    return plain(", ".join(f"{name}={value}" for name, value in (mapping or {}).items() if value is not None))


def why(run: Mapping[str, Any]) -> str:
    """What explains a run's or an attempt's state."""
    error = run.get("error") or {}
    message = (error.get("message") or "").strip().partition("\n")[0]  # the rest is a traceback: `run show --json`
    told = ": ".join(part for part in (error.get("class"), message) if part)
    blocked = f"blocked by {run['blocked_by']}" if run.get("blocked_by") else ""
    times = f"×{run['count']}" if (run.get("count") or 1) > 1 else ""
    return " ".join(part for part in (run.get("reason"), times, blocked, told) if part)
