"""keys: who may call. Keys are 256 random bits with a prefix and a checksum, stored as a hash, shown once."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from tocsin.clock import iso
from tocsin.errors import Forbidden, NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.model.access import Identity, Role
from tocsin.model.ids import new_id
from tocsin.model.quotas import Quotas
from tocsin.store.db import Database, Sql
from tocsin.store.vault import MasterKeys
from tocsin.wire import NewKey

SQL = Sql(__file__)
PREFIX = "tcn_"
RUN_PREFIX = "tcr_"
_RUN_TOKEN = re.compile(r"tcr_([0-9]{1,9})\.([0-9]{1,19})\.([0-9a-f]{48})", re.ASCII)
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_key() -> str:
    """A fresh key: `tcn_` + 256 bits + a checksum, so that a typo is found without asking the database."""
    body = _base62(int.from_bytes(os.urandom(32), "big"), 43)
    return PREFIX + body + _checksum(body)


def is_wellformed(key: str) -> bool:
    """Whether prefix, length and checksum fit."""
    body = key[len(PREFIX) : -6]
    return key.startswith(PREFIX) and len(body) == 43 and key.isascii() and key[-6:] == _checksum(body)


def key_hash(key: str) -> bytes:
    """What is stored. A key has 256 bits of entropy, so a plain fast hash cannot be searched."""
    return hashlib.sha256(key.encode()).digest()


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), 6)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


async def identify(db: Database, key: str, pool: str = "engine") -> Identity | None:
    """Who holds this key; None for one that is unknown, revoked or expired."""
    if not is_wellformed(key):
        return None
    row = await db.fetchrow(pool, SQL["find"], key_hash(key))
    if row is None:
        return None
    named = row["id"], row["name"], row["role"], row["tenant_id"], row["slug"]
    return Identity(*named, Quotas.given(row), suspended=row["suspended"])


async def living(db: Database, key_ids: Iterable[str]) -> set[str]:
    """Those of these keys that still open the door."""
    return {row["id"] for row in await db.fetch("engine", SQL["living"], list(key_ids))}


async def create_key(db: Database, who: Identity, body: NewKey, wish: Wish | None = None) -> dict[str, Any]:
    """A new key of the caller's tenant; the answer is the only place where it is ever shown."""
    if body.role in ("worker", "platform") and who.role != "platform":
        raise Forbidden("only a platform key may make worker and platform keys")
    key, key_id = new_key(), new_id(db.clock.now())
    async with db.tenant(who.tenant_id, "keys") as connection:
        await recall(connection, wish)
        await connection.execute(SQL["add"], key_id, who.tenant_id, key_hash(key), body.role, body.name)
        await audit.record(connection, audit.entry(who, "key.create", f"key:{key_id}", role=body.role))
        await remember(connection, wish, 201, [key_id])
    return {"id": key_id, "role": body.role, "name": body.name, "tenant": who.tenant, "key": key}


async def list_keys(db: Database, who: Identity, before: str | None, limit: int) -> list[dict[str, Any]]:
    """Newest first, without the keys themselves."""
    async with db.tenant(who.tenant_id, "keys") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, before, limit)
    return [
        {
            "id": row["id"],
            "role": row["role"],
            "name": row["name"],
            "created_at": iso(row["created_at"]),
            "expires_at": row["expires_at"] and iso(row["expires_at"]),
            "revoked_at": row["revoked_at"] and iso(row["revoked_at"]),
        }
        for row in rows
    ]


async def revoke_key(db: Database, who: Identity, key_id: str) -> None:
    """From a second later at the latest, no node takes it."""
    async with db.tenant(who.tenant_id, "keys") as connection:
        if await connection.fetchrow(SQL["revoke"], who.tenant_id, key_id) is None:
            raise NotFound("there is no such key")
        await audit.record(connection, audit.entry(who, "key.revoke", f"key:{key_id}"))


async def found_cluster(db: Database, known: dict[str, str]) -> dict[str, str]:
    """Make tenant `default` and the keys `key` and `worker_key`, unless those known already are good."""
    founder = Identity("00000000-0000-0000-0000-000000000000", "tocsin up", "platform", 0, "default")
    async with db.transaction("found") as connection:
        await connection.execute(SQL["found_cluster"], os.urandom(32))
        await connection.execute(SQL["found_tenant"])
        tenant_id = await connection.fetchval(SQL["founded"])
    out = {}
    wanted: tuple[tuple[str, Role], ...] = (("key", "platform"), ("worker_key", "worker"))
    for name, role in wanted:
        who = await identify(db, known.get(name, ""))
        if who is not None and who.role == role:
            out[name] = known[name]
        else:
            as_founder = founder._replace(tenant_id=tenant_id)
            out[name] = (await create_key(db, as_founder, NewKey(role=role, name=f"tocsin up ({role})")))["key"]
    return out


class RunTokens:
    """Tokens scoped to one attempt: what a job may show to prove that it is that one.

    Nothing of them is stored. They name tenant and fence and are signed, so that they can be believed without a look
    into the database; what they are good for ends with the attempt, which the fence in each statement sees to.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """The first key signs, all are believed."""
        self._keys = keys

    @classmethod
    async def load(cls, db: Database, master: MasterKeys) -> RunTokens:
        """With keys derived from the master keys; without one, with a secret that stands in the database."""
        return cls(master.derive_all("run tokens") or [await db.fetchval("engine", SQL["token_key"])])

    def make(self, tenant_id: int, run_id: str, fence: int) -> str:
        """The token of one attempt."""
        return f"{RUN_PREFIX}{tenant_id}.{fence}.{_mac(self._keys[0], tenant_id, run_id, fence)}"

    def read(self, token: str, run_id: str) -> Identity | None:
        """Which attempt of this run shows the token; None if it is not one of ours, or another run's."""
        found = _RUN_TOKEN.fullmatch(token)
        if found is None:
            return None
        tenant_id, fence = int(found[1]), int(found[2])
        macs = [_mac(key, tenant_id, run_id, fence) for key in self._keys]
        if not any([hmac.compare_digest(found[3], mac) for mac in macs]):
            return None
        return Identity(run_id, f"run {run_id}", "run", tenant_id, "", fence=fence)


def _mac(key: bytes, tenant_id: int, run_id: str, fence: int) -> str:
    # Keyed BLAKE2 is a MAC by itself, and half the price of HMAC.
    text = b"%d:%s:%d" % (tenant_id, run_id.encode(), fence)
    return hashlib.blake2b(text, key=key, digest_size=24, person=b"tocsin run").hexdigest()
