"""catalog: read jobs, as the API answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import NotFound
from tocsin.flow.shared import windows
from tocsin.flow.shared.nodes import workflow_ids
from tocsin.model.access import Identity
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import describe, first_fire, hashes, seed_of, spread
from tocsin.model.targets import WORKFLOW_POOL
from tocsin.model.zones import release_of, rules_of
from tocsin.store.db import Database, Row, Sql
from tocsin.wire import encode

SQL = Sql(__file__)
Estimates = Callable[[str, datetime], datetime | None]  # when what is due then in this pool will start, if known
_ONLY = {
    "state": SQL["only_state"],
    "pool": SQL["only_pool"],
    "text": SQL["only_text"],
    "tag": SQL["only_tag"],
    "ids": SQL["only_ids"],
}
_CLOSED = SQL["only_closed"]
_NO_STATS = {"ended": 0, "succeeded": 0, "dead": 0, "mean_ms": None, "longest_ms": None}


class JobFilter(NamedTuple):
    """What a list of jobs is narrowed by."""

    state: str | None = None
    pool: str | None = None
    text: str | None = None
    tag: dict[str, str] | None = None


async def get_job(db: Database, who: Identity, job_id: str, estimates: Estimates) -> dict[str, Any]:
    """One job's document."""
    return (await get_jobs(db, who, [job_id], estimates))[0]


async def get_jobs(db: Database, who: Identity, ids: Sequence[str], estimates: Estimates) -> list[dict[str, Any]]:
    """Documents in the order of `ids`; one that is missing is an error."""
    async with db.tenant(who.tenant_id, "catalog") as connection:
        rows = {row["id"]: row for row in await connection.fetch(SQL["get"], who.tenant_id, list(ids))}
    if len(rows) < len(set(ids)):
        raise NotFound("there is no such job")
    return [_document(who, rows[id_], estimates) for id_ in ids]


async def get_named(db: Database, who: Identity, name: str, estimates: Estimates) -> dict[str, Any]:
    """The open job of a name."""
    async with db.tenant(who.tenant_id, "catalog") as connection:
        row = await connection.fetchrow(SQL["get_named"], who.tenant_id, name)
    if row is None:
        raise NotFound(f"there is no open job named {name[:128]!r}")
    return _document(who, row, estimates)


async def visible(db: Database, who: Identity, job_ids: Iterable[str]) -> set[str]:
    """Those of these jobs that the caller may see."""
    async with db.tenant(who.tenant_id, "catalog") as connection:
        return {row["id"] for row in await connection.fetch(SQL["visible"], who.tenant_id, list(job_ids))}


async def list_jobs(
    db: Database, who: Identity, filter_: JobFilter, before: str | None, limit: int, estimates: Estimates
) -> windows.Listed:
    """List jobs, newest first. A page reads a bounded number of jobs."""
    given: dict[str, Any] = filter_._asdict() | {
        "tenant": who.tenant_id,
        "most": limit,
        "tag": msgspec.json.encode(filter_.tag).decode() if filter_.tag else None,
        "low": windows.LOWEST,
        "high": before or windows.HIGHEST,
    }
    if filter_.pool == WORKFLOW_POOL:
        looked = await _workflows(db, who, given)
    else:
        looked = await windows.look(db, who, _query(given))
    return windows.Listed([_document(who, row, estimates) for row in looked.rows], looked.floor)


def _query(given: Mapping[str, Any]) -> windows.Query:
    closed = given["state"] in ("paused", "cancelled")
    named = _ONLY | {"state": _CLOSED} if closed else _ONLY
    only = [condition for name, condition in named.items() if given.get(name) is not None]
    return windows.Query("catalog", SQL["list"], SQL["floor"], given, only, _CLOSED if closed else None, exact=False)


async def _workflows(db: Database, who: Identity, given: Mapping[str, Any]) -> windows.Looked:
    """Search among the newest workflows of the tenant. A tenant has few workflows among many jobs."""
    most = windows.WINDOWS[0]
    ids = await workflow_ids(db, who.tenant_id, given["high"], most)
    looked = await windows.look(db, who, _query({**given, "pool": None, "ids": ids}))
    floor = ids[-1] if len(ids) == most and len(looked.rows) < given["most"] else None
    return windows.Looked(looked.rows, floor)


