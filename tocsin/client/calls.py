"""Every call of the API that the SDK knows: one function each, from arguments to a `Call`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from tocsin.client import asking
from tocsin.client.core import Call, Document, Page
from tocsin.clock import iso
from tocsin.model.job import JobSpec

_delete, _get, _list, _post, _write = asking.delete, asking.get, asking.listing, asking.post, asking.write
_given, _path, _text = asking.query_of, asking.path_of, asking.text_of
_read_anything, _read_document = asking.read_anything, asking.read_document

# ── jobs; `if_match`: only if the job is still at this version, else `ApiError` 412 ──────────────────────────────


def create_job(spec: Mapping[str, Any] | JobSpec, *, idempotency_key: str | None = None) -> Call[Document]:
    """Store a job; answers it with every default filled in."""
    return _write("POST", "v1", "jobs", body=spec, key=idempotency_key)


def create_jobs(specs: Iterable[Mapping[str, Any] | JobSpec], *, idempotency_key: str | None = None) -> Call[Document]:
    """Store up to 1,000 jobs, all or none; answers `{"items": [...]}` in the same order."""
    return _write("POST", "v1", "jobs", "batch", body={"jobs": list(specs)}, key=idempotency_key)


def put_job(
    name: str,
    spec: Mapping[str, Any] | JobSpec,
    *,
    if_match: int | None = None,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Make the job of this name what `spec` says, or make it; the same again changes nothing."""
    return _write("PUT", "v1", "jobs", "by-name", name, body=spec, key=idempotency_key, if_match=if_match)


def update_job(
    job_id: str, patch: Mapping[str, Any], *, if_match: int | None = None, idempotency_key: str | None = None
) -> Call[Document]:
    """Change what `patch` names (null takes a value away): a new version; running runs keep theirs.

    `if_match`: only if it is at this version; otherwise nothing changes and `ApiError` 412 is raised.
    """
    return _write("PATCH", "v1", "jobs", job_id, body=patch, key=idempotency_key, if_match=if_match)


def job_versions(job_id: str, *, limit: int | None = None) -> Call[Page]:
    """What a job was and is, newest first: `{version, spec, replaced_at}`."""
    return _list("v1", "jobs", job_id, "versions", limit=limit)


def occurrences(
    job_id: str,
    *,
    from_: datetime | str | None = None,
    to: datetime | str | None = None,
    limit: int | None = None,
) -> Call[Page]:
    """What a job owed and what became of it, oldest first: `{status, from, to, count, reason, run_id, state}`."""
    return _list("v1", "jobs", job_id, "occurrences", from_=from_, to=to, limit=limit)


def preview_schedule(
    schedule: Mapping[str, Any], *, count: int | None = None, after: datetime | None = None, name: str | None = None
) -> Call[Document]:
    """What a schedule means and when it would fire: `{description, runs, warnings}`; `name`: of the job to be."""
    given = {"count": count, "after": None if after is None else iso(after), "name": name}
    body = {"schedule": schedule} | {field: value for field, value in given.items() if value is not None}
    return _post("v1", "schedules", "preview", body=body)


def get_job(job_id: str) -> Call[Document]:
    """One job."""
    return _get("v1", "jobs", job_id)


def get_named_job(name: str) -> Call[Document]:
    """The open (active or paused) job of a name."""
    return _get("v1", "jobs", "by-name", name)


def list_jobs(
    *,
    state: str | None = None,
    tag: str | None = None,
    q: str | None = None,
    pool: str | None = None,
    limit: int | None = None,
) -> Call[Page]:
    """Jobs, newest first; `tag` is `key:value`, `q` part of a name, `limit` the size of a page."""
    return _list("v1", "jobs", state=state, tag=tag, q=q, pool=pool, limit=limit)


def delete_job(job_id: str, *, if_match: int | None = None) -> Call[Document]:
    """Cancel a job and free its name; its history stays."""
    return _delete("v1", "jobs", job_id, if_match=if_match)


def pause_job(job_id: str, reason: str = "", *, if_match: int | None = None) -> Call[Document]:
    """Start no more runs of it until it is resumed."""
    return _post("v1", "jobs", job_id, "pause", body={"reason": reason}, if_match=if_match)


