"""What the API answers, as types: from them the schemas of the replies are made, and the tests hold replies to them.

A reply may have more fields than these, never less.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field

from tocsin.model import circuit
from tocsin.model.access import Role
from tocsin.model.calendars import Mode, Weekday
from tocsin.model.graph import On
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.scalars import Duration, Instant
from tocsin.wire import Policy, RunError

T = TypeVar("T")
Id = Annotated[str, Meta(description="UUIDv7", extra_json_schema={"format": "uuid"})]
JobState = Literal["active", "paused", "cancelled", "completed"]
FinalState = Literal["succeeded", "dead", "cancelled", "expired", "skipped"]
LiveState = Literal["staged", "ready", "waiting", "running", "stopping"]
RunState = LiveState | FinalState
Outcome = Literal["succeeded", "failed", "timeout", "lost", "cancelled"]
Trigger = Literal["schedule", "manual", "api", "dependency", "backfill", "retry", "redrive"]


class Reply(Struct, kw_only=True):
    pass


class Page(Reply, Generic[T]):
    """One page of a list, newest first; `next_cursor` is the next call's `cursor`, null on the last page. A page that
    is not the last one may be short or empty."""

    items: list[T]
    next_cursor: str | None


class FieldError(Reply):
    path: str
    code: str
    message: str


class Problem(Reply):
    """Why not (RFC 9457). `status` and `code` are stable; `detail` is for people and may change."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[FieldError] | None = None


class LastRun(Reply):
    id: Id
    state: FinalState
    finished_at: Instant


class JobStats(Reply):
    """What became of a job's last runs, 20 at most; durations of those that started."""

    ended: int
    succeeded: int
    dead: int
    mean_ms: float | None
    longest_ms: float | None


class JobSchedule(Schedule, kw_only=True, frozen=True, forbid_unknown_fields=False):
    """A schedule, what it means in plain words, and the release of tzdata it was computed by (none for UTC)."""

    description: str
    tzdata: str | None = None


class Fed(Reply):
    """A job that depends on this one, and how a run of this one must have ended for it."""

    job: Id
    name: str | None
    on: On


class Job(JobSpec, kw_only=True, frozen=True, forbid_unknown_fields=False):
    """The document as it was given, every default filled in, and what became of it. `feeds`: the jobs that depend
    on it, the first hundred of them."""

    schedule: JobSchedule | None = None
    id: Id
    tenant: str
    version: int
    state: JobState
    created_at: Instant
    updated_at: Instant
    next_run_at: Instant | None
    estimated_start_at: Instant | None
    last_run: LastRun | None
    stats: JobStats
    feeds: list[Fed]


class Jobs(Reply):
    """The new jobs, in the order they were given."""

    items: list[Job]


class SchedulePreview(Reply):
    """A schedule in plain words, its next instants, and what may surprise whoever wrote it."""

    description: str
    runs: list[Instant]
    warnings: list[str]


class Occurrence(Reply):
    """What became of an instant that a job owed, or, where `count` says so, of all it owed from one to another.

    `planned` has not started, `running` has an attempt, `ran` has ended. `state` is that of the run, `reason` why there
    is none. Missed for an `unknown` reason: it was owed, and there is no record of it."""

    status: Literal["ran", "running", "planned", "skipped", "coalesced", "missed"]
    from_: Instant = field(name="from")
    to: Instant
    count: int
    reason: str | None
    run_id: Id | None
    state: RunState | None


class NamedCalendar(Reply):
    """Days, in order, and what becomes of occurrences on them."""

    name: str
    version: int
    mode: Mode
    days: list[date]
    weekdays: list[Weekday]
    created_at: Instant
    updated_at: Instant


class NamedSecret(Reply):
    """A secret without its value, which is told to the workers that run its jobs and to nobody else."""

    name: str
    version: int
    created_at: Instant
    updated_at: Instant


class MasterKey(Reply):
    """A master key: whether this server has it, whether it is the one that seals, and what it wraps."""

    id: str
    known: bool
    seals: bool
    secrets: int
    data_keys: int


class MasterKeyList(Reply):
    items: list[MasterKey]


