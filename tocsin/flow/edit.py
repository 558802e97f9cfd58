"""edit: give a job another document. A new version; what runs, retries or was asked for by hand keeps its own.

Lock order: the job, its trigger, its limit, its runs by id.

Occurrences that nobody holds belong to the new version. If the schedule owes the same instants as before, the same
occurrences are made again, due or not, so that an edit loses none; otherwise the new schedule begins after now (or
after the last occurrence that was claimed), and what the old one still owed by then is counted, not run.

`max_concurrency`: whether a run is limited is copied into it when it is made, and stays. A limit that changes binds
limited runs at once (a lower one lets what runs come to its end, a higher one releases waiting runs). A limit that is
new binds the runs made from now on; those made before neither wait for it nor count. A limit that is taken away stays
as a row without a bound, for the limited runs that are left are claimed through it.

`depends_on`: whoever changes the tenant's graph holds that before any job. An edit knows only when it has read the job
whether it does: then it begins again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, Contention, PreconditionFailed
from tocsin.flow.shared import audit, calendars, circuits, dependencies, parcels, triggers
from tocsin.flow.shared.calendars import Known, Use
from tocsin.flow.shared.contents import Contents, uses_of
from tocsin.flow.shared.dependencies import Child, Parents
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.jobs import columns_of, name_taken, on_its_own, opened, seen, within_scope
from tocsin.flow.shared.joins import hold_graph
from tocsin.flow.shared.lanes import LaneBook, lane_key
from tocsin.flow.shared.nodes import Nodes
from tocsin.flow.shared.nodes import store as store_nodes
from tocsin.flow.shared.sealing import unknown_secrets
from tocsin.flow.shared.transitions import (
    Hint,
    Key,
    NewRun,
    counted,
    hints,
    lock_limits,
    note_missed,
    passed,
    release,
    retract,
    stage,
)
from tocsin.flow.shared.triggers import NOTHING_USED, Count
from tocsin.model.access import Identity
from tocsin.model.ids import new_id, new_ids
from tocsin.model.job import JobSpec, Schedule, check
from tocsin.model.misfire import Missed, still_owed
from tocsin.model.schedule import (
    check_calendar,
    check_schedule,
    describe,
    first_fire,
    hashes,
    owed_by,
    seed_of,
    spread,
    stands_for,
    timetable,
)
from tocsin.model.targets import WorkflowTarget
from tocsin.model.timetable import TICK
from tocsin.store.db import Connection, Database, Row, Sql, UniqueViolation
from tocsin.wire import decode_job_spec, encode

SQL = Sql(__file__)
T = TypeVar("T")
NO_BOUND = 2**31 - 1
_TRIES = 5
Change = Callable[[bytes], JobSpec]  # the present document → the one that is wanted


class Edited(NamedTuple):
    """Which job it was, the version it has now, and what became claimable."""

    job_id: str
    version: int
    hints: list[Hint]


class _Wanted(NamedTuple):
    """What an edit wants to do to the graph: give the job (other) parents, or only let it come by another timetable."""

    child: Child
    relinks: bool


class _Held(NamedTuple):
    """The graph, held for that: who the parents will be, and who they were."""

    wanted: _Wanted
    parents: Parents
    were: dict[str, str]


class _BeginAgain(Exception):
    """The graph is to be held first."""

    def __init__(self, wanted: _Wanted) -> None:
        self.wanted = wanted


class _Edit(NamedTuple):
    """An edit under way: the job as it was, locked, and as it will be."""

    connection: Connection
    who: Identity
    job: Row
    old: JobSpec
    new: JobSpec
    horizon: timedelta
    old_calendar: Known | None
    calendar: Known | None
    counted: Count | None = None  # once its trigger is held

    @property
    def key(self) -> Key:
        return Key(self.who.tenant_id, self.job["id"])

    @property
    def moves(self) -> bool:
        """Whether the schedule owes other instants than before."""
        if owed_by(self.old.schedule) != owed_by(self.new.schedule):
            return True
        if self.counted is not None and self.counted.parked is not None and self.most != _most(self.old):
            return True  # it had come to its end, and begins again
        return hashes(self.new.schedule) and self.old.name != self.new.name

    @property
    def most(self) -> int | None:
        """How many occurrences the schedule may have."""
        return _most(self.new)

    @property
    def seed(self) -> str:
        """What the job's `H` and jitter will follow from."""
        return seed_of(self.who.tenant, self.new.name, self.key.id)

    @property
    def old_seed(self) -> str:
        return seed_of(self.who.tenant, self.old.name, self.key.id)


