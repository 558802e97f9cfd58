"""Days of long ago, with runs that ended on them, to be archived."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from tests.flow.kit import Scene
from tocsin.flow import archive, partitions
from tocsin.model.ids import new_id
from tocsin.store.parquet import Parquet

DAY = date(2026, 3, 10)
STATES = ("succeeded", "dead", "cancelled", "skipped")


class Old:
    """Days of long ago, with rows in them."""

    def __init__(self, scene: Scene, parquet: Parquet) -> None:
        self.scene, self.parquet = scene, parquet
        self.rng = random.Random(3)

    async def make_day(self, day: date) -> None:
        await partitions.make(self.scene.db, datetime.combine(day, time(), UTC))

    async def job(self, **spec: Any) -> dict[str, Any]:
        """A job that is older than all these days."""
        made = await self.scene.job(**spec)
        old = f"018f{made['id'][4:]}"
        await self.scene.sql.execute("update jobs set id = $2 where id = $1", made["id"], old)
        return made | {"id": old}

    async def rows(self, job: dict[str, Any], day: date, count: int, **given: Any) -> list[str]:
        """Runs of that day, each with one or two attempts; their ids, oldest first."""
        ids = []
        for number in range(count):
            made = datetime.combine(day, time(1), UTC) + timedelta(seconds=number)
            ids.append(new_id(made))
            attempts = self.rng.choice([1, 2])
            for attempt in range(1, attempts + 1):
                state = given.get("state") or self.rng.choice(STATES)
                started = None if state == "skipped" else made + timedelta(microseconds=123_456)
                await self.scene.sql.execute(
                    "insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome,"
                    " reason, count, fence, trigger, priority, failures, losses, max_attempts, scheduled_for, ready_at,"
                    " started_at, finished_at, worker_id, exit_code, error_class, error, usage, result, args, tags)"
                    " select tenant_id, $1, $2, id, version, $3, $4, $5, $6, 1, 7, 'manual', 500, 0, 0, 4, $7, $7, $8,"
                    " $9, $10, $11, $12, $13, $14, $15, $16, tags from jobs where id = $17",
                    *(ids[-1], attempt, attempt == attempts, state, None if started is None else "failed"),
                    *(None if started else "skipped_overlap", made, started, made + timedelta(seconds=2)),
                    *(uuid.uuid4() if started else None, self.rng.choice([None, 0, 137]), "Boom" if started else None),
                    *(
                        self.rng.choice(["", "\\N", 'said "no",\n\\N\r\n']) if started else None,
                        '{"cpu": 1}',
                        None if attempt == 1 else '{"é": "\\u0007"}',
                    ),
                    *('{"n": 1}', job["id"]),
                )
        return ids

    async def archive(self, before: date = DAY + timedelta(days=1)) -> list[date]:
        node = self.scene.node
        return await archive.archive(node.db, node.objects, self.parquet, before)

    async def hot(self) -> int:
        return await self.scene.value("select count(*) from history")  # type: ignore[no-any-return]

    async def tables(self) -> set[str]:
        found = await self.scene.rows("select relname from pg_class where relname ~ '^history_2026[0-9]{4}$'")
        return {row["relname"] for row in found}
