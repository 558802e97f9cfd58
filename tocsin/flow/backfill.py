"""backfill: ask for a past range of a job's schedule as runs, look after it, pause, resume and cancel it.

A call only stores what is asked for; `fill` makes the runs. Lock order: the job, the backfill, limits, runs by id.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, Contention, NotFound
from tocsin.flow.shared import audit, calendars, cold, windows
from tocsin.flow.shared.documents import instant, raw
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.jobs import key_of_run, on_its_own, opened
from tocsin.flow.shared.joins import settle, share_graph
from tocsin.flow.shared.transitions import (
    NOTHING,
    Controlled,
    Key,
    cancel_runs,
    gates,
    hints,
    lock_jobs,
    lock_limits,
    release,
    stops,
)
from tocsin.model.access import Identity
from tocsin.model.backfill import (
    Counted,
    Plan,
    Rerun,
    check_counted,
    check_range,
    counted,
    encode_plan,
    plan_of,
    without,
)
from tocsin.model.ids import lowest_id, new_id
from tocsin.model.job import Schedule
from tocsin.model.packed import Packed, shown
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import check_calendar, check_schedule, seed_of
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.parquet import Parquet

SQL = Sql(__file__, cold.SQL)
MOST_OPEN = 100  # of a tenant: the backfiller looks at each of them
_SLACK = timedelta(minutes=2)  # no run's id is older than the instant it stands for by more


class Asked(NamedTuple):
    """What somebody wants filled: the instants from one on and before another, by the job's schedule or another; all,
    or (`rerun`) those that never ran, or never succeeded. `args` of the runs, as JSON; `sealed`, if they are sensitive,
    with the `pepper` for a concurrency key that follows from them."""

    from_: datetime
    to: datetime
    schedule: Schedule | None
    max_concurrency: int
    priority: int
    rerun: Rerun = "all"
    args: str | None = None
    sealed: Packed | None = None
    pepper: bytes = b""


class Past(NamedTuple):
    """Where archived runs are read, and for how many days runs are kept unless the tenant says."""

    parquet: Parquet
    runs_days: int


async def look(db: Database, past: Past, who: Identity, job_id: str, asked: Asked) -> Counted:
    """What there is to fill; raises what is wrong with the range or the schedule. Stores nothing."""
    return (await _counted(db, past, who, job_id, asked, None))[1]


async def begin(db: Database, past: Past, who: Identity, job_id: str, asked: Asked, wish: Wish | None) -> str:
    """Store a backfill; its id. Raises `Replay` for a known key."""
    plan, found = await _counted(db, past, who, job_id, asked, wish)
    check_counted(found, asked.rerun)
    async with db.tenant(who.tenant_id, "backfill") as connection:
        await recall(connection, wish)
        job = await connection.fetchrow(SQL["hold_job"], who.tenant_id, job_id)
        if job is None:
            raise NotFound("there is no such job")
        opened(job, "filled")
        args = _kept_args(who, job, asked)
        await _refuse_another(connection, who, job_id, asked, args)
        id_ = new_id(job["now"])
        await connection.execute(
            SQL["store"],
            *(who.tenant_id, id_, job_id, asked.from_, asked.to, encode_plan(plan), found.first[0], found.total),
            *(asked.max_concurrency, asked.priority, args, asked.rerun),
        )
        told = {"job": job_id, "from": iso(asked.from_), "to": iso(asked.to), "rerun": asked.rerun, "runs": found.total}
        await audit.record(connection, audit.entry(who, "backfill.create", f"backfill:{id_}", **told))
        await remember(connection, wish, 202, [id_])
    return id_


async def _refuse_another(connection: Connection, who: Identity, job_id: str, asked: Asked, args: str | None) -> None:
    """One that does the same already, or that would be one too many."""
    if await connection.fetchval(SQL["open"], who.tenant_id, MOST_OPEN) >= MOST_OPEN:
        raise Conflict(f"{MOST_OPEN} backfills are open, and more would wait anyway", code="too_many_backfills")
    other = await connection.fetchval(SQL["another"], who.tenant_id, job_id, asked.from_, asked.to, args)
    if other is not None:
        raise Conflict(f"backfill {other} fills some of it already: let it end, or cancel it", code="backfill_overlaps")


def _kept_args(who: Identity, job: Row, asked: Asked) -> str | None:
    """As rows keep them: what is sealed with the concurrency key that follows from it."""
    if asked.args is None:
        return None
    if asked.sealed is not None:
        key = key_of_run(who.tenant_id, job["key_template"], asked.args, asked.pepper)
        return msgspec.structs.replace(asked.sealed, key_id=key).text
    if job["sensitive"]:
        raise Contention("the job has become sensitive at this moment; try again")
    return asked.args


async def _counted(
    db: Database, past: Past, who: Identity, job_id: str, asked: Asked, wish: Wish | None
) -> tuple[Plan, Counted]:
    async with db.tenant(who.tenant_id, "backfills") as connection:
        await recall(connection, wish)
        job = await connection.fetchrow(SQL["job"], who.tenant_id, job_id)
        if job is None:
            raise NotFound("there is no such job")
        on_its_own(job)
        check_range(asked.from_, asked.to, job["now"])
        schedule, seed = asked.schedule or _schedule(job), seed_of(who.tenant, job["name"], job_id)
        if asked.schedule is not None:
            check_schedule(asked.schedule, asked.from_, seed)
        known = await calendars.named_by(connection, who.tenant_id, schedule)
    calendar = known and known.calendar
    if asked.schedule is not None and calendar is not None:
        check_calendar(asked.schedule, calendar, asked.from_, seed)
    plan = plan_of(schedule, job["anchor"], seed, calendar)
    # Years of days are looked at one by one: others want an answer, too.
    if asked.rerun == "all":
        return plan, await asyncio.to_thread(counted, plan, asked.from_, asked.to)
    done = await _done(db, past, Key(who.tenant_id, job_id), asked, job["created_at"])
    return await asyncio.to_thread(without, plan, asked.from_, asked.to, done)


async def _done(db: Database, past: Past, job: Key, asked: Asked, created_at: datetime) -> set[datetime]:
    """The instants of a range of which a run lives, or has run; if what failed is to be run again, has succeeded."""
    cold.refuse_expired(await cold.kept_since(db, job.tenant_id, past.runs_days), asked.from_, created_at)
    well, first = asked.rerun == "failed", asked.from_ - _SLACK
    async with db.snapshot(job.tenant_id, "backfills") as connection:
        rows = await connection.fetch(SQL["done"], *job, asked.from_, asked.to, lowest_id(first), well)
        files = await cold.files(connection, [job.tenant_id], max(first, created_at).date(), cold.LAST_DAY)
    found = {row["instant"] for row in rows}
    if files:
        from_, to = (at.astimezone(UTC).replace(tzinfo=None) for at in (asked.from_, asked.to))
        given = {"tenant": job.tenant_id, "job": job.id, "from": from_, "to": to, "well": well}
        for wave in cold.waves(files):
            rows = await cold.query(past.parquet, SQL["done_in_files"], wave, given)
            found |= {row["instant"].replace(tzinfo=UTC) for row in rows}
    return found


def _schedule(job: Row) -> Schedule | None:
    return msgspec.json.decode(job["schedule"] or "null", type=Schedule | None, dec_hook=decode_scalar)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def get(db: Database, who: Identity, id_: str) -> dict[str, Any]:
    """One backfill's document."""
    async with db.tenant(who.tenant_id, "backfills") as connection:
        row = await connection.fetchrow(SQL["get"], who.tenant_id, id_)
    if row is None:
        raise _unknown()
    return _document(row)


