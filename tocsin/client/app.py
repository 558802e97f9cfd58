"""`App`: functions as jobs, and the functions a worker offers. Standard library only, so that importing it costs a
job's module nothing.

    from tocsin import App

    app = App("reports")

    @app.job(cron="0 9 * * MON-FRI", timezone="America/New_York", retries=5, timeout="10m")
    async def daily(ctx, region: str = "us"):
        ctx.log.info("rendering", region=region)
        return {"rows": 42}

    await daily.submit(region="eu")
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from tocsin.client import declared
from tocsin.client.context import Context
from tocsin.client.declared import JobOptions, WorkflowOptions
from tocsin.client.failures import GiveUp, Retry

if TYPE_CHECKING:
    from datetime import datetime

    from tocsin.client.arguments import Arguments
    from tocsin.client.job import Backend, Job
    from tocsin.client.steps import Part, Step
    from tocsin.client.testing import Testing
    from tocsin.client.workflow import Workflow

__all__ = ["App", "Context", "Function", "GiveUp", "Retry"]

P = ParamSpec("P")
R = TypeVar("R")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)


class Function:
    """A registered function and what the worker must know to call it."""

    def __init__(self, name: str, call: Callable[..., Any], isolated: bool = False) -> None:
        if not _NAME.fullmatch(name) or len(name) > 128:
            raise ValueError(f"{name!r} is no name of a function: parts of letters, digits and _, joined by dots")
        self.name = name
        self.call = call
        self.isolated = isolated
        self.is_async = inspect.iscoroutinefunction(call)
        self.signature = inspect.signature(call)
        self.wants_context = _wants_context(self.signature)

    @functools.cached_property
    def arguments(self) -> Arguments:
        """How its parameters are filled from a run's arguments."""
        from tocsin.client.arguments import Arguments

        return Arguments(self.call, self.wants_context)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name, as a run's are sent; raises `TypeError`, as the call would."""
        context = (None,) if self.wants_context else ()
        given: dict[str, Any] = {}
        for name, value in list(self.signature.bind(*context, *args, **kwargs).arguments.items())[len(context) :]:
            match self.signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    raise TypeError(f"{self.name}: arguments that have no name (*{name}) cannot be sent")
                case inspect.Parameter.VAR_KEYWORD:
                    given |= value
                case _:
                    given[name] = value
        return given


def _wants_context(signature: inspect.Signature) -> bool:
    first = next(iter(signature.parameters.values()), None)
    return first is not None and (first.name == "ctx" or first.annotation in (Context, "Context", "tocsin.Context"))


