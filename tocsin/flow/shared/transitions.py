"""The moves of a run that more than one step makes, each one guarded statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from tocsin.flow.shared import parcels
from tocsin.model.ids import instant_of, lowest_id, new_id
from tocsin.model.misfire import Missed as Stretch
from tocsin.model.packed import packed_in
from tocsin.store.db import Connection, Row, Sql, columns, sparse_columns

SQL = Sql(__file__)


class Family(NamedTuple):
    """How a new run belongs to others: to a workflow run, to parents it waits for, to children that wait for it."""

    logical_at: datetime | None = None  # the instant it stands for
    workflow_run_id: str | None = None
    pending: int | None = None  # how many it waits for
    doomed: int | None = None
    feeds: str | None = None  # who waits for it, as PostgreSQL writes an array …
    feeds_on: str | None = None  # … and for which end, a letter each
    parents: str | None = None
    map: str | None = None
    join_key: str | None = None
    chain: str | None = None
    backfill_id: str | None = None


_ALONE = Family()


class NewRun(NamedTuple):
    """What a run is made from; the rest comes from its job. Without `scheduled_for` it is due now, whenever the
    database thinks that is."""

    tenant_id: int
    id: str
    job_id: str
    trigger: str
    scheduled_for: datetime | None
    priority: int | None = None
    args: str | None = None
    origin_run_id: str | None = None
    ready_at: datetime | None = None  # not before this, though it stands for an earlier instant
    key_id: str | None = None  # its concurrency key, if that follows from its arguments
    family: Family = _ALONE


class Missed(NamedTuple):
    """Occurrences of a job that get no run."""

    tenant_id: int
    id: str
    job_id: str
    reason: str
    how_many: int
    first: datetime
    last: datetime


class Hint(NamedTuple):
    """Where something became claimable (or will at `ready_at`): what a dispatcher wants to know."""

    lane_id: int
    tenant_id: int
    ready_at: datetime
    order_key: datetime


class Key(NamedTuple):
    """A tenant's row: (tenant, id)."""

    tenant_id: int
    id: str


class Stop(NamedTuple):
    """A held run that its worker is to stop; `ended`: it has ended already, by its own token."""

    run_id: str
    worker_id: str
    fence: int
    ended: bool = False


# Below and above all ids of runs.
NO_RUN, LAST_RUN = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"


class Controlled(NamedTuple):
    """What a call changed beyond the rows themselves: what became claimable, and who is to be told to stop."""

    hints: list[Hint]
    stops: list[Stop]


NOTHING = Controlled([], [])


def gates(job: Key, key_id: str | None) -> list[Key]:
    """The limits that a run of a job may be under: the job's, and that of its concurrency key."""
    return [job] if key_id is None else [job, Key(job.tenant_id, key_id)]


def hints(rows: Iterable[Row]) -> list[Hint]:
    """The earliest place per (lane, tenant) among rows of runs that became staged or ready."""
    best: dict[tuple[int, int], Hint] = {}
    for row in rows:
        hint = Hint(row["lane_id"], row["tenant_id"], row["ready_at"], row["order_key"])
        known = best.get(hint[:2])
        if known is not None:
            hint = hint._replace(
                ready_at=min(hint.ready_at, known.ready_at), order_key=min(hint.order_key, known.order_key)
            )
        best[hint[:2]] = hint
    return list(best.values())


async def stage(connection: Connection, runs: Sequence[NewRun]) -> list[Row]:
    """→ staged | ready, or waiting for its parents. Rows that are not answered had no job to belong to, or exist
    already."""
    if not runs:
        return []
    if large := [run for run in runs if run.args is not None and run.args[:1] == '"']:
        found = ((run, packed_in(run.args)) for run in large)
        needed = ((run, packed.place) for run, packed in found if packed is not None and packed.place)
        uses = (parcels.Use(run.tenant_id, place, run.id, instant_of(run.id).date()) for run, place in needed)
        await parcels.use(connection, uses)
    *own, families = columns(runs, len(NewRun._fields))
    alone = all(family is _ALONE for family in families)
    related: list[list[Any]] = [[] for _ in Family._fields] if alone else sparse_columns(families)
    return await connection.fetch(SQL["stage"], *own, *related)  # type: ignore[no-any-return]


