"""The workflow document: jobs with one schedule and what each waits for; and the job documents that it is kept as.

A workflow is a job (its head, of target kind `workflow`) whose runs are the workflow's runs, and each of its nodes is
one, too: so whatever holds for jobs holds for them. `head_spec` and `node_specs` make these, `workflow_of` reads the
document back from the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tocsin.errors import InvalidInput, NotSupported
from tocsin.model import job
from tocsin.model.graph import Graph, Wanted, Wrong, dependencies
from tocsin.model.job import ConcurrencyKey, JobSpec, Name, Placement, Positive, RateLimit, Resources, Retry, Schedule
from tocsin.model.scalars import Duration, decode_scalar, encode_scalar
from tocsin.model.targets import WORKFLOW_POOL, Line, WorkerTarget, WorkflowTarget

CONDUCTOR = "00000000-0000-7000-8000-000000000001"  # who holds heads that run: no process, every server acts for it
MOST_MAPPED = 10_000
_LONGEST_NAME = 128
_MOST_ERRORS = 20
_WEEK, _HOUR = Duration.parse("P7D"), Duration.parse("PT1H")
_MANUAL = Schedule(manual=True)

NODE_NAME = r"^[a-zA-Z0-9_-]{1,64}(?!\n)$"
NodeName = Annotated[str, Meta(pattern=NODE_NAME)]
Priority = Annotated[int, Meta(ge=0, le=1000)]


class BadMap(ValueError):
    """A result that cannot be mapped over; the text says why."""


class Map(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One run of the node for each element of a list that a parent results in: `over` names the parent, and the keys
    that lead to the list if it is not the whole result, as in `extract.files`. More than `max` elements fail it."""

    over: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}(\.[^.\n]{1,128}){0,16}(?!\n)$")]
    max: Annotated[int, Meta(ge=1, le=MOST_MAPPED)] = 1_000

    @property
    def parent(self) -> str:
        """The node whose result it is."""
        return self.over.split(".", 1)[0]

    def args_for(self, result: Any) -> list[dict[str, Any]]:
        """The arguments of each run, made of the parent's result; raises `BadMap`."""
        seen, found = self.parent, result
        for key in self.over.split(".")[1:]:
            if not isinstance(found, dict) or key not in found:
                raise BadMap(f"the result of {seen} has no {key!r}")
            seen, found = f"{seen}.{key}", found[key]
        if not isinstance(found, list):
            raise BadMap(f"{self.over} is no list")
        if len(found) > self.max:
            raise BadMap(f"{self.over} has {len(found):,} elements, at most {self.max:,} are allowed")
        return [each if isinstance(each, dict) else {"item": each} for each in found]


