"""One burst of a peer: `python bench/peers.py apscheduler|pgqueuer N` prints the milliseconds from due to each start.

Stands alone, because it is run by whichever Python has the peers installed. pgqueuer uses the database `PG_URL`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

_LEAD_SECONDS = 4.0
_WAIT_SECONDS = 120.0
starts: list[float] = []


def note() -> None:
    """What each job of APScheduler does."""
    starts.append(time.time())


def apscheduler(count: int) -> NoReturn:
    """In memory, in this process, with a pool of twenty threads and no grace to miss."""
    from apscheduler.executors.pool import ThreadPoolExecutor  # type: ignore[import-not-found,unused-ignore]
    from apscheduler.schedulers.background import BackgroundScheduler  # type: ignore[import-not-found,unused-ignore]

    scheduler = BackgroundScheduler(
        timezone="UTC",
        executors={"default": ThreadPoolExecutor(20)},
        job_defaults={"misfire_grace_time": 3600, "coalesce": False},
    )
    due = float(int(time.time() + _LEAD_SECONDS + count / 1000) + 1)
    for number in range(count):
        scheduler.add_job(note, "date", run_date=datetime.fromtimestamp(due, UTC), id=str(number))
    scheduler.start()
    deadline = time.time() + _WAIT_SECONDS
    while len(starts) < count and time.time() < deadline:
        time.sleep(0.05)
    finish(count, due)


def pgqueuer(count: int) -> None:
    """One worker with batches of 500."""
    import uvloop

    uvloop.run(_pgqueuer(count))


async def _pgqueuer(count: int) -> NoReturn:
    import asyncpg
    from pgqueuer import PgQueuer, Queries  # type: ignore[import-not-found,unused-ignore]

    connection = await asyncpg.connect(os.environ["PG_URL"])
    await connection.execute("drop schema public cascade; create schema public")
    queries = Queries.from_asyncpg_connection(connection)
    await queries.install()
    pool = await asyncpg.create_pool(os.environ["PG_URL"], min_size=2, max_size=10)
    queue = PgQueuer.from_asyncpg_pool(pool)
    all_started = asyncio.Event()

    @queue.entrypoint("noop")  # type: ignore[untyped-decorator,unused-ignore]
    async def noop(job: Any) -> None:
        starts.append(time.time())
        if len(starts) == count:
            all_started.set()

    due = float(int(time.time() + _LEAD_SECONDS + count / 1000) + 1)
    for first in range(0, count, 1000):
        size = min(1000, count - first)
        after = [timedelta(seconds=due - time.time())] * size  # it takes a delay, counted from the database's now
        await queries.enqueue(["noop"] * size, [b""] * size, [0] * size, after)
    worker = asyncio.create_task(queue.run(batch_size=500, dequeue_timeout=timedelta(seconds=30)))
    await asyncio.wait(
        {asyncio.create_task(all_started.wait()), worker}, timeout=_WAIT_SECONDS, return_when="FIRST_COMPLETED"
    )
    finish(count, due)


def finish(count: int, due: float) -> NoReturn:
    """Print what was seen, unless the burst did not start whole; then go at once, for peers take leave slowly."""
    if len(starts) != count:
        print(f"{len(starts)} of {count} were started", file=sys.stderr, flush=True)
        os._exit(1)
    print(json.dumps([(start - due) * 1e3 for start in starts]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    {"apscheduler": apscheduler, "pgqueuer": pgqueuer}[sys.argv[1]](int(sys.argv[2]))