def resume_job(job_id: str, reason: str = "", *, if_match: int | None = None) -> Call[Document]:
    """End a pause."""
    return _post("v1", "jobs", job_id, "resume", body={"reason": reason}, if_match=if_match)


def cancel_job(
    job_id: str, reason: str = "", *, running: Literal["stop", "leave"] = "stop", if_match: int | None = None
) -> Call[Document]:
    """End a job for good, and stop its running runs unless they are to be left."""
    return _post("v1", "jobs", job_id, "cancel", body={"reason": reason, "running": running}, if_match=if_match)


def run_job(
    job_id: str,
    args: Mapping[str, Any] | None = None,
    *,
    at: datetime | str | None = None,
    delay: str | None = None,
    priority: int | None = None,
    sensitive: bool = False,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Ask for a run, now, `at` an instant, or after a `delay`; `args` reach the target, and nobody else if they are
    `sensitive`. Answers the run."""
    asked = {"args": args, "at": None if at is None else _text(at), "delay": delay, "priority": priority}
    asked["sensitive"] = sensitive or None
    body = {name: value for name, value in asked.items() if value is not None}
    return _post("v1", "jobs", job_id, "runs", body=body, key=idempotency_key)


def run_batch(job_id: str, runs: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> Call[Document]:
    """Ask for up to 5,000 runs at once, all or none: `[{"args": …}, …]`."""
    return _post("v1", "jobs", job_id, "runs", "batch", body={"runs": list(runs)}, key=idempotency_key)


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def put_secret(
    name: str, value: str, *, idempotency_key: str | None = None, if_match: int | None = None
) -> Call[Document]:
    """Store a secret's value, which nobody is told again but the workers that run its jobs."""
    return _write("PUT", "v1", "secrets", name, body={"value": value}, key=idempotency_key, if_match=if_match)


def get_secret(name: str) -> Call[Document]:
    """What there is to know of a secret, without its value."""
    return _get("v1", "secrets", name)


def list_secrets(*, limit: int | None = None) -> Call[Page]:
    """Secrets by name, without their values."""
    return _list("v1", "secrets", limit=limit)


def delete_secret(name: str, *, if_match: int | None = None) -> Call[Document]:
    """Delete a secret; runs of jobs that name it fail from now on."""
    return _delete("v1", "secrets", name, if_match=if_match)


def list_master_keys() -> Call[Document]:
    """The master keys that secrets are sealed with, and how much each of them wraps."""
    return _get("v1", "master-keys")


def rotate_master_key() -> Call[Document]:
    """Wrap some more keys with the first master key; `remaining` says how many are left."""
    return _post("v1", "master-keys", "rotate")


# ── calendars ────────────────────────────────────────────────────────────────────────────────────────────────────


def put_calendar(
    name: str,
    calendar: Mapping[str, Any],
    *,
    if_match: int | None = None,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Make a calendar, or make it another: `{"mode", "days", "weekdays"}`, or `{"ical": "…"}` to read days from."""
    return _write("PUT", "v1", "calendars", name, body=calendar, key=idempotency_key, if_match=if_match)


def get_calendar(name: str) -> Call[Document]:
    """One calendar."""
    return _get("v1", "calendars", name)


def list_calendars(*, limit: int | None = None) -> Call[Page]:
    """Calendars, by name."""
    return _list("v1", "calendars", limit=limit)


def delete_calendar(name: str, *, if_match: int | None = None) -> Call[Document]:
    """Delete a calendar that no open job goes by."""
    return _delete("v1", "calendars", name, if_match=if_match)


# ── circuits ─────────────────────────────────────────────────────────────────────────────────────────────────────


def list_circuits(*, state: str | None = None, limit: int | None = None) -> Call[Page]:
    """Circuits, by name; `state`: only those that are `closed`, `open` or `half_open`."""
    return _list("v1", "circuits", state=state, limit=limit)


def get_circuit(name: str) -> Call[Document]:
    """One circuit."""
    return _get("v1", "circuits", name)


def put_circuit(name: str, policy: Mapping[str, Any], *, idempotency_key: str | None = None) -> Call[Document]:
    """Set when it opens and for how long: `{"failure_ratio", "calls", "window", "cooldown", "max_cooldown",
    "release_rate"}`."""
    return _write("PUT", "v1", "circuits", name, body=policy, key=idempotency_key)


def open_circuit(name: str, reason: str = "") -> Call[Document]:
    """Let no run that uses it start until it is closed by hand."""
    return _post("v1", "circuits", name, "open", body={"reason": reason})


def close_circuit(name: str, reason: str = "") -> Call[Document]:
    """Let runs that use it start; those that waited go in growing waves."""
    return _post("v1", "circuits", name, "close", body={"reason": reason})


# ── the audit ────────────────────────────────────────────────────────────────────────────────────────────────────


def list_audit(
    *,
    actor: str | None = None,
    action: str | None = None,
    target: str | None = None,
    from_: datetime | str | None = None,
    to: datetime | str | None = None,
    limit: int | None = None,
) -> Call[Page]:
    """What calls have changed, newest first."""
    return _list("v1", "audit", actor=actor, action=action, target=target, from_=from_, to=to, limit=limit)


def verify_audit(*, cursor: str | None = None) -> Call[Document]:
    """Prove a piece of the audit's chain; `next_cursor` is where the next one begins, None at its end."""
    return Call("GET", _path("v1", "audit", "verify"), _read_document, query=_given(cursor=cursor))


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_runs(
    *,
    job: str | None = None,
    state: str | None = None,
    outcome: str | None = None,
    error_class: str | None = None,
    worker: str | None = None,
    tag: str | None = None,
    from_: datetime | str | None = None,
    to: datetime | str | None = None,
    limit: int | None = None,
) -> Call[Page]:
    """Runs, live and ended alike, newest first."""
    return _list(
        "v1",
        "runs",
        job=job,
        state=state,
        outcome=outcome,
        error_class=error_class,
        worker=worker,
        tag=tag,
        from_=from_,
        to=to,
        limit=limit,
    )


def get_run(run_id: str) -> Call[Document]:
    """One run."""
    return _get("v1", "runs", run_id)


def attempts(run_id: str) -> Call[Page]:
    """Every ended or running attempt of a run."""
    return _list("v1", "runs", run_id, "attempts")


def explain_run(run_id: str) -> Call[Document]:
    """Why it has not started, and when it may: `{summary, blockers, estimated_start_at, …}`; or how it ended."""
    return _get("v1", "runs", run_id, "explain")


def cancel_run(run_id: str, reason: str = "") -> Call[Document]:
    """Stop a run; `stopping` until its worker proves that it has stopped."""
    return _post("v1", "runs", run_id, "cancel", body={"reason": reason})


def retry_run(run_id: str) -> Call[Document]:
    """Run it again: a new run with `origin_run_id`. A job of a workflow run takes its place there again; the answer is
    its new run or, if that workflow run had ended, the workflow's."""
    return _post("v1", "runs", run_id, "retry")


def logs(
    run_id: str,
    *,
    attempt: int | None = None,
    stream: str | None = None,
    after: int | None = None,
    limit: int | None = None,
) -> Call[Page]:
    """Log lines `{seq, ts, stream, level, text}` behind the line with seq `after`."""
    return _list("v1", "runs", run_id, "logs", attempt=attempt, stream=stream, after=after, limit=limit)


def search_logs(
    q: str | None = None,
    *,
    job: str | None = None,
    run: str | None = None,
    tag: str | None = None,
    from_: datetime | str | None = None,
    to: datetime | str | None = None,
    level: str | None = None,
    error_class: str | None = None,
    limit: int | None = None,
) -> Call[Page]:
    """Log lines that have all these words, newest first: `word`, `begin*`, `"a phrase"`."""
    return _list(
        *("v1", "logs", "search"),
        q=q,
        job=job,
        run=run,
        tag=tag,
        from_=from_,
        to=to,
        level=level,
        error_class=error_class,
        limit=limit,
    )


def tail_logs(
    run_id: str, *, attempt: int | None = None, stream: str | None = None, after: str | None = None
) -> Call[Document]:
    """Log lines as they come, of all attempts unless one is named: events `line`, and `over` when the run has ended.

    `after`: go on behind the line with this id (`event.id`).
    """
    path = _path("v1", "runs", run_id, "logs", "stream")
    return Call("GET", path, _read_document, query=_given(attempt=attempt, stream=stream, after=after))


def events(*, type: str | None = None, job: str | None = None, after: str | None = None) -> Call[Document]:
    """Changes of runs and jobs as they are committed, without end; a connection that breaks is taken up again.

    `type`: only those of a `run`, `job` or `circuit`; `job`: only those of this job; `after`: go on behind the event
    with this id."""
    return Call("GET", "/v1/events", _read_document, query=_given(type=type, job=job, after=after))


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────


def get_report(
    report: Literal["runs", "failures", "utilisation"],
    *,
    from_: datetime | str | None = None,
    to: datetime | str | None = None,
    by: str | None = None,
    limit: int | None = None,
) -> Call[Document]:
    """What became of the runs of a stretch of time, the last day unless told, grouped by what `by` says."""
    query = _given(from_=from_, to=to, by=by, limit=limit)
    return Call("GET", _path("v1", "reports", report), _read_document, query=query)


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────


def list_dead(*, job: str | None = None, error_class: str | None = None, limit: int | None = None) -> Call[Page]:
    """Runs that used up their attempts and wait for somebody's decision."""
    return _list("v1", "dead-letters", job=job, error_class=error_class, limit=limit)


def redrive_dead(
    ids: Iterable[str] | None = None, *, filter: Mapping[str, Any] | None = None, rate: str | None = None
) -> Call[Document]:
    """Run dead letters again, with the job as it is now: those with these ids, or the oldest 5,000 that a `filter`
    of `job`, `error_class` and `tag` names. `rate`, such as `100/s`, spreads the new runs over time."""
    return _post("v1", "dead-letters", "redrive", body=_letters(ids, filter) | ({"rate": rate} if rate else {}))


def discard_dead(ids: Iterable[str] | None = None, *, filter: Mapping[str, Any] | None = None) -> Call[Document]:
    """Let dead letters go, chosen in the same way; their history stays."""
    return _post("v1", "dead-letters", "discard", body=_letters(ids, filter))


def _letters(ids: Iterable[str] | None, filter: Mapping[str, Any] | None) -> Document:
    given = {"ids": None if ids is None else list(ids), "filter": filter}
    return {name: value for name, value in given.items() if value is not None}


# ── fleet, tenants, keys, health ─────────────────────────────────────────────────────────────────────────────────


def list_workers(*, limit: int | None = None) -> Call[Page]:
    """Who is alive, what is free, what runs there."""
    return _list("v1", "workers", limit=limit)


def get_worker(worker_id: str) -> Call[Document]:
    """One worker."""
    return _get("v1", "workers", worker_id)


def drain_worker(worker_id: str) -> Call[Document]:
    """Give a worker no more runs; it ends when those it has are done."""
    return _post("v1", "workers", worker_id, "drain")


def list_pools(*, limit: int | None = None) -> Call[Page]:
    """Pools by name: what waits in each, and who works for it."""
    return _list("v1", "pools", limit=limit)


def get_pool(name: str) -> Call[Document]:
    """One pool."""
    return _get("v1", "pools", name)


def update_pool(
    name: str,
    *,
    policy: Literal["fair", "priority", "fifo"] | None = None,
    head_start: str | None = None,
    tenants: Sequence[str] | Literal["all"] | None = None,
    if_match: int | None = None,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Change who goes first in a pool, (a duration) what a point of priority is worth for runs made from now on, or
    which tenants may use it."""
    given = {"policy": policy, "head_start": head_start, "tenants": tenants}
    body: Document = {field: value for field, value in given.items() if value is not None}
    if tenants == "all":
        body["tenants"] = None
    return _write("PATCH", "v1", "pools", name, body=body, key=idempotency_key, if_match=if_match)


def pause_pool(name: str, reason: str = "", *, if_match: int | None = None) -> Call[Document]:
    """Let nothing more be claimed from a pool until it is resumed."""
    return _post("v1", "pools", name, "pause", body={"reason": reason}, if_match=if_match)


def resume_pool(name: str, reason: str = "", *, if_match: int | None = None) -> Call[Document]:
    """End a pool's pause."""
    return _post("v1", "pools", name, "resume", body={"reason": reason}, if_match=if_match)


def create_tenant(slug: str, *, weight: int = 1, quotas: Mapping[str, Any] | None = None) -> Call[Document]:
    """A new tenant; `weight` is its share where tenants compete, `quotas` what it may have at most."""
    return _post("v1", "tenants", body={"slug": slug, "weight": weight} | ({"quotas": quotas} if quotas else {}))


def get_tenant(slug: str) -> Call[Document]:
    """A tenant, its quotas, and what it uses."""
    return _get("v1", "tenants", slug)


def get_usage(slug: str) -> Call[Document]:
    """What a tenant uses beside what it may: jobs, runs, log bytes; what it did in a day; and what is stored of it."""
    return _get("v1", "tenants", slug, "usage")


def update_tenant(
    slug: str,
    *,
    weight: int | None = None,
    quotas: Mapping[str, Any] | None = None,
    http_allow: Sequence[str] | None = None,
    retention: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Change a tenant's weight, those of its quotas that are named (None takes one away), the hosts and networks
    within the platform's walls that its http jobs may call, or how long its records are kept
    (`{"runs_days", "logs_days", "audit_days", "hot_days", "legal_hold", "preset"}`)."""
    given = {"weight": weight, "quotas": quotas, "http_allow": http_allow, "retention": retention}
    body = {field: value for field, value in given.items() if value is not None}
    return _write("PATCH", "v1", "tenants", slug, body=body, key=idempotency_key)


def suspend_tenant(slug: str, reason: str = "") -> Call[Document]:
    """Let nothing more of a tenant start until it is resumed; all of it is kept."""
    return _post("v1", "tenants", slug, "suspend", body={"reason": reason})


def resume_tenant(slug: str, reason: str = "") -> Call[Document]:
    """Let a suspended tenant go on."""
    return _post("v1", "tenants", slug, "resume", body={"reason": reason})


def erase_tenant(slug: str, *, idempotency_key: str | None = None) -> Call[Document]:
    """Erase a tenant and all that it has: nothing brings it back. It goes within minutes; `get_tenant` tells how far it
    is (`erasure`), and answers 404 when it is gone."""
    return _write("DELETE", "v1", "tenants", slug, body={"confirm": slug}, key=idempotency_key)


def list_tenants(*, limit: int | None = None) -> Call[Page]:
    """All tenants."""
    return _list("v1", "tenants", limit=limit)


def create_key(
    role: str,
    *,
    name: str = "",
    scopes: Mapping[str, Iterable[str]] | None = None,
    expires_at: str | None = None,
    expires_in: str | None = None,
) -> Call[Document]:
    """A new key; the answer shows it for the only time. `scopes`: the `jobs` and `tags` it is kept to, or the `pools`
    and `tenants` that a worker's key serves."""
    kept = {kind: list(values) for kind, values in (scopes or {}).items()}
    given = {"scopes": kept or None, "expires_at": expires_at, "expires_in": expires_in}
    body = {"role": role, "name": name} | {field: value for field, value in given.items() if value is not None}
    # Not repeated: the server keeps only a hash, so it could not give the first answer again.
    return replace(_post("v1", "keys", body=body), repeat=False)


def get_key(key_id: str) -> Call[Document]:
    """A key, without its secret."""
    return _get("v1", "keys", key_id)


def rotate_key(key_id: str, *, overlap: str | None = None) -> Call[Document]:
    """Another key with the same rights, shown for the only time; the old one stays good for `overlap` (a day)."""
    body = {} if overlap is None else {"overlap": overlap}
    return replace(_post("v1", "keys", key_id, "rotate", body=body), repeat=False)


def list_keys(*, limit: int | None = None) -> Call[Page]:
    """The tenant's keys, without their secrets."""
    return _list("v1", "keys", limit=limit)


def revoke_key(key_id: str) -> Call[Document]:
    """End a key at once."""
    return _delete("v1", "keys", key_id)


def healthz() -> Call[Document]:
    """Whether the server lives. Asked once: an honest no is an answer here."""
    return Call("GET", "/healthz", _read_anything, repeat=False)


def readyz() -> Call[Document]:
    """Whether the server can serve: its database is there and its schema is current. Asked once."""
    return Call("GET", "/readyz", _read_anything, repeat=False)
