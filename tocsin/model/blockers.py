"""Why a run has not started: everything that stands in its way, in order, in words, and when it may be over.

The order is that in which one would ask: is it meant to run now at all (its job, its instant, what goes before it),
does a limit hold it, is there anybody who could take it, and who stands in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from tocsin.model.estimate import (
    Estimate,
    Pace,
    ahead_of,
    at_rate,
    behind_run,
    in_queue,
    not_before,
    under_limit,
)
from tocsin.model.limits import Rate
from tocsin.model.resources import NOTHING, Amounts, why_unschedulable

MANY = 10_000  # no queue is counted further

# Stable, in the order in which blockers are named.
CODES: dict[str, str] = {
    "tenant_suspended": "its tenant is suspended: nothing of it starts until the platform lets it go on",
    "job_paused": "its job is paused: nothing of it starts until somebody resumes it",
    "due_later": "its instant has not come",
    "backing_off": "an attempt of it failed or was lost, and the next one waits out the back-off",
    "parent": "runs that it depends on have not ended; `runs` are some of them, if they have begun to exist",
    "overlap": "an earlier run of its job is alive; the job's `overlap` says what comes of that",
    "quota": "its tenant runs as many at once as the quota `max_running` allows",
    "limit": "`max_concurrency` of its job or `max` of its `concurrency_key` are running; `runs` are some that do",
    "rate": "the `rate_limit` is used up; `until` says when the next start may come",
    "breaker": "its `circuit` is open, or lets through a few to try; `key` is its name",
    "resources": "no worker that could take it has the resources it needs, at all or free now; it says which",
    "placement": "no living worker of its pool that could take it has the labels it requires",
    "pool_paused": "its pool is paused: nothing of it starts until somebody resumes it",
    "pool_closed": "its pool is open to other tenants only: nothing of it starts there until the platform opens it",
    "no_worker": "no living worker of its pool can take it",
    "busy": "every slot of the workers that can take it is in use",
    "behind": "others stand before it",
}


class Blocker(NamedTuple):
    """One thing in the way. `over`: when it may be out of the way, if that can be told; `runs`: whom it waits for."""

    code: str
    message: str
    over: Estimate | None = None
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    runs: Sequence[str] = ()


class Earlier(NamedTuple):
    """A run of the same job that is alive and stands before it."""

    id: str
    since: datetime | None


class Awaited(NamedTuple):
    """What it waits for: the name of the job, or of the node, and its run in the state that this is in; without one, it
    has none yet, or its job has ended and it will never have one."""

    name: str
    run_id: str | None
    state: str | None
    job_state: str


class Limit(NamedTuple):
    """An exact limit: how many run under it of how many that may, some of them, and how many wait for it before us.
    `key` is None for the job's own."""

    key: str | None
    most: int
    running: int
    holders: Sequence[str] = ()
    waiting: int = 0


class Throttle(NamedTuple):
    """A rate, the job's own or that of a key, and how many wait for it before us."""

    key: str | None
    rate: Rate
    tat: datetime | None
    waiting: int = 0


class Quota(NamedTuple):
    """How many runs of the tenant run, of how many that may."""

    running: int
    most: int


class Breaker(NamedTuple):
    """A circuit that does not let the run pass; `until`: when it is looked at again, None if it was opened by hand."""

    name: str
    state: str
    since: datetime
    until: datetime | None


class Fleet(NamedTuple):
    """The living workers of the pool: how many there are, take its kind of target, know its function, have its labels
    (each of those before), are not being drained (`able`), have in all what it needs, and have it free. `totals`: what
    the able ones have; `slots` and `free`: those of the fitting ones."""

    pool: str
    kind: str
    function: str
    labels: Mapping[str, str]
    needs: Amounts | None = None
    living: int = 0
    of_kind: int = 0
    knowing: int = 0
    labelled: int = 0
    able: int = 0
    fitting: int = 0
    roomy: int = 0
    totals: Sequence[Amounts] = ()
    slots: int = 0
    free: int = 0


