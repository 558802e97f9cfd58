"""keys: who may call. Keys are 256 random bits with a prefix and a checksum, stored as a hash, shown once."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from tocsin.clock import iso
from tocsin.errors import Conflict, Forbidden, InvalidInput, NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.model.access import Identity, Role
from tocsin.model.addresses import check_entry
from tocsin.model.ids import new_id
from tocsin.model.limits import BadLimit, parse_rate
from tocsin.model.quotas import NO_QUOTAS, Quotas
from tocsin.store.db import Database, Row, Sql
from tocsin.store.vault import MasterKeys
from tocsin.wire import NewKey, NewTenant, QuotaPatch, RetentionPatch, TenantPatch

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
    return Identity(row["id"], row["name"], row["role"], row["tenant_id"], row["slug"], _quotas(row))


async def living(db: Database, key_ids: Iterable[str]) -> set[str]:
    """Those of these keys that still open the door."""
    return {row["id"] for row in await db.fetch("engine", SQL["living"], list(key_ids))}


async def act_for(db: Database, who: Identity, slug: str) -> Identity:
    """The same caller, acting for another tenant: for platform keys only."""
    if who.role != "platform":
        raise Forbidden("only a platform key may act for another tenant")
    row = await db.fetchrow("engine", SQL["tenant"], slug)
    if row is None:
        raise NotFound("there is no such tenant")
    return who._replace(tenant_id=row["id"], tenant=row["slug"], quotas=_quotas(row))


async def create_tenant(db: Database, who: Identity, body: NewTenant, wish: Wish | None = None) -> dict[str, Any]:
    """A new tenant."""
    quotas = _changed(NO_QUOTAS, body.quotas)
    async with db.transaction("tenants") as connection:
        await recall(connection, wish)
        row = await connection.fetchrow(SQL["add_tenant"], body.slug, body.weight, *quotas)
        if row is None:
            raise Conflict(f"tenant {body.slug!r} exists already", code="name_taken")
        await audit.record(connection, audit.entry(who, "tenant.create", f"tenant:{body.slug}"))
        await remember(connection, wish, 201, [])
    return _tenant(row)


async def change_tenant(db: Database, who: Identity, slug: str, patch: TenantPatch, wish: Wish | None = None) -> None:
    """Another weight, other quotas, a list of allowed hosts or how long records are kept; every node goes by them
    within a second or two, by the list at once."""
    async with db.transaction("tenants") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock_tenant"], slug)
        if was is None:
            raise NotFound("there is no such tenant")
        weight = was["weight"] if patch.weight is UNSET else patch.weight
        quotas = _changed(Quotas.of(was), patch.quotas)
        allow = was["http_allow"] if patch.http_allow is UNSET else _allowed(patch.http_allow)
        kept = _retention(was) | _named(patch.retention)
        await connection.execute(SQL["change_tenant"], slug, weight, *quotas, allow, *kept.values())
        detail = {"weight": weight, "quotas": quotas._asdict(), "http_allow": allow, "retention": kept}
        entry = audit.entry(who, "tenant.update", f"tenant:{slug}", **detail)
        await audit.record(connection, entry)
        await remember(connection, wish, 200, [])


def _changed(quotas: Quotas, patch: QuotaPatch | UnsetType) -> Quotas:
    """Those that are named are set, or taken away by null."""
    if patch is UNSET:
        return quotas
    given = {name: value for name in Quotas._fields if (value := getattr(patch, name)) is not UNSET}
    if given.get("submit_rate") is not None:
        try:
            parse_rate(given["submit_rate"])
        except BadLimit as error:
            raise InvalidInput.field("quotas.submit_rate", "invalid", str(error)) from None
    return quotas._replace(**given)


def _retention(row: Row) -> dict[str, Any]:
    return {"runs_days": row["runs_days"], "legal_hold": row["legal_hold"]}


def _named(patch: RetentionPatch | UnsetType) -> dict[str, Any]:
    """What of the retention is named."""
    if patch is UNSET:
        return {}
    return {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}


def _allowed(entries: list[str]) -> list[str]:
    """The hosts and networks of ours that a tenant's http jobs may call."""
    for i, entry in enumerate(entries):
        try:
            check_entry(entry)
        except ValueError as error:
            raise InvalidInput.field(f"http_allow[{i}]", "invalid", str(error)) from None
    return entries


async def http_allow(db: Database, tenant_ids: Iterable[int]) -> dict[int, list[str]]:
    """Those lists, of the tenants that have one."""
    return {row["id"]: row["http_allow"] for row in await db.fetch("vital", SQL["http_allow"], list(tenant_ids))}


async def get_tenant(db: Database, slug: str) -> dict[str, Any]:
    """One tenant's document."""
    row = await db.fetchrow("engine", SQL["tenant"], slug)
    if row is None:
        raise NotFound("there is no such tenant")
    return _tenant(row)


async def list_tenants(db: Database, before: int | None, limit: int) -> list[dict[str, Any]]:
    """Newest first."""
    return [_tenant(row) for row in await db.fetch("engine", SQL["tenants"], before, limit)]


def _tenant(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "slug": row["slug"],
        "weight": row["weight"],
        "quotas": Quotas.of(row)._asdict(),
        "http_allow": row["http_allow"],
        "retention": _retention(row),
        "created_at": iso(row["created_at"]),
    }


def _quotas(row: Row) -> Quotas | None:
    found = Quotas.of(row)
    return None if found == NO_QUOTAS else found


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
        await connection.execute(SQL["add_tenant"], "default", 1, *NO_QUOTAS)
        tenant = await connection.fetchrow(SQL["tenant"], "default")
    out = {}
    wanted: tuple[tuple[str, Role], ...] = (("key", "platform"), ("worker_key", "worker"))
    for name, role in wanted:
        who = await identify(db, known.get(name, ""))
        if who is not None and who.role == role:
            out[name] = known[name]
        else:
            as_founder = founder._replace(tenant_id=tenant["id"])
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
