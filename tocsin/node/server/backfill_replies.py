"""What the API answers about backfills, as types."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from tocsin.model.backfill import Rerun, State
from tocsin.model.scalars import Instant
from tocsin.node.server.replies import Id, Reply


class FailedRun(Reply):
    """A run of a backfill that failed for good, and the instant it stood for."""

    id: Id
    logical_at: Instant
    state: Literal["dead", "expired"]


class Backfill(Reply):
    """A past range of a job's schedule as runs, and how far it is. `made` = `live` + `succeeded` + `failed` +
    `cancelled`; `rerun`: which occurrences of the range it has; `failures` names the first hundred that failed;
    `next_at` is the first without a run."""

    id: Id
    job_id: Id
    job_name: str | None
    state: State
    from_: Instant = field(name="from")
    to: Instant
    rerun: Rerun
    total: int
    made: int
    live: int
    succeeded: int
    failed: int
    cancelled: int
    failures: list[FailedRun]
    next_at: Instant | None
    max_concurrency: int
    priority: int
    args: Any
    created_at: Instant
    finished_at: Instant | None


class BackfillPreview(Reply):
    """What a backfill would fill: how many occurrences, the first ones, and the last; `too_many`: more than it may."""

    dry_run: Literal[True]
    total: int
    too_many: bool
    first: list[Instant]
    last: Instant | None
