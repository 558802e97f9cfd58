"""The load of a round: submits jobs and runs over HTTP and keeps the client ledger.

A round calls, in this order (the nemesis kills what it likes between the first two):

    async with Driver([url, …], key, client_ledger) as driver:
        made = await run_load(driver, Load(job_ledger=…, seconds=30))
        # heal: every process that should live, lives
        await stop_schedules(driver, made)
        await wait_until_ended(driver, made, seconds=60)
    evidence = await collect(Target(url, key, tag=driver.tag, settle=0), [client_ledger], [job_ledger])
    assert check(evidence) == []

Each request is sent with one Idempotency-Key, again and again, until somebody answers it, so that no outcome stays
unknown. Several URLs are several servers: a failed request goes to the next.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests import PATIENCE

from .ledger import ClientLedger

JOB_PROGRAM = Path(__file__).with_name("jobs.py")
FINAL = ("succeeded", "dead", "cancelled", "expired", "skipped")
LIVE = ("staged", "ready", "waiting", "running", "stopping")
_AT_ONCE = 40  # writes under way: what an outage has left undone must not come down on those who get up again
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class GaveUp(Exception):
    """No server answered a request for too long; its outcome is unknown, and the ledger says so."""


class Driver:
    """Sends requests until they are answered, and notes each before and after."""

    def __init__(self, urls: Sequence[str], key: str, client_ledger: str | Path, patience: float = 120.0) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._servers = [httpx.AsyncClient(base_url=u, headers=headers, timeout=10) for u in urls]
        self._ledger = ClientLedger(client_ledger)
        self._patience = patience
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.round = secrets.token_hex(4)
        self.tag = f"round:{self.round}"
        self.repeats = 0
        self.answered = 0  # writes

    async def __aenter__(self) -> Driver:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        for server in self._servers:
            await server.aclose()
        self._ledger.close()

    async def create_job(self, spec: dict[str, Any]) -> str:
        """Create a job, tagged with the round; its id."""
        tags = {"round": self.round} | spec.get("tags", {})
        return (await self._write("create_job", "/v1/jobs", spec | {"tags": tags}))[0]

    async def create_runs(self, job_id: str, args: Sequence[dict[str, Any]]) -> list[str]:
        """Ask for one run of a job for each of `args`; their ids."""
        body = {"runs": [{"args": a} for a in args]}
        return await self._write("create_runs", f"/v1/jobs/{job_id}/runs/batch", body, job_id=job_id, count=len(args))

    async def create_workflow(self, name: str, jobs: dict[str, dict[str, Any]]) -> str:
        """Create a workflow whose jobs are tagged with the round; its id. It is not tagged itself: what runs of it
        writes no ledger."""
        tagged = {node: spec | {"tags": {"round": self.round}} for node, spec in jobs.items()}
        body = {"name": f"{name}-{self.round}", "jobs": tagged}
        return (await self._write("create_workflow", "/v1/workflows", body))[0]

    async def run_workflow(self, workflow_id: str) -> None:
        """Ask for one run of a workflow."""
        await self._write("run_workflow", f"/v1/workflows/{workflow_id}/runs", {}, job_id=workflow_id)

    async def cancel_job(self, job_id: str) -> None:
        """End a job; what is running may finish."""
        await self._write("cancel_job", f"/v1/jobs/{job_id}/cancel", {"running": "leave"}, job_id=job_id)

    async def cancel_run(self, run_id: str) -> None:
        """Stop one run, wherever it is; one that has ended stays as it is."""
        await self._write("cancel_run", f"/v1/runs/{run_id}/cancel", {}, run_id=run_id)

    async def get(self, path: str, **params: Any) -> Any:
        """Read, from whoever answers."""
        return (await self._until_answered("GET", path, params=params)).json()

    async def _write(self, op: str, path: str, body: dict[str, Any], **note: Any) -> list[str]:
        key = secrets.token_hex(16)
        async with self._turns:
            number = await asyncio.to_thread(self._ledger.intent, op, path, key, **note)
            reply = await self._until_answered("POST", path, json=body, headers={"idempotency-key": key})
            ids = _ids(reply.json()) if reply.is_success else []
            await asyncio.to_thread(self._ledger.reply, number, reply.status_code, ids)
        self.answered += 1
        if not reply.is_success:
            raise httpx.HTTPStatusError(
                f"{op}: {reply.status_code} {reply.text}", request=reply.request, response=reply
            )
        return ids

    async def _until_answered(self, method: str, path: str, **how: Any) -> httpx.Response:
        give_up_at = time.monotonic() + self._patience
        servers = itertools.cycle(random.sample(self._servers, len(self._servers)))
        for turn in itertools.count():
            try:
                reply = await next(servers).request(method, path, **how)
                if reply.status_code not in _AGAIN and not _in_flight(reply):
                    return reply
                said = f"{reply.status_code} {reply.text[:200]}"
            except httpx.TransportError as e:
                said = repr(e)
            if time.monotonic() > give_up_at:
                raise GaveUp(f"{method} {path}: {said}")
            self.repeats += 1
            await asyncio.sleep(random.uniform(0, min(1.0, 0.05 * 2**turn)))
        raise AssertionError("unreachable")


def _in_flight(reply: httpx.Response) -> bool:
    """The first sending of this very request is still being worked on."""
    return reply.status_code == 409 and reply.json().get("code") == "in_flight"


def _ids(body: Any) -> list[str]:
    """The ids of what was made: one document, or a list of documents or ids."""
    if "items" not in body:
        return [body["id"]]
    return [i if isinstance(i, str) else i["id"] for i in body["items"]]


@dataclass
class Load:
    """What a round submits. A run sleeps up to `longest` seconds; some fail once first, some write a log."""

    job_ledger: str | Path
    seconds: float = 20.0
    manual_jobs: int = 4
    batch: int = 10
    batches_per_second: float = 5.0
    once_per_second: float = 2.0
    cancels_per_second: float = 0.0  # of runs, whatever they are doing
    workflows_per_second: float = 0.0  # runs of one
    every: Sequence[str] = ("PT1S", "PT2S", "PT5S")
    crons: Sequence[str] = ()
    max_concurrency: int | None = 3  # of the first manual job
    longest: float = 0.3
    failing: float = 0.1  # share of the runs
    writing: float = 0.1
    python: bool = False  # functions of `tests.cluster.jobs:app` instead of processes
    seed: int = 0
    pool: str = "default"


@dataclass
class Made:
    """What was acknowledged."""

    manual: list[str] = field(default_factory=list)
    every: list[str] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    runs: int = 0
    recent: list[str] = field(default_factory=list)  # runs that a cancel may still find alive

    @classmethod
    def all(cls, parts: Iterable[Made]) -> Made:
        """Several loads as one."""
        out = cls()
        for part in parts:
            out.manual += part.manual
            out.every += part.every
            out.once += part.once
            out.runs += part.runs
        return out

    @property
    def jobs(self) -> list[str]:
        return [*self.manual, *self.every, *self.once]


async def run_load(driver: Driver, load: Load) -> Made:
    """Submit for `load.seconds`; returns when every request has been answered."""
    rng, made = random.Random(load.seed), Made()
    for number in range(load.manual_jobs):
        limit = load.max_concurrency if number == 0 else None
        made.manual.append(await driver.create_job(job_spec(load, {"manual": True}) | {"max_concurrency": limit}))
    for schedule in (*({"every": every} for every in load.every), *({"cron": cron} for cron in load.crons)):
        made.every.append(await driver.create_job(job_spec(load, schedule) | {"overlap": "allow"}))

    async def more_runs() -> None:
        args = [run_args(load, rng) for _ in range(load.batch)]
        ids = await driver.create_runs(rng.choice(made.manual), args)
        made.runs += len(ids)
        made.recent = ids

    async def one_cancel() -> None:
        if made.recent:
            await driver.cancel_run(rng.choice(made.recent))

    workflow = await driver.create_workflow(f"flow-{load.seed}", graph(load)) if load.workflows_per_second else ""

    async def one_workflow_run() -> None:
        await driver.run_workflow(workflow)

    async def one_job() -> None:
        made.once.append(await driver.create_job(job_spec(load, None)))

    await asyncio.gather(
        _steadily(more_runs, load.batches_per_second, load.seconds),
        _steadily(one_job, load.once_per_second, load.seconds),
        _steadily(one_cancel, load.cancels_per_second, load.seconds),
        _steadily(one_workflow_run, load.workflows_per_second, load.seconds),
    )
    return made


async def _steadily(do: Any, per_second: float, seconds: float) -> None:
    """Call at a steady rate, whether or not earlier calls have returned; then wait for them all."""
    if not per_second:
        return
    calls, began = set(), time.monotonic()
    for number in range(int(per_second * seconds)):
        calls.add(asyncio.create_task(do()))
        if number % 50 == 0:
            calls -= {c for c in calls if c.done() and not c.exception()}
        await asyncio.sleep(max(began + (number + 1) / per_second - time.monotonic(), 0))
    await asyncio.gather(*calls)


def job_spec(load: Load, schedule: dict[str, Any] | None) -> dict[str, Any]:
    """A job that keeps the job ledger."""
    path = str(Path(load.job_ledger).resolve())
    target: dict[str, Any] = {"kind": "python", "function": "trust.work_async", "kwargs": {"ledger": path}}
    if not load.python:
        # Without site packages it starts in half the time.
        target = {"kind": "process", "command": [sys.executable, "-ES", str(JOB_PROGRAM), "--ledger", path]}
    spec = {"target": target, "pool": load.pool, "retry": {"delay": "PT0.2S", "max_delay": "PT1S"}, "timeout": "PT60S"}
    return spec | ({"schedule": schedule} if schedule else {})


def graph(load: Load) -> dict[str, dict[str, Any]]:
    """Jobs that wait for each other: apart, together again, and one after a failure that never comes."""
    parents: dict[str, list[Any]] = {
        "first": [],
        "left": ["first"],
        "right": ["first"],
        "alone": [],
        "joined": ["left", "right", {"job": "alone", "on": "completion"}],
        "undo": [{"job": "right", "on": "failure"}],
    }
    return {node: job_spec(load, None) | {"depends_on": wanted} for node, wanted in parents.items()}


def run_args(load: Load, rng: random.Random) -> dict[str, Any]:
    """How one run behaves."""
    args = {"seconds": round(rng.uniform(0, load.longest), 3), "fail_attempts": int(rng.random() < load.failing)}
    return args | ({"lines": rng.randint(1, 20)} if rng.random() < load.writing else {})


async def stop_schedules(driver: Driver, made: Made) -> None:
    """Cancel what recurs, so that the round can come to an end. Heal first: a cancel retracts what nobody claimed."""
    for job_id in made.every:
        await driver.cancel_job(job_id)


async def wait_until_ended(driver: Driver, made: Made, seconds: float = PATIENCE) -> None:
    """Return when every run of the round has ended; TimeoutError names one that has not."""
    give_up_at = time.monotonic() + seconds
    while live := await _live_run(driver):
        if time.monotonic() > give_up_at:
            where = f"run {live['id']} is {live['state']}"
            raise TimeoutError(f"after {seconds:g} s of {len(made.jobs)} jobs' time to end, {where}")
        await asyncio.sleep(0.3)


async def _live_run(driver: Driver) -> dict[str, Any] | None:
    """A run of the round that has not ended. States are cheap to ask for, but a run may change from one to another
    between the questions; so in the end every run is looked at. It keeps its id, and so its page, whatever it does."""
    for state in LIVE:
        page = await driver.get("/v1/runs", tag=driver.tag, state=state, limit=1)
        if found := _unended(page):
            return found
    cursor: dict[str, str] = {}
    while True:
        page = await driver.get("/v1/runs", tag=driver.tag, limit=500, **cursor)
        if (found := _unended(page)) or not page["next_cursor"]:
            return found
        cursor = {"cursor": page["next_cursor"]}


def _unended(page: dict[str, Any]) -> dict[str, Any] | None:
    return next((run for run in page["items"] if run["state"] not in FINAL), None)