async def edit(
    db: Database,
    lanes: LaneBook,
    who: Identity,
    job_id: str,
    change: Change,
    wish: Wish | None,
    version: int | None,
    horizon: timedelta,
    contents: Contents,
) -> Edited:
    """Change an open job; the same document again is no new version. Raises `Replay` for a known key."""

    async def turn(connection: Connection, held: _Held | None) -> Edited:
        row = await connection.fetchrow(SQL["lock_job"], who.tenant_id, job_id)
        job = opened(on_its_own(seen(row, version)), "changed")
        old = decode_job_spec(job["spec"])
        present = await contents.whole(who.tenant_id, old)
        new = change(job["spec"].encode() if present is old else encode(present))
        done = await _change(connection, lanes, who, job, old, new, db.clock.now(), horizon, contents, held)
        await remember(connection, wish, 200, [job_id], done.version)
        return done

    return await _in_turn(db, who, wish, turn)


async def replace_named(
    db: Database,
    lanes: LaneBook,
    who: Identity,
    name: str,
    spec: JobSpec,
    wish: Wish | None,
    version: int | None,
    horizon: timedelta,
    contents: Contents,
    nodes: Nodes | None = None,
) -> Edited | None:
    """The same for the open job of a name; None if there is none. With `nodes` it is a workflow, and is made of these.
    Raises `Replay` for a known key."""

    async def turn(connection: Connection, held: _Held | None) -> Edited | None:
        job = await connection.fetchrow(SQL["lock_named"], who.tenant_id, name)
        if version is not None and (job is None or job["version"] != version):
            raise PreconditionFailed(f"there is no job {name!r} at version {version}")
        if job is None:
            return None
        old = decode_job_spec(on_its_own(job)["spec"])
        if (nodes is not None) is not isinstance(old.target, WorkflowTarget):
            kind = "a job" if nodes is not None else "a workflow"
            raise Conflict(f"{name!r} is the name of {kind}", code="name_taken")
        done = await _change(connection, lanes, who, job, old, spec, db.clock.now(), horizon, contents, held)
        if nodes is not None and done.version != job["version"]:
            await store_nodes(connection, who, job["id"], nodes, paused=job["state"] == "paused")
        await remember(connection, wish, 200, [job["id"]], done.version)
        return done

    return await _in_turn(db, who, wish, turn)


async def _in_turn(
    db: Database, who: Identity, wish: Wish | None, turn: Callable[[Connection, _Held | None], Awaitable[T]]
) -> T:
    """A transaction that edits; if it turns out to concern the graph, another one that holds it from the beginning."""
    wanted: _Wanted | None = None
    for _ in range(_TRIES):
        try:
            async with db.tenant(who.tenant_id, "edit") as connection:
                await recall(connection, wish)
                return await turn(connection, None if wanted is None else await _hold(connection, who, wanted))
        except _BeginAgain as again:
            wanted = again.wanted
    raise Contention("the job was changed by others all the while; try again")


async def _hold(connection: Connection, who: Identity, wanted: _Wanted) -> _Held:
    await hold_graph(connection, who.tenant_id)
    if not wanted.relinks:
        return _Held(wanted, {}, {})
    were = await dependencies.parents_of(connection, who.tenant_id, wanted.child.id)
    parents = await dependencies.hold(connection, who, [wanted.child], also=[wanted.child.id, *were])
    return _Held(wanted, parents, were)


async def _change(
    connection: Connection,
    lanes: LaneBook,
    who: Identity,
    job: Row,
    old: JobSpec,
    new: JobSpec,
    now: datetime,
    horizon: timedelta,
    contents: Contents,
    held: _Held | None,
) -> Edited:
    new = await contents.whole(who.tenant_id, new)
    # A job becomes no workflow, and a workflow is changed by a document that was checked as one.
    check(new, of_workflow=isinstance(old.target, WorkflowTarget) and isinstance(new.target, WorkflowTarget))
    within_scope(who, new, old.name)
    new = await contents.keep(who.tenant_id, new, old)
    if new.schedule is not None and new.schedule != old.schedule:
        check_schedule(new.schedule, now)  # one that stays may name a time that is past by now
    if new.secrets != old.secrets:
        for problem in (await unknown_secrets(connection, {0: (who.tenant_id, new.secrets)})).values():
            raise problem
    by = [await calendars.named_by(connection, who.tenant_id, spec.schedule) for spec in (old, new)]
    this = _Edit(connection, who, job, old, new, horizon, by[0], by[1])
    if this.moves and new.schedule is not None and this.calendar is not None:
        check_calendar(new.schedule, this.calendar.calendar, now, this.seed)
    text = encode(this.new).decode()
    # Both as if read from the database: the default 0 of a number is read as 0.0, which is another text.
    again = encode(decode_job_spec(text)).decode()
    wanted = await _wanted(this)
    if await connection.fetchval(SQL["same"], encode(this.old).decode(), again) and wanted is None:
        return Edited(job["id"], job["version"], [])
    if wanted is not None:
        await _link(this, wanted, held, now)
    lane = lane_key(this.new)
    lane_of = await lanes.intern({lane: who.tenant_id})
    refusal = lanes.refusal("pool", lane, who.tenant_id) if new.pool != old.pool or lane not in lane_of else None
    if refusal is not None:
        raise refusal
    trigger = await triggers.lock(connection, this.key)
    await lock_limits(connection, [this.key])
    gone = await retract(connection, this.key)
    this = this._replace(counted=(await triggers.read_counts(connection, [this.key])).get(this.key))
    clock = await passed(connection, this.key, now)
    if this.moves:
        await _count_dropped(this, trigger, gone, clock["now"])
    version = await _store(this, text, lane_of[lane], clock)
    await parcels.use(connection, uses_of(*this.key, new))
    if old.circuit_name != new.circuit_name:
        await circuits.use(connection, [circuits.use_of(this.key, new.circuit_name)])
    if old.sensitive is not new.sensitive:
        await connection.execute(SQL["set_sensitive"], *this.key, new.sensitive is True)
    if this.moves:
        await _use(this)
    woken = await _limit(this)
    making = _move(this, trigger, clock) if this.moves else _make_again(this, trigger, gone, clock["now"])
    woken += hints(await making)
    entry = audit.entry(who, "job.edit", f"job:{job['id']}", version=version)
    await audit.record(connection, entry.changing(job["spec"], text))
    return Edited(job["id"], version, woken)


