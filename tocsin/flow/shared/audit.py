"""Who did what: one row per call, in the call's own transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tocsin.model.access import Identity
from tocsin.store.db import Connection, Sql, columns

SQL = Sql(__file__)


class Entry(NamedTuple):
    tenant_id: int
    actor: str
    key_id: str | None
    action: str
    target: str
    detail: str | None


def entry(who: Identity, action: str, target: str, **detail: Any) -> Entry:
    """What `who` did to `target`."""
    text = msgspec.json.encode(detail).decode() if detail else None
    return Entry(who.tenant_id, who.actor, who.key_id, action, target, text)


async def record(connection: Connection, *entries: Entry) -> None:
    """Write the rows; they commit or vanish with what they describe."""
    await record_all(connection, entries)


async def record_all(connection: Connection, entries: Sequence[Entry]) -> None:
    """The same for a batch."""
    await connection.execute(SQL["record"], *columns(entries, 6))
