"""Workflows under `app.testing()`: which of a run's nodes are to run next, by the rules of the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tocsin.model.graph import End, blame, outcome, verdict
from tocsin.model.workflow import BadMap, WorkflowSpec, check

if TYPE_CHECKING:
    from tocsin.client.core import Document

# Stage a run of a node with these arguments; what it is told of its parents; its place among the runs of the node.
Stage = Callable[[str, dict[str, Any] | None, dict[str, "Document"], int], None]


class WorkflowProgress:
    """One run of a workflow: `begin` it, then tell it of each node's run that `ended`; `document` is what is known."""

    def __init__(self, spec: WorkflowSpec, document: Document, args: dict[str, Any] | None, stage: Stage) -> None:
        self.document = document
        self._spec, self._graph = spec, check(spec)
        self._args, self._stage = args, stage
        self._pending = {node: len(parents) for node, parents in self._graph.parents.items()}
        self._ends: dict[str, End] = {}
        self._missing: dict[str, int] = {}  # runs of a node that have not ended
        self._of_elements: dict[str, list[Document]] = {}
        self._nodes: dict[str, Document] = {
            node: {"name": node, "run_id": None, "state": "waiting", "reason": None, "result": None, "error": None}
            for node in self._graph.order
        }
        self._just_ended: deque[str] = deque()

    def begin(self) -> None:
        """Start what waits for nothing."""
        edges = [
            {"from": each.job, "to": node, "on": each.on}
            for node, parents in self._graph.parents.items()
            for each in parents
        ]
        self.document |= {"state": "running", "nodes": list(self._nodes.values()), "edges": edges}
        for node in self._graph.roots:
            self._start(node)
        self._go_on()

    def ended(self, node: str, place: int, run: Document) -> None:
        """A run of a node has ended for good."""
        self._missing[node] -= 1
        if self._spec.jobs[node].map is None:
            self._end(node, run["state"], run_id=run["id"], result=run["result"], error=run["error"])
        else:
            self._of_elements[node][place] = run
            if not self._missing[node]:
                self._end_mapped(node)
        self._go_on()

    def _start(self, node: str) -> None:
        parents = {each.job: self._told(each.job) for each in self._graph.parents[node]}
        mapped = self._spec.jobs[node].map
        self._nodes[node]["state"] = "running"
        if mapped is None:
            self._missing[node] = 1
            self._stage(node, None if parents else self._args, parents, 0)
            return
        try:
            given = mapped.args_for(self._nodes[mapped.parent]["result"])
        except BadMap as why:
            self._end(node, "dead", error={"class": "map_failed", "message": str(why)})
            return
        self._missing[node], self._of_elements[node] = len(given), [{}] * len(given)
        for place, args in enumerate(given):
            self._stage(node, args, parents, place)
        if not given:
            self._end_mapped(node)

    def _told(self, node: str) -> Document:
        return {name: self._nodes[node][name] for name in ("run_id", "state", "result")}

    def _end_mapped(self, node: str) -> None:
        runs = self._of_elements[node]
        failed = [run for run in runs if run["state"] != "succeeded"]
        if failed:
            self._end(
                node, "dead", error={"class": "map_failed", "message": f"{len(failed)} of {len(runs)} runs failed"}
            )
        else:
            self._end(node, "succeeded", result=[run["result"] for run in runs])

    def _end(self, node: str, state: str, reason: str | None = None, **more: Any) -> None:
        self._ends[node] = state, reason
        self._nodes[node] |= {"state": state, "reason": reason, **more}
        self._just_ended.append(node)

    def _go_on(self) -> None:
        """Decide about the children of what has ended, and of what ends by that."""
        while self._just_ended:
            for child in self._graph.children[self._just_ended.popleft()]:
                self._pending[child] -= 1
                if not self._pending[child]:
                    skipped = verdict((each.on, *self._ends[each.job]) for each in self._graph.parents[child])
                    if skipped is None:
                        self._start(child)
                    else:
                        self._end(child, "skipped", skipped)
        if len(self._ends) == len(self._nodes) and self.document["state"] == "running":
            self.document |= {"state": outcome(self._ends.values()), "error": _error(self._ends)}


def _error(ends: Mapping[str, End]) -> Document | None:
    why = blame(ends)
    return {"class": "workflow_failed", "message": why} if why else None
