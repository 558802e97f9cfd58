"""The calls about workflows and backfills: what each of them sends."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from tocsin.client import workflow_calls as calls
from tocsin.client.core import Call
from tocsin.wire import decode_workflow_spec

SPEC = {"name": "nightly", "jobs": {"a": {"target": {"kind": "process", "command": ["true"]}}}}
WHY = {"reason": "why"}
STOP = {"reason": "", "running": "stop"}
RANGE = {"from": "2026-01-01T00:00:00.000000Z", "to": "2026-02-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("call", "line", "body"),
    [
        (calls.create_workflow(SPEC), "POST /v1/workflows", SPEC),
        (calls.put_workflow("a/b", SPEC), "PUT /v1/workflows/by-name/a%2Fb", SPEC),
        (calls.get_workflow("w"), "GET /v1/workflows/w", None),
        (calls.list_workflows(state="paused", q="n"), "GET /v1/workflows?state=paused&q=n", None),
        (calls.delete_workflow("w"), "DELETE /v1/workflows/w", None),
        (calls.pause_workflow("w", "why"), "POST /v1/workflows/w/pause", WHY),
        (calls.resume_workflow("w", "why"), "POST /v1/workflows/w/resume", WHY),
        (calls.cancel_workflow("w"), "POST /v1/workflows/w/cancel", STOP),
        (calls.run_workflow("w"), "POST /v1/workflows/w/runs", {}),
        (calls.run_workflow("w", {"n": 1}, priority=0), "POST /v1/workflows/w/runs", {"args": {"n": 1}, "priority": 0}),
        (calls.get_workflow_run("r"), "GET /v1/workflow-runs/r", None),
        (calls.list_workflow_runs(workflow="w"), "GET /v1/workflow-runs?workflow=w", None),
        (calls.cancel_workflow_run("r", "why"), "POST /v1/workflow-runs/r/cancel", WHY),
        (calls.retry_workflow_run("r"), "POST /v1/workflow-runs/r/retry", None),
        (
            calls.backfill("w", from_=datetime(2026, 1, 1, tzinfo=UTC), to="2026-02-01T00:00:00Z"),
            *("POST /v1/jobs/w/backfill", RANGE),
        ),
        (
            calls.backfill("w", from_=RANGE["from"], to=RANGE["to"], dry_run=True, max_concurrency=3),
            *("POST /v1/jobs/w/backfill", RANGE | {"dry_run": True, "max_concurrency": 3}),
        ),
        (calls.get_backfill("b"), "GET /v1/backfills/b", None),
        (calls.list_backfills(job="w"), "GET /v1/backfills?job=w", None),
        (calls.pause_backfill("b", "why"), "POST /v1/backfills/b/pause", WHY),
        (calls.resume_backfill("b", "why"), "POST /v1/backfills/b/resume", WHY),
        (calls.cancel_backfill("b"), "POST /v1/backfills/b/cancel", STOP),
    ],
)
def test_what_is_sent(call: Call[Any], line: str, body: Any) -> None:
    request = call.request()
    query = "&".join(f"{name}={value}" for name, value in request.query.items())
    assert f"{request.method} {request.path}{'?' if query else ''}{query}" == line
    assert (request.content and json.loads(request.content)) == body


def test_a_document_may_be_given_as_a_struct() -> None:
    spec = decode_workflow_spec(json.dumps(SPEC).encode())
    sent = json.loads(calls.create_workflow(spec).request().content or b"")
    assert decode_workflow_spec(json.dumps(sent).encode()) == spec
