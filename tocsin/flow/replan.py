"""replan: plan jobs anew whose calendar has changed, or the rules of whose time zone have (a release of tzdata).

Either counts from now on: what is due or was missed stays owed as it was, what nobody holds yet of the future is
planned anew. Jobs follow in waves. Of a release of tzdata only those in zones that it changes are looked at.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import msgspec

from tocsin.flow.shared import calendars, triggers
from tocsin.flow.shared.calendars import Use
from tocsin.flow.shared.failed import Failed
from tocsin.flow.shared.transitions import Hint, Key, NewRun, hints, passed, retract, stage
from tocsin.model.calendars import Calendar
from tocsin.model.ids import new_ids
from tocsin.model.job import Schedule
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, spread, timetable
from tocsin.model.zones import is_outdated, rules_of
from tocsin.store.db import Connection, Database, Row, Sql, is_transient
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("replan")
WAVE = 100


class Wave(NamedTuple):
    """How many jobs were looked at, and what became claimable."""

    jobs: int
    hints: list[Hint]


async def follow(db: Database, failed: Failed | None = None) -> Wave:
    """Replan at most a hundred jobs that are behind their calendars or their zones' rules. A job that fails does not
    stop the others."""
    failed = failed if failed is not None else Failed()
    looked_at = WAVE + len(failed)
    keys = failed.without(map(_key, await db.fetch("engine", SQL["behind_calendars"], looked_at)))
    keys = (keys or failed.without(map(_key, await _behind_zones(db, looked_at))))[:WAVE]
    woken: list[Hint] = []
    for key in keys:
        try:
            woken += await _plan_anew(db, key)
        except Exception as error:
            if is_transient(error):
                raise
            told = f"{type(error).__name__}: {error}"
            log.error("a job cannot be planned anew", tenant_id=key.tenant_id, job=key.id, error=told[:500])
            failed.add(key)
    return Wave(len(keys), woken)


def _key(row: Row) -> Key:
    return Key(row["tenant_id"], row["job_id"])


async def _behind_zones(db: Database, most: int) -> list[Row]:
    known = [row["zone_rules"] for row in await db.fetch("engine", SQL["zone_rules"])]
    outdated = [rules for rules in known if is_outdated(rules)]
    return await db.fetch("engine", SQL["behind_zones"], most, outdated) if outdated else []


async def _plan_anew(db: Database, key: Key) -> list[Hint]:
    async with db.transaction("replan") as connection:
        job = await connection.fetchrow(SQL["lock_job"], *key)
        if job is None:
            await calendars.leave(connection, *key)
            return []
        schedule = msgspec.json.decode(job["schedule"] or "null", type=Schedule | None, dec_hook=decode_scalar)
        known = await calendars.named_by(connection, key.tenant_id, schedule)
        staged: list[Row] = []
        if schedule is not None and job["state"] in ("active", "paused"):
            await connection.execute(SQL["set_zone_rules"], *key, rules_of(schedule.timezone))
            if not job["once"]:
                staged = await _move(connection, key, job, schedule, known and known.calendar)
        if known is None or schedule is None or schedule.calendar is None:
            await calendars.leave(connection, *key)
        else:
            await calendars.use(connection, [Use(*key, schedule.calendar, known.version)])
    return hints(staged)


async def _move(connection: Connection, key: Key, job: Row, schedule: Schedule, calendar: Calendar | None) -> list[Row]:
    """The cursor to where it belongs now; what was due is made again."""
    seed, paused = seed_of(job["tenant"], job["name"], key.id), job["state"] == "paused"
    trigger = await triggers.lock(connection, key)
    gone = await retract(connection, key)
    clock = await passed(connection, key, job["now"])
    count = (await triggers.read_counts(connection, [key])).get(key)
    due = [at for at in gone if at <= clock["now"]]
    following = timetable(schedule, job["anchor"], seed, calendar).next_after(clock["after"])
    cursor = _unless_due(trigger, paused, clock["now"], following)
    at = await triggers.settle(connection, key, schedule.max_runs, count, len(due), cursor)
    await triggers.put(connection, key, at, paused)
    later = spread(schedule, seed)
    runs = [
        NewRun(key.tenant_id, id_, key.id, "schedule", at, ready_at=at + later)
        for id_, at in zip(new_ids(clock["now"], len(due)), due, strict=True)
    ]
    return await stage(connection, runs)


def _unless_due(trigger: Row | None, paused: bool, now: datetime, following: datetime | None) -> datetime | None:
    """A cursor that is due already stays: the planner is behind, and what it finds there is owed."""
    was = None if trigger is None else trigger["held_at" if paused else "next_fire_at"]
    return was if was is not None and was <= now else following