class Queue(NamedTuple):
    """What stands before it: of its own tenant, and of each other one the weight and how many it has queued. What goes
    first of these depends on the weights, unless all tenants stand `in_one_order` (then only those before it are
    counted)."""

    mine: int = 0
    weight: int = 1
    others: Sequence[tuple[int, int]] = ()
    in_one_order: bool = False

    @property
    def of_others(self) -> int:
        """How many of them start first."""
        if self.in_one_order:
            return sum(queued for _, queued in self.others)
        return ahead_of(self.mine, self.weight, self.others) - self.mine


class Facts(NamedTuple):
    """What is known of a live run that nobody holds."""

    now: datetime
    attempt: int
    ready_at: datetime
    fleet: Fleet
    queue: Queue
    overlap: str | None = None
    paused_since: datetime | None = None
    earlier: Sequence[Earlier] = ()
    limits: Sequence[Limit] = ()
    throttle: Throttle | None = None
    quota: Quota | None = None
    breaker: Breaker | None = None
    pool_paused_since: datetime | None = None
    lasts: timedelta | None = None  # the mean of its job's last runs
    pace: Pace | None = None
    suspended_since: datetime | None = None
    shut_out: bool = False  # its pool is not open to its tenant
    pending: int = 0  # how many it waits for …
    awaited: Sequence[Awaited] = ()  # … and some of them
    folded: bool = False  # all have ended, and it waits for what it is mapped over to be fetched


def blockers(facts: Facts) -> list[Blocker]:
    """All that stands in the way, the first to be asked about first. What is full at this moment is in the way of those
    only that are due."""
    found = [*_not_meant_to_run(facts), *_held_back(facts)]
    if facts.pending:
        found.append(_waits(facts))
    elif facts.ready_at <= facts.now:
        found += _limited(facts)
        found += _queued(facts) if facts.fleet.fitting else ()
    order = list(CODES)
    return sorted(found, key=lambda blocker: order.index(blocker.code))


def _not_meant_to_run(facts: Facts) -> Iterator[Blocker]:
    if facts.suspended_since is not None:
        told = "its tenant is suspended; nothing of it starts until the platform lets it go on"
        yield Blocker("tenant_suspended", told, since=facts.suspended_since)
    if facts.paused_since is not None:
        yield Blocker("job_paused", "its job is paused; it waits until somebody resumes it", since=facts.paused_since)
    if facts.ready_at > facts.now:
        due = not_before(facts.ready_at)
        if facts.attempt:
            told = f"attempt {facts.attempt} did not succeed; the next one comes at {_at(facts.ready_at)} (back-off)"
            yield Blocker("backing_off", told, due, until=facts.ready_at)
        else:
            yield Blocker("due_later", f"it falls due at {_at(facts.ready_at)}", due, until=facts.ready_at)
    if facts.earlier and facts.ready_at <= facts.now:
        first = facts.earlier[0]
        yield Blocker(
            "overlap",
            f"an earlier run of its job is alive; {_OVERLAP[facts.overlap or 'queue']}",
            behind_run(facts.now, first.since, facts.lasts) if facts.overlap in ("queue", "queue_all") else None,
            since=first.since,
            runs=[run.id for run in facts.earlier],
        )


def _waits(facts: Facts) -> Blocker:
    if facts.folded:
        return Blocker("parent", "the list that it is mapped over is large, and is fetched from object storage first")
    named = [_awaited(each) for each in facts.awaited]
    more = facts.pending - len(named)
    told = ", ".join(named) + (f" and {more:,} more" if named and more > 0 else "")
    runs = [each.run_id for each in facts.awaited if each.run_id is not None]
    what = f"{_count(facts.pending, 'run')} that it depends on " + ("has" if facts.pending == 1 else "have")
    return Blocker("parent", f"{what} not ended" + (f": {told}" if told else ""), runs=runs)


def _awaited(each: Awaited) -> str:
    if each.state is not None:
        return f"{each.name} is {each.state}"
    if each.job_state in ("cancelled", "completed"):
        return f"{each.name} is {each.job_state} and comes no more"
    return f"{each.name} has no run yet"


