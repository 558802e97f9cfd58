"""secrets: keep values that are written and never read back, hand them to claims, and wrap their keys anew.

A value is sealed with a key of its own, which the first master key wraps; both are bound to the tenant, the name, the
version and the id of the row, so that a row, or a part of one, that is put elsewhere opens nothing. Nothing of a value
reaches PostgreSQL unsealed: neither statements that are logged nor backups have it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tocsin.clock import iso
from tocsin.errors import ApiProblem, Contention, NotFound, PreconditionFailed, ServerFault, Unavailable
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.sealing import data_key_context
from tocsin.model.access import Identity
from tocsin.model.ids import new_id
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.vault import MasterKeys, Wrapped, context_of, new_key, seal, unseal
from tocsin.telemetry import get_logger

log = get_logger("secrets")
SQL = Sql(__file__)
WAVE = 200
_MOST_KEPT = 16 * 1024 * 1024  # characters of unsealed values
SecretKey = tuple[int, str]  # tenant, name


class Put(NamedTuple):
    """Which version a secret has now, and whether it is new."""

    version: int
    made: bool


async def put(
    db: Database, keys: MasterKeys, who: Identity, name: str, value: str, wish: Wish | None, version: int | None
) -> Put:
    """Store a value under a name, or another one. Raises `Replay` for a known key."""
    id_ = new_id(db.clock.now())
    async with db.tenant(who.tenant_id, "secrets") as connection:
        await recall(connection, wish)
        was = await connection.fetchval(SQL["lock"], who.tenant_id, name)
        _seen(was, name, version)
        now = (was or 0) + 1
        context = _context(who.tenant_id, name, now, id_)
        data_key = new_key()
        wrapped, sealed = keys.wrap(data_key, context), seal(data_key, value.encode(), context)
        stored = await connection.fetchval(SQL["put"], who.tenant_id, name, now, id_, *wrapped, sealed)
        if stored is None:
            raise Contention("somebody else is storing this secret; try again")
        await audit.record(connection, audit.entry(who, "secret.put", f"secret:{name}", version=now))
        await remember(connection, wish, 201 if now == 1 else 200, [], now)
    return Put(now, now == 1)


def _context(tenant_id: int, name: str, version: int, id_: str) -> bytes:
    return context_of("secret", tenant_id, name, version, id_)


def _seen(was: int | None, name: str, version: int | None) -> None:
    if version is not None and was != version:
        raise PreconditionFailed(f"there is no secret {name!r} at version {version}")


async def get(db: Database, who: Identity, name: str) -> dict[str, Any]:
    """All that is told of a secret, which is not its value."""
    async with db.tenant(who.tenant_id, "secrets") as connection:
        row = await connection.fetchrow(SQL["get"], who.tenant_id, name)
    if row is None:
        raise NotFound("there is no such secret")
    return _document(row)


async def list_secrets(db: Database, who: Identity, after: str | None, limit: int) -> list[dict[str, Any]]:
    """A tenant's secrets, by name."""
    async with db.tenant(who.tenant_id, "secrets") as connection:
        return [_document(row) for row in await connection.fetch(SQL["list"], who.tenant_id, after, limit)]


def _document(row: Row) -> dict[str, Any]:
    times = {name: iso(row[name]) for name in ("created_at", "updated_at")}
    return {"name": row["name"], "version": row["version"]} | times


async def delete(db: Database, who: Identity, name: str, wish: Wish | None, version: int | None) -> None:
    """Forget a secret, also while jobs name it: to take it away must not have to wait. Raises `Replay`."""
    async with db.tenant(who.tenant_id, "secrets") as connection:
        await recall(connection, wish)
        was = await connection.fetchval(SQL["lock"], who.tenant_id, name)
        _seen(was, name, version)
        if was is None or await connection.fetchval(SQL["delete"], who.tenant_id, name) is None:
            raise NotFound("there is no such secret")
        await audit.record(connection, audit.entry(who, "secret.delete", f"secret:{name}"))
        await remember(connection, wish, 204, [])


# ── what claims are given ────────────────────────────────────────────────────────────────────────────────────────


