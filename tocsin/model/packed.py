"""What does not stand in its row as it is: sealed because it is sensitive, or so large that it lies in object storage.

Arguments of a run are a JSON object, and a row keeps them as text. Those that are packed are kept as a JSON string,
which nobody can ask for, so that what copies a row (a retry, a redrive, history) copies them without knowing. What a
job's target says is a part of the job's document: in its place stands what is told of it.

A result may be any JSON, a string too. In the place of one that is large stands a reference that begins with a space:
JSON as we write it has none outside of its strings, and within them quotes are escaped. So nobody's own result is taken
for one, and it is found within the list, too, that the runs of a mapped node result in.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

LARGE = 64 * 1024  # bytes, as JSON, from which on something leaves its row
MOST_RESULT = 8 * 2**20  # bytes, as JSON, of what one run ends with: as many as a request may bring arguments
_REFERENCE = re.compile(
    r' \{"\$payload":(\{"size":[0-9]{1,15},"sha256":"[0-9a-f]{64}","day":"[0-9]{4}-[0-9]{2}-[0-9]{2}"\})\}', re.ASCII
)
_encode = msgspec.json.encode


def folder(tenant_id: int) -> str:
    """Where all of a tenant's parcels lie."""
    return f"payloads/{tenant_id}/"


class Parcel(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Something in object storage. The day on which it was put there is a part of its name, so that what is old is not
    put there again while somebody takes it away."""

    size: Annotated[int, Meta(ge=0, lt=2**53)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}(?!\n)$")]
    day: Annotated[str, Meta(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}(?!\n)$")]

    def place(self, tenant_id: int) -> str:
        """Its key."""
        return f"{folder(tenant_id)}{self.day}/{self.sha256}"

    @property
    def text(self) -> str:
        """In a line, as `parcel_in` reads it."""
        return f"{self.day}/{self.sha256}/{self.size}"

    @property
    def shown(self) -> dict[str, Any]:
        """What stands in a document in the place of what lies there."""
        return {"$payload": msgspec.structs.asdict(self)}

    @property
    def reference(self) -> str:
        """What stands in the place of a result."""
        return f" {_encode(self.shown).decode()}"


def parcel_in(text: str) -> Parcel | None:
    """A parcel from its line."""
    day, _, rest = text.partition("/")
    sha256, _, size = rest.partition("/")
    return _parcel({"day": day, "sha256": sha256, "size": int(size) if size.isascii() and size.isdigit() else size})


def parcels_of(target: Any) -> dict[str, Parcel]:
    """What of all that a target says lies in object storage, by the name of its field."""
    return parcels_in({name: getattr(target, name, None) for name in ("body", "kwargs", "args")})


def parcels_in(fields: Mapping[str, Any]) -> dict[str, Parcel]:
    """The same for fields of a target."""
    out = {}
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == 1:
            [value] = value
        if isinstance(value, dict) and len(value) == 1 and (found := _parcel(value.get("$payload"))) is not None:
            out[name] = found
    return out


def in_place(name: str, parcel: Parcel) -> Any:
    """What stands in this field of a target when what it says lies in object storage."""
    return [parcel.shown] if name == "args" else parcel.shown


def _parcel(value: Any) -> Parcel | None:
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(value, Parcel)
    return None


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


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def has_references(result: str) -> bool:
    """Whether something of a result, as its row has it, lies in object storage."""
    return ' {"$payload":' in result and _REFERENCE.search(result) is not None


def parcels_of_result(result: str) -> list[Parcel]:
    """What of a result lies in object storage, in order."""
    return [msgspec.json.decode(found[1], type=Parcel) for found in _REFERENCE.finditer(result)]


def size_of(result: str) -> int:
    """Of how many bytes a result is, all that lies elsewhere counted."""
    own = len(result.encode())
    return own + sum(p.size - len(p.reference) for p in parcels_of_result(result)) if has_references(result) else own


def filled(result: str, contents: Mapping[str, bytes]) -> str:
    """A whole result: with what lies there, by its digest, in the place of each reference."""
    return _REFERENCE.sub(lambda found: contents[msgspec.json.decode(found[1], type=Parcel).sha256].decode(), result)


def result_shown(result: str | None, **more: str) -> msgspec.Raw | None:
    """What is told of a result among others: it itself, unless it is large."""
    if result is None:
        return None
    if result[:1] == " " and (parcels := parcels_of_result(result)):
        return _told(size=parcels[0].size, sha256=parcels[0].sha256, **more)
    data = result.encode()
    return msgspec.Raw(data) if len(data) <= LARGE else _told(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _told(**what: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode({"$payload": what}))
