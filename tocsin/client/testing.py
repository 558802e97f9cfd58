"""`app.testing()`: jobs and workflows in the process of a test, without a server, on a clock that the test moves.

The rules are the server's own (schedules, retries, arguments); what it takes a fleet to have is left out: runs take no
time, so nothing overlaps, waits for a limit, times out or is lost. Nor are the server's calendars known here.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import inspect
import itertools
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from tocsin import wire
from tocsin.client.app import App, Function
from tocsin.client.context import Context, Saving, in_async_code
from tocsin.client.declared import Moment, moment
from tocsin.client.failures import Failure, Length, meaning, seconds_of, text_of
from tocsin.client.job import Answer, Run, Runs
from tocsin.client.stream import id_of
from tocsin.client.testing_workflows import WorkflowProgress
from tocsin.clock import iso
from tocsin.model.ids import new_id
from tocsin.model.job import JobSpec, RunRequest, check
from tocsin.model.packed import MOST_RESULT
from tocsin.model.retry import after_failure
from tocsin.model.scalars import Instant
from tocsin.model.schedule import check_schedule, spread, timetable
from tocsin.model.timetable import TICK
from tocsin.model.workflow import WorkflowSpec, head_spec, node_specs
from tocsin.model.workflow import check as check_workflow

if TYPE_CHECKING:
    from tocsin.client.core import Document

_MOST_ATTEMPTS = 100_000  # in one move of the clock; more is a job that submits itself for ever


class _Declared:
    """A job under test, the head of a workflow or one of its nodes: its document, and its next occurrence."""

    def __init__(self, spec: JobSpec, now: datetime, function: Function | None, workflow: WorkflowSpec | None) -> None:
        self.spec, self.function, self.workflow = spec, function, workflow
        schedule, self.name = spec.schedule, str(spec.name)
        assert schedule is not None
        check_schedule(schedule, now, self.name)
        self._timetable = timetable(schedule, now, self.name)
        self._left = schedule.max_runs
        self.late_by = spread(schedule, self.name)
        self.next_at = self._timetable.next_after(now - TICK)

    @classmethod
    def of_job(cls, document: Document, function: Function, now: datetime) -> Self:
        """A job, read as the server reads it."""
        spec: JobSpec = wire.decode_job_spec(wire.encode(document))
        check(spec)
        return cls(spec, now, function, None)

    @classmethod
    def of_workflow(cls, document: Document, functions: Mapping[str, Function], now: datetime) -> Iterator[Self]:
        """The head of a workflow and its nodes."""
        workflow: WorkflowSpec = wire.decode_workflow_spec(wire.encode(document))
        check_workflow(workflow)
        yield cls(head_spec(workflow), now, None, workflow)
        for spec in node_specs(workflow).values():
            yield cls(spec, now, functions.get(getattr(spec.target, "function", "")), None)

    def occur(self) -> datetime:
        """The occurrence that is due; the next one comes after it."""
        assert self.next_at is not None
        due, self.next_at = self.next_at, self._timetable.next_after(self.next_at)
        if self._left is not None:
            self._left -= 1
            self.next_at = self.next_at if self._left else None
        return due


class _TestRun:
    """One run: what it is to do, and all that is known of it."""

    def __init__(self, job: _Declared, scheduled_for: datetime, ready_at: datetime, args: Any, trigger: str) -> None:
        self.job = job
        self.ready_at = ready_at
        self.args = {} if args is None else args
        self.parents: dict[str, Document] = {}
        self.then: Callable[[Document], None] | None = None  # to be told of its end
        self.checkpoint: Any = None
        self.log: list[tuple[str, str]] = []
        self.document: Document = {
            "id": new_id(scheduled_for),
            "job_name": job.name,
            "state": "staged",
            "outcome": None,
            "attempt": 0,
            "failures": 0,
            "trigger": trigger,
            "scheduled_for": iso(scheduled_for),
            "ready_at": iso(ready_at),
            "progress": None,
            "args": args,
            "result": None,
            "error": None,
        }


class Testing:
    """The app's jobs and workflows without a server. A context; in async tests `advance` and `run` are awaited."""

    __test__ = False  # not a test itself, whatever pytest thinks of its name

    def __init__(self, app: App, now: Moment | None = None, seed: int = 0) -> None:
        self.now = datetime.now(UTC) if now is None else Instant.parse(moment(now)).at
        self._app = app
        self._rng = random.Random(seed)
        self._jobs = {job.name: _Declared.of_job(job.document, job.function, self.now) for job in app.jobs.values()}
        for workflow in app.workflows.values():
            parts = _Declared.of_workflow(workflow.document, app.functions, self.now)
            self._jobs |= {part.name: part for part in parts}
        self._staged: list[tuple[datetime, int, _TestRun]] = []
        self._serial = itertools.count()
        self._runs: dict[str, _TestRun] = {}
        self._loop: asyncio.Runner | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before, self._app.backend = self._app._backend, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._app.backend = self._before
        if self._loop is not None:
            self._loop.close()

    # ── what a test does ─────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Runs[Any]:
        """Run all that is due now, and what becomes due by that; those that were."""
        return self.advance_to(self.now)

    def advance(self, by: Length) -> Runs[Any]:
        """Move the clock forward: what falls due meanwhile (schedules, retries, delayed runs) runs at its instant."""
        return self.advance_to(self.now + timedelta(seconds=seconds_of(by)))

    def advance_to(self, when: Moment) -> Runs[Any]:
        """The same up to an instant."""
        until = Instant.parse(moment(when)).at
        return Runs(self, self._play_async(until) if in_async_code() else self._play(until))

    @property
    def runs(self) -> list[Run[Any]]:
        """All runs there were, oldest first."""
        return [Run(self, run.document) for run in self._runs.values()]

    def logs(self, run: str | Run[Any]) -> list[tuple[str, str]]:
        """What a run has logged: (level, text)."""
        return self._runs[id_of(run)].log

    def next_run_at(self, name: str) -> datetime | None:
        """When a job's schedule is due next."""
        return self._jobs[name].next_at

    # ── what the app does ────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, job: Function, asked: list[Document]) -> Answer:
        """Ask for runs; they run when the test says so."""
        made = [self._stage(job.name, one) for one in asked]
        return self._given(made)

    def wait(self, run_id: str, timeout: float | None) -> Answer:
        """The run, if it has ended when all that is due now has run."""
        return self._waited_async(run_id) if in_async_code() else self._over(run_id, self._play(self.now))

    def submit_workflow(self, name: str, asked: Document) -> Answer:
        """Ask for a run of a workflow; it begins when the test says so."""
        return self._given(self._stage(name, asked))

    def wait_workflow(self, run_id: str, timeout: float | None) -> Answer:
        """The workflow's run, if it has ended when all that is due now has run."""
        return self.wait(run_id, timeout)

    def register(self, jobs: list[Document], workflows: list[Document]) -> Answer:
        """There is nothing to make: all that is declared is there."""
        return self._given([*jobs, *workflows])

    def _given(self, answer: Any) -> Answer:
        async def later() -> Any:
            return answer

        return later() if in_async_code() else answer

    async def _waited_async(self, run_id: str) -> Document:
        return self._over(run_id, await self._play_async(self.now))

    def _over(self, run_id: str, _played: Any) -> Document:
        document = self._runs[run_id].document
        if document["state"] == "staged":
            raise TimeoutError(f"the run is due at {document['ready_at']}, and the clock stands at {iso(self.now)}")
        if document["state"] == "running":
            raise TimeoutError(f"jobs of the workflow are due later, and the clock stands at {iso(self.now)}")
        return document

    def _stage(self, name: str, asked: Document) -> Document:
        given = {key: value for key, value in asked.items() if key not in ("idempotency_key", "priority")}
        request: RunRequest = wire.decode_run_request(wire.encode(given)).asked_at(self.now)
        at = self.now if request.at is None else max(self.now, request.at.at)
        args = request.args if isinstance(request.args, dict) else None
        return self._add(_TestRun(self._jobs[name], at, at, args, "api")).document

    def _add(self, run: _TestRun) -> _TestRun:
        self._runs[run.document["id"]] = run
        heapq.heappush(self._staged, (run.ready_at, next(self._serial), run))
        return run

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _play(self, until: datetime) -> list[Document]:
        played: dict[str, Document] = {}
        for run in self._due(until, played):
            try:
                result = self._invoke(run)
                if inspect.iscoroutine(result):
                    self._loop = self._loop or asyncio.Runner()
                    result = self._loop.run(result)
            except Exception as exc:
                self._fail(run, meaning(exc), text_of(exc))
            else:
                self._succeed(run, result)
        return list(played.values())

    async def _play_async(self, until: datetime) -> list[Document]:
        played: dict[str, Document] = {}
        for run in self._due(until, played):
            try:
                if run.job.function is not None and run.job.function.is_async:
                    result = await self._invoke(run)
                else:  # in a thread, as on a worker: there it may submit and block
                    result = await asyncio.to_thread(self._invoke, run)
            except Exception as exc:
                self._fail(run, meaning(exc), text_of(exc))
            else:
                self._succeed(run, result)
        return list(played.values())

    def _due(self, until: datetime, played: dict[str, Document]) -> Iterator[_TestRun]:
        """One run after the other as they fall due, also those that come of the ones before."""
        for _ in range(_MOST_ATTEMPTS):
            run = self._next(until)
            if run is None:
                return
            played[run.document["id"]] = run.document
            if run.job.workflow is None:
                yield run
            else:
                self._begin(run, run.job.workflow)
        raise RuntimeError(f"{_MOST_ATTEMPTS:,} attempts in one move of the clock: does a job submit itself for ever?")

    def _next(self, until: datetime) -> _TestRun | None:
        """The first run that is due by then, and the clock is moved to its instant; if none is, to the end."""
        for job in self._jobs.values():
            while job.next_at is not None and job.next_at <= until:
                due = job.occur()
                self._add(_TestRun(job, due, due + job.late_by, None, "schedule"))
        if not self._staged or self._staged[0][0] > until:
            self.now = max(self.now, until)
            return None
        run = heapq.heappop(self._staged)[2]
        self.now = max(self.now, run.ready_at)
        return run

    # ── workflows ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, head: _TestRun, spec: WorkflowSpec) -> None:
        def stage(node: str, args: dict[str, Any] | None, parents: dict[str, Document], place: int) -> None:
            job = self._jobs[f"{spec.name}.{node}"]
            if job.function is None:
                raise RuntimeError(f"{job.name} is no function of this app, and nothing else can be run here")
            run = _TestRun(job, self.now, self.now, args, "dependency")
            run.parents = parents
            run.then = functools.partial(progress.ended, node, place)
            run.document["workflow_run_id"] = head.document["id"]
            self._add(run)

        progress = WorkflowProgress(spec, head.document, head.args or None, stage)
        progress.begin()

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _invoke(self, run: _TestRun) -> Any | Coroutine[Any, Any, Any]:
        function, document, target = run.job.function, run.document, run.job.spec.target
        assert function is not None
        document["attempt"] += 1
        document["state"] = "running"
        own = {**getattr(target, "kwargs", {}), **run.args}
        args, kwargs = function.arguments.fill(getattr(target, "args", []), own)
        if not function.wants_context:
            return function.call(*args, **kwargs)
        context = Context(
            run_id=document["id"],
            job_id=run.job.name,
            job_name=run.job.name,
            attempt=document["attempt"],
            fence=document["attempt"],
            scheduled_for=datetime.fromisoformat(document["scheduled_for"]),
            args=run.args,
            saved=run.checkpoint,
            parents=run.parents,
            host=_TestHost(self, run),
        )
        return function.call(context, *args, **kwargs)

    def _succeed(self, run: _TestRun, result: Any) -> None:
        try:
            text = msgspec.json.encode(result)
            stored = msgspec.json.decode(text)
        except Exception as exc:
            return self._fail(run, Failure("result"), f"the result cannot be stored as JSON: {exc}")
        if len(text) > MOST_RESULT:
            return self._fail(run, Failure("result_too_large", give_up=True), f"the result has {len(text):,} bytes")
        self._end(run, {"state": "succeeded", "outcome": "succeeded", "result": stored, "error": None})

    def _fail(self, run: _TestRun, failure: Failure, message: str) -> None:
        run.document["failures"] += 1
        run.document |= {"outcome": "failed", "error": {"class": failure.error_class, "message": message}}
        delay = after_failure(
            run.job.spec.retry,
            run.document["failures"],
            failure.error_class,
            self._rng,
            asked=failure.retry_after,
            give_up=failure.give_up,
        ).delay
        if delay is None:
            return self._end(run, {"state": "dead"})
        run.ready_at = self.now + timedelta(seconds=delay)
        run.document |= {"state": "staged", "ready_at": iso(run.ready_at)}
        self._add(run)

    def _end(self, run: _TestRun, end: Document) -> None:
        run.document |= end
        if run.then is not None:
            run.then(run.document)


class _TestHost:
    """The `Host` of a context under test."""

    def __init__(self, testing: Testing, run: _TestRun) -> None:
        self._testing, self._run = testing, run
        self._stop = threading.Event()

    def emit(self, level: str, text: str, about: str = "") -> None:
        self._run.log.append((level, text))

    def keep(self, state: Any) -> Saving:
        self._run.checkpoint = msgspec.json.decode(msgspec.json.encode(state))
        kept: Future[None] = Future()
        kept.set_result(None)
        return Saving(kept)

    def progressed(self, fraction: float) -> None:
        self._run.document["progress"] = fraction

    def seconds_left(self) -> float:
        return self._run.job.spec.timeout.seconds

    def stop_event(self) -> threading.Event:
        return self._stop

    @property
    def now(self) -> datetime:
        return self._testing.now
