"""keys: who may call. Keys are 256 random bits with a prefix and a checksum, stored as a keyed hash, shown once."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tocsin.clock import iso
from tocsin.errors import Conflict, Forbidden, InvalidInput, NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.slugs import ids_of, slugs_of
from tocsin.model.access import MOST_STARS, Duty, Identity, Role, Scope, misplaced_scopes
from tocsin.model.ids import new_id
from tocsin.model.quotas import Quotas
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.vault import MasterKeys
from tocsin.wire import KeyScopes, NewKey, Rotation

SQL = Sql(__file__)
PREFIX = "tcn_"
RUN_PREFIX = "tcr_"
_RUN_TOKEN = re.compile(r"tcr_([0-9]{1,9})\.([0-9]{1,19})\.([0-9a-f]{48})", re.ASCII)
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CLUSTER = "cluster"
_OF_THE_PLATFORM = ("worker", "platform")
_DAY, _LONGEST_OVERLAP = timedelta(days=1), timedelta(days=30)


def new_key() -> str:
    """A fresh key: `tcn_` + 256 bits + a checksum, so that a typo is found without asking the database."""
    body = _base62(int.from_bytes(os.urandom(32), "big"), 43)
    return PREFIX + body + _checksum(body)


def is_wellformed(key: str) -> bool:
    """Whether prefix, length and checksum fit."""
    body = key[len(PREFIX) : -6]
    return key.startswith(PREFIX) and len(body) == 43 and key.isascii() and key[-6:] == _checksum(body)


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), 6)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


class KeyHashes:
    """What is stored of a key: an HMAC of it. The pepper is derived from the master key, which is not in the database;
    without one, from the cluster's own secret, which is.

    A key is looked for under every pepper that this server has, and under none, as keys were stored before: those stay
    good until they are rotated. One that was stored under an older master key is stored anew when it is used.
    """

    def __init__(self, peppers: Mapping[str, bytes]) -> None:
        """By their names; the first is for new keys."""
        self._peppers = dict(peppers)
        self.first = next(iter(self._peppers))

    @classmethod
    async def load(cls, db: Database, master: MasterKeys) -> KeyHashes:
        """With the peppers of this server."""
        own = dict(zip(master.ids, master.derive_all("api keys"), strict=True))
        secret = await db.fetchval("engine", SQL["token_key"])
        return cls(own | {_CLUSTER: hmac.digest(secret, b"api keys", "sha256")})

    def of(self, key: str) -> bytes:
        """What is stored of a new key."""
        return self._under(key, self.first)

    def all(self, key: str) -> list[bytes]:
        """Under what a key may be stored."""
        return [*(self._under(key, name) for name in self._peppers), hashlib.sha256(key.encode()).digest()]

    def outdated(self, hashed_by: str | None) -> bool:
        """Whether this was the pepper of an older master key."""
        return hashed_by not in (None, _CLUSTER, self.first)

    def _under(self, key: str, name: str) -> bytes:
        return hmac.digest(self._peppers[name], key.encode(), "sha256")


class Found(NamedTuple):
    """Who holds a key; `anew`: what is to be stored of it instead, because its master key is not the first any more."""

    who: Identity
    anew: bytes | None


async def identify(db: Database, hashes: KeyHashes, key: str, pool: str = "engine") -> Found | None:
    """Who holds this key; None for one that is unknown, revoked or expired."""
    if not is_wellformed(key):
        return None
    row = await db.fetchrow(pool, SQL["find"], hashes.all(key))
    if row is None:
        return None
    scopes = {} if row["scopes"] is None else msgspec.json.decode(row["scopes"])
    named = row["id"], row["name"], row["role"], row["tenant_id"], row["slug"]
    who = Identity(*named, Quotas.given(row), suspended=row["suspended"], scope=_scope(scopes), duty=_duty(row, scopes))
    return Found(who, hashes.of(key) if hashes.outdated(row["hashed_by"]) else None)


def _scope(scopes: Mapping[str, Any]) -> Scope | None:
    if "jobs" not in scopes and "tags" not in scopes:
        return None
    tags = [(key, value) for key, _, value in (tag.partition(":") for tag in scopes.get("tags", ()))]
    return Scope(tuple(scopes.get("jobs", ())), tuple(tags))


def _duty(row: Row, scopes: Mapping[str, Any]) -> Duty:
    pools, serves = scopes.get("pools"), row["serves"]
    return Duty(None if pools is None else frozenset(pools), None if serves is None else frozenset(serves))


async def living(db: Database, key_ids: Iterable[str]) -> set[str]:
    """Those of these keys that still open the door."""
    return {row["id"] for row in await db.fetch("engine", SQL["living"], list(key_ids))}


async def note_used(db: Database, hashes: KeyHashes, used: Mapping[str, bytes | None]) -> None:
    """These keys were used just now. Written every few minutes at most for each, and right to that."""
    await db.fetch("engine", SQL["used"], *columns(list(used.items()), 2), hashes.first)


# ── made, shown, rotated, revoked ────────────────────────────────────────────────────────────────────────────────


async def create_key(
    db: Database, hashes: KeyHashes, who: Identity, body: NewKey, wish: Wish | None = None
) -> dict[str, Any]:
    """A new key of the caller's tenant; the answer is the only place where it is ever shown."""
    _refuse_above(who, body.role)
    now = db.clock.now()
    expires_at = _end(body, now)
    scopes = _checked(body.role, body.scopes)
    key, key_id = new_key(), new_id(now)
    serves = await _serves(db, who, body.role, scopes.pop("tenants", None))
    async with _transaction(db, who) as connection:
        await recall(connection, wish)
        made = _Made(key_id, body.role, body.name, scopes, serves, expires_at)
        await _add(connection, who, made, hashes, key)
        entry = _entry(body.role)(who, "key.create", f"key:{key_id}", role=body.role, **_told(made))
        await audit.record(connection, entry)
        await remember(connection, wish, 201, [key_id])
    return await get_key(db, who, key_id) | {"tenant": who.tenant, "key": key}


