"""archive: what a year of runs takes in object storage, how fast it gets there, and how soon a page of it is read.

A tenant's runs of a year, a day after the other, are written to history by the database itself, archived by the step
that the archivist calls, and read through the API of a real server: the first page of one job's failures in March.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import asyncpg

from bench.stand import Stand, say
from tocsin.flow import archive, partitions
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import Parquet

BAR_MS = 300.0
RUNS, LONG_RUNS = 1_000_000, 10_000_000
_YEAR = 2025
FIRST_DAY = date(_YEAR, 1, 1)
_JOBS, _DAYS = 200, 365
_READS = 30
# A run every so many milliseconds of the day; one in twenty fails, of every twentieth job.
_FILL = """
insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, fence, trigger, priority,
                     failures, losses, max_attempts, scheduled_for, ready_at, started_at, finished_at, worker_id,
                     exit_code, error_class, error, result, args, tags)
select j.tenant_id, (lpad(to_hex(t.ms >> 16), 8, '0') || lpad(to_hex(t.ms & 65535), 4, '0') || '7000'
                     || to_hex(32768 + n.i % 16384) || left(md5(n.i::text), 12))::uuid,
       1, j.id, 1, true, case when n.i % 20 = 0 then 'dead' else 'succeeded' end,
       case when n.i % 20 = 0 then 'failed' else 'succeeded' end, n.i, 'schedule', 500, 0, 0, 4, t.due, t.due,
       t.due + interval '3 ms', t.due + random() * interval '9 s', w.id, (n.i % 20 = 0)::int,
       case when n.i % 20 = 0 then 'ValueError' end, case when n.i % 20 = 0 then 'no row ' || n.i end,
       '{"rows": ' || n.i || '}', null, '{"team": "portfolio"}'
  from generate_series(0, $2 - 1) as n(i)
 cross join lateral (
        select $3::bigint + n.i::bigint * 86400000 / $2 as ms,
               to_timestamp(($3::bigint + n.i::bigint * 86400000 / $2) / 1000.0) as due) t
  join (select j.id, j.tenant_id, k.place - 1 as place
          from unnest($1::uuid[]) with ordinality as k(id, place) join jobs j on j.id = k.id) j
    on j.place = n.i::bigint * 7919 % cardinality($1)
  join (select gen_random_uuid() as id, place from generate_series(0, 7) as place) w on w.place = n.i % 8
"""
# No run is older than its job: these are of before that year.
_AGE = "update tocsin.jobs set id = ('018f' || substr(id::text, 5))::uuid where id = any($1::uuid[])"
_KEEP = "update tocsin.tenants set runs_days = 3650"  # that year may be longer ago than runs are kept
_FILES = "select count(*) as files, sum(rows)::bigint as rows, sum(bytes)::bigint as bytes from archives"
_HOT = """
select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits where inhparent = 'history'::regclass
"""


@dataclass(frozen=True)
class Archived:
    """A year in files: how many runs, in how many bytes, how long a day took to fill and to archive; and milliseconds
    until a page was there, the first time and the next ones."""

    runs: int
    files: int
    bytes: int
    archive_seconds: float
    hot_bytes_most: int
    hot_bytes_left: int
    first_ms: float
    page_ms: list[float]

    @property
    def warm_ms(self) -> float:
        """The median page."""
        return statistics.median(self.page_ms)

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self) | {"warm_ms": self.warm_ms, "bar_ms": BAR_MS}


def measure(stand: Stand, long: bool) -> Archived:
    """Fill, archive and read a year."""
    jobs = make_jobs(stand)
    found = asyncio.run(_archive_year(stand, jobs, LONG_RUNS if long else RUNS))
    path = f"/v1/runs?job={jobs[20]}&state=dead&from={_YEAR}-03-01T00:00:00Z&to={_YEAR}-04-01T00:00:00Z"
    api = stand.api.another()  # the server has closed the first connection meanwhile
    times = []
    for _ in range(_READS + 1):
        begun = time.perf_counter()
        items = api.call("GET", path)["items"]
        times.append((time.perf_counter() - begun) * 1000)
        if not items or any(run["job_id"] != jobs[20] or run["state"] != "dead" for run in items):
            raise RuntimeError("the page is not what was asked for")
    return Archived(**found, first_ms=times[0], page_ms=times[1:])


def make_jobs(stand: Stand) -> list[str]:
    """Jobs that are older than that year."""
    target = {"kind": "python", "function": "bench.noop"}
    jobs = [stand.api.create_job(target) for _ in range(_JOBS)]
    asyncio.run(stand.query(_KEEP))
    asyncio.run(stand.query(_AGE, jobs))
    return [f"018f{job[4:]}" for job in jobs]


async def fill(stand: Stand, jobs: list[str], day: date, runs: int) -> None:
    """A day with so many runs of these jobs."""
    db = Database(stand.settings.database_url, size=1)
    await db.open()
    filler = await stand.connect()
    try:
        await _fill(db, filler, jobs, day, runs)
    finally:
        await filler.close()
        await db.close()


async def _fill(db: Database, filler: asyncpg.Connection, jobs: list[str], day: date, runs: int) -> None:
    start = datetime.combine(day, datetime.min.time(), UTC)
    await partitions.make(db, start)
    await filler.execute(_FILL, jobs, runs, int(start.timestamp() * 1000))


async def _archive_year(stand: Stand, jobs: list[str], runs: int) -> dict[str, Any]:
    db = Database(stand.settings.database_url, size=2)
    await db.open()
    objects = ObjectStore("", stand.settings.home / "objects")
    parquet = Parquet(objects, stand.settings.home / "cold")
    filler = await stand.connect()
    most, spent = 0, 0.0
    days = [FIRST_DAY + timedelta(days=n) for n in range(_DAYS)]
    try:
        for number, day in enumerate(days):
            share = runs * (number + 1) // len(days) - runs * number // len(days)
            await _fill(db, filler, jobs, day, share)
            most = max(most, await filler.fetchval(_HOT))
            begun = time.perf_counter()
            await archive.archive(db, objects, parquet, day + timedelta(days=1))
            spent += time.perf_counter() - begun
            if day.day == 1:
                say(f"archived up to {day}")
        files = await filler.fetchrow(_FILES)
        if files["rows"] != runs:
            raise RuntimeError(f"{runs} runs were written, {files['rows']} archived")
        left = await filler.fetchval(_HOT)
    finally:
        parquet.close()
        await filler.close()
        await db.close()
    return {
        "runs": runs,
        "files": files["files"],
        "bytes": files["bytes"],
        "archive_seconds": spent,
        "hot_bytes_most": most,
        "hot_bytes_left": left,
    }
