"""workflow_runs: read runs of workflows as the API answers them, with enough to draw their graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tocsin.errors import NotFound
from tocsin.flow.shared.documents import error_of, instant, milliseconds, raw
from tocsin.model.access import Identity
from tocsin.model.graph import Graph, critical_path
from tocsin.model.packed import shown
from tocsin.model.workflow import workflow_of
from tocsin.store.db import Database, Row, Sql
from tocsin.wire import decode_job_spec

SQL = Sql(__file__)
_NOT_BEGUN: dict[str, Any] = dict.fromkeys(
    ("job_id", "run_id", "reason", "blocked_by", "started_at", "finished_at", "error_class", "error", "result")
) | {"state": "waiting", "attempt": 0}


async def get(db: Database, who: Identity, run_id: str) -> dict[str, Any]:
    """One workflow run, by the id of any run that belongs to it."""
    async with db.snapshot(who.tenant_id, "workflow_runs") as connection:
        whose = await connection.fetchrow(SQL["whose"], who.tenant_id, run_id)
        if whose is None:
            raise NotFound("there is no such workflow run")
        asked = who.tenant_id, whose["id"], whose["workflow_id"]
        heads = await connection.fetch(SQL["heads"], *asked)
        if not heads:
            raise NotFound("there is no such workflow run")
        nodes = {row["node"]: row for row in await connection.fetch(SQL["nodes"], *asked)}
        elements = await connection.fetch(SQL["elements"], *asked)
        now = await connection.fetchval(SQL["now"])
    first, last = heads[0], heads[-1]
    graph = workflow_of(decode_job_spec(last["spec"])).graph
    mapped: dict[str, list[Row]] = {}
    for row in elements:
        mapped.setdefault(row["origin_run_id"], []).append(row)
    layers = graph.layers
    drawn = [_node(name, layers[name], nodes.get(name, _NOT_BEGUN), mapped) for name in graph.order]
    return _summary(first, last, whose["workflow_id"], len(heads) - 1) | {
        "args": shown(first["args"]),
        "head_run_id": last["id"],
        "progress": dict(Counter(node["state"] for node in drawn)),
        "nodes": drawn,
        "edges": [{"from": p.job, "to": node, "on": p.on} for node in graph.order for p in graph.parents[node]],
        "critical_path": _critical_path(graph, drawn),
        "now": instant(now),
    }


async def list_(
    db: Database, who: Identity, workflow: str | None, state: str | None, before: str | None, limit: int
) -> list[dict[str, Any]]:
    """Newest first, without their graphs."""
    async with db.tenant(who.tenant_id, "workflow_runs") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, workflow, before, state, limit)
    return [_summary(row, row, row["workflow_id"], row["retries"]) for row in rows]


def _summary(first: Row, last: Row, workflow_id: str, retries: int) -> dict[str, Any]:
    """What is known without the graph: when it began with its first head, what became of it by its last one."""
    return {
        "id": first["id"],
        "workflow_id": workflow_id,
        "workflow_name": first["name"],
        "workflow_version": last["job_version"],
        "state": last["state"],
        "reason": last["reason"],
        "blocked_by": last["blocked_by"],
        "trigger": first["trigger"],
        "scheduled_for": instant(first["scheduled_for"]),
        "logical_at": instant(first["logical_at"]),
        "started_at": instant(first["started_at"]),
        "finished_at": instant(last["finished_at"]),
        "duration_ms": milliseconds(first["started_at"], last["finished_at"]),
        "error": error_of(last),
        "retries": retries,
    }


def _node(name: str, layer: int, run: Row | Mapping[str, Any], mapped: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    elements = mapped.get(run["run_id"] or "", ())
    started_at, finished_at = run["started_at"], run["finished_at"]
    state = run["state"]
    if elements:
        # Its own run only waits for them.
        started_at = min((row["started_at"] for row in elements if row["started_at"] is not None), default=None)
        state = "running" if finished_at is None and started_at is not None else state
    return {
        "name": name,
        "layer": layer,
        "job_id": run["job_id"],
        "run_id": run["run_id"],
        "state": state,
        "reason": run["reason"],
        "blocked_by": run["blocked_by"],
        "attempt": run["attempt"] if started_at is not None else 0,
        "started_at": instant(started_at),
        "finished_at": instant(finished_at),
        "duration_ms": milliseconds(started_at, finished_at),
        "error": error_of(run),
        "result": raw(run["result"]),
        "elements": {row["state"]: row["runs"] for row in elements} or None,
    }


def _critical_path(graph: Graph, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The chain of nodes that took longest."""
    parents = {node: [each.job for each in wanted] for node, wanted in graph.parents.items()}
    path = critical_path(graph.order, parents, {node["name"]: node["duration_ms"] for node in nodes})
    return {"nodes": path.nodes, "duration_ms": round(path.length, 3)}
