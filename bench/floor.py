"""floor: what the same PostgreSQL can do at best on our own tables (same columns, same indexes), in batches of 500.

The measure of the peers' harness: no scheduler, no HTTP, no fairness; only the rows that any of it has to move.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from bench.stand import FLOOR_DATABASE, Stand, say
from tocsin.flow import partitions
from tocsin.model.ids import new_ids
from tocsin.store.db import Database, Sql

SQL = Sql(__file__)
BATCH = 500
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
class Floor:
    """Rows a second by measure and number of clients, medians."""

    rates: dict[str, dict[int, float]]

    @property
    def both(self) -> float:
        """The floor of a drain: claim and complete in turn, with as many clients as goes fastest."""
        return max(self.rates[BOTH].values())


def measure(stand: Stand, *, rows: int = 50_000, repeat: int = 3, clients: tuple[int, ...] = (1, 2)) -> Floor:
    """All measures, on a copy of our database that nobody else uses."""
    url = stand.superuser_url(FLOOR_DATABASE)
    asyncio.run(_make_partitions(stand.login_url(FLOOR_DATABASE)))
    found: dict[str, dict[int, list[float]]] = {}
    for count in clients:
        for number in range(1, repeat + 1):
            rates = _round(url, rows, count)
            say(f"floor {number}/{repeat}, {count} clients: " + ", ".join(f"{k} {v:,.0f}" for k, v in rates.items()))
            for name, rate in rates.items():
                found.setdefault(name, {}).setdefault(count, []).append(rate)
    asyncio.run(_execute(url, "empty"))
    return Floor({name: {c: statistics.median(v) for c, v in by.items()} for name, by in found.items()})


def _round(url: str, rows: int, clients: int) -> dict[str, float]:
    ids = [uuid.UUID(id_) for id_ in new_ids(datetime.now(UTC), rows)]
    shares = [ids[n * rows // clients : (n + 1) * rows // clients] for n in range(clients)]
    tasks = [Task(url, n, share) for n, share in enumerate(shares)]
    rates = {}
    asyncio.run(_execute(url, "empty"))
    rates[COPY] = _timed(_copy, tasks, rows)
    asyncio.run(_execute(url, "settle"))
    rates[CLAIM] = _timed(_claim, tasks, rows)
    asyncio.run(_execute(url, "settle"))
    rates[COMPLETE] = _timed(_complete, tasks, rows)
    asyncio.run(_execute(url, "empty"))
    _timed(_copy, tasks, rows)
    asyncio.run(_execute(url, "settle"))
    rates[BOTH] = _timed(_both, tasks, rows)
    asyncio.run(_execute(url, "empty"))
    rates[SINGLE] = _timed(_singles, tasks, min(_SINGLES, rows // clients) * clients)
    return rates


# ── what a client does ───────────────────────────────────────────────────────────────────────────────────────────

Client = Callable[[Any, Task], Awaitable[None]]


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
    return list(await connection.fetch(SQL["claim"], uuid.UUID(int=task.client + 1), BATCH))


def _batches(ids: list[uuid.UUID]) -> list[list[uuid.UUID]]:
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]


# ── clients as processes, released together ──────────────────────────────────────────────────────────────────────


def _timed(work: Client, tasks: list[Task], total: int) -> float:
    """Rows a second from the moment all clients are connected until the last is done."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(len(tasks) + 1)
    clients = [context.Process(target=_client, args=(work, task, gate), daemon=True) for task in tasks]
    for client in clients:
        client.start()
    gate.wait(_WAIT_SECONDS)
    begun = time.perf_counter()
    for client in clients:
        client.join(_WAIT_SECONDS)
    seconds = time.perf_counter() - begun
    if any(client.exitcode != 0 for client in clients):
        raise RuntimeError("a client of the floor failed")
    return total / seconds


def _client(work: Client, task: Task, gate: Any) -> None:
    asyncio.run(_connected(work, task, gate))


async def _connected(work: Client, task: Task, gate: Any) -> None:
    connection = await _connect(task.url)
    gate.wait(_WAIT_SECONDS)
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
    by_index = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off"}
    return await asyncpg.connect(url, server_settings={"search_path": "tocsin", "jit": "off"} | by_index)


async def _execute(url: str, name: str) -> None:
    connection = await _connect(url)
    try:
        await connection.execute(SQL[name])
    finally:
        await connection.close()
