"""floor: what the same PostgreSQL can do at best on our own tables (same columns, same indexes), in batches of 500.

The measure of the peers' harness: no scheduler, no HTTP, no fairness; only the rows that any of it has to move.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import resource
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from bench.stand import FLOOR_DATABASE, Stand, say
from tocsin.flow import partitions
from tocsin.model.ids import new_ids
from tocsin.store.db import Database, Sql

SQL = Sql(__file__)
BATCH = 500  # also in floor.sql
_SINGLES = 2_000
_WAIT_SECONDS = 120.0
_COLUMNS = ["tenant_id", "id", "job_id", "job_version", "lane_id", "state", "trigger", "priority"]
_COLUMNS += ["scheduled_for", "ready_at", "order_key", "max_attempts"]

COPY, CLAIM, COMPLETE = "copy", "claim", "complete"
BOTH = "claim + complete"
SINGLE = "insert, one row a commit"


@dataclass(frozen=True)
class Task:
    """The part of one client: which rows are its own, and how to reach the database."""

    url: str
    client: int
    ids: list[uuid.UUID]


@dataclass(frozen=True)
class Pace:
    """How fast one thing went, what it cost PostgreSQL, and how much others disturbed it."""

    per_second: float
    postgres_us: float
    foreign_cores: float


@dataclass(frozen=True)
class Floor:
    """Medians by measure and clients: rows a second, and PostgreSQL's CPU µs a row, which noise bends less."""

    rates: dict[str, dict[int, float]]
    postgres_us: dict[str, dict[int, float]]

    @property
    def both(self) -> float:
        """The floor of a drain: claim and complete in turn, with as many clients as goes fastest."""
        return max(self.rates[BOTH].values())


def measure(stand: Stand, *, rows: int = 50_000, repeat: int = 3, clients: tuple[int, ...] = (1, 2)) -> Floor:
    """All measures, on a copy of our database that nobody else uses."""
    url = stand.superuser_url(FLOOR_DATABASE)
    asyncio.run(_make_partitions(stand.login_url(FLOOR_DATABASE)))
    found: dict[str, dict[int, list[Pace]]] = {}
    for count in clients:
        for number in range(1, repeat + 1):
            stand.await_quiet()
            paces = _round(stand, url, rows, count)
            say(f"floor {number}/{repeat}, clients: {count}; " + "; ".join(map(_describe, paces, paces.values())))
            for name, pace in paces.items():
                found.setdefault(name, {}).setdefault(count, []).append(pace)
    asyncio.run(_execute(url, "empty"))
    return Floor(_medians(found, "per_second"), _medians(found, "postgres_us"))


def _medians(found: dict[str, dict[int, list[Pace]]], field: str) -> dict[str, dict[int, float]]:
    return {
        name: {count: statistics.median(getattr(pace, field) for pace in paces) for count, paces in by_count.items()}
        for name, by_count in found.items()
    }


def _describe(name: str, pace: Pace) -> str:
    return f"{name} {pace.per_second:,.0f}/s, {pace.postgres_us:.0f} µs (others {pace.foreign_cores:.2f} cores)"


