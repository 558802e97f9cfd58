"""The calls as methods, written once for both clients.

A descriptor turns a function `arguments -> Call[T]` into a method that answers `T` on `Client` and an awaitable `T`
on `AsyncClient`; a list or a stream becomes an iterator, or an asynchronous one. Type checkers and editors see exact
signatures.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from tocsin.client import calls, workflow_calls
from tocsin.client.core import Call, Document, Page

if TYPE_CHECKING:
    from tocsin.client.aio import AsyncClient
    from tocsin.client.stream import Event
    from tocsin.client.sync import Client

P = ParamSpec("P")
T = TypeVar("T")


class Endpoint(Generic[P, T]):
    """A call as a method: sends it and answers what was read."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Endpoint[P, T]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self
        return functools.wraps(self._build)(lambda *args, **kwargs: client.send(self._build(*args, **kwargs)))


class Listing(Generic[P]):
    """A list as a method: iterates over all its items, asking for page after page as they are used up."""

    def __init__(self, build: Callable[P, Call[Page]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Listing[P]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, Iterator[Document]]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, AsyncIterator[Document]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self
        return functools.wraps(self._build)(lambda *args, **kwargs: client.items(self._build(*args, **kwargs)))


class Following(Generic[P]):
    """A stream as a method: iterates over its events for as long as one likes."""

    def __init__(self, build: Callable[P, Call[Document]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Following[P]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, Iterator[Event]]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, AsyncIterator[Event]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self
        return functools.wraps(self._build)(lambda *args, **kwargs: client.follow(self._build(*args, **kwargs)))


class Calls:
    """What both clients can do; `calls` and `workflow_calls` say what each means."""

    create_job = Endpoint(calls.create_job)
    create_jobs = Endpoint(calls.create_jobs)
    get_named_job = Endpoint(calls.get_named_job)
    put_job = Endpoint(calls.put_job)
    update_job = Endpoint(calls.update_job)
    job_versions = Listing(calls.job_versions)
    get_job = Endpoint(calls.get_job)
    preview_schedule = Endpoint(calls.preview_schedule)
    occurrences = Listing(calls.occurrences)
    list_jobs = Listing(calls.list_jobs)
    delete_job = Endpoint(calls.delete_job)
    pause_job = Endpoint(calls.pause_job)
    resume_job = Endpoint(calls.resume_job)
    cancel_job = Endpoint(calls.cancel_job)
    run_job = Endpoint(calls.run_job)
    run_batch = Endpoint(calls.run_batch)

    list_runs = Listing(calls.list_runs)
    get_run = Endpoint(calls.get_run)
    attempts = Listing(calls.attempts)
    explain_run = Endpoint(calls.explain_run)
    cancel_run = Endpoint(calls.cancel_run)
    retry_run = Endpoint(calls.retry_run)
    logs = Listing(calls.logs)
    tail_logs = Following(calls.tail_logs)
    search_logs = Listing(calls.search_logs)
    events = Following(calls.events)

    create_workflow = Endpoint(workflow_calls.create_workflow)
    put_workflow = Endpoint(workflow_calls.put_workflow)
    get_workflow = Endpoint(workflow_calls.get_workflow)
    list_workflows = Listing(workflow_calls.list_workflows)
    delete_workflow = Endpoint(workflow_calls.delete_workflow)
    pause_workflow = Endpoint(workflow_calls.pause_workflow)
    resume_workflow = Endpoint(workflow_calls.resume_workflow)
    cancel_workflow = Endpoint(workflow_calls.cancel_workflow)
    run_workflow = Endpoint(workflow_calls.run_workflow)
    get_workflow_run = Endpoint(workflow_calls.get_workflow_run)
    list_workflow_runs = Listing(workflow_calls.list_workflow_runs)
    cancel_workflow_run = Endpoint(workflow_calls.cancel_workflow_run)
    retry_workflow_run = Endpoint(workflow_calls.retry_workflow_run)

    backfill = Endpoint(workflow_calls.backfill)
    get_backfill = Endpoint(workflow_calls.get_backfill)
    list_backfills = Listing(workflow_calls.list_backfills)
    pause_backfill = Endpoint(workflow_calls.pause_backfill)
    resume_backfill = Endpoint(workflow_calls.resume_backfill)
    cancel_backfill = Endpoint(workflow_calls.cancel_backfill)

    put_calendar = Endpoint(calls.put_calendar)
    get_calendar = Endpoint(calls.get_calendar)
    list_calendars = Listing(calls.list_calendars)
    delete_calendar = Endpoint(calls.delete_calendar)

    put_secret = Endpoint(calls.put_secret)
    get_secret = Endpoint(calls.get_secret)
    list_secrets = Listing(calls.list_secrets)
    delete_secret = Endpoint(calls.delete_secret)
    list_master_keys = Endpoint(calls.list_master_keys)
    rotate_master_key = Endpoint(calls.rotate_master_key)

    list_circuits = Listing(calls.list_circuits)
    get_circuit = Endpoint(calls.get_circuit)
    put_circuit = Endpoint(calls.put_circuit)
    open_circuit = Endpoint(calls.open_circuit)
    close_circuit = Endpoint(calls.close_circuit)

    list_audit = Listing(calls.list_audit)
    verify_audit = Endpoint(calls.verify_audit)

    get_report = Endpoint(calls.get_report)

    list_dead = Listing(calls.list_dead)
    redrive_dead = Endpoint(calls.redrive_dead)
    discard_dead = Endpoint(calls.discard_dead)

    list_workers = Listing(calls.list_workers)
    get_worker = Endpoint(calls.get_worker)
    drain_worker = Endpoint(calls.drain_worker)

    list_pools = Listing(calls.list_pools)
    get_pool = Endpoint(calls.get_pool)
    update_pool = Endpoint(calls.update_pool)
    pause_pool = Endpoint(calls.pause_pool)
    resume_pool = Endpoint(calls.resume_pool)

    create_tenant = Endpoint(calls.create_tenant)
    get_tenant = Endpoint(calls.get_tenant)
    get_usage = Endpoint(calls.get_usage)
    update_tenant = Endpoint(calls.update_tenant)
    suspend_tenant = Endpoint(calls.suspend_tenant)
    resume_tenant = Endpoint(calls.resume_tenant)
    erase_tenant = Endpoint(calls.erase_tenant)
    list_tenants = Listing(calls.list_tenants)
    create_key = Endpoint(calls.create_key)
    get_key = Endpoint(calls.get_key)
    list_keys = Listing(calls.list_keys)
    rotate_key = Endpoint(calls.rotate_key)
    revoke_key = Endpoint(calls.revoke_key)

    healthz = Endpoint(calls.healthz)
    readyz = Endpoint(calls.readyz)
