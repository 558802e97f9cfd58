"""schedules: what it costs to plan a due cursor when 10 k, 1 M or 10 M schedules are stored.

The cost is counted in buffers (EXPLAIN ANALYZE of each statement of the planner, the same that then runs) and in time
(whole turns of the planner, with the pages of what is due in memory). The due cursors lie scattered among the others,
as they do when they were made over years.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, cast

import asyncpg

from bench.stand import FLOOR_DATABASE, Stand, say
from tocsin.clock import iso
from tocsin.flow import plan
from tocsin.model.ids import lowest_id
from tocsin.store.db import Database, connect
from tocsin.wire import decode_job_spec, encode

SIZES = (10_000, 1_000_000)
LONG_SIZES = (*SIZES, 10_000_000)
_TENANTS = 20
_DUE_TURNS = 8  # as many turns of the planner find something to do
_TRACED_TURNS = 2
_CHUNK = 10_000
_DUE_IN = timedelta(hours=1)  # long enough to store ten million
_JOB = {"schedule": {"every": "P1D"}, "target": {"kind": "python", "function": "bench.noop"}}
_JOB_COLUMNS = [
    *("tenant_id", "id", "spec", "schedule", "lane_id", "once", "overlap", "max_attempts", "priority", "created_at"),
]
_TRIGGER_COLUMNS = ["tenant_id", "job_id", "next_fire_at"]
# Those that belong to no constraint: making them afterwards is quicker.
_INDEXES = """
select i.indexrelid::regclass::text as name, pg_get_indexdef(i.indexrelid) as definition
  from pg_index i
 where i.indrelid = $1::regclass and not exists (select from pg_constraint c where c.conindid = i.indexrelid)
"""
# What the timed turns touch: how fast a disk is at random reads is not what is asked here.
_WARM = """
select count(j.spec), count(k.held_at)
  from (select * from triggers t where t.next_fire_at <= $1 order by t.next_fire_at) t
 cross join lateral (select * from jobs j where j.id = t.job_id limit 1) j
 cross join lateral (
        select * from triggers k where k.tenant_id = t.tenant_id and k.job_id = t.job_id limit 1) k
"""


@dataclass(frozen=True)
class Planning:
    """The cost of one planned run among so many stored schedules."""

    stored: int
    buffers: float
    by_statement: dict[str, float]
    microseconds: float
    cpu_us: float  # PostgreSQL's and the planner's own, which noise bends less
    foreign_cores: float

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def describe(one: Planning, first: Planning) -> str:
    """One line; `first` is what it is compared with."""
    parts = ", ".join(f"{name} {buffers:.1f}" for name, buffers in one.by_statement.items())
    grown = f"{one.buffers - first.buffers:+.1f} buffers, time × {one.microseconds / first.microseconds:.2f}"
    grown += f", CPU × {one.cpu_us / first.cpu_us:.2f}"
    noise = f"others used {one.foreign_cores:.2f} cores"
    return f"{one.microseconds:.0f} µs, CPU {one.cpu_us:.0f} µs ({grown}; {parts}; {noise})"


def measure(stand: Stand, *, long: bool) -> list[Planning]:
    """Each size in a database of its own, one after the other."""
    found: list[Planning] = []
    for size in LONG_SIZES if long else SIZES:
        name = f"schedules_{size}"
        asyncio.run(stand.query(f"create database {name} template {FLOOR_DATABASE}", database="postgres"))
        try:
            found.append(asyncio.run(_measure(stand, name, size)))
            say(f"{size:,} schedules: {found[-1].buffers:.1f} buffers, {describe(found[-1], found[0])}")
        finally:
            asyncio.run(stand.query(f"drop database {name} with (force)", database="postgres"))
    return found


async def _measure(stand: Stand, name: str, size: int) -> Planning:
    begun = time.monotonic()
    due = await _load(stand, name, size)
    say(f"{size:,} schedules stored in {time.monotonic() - begun:.0f} s")
    db = Database(stand.login_url(name))
    await db.open()
    try:
        horizon = due - await db.read_clock() + timedelta(minutes=1)
        by_statement = await _trace(stand.login_url(name), horizon)
        await stand.query(_WARM, due + timedelta(minutes=1), database=name)
        await asyncio.to_thread(stand.await_quiet)
        before, own, begun = stand.cpu(), time.process_time(), time.monotonic()
        micro = [await _turn(db, horizon) for _ in range(_DUE_TURNS - _TRACED_TURNS)]
        used, own, seconds = stand.cpu().since(before), time.process_time() - own, time.monotonic() - begun
    finally:
        await db.close()
    cpu = (used.trees["postgres"] + own) * 1e6 / (len(micro) * plan.BATCH)
    foreign = max(0.0, used.foreign() - own) / seconds
    return Planning(size, sum(by_statement.values()), by_statement, statistics.median(micro), cpu, foreign)


async def _turn(db: Database, horizon: timedelta) -> float:
    """Microseconds for each run of one turn."""
    begun = time.perf_counter()
    done = await plan.plan(db, horizon)
    seconds = time.perf_counter() - begun
    if done.cursors != plan.BATCH:
        raise RuntimeError(f"a turn moved {done.cursors} cursors, not {plan.BATCH}")
    return seconds * 1e6 / done.cursors


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _trace(url: str, horizon: timedelta) -> dict[str, float]:
    """Buffers per planned run, by statement."""
    traced = _Traced(await connect(url, "engine"))
    try:
        for _ in range(_TRACED_TURNS):
            await plan.plan(cast(Database, traced), horizon)
    finally:
        await traced.connection.close()
    return {name: count / (_TRACED_TURNS * plan.BATCH) for name, count in traced.buffers.items()}


class _Traced:
    """Stands where the database does, for one step: each statement is explained, undone, and then run."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.buffers: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def transaction(self, step: str) -> AsyncIterator[_Traced]:
        async with self.connection.transaction():
            yield self

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        nested = self.connection.transaction()
        await nested.start()
        text = await self.connection.fetchval(
            f"explain (analyze, buffers, timing off, format json) {statement}", *values
        )
        await nested.rollback()
        top = json.loads(text)[0]["Plan"]
        name = top["Node Type"] if top["Node Type"] != "ModifyTable" else f"{top['Operation']} {top['Relation Name']}"
        self.buffers[name] += top["Shared Hit Blocks"] + top["Shared Read Blocks"]
        return list(await self.connection.fetch(statement, *values))

    execute = fetch