async def _wanted(this: _Edit) -> _Wanted | None:
    """What this does to the graph; most edits do nothing to it."""
    child = Child(this.key.id, this.new.parents)
    relinks = this.old.depends_on != this.new.depends_on
    if this.new.depends_on and not relinks:
        # A parent that was ended and made again, say, is another job under the same name.
        relinks = await dependencies.drifted(this.connection, this.who, child)
    return _Wanted(child, relinks) if relinks or (this.job["joins"] and this.moves) else None


async def _link(this: _Edit, wanted: _Wanted, held: _Held | None, now: datetime) -> None:
    """Change the graph, which must be held for it."""
    if held is None or held.wanted != wanted:
        raise _BeginAgain(wanted)
    if wanted.relinks:
        await dependencies.refuse_awaited(this.connection, *this.key)
    changed = {this.key.id: dependencies.member(this.who, this.key.id, this.new.name, this.new.schedule, now)}
    children = [wanted.child] if wanted.relinks else []
    links = await dependencies.check(this.connection, this.who, children, held.parents, changed)
    await dependencies.keep(this.connection, this.key.tenant_id, links, held.were)


async def _store(this: _Edit, text: str, lane_id: int, clock: Row) -> int:
    spec, connection = this.new, this.connection
    owed = (_owed_until(this, clock["now"]), clock["after"]) if this.moves else (None, None)
    await connection.execute(SQL["keep_version"], *this.key, *owed)
    try:
        return await connection.fetchval(  # type: ignore[no-any-return]
            SQL["set_job"],
            *this.key,
            text,
            spec.name,
            lane_id,
            *columns_of(spec, this.key.tenant_id),
            clock["now"] if _anchor(this.old.schedule) != _anchor(spec.schedule) else None,
            None if spec.schedule is None else encode(spec.schedule).decode(),
        )
    except UniqueViolation as error:
        raise name_taken(spec) from error


def _owed_until(this: _Edit, now: datetime) -> datetime:
    """Up to when the old schedule owed: one that has had its runs owed nothing behind them."""
    parked = None if this.counted is None else this.counted.parked
    return now if parked is None else min(now, parked - TICK)


async def _use(this: _Edit) -> None:
    """Write down which calendar the job goes by from now on."""
    if this.calendar is not None and this.new.schedule is not None:
        name = this.new.schedule.calendar or ""
        await calendars.use(this.connection, [Use(*this.key, name, this.calendar.version)])
    elif this.old_calendar is not None:
        await calendars.leave(this.connection, *this.key)


async def _limit(this: _Edit) -> list[Hint]:
    """Set the job's limit, under its lock; what it and its key have room for now becomes claimable."""
    was, is_ = ((spec.max_concurrency, spec.concurrency_key, spec.rate_limit) for spec in (this.old, this.new))
    if was == is_:
        return []
    limit = this.new.max_concurrency
    await this.connection.execute(SQL["set_limit"], *this.key, NO_BOUND if limit is None else limit)
    return hints(await release(this.connection, [this.key]))


