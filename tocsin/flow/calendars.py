"""calendars: keep a tenant's named calendars, and plan the jobs that go by one anew when it changes.

A changed calendar counts from now on: what is due or was missed stays owed as it was, what nobody holds yet of the
future is planned anew. Its jobs follow in waves, the first one at once.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, NotFound, PreconditionFailed
from tocsin.flow.shared import audit, calendars
from tocsin.flow.shared.calendars import Use
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.transitions import Hint, Key, NewRun, hints, retract, stage
from tocsin.model.access import Identity
from tocsin.model.calendars import Calendar
from tocsin.model.ids import new_ids
from tocsin.model.job import Schedule
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, spread, timetable
from tocsin.store.db import Connection, Database, Row, Sql

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
            await audit.record(connection, entry)
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
        await audit.record(connection, audit.entry(who, "calendar.delete", f"calendar:{name}"))
        await remember(connection, wish, 204, [])


# ── planning anew ────────────────────────────────────────────────────────────────────────────────────────────────


class Wave(NamedTuple):
    """How many jobs were looked at, and what became claimable."""

    jobs: int
    hints: list[Hint]


async def follow(db: Database) -> Wave:
    """Plan jobs that are behind their calendars anew, a hundred at most."""
    rows = await db.fetch("engine", SQL["behind"], WAVE)
    woken: list[Hint] = []
    for row in rows:
        woken += await _plan_anew(db, Key(row["tenant_id"], row["job_id"]))
    return Wave(len(rows), woken)


async def _plan_anew(db: Database, key: Key) -> list[Hint]:
    async with db.transaction("calendars") as connection:
        job = await connection.fetchrow(SQL["lock_job"], *key)
        schedule = msgspec.json.decode(job["schedule"] or "null", type=Schedule | None, dec_hook=decode_scalar)
        known = await calendars.named_by(connection, key.tenant_id, schedule)
        if known is None or schedule is None or schedule.calendar is None:
            await calendars.leave(connection, *key)  # an edit was first
            return []
        staged: list[Row] = []
        if job["state"] in ("active", "paused"):
            seed = seed_of(job["tenant"], job["name"], key.id)
            trigger = await connection.fetchrow(SQL["lock_trigger"], *key)
            gone = await retract(connection, key)
            clock = await connection.fetchrow(SQL["after"], *key)
            following = timetable(schedule, job["anchor"], seed, known.calendar).next_after(clock["after"])
            await _set_trigger(connection, key, job["state"], trigger, clock["now"], following)
            due = [at for at in gone if at <= clock["now"]]
            later = spread(schedule, seed)
            runs = [
                NewRun(key.tenant_id, id_, key.id, "schedule", at, ready_at=at + later)
                for id_, at in zip(new_ids(clock["now"], len(due)), due, strict=True)
            ]
            staged = await stage(connection, runs)
        await calendars.use(connection, [Use(*key, schedule.calendar, known.version)])
    return hints(staged)


async def _set_trigger(
    connection: Connection, key: Key, state: str, trigger: Row | None, now: datetime, following: datetime | None
) -> None:
    """A cursor that is due already stays: the planner is behind, and what it finds there is owed."""
    column = "held_at" if state == "paused" else "next_fire_at"
    was = None if trigger is None else trigger[column]
    at = was if was is not None and was <= now else following
    await connection.execute(SQL["set_trigger"], *key, *((None, at) if state == "paused" else (at, None)))
