"""`Job`: a declared function that can be submitted; `Run`: what became of a submission.

Each call answers something that is used alike in both kinds of code: in async code it is awaited, elsewhere it has
happened when the call returns. What is said to the server stands here once, as a conversation of `Call`s without I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from tocsin.client.context import in_async_code
from tocsin.client.declared import Moment, length, moment
from tocsin.client.failures import Length
from tocsin.client.steps import Flow, Joinable, On, Step, step_of
from tocsin.errors import TocsinError

if TYPE_CHECKING:
    from weakref import WeakKeyDictionary

    from tocsin.client.aio import AsyncClient
    from tocsin.client.app import App, Function
    from tocsin.client.core import Call, Document
    from tocsin.client.sync import Client

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Answer = Any | Coroutine[Any, Any, Any]


class RunFailed(TocsinError):
    """The run whose result is asked for has none: it ended in another way. `document` is the run."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        error = document.get("error") or {}
        words = [f"run {document['id']} ended as {document['state']}", *filter(None, (error.get("class"),))]
        super().__init__(": ".join([", ".join(words), *filter(None, (error.get("message"),))]))
        self.document = document


class Backend(Protocol):
    """What jobs are submitted to. In async code each method answers a coroutine, elsewhere the thing itself."""

    def submit(self, job: Function, asked: list[Document]) -> Answer:
        """Ask for runs of a job; their documents."""

    def wait(self, run_id: str, timeout: float | None) -> Answer:
        """Until the run has ended; its document. Raises `TimeoutError`."""

    def submit_workflow(self, name: str, asked: Document) -> Answer:
        """Ask for a run of a workflow; its document."""

    def wait_workflow(self, run_id: str, timeout: float | None) -> Answer:
        """Until the workflow's run has ended; its document, with its graph. Raises `TimeoutError`."""

    def register(self, jobs: list[Document], workflows: list[Document]) -> Answer:
        """Make these what they say; as they are then."""


class _Both(Generic[T]):
    """Something that comes of an `Answer`: at once, or when it is awaited."""

    def _expect(self, answer: Answer) -> Self:
        self._coming: Coroutine[Any, Any, Any] | None = None
        if isinstance(answer, Coroutine):
            self._coming = answer
        else:
            self._take(answer)
        return self

    def _take(self, answer: Any) -> None:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, Any, Self]:
        coming, self._coming = self._coming, None
        if coming is not None:
            self._take((yield from coming.__await__()))
        return self


class Run(_Both[R]):
    """A run that was asked for. In async code await it before anything else."""

    def __init__(self, backend: Backend, answer: Answer) -> None:
        self._backend = backend
        self._document: Document | None = None
        self._expect(answer)

    def _take(self, answer: Any) -> None:
        self._document = answer[0] if isinstance(answer, list) else answer

    @property
    def document(self) -> Document:
        """The run as the server told of it last."""
        if self._document is None:
            raise RuntimeError("in async code a submission is to be awaited: run = await job.submit(…)")
        return self._document

    @property
    def id(self) -> str:
        """The run's id, the same in every attempt."""
        return str(self.document["id"])

    @property
    def state(self) -> str:
        """`staged`, `ready`, `waiting`, `running`, `stopping`, or how it ended: `succeeded`, `dead`, `cancelled`,
        `expired`, `skipped`. Of one of many that were submitted at once, until it is waited for, `submitted`."""
        return str(self.document["state"])

    @property
    def result(self) -> R:
        """What the function returned, as JSON has it; raises `RunFailed` if it ended otherwise, and `RuntimeError` if
        the run was not waited for."""
        if self.state == "succeeded":
            return cast(R, self.document.get("result"))
        from tocsin.model.states import FINAL

        if self.state in FINAL:
            raise RunFailed(self.document)
        raise RuntimeError(f"run {self.id} was {self.state}; wait() for it first")

    def wait(self, timeout: float | None = None) -> Self:
        """Until the run has ended, however; in async code await it. Raises `TimeoutError` after `timeout` seconds."""
        return self._expect(self._backend.wait(self.id, timeout))

    def __repr__(self) -> str:
        return "Run(not awaited)" if self._document is None else f"Run({self.id}, {self.state})"