class Rotated(Reply):
    """How many keys were wrapped anew, and how many another master key still wraps."""

    rewrapped: int
    remaining: int


class CircuitCalls(Reply):
    """The last calls that a closed circuit counts."""

    calls: int
    failures: int


class NamedCircuit(Reply):
    """What jobs that call the same dependency share. `probes_at`: when canaries go, if it is open and was not opened by
    hand; `wave`: how many of them at once; `waiting`: runs that wait for it, counted up to 100,000."""

    name: str
    state: circuit.State
    since: Instant
    by_hand: bool
    probes_at: Instant | None
    waiting: int
    wave: int | None
    recent: CircuitCalls
    policy: circuit.CircuitPolicy
    created_at: Instant


class Version(Reply):
    """A job's document as it was; `replaced_at` is null for the present one."""

    version: int
    spec: dict[str, Any]
    replaced_at: Instant | None


class Run(Reply):
    """One occurrence of a job, or one asked for by hand."""

    id: Id
    job_id: Id
    job_name: str | None
    job_version: int | None
    state: RunState
    outcome: Outcome | None
    reason: str | None
    count: int | None
    blocked_by: str | None
    attempt: int
    failures: int
    losses: int
    max_attempts: int | None
    fence: int
    priority: int
    scheduled_for: Instant | None
    ready_at: Instant | None
    logical_at: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    duration_ms: float | None
    start_lag_ms: float | None
    worker: str | None
    progress: float | None
    exit_code: int | None
    error: RunError | None
    args: Any
    result: Any
    usage: Any
    tags: dict[str, str]
    trigger: Trigger
    origin_run_id: Id | None
    workflow_run_id: Id | None
    logs_url: str


class Attempt(Reply):
    """One try at a run. The one under way has no outcome yet. `reason` is `retry_budget` if the next one was put off
    because too much is retried."""

    attempt: int
    fence: int
    outcome: Outcome | None
    started_at: Instant | None
    finished_at: Instant | None
    duration_ms: float | None
    worker: str | None
    exit_code: int | None
    error: RunError | None
    result: Any
    usage: Any
    reason: str | None


class Blocker(Reply, omit_defaults=True):
    """One thing in a run's way; `code` is stable, `message` is for people. `runs`: some of those that it waits for.
    What does not apply is left out."""

    code: str
    message: str
    since: Instant | None = None
    until: Instant | None = None
    key: str | None = None
    runs: list[Id] | None = None


class Explanation(Reply):
    """Why a run has not started: all that stands in its way, in order, and when it may start, give or take the error.
    `summary` says the first of it, or what became of the run. Null where nobody can tell when."""

    run_id: Id
    state: RunState
    summary: str
    blockers: list[Blocker]
    estimated_start_at: Instant | None
    estimated_error_seconds: float | None


class MadeRun(Reply):
    id: Id


class MadeRuns(Reply):
    """The new runs, in the order they were asked for."""

    items: list[MadeRun]


class MadeRunBatch(MadeRuns):
    ids: list[Id]


class Redriven(MadeRuns):
    """The new runs, and how many letters the filter still names."""

    remaining: int


class Discarded(Reply):
    discarded: int
    remaining: int


FeedEventType = Literal["open", "reset", "end"]
JobEventType = Literal["job.created", "job.updated", "job.paused", "job.resumed", "job.cancelled", "job.completed"]
CircuitEventType = Literal["circuit.opened", "circuit.probing", "circuit.closed"]
RunEventType = Literal[
    "run.staged",
    "run.ready",
    "run.waiting",
    "run.running",
    "run.stopping",
    "run.retrying",
    "run.succeeded",
    "run.dead",
    "run.cancelled",
    "run.expired",
    "run.skipped",
]


class Event(Reply, omit_defaults=True):
    """What changed: enough to know what to read. What does not apply is left out."""

    at: Instant
    type: FeedEventType | JobEventType | CircuitEventType | RunEventType
    id: Id | None = None
    job_id: Id | None = None
    job_version: int | None = None
    name: str | None = None
    version: int | None = None
    state: RunState | JobState | circuit.State | None = None
    attempt: int | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    blocked_by: str | None = None


