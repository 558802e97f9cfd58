"""workflow_runs: read runs of workflows as the API answers them, with enough to draw their graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from tocsin.errors import NotFound
from tocsin.flow.shared import cold, windows
from tocsin.flow.shared.documents import error_of, instant, milliseconds, raw
from tocsin.flow.shared.nodes import workflow_ids
from tocsin.model.access import Identity
from tocsin.model.graph import Graph, critical_path
from tocsin.model.packed import shown, size_of
from tocsin.model.workflow import workflow_of
from tocsin.store.db import Database, Row, Sql
from tocsin.store.parquet import Parquet
from tocsin.wire import decode_job_spec

SQL = Sql(__file__, cold.SQL)
_Row: TypeAlias = Row | Mapping[str, Any]
_LONGEST = timedelta(days=8)  # a workflow run may take a week
_SHOWN = 4_096  # bytes of a node's result
_MOST_WORKFLOWS = 1_000  # the newest workflows, whose runs one list merges
_LOOKED_AT = 1_000  # workflow runs for one page of those in a state
_NOT_BEGUN: dict[str, Any] = dict.fromkeys(
    ("job_id", "run_id", "reason", "blocked_by", "started_at", "finished_at", "error_class", "error")
) | {"state": "waiting", "attempt": 0, "result": None, "result_bytes": None}


async def get(db: Database, who: Identity, run_id: str, parquet: Parquet | None = None) -> dict[str, Any]:
    """One workflow run, by the id of any run that belongs to it; from the archive only if there is who reads it."""
    found = await _found(db, who, run_id, parquet)
    archived = await _archived(db, parquet, who, found) if parquet is not None else []
    async with db.snapshot(who.tenant_id, "workflow_runs") as connection:
        asked = who.tenant_id, *found
        heads: list[Row | Mapping[str, Any]] = await connection.fetch(SQL["heads"], *asked)
        nodes = {row["node"]: row for row in await connection.fetch(SQL["nodes"], *asked)}
        elements = [dict(row) for row in await connection.fetch(SQL["elements"], *asked)]
        names = {row["id"]: row for row in await connection.fetch(SQL["names"], who.tenant_id, found.workflow_id)}
        heads = _in_order([*heads, *_heads(archived, found)])
        if not heads:
            raise NotFound("there is no such workflow run")
        version = heads[-1]["job_version"]
        text = await connection.fetchval(SQL["spec"], who.tenant_id, found.workflow_id, version)
        now = await connection.fetchval(SQL["now"])
    nodes = _nodes(archived, names) | nodes
    first, last = heads[0], heads[-1]
    graph = workflow_of(decode_job_spec(text)).graph
    mapped: dict[str, list[Mapping[str, Any]]] = {}
    for row in [*_elements(archived), *elements]:
        mapped.setdefault(row["origin_run_id"], []).append(row)
    layers = graph.layers
    drawn = [_node(name, layers[name], nodes.get(name, _NOT_BEGUN), mapped) for name in graph.order]
    name = names[found.workflow_id]["name"]
    return _summary(first, last, found.workflow_id, name, len(heads) - 1) | {
        "args": shown(first["args"]),
        "head_run_id": last["id"],
        "progress": dict(Counter(node["state"] for node in drawn)),
        "nodes": drawn,
        "edges": [{"from": p.job, "to": node, "on": p.on} for node in graph.order for p in graph.parents[node]],
        "critical_path": _critical_path(graph, drawn),
        "now": instant(now),
    }


class _Found(NamedTuple):
    """A workflow run, and its workflow."""

    id: str
    workflow_id: str


async def _found(db: Database, who: Identity, run_id: str, parquet: Parquet | None) -> _Found:
    async with db.tenant(who.tenant_id, "workflow_runs") as connection:
        row = await connection.fetchrow(SQL["whose"], who.tenant_id, run_id)
    if row is not None:
        return _Found(row["id"], row["workflow_id"])
    rows = await cold.attempts_of(db, parquet, who, run_id) if parquet is not None else []
    if rows:
        async with db.tenant(who.tenant_id, "workflow_runs") as connection:
            workflow_id = await connection.fetchval(SQL["whose_archived"], who.tenant_id, rows[-1]["job_id"])
        if workflow_id is not None:
            return _Found(rows[-1]["workflow_run_id"] or run_id, workflow_id)
    raise NotFound("there is no such workflow run")


# ── what is archived of it ───────────────────────────────────────────────────────────────────────────────────────


async def _archived(db: Database, parquet: Parquet, who: Identity, found: _Found) -> list[dict[str, Any]]:
    """The ends of it that lie in files; none, for nearly all that are asked for."""
    day = cold.day_of(found.id)
    async with db.tenant(who.tenant_id, "workflow_runs") as connection:
        files = await cold.files(connection, [who.tenant_id], day, day + _LONGEST)
    if not files:
        return []
    return await cold.query(parquet, SQL["in_files"], files, {"tenant": who.tenant_id, "run": found.id})


def _heads(archived: Iterable[dict[str, Any]], found: _Found) -> list[dict[str, Any]]:
    return [
        row | {"logical_at": row["logical_at"] or row["scheduled_for"]}
        for row in archived
        if row["job_id"] == found.workflow_id
    ]


def _in_order(heads: Iterable[_Row]) -> list[_Row]:
    """The first one first, and last the one that tells what became of it: the one that lives, if there is one. Second
    heads, which were skipped because there was one, are none."""
    counted = (head for head in heads if head["state"] != "skipped" or head["workflow_run_id"] is None)
    return sorted(counted, key=lambda head: (head["finished_at"] is None, str(head["id"])))


def _nodes(archived: Iterable[dict[str, Any]], names: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    """The last run of each node."""
    found: dict[str, dict[str, Any]] = {}
    for row in sorted(archived, key=lambda row: str(row["id"])):
        job = names.get(row["job_id"])
        if job is not None and job["node"] is not None and not _is_element(row):
            size = _size(row["result"])
            shown_ = row["result"] if size is not None and size <= _SHOWN else None
            found[job["node"]] = row | {"run_id": row["id"], "result": shown_, "result_bytes": size}
    return found


def _elements(archived: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each as if it were counted, in their order."""
    of_nodes = sorted((row for row in archived if _is_element(row)), key=lambda row: str(row["id"]))
    results = [row["result"] if row["result"] is not None else "null" for row in of_nodes]
    return [
        row | {"runs": 1, "results": result, "bytes": size_of(result) + 1}
        for row, result in zip(of_nodes, results, strict=True)
    ]


