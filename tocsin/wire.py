"""The JSON (and msgpack) shapes of API v1, shared by server, worker and client.

Client bodies refuse unknown fields; worker-protocol bodies and all replies ignore them, so that versions can roll.
Instants are strings made by `clock.iso`.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tocsin.model.access import PATTERN, Role
from tocsin.model.backfill import DEFAULT_CONCURRENCY, DEFAULT_PRIORITY, Concurrency, Rerun
from tocsin.model.calendars import MOST_DAYS, Mode, Weekday
from tocsin.model.ical import LONGEST_TEXT
from tocsin.model.job import JobSpec, Name, RunRequest, Schedule
from tocsin.model.scalars import Duration, Instant, decode_scalar, encode_scalar
from tocsin.model.workflow import Node, WorkflowSpec

Slots = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
RunKey = tuple[str, int]  # (run_id, fence)


def encode(value: Any) -> bytes:
    """JSON bytes of any shape here."""
    return _json.encode(value)


def builtins(value: Any) -> Any:
    """A shape as plain dictionaries, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=encode_scalar)


_json = msgspec.json.Encoder(enc_hook=encode_scalar)
_msgpack = msgspec.msgpack.Encoder(enc_hook=encode_scalar)
encode_msgpack = _msgpack.encode

decode_job_spec = msgspec.json.Decoder(JobSpec, dec_hook=decode_scalar).decode
decode_run_request = msgspec.json.Decoder(RunRequest, dec_hook=decode_scalar).decode


class _Body(Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class RunBatch(_Body):
    runs: Annotated[list[RunRequest], Meta(min_length=1, max_length=5000)]


decode_run_batch = msgspec.json.Decoder(RunBatch, dec_hook=decode_scalar).decode


class JobBatch(_Body):
    """Jobs to be stored all or none."""

    jobs: Annotated[list[JobSpec], Meta(min_length=1, max_length=1000)]


class RawJobBatch(_Body):
    """The same before anybody looked into the jobs: to tell which one is wrong."""

    jobs: list[msgspec.Raw]


decode_job_batch = msgspec.json.Decoder(JobBatch, dec_hook=decode_scalar).decode
decode_raw_job_batch = msgspec.json.Decoder(RawJobBatch).decode


class RawNodes(Struct):
    """A workflow's jobs before anybody looked into them: to tell which one is wrong."""

    jobs: dict[str, msgspec.Raw]


decode_workflow_spec = msgspec.json.Decoder(WorkflowSpec, dec_hook=decode_scalar).decode
decode_raw_nodes = msgspec.json.Decoder(RawNodes).decode
decode_node = msgspec.json.Decoder(Node, dec_hook=decode_scalar).decode


class PreviewRequest(_Body):
    """A schedule to look at; `name`: of the job that will have it, for `H` and jitter follow from it."""

    schedule: Schedule
    count: Annotated[int, Meta(ge=1, le=100)] = 10
    after: Instant | None = None
    name: Name | None = None


class BackfillRequest(_Body):
    """A past range to be filled: what the job's schedule owes from one instant on and before another. `schedule`:
    instead of the job's, which may have none. `rerun`: all of it, what never ran (`missing`), or what never succeeded
    (`failed`). `args` reach every run."""

    from_: Instant = msgspec.field(name="from")
    to: Instant
    max_concurrency: Concurrency = DEFAULT_CONCURRENCY
    priority: Annotated[int, Meta(ge=0, le=1000)] = DEFAULT_PRIORITY
    args: dict[str, Any] | None = None
    schedule: Schedule | None = None
    rerun: Rerun = "all"
    dry_run: bool = False


decode_backfill = msgspec.json.Decoder(BackfillRequest, dec_hook=decode_scalar).decode


class CalendarRequest(_Body):
    """A calendar's days by date, by weekday, and from the events of an iCalendar file; `mode` says what becomes of
    occurrences on them: left out, moved to the next day that is none of them, or, `only`, the others left out."""

    mode: Mode = "skip"
    days: Annotated[list[date], Meta(max_length=MOST_DAYS)] = []
    weekdays: Annotated[list[Weekday], Meta(max_length=7)] = []
    ical: Annotated[str, Meta(max_length=LONGEST_TEXT)] | None = None


class Nothing(_Body):
    """A body that says nothing, yet."""


class Reason(_Body):
    """Why somebody pauses, resumes or cancels."""

    reason: Annotated[str, Meta(max_length=1024)] = ""
    running: Literal["stop", "leave"] = "stop"


class Why(_Body):
    """Why somebody pauses or resumes a pool, opens or closes a circuit."""

    reason: Annotated[str, Meta(max_length=1024)] = ""


class Failure(_Body):
    """What went wrong; `class` is what `retry_on` and `give_up_on` name."""

    class_: Annotated[str, Meta(min_length=1, max_length=256)] = msgspec.field(name="class")
    message: Annotated[str, Meta(max_length=8192)] = ""


class Completion(_Body):
    """How an attempt ended, told with its token."""

    outcome: Literal["succeeded", "failed"] = "succeeded"
    result: Any = None
    error: Failure | None = None


class LetterFilter(_Body):
    """Dead letters by what they have in common; an empty filter means all of them."""

    job: str | None = None
    error_class: Annotated[str, Meta(max_length=256)] | None = None
    tag: dict[str, str] | None = None


class Letters(_Body):
    """Which dead letters to redrive or discard: either `ids`, or the oldest that a `filter` names (5,000 a call).
    `rate` spreads the new runs over time."""

    ids: Annotated[list[str], Meta(min_length=1, max_length=5000)] | None = None
    filter: LetterFilter | None = None
    rate: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,5}/(s|min|h)(?!\n)$")] | None = None


