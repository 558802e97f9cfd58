"""The runs of a workflow run's nodes: made when it begins, and again when some of them are to be run again.

A workflow run that has ended is begun again, with a head of its own; in one that still runs what is to be run again
takes its place at once, and whatever waits in it goes by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tocsin.errors import Conflict, Contention
from tocsin.flow.shared.jobs import key_of_run
from tocsin.flow.shared.joins import HEAD, LETTERS, Mapped, Settled, array, decide, see_all
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Family, Key, NewRun, hints, stage
from tocsin.model.graph import (
    FULFILLED,
    UPSTREAM_FAILED,
    Dependency,
    End,
    Graph,
    check_again,
    doom,
    outcome,
    to_run_again,
)
from tocsin.model.ids import new_ids
from tocsin.model.workflow import WorkflowSpec, workflow_of
from tocsin.store.db import Connection, Row, Sql, columns
from tocsin.wire import decode_job_spec, encode

SQL = Sql(__file__, SHARED)


class Made(NamedTuple):
    """The runs that were made, by node; and what that settled."""

    ids: dict[str, str]
    settled: Settled


async def ends_of(connection: Connection, tenant_id: int, workflow_run_id: str) -> dict[str, Row]:
    """How the nodes of a workflow run ended the last time, by name."""
    return {row["node"]: row for row in await connection.fetch(SQL["ends"], tenant_id, workflow_run_id)}


def told(ends: Mapping[str, Row]) -> dict[str, End]:
    """The same as the rules take it."""
    return {node: (end["state"], end["reason"]) for node, end in ends.items()}


class Part(NamedTuple):
    """Of what lives in a workflow run: all but its head, which is taken after them; or just one run and, if that is
    mapped, its elements."""

    tenant_id: int
    workflow_run_id: str
    head_id: str | None = None
    only: str | None = None


async def _hold(connection: Connection, part: Part) -> None:
    """Take it, so that the statement after it sees what each is by now. Whoever waited meanwhile for the end of a
    parent finds elements that this made: hence once more."""
    await connection.fetch(SQL["hold"], *part)
    await connection.fetch(SQL["hold"], *part)


async def stop(connection: Connection, part: Part, reason: str) -> list[Row]:
    """staged | ready | waiting → cancelled, running → stopping. The run of a mapped node of which elements live ends
    with the last of them."""
    await _hold(connection, part)
    return await connection.fetch(SQL["stop"], *part, reason)  # type: ignore[no-any-return]


def still_doomed(graph: Graph, ends: Mapping[str, End], again: Iterable[str]) -> int:
    """What those of the nodes that are not run again mean for how the whole will end."""
    left = graph.parents.keys() & ends.keys() - set(again)
    return FULFILLED if outcome(ends[node] for node in left) == "succeeded" else UPSTREAM_FAILED


def refuse_again(graph: Graph, ends: Mapping[str, Row], node: str, run_id: str) -> None:
    """Raise why a node's run, which has ended, is not run again in its workflow run."""
    if node not in graph.parents:
        raise Conflict(f"the workflow has no job {node} any more: run it anew", code="job_completed")
    last = ends[node]["run_id"]
    if last != run_id:
        raise Conflict(f"{node} was run again since: run {last} is its last", code="run_again_since")
    check_again(graph, told(ends), node)


# ── all, or some of an ended one ─────────────────────────────────────────────────────────────────────────────────


async def make(
    connection: Connection,
    head: Key,
    row: Row,
    spec: WorkflowSpec,
    graph: Graph,
    ends: Mapping[str, Row],
    nodes: list[str],
) -> Settled:
    """Make runs of these nodes for a head (of which `row` tells) whose other nodes have ended so."""
    return (await _make(connection, _NodeRuns(head, row, spec, graph, ends, nodes, {}))).settled


async def _make(connection: Connection, runs: _NodeRuns) -> Made:
    head, row = runs.head, runs.row
    jobs = {each["node"]: each for each in await connection.fetch(SQL["nodes"], head.tenant_id, row["job_id"])}
    made = await stage(connection, [runs.run(node, jobs[node]) for node in runs.ids])
    settled = await decide(connection, runs.decided)
    claimable = hints(each for each in made if each["state"] == "ready")
    return Made(runs.ids, Settled(claimable + settled.hints, settled.heads))