def _size(result: str | None) -> int | None:
    return None if result is None else size_of(result)


def _is_element(row: Mapping[str, Any]) -> bool:
    return row["origin_run_id"] is not None and row["trigger"] == "dependency"


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────────


async def list_(
    db: Database, who: Identity, workflow: str | None, state: str | None, before: str | None, limit: int
) -> windows.Listed:
    """Newest first, without their graphs. In what state one is says its last head: so many are looked at, at most."""
    most = limit if state is None else max(limit, _LOOKED_AT)
    below = before or windows.HIGHEST
    ids = [workflow] if workflow else await workflow_ids(db, who.tenant_id, windows.HIGHEST, _MOST_WORKFLOWS)
    async with db.tenant(who.tenant_id, "workflow_runs") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, ids, below, most)
    found = [row for row in rows if state is None or row["state"] == state][:limit]
    rest = rows[-1]["id"] if len(rows) == most and len(found) < limit else None
    return windows.Listed([_summary(row, row, row["workflow_id"], row["name"], row["retries"]) for row in found], rest)


def _summary(first: _Row, last: _Row, workflow_id: str, name: str, retries: int) -> dict[str, Any]:
    """What is known without the graph: when it began with its first head, what became of it by its last one."""
    return {
        "id": first["id"],
        "workflow_id": workflow_id,
        "workflow_name": name,
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


def _node(name: str, layer: int, run: _Row, mapped: Mapping[str, Sequence[_Row]]) -> dict[str, Any]:
    elements = mapped.get(run["run_id"] or "", ())
    started_at, finished_at = run["started_at"], run["finished_at"]
    state = run["state"]
    if elements:
        # Its own run only waits for them.
        started_at = min((row["started_at"] for row in elements if row["started_at"] is not None), default=None)
        state = _state_by(elements) or state if finished_at is None else state
    result, size = _listed(elements) if run["reason"] == "mapped" else (run["result"], run["result_bytes"])
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
        "result": raw(result),
        "result_bytes": size,
        "elements": _counted(elements) or None,
    }


def _listed(elements: Sequence[_Row]) -> tuple[str | None, int]:
    """What the runs of a mapped node resulted in, as one list, and of how many bytes; no list if it is large."""
    size = max(2, 1 + sum(row["bytes"] for row in elements))
    return f"[{','.join(row['results'] for row in elements)}]" if size <= _SHOWN else None, size


def _state_by(elements: Sequence[_Row]) -> str | None:
    """What a mapped node that has not ended is doing; None: nothing of it runs."""
    states = {row["state"] for row in elements}
    if "stopping" in states and not states & {"staged", "ready", "waiting", "running"}:
        return "stopping"
    return "running" if any(row["started_at"] is not None for row in elements) else None


def _counted(elements: Iterable[_Row]) -> dict[str, int]:
    states: Counter[str] = Counter()
    for row in elements:
        states[row["state"]] += row["runs"]
    return dict(states)


def _critical_path(graph: Graph, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The chain of nodes that took longest."""
    parents = {node: [each.job for each in wanted] for node, wanted in graph.parents.items()}
    path = critical_path(graph.order, parents, {node["name"]: node["duration_ms"] for node in nodes})
    return {"nodes": path.nodes, "duration_ms": round(path.length, 3)}
