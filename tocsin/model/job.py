"""The job document of API.md as types: what decodes, what each default is, and what we refuse.

`JobSpec` is both the request body and, with its defaults filled in, what is stored and answered. Types refuse wrong
shapes while decoding; `check` refuses wrong meanings afterwards and names every field at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from tocsin.errors import InvalidInput, NotSupported
from tocsin.model import phrases
from tocsin.model.graph import Dependency, Wanted, dependencies
from tocsin.model.httpcall import host_of
from tocsin.model.limits import BadLimit, Rate, check_key, parse_rate
from tocsin.model.resources import MOST, MOST_CPUS, NOTHING, Amounts, amounts
from tocsin.model.scalars import Duration, Instant
from tocsin.model.targets import (
    WORKFLOW_POOL,
    HttpTarget,
    Line,
    ProcessTarget,
    Target,
    WorkflowTarget,
    may_be_set,
    wrong_target,
)

NAME = r"^[a-zA-Z0-9._-]{1,128}(?!\n)$"
Name = Annotated[str, Meta(pattern=NAME)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000)]

_TAG = re.compile(NAME)
LONGEST_DELAY = timedelta(days=3660)
_DAY = 86_400.0
_SECOND, _HOUR = Duration.parse("PT1S"), Duration.parse("PT1H")


class _Part(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class Dst(_Part, frozen=True):
    """What a local time that does not exist, or exists twice, means."""

    gap: Literal["next_valid", "skip"] = "next_valid"
    overlap: Literal["first", "second", "both"] = "first"


class Misfire(_Part, frozen=True):
    """What becomes of occurrences that fell due while Tocsin was down."""

    policy: Literal["latest", "all", "skip"] = "latest"
    window: Duration = _HOUR
    max: Annotated[int, Meta(ge=1, le=10_000)] = 100


class Schedule(_Part, frozen=True):
    """When. Exactly one of the first eight is given."""

    manual: Literal[True] | None = None
    at: Instant | None = None
    delay: Duration | None = None
    cron: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    every: Duration | None = None
    interval: Line | None = None
    rrule: Line | None = None
    text: Line | None = None
    timezone: Annotated[str, Meta(max_length=64)] = "UTC"
    starting_at: Instant | None = None
    until: Instant | None = None
    max_runs: Positive | None = None
    calendar: Name | None = None
    jitter: Duration | None = None
    dst: Dst = Dst()
    misfire: Misfire = Misfire()

    @property
    def kind(self) -> str:
        """Which of the eight is given (`check` has seen that it is exactly one)."""
        for place, value in enumerate(_kinds_of(self)):
            if value is not None:
                return SCHEDULE_KINDS[place]
        raise ValueError("none is given")


SCHEDULE_KINDS = ("manual", "at", "delay", "cron", "every", "interval", "rrule", "text")
ONCE_KINDS = ("at", "delay")
_kinds_of = attrgetter(*SCHEDULE_KINDS)


class Resources(_Part, frozen=True):
    """What one run takes of its worker while it runs; all zero: a slot and no more."""

    cpu: Annotated[float, Meta(ge=0, le=MOST_CPUS)] = 0
    memory_mb: Annotated[int, Meta(ge=0, le=MOST)] = 0
    disk_mb: Annotated[int, Meta(ge=0, le=MOST)] = 0
    gpus: Annotated[int, Meta(ge=0, le=MOST)] = 0


class Placement(_Part, frozen=True):
    """Labels that a worker must have, and labels whose worker is waited for a moment before any other takes the run."""

    require: Annotated[dict[str, str], Meta(max_length=20)] = {}
    prefer: Annotated[dict[str, str], Meta(max_length=20)] = {}


class Retry(_Part, frozen=True):
    """How often and how soon a failed attempt is tried again."""

    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 4
    backoff: Literal["exponential", "linear", "fixed", "immediate"] = "exponential"
    delay: Duration = _SECOND
    max_delay: Duration = _HOUR
    multiplier: Annotated[float, Meta(ge=1, le=100)] = 2.0
    jitter: Literal["full", "none"] = "full"
    retry_on: Annotated[list[Line], Meta(max_length=100)] = []
    give_up_on: Annotated[list[Line], Meta(max_length=100)] = []


class ConcurrencyKey(_Part, frozen=True):
    """A limit that jobs share: of all runs with the same key, so many at once. A key may name arguments of the run, as
    in `customer-{args.customer}`."""

    key: Line
    max: Positive = 1


class RateLimit(_Part, frozen=True):
    """So many starts in so much time, as in `100/min`, of the concurrency key or else the job; `burst` at once after a
    pause, by default what one second brings."""

    rate: Line
    burst: Positive | None = None


_SLOT_ONLY, _ANYWHERE = Resources(), Placement()
_MANUAL = Schedule(manual=True)


class JobSpec(_Part, frozen=True):
    """A job as its owner writes it."""

    target: Target
    name: Name | None = None
    schedule: Schedule | None = None
    pool: Name = "default"
    priority: Annotated[int, Meta(ge=0, le=1000)] = 500
    resources: Resources = _SLOT_ONLY
    placement: Placement = _ANYWHERE
    timeout: Duration = _HOUR
    start_deadline: Duration | None = None
    retry: Retry = Retry()
    overlap: Literal["skip", "queue", "queue_all", "allow", "replace"] = "skip"
    max_concurrency: Positive | None = None
    concurrency_key: Line | ConcurrencyKey | None = None
    rate_limit: Line | RateLimit | None = None
    circuit: Name | None = None
    depends_on: list[Wanted] = []
    secrets: Annotated[dict[str, Name], Meta(max_length=50)] = {}
    notify: list[Any] = []
    tags: Annotated[dict[str, str], Meta(max_length=50)] = {}
    description: Annotated[str, Meta(max_length=4096)] = ""
    # Left out of documents without it: a server of the release before does not know it.
    sensitive: bool | UnsetType = UNSET
    # What a sensitive job's target says, as the server keeps it: sent back, it stays what it is.
    sealed: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        # Parents are written in full; and they start the job, which without them would run now.
        if self.depends_on:
            structs.force_setattr(self, "depends_on", dependencies(self.depends_on))
            if self.schedule is None:
                structs.force_setattr(self, "schedule", _MANUAL)

    @property
    def shared_key(self) -> ConcurrencyKey | None:
        """The key in its long form: a short one lets one run at a time."""
        key = self.concurrency_key
        return ConcurrencyKey(key=key) if isinstance(key, str) else key

    @property
    def parents(self) -> list[Dependency]:
        """The jobs that it waits for."""
        return dependencies(self.depends_on)

    @property
    def rate(self) -> Rate | None:
        """The rate, read; `BadLimit` if it is none."""
        limit = self.rate_limit
        if limit is None:
            return None
        return parse_rate(limit) if isinstance(limit, str) else parse_rate(limit.rate, limit.burst)

    @property
    def circuit_name(self) -> str | None:
        """The circuit that its calls count for: the one it names; of an http target without one, that of its host."""
        if self.circuit is None and isinstance(self.target, HttpTarget):
            host = host_of(self.target.url)
            return host if _TAG.fullmatch(host) else None
        return self.circuit

    @property
    def needs(self) -> Amounts:
        """What a run takes of its worker."""
        wanted = self.resources
        if wanted is _SLOT_ONLY:
            return NOTHING
        return amounts({name: getattr(wanted, name) for name in Amounts._fields})

    @property
    def once(self) -> bool:
        """True if the job owes one occurrence at most, and is completed by it."""
        schedule = self.schedule
        if schedule is None or schedule.at is not None or schedule.delay is not None:
            return True
        return schedule.text is not None and phrases.is_once(schedule.text)


class RunRequest(_Part, frozen=True):
    """A run asked for by hand: now, `at` an instant, or in a while; `args` reach the target."""

    at: Instant | None = None
    delay: Duration | None = None
    args: dict[str, Any] | UnsetType = UNSET
    sensitive: bool = False
    priority: Annotated[int, Meta(ge=0, le=1000)] | None = None

    def asked_at(self, now: datetime) -> RunRequest:
        """The same with its instant named."""
        if self.delay is None:
            return self
        if self.at is not None:
            raise InvalidInput.field("delay", "invalid", "give at or delay, not both")
        if self.delay.delta > LONGEST_DELAY:
            raise InvalidInput.field("delay", "invalid", "must be at most 10 years")
        return structs.replace(self, at=Instant(now + self.delay.delta), delay=None)


def check(spec: JobSpec, of_workflow: bool = False) -> None:
    """Refuse what decodes but means nothing, or nothing yet. Schedules in depth: `model.schedule`. `of_workflow`: the
    document was made of one by `model.workflow`."""
    found = list(_wrong(spec))
    if isinstance(spec.target, WorkflowTarget) and not of_workflow:
        found.append(("target.kind", "a workflow is made and changed through /v1/workflows"))
    if spec.pool == WORKFLOW_POOL and not isinstance(spec.target, WorkflowTarget):
        found.append(("pool", "is the pool of workflow runs, which the servers take themselves"))
    if found:
        wrong = [{"path": p, "code": "invalid", "message": m} for p, m in found]
        raise InvalidInput("; ".join(f"{e['path']}: {e['message']}" for e in wrong), errors=wrong)
    missing = list(_not_built(spec))
    if missing:
        raise NotSupported(
            "; ".join(f"{path}: not supported yet" for path in missing),
            errors=[{"path": p, "code": "not_supported", "message": "not supported yet"} for p in missing],
        )


def _wrong(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.schedule is not None:
        values = _kinds_of(spec.schedule)
        if values.count(None) != len(values) - 1:
            given = [kind for kind, value in zip(SCHEDULE_KINDS, values, strict=True) if value is not None]
            yield (
                "schedule",
                f"give exactly one of {', '.join(SCHEDULE_KINDS)}" + (f", not {' and '.join(given)}" if given else ""),
            )
        elif spec.depends_on and spec.schedule.manual is None:
            yield "schedule", "a job that depends on others is started by them: leave its own schedule out"
    # What is left at its default is right; most jobs leave most of it.
    if spec.timeout is not _HOUR and not 0.001 <= spec.timeout.seconds <= 7 * _DAY:
        yield "timeout", "must lie between 1 ms and 7 days"
    if spec.start_deadline is not None and spec.start_deadline.seconds <= 0:
        yield "start_deadline", "must be positive"
    if spec.retry.max_delay is not _HOUR and spec.retry.max_delay.seconds > 7 * _DAY:
        yield "retry.max_delay", "must be at most 7 days"
    for key, value in spec.tags.items():
        if not _TAG.fullmatch(key) or len(value) > 256 or not value.isprintable():
            yield f"tags.{key[:32]}", "a tag is a name of up to 128 and a printable value of up to 256 characters"
    if spec.concurrency_key is not None or spec.rate_limit is not None:
        yield from _wrong_limits(spec)
    if spec.placement is not _ANYWHERE:
        yield from _wrong_labels(spec.placement)
    if spec.sealed is not UNSET and spec.sensitive is not True:
        yield "sealed", "belongs to a job that is sensitive; give null for both, and what the target is to say"
    for variable in spec.secrets:
        if not may_be_set(variable):
            yield f"secrets.{variable[:64]}", "is not a name that a job may set"
    yield from wrong_target(spec.target, spec.secrets)


def _wrong_labels(placement: Placement) -> Iterator[tuple[str, str]]:
    for field, labels in (("require", placement.require), ("prefer", placement.prefer)):
        for name, value in labels.items():
            if not name or any(len(text) > 256 or not text.isprintable() for text in (name, value)):
                path = f"placement.{field}.{name[:32]}" if name.isprintable() else f"placement.{field}"
                yield path, "a label is a printable name and value of up to 256 characters each"


def _wrong_limits(spec: JobSpec) -> Iterator[tuple[str, str]]:
    try:
        if spec.shared_key is not None:
            check_key(spec.shared_key.key)
    except BadLimit as e:
        yield "concurrency_key", str(e)
    try:
        spec.rate  # noqa: B018 — reading it is the check
    except BadLimit as e:
        yield "rate_limit", str(e)


_BLANK = JobSpec(target=ProcessTarget(command=["true"]))
_PLANNED = ("notify",)


def _not_built(spec: JobSpec) -> Iterator[str]:
    """Paths that API.md names and this version does not act on yet."""
    return (name for name in _PLANNED if getattr(spec, name) != getattr(_BLANK, name))
