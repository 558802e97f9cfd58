"""control: pause, resume, cancel and delete jobs; cancel runs. Each call is one transaction of one tenant.

Lock order: the job, its trigger, its limit, its runs by id.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import msgspec

from tocsin.errors import NotFound
from tocsin.flow.shared import audit, calendars, noderuns, nodes, triggers
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.jobs import on_its_own, opened, seen
from tocsin.flow.shared.joins import hold_chain, see_all, settle, share_graph
from tocsin.flow.shared.noderuns import Part
from tocsin.flow.shared.transitions import (
    LAST_RUN,
    NO_RUN,
    NOTHING,
    Controlled,
    Hint,
    Key,
    NewRun,
    cancel_runs,
    counted,
    gates,
    hints,
    lock_limits,
    note_missed,
    passed,
    release,
    retract,
    stage,
    stops,
)
from tocsin.model.access import Identity
from tocsin.model.ids import new_id
from tocsin.model.job import Schedule
from tocsin.model.misfire import Missed, missed_until, still_owed
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, timetable
from tocsin.model.timetable import Timetable
from tocsin.store.db import Connection, Database, Row, Sql

SQL = Sql(__file__)
PIECE = 2_000  # runs that one transaction cancels


async def pause(
    db: Database, who: Identity, job_id: str, reason: str, wish: Wish | None, version: int | None = None
) -> Controlled:
    """active → paused. Occurrences nobody holds are retracted; claims that start from now on leave its runs alone."""
    async with db.tenant(who.tenant_id, "control") as connection:
        await recall(connection, wish)
        job = await _open_job(connection, who, job_id, "paused", version)
        if job["state"] == "active":
            key = Key(who.tenant_id, job_id)
            trigger = await triggers.lock(connection, key)
            first = await _retract(connection, who, job_id, job, trigger)
            if trigger is not None or first is not None:
                await triggers.put(connection, key, first, paused=True)
            await connection.execute(SQL["hold"], who.tenant_id, job_id)
            if job["has_nodes"]:
                await nodes.hold(connection, key)
            await connection.execute(SQL["set_state"], who.tenant_id, job_id, "paused")
            await audit.record(connection, audit.entry(who, "job.pause", f"job:{job_id}", reason=reason))
        await remember(connection, wish, 200, [job_id], job["version"])
    return NOTHING


async def resume(
    db: Database, who: Identity, job_id: str, reason: str, wish: Wish | None, version: int | None = None
) -> Controlled:
    """paused → active. What a schedule owed meanwhile becomes one counted row; a one-time job that is due runs."""
    async with db.tenant(who.tenant_id, "control") as connection:
        await recall(connection, wish)
        job = await _open_job(connection, who, job_id, "resumed", version)
        woken: list[Hint] = []
        if job["state"] == "paused":
            trigger = await triggers.lock(connection, Key(who.tenant_id, job_id))
            await connection.execute(SQL["set_state"], who.tenant_id, job_id, "active")
            await connection.execute(SQL["unhold"], who.tenant_id, job_id)
            if trigger is not None and trigger["held_at"] is not None:
                woken = await _resume_trigger(connection, who, job_id, job, trigger["held_at"])
            woken += hints(await connection.fetch(SQL["waiting_paused"], who.tenant_id, job_id))
            if job["has_nodes"]:
                woken += hints(await nodes.unhold(connection, Key(who.tenant_id, job_id)))
            await audit.record(connection, audit.entry(who, "job.resume", f"job:{job_id}", reason=reason))
        await remember(connection, wish, 200, [job_id], job["version"])
    return Controlled(woken, [])


async def _resume_trigger(
    connection: Connection, who: Identity, job_id: str, job: Row, held_at: datetime
) -> list[Hint]:
    now, key = job["now"], Key(who.tenant_id, job_id)
    if job["once"]:
        # A one-time job paused past its instant runs at resume.
        await triggers.put(connection, key, None if held_at <= now else held_at)
        if held_at > now:
            return []
        return hints(await stage(connection, [NewRun(who.tenant_id, new_id(now), job_id, "schedule", held_at)]))
    table = await _timetable(connection, who, job_id, job)
    missed = missed_until(table, held_at, now, "skipped_paused")
    await note_missed(connection, counted(key, now, missed))
    await triggers.put(connection, key, held_at if held_at > now else table.next_after(now))
    return []


async def _timetable(connection: Connection, who: Identity, job_id: str, job: Row) -> Timetable:
    schedule = msgspec.json.decode(job["schedule"] or "null", type=Schedule | None, dec_hook=decode_scalar)
    known = await calendars.named_by(connection, who.tenant_id, schedule)
    return timetable(schedule, job["anchor"], seed_of(who.tenant, job["name"], job_id), known and known.calendar)


async def cancel(
    db: Database,
    who: Identity,
    job_id: str,
    reason: str,
    stop_running: bool,
    wish: Wish | None,
    action: str,
    version: int | None = None,
) -> Controlled:
    """active | paused → cancelled, with every run of it; running ones are told to stop. Idempotent."""
    async with db.tenant(who.tenant_id, "control") as connection:
        await recall(connection, wish)
        await share_graph(connection, who.tenant_id)
        job = await _locked_job(connection, who, job_id, version)
        done = NOTHING
        if job["state"] in ("active", "paused"):
            key = Key(who.tenant_id, job_id)
            trigger = await triggers.lock(connection, key)
            if trigger is not None:
                table, now = await _timetable(connection, who, job_id, job), job["now"]
                unplanned = still_owed(table, trigger["next_fire_at"], trigger["held_at"], now)
                await note_missed(connection, counted(key, now, unplanned))
                await triggers.put(connection, key, None)
            await connection.execute(SQL["set_state"], who.tenant_id, job_id, "cancelled")
            await connection.execute(SQL["leave_parents"], who.tenant_id, job_id)
            await connection.execute(SQL["end_backfills"], who.tenant_id, job_id)
            if job["has_nodes"]:
                await nodes.cancel(connection, key)
            piece = await _cancel_piece(connection, key, reason, stop_running, NO_RUN)
            if piece.upto is not None:
                await connection.execute(SQL["hold"], *key)
                await connection.execute(SQL["cancel_later"], *key, reason, stop_running, piece.upto)
            else:
                await connection.execute(SQL["unhold"], *key)
            more = {} if piece.upto is None else {"more": True}
            told = audit.entry(who, action, f"job:{job_id}", reason=reason, runs=piece.runs, **more)
            await audit.record(connection, told)
            done = piece.done
        await remember(connection, wish, 200, [job_id], job["version"])
    return done


class _Piece(NamedTuple):
    """The result for one piece of a job's runs: how many were cancelled, and the last id of the piece (None: no more
    runs)."""

    runs: int
    upto: str | None
    done: Controlled


async def _cancel_piece(connection: Connection, job: Key, reason: str, stop_running: bool, after: str) -> _Piece:
    """Cancel the next runs of a job. The job must be locked and must not accept new runs."""
    upto: str | None = await connection.fetchval(SQL["last_of_piece"], *job, after, PIECE)
    await lock_limits(connection, [job])
    rows = await cancel_runs(
        connection, job, reason, stop_running=stop_running, after=after, upto=LAST_RUN if upto is None else upto
    )
    settled = await settle(connection, rows)
    return _Piece(len(rows), upto, Controlled(settled.hints, stops(rows)))


async def go_on_cancelling(db: Database) -> Controlled | None:
    """Cancel the next piece of a job that was cancelled with more runs than one transaction ends. Return None if there
    is no such job, or if other servers hold all of them."""
    if not await db.fetchval("engine", SQL["any_cancel"]):
        return None
    async with db.transaction("cancel") as connection:
        row = await connection.fetchrow(SQL["next_cancel"])
        if row is None:
            return None
        job = Key(row["tenant_id"], row["job_id"])
        await share_graph(connection, job.tenant_id)
        await connection.fetchrow(SQL["lock_job"], *job)
        piece = await _cancel_piece(connection, job, row["reason"], row["stop_running"], row["done_to"])
        if piece.upto is not None:
            await connection.execute(SQL["cancelled_to"], *job, piece.upto)
        else:
            await connection.execute(SQL["cancelled_all"], *job)
            await connection.execute(SQL["unhold"], *job)
        return piece.done


async def cancel_run(db: Database, who: Identity, run_id: str, reason: str, wish: Wish | None) -> Controlled:
    """staged | ready | waiting → cancelled; running → stopping until the worker proves it stopped. That of a mapped
    node is cancelled with all its elements, when the last of them has ended."""
    async with db.tenant(who.tenant_id, "control") as connection:
        await recall(connection, wish)
        run = await connection.fetchrow(SQL["run_job"], who.tenant_id, run_id)
        done = NOTHING
        if run is None:
            if await connection.fetchval(SQL["run_ended"], who.tenant_id, run_id) is None:
                raise NotFound("there is no such run")
        elif not run["stops"]:
            job = Key(who.tenant_id, run["job_id"])
            await share_graph(connection, who.tenant_id)
            await connection.fetchrow(SQL["lock_job"], *job)
            limits = gates(job, run["key_id"])
            await lock_limits(connection, limits)
            await hold_chain(connection, Key(who.tenant_id, run_id))
            if run["maps"]:
                rows = await noderuns.stop(connection, Part(who.tenant_id, run["workflow_run_id"], only=run_id), reason)
            else:
                rows = await cancel_runs(connection, job, reason, run_id=run_id)
            freed = await release(connection, limits) if any(map(_frees, rows)) else []
            await audit.record(connection, audit.entry(who, "run.cancel", f"run:{run_id}", reason=reason))
            await see_all(connection)
            settled = await settle(connection, rows)
            done = Controlled(hints(freed) + settled.hints, stops(rows))
        await remember(connection, wish, 200, [run_id])
    return done


def _frees(row: Row) -> bool:
    return bool(row["limited"] or row["overlap"])


async def _locked_job(connection: Connection, who: Identity, job_id: str, version: int | None) -> Row:
    """The job, held until the end of the transaction."""
    return on_its_own(seen(await connection.fetchrow(SQL["lock_job"], who.tenant_id, job_id), version))


async def _open_job(connection: Connection, who: Identity, job_id: str, verb: str, version: int | None) -> Row:
    return opened(await _locked_job(connection, who, job_id, version), verb)


async def _retract(
    connection: Connection, who: Identity, job_id: str, job: Row, trigger: Row | None
) -> datetime | None:
    """Un-make what nobody holds; answers where the cursor belongs now.

    What was due already is counted at once, and so is what stands before an occurrence that was claimed or has ended
    ahead of its instant: a cursor set back to it would stand before those, too, and they would be owed again."""
    key = Key(who.tenant_id, job_id)
    gone = await retract(connection, key)
    clock = await passed(connection, key, job["now"])
    over = [] if job["once"] else [at for at in gone if at <= clock["after"]]
    if over:
        missed = Missed("skipped_paused", len(over), over[0], over[-1])
        await note_missed(connection, counted(key, clock["now"], [missed]))
    cursor = trigger["next_fire_at"] if trigger is not None else None
    return min((at for at in (*gone[len(over) :][:1], cursor) if at is not None), default=None)
