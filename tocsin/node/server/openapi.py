"""The OpenAPI 3.1 document, made of the types that decode the bodies, and the page that shows it.

`OPERATIONS` has a row for each route that is built; `tests/surface` fails when one is missing. A route's
query parameters stand here, and nowhere else, for the check that refuses all others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import _json_schema as json_schema

import tocsin
from tocsin.model.access import PERMISSIONS
from tocsin.model.calendars import Mode
from tocsin.model.circuit import CircuitPolicy
from tocsin.model.job import JobSpec, RunRequest
from tocsin.model.reports import GROUPS
from tocsin.model.scalars import Duration, Instant, encode_scalar
from tocsin.node.server.audit_replies import AuditProof, AuditRecord
from tocsin.node.server.log_replies import FoundLine, Logs, LogsStored, TailedLine
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
    Problem,
    Redriven,
    ReportOf,
    Rotated,
    Run,
    RunsOf,
    SchedulePreview,
    Tenant,
    TenantInUse,
    UtilisationOf,
    Version,
    Worker,
)
from tocsin.wire import (
    CalendarRequest,
    Claim,
    ClaimAnswer,
    Completion,
    JobBatch,
    Letters,
    LogShipment,
    NewKey,
    NewSecret,
    NewTenant,
    Notes,
    NotesAnswer,
    Nothing,
    PoolPatch,
    PreviewRequest,
    Reason,
    Register,
    Registered,
    Report,
    ReportAnswer,
    RunBatch,
    TenantPatch,
    Why,
)

Patch = dict[str, Any]
_REF = "#/components/schemas/{name}"
_PAGED = ("limit", "cursor")
_REPORT = ("from", "to", "by", "limit")
_OR_CSV = ("application/json", "text/csv")
_RUN_FILTERS = ("state", "outcome", "error_class", "worker", "tag", "from", "to")

# Fields that decode and are refused as not supported yet: the document does not promise them.
NOT_BUILT: dict[str, tuple[str, ...]] = {
    "JobSpec": ("depends_on", "notify"),
}
# What any call may answer: unreadable, unknown caller, not allowed, too many headers, out of order.
_ALWAYS = (400, 401, 403, 404, 422, 431, 503)
_WITH_BODY = (413, 415)


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
    also: tuple[int, ...] = ()  # other statuses of success, with the same reply
    media: tuple[str, ...] = ("application/json",)  # all but the first are text


def _control(summary: str, reply: Any, versioned: bool = True) -> Operation:
    return Operation(summary, reply, body=Reason, optional=True, keyed=True, versioned=versioned, problems=(409,))


def _switch_pool(summary: str) -> Operation:
    return Operation(summary, Pool, body=Why, optional=True, keyed=True, versioned=True, problems=(409,))


def _switch_circuit(summary: str) -> Operation:
    return Operation(summary, NamedCircuit, body=Why, optional=True, keyed=True, problems=(409,))


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/jobs"): Operation("Create a job", Job, 201, JobSpec, keyed=True, problems=(409, 429)),
    ("GET", "/v1/jobs"): Operation("List jobs", Page[Job], query=("state", "tag", "q", "pool", *_PAGED)),
    ("POST", "/v1/jobs/batch"): Operation(
        "Create many jobs, all or none", Jobs, 201, JobBatch, keyed=True, problems=(409, 429)
    ),
    ("GET", "/v1/jobs/by-name/{name}"): Operation("Read the open job of this name", Job),
    ("PUT", "/v1/jobs/by-name/{name}"): Operation(
        "Create the job of this name, or replace it; the same document makes no new version",
        *(Job, 200, JobSpec),
        also=(201,),
        keyed=True,
        versioned=True,
        problems=(409, 429),
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
        "Run a job now, or at a given time", Run, 202, RunRequest, optional=True, keyed=True, problems=(409, 429)
    ),
    ("POST", "/v1/jobs/{id}/runs/batch"): Operation(
        "Make many runs of a job, all or none", MadeRunBatch, 202, RunBatch, keyed=True, problems=(409, 429)
    ),
    ("GET", "/v1/jobs/{id}/runs"): Operation("List the runs of a job", Page[Run], query=(*_RUN_FILTERS, *_PAGED)),
    ("GET", "/v1/runs"): Operation("List runs, live and ended", Page[Run], query=("job", *_RUN_FILTERS, *_PAGED)),
    ("GET", "/v1/runs/{id}"): Operation("Read a run", Run),
    ("GET", "/v1/runs/{id}/attempts"): Operation("Read the attempts of a run, oldest first", Page[Attempt]),
    ("GET", "/v1/runs/{id}/explain"): Operation("Say why a run has not started, and when it may", Explanation),
    ("POST", "/v1/runs/{id}/cancel"): _control("Cancel a run", Run, versioned=False),
    ("POST", "/v1/runs/{id}/retry"): Operation(
        "Run an ended run again, as a new run", Run, 202, Nothing, optional=True, keyed=True, problems=(409, 429)
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
        problems=(429,),
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
        Page[FoundLine],
        query=("q", "job", "run", "tag", "from", "to", "level", "error_class", *_PAGED),
    ),
    ("GET", "/v1/events"): Operation(
        "Follow the changes of runs and jobs as they are committed (server-sent events; `data` is as described)",
        Event,
        query=("type", "job", "after"),
        problems=(429,),
        media=("text/event-stream",),
    ),
    ("GET", "/v1/dead-letters"): Operation(
        "List dead letters", Page[DeadLetter], query=("job", "error_class", *_PAGED)
    ),
    ("POST", "/v1/dead-letters/redrive"): Operation(
        "Make a new run of each dead letter", Redriven, body=Letters, keyed=True, problems=(409, 429)
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
    ("PATCH", "/v1/tenants/{slug}"): Operation(
        "Change a tenant's weight, quotas or allowed hosts", TenantInUse, body=TenantPatch, keyed=True, problems=(409,)
    ),
    ("POST", "/v1/keys"): Operation("Create a key", NewKeyReply, 201, NewKey, keyed=True, problems=(409,)),
    ("GET", "/v1/keys"): Operation("List keys", Page[Key], query=_PAGED),
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

_STRING: dict[str, Any] = {"type": "string", "maxLength": 1024}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 500}
_UUID: dict[str, Any] = {"type": "string", "format": "uuid"}
_TIME: dict[str, Any] = {"type": "string", "format": "date-time"}
_NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-zA-Z0-9._-]{1,128}$"}
_QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "limit": ("how many at most", {**_LIMIT, "default": 50}),
    "cursor": ("`next_cursor` of the page before", _STRING),
    "state": ("only those in this state", _STRING),
    "outcome": ("only those whose last attempt ended so", _STRING),
    "error_class": ("only those with this class of error", _STRING),
    "tag": ("only those with this tag, written `key:value`", {**_STRING, "examples": ["team:portfolio"]}),
    "q": ("only those whose name holds this text", _STRING),
    "pool": ("only those of this pool", _STRING),
    "job": ("only those of this job, by its id", _UUID),
    "worker": ("only those that this worker holds or held, by its id", _UUID),
    "from": ("only those made at this time or later", _TIME),
    "to": ("only those made before this time", _TIME),
    "/v1/jobs/{id}/occurrences?from": ("instants from this one on; a day before `to` unless given", _TIME),
    "/v1/jobs/{id}/occurrences?to": ("instants before this one, a year later at most; now unless given", _TIME),
    **{
        name.format(kind): (text, schema)
        for kind, groups in GROUPS.items()
        for name, text, schema in (
            ("/v1/reports/{}?from", "runs made at this time or later; a day before `to` unless given", _TIME),
            ("/v1/reports/{}?to", "runs made before this time; now unless given", _TIME),
            ("/v1/reports/{}?limit", "how many groups at most; 100 unless given", _LIMIT),
            ("/v1/reports/{}?by", "what to group by", {"type": "string", "enum": list(groups), "default": groups[0]}),
        )
    },
    "actor": ("only what this caller did: `key:` and the name of its key", _STRING),
    "action": ("only this, such as job.create", _STRING),
    "target": ("only what was done to this, such as `job:` and its id", _STRING),
    "/v1/audit?from": ("only what was done at this time or later", _TIME),
    "/v1/audit?to": ("only what was done before this time", _TIME),
    "mode": (
        "what becomes of occurrences on the days of an iCalendar file that is the body; skip unless given",
        {"type": "string", "enum": list(get_args(Mode))},
    ),
    "attempt": ("which attempt; the latest unless given", {"type": "integer", "minimum": 1, "maximum": 999_999_999}),
    "stream": ("only lines of this stream: stdout, stderr or system", _STRING),
    "after": ("only lines behind this one", {"type": "integer", "minimum": 0, "maximum": 999_999_999}),
    "/v1/runs/{id}/logs/stream?attempt": (
        "only lines of this attempt; of all, one after the other, unless given",
        {"type": "integer", "minimum": 1, "maximum": 999_999_999},
    ),
    "/v1/runs/{id}/logs/stream?after": (
        "go on behind the line with this id, `attempt.seq`; the header `Last-Event-ID` goes before it",
        _STRING,
    ),
    "/v1/logs/search?q": (
        'words that a line must have, all of them; `begin*` begins a word, `"a b"` are words that follow each other',
        _STRING,
    ),
    "/v1/logs/search?from": ("only lines written at this time or later", _TIME),
    "/v1/logs/search?to": ("only lines written before this time", _TIME),
    "run": ("only lines of this run, by its id", _UUID),
    "level": ("only lines of this level", {**_STRING, "examples": ["error"]}),
    "format": ("text unless given", {"type": "string", "enum": ["text", "ndjson"]}),
    "type": ("only events about this", {"type": "string", "enum": ["run", "job", "circuit"]}),
    "/v1/events?after": ("go on behind the event with this id; the header `Last-Event-ID` goes before it", _STRING),
}
_TITLES = {
    400: "The request cannot be read",
    401: "No key, or one that is not known",
    403: "The key's role may not do this",
    404: "There is no such thing here",
    409: "It stands against what is there",
    412: "It is not at the version that If-Match names",
    413: "The body is too large",
    415: "The body has another type or encoding",
    422: "Readable, but not acceptable; `errors` names each field",
    429: "Too many; Retry-After says when",
    431: "Too many or too large headers",
    503: "Not now; try again with the same Idempotency-Key",
}
_EXAMPLES: dict[Any, Any] = {
    JobSpec: {
        "name": "nightly-report",
        "schedule": {"cron": "0 9 * * MON-FRI", "timezone": "America/New_York"},
        "target": {"kind": "process", "command": ["python3", "-c", "print('hi')"]},
        "timeout": "PT5M",
        "tags": {"team": "portfolio"},
    },
    JobBatch: {
        "jobs": [
            {"name": name, "target": {"kind": "process", "command": ["echo", name]}, "schedule": {"every": "PT5M"}}
            for name in ("extract", "load")
        ]
    },
    Patch: {"priority": 900, "description": None},
    PreviewRequest: {"schedule": {"text": "last friday of the month at 6pm", "timezone": "Europe/Berlin"}, "count": 3},
    CalendarRequest: {"mode": "skip", "days": ["2026-12-25", "2027-01-01"], "weekdays": ["SAT", "SUN"]},
    RunRequest: {"args": {"day": "2026-12-01"}, "priority": 900},
    RunBatch: {"runs": [{"args": {"day": "2026-12-01"}}, {"args": {"day": "2026-12-02"}}]},
    Reason: {"reason": "the report is wrong"},
    CircuitPolicy: {"failure_ratio": 0.5, "calls": 20, "cooldown": "PT10S"},
    Why: {"reason": "the billing API is down for maintenance"},
    Nothing: {},
    Letters: {"ids": ["019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071"]},
    PoolPatch: {"policy": "priority", "head_start": "PT0.05S"},
    NewSecret: {"value": "correct horse battery staple"},
    NewTenant: {"slug": "acme", "weight": 2},
    Completion: {"outcome": "succeeded", "result": {"rows": 42}},
    TenantPatch: {"weight": 4, "quotas": {"max_queued": 10000, "submit_rate": "100/s", "max_running": None}},
    NewKey: {"role": "editor", "name": "deploy"},
    Register: {"name": "eu-1", "pool": "default", "slots": 8, "targets": ["process"]},
    Claim: {"slots": 8, "last_claim": 0, "wait": 20},
    Report: {
        "last_claim": 7,
        "running": [["019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071", 12]],
        "finished": [
            {"run_id": "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6072", "attempt": 1, "fence": 13, "outcome": "succeeded"}
        ],
    },
    Notes: {
        "notes": [
            {
                "run_id": "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071",
                "fence": 12,
                "progress": 0.5,
                "checkpoint": {"done": 2000},
            }
        ]
    },
    LogShipment: {
        "chunks": [
            {
                "run_id": "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071",
                "attempt": 1,
                "fence": 12,
                "offset": 0,
                "lines": [[1796115600.0, "stdout", "info", "hi"]],
            }
        ]
    },
}


def document(routes: list[tuple[str, str, str, Any]]) -> dict[str, Any]:
    """The whole document, of those of `routes` that are built."""
    types = sorted({t for op in OPERATIONS.values() for t in (op.body, op.reply) if t is not None} | {Problem}, key=str)
    refs, schemas = _schemas(types)
    paths: dict[str, dict[str, Any]] = {}
    for method, path, permission, handler in routes:
        op = OPERATIONS.get((method, path))
        if op is not None and handler.__name__ != "not_yet":
            paths.setdefault(path, {})[method.lower()] = _operation(path, permission, handler.__name__, op, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tocsin",
            "version": tocsin.__version__,
            "summary": "Cron as a service: a durable, multi-tenant, distributed job scheduler on PostgreSQL.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": _portable(schemas),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "an API key"}},
            "responses": {str(status): _problem(title, refs[Problem]) for status, title in _TITLES.items()},
        },
    }


def _schemas(types: list[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """A reference for each type, and the schemas they lead to. msgspec writes defaults down without asking a hook,
    and ours are durations: for this moment it gets one that asks."""
    maker: Any = json_schema
    plain = maker.to_builtins
    maker.to_builtins = functools.partial(plain, enc_hook=encode_scalar)
    try:
        made, schemas = msgspec.json.schema_components(types, schema_hook=_scalar, ref_template=_REF)
    finally:
        maker.to_builtins = plain
    for name, fields in NOT_BUILT.items():
        for field in fields:
            del schemas[name]["properties"][field]
    schemas["JobSpec"]["properties"]["overlap"]["enum"].remove("replace")
    return dict(zip(types, made, strict=True)), schemas


def _operation(path: str, permission: str, name: str, op: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "Done"}
    if op.reply is not None:
        first, *others = op.media
        done["content"] = {first: {"schema": refs[op.reply]}} | {m: {"schema": {"type": "string"}} for m in others}
    done["headers"] = dict(_reply_headers(op))
    problems = (*_ALWAYS, *op.problems, *(_WITH_BODY), *((412,) if op.versioned else ()))
    out: dict[str, Any] = {
        "operationId": name,
        "summary": op.summary,
        "description": f"Least role: {PERMISSIONS[permission]}.",
        "tags": [path.split("/")[2]],
        "parameters": list(_parameters(path, op)),
        "responses": {str(status): done for status in (op.status, *op.also)}
        | {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(problems)},
    }
    if op.body is not None:
        content = {"schema": refs[op.body], "example": _EXAMPLES[op.body]}
        kinds = ("application/json", "application/merge-patch+json")[: 2 if op.body is Patch else 1]
        out["requestBody"] = {"required": not op.optional, "content": dict.fromkeys(kinds, content)}
    return out


def _parameters(path: str, op: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", path):
        yield {"name": name, "in": "path", "required": True, "schema": _UUID if name == "id" else _NAME}
    for name in op.query:
        text, schema = _QUERY.get(f"{path}?{name}") or _QUERY[name]
        yield {"name": name, "in": "query", "description": text, "schema": schema}
    if op.keyed:
        yield {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "a repeat with the same key answers the first reply; kept for 24 hours at least",
            "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
        }
    if op.versioned:
        yield {
            "name": "If-Match",
            "in": "header",
            "description": "the ETag of the version that the caller has seen",
            "schema": {"type": "string", "pattern": '^"[0-9]{1,9}"$'},
        }


def _reply_headers(op: Operation) -> Iterator[tuple[str, Any]]:
    if op.reply in (Job, NamedCalendar, Pool):
        yield "ETag", {"description": "the version", "schema": {"type": "string"}}
    if op.keyed:
        yield "Idempotent-Replayed", {"description": "`true` on a repeat", "schema": {"type": "string"}}


def _problem(title: str, ref: Any) -> dict[str, Any]:
    return {"description": title, "content": {"application/problem+json": {"schema": ref}}}


def _scalar(kind: type) -> dict[str, Any]:
    if kind is Instant:
        return {
            "type": "string",
            "format": "date-time",
            "description": "RFC 3339 with an offset; answered in UTC",
            "examples": ["2026-12-01T09:00:00.000000Z"],
        }
    if kind is Duration:
        iso = r"P([0-9]+W)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+(\.[0-9]{1,6})?S)?)?"
        short = r"([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+(\.[0-9]{1,6})?s)?([0-9]+ms)?"
        return {
            "type": "string",
            "pattern": f"^({iso}|{short})$",
            "minLength": 2,
            "maxLength": 40,
            "description": "ISO-8601, answered so; short forms such as 1h30m are read, too",
            "examples": ["PT5M"],
        }
    raise NotImplementedError(kind)


def _portable(value: Any) -> Any:
    """Patterns as JSON Schema means them: there, `$` is the very end, as `(?!\\n)$` is in Python."""
    if isinstance(value, dict):
        return {k: v.replace("(?!\\n)", "") if k == "pattern" else _portable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(v) for v in value]
    return value
