"""The whole state of a small world, read in one statement: what a step had before it and what it left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import asyncpg

from tocsin.model.job import JobSpec
from tocsin.wire import decode_job_spec

HELD = ("running", "stopping")
UNHELD = ("staged", "ready", "waiting")


@lru_cache(maxsize=4096)
def _spec(text: str) -> JobSpec:
    return decode_job_spec(text)


@dataclass(slots=True)
class Run:
    """A live run. Its id is empty while only the reference has made it, and so is its exact place."""

    id: str
    job: str
    version: int
    state: str
    trigger: str
    priority: int
    scheduled_for: datetime
    ready_at: datetime
    order_key: datetime
    deadline_at: datetime | None
    attempt: int
    failures: int
    losses: int
    max_attempts: int
    fence: int
    claim_id: int | None
    worker: str | None
    blocked_by: str | None
    blocked_key: str | None
    stop_reason: str | None
    overlap: str | None
    limited: bool
    once: bool
    origin: str | None
    args: str | None
    key: str | None


@dataclass(slots=True)
class Limit:
    """The row of a job's or a concurrency key's limit, and of its rate."""

    max: int
    tat: datetime | None


@dataclass(slots=True)
class Job:
    """A job with its cursor and its hold. `specs` holds the documents of all versions."""

    id: str
    state: str
    version: int
    anchor: datetime
    cursor: datetime | None
    held_at: datetime | None
    on_hold: bool
    ended_at: datetime | None
    text: str

    @property
    def spec(self) -> JobSpec:
        return _spec(self.text)

    @property
    def open(self) -> bool:
        return self.state in ("active", "paused")

    @property
    def step(self) -> timedelta | None:
        """The distance of its occurrences, if it has any but one."""
        schedule = self.spec.schedule
        return None if schedule is None or schedule.every is None else schedule.every.delta


@dataclass(slots=True, frozen=True)
class Ended:
    """A row of history."""

    run: str
    attempt: int
    job: str
    version: int
    final: bool
    state: str
    outcome: str | None
    reason: str | None
    count: int
    fence: int
    trigger: str
    priority: int
    failures: int
    losses: int
    first_for: datetime | None
    scheduled_for: datetime
    worker: str | None
    origin: str | None
    args: str | None


@dataclass(slots=True)
class Worker:
    id: str
    state: str
    lease_until: datetime
    suspect: str | None = None


class Replaced(NamedTuple):
    """A version that an edit replaced: where its schedule counted from, up to when it owed, after when the next did."""

    version: int
    anchor: datetime
    owed_until: datetime | None
    successor_after: datetime | None
    text: str


@dataclass(slots=True)
class Book:
    """All tables that the promises speak of. `now` is the clock's time when it was read."""

    now: datetime
    runs: dict[str, Run] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    history: dict[tuple[str, int], Ended] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    workers: dict[str, Worker] = field(default_factory=dict)
    audit: Counter[tuple[str, str]] = field(default_factory=Counter)
    specs: dict[tuple[str, int], str] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    limits: dict[str, Limit] = field(default_factory=dict)
    # The planner's records: its last turn, the outages, and the jobs whose cursors owe more than their piece.
    turned_at: datetime | None = None
    outages: list[tuple[datetime, datetime]] = field(default_factory=list)
    kept_until: dict[str, datetime] = field(default_factory=dict)
    # From when to when each worker lived, and the worker that vouches for the lane.
    lives: dict[str, tuple[datetime, datetime]] = field(default_factory=dict)
    voucher: str | None = None
    replaced: dict[str, list[Replaced]] = field(default_factory=dict)
    new_runs: list[Run] = field(default_factory=list)
    new_rows: list[Ended] = field(default_factory=list)

    def copy(self) -> Book:
        return Book(
            self.now,
            {k: replace(run) for k, run in self.runs.items()},
            {k: replace(job) for k, job in self.jobs.items()},
            dict(self.history),
            set(self.dead),
            {k: replace(worker) for k, worker in self.workers.items()},
            Counter(self.audit),
            dict(self.specs),
            set(self.keys),
            {k: replace(limit) for k, limit in self.limits.items()},
            self.turned_at,
            self.outages,
            self.kept_until,
            self.lives,
            self.voucher,
            self.replaced,
        )

    def runs_of(self, job_id: str) -> list[Run]:
        return [run for run in self.runs.values() if run.job == job_id]

    def running(self, key: str) -> int:
        """How many run under a job's or a key's limit."""
        return sum(r.state in HELD and (r.key == key or (r.limited and r.job == key)) for r in self.runs.values())

    def spec_of(self, run: Run) -> JobSpec:
        """The document of the version that a run was made from."""
        return _spec(self.specs[run.job, run.version])

    def has_ended(self, run_id: str) -> bool:
        return any(row.run == run_id and row.final for row in self.history.values())