async def _make_again(this: _Edit, trigger: Row | None, gone: list[datetime], now: datetime) -> list[Row]:
    """The same occurrences for the new version, as many of them as it may have; the cursor stays, or goes back to the
    first that is left."""
    left = len(gone) if this.most is None else (this.counted or NOTHING_USED).left(this.most)
    again, rest = gone[:left], gone[left:]
    if trigger is not None and (this.most is not None or this.counted is not None):
        parked = None if this.counted is None else this.counted.parked
        cursor = rest[0] if rest else trigger["next_fire_at"] or trigger["held_at"] or parked
        await _set_trigger(this, trigger, cursor, len(again))
    due = [at for at in again if at <= now]
    ids = new_ids(now, len(due)) + [new_id(at) for at in again[len(due) :]]
    later = spread(this.new.schedule, this.seed)
    runs = [
        NewRun(this.key.tenant_id, id_, this.key.id, "schedule", at, ready_at=at + later)
        for id_, at in zip(ids, again, strict=True)
    ]
    return await stage(this.connection, runs)


async def _move(this: _Edit, trigger: Row | None, clock: Row) -> list[Row]:
    """Let the new schedule begin; a paused job's is held where it begins."""
    spec, now = this.new, clock["now"]
    await this.connection.execute(SQL["no_longer_once"], *this.key)
    anchor = now if _anchor(this.old.schedule) != _anchor(spec.schedule) else this.job["anchor"]
    if spec.once:
        first = first_fire(spec.schedule, now, anchor, this.seed)
        if this.job["state"] == "active" and first is not None and first <= now + this.horizon:
            at = stands_for(spec.schedule, anchor) or first
            await _set_trigger(this, trigger, None)
            return await stage(
                this.connection, [NewRun(this.key.tenant_id, new_id(first), this.key.id, "schedule", at)]
            )
    else:
        table = timetable(spec.schedule, anchor, this.seed, this.calendar and this.calendar.calendar)
        first = table.next_after(clock["after"])
    await _set_trigger(this, trigger, first)
    return []


async def _set_trigger(this: _Edit, trigger: Row | None, at: datetime | None, places: int = 0) -> None:
    at = await triggers.settle(this.connection, this.key, this.most, this.counted, places, at)
    if trigger is not None or at is not None:
        parked = None if this.counted is None else this.counted.parked
        unplanned_since = parked if at == parked else None
        await triggers.put(this.connection, this.key, at, this.job["state"] == "paused", unplanned_since)


async def _count_dropped(this: _Edit, trigger: Row | None, gone: list[datetime], now: datetime) -> None:
    """What the old schedule owed by now and nobody took gets no run any more, and a row that says so."""
    if this.old.once:
        return  # it is put off, not dropped
    due = [at for at in gone if at <= now]
    missed = [Missed("cancelled", len(due), due[0], due[-1])] if due else []
    if trigger is not None:
        by = this.old_calendar and this.old_calendar.calendar
        table = timetable(this.old.schedule, this.job["anchor"], this.old_seed, by)
        missed += still_owed(table, trigger["next_fire_at"], trigger["held_at"], now)
    await note_missed(this.connection, counted(this.key, now, missed))


def _most(spec: JobSpec) -> int | None:
    return None if spec.schedule is None else spec.schedule.max_runs


def _anchor(schedule: Schedule | None) -> object:
    """All of a schedule that, changed, makes it count from now; the rest leaves it counting from where it did."""
    if schedule is None:
        return None
    # "tomorrow at noon" is another instant in another zone, and in the zone it was in it may be past.
    said = schedule.text and (schedule.text, schedule.timezone)
    return schedule.kind, schedule.every, schedule.delay, schedule.starting_at, said


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def versions(db: Database, who: Identity, job_id: str, before: int | None, limit: int) -> list[dict[str, Any]]:
    """A job's documents, newest first; `replaced_at` is null for the present one."""
    async with db.tenant(who.tenant_id, "edit") as connection:
        rows = await connection.fetch(SQL["versions"], who.tenant_id, job_id, before, limit)
    return [
        {
            "version": row["version"],
            "spec": _document(who, job_id, row["spec"]),
            "replaced_at": row["replaced_at"] and iso(row["replaced_at"]),
        }
        for row in rows
    ]


async def replaced(db: Database, who: Identity, ids: Sequence[str], version: int) -> dict[str, dict[str, Any]]:
    """What these jobs were at `version`, of those that are not any more: what the replay of a call answers."""
    async with db.tenant(who.tenant_id, "edit") as connection:
        rows = await connection.fetch(SQL["replaced"], who.tenant_id, list(ids), version)
    return {row["id"]: _document(who, row["id"], row["spec"]) | {"version": version} for row in rows}


def _document(who: Identity, job_id: str, text: str) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(text)
    if document.get("schedule") is not None:
        spec = decode_job_spec(text)
        document["schedule"]["description"] = describe(spec.schedule, seed_of(who.tenant, spec.name, job_id))
    return document
