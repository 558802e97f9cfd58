"""What is joined by `>>`, and the graph that comes of it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from tocsin.client import declared
from tocsin.client.declared import APP_TAG

On = Literal["success", "failure", "completion"]
_CONDITIONS = ("success", "failure", "completion")
# What a job declares and a workflow decides for all of its jobs.
_NOT_OF_A_STEP = ("name", "schedule", "overlap", "sensitive")


class Joinable:
    """What can be joined by `>>`: a job, a step, what came of joining them, or a list of these."""

    def parts(self) -> Flow:
        """The graph that it is."""
        raise NotImplementedError

    def __rshift__(self, later: Part) -> Flow:
        """Let `later` wait for this."""
        return _joined(self, later)

    def __rrshift__(self, earlier: Sequence[object]) -> Flow:
        """Let this wait for each part of a list. Of objects, because that is what a type checker takes a list of jobs
        for whose functions differ."""
        return _joined(earlier, self)


Part: TypeAlias = Joinable | Sequence[Joinable]


@dataclass(frozen=True, eq=False)
class Step(Joinable):
    """One node of a workflow: a job under the name that it has there, by which its children know its result."""

    name: str
    document: Mapping[str, Any]
    wants: On = "success"

    def on(self, condition: On) -> Step:
        """The same, to be run when those before it ended so: in `success`, in `failure` (dead), or, by `completion`,
        however they ended."""
        if condition not in _CONDITIONS:
            raise ValueError(f"a job runs on {', '.join(_CONDITIONS)}, not on {condition!r}")
        return replace(self, wants=condition)

    def map(self, over: str, *, max: int | None = None) -> Step:
        """One run for each element of a list that a job before it returns: `over` names that job, and the keys that
        lead to the list if it is not the whole result, as in "extract.files". Elements that are objects are the
        arguments of their run; others come as `item`. It returns the list of what they returned."""
        limit = {} if max is None else {"max": max}
        return replace(self, document={**self.document, "map": {"over": over, **limit}})

    def parts(self) -> Flow:
        return Flow(steps={self.name: self}, first=(self,), last=(self,))


@dataclass(frozen=True, eq=False)
class Flow(Joinable):
    """Steps and what they wait for: {(child, parent): on}; `first` and `last` are what is joined to others."""

    steps: Mapping[str, Step]
    first: tuple[Step, ...]
    last: tuple[Step, ...]
    edges: Mapping[tuple[str, str], On] = field(default_factory=dict)

    def parts(self) -> Flow:
        return self


def step_of(function: str, document: Mapping[str, Any], name: str | None, kwargs: Mapping[str, Any]) -> Step:
    """A declared job as a step, under its own last name if no other is given."""
    if document.get("sensitive"):
        raise ValueError(f"{function} is sensitive, and such a job cannot be part of a workflow yet")
    tags = {tag: value for tag, value in document.get("tags", {}).items() if tag != APP_TAG}
    node = {field: value for field, value in document.items() if field not in _NOT_OF_A_STEP} | {"tags": tags}
    if kwargs:
        node["target"] = {**node["target"], "kwargs": dict(kwargs)}
    return Step(name or function.rpartition(".")[2], declared.plain(node))


def _joined(earlier: Part | Sequence[object], later: Part) -> Flow:
    before, after = flow_of(earlier), flow_of(later)
    new = {(child.name, parent.name): child.wants for child in after.first for parent in before.last}
    flow = Flow({**before.steps, **after.steps}, before.first, after.last, {**before.edges, **after.edges, **new})
    declaring = OPEN.get()
    if declaring is not None:
        declaring.add(flow)
    return flow


def flow_of(part: object) -> Flow:
    """The graph of a part; the parts of a list stand beside each other."""
    if isinstance(part, Joinable):
        return part.parts()
    if not isinstance(part, list | tuple):
        raise TypeError(f"a workflow is made of jobs and steps, not of a {type(part).__name__}")
    flows = [flow_of(each) for each in part]
    return Flow(
        {name: step for flow in flows for name, step in flow.steps.items()},
        tuple(step for flow in flows for step in flow.first),
        tuple(step for flow in flows for step in flow.last),
        {edge: on for flow in flows for edge, on in flow.edges.items()},
    )


class Declaring(Protocol):
    """A workflow whose `with` block is open."""

    def add(self, *parts: Part) -> object:
        """Take these up."""


OPEN: ContextVar[Declaring | None] = ContextVar("tocsin_workflow", default=None)