# ── the stored ones ──────────────────────────────────────────────────────────────────────────────────────────────


class _Schedule(NamedTuple):
    tenant_id: int
    job_id: str
    falls_due: bool


async def _load(stand: Stand, name: str, size: int) -> datetime:
    """Store so many jobs with their cursors by COPY; when those that fall due do."""
    connection = await stand.connect(name)
    try:
        for number in range(_TENANTS):
            await connection.execute("insert into tenants (slug) values ($1)", f"schedules-{number}")
        tenants = [row["id"] for row in await connection.fetch("select id from tenants where slug like 'schedules-%'")]
        lane = await connection.fetchval(
            "insert into lanes (pool, kind, function) values ('default', 'python', 'bench.noop') returning id"
        )
        due = datetime.now(UTC) + _DUE_IN
        await connection.execute("set session_replication_role = replica")  # each cursor has its job: not looked up
        for table, names, lines in (
            ("jobs", _JOB_COLUMNS, _job_lines(_schedules(size, tenants, due), lane, due)),
            ("triggers", _TRIGGER_COLUMNS, _trigger_lines(_schedules(size, tenants, due), due)),
        ):
            made_after = await connection.fetch(_INDEXES, table)
            for index in made_after:
                await connection.execute(f"drop index {index['name']}")
            await connection.copy_to_table(table, columns=names, source=_chunks(lines), schema_name="tocsin")
            for index in made_after:
                await connection.execute(index["definition"])
            await connection.execute(f"vacuum (analyze) {table}")
    finally:
        await connection.close()
    return due


def _schedules(size: int, tenants: list[int], due_at: datetime) -> Iterator[_Schedule]:
    """The same ones each time: ids that rise as if made one after the other, of all tenants in turn."""
    due = _DUE_TURNS * plan.BATCH
    first = int(lowest_id(due_at - timedelta(days=30)).replace("-", "")[:12], 16) << 12
    for n in range(size):
        stamp, mixed = f"{first + n * 64:015x}", f"{n * 0x9E3779B97F4A7C15 % 2**64:016x}"
        job_id = f"{stamp[:8]}-{stamp[8:12]}-7{stamp[12:]}-8{mixed[1:4]}-{mixed[4:]}"
        yield _Schedule(tenants[n % len(tenants)], job_id, n * due // size != (n + 1) * due // size)


def _job_lines(schedules: Iterable[_Schedule], lane: int, due: datetime) -> Iterator[str]:
    job = decode_job_spec(json.dumps(_JOB))
    spec, schedule = (encode(part).decode().replace("\\", "\\\\") for part in (job, job.schedule))
    rest = f"{spec}\t{schedule}\t{lane}\tf\tskip\t4\t500\t{iso(due - timedelta(days=1))}\n"
    return (f"{one.tenant_id}\t{one.job_id}\t{rest}" for one in schedules)


def _trigger_lines(schedules: Iterable[_Schedule], due: datetime) -> Iterator[str]:
    # Neither those that fall due (within ten seconds) nor the others (within a month) in the order they were stored.
    soon = [iso(due + timedelta(milliseconds=m)) for m in range(10_000)]
    others = [iso(due + timedelta(days=1, minutes=m)) for m in range(0, 30 * 1440, 7)]
    for n, one in enumerate(schedules):
        at = soon[n * 7919 % len(soon)] if one.falls_due else others[n * 7919 % len(others)]
        yield f"{one.tenant_id}\t{one.job_id}\t{at}\n"


async def _chunks(lines: Iterator[str]) -> AsyncIterator[bytes]:
    while chunk := "".join(itertools.islice(lines, _CHUNK)):
        yield chunk.encode()