def differences(want: Book, got: Book) -> Iterator[str]:
    """Where the two differ. What the reference has made has no id yet and is compared by what it is."""
    yield from _compare("run", want.runs, {k: v for k, v in got.runs.items() if k in want.runs})
    made = [run for key, run in got.runs.items() if key not in want.runs]
    yield from _compare_new("run", want.new_runs, made, "id", "order_key")
    yield from _compare("job", want.jobs, got.jobs)
    yield from _compare("history", want.history, {k: v for k, v in got.history.items() if k in want.history})
    rows = [row for key, row in got.history.items() if key not in want.history]
    yield from _compare_new("history", want.new_rows, rows, "run")
    yield from _compare("worker", want.workers, got.workers)
    yield from _compare("limit", want.limits, got.limits)
    if want.dead != got.dead:
        yield f"dead letters: want {sorted(want.dead)}, got {sorted(got.dead)}"
    if want.keys != got.keys:
        yield f"idempotency keys: want {sorted(want.keys)}, got {sorted(got.keys)}"
    if want.audit != got.audit:
        yield f"audit: want {want.audit - got.audit} more, got {got.audit - want.audit} more"


def _compare(what: str, want: dict[Any, Any], got: dict[Any, Any]) -> Iterator[str]:
    for key in want.keys() | got.keys():
        if want.get(key) != got.get(key):
            yield f"{what} {key}: " + _unlike(want.get(key), got.get(key))


def _unlike(want: Any, got: Any) -> str:
    if want is None or got is None:
        return f"want {want}\n      got {got}"
    unlike = [f for f in want.__slots__ if getattr(want, f) != getattr(got, f)]
    return ", ".join(f"{f} want {getattr(want, f)} got {getattr(got, f)}" for f in unlike)


def _compare_new(what: str, want: list[Any], got: list[Any], *but: str) -> Iterator[str]:
    nothing = dict.fromkeys(but, "")
    wanted = Counter(astuple(replace(one, **nothing)) for one in want)
    found = Counter(astuple(replace(one, **nothing)) for one in got)
    for one in wanted - found:
        yield f"{what} that is not there: {one}"
    for one in found - wanted:
        yield f"{what} that nobody asked for: {one}"


_READ = """
select now(),
       array(select row(r.id::text, r.job_id::text, r.job_version, r.state, r.trigger, r.priority, r.scheduled_for,
                        r.ready_at, r.order_key, r.deadline_at, r.attempt, r.failures, r.losses, r.max_attempts,
                        r.fence, r.claim_id, r.worker_id::text, r.blocked_by, r.blocked_key::text, r.stop_reason,
                        r.overlap, r.limited, r.once, r.origin_run_id::text, r.args, r.key_id::text)
               from runs r order by r.id),
       array(select row(j.id::text, j.state, j.version, coalesce(j.anchored_at, j.created_at), t.next_fire_at,
                        t.held_at, h.job_id is not null, j.ended_at, j.spec)
               from jobs j
               left join triggers t on t.tenant_id = j.tenant_id and t.job_id = j.id
               left join holds h on h.tenant_id = j.tenant_id and h.job_id = j.id
              order by j.id),
       array(select row(h.run_id::text, h.attempt, h.job_id::text, h.job_version, h.final, h.state, h.outcome, h.reason,
                        h.count, h.fence, h.trigger, h.priority, h.failures, h.losses, h.first_for, h.scheduled_for,
                        h.worker_id::text, h.origin_run_id::text, h.args)
               from history h order by h.run_id, h.attempt),
       array(select run_id::text from dead_letters),
       array(select row(w.id::text, w.state, w.lease_until, w.suspect_id::text) from workers w),
       array(select row(a.action, a.target, count(*)) from audit a group by a.action, a.target),
       array(select row(v.job_id::text, v.version, v.anchor, v.owed_until, v.successor_after, v.spec::text)
               from job_versions v order by v.version),
       array(select i.key from idempotency i),
       array(select row(l.key::text, l.max, l.tat) from limits l),
       (select p.turned_at from planner p),
       array(select row(o.from_at, o.to_at) from outages o order by o.from_at),
       array(select row(t.job_id::text, t.kept_until) from triggers t where t.kept_until is not null),
       array(select row(w.id::text, w.registered_at, least(w.gone_at, w.lease_until)) from workers w),
       (select v.worker_id::text from lane_vouchers v)
"""


async def read(connection: asyncpg.Connection) -> Book:
    now, runs, jobs, history, dead, workers, audit, versions, keys, limits, *known = await connection.fetchrow(_READ)
    book = Book(now, dead=set(dead), keys=set(keys))
    book.turned_at, book.outages, book.kept_until = known[0], [tuple(row) for row in known[1]], dict(known[2])
    book.lives, book.voucher = {id_: (start, end) for id_, start, end in known[3]}, known[4]
    book.runs = {row[0]: Run(*row) for row in runs}
    book.jobs = {row[0]: Job(*row) for row in jobs}
    book.history = {(row[0], row[1]): Ended(*row) for row in history}
    book.workers = {row[0]: Worker(*row) for row in workers}
    book.limits = {key: Limit(*row) for key, *row in limits}
    book.audit = Counter({(action, target): count for action, target, count in audit})
    for job_id, *version in versions:
        book.replaced.setdefault(job_id, []).append(Replaced(*version))
    book.specs = {(job_id, v.version): v.text for job_id, all_of_it in book.replaced.items() for v in all_of_it}
    book.specs |= {(job.id, job.version): job.text for job in book.jobs.values()}
    return book
