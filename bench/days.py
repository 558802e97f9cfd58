"""days: does the database grow? A month of steady load on a clock moved by hand, a day in a few seconds.

A real node serves in this process, on a database whose clock stands still until it is moved: each day jobs are made,
runs are asked for, claimed and ended over HTTP. Then night falls: what a server does now and then (partitions ahead,
archiving, compacting, tidying) is done once, and what autovacuum would have done meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import asyncpg
import httpx

from bench.stand import FLOOR_DATABASE, Stand, say
from tests.simulation.nodes import BEGINNING, SEARCH_PATH, ManualClock, install_clock
from tocsin.flow import events, partitions, sweep
from tocsin.node.archivist import Archivist
from tocsin.node.assemble import Node
from tocsin.node.compactor import Compactor
from tocsin.node.sealer import Anchorer, Sealer
from tocsin.node.server.app import build
from tocsin.node.server.protocol import HttpServer
from tocsin.store.db import Database
from tocsin.telemetry import setup_logging

DAYS, HOT_DAYS = 30, 7
BAR = 1.05  # times as large at most as when the first days had gone
SETTLED = HOT_DAYS + 3
_RUNS, _ONCE, _JOBS = 8_000, 1_000, 50  # of a day: runs of standing jobs, jobs that run once
_CLAIM = 1_000
_SHIPPED = 500  # logs in a call
_DATABASE = "days"
_TARGET = {"kind": "process", "command": ["true"]}
_SIZES = """
select pg_database_size(current_database()) as all,
       (select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits
         where inhparent = 'history'::regclass) as history,
       pg_total_relation_size('jobs') + pg_total_relation_size('job_versions') as jobs,
       pg_total_relation_size('idempotency') as idempotency,
       pg_total_relation_size('audit') + pg_total_relation_size('audit_chain') as audit,
       pg_total_relation_size('log_chunks') + pg_total_relation_size('log_segments') as logs
