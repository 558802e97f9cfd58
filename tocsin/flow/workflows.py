"""workflows: what becomes of a workflow run between its claim and its end.

Its head is claimed like any run, by nobody in particular (`CONDUCTOR`). Then it is begun: a run for each node, in one
transaction, each of which knows whom it feeds (`shared.joins` does the rest as they end); stopped, if it is to stop;
and ended, when all of its nodes have. Whichever server comes first does each of these; the row says what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tocsin.flow.shared.jobs import key_of_run
from tocsin.flow.shared.joins import HEAD, LETTERS, Mapped, array, decide, settle
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Family, Hint, Key, NewRun, Stop, hints, stage, stops
from tocsin.model.graph import FULFILLED, Graph, blame, doom, to_run_again
from tocsin.model.ids import new_ids
from tocsin.model.workflow import WorkflowSpec, workflow_of
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.wire import Finished, RunError, decode_job_spec, encode

SQL = Sql(__file__, SHARED)
_MOST = 200  # heads at a time
_TIMED_OUT = "the workflow run took longer than it may"


class Head(NamedTuple):
    """A workflow run that wants something done: `begin`, `stop` or `end`."""

    key: Key
    what: str


class Done(NamedTuple):
    """What became claimable, who is to be told to stop, and whether a workflow run has come to its end."""

    hints: list[Hint]
    stops: list[Stop]
    heads: bool = False


NOTHING = Done([], [])


async def wanting(db: Database) -> list[Head]:
    """The workflow runs that want something done, some at a time."""
    return [Head(Key(row[0], row[1]), row[2]) for row in await db.fetch("vital", SQL["heads"], _MOST)]


# ── begin ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def begin(db: Database, head: Key) -> Done:
    """Make the runs of a workflow run's nodes, in one transaction: all of them, or those that are to be run again."""
    async with db.transaction("workflow_begin", "vital") as connection:
        row = await connection.fetchrow(SQL["lock_head"], *head)
        if row is None or row["pending_parents"] is not None:
            return NOTHING  # somebody else was first
        spec = workflow_of(decode_job_spec(row["spec"]))
        graph = spec.graph
        ends = await _ends(connection, head, row) if row["trigger"] in ("retry", "redrive") else {}
        nodes = to_run_again(graph, {node: (end["state"], end["reason"]) for node, end in ends.items()})
        over = row["state"] == "stopping" or row["is_second"]
        nodes = [] if over else nodes
        await connection.execute(SQL["begun"], *head, len(nodes), row["version"], spec.timeout.delta, over)
        if not nodes:
            return Done([], [], heads=True)
        jobs = {each["node"]: each for each in await connection.fetch(SQL["nodes"], head.tenant_id, row["job_id"])}
        beginning = _Beginning(head, row, spec, graph, ends, nodes)
        made = await stage(connection, [beginning.run(node, jobs[node]) for node in nodes])
        settled = await decide(connection, beginning.decided)
    return Done(hints(each for each in made if each["state"] == "ready") + settled.hints, [], settled.heads)


async def _ends(connection: Connection, head: Key, row: Row) -> dict[str, Row]:
    """How the nodes ended when they were run before."""
    return {each["node"]: each for each in await connection.fetch(SQL["ends"], head.tenant_id, row["workflow_run_id"])}