async def _serves(db: Database, who: Identity, role: str, named: Sequence[str] | None) -> Sequence[int] | None:
    """Whom a worker key serves: those that are named; else the tenant that is acted for, or everybody."""
    if named is not None:
        return await ids_of(db, named, "scopes.tenants")
    return [who.tenant_id] if role == "worker" and who.tenant_id != who.home else None


def _transaction(db: Database, who: Identity) -> AbstractAsyncContextManager[Connection]:
    """That sees the tenant's keys; the platform's reaches its own audit, too."""
    return db.transaction("keys") if who.role == "platform" else db.tenant(who.tenant_id, "keys")


def _entry(role: str) -> Callable[..., audit.Entry]:
    """Whose audit tells of a key: worker and platform keys are not the affair of the tenant that they are made in."""
    return audit.platform_entry if role in _OF_THE_PLATFORM else audit.entry


def _end(body: NewKey, now: datetime) -> datetime | None:
    """When the key is to end; raises why it cannot."""
    if body.expires_at is not None and body.expires_in is not None:
        raise InvalidInput.field("expires_in", "invalid", "give this or `expires_at`, not both")
    ends_at = body.expires_at.at if body.expires_at is not None else None
    if body.expires_in is not None:
        ends_at = now + body.expires_in.delta
    if ends_at is not None and ends_at <= now:
        raise InvalidInput.field("expires_at", "in_the_past", "lies in the past")
    return ends_at


class _Made(NamedTuple):
    """A key as it is to be stored."""

    id: str
    role: str
    name: str
    scopes: Mapping[str, Any]
    serves: Sequence[int] | None
    expires_at: datetime | None


async def _add(connection: Connection, who: Identity, made: _Made, hashes: KeyHashes, key: str) -> None:
    scopes = msgspec.json.encode(made.scopes).decode() if made.scopes else None
    await connection.execute(
        SQL["add"],
        made.id,
        who.tenant_id,
        hashes.of(key),
        hashes.first,
        made.role,
        made.name,
        scopes,
        made.serves,
        made.expires_at,
    )


def _told(made: _Made) -> dict[str, Any]:
    """What the audit says of a new key beside its role."""
    told = {"scopes": dict(made.scopes), "serves": made.serves, "expires_at": made.expires_at and iso(made.expires_at)}
    return {name: value for name, value in told.items() if value}


def _refuse_above(who: Identity, role: str) -> None:
    """Whoever could make, or get hold of, a key of the platform would be the platform."""
    if role in _OF_THE_PLATFORM and who.role != "platform":
        raise Forbidden("only a platform key may look after worker and platform keys")


