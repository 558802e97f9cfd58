"""Who did what: one row per call, in the call's own transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tocsin.model.access import Identity
from tocsin.model.audit import Record
from tocsin.store.db import Connection, Row, Sql, columns

SQL = Sql(__file__)


class Entry(NamedTuple):
    tenant_id: int
    actor: str
    key_id: str | None
    action: str
    target: str
    detail: str | None
    before: bytes | None = None
    after: bytes | None = None
    address: str | None = None
    request_id: str | None = None

    def changing(self, before: str | None, after: str | None) -> Entry:
        """The same, with what the target's document was and what it is; never one that holds a secret: whoever guesses
        it could prove the guess."""
        return self._replace(
            before=None if before is None else digest(before), after=None if after is None else digest(after)
        )


def entry(who: Identity, action: str, target: str, **detail: Any) -> Entry:
    """What `who` did to `target`."""
    text = msgspec.json.encode(detail).decode() if detail else None
    return Entry(
        who.tenant_id,
        who.actor,
        who.key_id,
        action,
        target,
        text,
        address=who.address or None,
        request_id=who.request_id or None,
    )


def platform_entry(who: Identity, action: str, target: str, **detail: Any) -> Entry:
    """The same, of what is not the affair of the tenant that `who` acts for: it stands in the audit of its own."""
    return entry(who._replace(tenant_id=who.home), action, target, **detail)


def digest(document: str) -> bytes:
    """What tells two documents apart."""
    return hashlib.sha256(document.encode()).digest()


async def record(connection: Connection, *entries: Entry) -> None:
    """Write the rows; they commit or vanish with what they describe."""
    await record_all(connection, entries)


async def record_all(connection: Connection, entries: Sequence[Entry]) -> None:
    """The same for a batch."""
    await connection.execute(SQL["record"], *columns(entries, len(Entry._fields)))


def said(row: Row) -> Record:
    """What a row says, from the columns that `said` names."""
    return Record(*(row[name] for name in Record._fields))