async def list_backfills(
    db: Database, who: Identity, job_id: str | None, state: str | None, before: str | None, limit: int
) -> windows.Listed:
    """List a tenant's backfills, newest first. A page reads a bounded number of them."""
    given = {"tenant": who.tenant_id, "most": limit, "job": job_id, "state": state}
    given |= {"low": windows.LOWEST, "high": before or windows.HIGHEST}
    named = {"job": SQL["only_job"], "state": SQL["only_state"]}
    only = [condition for name, condition in named.items() if given[name] is not None]
    driver = None if job_id is None else SQL["only_job"]
    looked = await windows.look(db, who, windows.Query("backfills", SQL["list"], SQL["floor"], given, only, driver))
    return windows.Listed([_document(row) for row in looked.rows], looked.floor)


def _document(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "job_id": row["job_id"],
        "job_name": row["job_name"],
        "state": row["state"],
        "from": iso(row["from_at"]),
        "to": iso(row["to_at"]),
        "rerun": row["rerun"],
        "total": row["total"],
        "made": row["made"],
        "live": row["live"],
        "succeeded": row["succeeded"],
        "failed": row["failed"],
        "cancelled": row["cancelled"],
        "failures": raw(row["failures"]),
        "next_at": instant(row["next_at"]),
        "max_concurrency": row["max_concurrency"],
        "priority": row["priority"],
        "args": shown(row["args"]),
        "created_at": iso(row["created_at"]),
        "finished_at": instant(row["finished_at"]),
    }