Policy = Literal["fair", "priority", "fifo"]


# Without control, bidi and zero-width characters: what people read in lists and the audit.
_LABEL = r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]*(?!\n)$"
_Slug = Annotated[str, Meta(max_length=63, pattern=_LABEL)]


class PoolPatch(_Body):
    """What to change of a pool: who goes first where several could, how far one point of priority moves a run forward,
    and which tenants alone may use it (null: all)."""

    policy: Policy | None = None
    head_start: Duration | None = None
    tenants: Annotated[list[_Slug], Meta(max_length=1000)] | UnsetType | None = UNSET


decode_pool_patch = msgspec.json.Decoder(PoolPatch, dec_hook=decode_scalar).decode


Weight = Annotated[int, Meta(ge=1, le=1000)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]


class QuotaPatch(_Body):
    """What a tenant may have at most. What is left out stays as it is; null takes a quota away."""

    max_jobs: _Count | UnsetType | None = UNSET
    max_queued: _Count | UnsetType | None = UNSET
    max_running: _Count | UnsetType | None = UNSET
    submit_rate: Annotated[str, Meta(max_length=32)] | UnsetType | None = UNSET
    log_bytes_per_day: Annotated[int, Meta(ge=0, lt=2**62)] | UnsetType | None = UNSET


class NewTenant(_Body):
    slug: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}(?!\n)$")]
    weight: Weight = 1
    quotas: QuotaPatch | UnsetType = UNSET


_Days = Annotated[int, Meta(ge=1, le=36_500)]


class RetentionPatch(_Body):
    """How long a tenant's archived runs, its logs and its archived audit are kept after they were made, null for as
    long as the server keeps those of others; with `legal_hold` nothing goes until it is lifted. `hot_days`: how long
    runs and audit are in the database before they are archived, null as those of others. `preset`: `compliance` stands
    for seven years of each kind that is not named beside it."""

    runs_days: _Days | UnsetType | None = UNSET
    legal_hold: bool | UnsetType = UNSET
    hot_days: Annotated[int, Meta(ge=2, le=3650)] | UnsetType | None = UNSET
    logs_days: _Days | UnsetType | None = UNSET
    audit_days: _Days | UnsetType | None = UNSET
    preset: Literal["compliance"] | UnsetType = UNSET


class TenantPatch(_Body):
    """What to change of a tenant."""

    weight: Weight | UnsetType = UNSET
    quotas: QuotaPatch | UnsetType = UNSET
    http_allow: Annotated[list[Annotated[str, Meta(max_length=253)]], Meta(max_length=200)] | UnsetType = UNSET
    retention: RetentionPatch | UnsetType = UNSET


class Confirmation(_Body):
    """That a tenant is to be erased: its slug once more."""

    confirm: Annotated[str, Meta(max_length=63)]


_Pattern = Annotated[str, Meta(pattern=PATTERN)]
_ScopedTag = Annotated[str, Meta(max_length=400, pattern=r"^[^:\x00]+:[^\x00]*$")]


class KeyScopes(_Body):
    """What a key is kept to. `jobs`: those whose name fits one of these patterns (`*` stands for any characters);
    `tags`: those with one of these, written `key:value`. Of a worker key, `pools` and `tenants` that it may serve."""

    jobs: Annotated[list[_Pattern], Meta(min_length=1, max_length=50)] | UnsetType = UNSET
    tags: Annotated[list[_ScopedTag], Meta(min_length=1, max_length=50)] | UnsetType = UNSET
    pools: Annotated[list[Name], Meta(min_length=1, max_length=200)] | UnsetType = UNSET
    tenants: Annotated[list[_Slug], Meta(min_length=1, max_length=1000)] | UnsetType = UNSET


