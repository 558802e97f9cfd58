"""Job documents by (job, version): immutable, so they are kept once read."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any

import msgspec
from msgspec import UNSET

from tocsin.flow.shared.memory import Memory
from tocsin.model.job import JobSpec
from tocsin.model.packed import Parcel, packed_in, parcels_of
from tocsin.model.targets import kind_of, with_content
from tocsin.store.db import Connection, Database, Sql, columns
from tocsin.wire import decode_job_spec, encode, encode_msgpack

SQL = Sql(__file__)
SpecKey = tuple[int, str, int]  # tenant, job, version
_FORMS = 5  # the text, its JSON and msgpack bytes, and the decoded document, which counts twice
_MOST_BYTES = 128 * 1024 * 1024


class StoredSpec:
    """One version of a job, in the forms its users want, each made when first asked for."""

    def __init__(self, name: str | None, text: str) -> None:
        self.name = name
        self.text = text

    @cached_property
    def spec(self) -> JobSpec:
        return decode_job_spec(self.text)

    @cached_property
    def json(self) -> msgspec.Raw:
        return msgspec.Raw(self.text.encode())

    @cached_property
    def msgpack(self) -> msgspec.Raw:
        document = msgspec.json.decode(self.text)
        try:
            return msgspec.Raw(encode_msgpack(document))
        except OverflowError:
            return msgspec.Raw(encode_msgpack(_with_doubles(document)))

    @cached_property
    def packs(self) -> bool:
        """Whether a worker can be told it in msgpack; a document from before that was looked at may not."""
        try:
            return bool(self.msgpack)
        except OverflowError:
            return False

    @cached_property
    def secrets(self) -> dict[str, str]:
        return self.spec.secrets

    @cached_property
    def parcels(self) -> dict[str, Parcel]:
        """What its target says and lies in object storage, unless it is sealed."""
        return parcels_of(self.spec.target)

    @cached_property
    def is_sealed(self) -> bool:
        """Whether what its target says is."""
        return self.spec.sealed is not UNSET

    @cached_property
    def is_whole(self) -> bool:
        """Whether all that its target says stands in it."""
        return not self.is_sealed and not self.parcels

    def confides(self, args: str | None) -> bool:
        """Whether a run of it that has these arguments is told something in confidence."""
        if self.secrets or self.is_sealed:
            return True
        packed = packed_in(args)
        return packed is not None and packed.data_key > 0

    def saying(self, content: Mapping[str, Any]) -> StoredSpec:
        """The same with what its target says, which does not stand in it."""
        spec = msgspec.structs.replace(self.spec, target=with_content(self.spec.target, content), sealed=UNSET)
        return StoredSpec(self.name, encode(spec).decode())

    @cached_property
    def kind(self) -> str:
        return kind_of(self.spec.target)

    @cached_property
    def timeout_ms(self) -> int:
        return max(1, round(self.spec.timeout.seconds * 1000))


def _with_doubles(value: Any) -> Any:
    """A document in which numbers such as 1e30 are what they were: PostgreSQL writes them out as integers."""
    match value:
        case dict():
            return {name: _with_doubles(inner) for name, inner in value.items()}
        case list():
            return [_with_doubles(inner) for inner in value]
        case int() if not -(2**63) <= value < 2**64 and Decimal(repr(float(value))) == value:
            return float(value)
        case _:
            return value


class SpecBook:
    """A cache of specs, bounded by bytes."""

    def __init__(self, db: Database, most: int = _MOST_BYTES) -> None:
        self._db = db
        self._known: Memory[SpecKey, StoredSpec] = Memory(most)

    async def get(self, keys: Iterable[SpecKey], connection: Connection | None = None) -> dict[SpecKey, StoredSpec]:
        """The specs of all keys whose job exists; what is not known yet costs one query. Who holds a connection
        already gives it, for there may be no other."""
        wanted = set(keys)
        found = {key: stored for key in wanted if (stored := self._known.get(key)) is not None}
        missing = [key for key in wanted if key not in found]
        if missing:
            fetch = connection.fetch if connection is not None else functools.partial(self._db.fetch, "vital")
            for row in await fetch(SQL["fetch"], *columns(missing, 3)):
                key = (row["tenant_id"], row["job_id"], row["version"])
                stored = found[key] = StoredSpec(row["name"], row["spec"])
                self._known.put(key, stored, _FORMS * len(stored.text))
        return found