async def retract(connection: Connection, job: Key) -> list[datetime]:
    """staged | ready | waiting → never made: a job's occurrences that nobody holds. Lock the trigger first."""
    return await connection.fetchval(SQL["retract"], *job)  # type: ignore[no-any-return]


async def passed(connection: Connection, job: Key, began: datetime) -> Row:
    """`now`, and `after`: up to when occurrences are due, were claimed, or have ended (a run may be cancelled ahead of
    its instant). No cursor is set to before that, or they would be owed again. Comes after `retract`, in a transaction
    that began at `began`."""
    return await connection.fetchrow(SQL["passed"], *job, lowest_id(began))


def counted(job: Key, now: datetime, stretches: Iterable[Stretch]) -> list[Missed]:
    """Stretches of a job's timetable that get no run, each as one row made at `now`."""
    return [Missed(job.tenant_id, new_id(now), job.id, s.reason, s.count, s.first, s.last) for s in stretches]


async def note_missed(connection: Connection, missed: Sequence[Missed]) -> None:
    """A counted history row for occurrences that get no run."""
    if missed:
        await connection.execute(SQL["note_missed"], *columns(missed, 7))


async def lock_jobs(connection: Connection, keys: Iterable[Key]) -> None:
    """Take job rows in order, before any run of theirs."""
    if wanted := sorted(set(keys)):
        await connection.fetch(SQL["lock_jobs"], *columns(wanted, 2))


async def lock_limits(connection: Connection, keys: Iterable[Key]) -> None:
    """Take limit rows in order; who counts or changes what runs under a limit holds its row."""
    if wanted := sorted(set(keys)):
        await connection.fetch(SQL["lock_limits"], *columns(wanted, 2))


async def end_unheld(connection: Connection, runs: Sequence[Key], state: str, reason: str) -> list[Row]:
    """staged | ready | waiting → `state`, recorded in history. Lock one-time jobs first."""
    return await connection.fetch(SQL["end_unheld"], *columns(runs, 2), state, reason) if runs else []


async def cancel_runs(
    connection: Connection,
    job: Key,
    reason: str,
    *,
    run_id: str | None = None,
    before: str | None = None,
    backfill_id: str | None = None,
    stop_running: bool = True,
    after: str = NO_RUN,
    upto: str = LAST_RUN,
) -> list[Row]:
    """staged | ready | waiting → cancelled, running → stopping: all runs of a job, one run, the runs `before` the run
    that replaces them, the runs of a backfill, or those `after` one id and up to another. Lock the job and the limits
    first."""
    await connection.fetch(SQL["hold_runs"], *job, run_id, before, backfill_id, after, upto)
    return await connection.fetch(  # type: ignore[no-any-return]
        SQL["cancel_runs"], *job, run_id, before, stop_running, reason, backfill_id, after, upto
    )


def stops(rows: Iterable[Row]) -> list[Stop]:
    """The orders that follow from `cancel_runs`."""
    return [Stop(row["id"], row["worker_id"], row["fence"]) for row in rows if row["state"] == "stopping"]


async def release(connection: Connection, limits: Iterable[Key]) -> list[Row]:
    """waiting → ready where a job's or a key's limit has room again, a rate lets some through, or an earlier run is
    gone. Lock the limits first."""
    wanted = sorted(set(limits))
    return await connection.fetch(SQL["release"], *columns(wanted, 2)) if wanted else []


async def release_in(connection: Connection, limits: Iterable[Key], lanes: Iterable[int]) -> list[Row]:
    """Release waiting runs like `release`, but only in lanes with free workers. Runs released in other lanes do not
    count."""
    wanted = sorted(set(limits))
    return await connection.fetch(SQL["release_in"], *columns(wanted, 2), sorted(lanes)) if wanted else []