class NewKey(_Body):
    """`expires_at`, or `expires_in` from now: when it ends by itself; never, unless one of them is said."""

    role: Role
    name: Annotated[str, Meta(max_length=128, pattern=_LABEL)] = ""
    scopes: KeyScopes | UnsetType = UNSET
    expires_at: Instant | None = None
    expires_in: Duration | None = None


class Rotation(_Body):
    """For how long the old key stays good beside the new one; a day unless it is said."""

    overlap: Duration | UnsetType = UNSET


decode_new_key = msgspec.json.Decoder(NewKey, dec_hook=decode_scalar).decode
decode_rotation = msgspec.json.Decoder(Rotation, dec_hook=decode_scalar).decode


class NewSecret(_Body):
    """A secret's value."""

    value: Annotated[str, Meta(min_length=4, max_length=65_536)]


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Page(Struct, kw_only=True):
    items: list[Any]
    next_cursor: str | None = None


class RunError(Struct, kw_only=True):
    """What went wrong in an attempt; `class` is what `retry_on` and `give_up_on` name."""

    class_: str = msgspec.field(name="class")
    message: str = ""


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RunEvent(Struct, omit_defaults=True):
    """A run was made, moved or ended. What does not apply is left out."""

    at: str
    type: str
    id: str
    job_id: str
    job_version: int
    state: str
    attempt: int
    outcome: str | None = None
    reason: str | None = None
    blocked_by: str | None = None


class JobEvent(Struct, omit_defaults=True):
    """A job was created, changed or ended."""

    at: str
    type: str
    id: str
    name: str | None
    version: int
    state: str


class CircuitEvent(Struct, omit_defaults=True):
    """A circuit opened, closed, or is probed."""

    at: str
    type: str
    id: str
    name: str
    state: str


class FeedEvent(Struct, omit_defaults=True):
    """About the stream itself: where it begins, that something was missed, why it ends."""

    at: str
    type: Literal["open", "reset", "end"]
    reason: str | None = None


# ── worker protocol ──────────────────────────────────────────────────────────────────────────────────────────────

# Which protocol a worker speaks stands in a header of each of its calls, so that it can be told even by a server that
# could not read its bodies. Fields come and go without another number; it rises when both sides must know of a change,
# and a server goes on to speak the one before, so that servers can be upgraded first and workers after them.
PROTOCOL_HEADER = "Tocsin-Protocol"
PROTOCOL, OLDEST_PROTOCOL = 1, 1


class Register(Struct, kw_only=True):
    """`formerly`: the id under which this very process was lost. It did not go down, so no run took it down."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    pool: str = "default"
    slots: Slots = 1
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    targets: list[str] = []
    functions: list[str] = []
    version: str = ""
    formerly: str = ""


class Registered(Struct, kw_only=True):
    worker_id: str
    lease_seconds: float
    heartbeat_seconds: float


class Claim(Struct, kw_only=True):
    """`shared_specs`: the worker reads each job's document once per answer, from `specs`, not once per run.

    `ahead`: it takes runs before their `start_at`, too. `held` slots have such a run, which gives way to something due;
    that holds for `held_for` seconds, until the first of them starts.

    `number` rises with each request, so that one that comes twice, or late, is known for what it is. `heard`: the
    latest `now` of any answer before this was sent, and `marked` the highest `mark`; what was claimed before both and
    is not known by `last_claim` was lost. A clock may be set back, the number of a claim never is.
    `listen`: without a free slot, too, wait for orders. `payload_urls`: it fetches large arguments itself, from
    `args_url`; they come with the run otherwise. `content_urls`, with `shared_specs`: the same for what a job itself
    says, from `contents`."""

    slots: Slots
    payload_urls: bool = False
    content_urls: bool = False
    number: int = 0
    heard: str = ""
    marked: int | None = None
    listen: bool = False
    ahead: bool = False
    held: Slots = 0
    held_for: float = 0.0
    resources: dict[str, float] = {}
    last_claim: int = 0
    wait: float = 20.0
    shared_specs: bool = False


class Parent(Struct, kw_only=True, omit_defaults=True):
    """How a run ended that another one waited for."""

    run_id: str
    state: str
    result: Any = None


class ClaimedRun(Struct, kw_only=True, omit_defaults=True):
    """One run, handed over. `spec` is the job's document; with `shared_specs` it is `specs[spec_ref]` instead.
    `http_allow`, of http runs: the hosts and networks within our own walls that their tenant may call.
    `args_url`: the path on this server where the arguments are fetched, as JSON, within the next minutes.
    `sensitive`: the arguments are to be told to nobody. `parents`: the runs that it waited for, by the names that its
    job knows them by; or `parents_url`, the path on this server where the run's token fetches the same, as JSON.
    `logical_at`: the instant that it stands for, if that is not `scheduled_for`. `tenant`: a number to send back with
    the run's end and its log lines."""

    run_id: str
    attempt: int
    fence: int
    tenant: int = 0
    start_at: str
    timeout_ms: int
    job_id: str
    job_name: str | None = None
    scheduled_for: str
    spec: msgspec.Raw | None = None
    spec_ref: str | None = None
    args: Any = None
    args_url: str | None = None
    args_sha256: str = ""
    sensitive: bool = False
    secrets: dict[str, str] = {}
    token: str
    checkpoint: Any = None
    http_allow: list[str] = []
    parents: dict[str, Parent] | None = None
    parents_url: str | None = None
    logical_at: str | None = None

    @property
    def stands_for(self) -> str:
        """The instant that the run stands for."""
        return self.logical_at or self.scheduled_for


