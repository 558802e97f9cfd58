"""How log lines lie in an object, and how they are shown."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import zstandard

from tocsin.clock import EPOCH, iso
from tocsin.model.loglines import parted
from tocsin.wire import LogLine

_LINES = msgspec.msgpack.Decoder(list[LogLine])
_LATEST = 32_000_000_000.0  # a worker's clock may say anything; the year 2984 is late enough


def pack(lines: list[LogLine]) -> bytes:
    """Lines of one attempt as a frame."""
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(lines))


def unpack(frame: bytes) -> list[LogLine]:
    """The lines of a frame."""
    return _LINES.decode(zstandard.ZstdDecompressor().decompress(frame))


def shown(seq: int, line: LogLine) -> dict[str, Any]:
    """A line as the API tells it."""
    ts, stream, level, text = line
    text, about = parted(text)
    logger, fields = (about.logger or None, about.fields or None) if about is not None else (None, None)
    return {
        "seq": seq,
        "ts": _instant(ts),
        "stream": stream,
        "level": level,
        "text": text,
        "logger": logger,
        "fields": fields,
    }


def _instant(seconds: float) -> str:
    # The order of the arguments matters: what is no number is then 0.
    return iso(EPOCH + timedelta(seconds=min(max(0.0, seconds), _LATEST)))