def _round(stand: Stand, url: str, rows: int, clients: int) -> dict[str, Pace]:
    ids = [uuid.UUID(id_) for id_ in new_ids(datetime.now(UTC), rows)]
    tasks = [Task(url, n, ids[n * rows // clients : (n + 1) * rows // clients]) for n in range(clients)]

    def before(name: str) -> None:
        asyncio.run(_execute(url, name))

    def timed(work: Client, total: int = rows) -> Pace:
        return _timed(stand, work, tasks, total)

    paces = {}
    before("empty")
    paces[COPY] = timed(_copy)
    before("settle")
    paces[CLAIM] = timed(_claim)
    before("settle")
    paces[COMPLETE] = timed(_complete)
    asyncio.run(_verify(url, rows))
    before("empty")
    timed(_copy)
    before("settle")
    paces[BOTH] = timed(_both)
    asyncio.run(_verify(url, rows))
    before("empty")
    paces[SINGLE] = timed(_singles, min(_SINGLES, rows // clients) * clients)
    return paces


# ── what a client does ───────────────────────────────────────────────────────────────────────────────────────────

Client = Callable[[Any, Task], Awaitable[None]]
Entrant = Callable[[Callable[[], Any]], Coroutine[Any, Any, None]]  # is given what to call when it is ready


async def _copy(connection: Any, task: Task) -> None:
    now = await connection.fetchval("select now()")
    job = uuid.uuid4()
    for batch in _batches(task.ids):
        records = [(1, id_, job, 1, 1, "ready", "api", 500, now, now, now, 4) for id_ in batch]
        await connection.copy_records_to_table("runs", columns=_COLUMNS, records=records)


async def _claim(connection: Any, task: Task) -> None:
    while await _claim_batch(connection, task):
        pass


async def _complete(connection: Any, task: Task) -> None:
    for batch in _batches(task.ids):
        await connection.execute(SQL["complete"], batch)


async def _both(connection: Any, task: Task) -> None:
    while claimed := await _claim_batch(connection, task):
        await connection.execute(SQL["complete"], [row["id"] for row in claimed])


async def _singles(connection: Any, task: Task) -> None:
    job = uuid.uuid4()
    for id_ in task.ids[:_SINGLES]:
        await connection.execute(SQL["insert"], id_, job)


async def _claim_batch(connection: Any, task: Task) -> list[Any]:
    return list(await connection.fetch(SQL["claim"], uuid.UUID(int=task.client + 1)))


def _batches(ids: list[uuid.UUID]) -> list[list[uuid.UUID]]:
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]


# ── clients as processes, released together ──────────────────────────────────────────────────────────────────────


def _timed(stand: Stand, work: Client, tasks: list[Task], total: int) -> Pace:
    return race(stand, [functools.partial(_connected, work, task) for task in tasks], total)


def race(stand: Stand, entrants: Sequence[Entrant], total: int) -> Pace:
    """So many rows by as many processes: from the moment all are ready until the last is done."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(len(entrants) + 1)
    clients = [context.Process(target=_client, args=(entrant, gate), daemon=True) for entrant in entrants]
    for client in clients:
        client.start()
    gate.wait(_WAIT_SECONDS)
    begun, before, own = time.perf_counter(), stand.cpu(), _waited_for()
    for client in clients:
        client.join(_WAIT_SECONDS)
    seconds, own = time.perf_counter() - begun, _waited_for() - own
    used = stand.cpu().since(before)
    if any(client.exitcode != 0 for client in clients):
        raise RuntimeError("a client failed")
    return Pace(total / seconds, used.trees["postgres"] * 1e6 / total, max(0.0, used.foreign() - own) / seconds)


def _waited_for() -> float:
    """CPU seconds of our own children that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _client(entrant: Entrant, gate: Any) -> None:
    asyncio.run(entrant(lambda: gate.wait(_WAIT_SECONDS)))


async def _connected(work: Client, task: Task, ready: Callable[[], Any]) -> None:
    connection = await _connect(task.url)
    ready()
    await work(connection, task)
    await connection.close()


# ── the database ─────────────────────────────────────────────────────────────────────────────────────────────────


async def _make_partitions(url: str) -> None:
    database = Database(url, size=2)
    await database.open()
    try:
        await partitions.make_ahead(database)
    finally:
        await database.close()


async def _connect(url: str) -> Any:
    """As superuser, since row-level security forbids COPY; else with the engine's settings: plans by index only."""
    by_index = {"plan_cache_mode": "force_generic_plan"}
    by_index |= {f"enable_{way}": "off" for way in ("seqscan", "hashjoin", "mergejoin")}
    return await asyncpg.connect(url, server_settings={"search_path": "tocsin", "jit": "off"} | by_index)


async def _verify(url: str, rows: int) -> None:
    connection = await _connect(url)
    try:
        completed = await connection.fetchval(SQL["completed"])
    finally:
        await connection.close()
    if completed != rows:
        raise RuntimeError(f"the floor completed {completed} of {rows} rows")


async def _execute(url: str, name: str) -> None:
    connection = await _connect(url)
    try:
        await connection.execute(SQL[name])
    finally:
        await connection.close()