class StopOrder(Struct, kw_only=True):
    """`ended`: the attempt has ended already, told with its own token; there is nothing left to report of it."""

    run_id: str
    fence: int
    reason: str = ""
    ended: bool = False


class Fetch(Struct, kw_only=True):
    """The path on this server where something is fetched, as JSON, within the next minutes; and its digest."""

    url: str
    sha256: str


class ClaimAnswer(Struct, kw_only=True):
    """`stop` and `drain` end a long poll early; they say what a report would have said a moment later. `now` is an
    instant that the database's clock had reached when this was answered; `mark`: every claim up to this one had been
    made. `contents`: by document, and by field of its
    target, what is large and to be fetched; what stands in its place is only told of it."""

    claim_id: int
    runs: list[ClaimedRun]
    now: str = ""
    mark: int = 0
    specs: dict[str, msgspec.Raw] = {}
    contents: dict[str, dict[str, Fetch]] = {}
    stop: list[StopOrder] = []
    drain: bool = False


class Finished(Struct, kw_only=True, omit_defaults=True):
    """One ended attempt. Of a failure: `retry_after`, in how many seconds what ran wants to be tried again, as long as
    it may be; `give_up`: that trying again is useless; `not_before`, for how many seconds at least what was called is
    to be left alone. `tenant`: the number that came with the run; 0 from workers that do not know it. It says where to
    look for a report that was accepted before, and gives no right: worker and fence must match."""

    run_id: str
    attempt: int
    fence: int
    tenant: int = 0
    outcome: Literal["succeeded", "failed", "timeout", "lost", "cancelled"]
    held_ms: float = 0
    ran_ms: float = 0
    exit_code: int | None = None
    error: RunError | None = None
    result: Any = None
    usage: dict[str, Any] | None = None
    log: dict[str, Any] | None = None
    retry_after: float | None = None
    give_up: bool = False
    not_before: float | None = None


class Report(Struct, kw_only=True):
    """Heartbeat, results and hand-backs in one. `running` is None except at a heartbeat, where it lists them all.
    `leaving`: the worker has nothing left and will not come back; it is gone without having been lost.
    `asked` and `marked`: those of the claim that is under way (its `heard`), for the same proof. `log_backlog`: how
    many bytes of log lines wait with it."""

    last_claim: int = 0
    asked: str = ""
    marked: int | None = None
    log_backlog: int = 0
    running: list[RunKey] | None = None
    returned: list[RunKey] = []
    finished: list[Finished] = []
    free: dict[str, float] = {}
    leaving: bool = False


class ReportAnswer(Struct, kw_only=True):
    """`mark`: every claim up to this one was made before this was answered."""

    accepted: list[RunKey]
    superseded: list[RunKey]
    stop: list[StopOrder]
    drain: bool
    now: str
    mark: int = 0


class RunNote(Struct, kw_only=True, omit_defaults=True):
    """What a run says of itself while it runs: how far it is, from 0 to 1, and a state for its next attempt to find."""

    run_id: str
    fence: int
    progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    checkpoint: Any = UNSET


class Notes(Struct, kw_only=True):
    notes: Annotated[list[RunNote], Meta(max_length=1000)]


class NotesAnswer(Struct, kw_only=True):
    """Those that the server has now; the others' runs are not the worker's any more."""

    kept: list[RunKey]


LogLine = tuple[float, str, str, str]  # (unix seconds on the worker, stream, level, text)


class LogChunk(Struct, kw_only=True):
    """Lines of one attempt. `tenant`: as in `Finished`."""

    run_id: str
    attempt: int
    fence: int
    tenant: int = 0
    offset: Annotated[int, Meta(ge=0)]
    lines: list[LogLine]


class LogShipment(Struct, kw_only=True):
    chunks: list[LogChunk]