class Runs(_Both[R], list[Run[R]]):
    """Several runs that were asked for at once; in async code await it before anything else."""

    def __init__(self, backend: Backend, answer: Answer) -> None:
        super().__init__()
        self._backend = backend
        self._expect(answer)

    def _take(self, answer: Any) -> None:
        self.extend(Run(self._backend, document) for document in answer)


class Job(Joinable, Generic[P, R]):
    """A function as a job. Called, it is the function itself; submitted, it runs on a worker. In a workflow, `a >> b`
    lets b wait for a."""

    def __init__(self, app: App, function: Function, document: Document, options: Document | None = None) -> None:
        self.app = app
        self.function = function
        self.document = document
        self._options = options or {}
        self.__doc__ = function.call.__doc__
        self.__name__ = function.name
        self.__wrapped__ = function.call

    @property
    def name(self) -> str:
        """The job's name on the server, and the function's on workers."""
        return self.function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here and now, as if it were not decorated."""
        return self.function.call(*args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Ask for a run now."""
        return self._one({}, args, kwargs)

    def submit_at(self, when: Moment, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Ask for a run at an instant: RFC 3339, or a `datetime` with a time zone."""
        return self._one({"at": moment(when)}, args, kwargs)

    def submit_in(self, delay: Length, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Ask for a run in a while: "10m", a `timedelta`, or seconds."""
        return self._one({"delay": length(delay)}, args, kwargs)

    def submit_many(self, arguments: Iterable[Mapping[str, Any]]) -> Runs[R]:
        """Ask for a run with each of these arguments, up to 5,000, all or none."""
        asked = [self._request({}, (), given) for given in arguments]
        return Runs(self.app.backend, self.app.backend.submit(self.function, asked))

    def using(self, *, priority: int | None = None, idempotency_key: str | None = None) -> Job[P, R]:
        """The same job, whose next submission has another `priority`, or happens once however often it is repeated."""
        given = {"priority": priority, "idempotency_key": idempotency_key}
        options = {name: value for name, value in given.items() if value is not None}
        return Job(self.app, self.function, self.document, self._options | options)

    def step(self, name: str | None = None, /, **kwargs: Any) -> Step:
        """The job as a step of a workflow under another name, or with arguments of its own."""
        return step_of(self.name, self.document, name, kwargs)

    def on(self, condition: On) -> Step:
        """In a workflow: to be run when those before it ended so, in `success`, in `failure` (dead), or, by
        `completion`, however they ended."""
        return self.step().on(condition)

    def map(self, over: str, *, max: int | None = None) -> Step:
        """In a workflow: one run for each element of a list that a job before it returns. `over` names that job, and
        the keys that lead to the list if it is not the whole result, as in "extract.files"."""
        return self.step().map(over, max=max)

    def parts(self) -> Flow:
        """The graph of this job alone."""
        return self.step().parts()

    def _one(self, when: Document, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run[R]:
        backend = self.app.backend
        return Run(backend, backend.submit(self.function, [self._request(when, args, kwargs)]))

    def _request(self, when: Document, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Document:
        return {"args": self.function.named(args, kwargs), **when, **self._options}

    def __repr__(self) -> str:
        return f"<job {self.name}>"


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────

Talk = Generator["Call[Any]", Any, T]


class Server:
    """The server as a backend, over one client for each event loop and one for the rest."""

    def __init__(self, url: str | None, key: str | None, tenant: str | None) -> None:
        self._url, self._key, self._tenant = url, key, tenant
        self._client: Client | None = None
        self._async_clients: WeakKeyDictionary[Any, AsyncClient] | None = None
        self._job_ids: dict[str, str] = {}

    def submit(self, job: Function, asked: list[Document]) -> Answer:
        """Ask for runs of a job, which is known by its name."""
        return self._hold(lambda: _submitting(job.name, self._job_ids, lambda job_id: _asking(job_id, asked)))

    def wait(self, run_id: str, timeout: float | None) -> Answer:
        """Until the run has ended."""
        return self._async_client.wait(run_id, timeout) if in_async_code() else self._sync_client.wait(run_id, timeout)

    def submit_workflow(self, name: str, asked: Document) -> Answer:
        """Ask for a run of a workflow, which is known by its name."""
        return self._hold(lambda: _submitting(name, self._job_ids, lambda job_id: _asking_for_workflow(job_id, asked)))

    def wait_workflow(self, run_id: str, timeout: float | None) -> Answer:
        """Until the workflow's run has ended."""
        client = self._async_client if in_async_code() else self._sync_client
        return client.wait_workflow(run_id, timeout)

    def register(self, jobs: list[Document], workflows: list[Document]) -> Answer:
        """Make the jobs and workflows of these names what these documents say."""
        return self._hold(lambda: registering(jobs, workflows))

    def _hold(self, talk: Callable[[], Talk[T]]) -> Answer:
        return _held_async(self._async_client, talk()) if in_async_code() else _held(self._sync_client, talk())

    @property
    def _sync_client(self) -> Client:
        if self._client is None:
            from tocsin.client.sync import Client

            self._client = Client(self._url, self._key, tenant=self._tenant)
        return self._client

    @property
    def _async_client(self) -> AsyncClient:
        import asyncio
        import weakref

        from tocsin.client.aio import AsyncClient

        if self._async_clients is None:
            self._async_clients = weakref.WeakKeyDictionary()
        loop = asyncio.get_running_loop()
        if loop not in self._async_clients:
            self._async_clients[loop] = AsyncClient(self._url, self._key, tenant=self._tenant)
        return self._async_clients[loop]


def _held(client: Client, talk: Talk[T]) -> T:
    from tocsin.client.core import ApiError

    try:
        call = next(talk)
        while True:
            try:
                answer = client.send(call)
            except ApiError as refused:
                call = talk.throw(refused)
            else:
                call = talk.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _held_async(client: AsyncClient, talk: Talk[T]) -> T:
    from tocsin.client.core import ApiError

    try:
        call = next(talk)
        while True:
            try:
                answer = await client.send(call)
            except ApiError as refused:
                call = talk.throw(refused)
            else:
                call = talk.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def registering(jobs: Iterable[Document], workflows: Iterable[Document]) -> Talk[list[Document]]:
    """Make each job and workflow what its document says; the same again changes nothing."""
    from tocsin.client import calls, workflow_calls

    made = []
    for document in jobs:
        made.append((yield calls.put_job(document["name"], document)))
    for document in workflows:
        made.append((yield workflow_calls.put_workflow(document["name"], document)))
    return made


def _submitting(name: str, known: dict[str, str], asking: Callable[[str], Talk[T]]) -> Talk[T]:
    """Ask for runs of the job of a name; an id that is remembered may be that of a job deleted since."""
    from tocsin.client.core import ApiError

    if name in known:
        try:
            return (yield from asking(known[name]))
        except ApiError as refused:
            if refused.status not in (404, 409):
                raise
    from tocsin.client import calls

    known[name] = (yield calls.get_named_job(name))["id"]
    return (yield from asking(known[name]))


def _asking_for_workflow(workflow_id: str, asked: Document) -> Talk[Document]:
    from tocsin.client import workflow_calls

    answer: Document = yield workflow_calls.run_workflow(workflow_id, **asked)
    return answer


def _asking(job_id: str, asked: list[Document]) -> Talk[list[Document]]:
    from tocsin.client import calls

    if len(asked) == 1:
        return [(yield calls.run_job(job_id, **asked[0]))]
    if not asked:
        return []
    ids = (yield calls.run_batch(job_id, [_without_key(one) for one in asked], idempotency_key=_key_of(asked)))["ids"]
    return [{"id": run_id, "state": "submitted"} for run_id in ids]


def _without_key(asked: Document) -> Document:
    return {name: value for name, value in asked.items() if name != "idempotency_key"}


def _key_of(asked: list[Document]) -> str | None:
    key: str | None = asked[0].get("idempotency_key")
    return key