def new_documents(
    who: Identity, jobs: Iterable[tuple[str, JobSpec, str, str | None]], at: datetime, estimates: Estimates
) -> list[msgspec.Raw]:
    """Jobs of (id, spec, its JSON and its schedule's) as they were when they were stored at `at`, nothing that a read
    would know better. As text: what jobs have in common is written once."""
    same = {"tenant": who.tenant, "version": 1, "state": "active", "created_at": iso(at), "updated_at": iso(at)}
    tail = encode(same | {"last_run": None, "stats": _NO_STATS, "feeds": []}).decode()[1:-1]
    known: dict[tuple[str, str, str], tuple[str, str, str]] = {}
    out = []
    for id_, spec, text, schedule in jobs:
        seed = seed_of(who.tenant, spec.name, id_) if _is_its_own(spec.schedule) else ""
        key = (schedule or "null", seed, spec.pool)
        if key not in known:
            known[key] = _new_schedule(spec.schedule, *key, at, estimates)
        plain, described, times = known[key]
        # The last place it stands: only a target, which comes first, may hold a caller's own objects.
        before, _, behind = text[:-1].rpartition(plain)
        out.append(msgspec.Raw(f'{before}{described}{behind},"id":"{id_}",{tail},{times}}}'.encode()))
    return out


def _is_its_own(schedule: Schedule | None) -> bool:
    """Whether two jobs with this schedule may fall due at different instants."""
    return schedule is not None and (schedule.jitter is not None or hashes(schedule))


def _new_schedule(
    schedule: Schedule | None, plain: str, seed: str, pool: str, at: datetime, estimates: Estimates
) -> tuple[str, str, str]:
    """A schedule as it stands in a job's JSON, the same with its description, and its first instants."""
    words = "" if schedule is None else encode(_explained(schedule, seed, rules_of(schedule.timezone))).decode()
    first = first_fire(schedule, at, None, seed)
    times = encode(_times(first and first + spread(schedule, seed), pool, estimates)).decode()
    described = plain if schedule is None else f"{plain[:-1]},{words[1:]}"
    return (
        f'"schedule":{plain}',
        f'"schedule":{described}',
        times[1:-1],
    )


def _times(due: datetime | None, pool: str, estimates: Estimates) -> dict[str, str | None]:
    if due is None:
        return {"next_run_at": None, "estimated_start_at": None}
    start = estimates(pool, due)
    return {"next_run_at": iso(due), "estimated_start_at": None if start is None else iso(start)}


def _explained(schedule: Schedule, seed: str, zone_rules: str | None) -> dict[str, Any]:
    return {"description": describe(schedule, seed), "tzdata": release_of(zone_rules)}


def _document(who: Identity, row: Row, estimates: Estimates) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(row["spec"])
    schedule, seed = document.get("schedule"), seed_of(who.tenant, document.get("name"), row["id"])
    known = None
    if schedule is not None:
        known = msgspec.convert(schedule, Schedule, dec_hook=decode_scalar)
        schedule |= _explained(known, seed, row["zone_rules"])
    cursor = row["next_fire_at"] and row["next_fire_at"] + spread(known, seed)
    due = min((at for at in (cursor, row["ready_at"]) if at is not None), default=None)
    last = row["last_run_id"] and {
        "id": row["last_run_id"],
        "state": row["last_run_state"],
        "finished_at": iso(row["last_run_finished_at"]),
    }
    times = _times(due, document["pool"], estimates)
    return (
        document
        | times
        | {
            "id": row["id"],
            "tenant": who.tenant,
            "version": row["version"],
            "state": row["state"],
            "created_at": iso(row["created_at"]),
            "updated_at": iso(row["updated_at"]),
            "last_run": last,
            "stats": {
                "ended": row["ended"],
                "succeeded": row["succeeded"],
                "dead": row["dead"],
                "mean_ms": _rounded(row["mean_ms"]),
                "longest_ms": _rounded(row["longest_ms"]),
            },
            "feeds": [] if row["feeds"] is None else msgspec.json.decode(row["feeds"]),
        }
    )


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)
