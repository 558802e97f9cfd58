"""Pure words for people: text made harmless, instants, lengths of time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

# Whole escape sequences first (CSI, OSC and its kin, two-character ones), so that no "[31m" stays behind.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
# Then every control character, and what turns the direction of text around.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile(r"[\t\n\r]+")
_MUST_ESCAPE = re.compile(r"[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(value: object) -> str:
    """Text from elsewhere as one line that can do nothing to a terminal."""
    text = _ESCAPES.sub("", str(value))
    return _CONTROLS.sub("", _BREAKS.sub(" ", text))


def json_safe(text: str) -> str:
    """A JSON document with the characters escaped that JSON allows but a terminal obeys."""
    return _MUST_ESCAPE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


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
