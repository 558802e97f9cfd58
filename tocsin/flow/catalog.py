"""catalog: read jobs, as the API answers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import NotFound
from tocsin.model.access import Identity
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import describe, first_fire
from tocsin.store.db import Database, Row, Sql
from tocsin.wire import encode

SQL = Sql(__file__)


class JobFilter(NamedTuple):
    """What a list of jobs is narrowed by."""

    state: str | None = None
    pool: str | None = None
    text: str | None = None
    tag: dict[str, str] | None = None


async def get_job(db: Database, who: Identity, job_id: str) -> dict[str, Any]:
    """One job's document."""
    return (await get_jobs(db, who, [job_id]))[0]


async def get_jobs(db: Database, who: Identity, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Documents in the order of `ids`; one that is missing is an error."""
    async with db.tenant(who.tenant_id, "catalog") as connection:
        rows = {row["id"]: row for row in await connection.fetch(SQL["get"], who.tenant_id, list(ids))}
    if len(rows) < len(set(ids)):
        raise NotFound("there is no such job")
    return [_document(who, rows[id_]) for id_ in ids]


async def list_jobs(
    db: Database, who: Identity, filter_: JobFilter, before: str | None, limit: int
) -> list[dict[str, Any]]:
    """Newest first."""
    tag = msgspec.json.encode(filter_.tag).decode() if filter_.tag else None
    async with db.tenant(who.tenant_id, "catalog") as connection:
        rows = await connection.fetch(
            SQL["list"], who.tenant_id, before, filter_.state, filter_.pool, filter_.text, tag, limit
        )
    return [_document(who, row) for row in rows]


def new_document(who: Identity, job_id: str, spec: JobSpec, spec_json: str, at: datetime) -> dict[str, Any]:
    """A job as it was when it was stored at `at`: nothing that a read would know better."""
    return _document(
        who,
        {
            "id": job_id,
            "version": 1,
            "state": "active",
            "spec": spec_json,
            "created_at": at,
            "updated_at": at,
            "next_run_at": first_fire(spec.schedule, at),
            "last_run_id": None,
        },
        spec.schedule,
    )


def new_documents(who: Identity, jobs: Iterable[tuple[str, JobSpec, str]], at: datetime) -> list[msgspec.Raw]:
    """The same for a batch of (id, spec, its JSON), as text: what jobs have in common is written once."""
    same = {"tenant": who.tenant, "version": 1, "state": "active", "created_at": iso(at), "updated_at": iso(at)}
    tail = encode(same | {"last_run": None}).decode()[1:-1]
    known: dict[Schedule | None, tuple[str, str, str]] = {}
    out = []
    for id_, spec, text in jobs:
        if spec.schedule not in known:
            known[spec.schedule] = _new_schedule(spec.schedule, at)
        plain, described, next_run = known[spec.schedule]
        # The last place it stands: only a target, which comes first, may hold a caller's own objects.
        before, _, behind = text[:-1].rpartition(plain)
        out.append(msgspec.Raw(f'{before}{described}{behind},"id":"{id_}",{tail},{next_run}}}'.encode()))
    return out


def _new_schedule(schedule: Schedule | None, at: datetime) -> tuple[str, str, str]:
    """A schedule as it stands in a job's JSON, the same with its description, and when it first falls due."""
    plain = encode(schedule).decode()
    words = "" if schedule is None else f',"description":{encode(describe(schedule)).decode()}'
    first = first_fire(schedule, at)
    next_run = encode(first and iso(first)).decode()
    described = plain if schedule is None else f"{plain[:-1]}{words}}}"
    return (
        f'"schedule":{plain}',
        f'"schedule":{described}',
        f'"next_run_at":{next_run},"estimated_start_at":{next_run}',
    )


def _document(who: Identity, row: Row | dict[str, Any], known: Schedule | None = None) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(row["spec"])
    schedule = document.get("schedule")
    if schedule is not None:
        schedule["description"] = describe(known or msgspec.convert(schedule, Schedule, dec_hook=decode_scalar))
    next_run = row["next_run_at"] and iso(row["next_run_at"])
    last = row["last_run_id"] and {
        "id": row["last_run_id"],
        "state": row["last_run_state"],
        "finished_at": iso(row["last_run_finished_at"]),
    }
    return document | {
        "id": row["id"],
        "tenant": who.tenant,
        "version": row["version"],
        "state": row["state"],
        "created_at": iso(row["created_at"]),
        "updated_at": iso(row["updated_at"]),
        "next_run_at": next_run,
        "estimated_start_at": next_run,
        "last_run": last,
    }
