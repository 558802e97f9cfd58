"""How log lines lie in an object, and how they are shown.

An object has frames, each the compressed lines of one attempt; behind them, for each tenant, a directory of its frames
with a filter of the words in them. What a directory tells of a tenant is that tenant's segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
import zstandard

from tocsin.clock import EPOCH, iso
from tocsin.errors import ObjectLost
from tocsin.model.ids import instant_of, parse_id
from tocsin.model.loglines import parted
from tocsin.model.logsearch import Filter, words
from tocsin.wire import LogLine

FOLDER = "logs/"
COMPACTED = f"{FOLDER}compacted/"
_LINES = msgspec.msgpack.Decoder(list[LogLine])
_LATEST = 32_000_000_000.0  # a worker's clock may say anything; the year 2984 is late enough


class Frame(msgspec.Struct, array_like=True, frozen=True):
    """Where lines of an attempt lie in an object. `lines` counts those too that were cut off."""

    run_id: str
    attempt: int
    job_id: str
    first_line: int
    lines: int
    position: int
    bytes: int


class _Directory(msgspec.Struct, array_like=True):
    filter: bytes
    frames: list[Frame]


_DIRECTORY = msgspec.msgpack.Decoder(_Directory)


class Part(NamedTuple):
    """Lines of one attempt that are to become a frame; `counted`: with those that were cut off."""

    tenant_id: int
    run_id: str
    attempt: int
    job_id: str
    first_line: int
    counted: int
    lines: list[LogLine]


class Segment(NamedTuple):
    """What a tenant has in an object; `position` and `bytes` are the directory's."""

    tenant_id: int
    position: int
    bytes: int
    lines: int
    raw_bytes: int
    stored_bytes: int
    first_at: datetime
    last_at: datetime
    frames: list[Frame]


def write(parts: Iterable[Part], level: int = 2) -> tuple[bytes, list[Segment]]:
    """An object with these lines, and its segments."""
    body = bytearray()
    found = []
    packer = zstandard.ZstdCompressor(level=level)
    for tenant_id, own in groupby(sorted(parts, key=lambda part: part.tenant_id), key=lambda part: part.tenant_id):
        start, texts, tokens, stamps = len(body), list[str](), set[bytes](), list[float]()
        frames = []
        for part in own:
            texts += [line[3] for line in part.lines]
            tokens |= {level_word(name) for name in {line[2] for line in part.lines}} | {job_word(part.job_id)}
            stamps += [line[0] for line in part.lines]
            frame = packer.compress(msgspec.msgpack.encode(part.lines))
            frames.append(Frame(*part[1:6], len(body), len(frame)))
            body += frame
        text = "\n".join(texts).encode("utf-8", "replace")
        filter_ = Filter.of(words(text) | tokens)
        directory = packer.compress(msgspec.msgpack.encode(_Directory(filter_.bits, frames)))
        lines, raw, stored = sum(frame.lines for frame in frames), len(text), len(body) - start
        first, last = instant(min(stamps, default=0.0)), instant(max(stamps, default=0.0))
        found.append(Segment(tenant_id, len(body), len(directory), lines, raw, stored, first, last, frames))
        body += directory
    return bytes(body), found


def loose_object(run_id: str, id_: str) -> str:
    """The name of one with lines of a shipment, among them those of this run."""
    return f"{FOLDER}{run_id[:6]}/{id_}.zst"


def made_at(key: str) -> datetime | None:
    """When an object was made, or the newest of those that it was made of, by its name."""
    id_ = parse_id(PurePosixPath(key).stem)
    return None if id_ is None else instant_of(id_)


def compacted_folder(tenant_id: int) -> str:
    """Where objects lie that have a tenant's lines and no others."""
    return f"{COMPACTED}{tenant_id}/"


def level_word(level: str) -> bytes:
    """What a filter has for lines of this level; no word of a text has a colon."""
    return b"level:" + level.encode("utf-8", "replace")


def job_word(job_id: str) -> bytes:
    """The same for a job's lines."""
    return b"job:" + job_id.encode()


def read_directory(data: bytes) -> tuple[Filter, list[Frame]]:
    """What a segment has."""
    try:
        found = _DIRECTORY.decode(inflate(data))
    except msgspec.DecodeError as error:
        raise _damaged() from error
    return Filter(found.filter), found.frames


def inflate(frame: bytes) -> bytes:
    """A frame's lines, to be looked at before they are decoded."""
    try:
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise _damaged() from error


def decode(raw: bytes) -> list[LogLine]:
    """The lines of an inflated frame."""
    try:
        return _LINES.decode(raw)
    except msgspec.DecodeError as error:
        raise _damaged() from error


def _damaged() -> ObjectLost:
    return ObjectLost("an object with log lines is not what was stored")


def unpack(frame: bytes) -> list[LogLine]:
    """The lines of a frame."""
    return decode(inflate(frame))


def shown(seq: int, line: LogLine) -> dict[str, Any]:
    """A line as the API tells it."""
    ts, stream, level, text = line
    text, about = parted(text)
    logger, fields = (about.logger or None, about.fields or None) if about is not None else (None, None)
    return {
        "seq": seq,
        "ts": iso(instant(ts)),
        "stream": stream,
        "level": level,
        "text": text,
        "logger": logger,
        "fields": fields,
    }


def instant(seconds: float) -> datetime:
    """When a line was written."""
    # The order of the arguments matters: what is no number is then 0.
    return EPOCH + timedelta(seconds=min(max(0.0, seconds), _LATEST))
