"""The OpenAPI 3.1 document, made of the types that decode the bodies, and the page that shows it.

`operations` says what each route takes and answers; here stands what the words in it mean.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import _json_schema as json_schema

import tocsin
from tocsin.model.access import PERMISSIONS
from tocsin.model.circuit import CircuitPolicy
from tocsin.model.job import JobSpec, RunRequest
from tocsin.model.reports import GROUPS
from tocsin.model.scalars import Duration, Instant, encode_scalar
from tocsin.model.workflow import WorkflowSpec
from tocsin.node.server.operations import OPERATIONS, Operation, Patch, choices
from tocsin.node.server.replies import Job, NamedCalendar, NamedSecret, Pool, Problem
from tocsin.node.server.workflow_replies import Workflow
from tocsin.wire import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    PROTOCOL_HEADER,
    BackfillRequest,
    CalendarRequest,
    Claim,
    Completion,
    Confirmation,
    JobBatch,
    Letters,
    LogShipment,
    NewKey,
    NewSecret,
    NewTenant,
    Notes,
    Nothing,
    PoolPatch,
    PreviewRequest,
    Reason,
    Register,
    Report,
    Rotation,
    RunBatch,
    TenantPatch,
    Why,
)

_REF = "#/components/schemas/{name}"
_OF_WORKERS = "/v1/worker/"

# Fields that decode and are refused as not supported yet: the document does not promise them.
NOT_BUILT: dict[str, tuple[str, ...]] = {
    "JobSpec": ("notify",),
}
# What any call may answer: unreadable, unknown caller, not allowed, too many headers, out of order.
_ALWAYS = (400, 401, 403, 404, 421, 422, 429, 431, 503)
_WITH_BODY = (413, 415)


_STRING: dict[str, Any] = {"type": "string", "maxLength": 1024}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 500}
_UUID: dict[str, Any] = {"type": "string", "format": "uuid"}
_TIME: dict[str, Any] = {"type": "string", "format": "date-time"}
_NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-zA-Z0-9._-]{1,128}$"}
_QUERY: dict[str, tuple[str, dict[str, Any]]] = {
    "limit": ("how many at most", {**_LIMIT, "default": 50}),
    "cursor": ("`next_cursor` of the page before", _STRING),
    "state": ("only those in this state", {}),
    "outcome": ("only those whose last attempt ended so", {}),
    "error_class": ("only those with this class of error", _STRING),
    "tag": ("only those with this tag, written `key:value`", {**_STRING, "examples": ["team:portfolio"]}),
    "q": ("only those whose name holds this text", _STRING),
    "pool": ("only those of this pool", _STRING),
    "job": ("only those of this job, by its id", _UUID),
    "workflow": ("only those of this workflow, by its id", _UUID),
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
            ("/v1/reports/{}?by", "what to group by", {"default": groups[0]}),
        )
    },
    "actor": ("only what this caller did: `key:` and the name of its key", _STRING),
    "action": ("only this, such as job.create", _STRING),
    "target": ("only what was done to this, such as `job:` and its id", _STRING),
    "/v1/audit?from": ("only what was done at this time or later", _TIME),
    "/v1/audit?to": ("only what was done before this time", _TIME),
    "mode": (
        "what becomes of occurrences on the days of an iCalendar file that is the body; skip unless given",
        {},
    ),
    "attempt": ("which attempt; the latest unless given", {"type": "integer", "minimum": 1, "maximum": 999_999_999}),
    "stream": ("only lines of this stream", {}),
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
    "format": ("text unless given", {}),
    "/v1/audit/export?format": ("ndjson unless given", {}),
    "type": ("only events about this", {}),
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
    421: "The server does not go by the name that it was called by",
    422: "Readable, but not acceptable; `errors` names each field",
    426: "The worker speaks a protocol that this server does not",
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
    WorkflowSpec: {
        "name": "nightly",
        "schedule": {"cron": "0 2 * * *", "timezone": "Europe/Berlin"},
        "jobs": {
            "extract": {"target": {"kind": "process", "command": ["./extract"]}},
            "load": {"target": {"kind": "process", "command": ["./load"]}, "depends_on": ["extract"]},
        },
    },
    PreviewRequest: {"schedule": {"text": "last friday of the month at 6pm", "timezone": "Europe/Berlin"}, "count": 3},
    CalendarRequest: {"mode": "skip", "days": ["2026-12-25", "2027-01-01"], "weekdays": ["SAT", "SUN"]},
    BackfillRequest: {"from": "2026-01-01T00:00:00Z", "to": "2026-02-01T00:00:00Z", "max_concurrency": 4},
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
    Confirmation: {"confirm": "acme"},
    Completion: {"outcome": "succeeded", "result": {"rows": 42}},
    TenantPatch: {"weight": 4, "quotas": {"max_queued": 10000, "submit_rate": "100/s", "max_running": None}},
    NewKey: {"role": "editor", "name": "deploy", "scopes": {"jobs": ["billing-*"]}},
    Rotation: {"overlap": "PT24H"},
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
    named = {t for op in OPERATIONS.values() for t in (op.body, op.reply, op.other) if t is not None}
    types = sorted(named | {Problem}, key=str)
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
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": "a key or a token"}},
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
    # Job documents are answered with it, and refused.
    asked = schemas["JobSpec"]["properties"]["target"]
    asked["anyOf"].remove({"$ref": asked["discriminator"]["mapping"].pop("workflow")})
    return dict(zip(types, made, strict=True)), schemas


def _operation(path: str, permission: str, name: str, op: Operation, refs: dict[Any, Any]) -> dict[str, Any]:
    problems = {*_ALWAYS, *op.problems, *_WITH_BODY, *((412,) if op.versioned else ())}
    if path.startswith(_OF_WORKERS):
        problems.add(426)
    out: dict[str, Any] = {
        "operationId": name,
        "summary": op.summary,
        "description": f"Least role: {PERMISSIONS[permission]}.",
        "tags": [path.split("/")[2]],
        "parameters": list(_parameters(path, op)),
        "responses": {str(op.status): _done(op, op.reply, refs)}
        | {str(status): _done(op, op.other or op.reply, refs) for status in op.also}
        | {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(problems)},
    }
    if op.body is not None:
        content = {"schema": refs[op.body], "example": _EXAMPLES[op.body]}
        kinds = ("application/json", "application/merge-patch+json")[: 2 if op.body is Patch else 1]
        out["requestBody"] = {"required": not op.optional, "content": dict.fromkeys(kinds, content)}
    return out


def _done(op: Operation, reply: Any, refs: dict[Any, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "Done", "headers": dict(_reply_headers(op))}
    if reply is not None:
        first, *others = op.media
        done["content"] = {first: {"schema": refs[reply]}} | {m: {"schema": {"type": "string"}} for m in others}
    return done


def _parameters(path: str, op: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", path):
        yield {"name": name, "in": "path", "required": True, "schema": _UUID if name == "id" else _NAME}
    for name in op.query:
        text, schema = _QUERY.get(f"{path}?{name}") or _QUERY[name]
        if values := choices(path, name):
            schema = {**schema, "type": "string", "enum": list(values)}
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
    if path.startswith(_OF_WORKERS):
        yield {
            "name": PROTOCOL_HEADER,
            "in": "header",
            "description": f"the protocol that the worker speaks; {OLDEST_PROTOCOL} unless given",
            "schema": {"type": "integer", "minimum": OLDEST_PROTOCOL, "maximum": PROTOCOL},
        }


def _reply_headers(op: Operation) -> Iterator[tuple[str, Any]]:
    if op.reply in (Job, Workflow, NamedCalendar, NamedSecret, Pool):
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
