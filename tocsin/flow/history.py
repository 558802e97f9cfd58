"""history: read runs and attempts, live and ended alike, as the API answers them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import NotFound
from tocsin.model.access import Identity
from tocsin.model.ids import lowest_id
from tocsin.store.db import Database, Row, Sql

SQL = Sql(__file__)


class RunFilter(NamedTuple):
    """What a list of runs is narrowed by."""

    job: str | None = None
    state: str | None = None
    outcome: str | None = None
    error_class: str | None = None
    worker: str | None = None
    tag: dict[str, str] | None = None
    from_: datetime | None = None
    to: datetime | None = None


async def get_run(db: Database, who: Identity, run_id: str) -> dict[str, Any]:
    """One run's document."""
    return (await get_runs(db, who, [run_id]))[0]


async def get_runs(db: Database, who: Identity, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Documents in the order of `ids`; one that is missing is an error."""
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = {row["id"]: row for row in await connection.fetch(SQL["get"], who.tenant_id, list(ids))}
    if len(rows) < len(set(ids)):
        raise NotFound("there is no such run")
    return [run_document(rows[id_]) for id_ in ids]


async def list_runs(
    db: Database, who: Identity, filter_: RunFilter, before: str | None, limit: int
) -> list[dict[str, Any]]:
    """Newest first, over live and ended runs."""
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = await connection.fetch(
            SQL["list"],
            who.tenant_id,
            before,
            filter_.job,
            filter_.state,
            filter_.outcome,
            filter_.error_class,
            filter_.worker,
            msgspec.json.encode(filter_.tag).decode() if filter_.tag else None,
            lowest_id(filter_.from_) if filter_.from_ else None,
            lowest_id(filter_.to) if filter_.to else None,
            limit,
        )
    return [run_document(row) for row in rows]


async def attempts(db: Database, who: Identity, run_id: str) -> list[dict[str, Any]]:
    """Every attempt of a run, oldest first, the one under way included."""
    await get_run(db, who, run_id)
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = await connection.fetch(SQL["attempts"], who.tenant_id, run_id)
    return [
        {
            "attempt": row["attempt"],
            "fence": row["fence"],
            "outcome": row["outcome"],
            "started_at": _iso(row["started_at"]),
            "finished_at": _iso(row["finished_at"]),
            "duration_ms": _milliseconds(row["started_at"], row["finished_at"]),
            "worker": row["worker"],
            "exit_code": row["exit_code"],
            "error": _error(row),
            "result": _raw(row["result"]),
            "usage": _raw(row["usage"]),
        }
        for row in rows
    ]


def run_document(row: Row) -> dict[str, Any]:
    """A run as the API answers it."""
    return {
        "id": row["id"],
        "job_id": row["job_id"],
        "job_name": row["job_name"],
        "job_version": row["job_version"],
        "state": row["state"],
        "outcome": row["outcome"],
        "reason": row["reason"],
        "count": row["count"],
        "blocked_by": row["blocked_by"],
        "attempt": row["attempt"],
        "failures": row["failures"],
        "losses": row["losses"],
        "max_attempts": row["max_attempts"],
        "fence": row["fence"],
        "priority": row["priority"],
        "scheduled_for": _iso(row["scheduled_for"]),
        "ready_at": _iso(row["ready_at"]),
        "logical_at": None,
        "started_at": _iso(row["started_at"]),
        "finished_at": _iso(row["finished_at"]),
        "duration_ms": _milliseconds(row["started_at"], row["finished_at"]),
        "start_lag_ms": _milliseconds(row["ready_at"], row["started_at"]),
        "worker": row["worker"],
        "exit_code": row["exit_code"],
        "error": _error(row),
        "args": _raw(row["args"]),
        "result": _raw(row["result"]),
        "usage": _raw(row["usage"]),
        "tags": _raw(row["tags"]) or {},
        "trigger": row["trigger"],
        "origin_run_id": row["origin_run_id"],
        "workflow_run_id": None,
        "logs_url": f"/v1/runs/{row['id']}/logs",
    }


def _error(row: Row) -> dict[str, str] | None:
    if row["error_class"] is None:
        return None
    return {"class": row["error_class"], "message": row["error"] or ""}


def _iso(at: datetime | None) -> str | None:
    return None if at is None else iso(at)


def _raw(text: str | None) -> msgspec.Raw | None:
    return None if text is None else msgspec.Raw(text.encode())


def _milliseconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else round((end - start).total_seconds() * 1000, 3)