"""


@dataclass(frozen=True)
class Size:
    """How large the database, and what is in it, was at the end of a day; bytes."""

    day: int
    all: int
    history: int
    jobs: int
    idempotency: int
    audit: int
    logs: int


@dataclass(frozen=True)
class Days:
    """The sizes of each day, and how many runs it had."""

    sizes: list[Size]
    runs_a_day: int = _RUNS + _ONCE

    @property
    def growth(self) -> float:
        """How many times as large it became at most as on the day on which the first runs had left for good."""
        return max(size.all for size in self.sizes[SETTLED - 1 :]) / self.sizes[SETTLED - 1].all

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self) | {"growth": self.growth, "bar": BAR, "hot_days": HOT_DAYS}


def describe(size: Size) -> str:
    """What takes the room, in megabytes."""
    return ", ".join(f"{name} {value / 1e6:.1f}" for name, value in asdict(size).items() if name not in ("day", "all"))


def measure(stand: Stand) -> Days:
    """Live for a month."""
    asyncio.run(stand.query(f"create database {_DATABASE} template {FLOOR_DATABASE}", database="postgres"))
    setup_logging("error", False)  # a clock that jumps looks like trouble
    # The pools of this process go by the moved clock.
    kept, Database.session = Database.session, Database.session | {"search_path": SEARCH_PATH}
    try:
        return Days(asyncio.run(_live(stand)))
    finally:
        Database.session = kept


async def _live(stand: Stand) -> list[Size]:
    observer = await install_clock(stand.superuser_url(_DATABASE))
    clock = ManualClock(observer)
    await clock.restart()
    sizes = []
    try:
        async with _node(stand, clock) as (node, api, hand):
            load = _Load(api, hand, clock)
            for day in range(1, DAYS + 1):
                await load.day()
                await clock.set(BEGINNING + timedelta(days=day))
                await _night(node, observer)
                sizes.append(Size(day, *await observer.fetchrow(_SIZES)))
                if day % 3 == 0:
                    say(f"day {day}: {sizes[-1].all / 1e6:.1f} MB")
    finally:
        await observer.close()
    return sizes


@asynccontextmanager
async def _node(stand: Stand, clock: ManualClock) -> AsyncIterator[tuple[Node, httpx.AsyncClient, httpx.AsyncClient]]:
    """A node that serves, and clients with the platform's key and a worker's."""
    node = Node(replace(stand.settings, database_url=stand.login_url(_DATABASE), hot_days=HOT_DAYS))
    node.db.clock = clock
    await node.start()
    server = HttpServer(build(node))
    port = await server.start("127.0.0.1", 0)
    try:
        async with _client(port, stand.keys["key"]) as api, _client(port, stand.keys["worker_key"]) as hand:
            yield node, api, hand
    finally:
        await server.stop(1)
        await node.stop()


def _client(port: int, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {key}"}, timeout=60
    )


class _Load:
    """What clients and one worker do, day by day the same."""

    def __init__(self, api: httpx.AsyncClient, hand: httpx.AsyncClient, clock: ManualClock) -> None:
        self._api, self._hand, self._clock = api, hand, clock
        self._standing: list[str] = []
        self._calls = 0

    async def day(self) -> None:
        if not self._standing:
            made = await self._ask("/v1/jobs/batch", {"jobs": [self._job(manual=True) for _ in range(_JOBS)]})
            self._standing = [job["id"] for job in made["items"]]
        await self._ask("/v1/jobs/batch", {"jobs": [self._job() for _ in range(_ONCE)]})
        for job in self._standing:
            await self._ask(f"/v1/jobs/{job}/runs/batch", {"runs": [{"args": {"n": 1}}] * (_RUNS // _JOBS)})
        hand = {"name": "days", "slots": 2 * _CLAIM, "targets": ["process"]}
        worker = (await self._tell("register", hand))["worker_id"]
        left, last = _RUNS + _ONCE, 0
        while left:
            # A moment later, so that what was asked for is due.
            await self._clock.set(self._clock.now() + timedelta(seconds=1))
            answer = await self._tell(f"{worker}/claim", {"slots": min(_CLAIM, left), "wait": 5, "last_claim": last})
            last = answer["claim_id"]
            keys = [{name: run[name] for name in ("run_id", "attempt", "fence")} for run in answer["runs"]]
            await self._log(worker, keys)
            finished = [key | {"outcome": "succeeded", "ran_ms": 5, "result": {"rows": 3}} for key in keys]
            await self._tell(f"{worker}/report", {"last_claim": last, "finished": finished})
            left -= len(keys)

    async def _log(self, worker: str, keys: list[dict[str, Any]]) -> None:
        lines = [[self._clock.now().timestamp(), "stdout", "info", f"row {n} is done"] for n in range(10)]
        for start in range(0, len(keys), _SHIPPED):
            chunks = [key | {"offset": 0, "lines": lines} for key in keys[start : start + _SHIPPED]]
            await self._tell(f"{worker}/logs", {"chunks": chunks})

    def _job(self, manual: bool = False) -> dict[str, Any]:
        return {"target": _TARGET, "tags": {"team": "portfolio"}} | ({"schedule": {"manual": True}} if manual else {})

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        return _told(await self._api.post(path, json=body, headers={"idempotency-key": f"days-{self._calls}"}))

    async def _tell(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return _told(await self._hand.post(f"/v1/worker/{path}", json=body))


def _told(reply: httpx.Response) -> dict[str, Any]:
    if not reply.is_success:
        raise RuntimeError(f"{reply.request.url.path}: {reply.status_code} {reply.text[:500]}")
    return reply.json()  # type: ignore[no-any-return]


async def _night(node: Node, observer: asyncpg.Connection) -> None:
    """What loops do now and then, and autovacuum."""
    begun = time.perf_counter()
    await partitions.make_ahead(node.db)
    await sweep.forget_keys(node.db)
    await events.tidy(node.db)
    await Sealer(node.db).run_once()
    await Anchorer(node.db, node.objects, node.master_keys, node.anchor_series).run_once()
    archivist = Archivist(node.db, node.objects, node.parquet, node.settings)
    while await archivist.run_once() < 600:
        if time.perf_counter() - begun > 120:
            raise RuntimeError("the archivist cannot do its work")
    while not await Compactor(node.db, node.objects).run_once():
        pass
    await observer.execute("vacuum (analyze)")
