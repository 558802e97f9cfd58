"""The calls about workflows, their runs, and backfills: as in `calls`, one function each.

A workflow is a job, and its run is a run: what holds for any of them (`get_named_job`, `wait`, `logs`) holds here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from tocsin.client.asking import delete, get, listing, post, text_of, write
from tocsin.client.core import Call, Document, Page
from tocsin.model.workflow import WorkflowSpec

WorkflowDocument = Mapping[str, Any] | WorkflowSpec


def create_workflow(spec: WorkflowDocument, *, idempotency_key: str | None = None) -> Call[Document]:
    """Store a workflow; answers it with every default filled in."""
    return write("POST", "v1", "workflows", body=spec, key=idempotency_key)


def put_workflow(
    name: str, spec: WorkflowDocument, *, if_match: int | None = None, idempotency_key: str | None = None
) -> Call[Document]:
    """Make the workflow of this name what `spec` says, or make it; the same again changes nothing. Runs that have begun
    keep the graph they began with."""
    return write("PUT", "v1", "workflows", "by-name", name, body=spec, key=idempotency_key, if_match=if_match)


def get_workflow(workflow_id: str) -> Call[Document]:
    """One workflow."""
    return get("v1", "workflows", workflow_id)


def list_workflows(*, state: str | None = None, q: str | None = None, limit: int | None = None) -> Call[Page]:
    """Workflows, newest first; `q` is part of a name."""
    return listing("v1", "workflows", state=state, q=q, limit=limit)


def delete_workflow(workflow_id: str, *, if_match: int | None = None) -> Call[Document]:
    """Cancel a workflow and free its name; its history stays."""
    return delete("v1", "workflows", workflow_id, if_match=if_match)


def pause_workflow(workflow_id: str, reason: str = "", *, if_match: int | None = None) -> Call[Document]:
    """Begin no more runs of it until it is resumed."""
    return post("v1", "workflows", workflow_id, "pause", body={"reason": reason}, if_match=if_match)


def resume_workflow(workflow_id: str, reason: str = "", *, if_match: int | None = None) -> Call[Document]:
    """End a pause."""
    return post("v1", "workflows", workflow_id, "resume", body={"reason": reason}, if_match=if_match)


def cancel_workflow(
    workflow_id: str, reason: str = "", *, running: Literal["stop", "leave"] = "stop", if_match: int | None = None
) -> Call[Document]:
    """End a workflow for good, and stop its runs unless they are to be left."""
    body = {"reason": reason, "running": running}
    return post("v1", "workflows", workflow_id, "cancel", body=body, if_match=if_match)


def run_workflow(
    workflow_id: str,
    args: Mapping[str, Any] | None = None,
    *,
    at: datetime | str | None = None,
    delay: str | None = None,
    priority: int | None = None,
    sensitive: bool = False,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Ask for a run of the whole; `args` reach the jobs that wait for no other, sealed on their way if they are
    `sensitive`."""
    asked = {"args": args, "at": None if at is None else text_of(at), "delay": delay, "priority": priority}
    asked |= {"sensitive": sensitive or None}
    body = {name: value for name, value in asked.items() if value is not None}
    return post("v1", "workflows", workflow_id, "runs", body=body, key=idempotency_key)


def get_workflow_run(run_id: str) -> Call[Document]:
    """A run with its graph: `{state, progress, nodes, edges, critical_path, …}`."""
    return get("v1", "workflow-runs", run_id)


def list_workflow_runs(
    *, workflow: str | None = None, state: str | None = None, limit: int | None = None
) -> Call[Page]:
    """Runs of workflows, or of one by its id, newest first."""
    return listing("v1", "workflow-runs", workflow=workflow, state=state, limit=limit)


def cancel_workflow_run(run_id: str, reason: str = "") -> Call[Document]:
    """Stop what runs of it, and begin nothing more."""
    return post("v1", "workflow-runs", run_id, "cancel", body={"reason": reason})


def retry_workflow_run(run_id: str, *, idempotency_key: str | None = None) -> Call[Document]:
    """Run again what failed of it, and what was not run because of that, in the same workflow run."""
    return post("v1", "workflow-runs", run_id, "retry", key=idempotency_key)


# ── backfills ────────────────────────────────────────────────────────────────────────────────────────────────────


def backfill(
    job_id: str,
    *,
    from_: datetime | str,
    to: datetime | str,
    args: Mapping[str, Any] | None = None,
    max_concurrency: int | None = None,
    priority: int | None = None,
    schedule: Mapping[str, Any] | None = None,
    rerun: Literal["all", "missing", "failed"] | None = None,
    dry_run: bool = False,
    idempotency_key: str | None = None,
) -> Call[Document]:
    """Make the occurrences that a job or workflow had in a past range, by its schedule or another, as runs with their
    logical times: all, those that never ran (`rerun="missing"`), or those that never succeeded (`"failed"`); `dry_run`
    only counts them."""
    asked: dict[str, Any] = {"args": args, "max_concurrency": max_concurrency, "priority": priority}
    asked |= {"schedule": schedule, "rerun": rerun, "dry_run": dry_run or None}
    body = {"from": text_of(from_), "to": text_of(to)} | {k: v for k, v in asked.items() if v is not None}
    return post("v1", "jobs", job_id, "backfill", body=body, key=idempotency_key)


def get_backfill(backfill_id: str) -> Call[Document]:
    """One backfill and how far it is."""
    return get("v1", "backfills", backfill_id)


def list_backfills(*, job: str | None = None, state: str | None = None, limit: int | None = None) -> Call[Page]:
    """Backfills, newest first."""
    return listing("v1", "backfills", job=job, state=state, limit=limit)


def pause_backfill(backfill_id: str, reason: str = "") -> Call[Document]:
    """Make no more of its runs until it is resumed."""
    return post("v1", "backfills", backfill_id, "pause", body={"reason": reason})


def resume_backfill(backfill_id: str, reason: str = "") -> Call[Document]:
    """End a pause."""
    return post("v1", "backfills", backfill_id, "resume", body={"reason": reason})


def cancel_backfill(
    backfill_id: str, reason: str = "", *, running: Literal["stop", "leave"] = "stop"
) -> Call[Document]:
    """End it for good, and stop its runs unless they are to be left."""
    return post("v1", "backfills", backfill_id, "cancel", body={"reason": reason, "running": running})
