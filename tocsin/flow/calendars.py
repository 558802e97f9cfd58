"""calendars: keep a tenant's named calendars. `replan` keeps the jobs that go by one up with it."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, NotFound, PreconditionFailed
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.model.access import Identity
from tocsin.model.calendars import Calendar
from tocsin.store.db import Database, Row, Sql

SQL = Sql(__file__)
WAVE = 100


class Put(NamedTuple):
    """Which version a calendar has now, and whether it is new."""

    version: int
    made: bool


async def put(
    db: Database, who: Identity, name: str, calendar: Calendar, wish: Wish | None, version: int | None
) -> Put:
    """Make a calendar, or make it another; the same again changes nothing. Raises `Replay` for a known key."""
    document = msgspec.json.encode(calendar).decode()
    async with db.tenant(who.tenant_id, "calendars") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock"], who.tenant_id, name)
        _seen(was, name, version)
        if was is not None and was["document"] == document:
            done = Put(was["version"], False)
        else:
            digest = hashlib.sha256(document.encode()).hexdigest()
            now = await connection.fetchval(SQL["put"], who.tenant_id, name, document, digest)
            done = Put(now, now == 1)
            entry = audit.entry(who, "calendar.put", f"calendar:{name}", version=now, days=len(calendar.days))
            await audit.record(connection, entry.changing(was and was["document"], document))
        await remember(connection, wish, 201 if done.made else 200, [], done.version)
    return done


def _seen(row: Row | None, name: str, version: int | None) -> None:
    if version is not None and (row is None or row["version"] != version):
        raise PreconditionFailed(f"there is no calendar {name!r} at version {version}")


async def get(db: Database, who: Identity, name: str) -> dict[str, Any]:
    """One calendar's document."""
    async with db.tenant(who.tenant_id, "calendars") as connection:
        row = await connection.fetchrow(SQL["get"], who.tenant_id, name)
    if row is None:
        raise NotFound("there is no such calendar")
    return _document(row)


async def list_calendars(db: Database, who: Identity, after: str | None, limit: int) -> list[dict[str, Any]]:
    """A tenant's calendars, by name."""
    async with db.tenant(who.tenant_id, "calendars") as connection:
        return [_document(row) for row in await connection.fetch(SQL["list"], who.tenant_id, after, limit)]


def _document(row: Row) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode(row["document"])
    times = {name: iso(row[name]) for name in ("created_at", "updated_at")}
    return {"name": row["name"], "version": row["version"]} | told | times


async def delete(db: Database, who: Identity, name: str, wish: Wish | None, version: int | None) -> None:
    """Forget a calendar that no open job goes by. Raises `Replay` for a known key."""
    async with db.tenant(who.tenant_id, "calendars") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock_for_delete"], who.tenant_id, name)
        _seen(was, name, version)
        if was is None:
            raise NotFound("there is no such calendar")
        job = await connection.fetchval(SQL["in_use"], who.tenant_id, name)
        if job is not None:
            raise Conflict(f"job {job} goes by this calendar", code="calendar_in_use")
        await connection.execute(SQL["forget_uses"], who.tenant_id, name)
        await connection.execute(SQL["delete"], who.tenant_id, name)
        entry = audit.entry(who, "calendar.delete", f"calendar:{name}")
        await audit.record(connection, entry.changing(was["document"], None))
        await remember(connection, wish, 204, [])