def _checked(role: str, scopes: KeyScopes | UnsetType) -> dict[str, Any]:
    """The scopes that are given; raises why they cannot be."""
    if scopes is UNSET:
        return {}
    given = {name: value for name in scopes.__struct_fields__ if (value := getattr(scopes, name)) is not UNSET}
    wrong = misplaced_scopes(role, bool({"jobs", "tags"} & given.keys()), bool({"pools", "tenants"} & given.keys()))
    if wrong is not None:
        raise InvalidInput.field("scopes", "invalid", wrong)
    if any(pattern.count("*") > MOST_STARS for pattern in given.get("jobs", ())):
        raise InvalidInput.field("scopes.jobs", "invalid", f"must have at most {MOST_STARS} stars in each pattern")
    return given


async def rotate_key(
    db: Database, hashes: KeyHashes, who: Identity, key_id: str, body: Rotation, wish: Wish | None = None
) -> dict[str, Any]:
    """Another key with the same rights, shown this once; the old one stays good for `overlap`. The new one is given as
    long a life as the old one had."""
    overlap = _DAY if body.overlap is UNSET else body.overlap.delta
    if not timedelta(0) <= overlap <= _LONGEST_OVERLAP:
        raise InvalidInput.field("overlap", "invalid", f"lies between nothing and {_LONGEST_OVERLAP.days} days")
    key, new = new_key(), new_id(db.clock.now())
    async with _transaction(db, who) as connection:
        await recall(connection, wish)
        old = await connection.fetchrow(SQL["lock"], who.tenant_id, key_id)
        if old is None:
            raise NotFound("there is no such key")
        _refuse_above(who, old["role"])
        if not old["alive"]:
            raise Conflict("this key has ended", code="key_ended")
        scopes = {} if old["scopes"] is None else msgspec.json.decode(old["scopes"])
        expires_at = None if old["expires_at"] is None else old["now"] + (old["expires_at"] - old["created_at"])
        made = _Made(new, old["role"], old["name"], scopes, old["serves"], expires_at)
        await _add(connection, who, made, hashes, key)
        ends_at = await connection.fetchval(SQL["end_at"], who.tenant_id, key_id, overlap)
        entry = _entry(old["role"])(who, "key.rotate", f"key:{key_id}", new=new, old_until=iso(ends_at))
        await audit.record(connection, entry)
        await remember(connection, wish, 201, [new])
    shown = await get_key(db, who, new)
    return shown | {"tenant": who.tenant, "key": key, "replaces": key_id, "old_expires_at": iso(ends_at)}


async def list_keys(db: Database, who: Identity, before: str | None, limit: int) -> list[dict[str, Any]]:
    """Newest first, without the keys themselves."""
    return await _documents(db, who, None, before, limit)


async def get_key(db: Database, who: Identity, key_id: str) -> dict[str, Any]:
    """One of them."""
    found = await _documents(db, who, key_id, None, 1)
    if not found:
        raise NotFound("there is no such key")
    return found[0]


async def _documents(
    db: Database, who: Identity, key_id: str | None, before: str | None, limit: int
) -> list[dict[str, Any]]:
    async with db.tenant(who.tenant_id, "keys") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, before, limit, key_id)
    served = {tenant for row in rows for tenant in row["serves"] or ()}
    if who.role != "platform":  # whom else a worker of the platform serves is not its tenant's to know
        served &= {who.tenant_id}
    slugs = await slugs_of(db, served)
    return [_document(row, slugs) for row in rows]


def _document(row: Row, slugs: Mapping[int, str]) -> dict[str, Any]:
    scopes = {} if row["scopes"] is None else msgspec.json.decode(row["scopes"])
    if row["serves"] is not None:
        scopes["tenants"] = [slugs[tenant] for tenant in row["serves"] if tenant in slugs]
    return {
        "id": row["id"],
        "role": row["role"],
        "name": row["name"],
        "scopes": scopes or None,
        "created_at": iso(row["created_at"]),
        "expires_at": row["expires_at"] and iso(row["expires_at"]),
        "revoked_at": row["revoked_at"] and iso(row["revoked_at"]),
        "last_used_at": row["last_used_at"] and iso(row["last_used_at"]),
    }


