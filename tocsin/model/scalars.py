"""The two scalar types of the contract that JSON lacks: durations and instants.

Both are strings on the wire. `decode_scalar` and `encode_scalar` are the msgspec hooks for them.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from tocsin.clock import iso

_ISO = re.compile(
    r"P(?:(?P<w>\d+)W)?(?:(?P<d>\d+)D)?(?:T(?=\d)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d{1,6})?)S)?)?",
    re.ASCII,
)
_SHORT = re.compile(
    r"(?=\d)(?:(?P<w>\d+)w)?(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+(?:\.\d{1,6})?)s)?(?:(?P<ms>\d+)ms)?",
    re.ASCII,
)
_INSTANT = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)",
    re.ASCII,
)
_LONGEST = timedelta(days=36_600)
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2999, 12, 31, tzinfo=UTC)


class Duration:
    """A length of time; written `PT1H30M`, read as that or as `1h30m`."""

    __slots__ = ("_text", "delta")

    def __init__(self, delta: timedelta) -> None:
        self.delta = delta
        self._text = ""

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ISO-8601 (weeks, days and times; no months or years) or the short form."""
        match = (len(text) <= 40 and (_ISO.fullmatch(text) or _SHORT.fullmatch(text))) or None
        if match is None or not any(match.groupdict().values()):
            raise ValueError(f"{text[:40]!r} is not a duration such as PT5M or 1h30m")
        part = {k: float(v) for k, v in match.groupdict().items() if v}
        try:
            delta = timedelta(
                weeks=part.get("w", 0),
                days=part.get("d", 0),
                hours=part.get("h", 0),
                minutes=part.get("m", 0),
                seconds=part.get("s", 0),
                milliseconds=part.get("ms", 0),
            )
        except OverflowError:
            delta = timedelta.max
        if delta > _LONGEST:
            raise ValueError("a duration is at most 100 years")
        return cls(delta)

    @property
    def seconds(self) -> float:
        return self.delta.total_seconds()

    def __str__(self) -> str:
        # Every job has some, mostly the same few defaults: they are written once.
        if not self._text:
            self._text = self._written()
        return self._text

    def _written(self) -> str:
        days, rest = self.delta.days, self.delta.seconds
        hours, minutes, seconds = rest // 3600, rest // 60 % 60, rest % 60
        fraction = f".{self.delta.microseconds:06d}".rstrip("0") if self.delta.microseconds else ""
        date = f"{days}D" if days else ""
        time = "".join(
            (
                f"{hours}H" if hours else "",
                f"{minutes}M" if minutes else "",
                f"{seconds}{fraction}S" if seconds or fraction else "",
            )
        )
        return f"P{date}T{time}" if time else f"P{date}" if date else "PT0S"

    def __repr__(self) -> str:
        return f"Duration({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and other.delta == self.delta

    def __hash__(self) -> int:
        return hash(self.delta)


class Instant:
    """A point in time; written in UTC with microseconds, read as RFC 3339 with an offset."""

    __slots__ = ("at",)

    def __init__(self, at: datetime) -> None:
        self.at = at.astimezone(UTC)

    @classmethod
    def parse(cls, text: str) -> Instant:
        """Read RFC 3339; an instant without an offset is refused, because nobody can say when it is."""
        if len(text) > 40 or not _INSTANT.fullmatch(text):
            raise ValueError(f"{text[:40]!r} is not an RFC 3339 time with an offset, such as 2026-12-01T09:00:00Z")
        try:
            at = datetime.fromisoformat(text.upper().replace(" ", "T").replace("Z", "+00:00")).astimezone(UTC)
        except (ValueError, OverflowError):
            raise ValueError(f"{text!r} is not a date and time that exists") from None
        if not EARLIEST <= at <= LATEST:
            raise ValueError("the year must lie between 1970 and 2999")
        return cls(at)

    def __str__(self) -> str:
        return iso(self.at)

    def __repr__(self) -> str:
        return f"Instant({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Instant) and other.at == self.at

    def __hash__(self) -> int:
        return hash(self.at)


_SCALARS = (Duration, Instant)


def decode_scalar(kind: type, value: Any) -> Any:
    """msgspec `dec_hook`."""
    if kind in _SCALARS:
        if not isinstance(value, str):
            raise ValueError("Expected `str`")
        return kind.parse(value)
    raise NotImplementedError(kind)


def encode_scalar(value: Any) -> Any:
    """msgspec `enc_hook`."""
    if type(value) in _SCALARS:
        return str(value)
    raise NotImplementedError(type(value))