class App:
    """Functions as jobs, served by `tocsin worker module:app`.

    `name` goes before each function's: `App("reports")` makes of `daily` the job `reports.daily`. `url`, `key` and
    `tenant` are for submitting; without them they are found as `Client` finds them.
    """

    def __init__(
        self, name: str = "", *, url: str | None = None, key: str | None = None, tenant: str | None = None
    ) -> None:
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an app: parts of letters, digits and _, joined by dots")
        self.name = name
        self.functions: dict[str, Function] = {}
        self.jobs: dict[str, Job[..., Any]] = {}
        self.workflows: dict[str, Workflow] = {}
        self._connection = {"url": url, "key": key, "tenant": tenant}
        self._backend: Backend | None = None

    # ── functions ────────────────────────────────────────────────────────────────────────────────────────────────

    @overload
    def function(self, name: _Function, /) -> _Function: ...

    @overload
    def function(self, name: str | None = None, /) -> Callable[[_Function], _Function]: ...

    def function(self, name: Any = None, /) -> Any:
        """Register a function, sync or async, for jobs that are made elsewhere, under `name` (its `__name__` if none is
        given).

        The function is called with the target's `args` and `kwargs` and the run's own args, which win. A first
        parameter named `ctx` receives the `Context`.
        """
        if callable(name):
            return self._add(Function(name.__name__, name)).call
        return lambda call: self._add(Function(name or call.__name__, call)).call

    def _add(self, function: Function) -> Function:
        if function.name in self.functions:
            raise ValueError(f"two functions are named {function.name!r}")
        self.functions[function.name] = function
        return function

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @overload
    def job(self, call: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Job[P, R]: ...
    @overload
    def job(self, call: Callable[P, Coroutine[Any, Any, R]], /) -> Job[P, R]: ...
    @overload
    def job(self, call: Callable[Concatenate[Context, P], R], /) -> Job[P, R]: ...
    @overload
    def job(self, call: Callable[P, R], /) -> Job[P, R]: ...
    @overload
    def job(self, **options: Unpack[JobOptions]) -> Declare: ...

    def job(self, call: Callable[..., Any] | None = None, /, **options: Any) -> Any:  # type: ignore[misc]
        """Make a function, sync or async, a job: `@app.job` or `@app.job(cron="0 9 * * *", retries=5, …)`.

        Without a schedule it runs when it is submitted. A worker that serves the app makes the job what is declared
        here when it starts. A first parameter named `ctx` receives the `Context`.
        """
        wanted = declared.checked(options)

        def declare(call: Callable[..., Any]) -> Job[..., Any]:
            from tocsin.client.job import Job

            name = wanted.get("name") or ".".join(filter(None, (self.name, call.__name__)))
            function = self._add(Function(name, call, wanted.get("isolation") == "process"))
            job: Job[..., Any] = Job(self, function, declared.document(function, self.name, wanted))
            self.jobs[name] = job
            return job

        return declare if call is None else declare(call)

    # ── workflows ────────────────────────────────────────────────────────────────────────────────────────────────

    def workflow(self, name: str, /, *parts: Part, **options: Unpack[WorkflowOptions]) -> Workflow:
        """Jobs that wait for each other, with one schedule: what is joined by `>>` in its `with` block, or given here.

        with app.workflow("nightly", cron="0 2 * * *") as nightly:
            extract >> [clean, check] >> load
            load >> report.on("failure")
        """
        from tocsin.client.workflow import Workflow

        if name in self.workflows:
            raise ValueError(f"two workflows are named {name!r}")
        workflow = Workflow(self, name, declared.checked_workflow(dict(options)))
        self.workflows[name] = workflow.add(*parts)
        return workflow

    def step(self, name: str, /, *, target: Mapping[str, Any], **more: Any) -> Step:
        """A step of a workflow that is no function of this app: a program, a request, a container. `target` and the
        rest are as in a job document."""
        from tocsin.client.steps import Step

        return Step(name, declared.plain({"target": target, **more}))

    def register(self) -> Any:
        """Make the jobs and workflows on the server what is declared here, as a worker does when it starts; their
        documents. In async code await it. The key must be an editor's."""
        jobs = [job.document for job in self.jobs.values()]
        return self.backend.register(jobs, [workflow.document for workflow in self.workflows.values()])

    @property
    def backend(self) -> Backend:
        """What `submit` speaks to: the server, or `testing()`."""
        if self._backend is None:
            from tocsin.client.job import Server

            self._backend = Server(**self._connection)
        return self._backend

    @backend.setter
    def backend(self, backend: Backend | None) -> None:
        self._backend = backend

    def testing(self, now: datetime | str | None = None, *, seed: int = 0) -> Testing:
        """A context in which the app's jobs run in this process, without a server, on a clock moved by hand."""
        from tocsin.client.testing import Testing

        return Testing(self, now, seed)


class Declare(Protocol):
    """What `@app.job(…)` answers: takes the function, gives the job."""

    @overload
    def __call__(self, call: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /) -> Job[P, R]: ...
    @overload
    def __call__(self, call: Callable[P, Coroutine[Any, Any, R]], /) -> Job[P, R]: ...
    @overload
    def __call__(self, call: Callable[Concatenate[Context, P], R], /) -> Job[P, R]: ...
    @overload
    def __call__(self, call: Callable[P, R], /) -> Job[P, R]: ...
    def __call__(self, call: Callable[..., Any], /) -> Any: ...