async def revoke_key(db: Database, who: Identity, key_id: str) -> None:
    """From a second later at the latest, no node takes it."""
    async with _transaction(db, who) as connection:
        old = await connection.fetchrow(SQL["lock"], who.tenant_id, key_id)
        if old is None:
            raise NotFound("there is no such key")
        _refuse_above(who, old["role"])
        await connection.execute(SQL["revoke"], who.tenant_id, key_id)
        await audit.record(connection, _entry(old["role"])(who, "key.revoke", f"key:{key_id}"))


async def found_cluster(db: Database, master: MasterKeys, known: dict[str, str]) -> dict[str, str]:
    """Make tenant `default` and the keys `key` and `worker_key`, unless those known already are good."""
    founder = Identity("00000000-0000-0000-0000-000000000000", "tocsin up", "platform", 0, "default")
    async with db.transaction("found") as connection:
        await connection.execute(SQL["found_cluster"], os.urandom(32))
        await connection.execute(SQL["found_tenant"])
        tenant_id = await connection.fetchval(SQL["founded"])
    hashes, out = await KeyHashes.load(db, master), {}
    wanted: tuple[tuple[str, Role], ...] = (("key", "platform"), ("worker_key", "worker"))
    for name, role in wanted:
        found = await identify(db, hashes, known.get(name, ""))
        if found is not None and found.who.role == role:
            out[name] = known[name]
        else:
            body = NewKey(role=role, name=f"tocsin up ({role})")
            out[name] = (await create_key(db, hashes, founder._replace(tenant_id=tenant_id), body))["key"]
    return out


async def note_login(db: Database, who: Identity, issuer: str) -> None:
    """Somebody begins a session with a browser."""
    async with db.tenant(who.tenant_id, "keys") as connection:
        await audit.record(connection, audit.entry(who, "session.begin", f"issuer:{issuer}", role=who.role))


async def log_out(db: Database, who: Identity) -> None:
    """End every session that a person has begun, in whatever browser it is."""
    async with db.transaction("keys") as connection:
        await connection.execute(SQL["log_out"], who.key_id)
        await audit.record(connection, audit.entry(who, "session.end_all", f"person:{who.key_id}"))


async def logged_out(db: Database, began: Mapping[str, float]) -> set[str]:
    """Those of these people who have logged out everywhere since they began a session, in seconds since 1970."""
    rows = await db.fetch("engine", SQL["logged_out"], list(began), list(began.values())) if began else []
    return {row["key_id"] for row in rows}


class RunTokens:
    """Tokens scoped to one attempt: what a job may show to prove that it is that one.

    Nothing of them is stored. They name tenant and fence and are signed, so that they can be believed without a look
    into the database; what they are good for ends with the attempt, which the fence in each statement sees to.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """The first key signs, all are believed."""
        # Keyed BLAKE2 is a MAC by itself, and half the price of HMAC; a copy of one that has its key, less again.
        self._signers = [hashlib.blake2b(key=key, digest_size=24, person=b"tocsin run") for key in keys]

    @classmethod
    async def load(cls, db: Database, master: MasterKeys) -> RunTokens:
        """With keys derived from the master keys; without one, with a secret that stands in the database: whoever reads
        that can speak for an attempt under way, and for nothing any more once it has ended."""
        return cls(master.derive_all("run tokens") or [await db.fetchval("engine", SQL["token_key"])])

    def make(self, tenant_id: int, run_id: str, fence: int) -> str:
        """The token of one attempt."""
        return f"{RUN_PREFIX}{tenant_id}.{fence}.{_mac(self._signers[0], tenant_id, run_id, fence)}"

    def read(self, token: str, run_id: str) -> Identity | None:
        """Which attempt of this run shows the token; None if it is not one of ours, or another run's."""
        found = _RUN_TOKEN.fullmatch(token)
        if found is None:
            return None
        tenant_id, fence = int(found[1]), int(found[2])
        macs = [_mac(signer, tenant_id, run_id, fence) for signer in self._signers]
        if not any([hmac.compare_digest(found[3], mac) for mac in macs]):
            return None
        return Identity(run_id, f"run {run_id}", "run", tenant_id, "", fence=fence)


def _mac(signer: hashlib.blake2b, tenant_id: int, run_id: str, fence: int) -> str:
    mac = signer.copy()
    mac.update(b"%d:%s:%d" % (tenant_id, run_id.encode(), fence))
    return mac.hexdigest()
