"""What the API answers about workflows, as types."""

from __future__ import annotations

from typing import Any

from msgspec import field

from tocsin.model.graph import On
from tocsin.model.scalars import Instant
from tocsin.model.workflow import WorkflowSpec
from tocsin.node.server.replies import Id, JobSchedule, JobState, JobStats, LastRun, Reply, RunState, Trigger
from tocsin.wire import RunError


class Workflow(WorkflowSpec, kw_only=True, frozen=True, forbid_unknown_fields=False):
    """The document as it was given, every default filled in, and what became of it."""

    schedule: JobSchedule | None = None
    id: Id
    tenant: str
    version: int
    state: JobState
    created_at: Instant
    updated_at: Instant
    next_run_at: Instant | None
    estimated_start_at: Instant | None
    last_run: LastRun | None
    stats: JobStats


class WorkflowRunSummary(Reply):
    """A run of a workflow. `retries`: how often what failed of it was run again; `started_at` is that of its first try,
    state and end are those of the last."""

    id: Id
    workflow_id: Id
    workflow_name: str | None
    workflow_version: int | None
    state: RunState
    reason: str | None
    blocked_by: str | None
    trigger: Trigger
    scheduled_for: Instant | None
    logical_at: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    duration_ms: float | None
    error: RunError | None
    retries: int


class WorkflowNode(Reply):
    """A job of a workflow run, by its last run there. `layer`: how many jobs stand before it on the longest way;
    `elements`: of a mapped one, how many of its runs are in which state, and its `result` is the list of theirs. One of
    more than 4,096 bytes (`result_bytes`) is told with the run, of a mapped one with each, and null here."""

    name: str
    layer: int
    job_id: Id | None
    run_id: Id | None
    state: RunState
    reason: str | None
    blocked_by: str | None
    attempt: int
    started_at: Instant | None
    finished_at: Instant | None
    duration_ms: float | None
    error: RunError | None
    result: Any
    result_bytes: int | None
    elements: dict[str, int] | None


class WorkflowEdge(Reply):
    """That one job waits for another to end so."""

    from_: str = field(name="from")
    to: str
    on: On


class CriticalPath(Reply):
    """The chain of jobs that took longest, and how long in all."""

    nodes: list[str]
    duration_ms: float


class WorkflowRun(WorkflowRunSummary):
    """The same with its graph, parents before children; `progress`: how many of its jobs are in which state."""

    args: Any
    head_run_id: Id
    progress: dict[str, int]
    nodes: list[WorkflowNode]
    edges: list[WorkflowEdge]
    critical_path: CriticalPath
    now: Instant