_OVERLAP = {
    "skip": "this occurrence will be skipped (overlap: skip)",
    "queue": "this occurrence waits for it, and one at most does (overlap: queue)",
    "queue_all": "this occurrence waits for it (overlap: queue_all)",
    "replace": "that is told to stop, and this occurrence starts when it is proved that it has (overlap: replace)",
}


def _limited(facts: Facts) -> Iterator[Blocker]:
    quota = facts.quota
    if quota is not None and quota.running >= quota.most:
        told = f"{_count(quota.running, 'run')} of its tenant are running; {quota.most:,} may (quota max_running)"
        yield Blocker("quota", told, in_queue(facts.now, facts.queue.mine, 0, facts.pace))
    for limit in facts.limits:
        if limit.running >= limit.most:
            what = "its job (max_concurrency)" if limit.key is None else f"the concurrency key {limit.key!r}"
            yield Blocker(
                "limit",
                f"{limit.running} of {limit.most} runs of {what} are running{_waiting(limit.waiting)}",
                under_limit(facts.now, limit.waiting, limit.most, facts.lasts),
                key=limit.key,
                runs=limit.holders,
            )
    throttle = facts.throttle
    if throttle is not None and not throttle.rate.room(throttle.tat, facts.now):
        over = at_rate(facts.now, throttle.waiting, throttle.rate, throttle.tat)
        what = "its job" if throttle.key is None else f"the concurrency key {throttle.key!r}"
        opens = throttle.rate.opens_at(throttle.tat or facts.now)
        yield Blocker(
            "rate",
            f"the rate of {what}, one start every {_length(throttle.rate.gap)}, is used up; the next may come at "
            f"{_at(opens)}{_waiting(throttle.waiting)}",
            over,
            until=opens,
            key=throttle.key,
        )


def _tripped(breaker: Breaker) -> Blocker:
    circuit = f"the circuit {breaker.name!r}"
    if breaker.state == "half_open":
        told = f"{circuit} tries a few runs after too many failed; the others wait for how these end"
    elif breaker.until is None:
        told = f"{circuit} was opened by hand; runs that use it wait until somebody closes it"
    else:
        told = f"{circuit} is open, because too many runs that use it failed; one is tried at {_at(breaker.until)}"
    return Blocker("breaker", told, since=breaker.since, until=breaker.until, key=breaker.name)


def _held_back(facts: Facts) -> Iterator[Blocker]:
    fleet = facts.fleet
    if facts.breaker is not None:
        yield _tripped(facts.breaker)
    if facts.pool_paused_since is not None:
        told = f"pool {fleet.pool!r} is paused; nothing of it starts until somebody resumes it"
        yield Blocker("pool_paused", told, since=facts.pool_paused_since)
    if facts.shut_out:
        told = f"pool {fleet.pool!r} is not open to its tenant any more; the platform can open it, or move its job"
        yield Blocker("pool_closed", told)
    if not fleet.able:
        yield _nobody(fleet)
    elif not fleet.fitting:
        yield Blocker(
            "resources", why_unschedulable(fleet.needs or NOTHING, fleet.totals) or "no worker is large enough"
        )


def _queued(facts: Facts) -> Iterator[Blocker]:
    fleet, queue = facts.fleet, facts.queue
    others = queue.of_others
    ahead = queue.mine + others
    start = in_queue(facts.now, ahead, fleet.free, facts.pace) if ahead <= MANY else None
    if not fleet.free:
        slots = f"all {_count(fleet.slots, 'slot')} of {_count(fleet.fitting, 'worker')}"
        yield Blocker("busy", f"{slots} that can take it are in use", start)
    elif not fleet.roomy:
        needs = ", ".join(f"{name} {n:g}" for name, n in (fleet.needs or NOTHING).document().items() if n)
        told = f"none of {_count(fleet.fitting, 'worker')} that could take it has what it needs free now: {needs}"
        yield Blocker("resources", told, in_queue(facts.now, ahead, 0, facts.pace))
    if ahead >= max(1, fleet.free):
        yield Blocker("behind", f"{_before(queue.mine, others, len(queue.others))} before it", start)


