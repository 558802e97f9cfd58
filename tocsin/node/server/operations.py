"""What each route takes and answers: a row for each one that is built; `tests/surface` fails when one is missing.

A route's query parameters stand here, and nowhere else, for the check that refuses all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from tocsin.model import backfill, circuit
from tocsin.model.calendars import Mode
from tocsin.model.circuit import CircuitPolicy
from tocsin.model.job import JobSpec, RunRequest
from tocsin.model.reports import GROUPS
from tocsin.model.states import FINAL, JOB_STATES, LIVE, OUTCOMES
from tocsin.model.workflow import WorkflowSpec
from tocsin.node.server.audit_replies import AuditProof, AuditRecord
from tocsin.node.server.backfill_replies import Backfill, BackfillPreview
from tocsin.node.server.log_replies import FoundLines, Logs, LogsStored, TailedLine
from tocsin.node.server.replies import (
    Attempt,
    Completed,
    DeadLetter,
    Discarded,
    Event,
    Explanation,
    FailuresOf,
    Job,
    Jobs,
    Key,
    MadeRunBatch,
    MasterKeyList,
    NamedCalendar,
    NamedCircuit,
    NamedSecret,
    NewKeyReply,
    Occurrence,
    Page,
    Pool,
    Redriven,
    ReportOf,
    Rotated,
    RotatedKey,
    Run,
    RunsOf,
    SchedulePreview,
    UtilisationOf,
    Version,
    Worker,
)
from tocsin.node.server.tenant_replies import Tenant, TenantInUse, Usage
from tocsin.node.server.workflow_replies import Workflow, WorkflowRun, WorkflowRunSummary
from tocsin.wire import (
    BackfillRequest,
    CalendarRequest,
    Claim,
    ClaimAnswer,
    Completion,
    Confirmation,
    JobBatch,
    Letters,
    LogShipment,
    NewKey,
    NewSecret,
    NewTenant,
    Notes,
    NotesAnswer,
    Nothing,
    Parent,
    PoolPatch,
    PreviewRequest,
    Reason,
    Register,
    Registered,
    Report,
    ReportAnswer,
    Rotation,
    RunBatch,
    TenantPatch,
    Why,
)

Patch = dict[str, Any]
_PAGED = ("limit", "cursor")
_REPORT = ("from", "to", "by", "limit")
_OR_CSV = ("application/json", "text/csv")
_RUN_FILTERS = ("state", "outcome", "error_class", "worker", "tag", "from", "to")


# Accepted values of query parameters, by path and name or by name alone. Any other value is refused.
_CHOICES: dict[str, tuple[str, ...]] = {
    "/v1/jobs?state": JOB_STATES,
    "/v1/workflows?state": JOB_STATES,
    "/v1/backfills?state": get_args(backfill.State),
    "/v1/circuits?state": get_args(circuit.State),
    "state": (*LIVE, *FINAL),
    "outcome": OUTCOMES,
    "stream": ("stdout", "stderr", "log", "system"),
    "format": ("text", "ndjson"),
    "/v1/audit/export?format": ("ndjson", "csv"),
    "type": ("run", "job", "circuit"),
    "mode": get_args(Mode),
    **{f"/v1/reports/{kind}?by": groups for kind, groups in GROUPS.items()},
}


def choices(path: str, name: str) -> tuple[str, ...]:
    """Return the values that a query parameter of a route accepts. An empty tuple means that it accepts any value."""
    return _CHOICES.get(f"{path}?{name}") or _CHOICES.get(name, ())


class Operation(NamedTuple):
    """One route as the document tells it. `body` may be left out if `optional`; `keyed`: takes `Idempotency-Key`;
    `versioned`: takes `If-Match`; `problems`: what it may answer beside `_ALWAYS`."""

    summary: str
    reply: Any = None
    status: int = 200
    body: Any = None
    optional: bool = False
    query: tuple[str, ...] = ()
    keyed: bool = False
    versioned: bool = False
    problems: tuple[int, ...] = ()
    also: tuple[int, ...] = ()  # other statuses of success …
    other: Any = None  # … and their reply, if it is not the same
    media: tuple[str, ...] = ("application/json",)  # all but the first are text


def _control(summary: str, reply: Any, versioned: bool = True) -> Operation:
    return Operation(summary, reply, body=Reason, optional=True, keyed=True, versioned=versioned, problems=(409,))


def _switch_pool(summary: str) -> Operation:
    return Operation(summary, Pool, body=Why, optional=True, keyed=True, versioned=True, problems=(409,))


def _switch_circuit(summary: str) -> Operation:
    return Operation(summary, NamedCircuit, body=Why, optional=True, keyed=True, problems=(409,))


def _switch_tenant(summary: str) -> Operation:
    return Operation(summary, TenantInUse, body=Why, optional=True, keyed=True, problems=(409,))


def _fill(what: str) -> Operation:
    return Operation(
        f"Fill a past range: run what the {what}'s schedule owed in it, so many at a time; or, as a dry run, count it",
        *(Backfill, 202, BackfillRequest),
        also=(200,),
        other=BackfillPreview,
        keyed=True,
        problems=(409,),
    )


def _switch_backfill(summary: str) -> Operation:
    return Operation(summary, Backfill, body=Why, optional=True, keyed=True, problems=(409,))


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/jobs"): Operation("Create a job", Job, 201, JobSpec, keyed=True, problems=(409,)),
    ("GET", "/v1/jobs"): Operation("List jobs", Page[Job], query=("state", "tag", "q", "pool", *_PAGED)),
    ("POST", "/v1/jobs/batch"): Operation(
        "Create many jobs, all or none", Jobs, 201, JobBatch, keyed=True, problems=(409,)
    ),
    ("GET", "/v1/jobs/by-name/{name}"): Operation("Read the open job of this name", Job),
    ("PUT", "/v1/jobs/by-name/{name}"): Operation(
        "Create the job of this name, or replace it; the same document makes no new version",
        *(Job, 200, JobSpec),
        also=(201,),
        keyed=True,
        versioned=True,
        problems=(409,),
    ),
    ("GET", "/v1/jobs/{id}"): Operation("Read a job", Job),
    ("PATCH", "/v1/jobs/{id}"): Operation(
        "Change a job (JSON merge patch): a new version; running runs keep theirs",
        *(Job, 200, Patch),
        keyed=True,
        versioned=True,
        problems=(409,),
    ),
    ("POST", "/v1/schedules/preview"): Operation(
        "Say what a schedule means, when it would fire, and what may surprise", SchedulePreview, body=PreviewRequest
    ),
    ("GET", "/v1/jobs/{id}/occurrences"): Operation(
        "List what a job owed and what became of it, oldest first", Page[Occurrence], query=("from", "to", *_PAGED)
    ),
    ("GET", "/v1/jobs/{id}/versions"): Operation("List the versions of a job", Page[Version], query=_PAGED),
    ("DELETE", "/v1/jobs/{id}"): Operation(
        "Delete a job: cancels it, keeps its history", Job, keyed=True, versioned=True, problems=(409,)
    ),
    ("POST", "/v1/jobs/{id}/cancel"): _control("Cancel a job, and stop its runs unless told to leave them", Job),
    ("POST", "/v1/jobs/{id}/pause"): _control("Pause a job", Job),
    ("POST", "/v1/jobs/{id}/resume"): _control("Resume a paused job", Job),
    ("POST", "/v1/jobs/{id}/runs"): Operation(
        "Run a job now, or at a given time", Run, 202, RunRequest, optional=True, keyed=True, problems=(409,)
    ),
    ("POST", "/v1/jobs/{id}/runs/batch"): Operation(
        "Make many runs of a job, all or none", MadeRunBatch, 202, RunBatch, keyed=True, problems=(409,)
    ),
    ("POST", "/v1/jobs/{id}/backfill"): _fill("job"),
    ("GET", "/v1/backfills"): Operation("List backfills", Page[Backfill], query=("job", "state", *_PAGED)),
    ("GET", "/v1/backfills/{id}"): Operation("Read a backfill and how far it is", Backfill),
    ("POST", "/v1/backfills/{id}/pause"): _switch_backfill("Make no more runs of a backfill; those that live go on"),
    ("POST", "/v1/backfills/{id}/resume"): _switch_backfill("Go on with a paused backfill"),
    ("POST", "/v1/backfills/{id}/cancel"): _control(
        "End a backfill, and stop its runs unless told to leave them", Backfill, versioned=False
    ),
    ("POST", "/v1/workflows"): Operation(
        "Create a workflow: jobs with one schedule, and what each waits for",
        *(Workflow, 201, WorkflowSpec),
        keyed=True,
        problems=(409,),
    ),
    ("GET", "/v1/workflows"): Operation("List workflows", Page[Workflow], query=("state", "q", *_PAGED)),
    ("PUT", "/v1/workflows/by-name/{name}"): Operation(
        "Create the workflow of this name, or replace it: runs that have begun keep the graph they began with",
        *(Workflow, 200, WorkflowSpec),
        also=(201,),
        keyed=True,
        versioned=True,
        problems=(409,),
    ),
    ("GET", "/v1/workflows/{id}"): Operation("Read a workflow", Workflow),
    ("DELETE", "/v1/workflows/{id}"): Operation(
        "Delete a workflow: cancels it, keeps its history", Workflow, keyed=True, versioned=True, problems=(409,)
    ),
    ("POST", "/v1/workflows/{id}/cancel"): _control(
        "Cancel a workflow, and stop its runs unless told to leave them", Workflow
    ),
    ("POST", "/v1/workflows/{id}/pause"): _control("Pause a workflow: none of its jobs starts", Workflow),
    ("POST", "/v1/workflows/{id}/resume"): _control("Resume a paused workflow", Workflow),
    ("POST", "/v1/workflows/{id}/backfill"): _fill("workflow"),
    ("POST", "/v1/workflows/{id}/runs"): Operation(
        "Run a workflow now, or at a given time; its first jobs get the arguments",
        *(WorkflowRun, 202, RunRequest),
        optional=True,
        keyed=True,
        problems=(409,),
    ),
    ("GET", "/v1/workflow-runs"): Operation(
        "List runs of workflows", Page[WorkflowRunSummary], query=("workflow", "state", *_PAGED)
    ),
    ("GET", "/v1/workflow-runs/{id}"): Operation("Read a workflow run with its graph", WorkflowRun),
    ("POST", "/v1/workflow-runs/{id}/cancel"): _control(
        "Cancel a workflow run and all that lives of it", WorkflowRun, versioned=False
    ),
    ("POST", "/v1/workflow-runs/{id}/retry"): Operation(
        "Run again what failed of a workflow run, and what did not run because of that",
        *(WorkflowRun, 202, Nothing),
        optional=True,
        keyed=True,
        problems=(409,),
    ),
    ("GET", "/v1/jobs/{id}/runs"): Operation("List the runs of a job", Page[Run], query=(*_RUN_FILTERS, *_PAGED)),
    ("GET", "/v1/runs"): Operation("List runs, live and ended", Page[Run], query=("job", *_RUN_FILTERS, *_PAGED)),
    ("GET", "/v1/runs/{id}"): Operation("Read a run", Run),
    ("GET", "/v1/runs/{id}/attempts"): Operation("Read the attempts of a run, oldest first", Page[Attempt]),
    ("GET", "/v1/runs/{id}/explain"): Operation("Say why a run has not started, and when it may", Explanation),
    ("POST", "/v1/runs/{id}/cancel"): _control("Cancel a run", Run, versioned=False),
    ("POST", "/v1/runs/{id}/retry"): Operation(
        "Run an ended run again, as a new run; a job of a workflow run again, in its place there",
        *(Run, 202, Nothing),
        optional=True,
        keyed=True,
        problems=(409,),
    ),
    ("GET", "/v1/runs/{id}/parents"): Operation(
        "Read how the runs ended that a run waited for, and what they resulted in: with its run token, not with a key",
        dict[str, Parent],
        problems=(409, 413),
    ),
    ("POST", "/v1/runs/{id}/complete"): Operation(
        "End an attempt in its own words: with its run token, not with a key",
        *(Completed, 200, Completion),
        optional=True,
        problems=(409,),
    ),
    ("GET", "/v1/runs/{id}/logs"): Operation(
        "Read the log of a run", Logs, query=("attempt", "stream", "after", "limit")
    ),
    ("GET", "/v1/runs/{id}/logs/stream"): Operation(
        "Follow the log of a run until it ends (server-sent events; `line` is as described, `over` comes last)",
        TailedLine,
        query=("attempt", "stream", "after"),
        media=("text/event-stream",),
    ),
    ("GET", "/v1/runs/{id}/logs/download"): Operation(
        "Download the log of an attempt, as text or a JSON document per line",
        str,
        query=("attempt", "stream", "format"),
        media=("text/plain", "application/x-ndjson"),
    ),
    ("GET", "/v1/logs/search"): Operation(
        "Search log lines, newest first (a run's: oldest first); a page may be short, or empty, without being the last",
        FoundLines,
        query=("q", "job", "run", "tag", "from", "to", "level", "error_class", *_PAGED),
    ),
    ("GET", "/v1/events"): Operation(
        "Follow the changes of runs and jobs as they are committed (server-sent events; `data` is as described)",
        Event,
        query=("type", "job", "after"),
        media=("text/event-stream",),
    ),
    ("GET", "/v1/dead-letters"): Operation(
        "List dead letters", Page[DeadLetter], query=("job", "error_class", *_PAGED)
    ),
    ("POST", "/v1/dead-letters/redrive"): Operation(
        "Make a new run of each dead letter", Redriven, body=Letters, keyed=True, problems=(409,)
    ),
    ("POST", "/v1/dead-letters/discard"): Operation(
        "Discard dead letters; their history stays", Discarded, body=Letters, keyed=True, problems=(409,)
    ),
    ("PUT", "/v1/calendars/{name}"): Operation(
        "Make a calendar, or make it another; its jobs follow. An iCalendar file may also be the body (text/calendar)",
        *(NamedCalendar, 200, CalendarRequest),
        also=(201,),
        query=("mode",),
        keyed=True,
        versioned=True,
        problems=(409,),
    ),
    ("GET", "/v1/calendars"): Operation("List calendars, by name", Page[NamedCalendar], query=_PAGED),
    ("GET", "/v1/calendars/{name}"): Operation("Read a calendar", NamedCalendar),
    ("DELETE", "/v1/calendars/{name}"): Operation(
        "Delete a calendar that no open job goes by", None, 204, keyed=True, versioned=True, problems=(409,)
    ),
    ("PUT", "/v1/secrets/{name}"): Operation(
        "Store a secret's value, which is never told again",
        *(NamedSecret, 200, NewSecret),
        also=(201,),
        keyed=True,
        versioned=True,
        problems=(409,),
    ),
    ("GET", "/v1/secrets"): Operation("List secrets, by name, without their values", Page[NamedSecret], query=_PAGED),
    ("GET", "/v1/secrets/{name}"): Operation("Read what there is to know of a secret", NamedSecret),
    ("DELETE", "/v1/secrets/{name}"): Operation(
        "Delete a secret; runs of jobs that name it fail", None, 204, keyed=True, versioned=True, problems=(409,)
    ),
    ("GET", "/v1/master-keys"): Operation("List master keys, and how many keys each wraps", MasterKeyList),
    ("POST", "/v1/master-keys/rotate"): Operation(
        "Wrap some more keys with the first master key; `remaining` says how many are left", Rotated
    ),
    ("GET", "/v1/circuits"): Operation("List circuits, by name", Page[NamedCircuit], query=("state", *_PAGED)),
    ("GET", "/v1/circuits/{name}"): Operation("Read a circuit", NamedCircuit),
    ("PUT", "/v1/circuits/{name}"): Operation(
        "Set when a circuit opens and for how long; makes it if there is none",
        *(NamedCircuit, 200, CircuitPolicy),
        keyed=True,
        problems=(409,),
    ),
    ("POST", "/v1/circuits/{name}/open"): _switch_circuit("Open a circuit until it is closed by hand"),
    ("POST", "/v1/circuits/{name}/close"): _switch_circuit("Close a circuit; what waited goes in growing waves"),
    ("GET", "/v1/audit"): Operation(
        "List what calls have changed; a page may be short, or empty, without being the last",
        Page[AuditRecord],
        query=("actor", "action", "target", "from", "to", *_PAGED),
    ),
    ("GET", "/v1/audit/export"): Operation(
        "Export the audit, newest first, as a JSON document per line or as CSV",
        str,
        query=("actor", "action", "target", "from", "to", "format"),
        media=("application/x-ndjson", "text/csv"),
    ),
    ("GET", "/v1/audit/verify"): Operation(
        "Prove a piece of the audit's hash chain, and hold it to the anchors in object storage",
        AuditProof,
        query=("cursor",),
    ),
    ("GET", "/v1/reports/runs"): Operation(
        "Report what became of runs, how long they took and how late they began (also as text/csv)",
        ReportOf[RunsOf],
        query=_REPORT,
        media=_OR_CSV,
    ),
    ("GET", "/v1/reports/failures"): Operation(
        "Report failures by class (also as text/csv)", ReportOf[FailuresOf], query=_REPORT, media=_OR_CSV
    ),
    ("GET", "/v1/reports/utilisation"): Operation(
        "Report how busy workers, pools or tenants were (also as text/csv)",
        ReportOf[UtilisationOf],
        query=_REPORT,
        media=_OR_CSV,
    ),
    ("GET", "/v1/workers"): Operation("List workers", Page[Worker], query=_PAGED),
    ("GET", "/v1/workers/{id}"): Operation("Read a worker", Worker),
    ("POST", "/v1/workers/{id}/drain"): Operation("Let a worker finish what it has and leave", Worker),
    ("GET", "/v1/pools"): Operation("List pools, by name", Page[Pool], query=_PAGED),
    ("GET", "/v1/pools/{name}"): Operation("Read a pool", Pool),
    ("PATCH", "/v1/pools/{name}"): Operation(
        "Change a pool's policy or head start; runs that are there keep their places",
        *(Pool, 200, PoolPatch),
        keyed=True,
        versioned=True,
        problems=(409,),
    ),
    ("POST", "/v1/pools/{name}/pause"): _switch_pool("Let nothing more be claimed from a pool"),
    ("POST", "/v1/pools/{name}/resume"): _switch_pool("End a pool's pause"),
    ("POST", "/v1/tenants"): Operation("Create a tenant", Tenant, 201, NewTenant, keyed=True, problems=(409,)),
    ("GET", "/v1/tenants"): Operation("List tenants", Page[Tenant], query=_PAGED),
    ("GET", "/v1/tenants/{slug}"): Operation("Read a tenant and what it uses", TenantInUse),
    ("GET", "/v1/tenants/{slug}/usage"): Operation("Read what a tenant uses, and what it may", Usage),
    ("PATCH", "/v1/tenants/{slug}"): Operation(
        "Change a tenant's weight, quotas or allowed hosts", TenantInUse, body=TenantPatch, keyed=True, problems=(409,)
    ),
    ("DELETE", "/v1/tenants/{slug}"): Operation(
        "Erase a tenant and all that it has, for good", TenantInUse, 202, Confirmation, keyed=True, problems=(409,)
    ),
    ("POST", "/v1/tenants/{slug}/suspend"): _switch_tenant("Let nothing more of a tenant start; all of it is kept"),
    ("POST", "/v1/tenants/{slug}/resume"): _switch_tenant("Let a suspended tenant go on"),
    ("POST", "/v1/keys"): Operation("Create a key", NewKeyReply, 201, NewKey, keyed=True, problems=(409,)),
    ("GET", "/v1/keys"): Operation("List keys", Page[Key], query=_PAGED),
    ("GET", "/v1/keys/{id}"): Operation("Read a key, without what opens the door", Key),
    ("POST", "/v1/keys/{id}/rotate"): Operation(
        "Make a key with the same rights; the old one stays good for a while",
        *(RotatedKey, 201, Rotation),
        optional=True,
        keyed=True,
        problems=(409,),
    ),
    ("DELETE", "/v1/keys/{id}"): Operation("Revoke a key", None, 204),
    ("POST", "/v1/worker/register"): Operation("Register a worker", Registered, body=Register),
    ("POST", "/v1/worker/{id}/claim"): Operation(
        "Wait for runs and take them", ClaimAnswer, body=Claim, problems=(409,)
    ),
    ("POST", "/v1/worker/{id}/report"): Operation(
        "Heartbeat, results and hand-backs, and the server's orders", ReportAnswer, body=Report, problems=(409,)
    ),
    ("POST", "/v1/worker/{id}/logs"): Operation("Ship log lines", LogsStored, body=LogShipment, problems=(409,)),
    ("POST", "/v1/worker/{id}/notes"): Operation(
        "Keep what runs say of themselves: progress, and a state for the next attempt", NotesAnswer, body=Notes
    ),
}
