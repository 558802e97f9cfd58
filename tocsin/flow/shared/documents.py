"""Documents that more than one step answers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from tocsin.clock import iso
from tocsin.model.packed import result_shown, shown
from tocsin.store.db import Row

# What a run that was just made has none of yet.
NEW_RUN: dict[str, Any] = dict.fromkeys(
    (
        *("outcome", "reason", "blocked_by", "started_at", "finished_at", "worker", "exit_code", "error_class"),
        *("error", "args", "result", "usage", "tags", "origin_run_id", "progress", "logical_at"),
        "workflow_run_id",
    )
) | dict(count=1, attempt=0, failures=0, losses=0, fence=0)


def run_document(row: Row | Mapping[str, Any]) -> dict[str, Any]:
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
        "scheduled_for": instant(row["scheduled_for"]),
        "ready_at": instant(row["ready_at"]),
        "logical_at": instant(row["logical_at"]),
        "started_at": instant(row["started_at"]),
        "finished_at": instant(row["finished_at"]),
        "duration_ms": milliseconds(row["started_at"], row["finished_at"]),
        "start_lag_ms": milliseconds(row["ready_at"], row["started_at"]),
        "worker": row["worker"],
        "progress": row["progress"],
        "exit_code": row["exit_code"],
        "error": error_of(row),
        "args": shown(row["args"]),
        "result": result_shown(row["result"]),
        "usage": raw(row["usage"]),
        "tags": raw(row["tags"]) or {},
        "trigger": row["trigger"],
        "origin_run_id": row["origin_run_id"],
        "workflow_run_id": row["workflow_run_id"],
        "logs_url": f"/v1/runs/{row['id']}/logs",
    }


def error_of(row: Row | Mapping[str, Any]) -> dict[str, str] | None:
    """Class and message of what went wrong, if anything did."""
    if row["error_class"] is None:
        return None
    return {"class": row["error_class"], "message": row["error"] or ""}


def instant(at: datetime | None) -> str | None:
    """RFC 3339, if it is there."""
    return None if at is None else iso(at)


def raw(text: str | None) -> msgspec.Raw | None:
    """Stored JSON, passed on as it is."""
    return None if text is None else msgspec.Raw(text.encode())


def milliseconds(start: datetime | None, end: datetime | None) -> float | None:
    """How long from one to the other, if both are there."""
    return None if start is None or end is None else round((end - start).total_seconds() * 1000, 3)