def _nobody(fleet: Fleet) -> Blocker:
    def none_of(number: int) -> str:
        return f"none of the {_count(number, 'living worker')} of pool {fleet.pool!r}"

    if not fleet.living:
        return Blocker("no_worker", f"no worker of pool {fleet.pool!r} is alive that may serve its tenant")
    if not fleet.of_kind:
        return Blocker("no_worker", f"{none_of(fleet.living)} takes targets of kind {fleet.kind!r}")
    if not fleet.knowing:
        return Blocker("no_worker", f"{none_of(fleet.of_kind)} knows the function {fleet.function!r}")
    if not fleet.labelled:
        wanted = ", ".join(f"{name}={value}" for name, value in sorted(fleet.labels.items()))
        return Blocker("placement", f"{none_of(fleet.knowing)} that could take it has the labels {wanted}")
    return Blocker("no_worker", f"{none_of(fleet.labelled)} that could take it takes more: they are being drained")


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _at(instant: datetime) -> str:
    return f"{instant:%Y-%m-%d %H:%M:%S} UTC"


def _length(span: timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "s"
    return f"more than {MANY:,} {noun}s" if number > MANY else f"{number:,} {noun}{plural}"


def _waiting(number: int) -> str:
    return f", and {_count(number, 'run')} wait{'s' * (number == 1)} before it" if number else ""


def _before(mine: int, others: int, tenants: int) -> str:
    parts = [_count(mine, "run")] if mine else []
    if others:
        whose = "other tenants" if others > MANY else _count(tenants, "other tenant")
        parts.append(f"{_count(others, 'run')} of {whose} that share the pool")
    return f"{' and '.join(parts)} stand{'s' * (mine + others == 1)}"


# ── those that are not in the queue ──────────────────────────────────────────────────────────────────────────────

_ENDED = {
    "skipped_overlap": "an earlier run of its job was alive when it fell due (overlap: skip)",
    "skipped_paused": "its job was paused when it fell due",
    "coalesced": "another occurrence of its job stands for it",
    "misfire_expired": "nobody could start it in time, and its job's `misfire` does not make up for it",
    "upstream_failed": "a run that it depends on did not end as it had to",
    "not_needed": "it was for the case that a run that it depends on ends in another way",
    "mapped": "all runs that were made of it, one for each element, have succeeded",
    "map_failed": "what it is to be run for is no list, or too long a one, or a run made of it did not succeed",
    "expired": "it did not start before its `start_deadline`",
    "cancelled": "somebody cancelled it, or its job",
}


class End(NamedTuple):
    """How a run ended."""

    state: str
    outcome: str | None
    reason: str | None
    attempt: int
    failures: int
    losses: int
    max_attempts: int
    error: str | None
    times: int = 1


def why_ended(end: End) -> str:
    """The end of a run in words."""
    if end.reason is not None:
        these = f" ({end.times:,} occurrences)" if end.times > 1 else ""
        return _ENDED.get(end.reason, end.reason) + these
    if end.state == "succeeded":
        return f"it did what it was to do in attempt {end.attempt}"
    if end.state == "dead":
        because = f"; the last time with {end.error}" if end.error else ""
        if end.outcome == "lost":
            return f"{_count(end.losses, 'worker')} that had it went away"
        if end.failures < end.max_attempts:
            return f"it failed in a way that is not tried again{because}"
        return f"{end.failures} of {_count(end.max_attempts, 'attempt')} failed{because}"
    return _ENDED.get(end.state, "")


def why_held(state: str, worker: str, since: datetime | None) -> str:
    """Why a run that a worker holds is where it is."""
    if state == "running":
        return f"worker {worker} has had it" + (f" since {_at(since)}" if since else "")
    return f"worker {worker} was told to stop it, and has not proved yet that nothing of it is left"


def why_waiting(found: Sequence[Blocker], blocked_by: str | None) -> str:
    """The first thing in the way, or that there is nothing any more."""
    if found:
        return found[0].message
    if blocked_by is not None:
        return f"what it waited for ({blocked_by}) is over; it is back in the queue within a second"
    return "nothing stands in its way: the next claim takes it"
