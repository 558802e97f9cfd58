"""Avro: files of records as their schema says (Object Container Files); as much of the format as we write."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_MAGIC = b"Obj\x01"


def write(schema: Mapping[str, Any], about: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> bytes:
    """A file of records; `about` stands in its header. The same records make the same bytes."""
    said = {"avro.schema": msgspec.json.encode(schema).decode(), "avro.codec": "null", **about}
    header = _MAGIC + _encode({"type": "map", "values": "bytes"}, {name: text.encode() for name, text in said.items()})
    # What parts blocks may be any 16 bytes.
    parted = hashlib.sha256(header).digest()[:16]
    body = b"".join(_encode(schema, record) for record in records)
    block = _long(len(records)) + _long(len(body)) + body + parted if records else b""
    return header + parted + block


def _encode(schema: Any, value: Any) -> bytes:
    match schema:
        case "boolean":
            return bytes([value])
        case "int" | "long":
            return _long(value)
        case "bytes":
            return _long(len(value)) + bytes(value)
        case "string":
            return _encode("bytes", value.encode())
        case ["null", other]:
            return _long(0) if value is None else _long(1) + _encode(other, value)
        case {"type": "record", "fields": fields}:
            return b"".join(_encode(field["type"], value[field["name"]]) for field in fields)
        case {"type": "map", "values": values}:
            items = b"".join(_encode("string", name) + _encode(values, one) for name, one in value.items())
            return (_long(len(value)) + items if value else b"") + _long(0)
        case {"type": plain}:
            return _encode(plain, value)
    raise TypeError(f"no such schema: {schema}")


def _long(value: int) -> bytes:
    """Zigzag, seven bits a byte, the lowest first."""
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)
