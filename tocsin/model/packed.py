"""Arguments of a run that do not stand in its row as they are: sealed because they are sensitive, or so large that they
lie in object storage.

Arguments are a JSON object, and a row keeps them as text. Those that are packed are kept as a JSON string, which
nobody can ask for, so that what copies a row (a retry, a redrive, history) copies them without knowing.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.encode


class Packed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where arguments are, and what is needed to read them."""

    size: int  # bytes, as JSON
    data_key: int = 0  # which of the tenant's keys they are sealed with; 0: they are not
    sealed: str = ""  # in base64, if they are sealed and small
    place: str = ""  # in object storage, if they are large
    sha256: str = ""  # of what lies there
    key_id: str | None = None  # the concurrency key that follows from them

    @property
    def text(self) -> str:
        """As a row keeps it."""
        return _encode(_encode(self).decode()).decode()

    @property
    def shown(self) -> dict[str, Any]:
        """What is told of them."""
        if self.data_key:
            return {"$sensitive": True}
        return {"$payload": {"size": self.size, "sha256": self.sha256}}


_unpack = msgspec.json.Decoder(Packed).decode


def packed_in(args: str | None) -> Packed | None:
    """What a row keeps if its arguments are packed."""
    if args is None or args[:1] != '"':
        return None
    return _unpack(msgspec.json.decode(args, type=str))


def shown(args: str | None) -> msgspec.Raw | None:
    """What is told of a row's arguments: they themselves, unless they are packed."""
    found = packed_in(args)
    if found is not None:
        return msgspec.Raw(_encode(found.shown))
    return None if args is None else msgspec.Raw(args.encode())