class DeadLetter(Reply):
    """A run that failed for good, kept until somebody redrives or discards it."""

    id: Id
    run_id: Id
    job_id: Id
    job_name: str | None
    job_version: int | None
    died_at: Instant
    error: RunError | None
    args: Any
    tags: dict[str, str]


class Amounts(Reply):
    """So much of each resource."""

    cpu: float
    memory_mb: int
    disk_mb: int
    gpus: int


class Holdings(Reply):
    """What a worker has, what of that its runs have, what is left, and what of it runs of the caller's tenant have."""

    total: Amounts
    used: Amounts
    free: Amounts
    yours: Amounts


class Worker(Reply):
    """A process that runs jobs. `running` counts the caller's tenant's runs (a platform key sees all)."""

    id: Id
    name: str
    pool: str
    state: Literal["live", "draining", "gone"]
    slots: int
    running: int
    resources: Holdings
    labels: dict[str, str]
    targets: list[str]
    functions: list[str]
    version: str
    lease_until: Instant
    registered_at: Instant
    gone_at: Instant | None


class Pool(Reply):
    """Where runs wait for workers. `depth` counts live runs by state, `due` those that could start: the tenant's own (a
    platform key sees all, and how many workers are wanted). After `worst_case_wait` nothing that comes later goes
    before a run of the lowest priority. `tenants`: those that may use it, null if all may; others see themselves."""

    name: str
    version: int
    policy: Policy
    head_start: Duration
    worst_case_wait: Duration
    paused_at: Instant | None
    tenants: list[str] | None
    depth: dict[str, int]
    due: int
    oldest_due_at: Instant | None
    lag_ms: float
    workers: int
    slots: int
    wanted_workers: int | None


class Completed(Reply):
    """How an attempt ended by its own word."""

    id: Id
    outcome: Literal["succeeded", "failed"]


class Scopes(Reply):
    """What a key is kept to; what is left out is not bound."""

    jobs: list[str] | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    pools: list[str] | UnsetType = UNSET
    tenants: list[str] | UnsetType = UNSET


class Key(Reply):
    """A key, without what opens the door."""

    id: Id
    role: Role
    name: str
    scopes: Scopes | None
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None
    last_used_at: Instant | None


class NewKeyReply(Key):
    """The only answer that ever shows the key (a repeat with the same Idempotency-Key does not)."""

    tenant: str
    key: str | None


class RotatedKey(NewKeyReply):
    """A key in the place of another, and until when that one stays good (a repeat does not say)."""

    replaces: Id | UnsetType = UNSET
    old_expires_at: Instant | UnsetType = UNSET


class RunsOf(Reply):
    """What became of the runs of one group. `success_rate` is of those that succeeded, died or expired; durations and
    start lags are of the attempts they ended with, right to 2.5 %."""

    key: str
    label: str | None
    runs: int
    succeeded: int
    dead: int
    cancelled: int
    expired: int
    skipped: int
    success_rate: float | None
    duration_p50_ms: float | None
    duration_p95_ms: float | None
    duration_p99_ms: float | None
    start_lag_p50_ms: float | None
    start_lag_p95_ms: float | None
    start_lag_p99_ms: float | None


class FailuresOf(Reply):
    """Attempts of one group that failed, ran out of time or were lost; of how many runs, and how many of those died."""

    key: str
    label: str | None
    failures: int
    runs: int
    dead: int
    last_at: Instant
    last_run_id: Id


class UtilisationOf(Reply):
    """How long attempts ran in one group, and what share that is of its slots' time. Null where nobody can tell: a
    tenant has no slots, and a worker that is gone is remembered for a week."""

    key: str
    label: str | None
    attempts: int
    busy_seconds: float
    capacity_seconds: float | None
    utilisation: float | None


class ReportOf(Reply, Generic[T]):
    """A report on the runs that were made from `from` on, before `to`. `complete`: false if there were more than are
    read for a report; then it is on the newest."""

    report: Literal["runs", "failures", "utilisation"]
    by: str
    from_: Instant = field(name="from")
    to: Instant
    complete: bool
    items: list[T]