class Node(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """One job of a workflow: a job document without what the workflow decides for all (name, schedule, overlap)."""

    target: WorkerTarget
    depends_on: list[Wanted] = []
    map: Map | None = None
    pool: Name = "default"
    priority: Priority | None = None  # None: that of the workflow
    resources: Resources = Resources()
    placement: Placement = Placement()
    timeout: Duration = _HOUR
    start_deadline: Duration | None = None
    retry: Retry = Retry()
    max_concurrency: Positive | None = None
    concurrency_key: Line | ConcurrencyKey | None = None
    rate_limit: Line | RateLimit | None = None
    circuit: Name | None = None
    secrets: Annotated[dict[str, Name], Meta(max_length=50)] = {}
    notify: list[Any] = []
    tags: Annotated[dict[str, str], Meta(max_length=50)] = {}
    description: Annotated[str, Meta(max_length=4096)] = ""


# What of a node says how it stands in the graph, and what a job's document says of every node anyway.
_OF_THE_GRAPH = ("depends_on", "map", "priority")
_OF_THE_JOB = tuple(name for name in Node.__struct_fields__ if name not in _OF_THE_GRAPH)


class WorkflowSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A workflow as its owner writes it. `timeout`: of the whole; `max_concurrency`: its runs at once."""

    name: Name
    jobs: Annotated[dict[NodeName, Node], Meta(min_length=1)]
    schedule: Schedule | None = None
    priority: Priority = 500
    timeout: Duration = _WEEK
    start_deadline: Duration | None = None
    overlap: Literal["skip", "queue", "queue_all", "allow", "replace"] = "skip"
    max_concurrency: Positive | None = None
    tags: Annotated[dict[str, str], Meta(max_length=50)] = {}
    description: Annotated[str, Meta(max_length=4096)] = ""

    @property
    def graph(self) -> Graph:
        """What waits for what; raises what is wrong with it."""
        return Graph.of({name: dependencies(node.depends_on) for name, node in self.jobs.items()})


_OF_THE_WHOLE = tuple(name for name in WorkflowSpec.__struct_fields__ if name not in ("jobs", "schedule"))


def check(spec: WorkflowSpec) -> Graph:
    """Refuse what decodes but means nothing, naming each field; otherwise its graph."""
    graph = spec.graph
    job.check(_head(spec, {}), of_workflow=True)
    wrong = list(islice(_wrong(spec), _MOST_ERRORS))
    if wrong:
        only_unbuilt = all(each["code"] == NotSupported.default_code for each in wrong)
        raise (NotSupported if only_unbuilt else InvalidInput).fields(wrong)
    return graph


def head_spec(spec: WorkflowSpec) -> JobSpec:
    """The job that stands for the whole. It is tried once: what may be tried again are its nodes."""
    return _head(spec, {name: msgspec.to_builtins(node, enc_hook=encode_scalar) for name, node in spec.jobs.items()})


def _head(spec: WorkflowSpec, nodes: dict[str, Any]) -> JobSpec:
    return JobSpec(
        target=WorkflowTarget(jobs=nodes),
        schedule=spec.schedule or _MANUAL,
        pool=WORKFLOW_POOL,
        retry=Retry(max_attempts=1),
        **{name: getattr(spec, name) for name in _OF_THE_WHOLE},
    )


def node_specs(spec: WorkflowSpec) -> dict[str, JobSpec]:
    """The job of each node: `<workflow>.<node>`, run only by the workflow."""
    return {name: _node_spec(spec, name, node) for name, node in spec.jobs.items()}


def _node_spec(spec: WorkflowSpec, name: str, node: Node) -> JobSpec:
    return JobSpec(
        name=f"{spec.name}.{name}",
        schedule=_MANUAL,
        priority=spec.priority if node.priority is None else node.priority,
        overlap="allow",
        **{field: getattr(node, field) for field in _OF_THE_JOB},
    )


def workflow_of(head: JobSpec) -> WorkflowSpec:
    """The document that this head was made of, with its defaults filled in."""
    if not isinstance(head.target, WorkflowTarget):
        raise TypeError("not the head of a workflow")
    return WorkflowSpec(
        jobs=msgspec.convert(head.target.jobs, dict[str, Node], dec_hook=decode_scalar),
        schedule=head.schedule,
        **{name: getattr(head, name) for name in _OF_THE_WHOLE},
    )


def _wrong(spec: WorkflowSpec) -> Iterator[Wrong]:
    for name, node in spec.jobs.items():
        if len(f"{spec.name}.{name}") > _LONGEST_NAME:
            message = f"is too long a name: with the workflow's before it, at most {_LONGEST_NAME} characters"
            yield {"path": f"jobs.{name}", "code": "invalid", "message": message}
        yield from _wrong_job(spec, name, node)
        if node.map is not None and not _wants_success(node, node.map.parent):
            message = f"{node.map.parent!r} is no parent that this job waits for on success"
            yield {"path": f"jobs.{name}.map.over", "code": "not_a_parent", "message": message}


def _wrong_job(spec: WorkflowSpec, name: str, node: Node) -> Iterator[Wrong]:
    try:
        job.check(_node_spec(spec, name, node), of_workflow=True)
    except InvalidInput as problem:
        for each in problem.errors or ():
            yield each | {"path": f"jobs.{name}.{each['path']}"}


def _wants_success(node: Node, parent: str) -> bool:
    return any(each.job == parent and each.on == "success" for each in dependencies(node.depends_on))
