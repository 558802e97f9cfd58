"""What every call that changes a job asks of it first, and what is kept of a document beside it."""

from __future__ import annotations

from typing import Any

import msgspec

from tocsin.errors import Conflict, Forbidden, NotFound, PreconditionFailed
from tocsin.model.access import Identity
from tocsin.model.job import JobSpec
from tocsin.model.limits import depends_on_args, key_id, rendered
from tocsin.model.packed import packed_in
from tocsin.model.zones import rules_of
from tocsin.store.db import Row
from tocsin.wire import encode


def seen(job: Row | None, version: int | None) -> Row:
    """The job, which must exist; `version` is the one the caller has seen, if it says so."""
    if job is None:
        raise NotFound("there is no such job")
    if version is not None and job["version"] != version:
        raise PreconditionFailed(f"the job is at version {job['version']}, not {version}")
    return job


def opened(job: Row, verb: str) -> Row:
    """The job, which must not have ended."""
    if job["state"] not in ("active", "paused"):
        raise Conflict(f"a job that is {job['state']} cannot be {verb}", code=f"job_{job['state']}")
    return job


def on_its_own(job: Row) -> Row:
    """The job, which must not be one of a workflow's: those are what their workflow says."""
    if job["node"] is not None:
        raise Conflict("this job is part of a workflow: change that instead", code="part_of_workflow")
    return job


def within_scope(who: Identity, spec: JobSpec, was: str | None = None) -> None:
    """Refuse a job that the caller's key could not see afterwards, and a new name that does not fit the key's patterns
    (`was`: the current name). Names are unique in a tenant: whether such a name is free would reveal jobs that the key
    cannot see. If a name fits, the key can see every job that could have it."""
    if who.scope is None:
        return
    fits = who.scope.has_name(spec.name)
    if not fits and not who.scope.has(None, spec.tags):
        raise Forbidden("this key is kept to other jobs, by their names or tags", code="out_of_scope")
    if spec.name is not None and spec.name != was and not fits:
        raise Forbidden("a name that this key gives must fit a pattern of its scope", code="out_of_scope")


def name_taken(spec: JobSpec) -> Conflict:
    """Another open job has the name."""
    return Conflict(f"a job named {spec.name!r} exists already", code="name_taken")


_NO_SHARED_LIMITS = (None,) * 5


def _shared_limits(spec: JobSpec, tenant_id: int) -> tuple[Any, ...]:
    """key_id, key_template, key_max, rate_gap, rate_burst."""
    key, rate = spec.shared_key, spec.rate
    return (
        key and key_id(tenant_id, rendered(key.key, {})),
        key.key if key is not None and depends_on_args(key.key) else None,
        key and key.max,
        rate and rate.gap,
        rate and rate.burst,
    )


def key_of_run(tenant_id: int, template: str | None, args: str | None, pepper: bytes = b"") -> str | None:
    """The concurrency key of a run with these arguments (JSON), where it follows from them; with a pepper, if they are
    sensitive."""
    if template is None:
        return None
    packed = packed_in(args)
    if packed is not None:
        return packed.key_id  # what it was when they were packed, also if the job has another template by now
    given = msgspec.json.decode(args) if args is not None else {}
    return key_id(tenant_id, rendered(template, given if isinstance(given, dict) else {}), pepper)


def columns_of(spec: JobSpec, tenant_id: int) -> tuple[Any, ...]:
    """What the steps need of a document without reading it: once, overlap, max_concurrency, max_attempts, priority,
    start_deadline, tags, zone_rules, and what `_shared_limits` tells."""
    once = spec.once
    return (
        once,
        None if once or spec.overlap == "allow" else spec.overlap,
        spec.max_concurrency,
        spec.retry.max_attempts,
        spec.priority,
        spec.start_deadline.delta if spec.start_deadline else None,
        encode(spec.tags).decode() if spec.tags else None,
        None if spec.schedule is None else rules_of(spec.schedule.timezone),
        *(_shared_limits(spec, tenant_id) if spec.concurrency_key or spec.rate_limit else _NO_SHARED_LIMITS),
    )
