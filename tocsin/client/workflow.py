"""Workflows in Python: jobs joined by `>>`.

    with app.workflow("nightly", cron="0 2 * * *") as nightly:
        extract >> [clean, check] >> load
        load >> report.on("failure")

    nightly.submit(day="2026-12-01")

`a >> b`: b runs when a has succeeded. Beside a list, each of its parts; a job that stands behind several waits for all
of them. The same without a block: `app.workflow("nightly", extract >> load, cron=…)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tocsin.client import declared
from tocsin.client.declared import Moment, WorkflowOptions, length, moment
from tocsin.client.failures import Length
from tocsin.client.job import Run
from tocsin.client.steps import OPEN, Declaring, On, Part, Step, flow_of

if TYPE_CHECKING:
    from tocsin.client.app import App
    from tocsin.client.core import Document


class Workflow:
    """Jobs with one schedule, run as one. Made by `app.workflow`."""

    def __init__(self, app: App, name: str, options: WorkflowOptions) -> None:
        self.app = app
        self.name = name
        self._options = options
        self._steps: dict[str, Step] = {}
        self._parents: dict[str, dict[str, On]] = {}
        self._token: Token[Declaring | None] | None = None

    def add(self, *parts: Part) -> Self:
        """Take these up; what is part of it already is so once. In its `with` block, what is joined there is added by
        itself, and this is for a job that waits for none and has none behind it."""
        for part in parts:
            flow = flow_of(part)
            for name, step in flow.steps.items():
                known = self._steps.setdefault(name, step)
                if known.document != step.document:
                    raise ValueError(
                        f"{name!r} stands twice in {self.name}, and not for the same: keep what .map(…) or .step(…) "
                        "answers and use that, or give one of them another name"
                    )
            for (child, parent), on in flow.edges.items():
                known_on = self._parents.setdefault(child, {}).setdefault(parent, on)
                if known_on != on:
                    raise ValueError(f"{child} waits for {parent} on {known_on}, and cannot on {on}, too")
        return self

    @property
    def document(self) -> Document:
        """The workflow as the API takes it."""
        if not self._steps:
            raise ValueError(f"the workflow {self.name} has no jobs")
        jobs = {name: {**step.document, **self._parents_of(name)} for name, step in self._steps.items()}
        return declared.workflow_document(self.name, self.app.name, self._options, jobs)

    def _parents_of(self, name: str) -> dict[str, list[Any]]:
        parents = self._parents.get(name, {})
        wanted = [parent if on == "success" else {"job": parent, "on": on} for parent, on in parents.items()]
        return {"depends_on": wanted} if wanted else {}

    def submit(self, **args: Any) -> WorkflowRun:
        """Ask for a run of the whole, now; `args` reach the jobs that wait for no other."""
        return self._ask({}, args)

    def submit_at(self, when: Moment, /, **args: Any) -> WorkflowRun:
        """Ask for a run at an instant: RFC 3339, or a `datetime` with a time zone."""
        return self._ask({"at": moment(when)}, args)

    def submit_in(self, delay: Length, /, **args: Any) -> WorkflowRun:
        """Ask for a run in a while: "10m", a `timedelta`, or seconds."""
        return self._ask({"delay": length(delay)}, args)

    def _ask(self, when: Document, args: Mapping[str, Any]) -> WorkflowRun:
        backend = self.app.backend
        return WorkflowRun(backend, backend.submit_workflow(self.name, {**when, **({"args": args} if args else {})}))

    def __enter__(self) -> Self:
        if OPEN.get() is not None:
            raise RuntimeError("a workflow cannot be declared within another")
        self._token = OPEN.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        OPEN.reset(self._token)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


class WorkflowRun(Run[None]):
    """A run of a workflow that was asked for. In async code await it before anything else."""

    @property
    def nodes(self) -> dict[str, Document]:
        """Each job's run, by the job's name in the workflow, once the run was waited for."""
        return {node["name"]: node for node in self.document.get("nodes", ())}

    def wait(self, timeout: float | None = None) -> Self:
        """Until it has ended, however; in async code await it. Raises `TimeoutError` after `timeout` seconds."""
        return self._expect(self._backend.wait_workflow(self.id, timeout))