class _Beginning:
    """The runs with which a workflow run begins."""

    def __init__(
        self, head: Key, row: Row, spec: WorkflowSpec, graph: Graph, ends: Mapping[str, Row], nodes: list[str]
    ) -> None:
        self._head, self._row, self._spec, self._graph, self._ends = head, row, spec, graph, ends
        # In the order of the graph, so that children have higher ids: it is the order in which rows are taken.
        self._ids = dict(zip(nodes, new_ids(row["now"], len(nodes)), strict=True))
        self._feeds: dict[str, list[str]] = {node: [] for node in nodes}
        self._feeds_on: dict[str, str] = dict.fromkeys(nodes, "")
        for child in nodes:
            for each in graph.parents[child]:
                if each.job in self._ids:
                    self._feeds[each.job].append(self._ids[child])
                    self._feeds_on[each.job] += LETTERS[each.on]
        # Those that wait for none of these, and yet are not simply to run: all of their parents ended before.
        self.decided: list[Key] = []

    def run(self, node: str, job: Row) -> NewRun:
        """The run of a node."""
        row = self._row
        before = self._ends.get(node)
        args = None if self._graph.parents[node] else row["args"]
        its_own = row["priority"] == row["usual_priority"] or self._spec.jobs[node].priority is not None
        return NewRun(
            self._head.tenant_id,
            self._ids[node],
            job["id"],
            "dependency" if before is None else "retry",
            row["scheduled_for"],
            None if its_own else row["priority"],
            args,
            None if before is None else before["run_id"],
            key_id=key_of_run(self._head.tenant_id, job["key_template"], args),
            family=self._family(node),
        )

    def _family(self, node: str) -> Family:
        parents = self._graph.parents[node]
        over = [(each.on, self._ends[each.job]) for each in parents if each.job not in self._ids]
        doomed = max((doom(on, end["state"], end["reason"]) for on, end in over), default=FULFILLED)
        pending = len(parents) - len(over)
        mapped = self._spec.jobs[node].map
        if not pending and (mapped is not None or doomed != FULFILLED):
            self.decided.append(Key(self._head.tenant_id, self._ids[node]))
            pending = 1
        return Family(
            logical_at=self._row["logical_at"],
            workflow_run_id=self._row["workflow_run_id"],
            pending=pending or None,
            doomed=doomed,
            feeds=array([*self._feeds[node], self._head.id]),
            feeds_on=self._feeds_on[node] + HEAD,
            parents=array([self._run_of(each.job) for each in parents]),
            map=None if mapped is None else encode(Mapped(self._run_of(mapped.parent), mapped)).decode(),
        )

    def _run_of(self, node: str) -> str:
        return self._ids.get(node) or self._ends[node]["run_id"]


# ── stop and end ─────────────────────────────────────────────────────────────────────────────────────────────────


async def stop(db: Database, head: Key) -> Done:
    """staged | ready | waiting → cancelled, running → stopping: all that lives of a workflow run."""
    async with db.transaction("workflow_stop", "vital") as connection:
        row = await connection.fetchrow(SQL["head"], *head)
        if row is None or not (row["late"] or row["state"] == "stopping"):
            return NOTHING
        reason = _TIMED_OUT if row["late"] else row["stop_reason"]
        await connection.fetch(SQL["hold_nodes"], head.tenant_id, row["workflow_run_id"], head.id)
        rows = await connection.fetch(SQL["stop_nodes"], head.tenant_id, row["workflow_run_id"], head.id, reason)
        settled = await settle(connection, rows)
    return Done(settled.hints, stops(rows), settled.heads) if rows else NOTHING


async def ending(db: Database, head: Key) -> Finished | None:
    """How a workflow run ended whose nodes all have; None if somebody else was first."""
    async with db.transaction("workflow_why", "vital") as connection:
        row = await connection.fetchrow(SQL["head"], *head)
        if row is None or row["pending_parents"] != 0:
            return None
        if row["doomed"] == FULFILLED:
            return _finished(head, row, "succeeded")  # a cancel that came too late changes nothing
        if row["state"] == "stopping":
            return _finished(head, row, "cancelled")
        if row["late"]:
            return _finished(head, row, "timeout", RunError(class_="timeout", message=_TIMED_OUT))
        ends = await _ends(connection, head, row)
    why = blame({node: (end["state"], end["reason"]) for node, end in ends.items()})
    return _finished(head, row, "failed", RunError(class_="workflow_failed", message=why))


def _finished(head: Key, row: Row, outcome: str, error: RunError | None = None) -> Finished:
    return Finished(
        run_id=head.id,
        attempt=row["attempt"],
        fence=row["fence"],
        outcome=outcome,  # type: ignore[arg-type]
        ran_ms=row["ran_ms"],
        error=error,
    )