class _NodeRuns:
    """Runs of some of a graph's nodes. Of the others it is known how they ended, or that they live."""

    def __init__(
        self,
        head: Key,
        row: Row,
        spec: WorkflowSpec,
        graph: Graph,
        ends: Mapping[str, Row],
        nodes: Sequence[str],
        living: Mapping[str, Row],
    ) -> None:
        self.head, self.row = head, row
        self._spec, self._graph, self._ends, self._living = spec, graph, ends, living
        # In the order of the graph, so that children have higher ids: it is the order in which rows are taken.
        self.ids = dict(zip(nodes, new_ids(row["now"], len(nodes)), strict=True))
        # Those that wait for none of these, and yet are not simply to run: all of their parents ended before.
        self.decided: list[Key] = []
        self._feeds: dict[str, list[str]] = {}
        self._feeds_on: dict[str, str] = {}
        for child in (*nodes, *(node for node, run in living.items() if run["undecided"])):
            for each in self._awaited(child):
                self._feeds.setdefault(each.job, []).append(self._run_of(child))
                self._feeds_on[each.job] = self._feeds_on.get(each.job, "") + LETTERS[each.on]

    def run(self, node: str, job: Row) -> NewRun:
        """The run of a node."""
        row = self.row
        before = self._ends.get(node)
        args = None if self._graph.parents[node] else row["args"]
        return NewRun(
            self.head.tenant_id,
            self.ids[node],
            job["id"],
            "dependency" if before is None else "retry",
            row["scheduled_for"],
            self._priority(node),
            args,
            None if before is None else before["run_id"],
            key_id=key_of_run(self.head.tenant_id, job["key_template"], args),
            family=self._family(node),
        )

    def _priority(self, node: str) -> int | None:
        """None: its job's. In what a backfill began none goes before the whole."""
        own, whole, usual = self._spec.jobs[node].priority, self.row["priority"], self.row["usual_priority"]
        if own is None:
            return None if whole == usual else whole
        return min(own, whole) if self.row["trigger"] == "backfill" else None

    def _family(self, node: str) -> Family:
        pending, doomed = len(self._awaited(node)), self._doomed(node)
        if not pending and (self._spec.jobs[node].map is not None or doomed != FULFILLED):
            self.decided.append(Key(self.head.tenant_id, self.ids[node]))
            pending = 1
        return Family(
            logical_at=self.row["logical_at"],
            workflow_run_id=self.row["workflow_run_id"],
            pending=pending or None,
            doomed=doomed,
            feeds=array([*self._feeds.get(node, ()), self.head.id]),
            feeds_on=self._feeds_on.get(node, "") + HEAD,
            parents=self._parents(node),
            map=self._map(node),
        )

    def rejoined(self) -> list[tuple[Any, ...]]:
        """Of each run that lives and waits for some of these: its key, for how many, what those that have ended did to
        it, and its parents by now."""
        return [
            (
                *(self.head.tenant_id, run["id"]),
                *(len(self._awaited(node)), self._doomed(node)),
                *(self._parents(node), self._map(node)),
            )
            for node, run in self._living.items()
            if run["undecided"] and self._awaited(node)
        ]

    def fed(self) -> list[tuple[Any, ...]]:
        """Of each run that lives and that some of these wait for: its key, these, and for which end."""
        return [
            (self.head.tenant_id, run["id"], array(self._feeds[node]), self._feeds_on[node])
            for node, run in self._living.items()
            if node in self._feeds
        ]

    def _awaited(self, node: str) -> list[Dependency]:
        """Those of its parents that it is to wait for from now on: one that lives waits for others that do already."""
        new = node in self.ids
        return [p for p in self._graph.parents[node] if p.job in self.ids or (new and p.job in self._living)]

    def _doomed(self, node: str) -> int:
        """What those of its parents did to it that have ended, and are not run again."""
        parents = self._graph.parents[node]
        over = [(p.on, self._ends[p.job]) for p in parents if p.job not in self.ids and p.job not in self._living]
        return max((doom(on, end["state"], end["reason"]) for on, end in over), default=FULFILLED)

    def _parents(self, node: str) -> str | None:
        return array([self._run_of(each.job) for each in self._graph.parents[node]])

    def _map(self, node: str) -> str | None:
        mapped = self._spec.jobs[node].map
        return None if mapped is None else encode(Mapped(self._run_of(mapped.parent), mapped)).decode()

    def _run_of(self, node: str) -> str:
        if node in self.ids:
            return self.ids[node]
        return self._living[node]["id"] if node in self._living else self._ends[node]["run_id"]  # type: ignore[no-any-return]


# ── one that still runs ──────────────────────────────────────────────────────────────────────────────────────────


async def again(connection: Connection, head: Key, workflow_run_id: str, node: str, run_id: str) -> Made:
    """Run a node again, with what was skipped because of it, in a workflow run that runs. It goes by the graph that it
    began with. Lock the workflow first."""
    await see_all(connection)
    await _hold(connection, Part(head.tenant_id, workflow_run_id, head.id))
    row = await connection.fetchrow(SQL["lock_head"], *head)
    _refuse_unless_it_runs(row)
    living = {each["node"]: each for each in await connection.fetch(SQL["living"], head.tenant_id, workflow_run_id)}
    if node in living:
        raise Conflict(f"{node} is under way: run {living[node]['id']}", code="under_way")
    ends = await ends_of(connection, head.tenant_id, workflow_run_id)
    spec = workflow_of(decode_job_spec(row["spec"]))
    graph = spec.graph
    settled = {each: end for each, end in ends.items() if each not in living}
    refuse_again(graph, settled, node, run_id)
    nodes = [each for each in to_run_again(graph, told(settled), node) if each not in living]
    runs = _NodeRuns(head, row, spec, graph, settled, nodes, living)
    if rejoined := runs.rejoined():
        await connection.execute(SQL["rejoin"], *columns(rejoined, 6))
    if fed := runs.fed():
        await connection.execute(SQL["feed"], *columns(fed, 4))
    await connection.execute(SQL["grown"], *head, len(nodes), still_doomed(graph, told(settled), nodes))
    return await _make(connection, runs)


def _refuse_unless_it_runs(head: Row | None) -> None:
    if head is None or head["pending_parents"] == 0:
        raise Contention("this workflow run ends at this moment; try again")
    if head["state"] == "stopping":
        raise Conflict("this workflow run is being stopped: try again when it has ended", code="under_way")
    if head["pending_parents"] is None:
        if head["state"] in ("ready", "running"):
            raise Contention("this workflow run begins at this moment; try again")
        raise Conflict("this workflow run is to be run again, and waits: try again when it runs", code="under_way")