def _unknown() -> NotFound:
    return NotFound("there is no such backfill")


# ── pause, resume, cancel ────────────────────────────────────────────────────────────────────────────────────────


async def pause(db: Database, who: Identity, id_: str, reason: str, wish: Wish | None) -> Controlled:
    """running → paused: no more runs are made; those that are made go on."""
    return await _switch(db, who, id_, "paused", "backfill.pause", reason, wish)


async def resume(db: Database, who: Identity, id_: str, reason: str, wish: Wish | None) -> Controlled:
    """paused → running."""
    return await _switch(db, who, id_, "running", "backfill.resume", reason, wish)


async def _switch(
    db: Database, who: Identity, id_: str, state: str, action: str, reason: str, wish: Wish | None
) -> Controlled:
    async with db.tenant(who.tenant_id, "backfill") as connection:
        await recall(connection, wish)
        was = await _locked(connection, who, id_)
        if was["state"] in ("completed", "cancelled"):
            raise Conflict(f"the backfill is {was['state']} and stays so", code="backfill_ended")
        if was["state"] != state:
            await connection.execute(SQL["set_state"], who.tenant_id, id_, state)
            await audit.record(connection, audit.entry(who, action, f"backfill:{id_}", reason=reason))
        await remember(connection, wish, 200, [id_])
    return NOTHING


async def cancel(
    db: Database, who: Identity, id_: str, reason: str, stop_running: bool, wish: Wish | None
) -> Controlled:
    """running | paused → cancelled, with every run of it that has not started; what runs is told to stop, unless it
    is to be left. Idempotent."""
    async with db.tenant(who.tenant_id, "backfill") as connection:
        await recall(connection, wish)
        found = await connection.fetchval(SQL["job_of"], who.tenant_id, id_)
        if found is None:
            raise _unknown()
        job, done = Key(who.tenant_id, found), NOTHING
        await share_graph(connection, who.tenant_id)
        await lock_jobs(connection, [job])
        if (await _locked(connection, who, id_))["state"] in ("running", "paused"):
            await connection.execute(SQL["set_state"], who.tenant_id, id_, "cancelled")
            limits = [
                key for row in await connection.fetch(SQL["keys"], *job, id_) for key in gates(job, row["key_id"])
            ]
            await lock_limits(connection, limits)
            rows = await cancel_runs(connection, job, reason, backfill_id=id_, stop_running=stop_running)
            freed = await release(connection, limits)
            settled = await settle(connection, rows)
            told = audit.entry(who, "backfill.cancel", f"backfill:{id_}", reason=reason, runs=len(rows))
            await audit.record(connection, told)
            done = Controlled(hints(freed) + settled.hints, stops(rows))
        await remember(connection, wish, 200, [id_])
    return done


async def _locked(connection: Connection, who: Identity, id_: str) -> Row:
    row = await connection.fetchrow(SQL["lock"], who.tenant_id, id_)
    if row is None:
        raise _unknown()
    return row