class SecretBook:
    """Values for runs that start. What was unsealed is kept by the id of its row, so that a value that was replaced or
    deleted is not given out any more; asking for it costs one query for a whole batch of claims."""

    def __init__(self, db: Database, keys: MasterKeys) -> None:
        self._db, self._keys = db, keys
        self._known: OrderedDict[SecretKey, tuple[str, str]] = OrderedDict()  # id and value
        self._kept = 0

    async def read(self, wanted: Collection[SecretKey]) -> dict[SecretKey, str | ApiProblem]:
        """The value of each secret, or why there is none."""
        known = {key: self._known[key] for key in wanted if key in self._known}  # others may change it meanwhile
        asked = [(*key, known[key][0] if key in known else None) for key in wanted]
        rows = await self._db.fetch("vital", SQL["read"], *columns(asked, 3))
        found: dict[SecretKey, str | ApiProblem] = {key: _missing(key[1]) for key in wanted}
        for row in rows:
            key = (row["tenant_id"], row["name"])
            found[key] = known[key][1] if row["sealed"] is None else self._unsealed(key, row)
        return found

    def _unsealed(self, key: SecretKey, row: Row) -> str | ApiProblem:
        context = _context(*key, row["version"], row["id"])
        try:
            data_key = self._keys.unwrap(Wrapped(row["key_id"], row["wrapped"]), context)
            value = unseal(data_key, row["sealed"], context).decode()
        except (Unavailable, ServerFault) as problem:
            log.error("a secret cannot be unsealed", secret=key[1], why=problem.detail)
            return problem
        self._keep(key, row["id"], value)
        return value

    def _keep(self, key: SecretKey, id_: str, value: str) -> None:
        before = self._known.pop(key, ("", ""))
        self._known[key] = id_, value
        self._kept += len(value) - len(before[1])
        while self._kept > _MOST_KEPT:
            self._kept -= len(self._known.popitem(last=False)[1][1])


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no secret {name!r}", code="secret_missing")


# ── master keys ──────────────────────────────────────────────────────────────────────────────────────────────────


async def usage(db: Database, keys: MasterKeys) -> list[dict[str, Any]]:
    """Each master key: whether this server has it and seals with it, and how many keys it wraps."""
    rows = {row["key_id"]: row for row in await db.fetch("engine", SQL["usage"])}
    return [
        {
            "id": key_id,
            "known": key_id in keys.ids,
            "seals": keys.ids[:1] == [key_id],
            "secrets": rows[key_id]["secrets"] if key_id in rows else 0,
            "data_keys": rows[key_id]["data_keys"] if key_id in rows else 0,
        }
        for key_id in dict.fromkeys([*keys.ids, *rows])
    ]


async def rotate(db: Database, keys: MasterKeys, who: Identity, most: int = WAVE) -> int:
    """Wrap up to so many keys anew with the first master key; answers how many. Values are not touched, so whoever
    reads meanwhile notices nothing; what was interrupted goes on with what is left."""
    old = keys.ids[1:]
    if not old:
        return 0
    async with db.transaction("rotate") as connection:
        done = await _rewrap_secrets(connection, keys, old, most)
        done += await _rewrap_data_keys(connection, keys, old, most - done)
        if done:
            entry = audit.platform_entry(who, "master_key.rotate", f"master_key:{keys.ids[0]}", rewrapped=done)
            await audit.record(connection, entry)
    return done


async def _rewrap_secrets(connection: Connection, keys: MasterKeys, old: Sequence[str], most: int) -> int:
    batch = []
    for row in await connection.fetch(SQL["stale_secrets"], old, most):
        context = _context(row["tenant_id"], row["name"], row["version"], row["id"])
        wrapped = _rewrapped(keys, row, context)
        if wrapped is not None:
            batch.append((row["tenant_id"], row["name"], row["id"], *wrapped))
    if batch:
        await connection.execute(SQL["rewrap_secrets"], *columns(batch, 5))
    return len(batch)


async def _rewrap_data_keys(connection: Connection, keys: MasterKeys, old: Sequence[str], most: int) -> int:
    batch = []
    for row in await connection.fetch(SQL["stale_data_keys"], old, most):
        wrapped = _rewrapped(keys, row, data_key_context(row["tenant_id"], row["id"]))
        if wrapped is not None:
            batch.append((row["tenant_id"], row["id"], *wrapped))
    if batch:
        await connection.execute(SQL["rewrap_data_keys"], *columns(batch, 4))
    return len(batch)


def _rewrapped(keys: MasterKeys, row: Row, context: bytes) -> Wrapped | None:
    """None for what is broken: it must not keep the others from being wrapped anew, and stays counted."""
    try:
        return keys.wrap(keys.unwrap(Wrapped(row["key_id"], row["wrapped"]), context), context)
    except ServerFault as problem:
        log.error("a key cannot be unwrapped", tenant=row["tenant_id"], why=problem.detail)
        return None
