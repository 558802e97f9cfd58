"""`Idempotency-Key`: the second call with a key answers what the first did, and does nothing.

What a call asked for is remembered as a digest under a key of the server's, so that nobody who reads the database can
try guesses at what was in its body.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

from tocsin.errors import Conflict, InvalidInput
from tocsin.store.db import Connection, Sql, is_contention

SQL = Sql(__file__)


class Wish(NamedTuple):
    """A caller's key and the digest of what it asked for. `others`: the digests that the same call has had under the
    keys that this server had before, or has with one that has none."""

    tenant_id: int
    key: str
    digest: bytes
    others: tuple[bytes, ...] = ()

    def asks_for(self, remembered: bytes) -> bool:
        """Whether it was this call that is remembered."""
        return remembered == self.digest or remembered in self.others


class Replay(Exception):
    """The key is known: the first reply's status, ids and version. Raised out of the transaction, which undoes it."""

    def __init__(self, status: int, ids: Sequence[str], version: int | None) -> None:
        super().__init__("replayed")
        self.status, self.ids, self.version = status, list(ids), version


def digest(method: str, path: str, body: bytes) -> bytes:
    """What makes two calls the same call."""
    return hashlib.sha256(b"\n".join((method.encode(), path.encode(), body))).digest()


def wish_of(tenant_id: int, key: str, asked: bytes, secrets: Sequence[bytes]) -> Wish:
    """The wish of a call with this digest; the first of the server's keys is the one it is remembered under."""
    first, *others = [*(hmac.digest(secret, asked, "sha256") for secret in secrets), asked]
    return Wish(tenant_id, key, first, tuple(others))


async def recall(connection: Connection, wish: Wish | None) -> None:
    """Raise `Replay` if the key already has a reply; wait for a call with the same key that is still under way. Comes
    first in a transaction, before its effect is checked against a world that the first call may just have changed."""
    if wish is None:
        return
    try:
        await connection.execute(SQL["hold"], wish.tenant_id, wish.key)
    except Exception as error:
        if is_contention(error):
            raise Conflict("a call with this Idempotency-Key is still under way", code="in_flight") from error
        raise
    row = await connection.fetchrow(SQL["recall"], wish.tenant_id, wish.key)
    if row is not None:
        if not wish.asks_for(row["digest"]):
            raise InvalidInput("this Idempotency-Key was used for another call", code="idempotency_mismatch")
        raise Replay(row["status"], row["ids"], row["version"])


async def remember(
    connection: Connection, wish: Wish | None, status: int, ids: Sequence[str], version: int | None = None
) -> None:
    """Record the reply in the transaction of its effect, after `recall`."""
    if wish is None:
        return
    if not await connection.fetchval(SQL["remember"], *wish[:3], status, list(ids), version):
        await recall(connection, wish)  # a group commit, which takes its keys another way, was first
