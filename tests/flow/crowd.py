"""A tenant with one huge job among many small ones, and a count of the database pages that a call reads."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from datetime import UTC, datetime, time
from typing import Any

from tests.flow.kit import Scene
from tocsin.flow import partitions

# The number of history rows of the huge job; a million with TOCSIN_TEST_CROWD=1000000.
ROWS = int(os.environ.get("TOCSIN_TEST_CROWD", "45000"))
SMALL_JOBS = 1_000
WORKER, RARE_WORKER = "01900000-0000-7000-8000-00000000aaaa", "01900000-0000-7000-8000-00000000bbbb"

_JOBS = """
insert into jobs (tenant_id, id, name, version, state, spec, lane_id, created_at, once, max_attempts, priority)
select j.tenant_id, ('018f0000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'small-' || n, 1, 'active', j.spec,
       j.lane_id, j.created_at, false, 1, 500
  from jobs j, generate_series(1, $2::int) n
 where j.id = $1
"""
# `$1` job  `$2` first row  `$3` last row  `$4` start of the day  `$5` seconds after that  `$6` state  `$7` worker
# `$8` error class  `$9` tags. The rows of many small jobs: `$1` is null, and row n is of job n.
_ROWS = """
insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, fence, trigger, priority,
                     failures, losses, max_attempts, scheduled_for, ready_at, started_at, finished_at, worker_id,
                     error_class, error, tags)
select t.id, pg_temp.run_id(at, n), 1,
       coalesce($1::uuid, ('018f0000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid), 1, true, $6::text,
       case $6::text when 'succeeded' then 'succeeded' when 'dead' then 'failed' end, 1, 'manual', 500, 0, 0, 1,
       at, at, at, at, $7::uuid, $8::text, $8::text, $9::jsonb
  from (select id from tenants where slug = 'default') t,
       generate_series($2::int, $3::int) n,
       lateral (select $4::timestamptz + $5 * interval '1 second' + n * interval '10 microseconds' as at) m
"""
_LIVE = """
insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, max_attempts, scheduled_for,
                  ready_at, order_key)
select j.tenant_id, pg_temp.run_id($3::timestamptz, q.live + n), j.id, 1, j.lane_id, $4, 'manual', 500, 1, $3, $3, $3
  from jobs j, generate_series(1, $2::int) n, (select count(*)::int as live from runs) q
 where j.id = $1
"""
_RUN_ID = """
create function pg_temp.run_id(at timestamptz, n int) returns uuid language sql immutable as $$
    select (lpad(to_hex((extract(epoch from at) * 1000)::bigint), 12, '0') || '70008000'
            || lpad(to_hex(n), 12, '0'))::uuid
$$
"""


class Crowd:
    """The rows of one day, which can grow, and the cost of calls."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.rows = 0
        self.big: dict[str, Any] = {}
        self.day = datetime.min.replace(tzinfo=UTC)

    async def begin(self) -> None:
        """Create the jobs and the oldest run: dead, with an error class, worker and tag that no other run has."""
        scene = self.scene
        self.day = datetime.combine((await scene.now()).date(), time(), UTC)
        await partitions.make(scene.db, self.day)
        await scene.sql.execute(_RUN_ID)
        made = await scene.job(name="big")
        self.big = made | {"id": f"018f0000{made['id'][8:]}"}
        await scene.sql.execute("update jobs set id = $2 where id = $1", made["id"], self.big["id"])
        await scene.sql.execute(_JOBS, self.big["id"], SMALL_JOBS)
        small = "018f0000-0000-7000-8000-000000000001"
        await self._add(small, 1, 1, 0, "dead", RARE_WORKER, "Rare", '{"rare": "yes"}')
        await self._add(None, 1, SMALL_JOBS, 1)

    async def grow(self, rows: int) -> None:
        """Add rows to the huge job, newer than all others, and update the planner's statistics."""
        await self._add(self.big["id"], self.rows + 1, self.rows + rows, 2)
        self.rows += rows
        await self.scene.sql.execute("analyze history")
        await self.scene.sql.execute("analyze jobs")

    async def grow_to_the_end(self) -> None:
        """Add the remaining rows."""
        await self.grow(ROWS - self.rows)

    async def queue(self, rows: int, state: str) -> None:
        """Add live runs of the huge job."""
        await self.scene.sql.execute(_LIVE, self.big["id"], rows, self.day, state)
        await self.scene.sql.execute("analyze runs")

    async def _add(
        self,
        job: str | None,
        first: int,
        last: int,
        second: int,
        state: str = "succeeded",
        worker: str = WORKER,
        error: str | None = None,
        tags: str | None = None,
    ) -> None:
        await self.scene.sql.execute(_ROWS, job, first, last, self.day, second, state, worker, error, tags)

    async def pages(self, path: str, **query: Any) -> tuple[int, Any]:
        """Return how many pages of our tables and indexes a call reads, and its answer."""
        before = await self.pages_read()
        answer = await self.scene.api.get(path, params=query)
        return await self.pages_read() - before, answer

    async def pages_read(self) -> int:
        """Return how many pages of our tables and indexes were read so far."""
        async with AsyncExitStack() as stack:
            for pool in self.scene.db._pools.values():
                for _ in range(pool.get_size()):
                    connection = await stack.enter_async_context(pool.acquire())
                    await connection.execute("select pg_stat_force_next_flush()")
        return await self.scene.value(  # type: ignore[no-any-return]
            "select sum(coalesce(heap_blks_read, 0) + coalesce(heap_blks_hit, 0) + coalesce(idx_blks_read, 0)"
            " + coalesce(idx_blks_hit, 0))::bigint from pg_statio_all_tables where schemaname = 'tocsin'"
        )

    async def all_pages(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Return the items of all pages of a list."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        for _ in range(1_000):
            answer = await self.scene.api.get(path, params=query | cursor)
            found += answer["items"]
            if answer["next_cursor"] is None:
                return found
            cursor = {"cursor": answer["next_cursor"]}
        raise AssertionError("the pages have no end")
