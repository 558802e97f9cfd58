"""archive: days leave PostgreSQL whole, or not at all, whatever crashes; and are read as before."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.flow.kit import Scene
from tocsin.failpoints import Failpoints, InjectedFault
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
        await partitions._make(self.scene.db, datetime.combine(day, time(), UTC))

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
                        'said "no",\n\\N\r\n' if started else None,
                        '{"cpu": 1}',
                        "" if attempt == 1 else '{"é": "\\u0007"}',
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


@pytest.fixture
async def old(scene: Scene, tmp_path: Path) -> AsyncIterator[Old]:
    parquet = Parquet(scene.node.objects, tmp_path / "cold")
    old = Old(scene, parquet)
    yield old
    parquet.close()
    for name in await old.tables() & {f"history_{DAY + timedelta(days=d):%Y%m%d}" for d in range(-5, 5)}:
        await scene.sql.execute(f"drop table {name}")


async def test_a_closed_day_becomes_files_and_its_partition_goes(old: Old) -> None:
    await old.scene.api.post("/v1/tenants", {"slug": "other"})
    other = await old.scene.api.with_key("admin", "other")
    mine, theirs = await old.scene.job(name="mine"), await old.scene.job(other, name="theirs")
    await old.make_day(DAY)
    await old.rows(mine, DAY, 30)
    await old.rows(theirs, DAY, 5)
    count = await old.hot()
    assert await old.archive() == [DAY]
    assert await old.hot() == 0 and f"history_{DAY:%Y%m%d}" not in await old.tables()
    files = await old.scene.rows("select * from archives")
    assert sum(file["rows"] for file in files) == count and len({file["tenant_id"] for file in files}) == 2
    assert await old.archive() == []


async def test_a_day_with_a_live_run_waits_for_it(old: Old) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    [run] = await old.scene.ask(job)
    await old.scene.sql.execute(
        "update runs set id = $2 where id = $1", run, new_id(datetime.combine(DAY, time(2), UTC))
    )
    assert await old.archive() == []
    assert await old.hot() > 0
    await old.scene.sql.execute("delete from runs")
    assert await old.archive() == [DAY]


@pytest.mark.parametrize("point", archive.POINTS)
async def test_the_next_turn_repairs_what_a_crash_left(old: Old, point: str, tmp_path: Path) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 10)
    count = await old.hot()
    old.scene.db.failpoints = Failpoints(f"archive.{point}=raise")
    with pytest.raises(InjectedFault):
        await old.archive()
    if point not in ("cold", "detached", "dropped"):
        assert await old.hot() == count
    assert await old.archive() == ([] if point == "dropped" else [DAY])
    assert await old.scene.value("select sum(rows) from archives") == count
    assert await old.hot() == 0 and f"history_{DAY:%Y%m%d}" not in await old.tables()
    stored = [path for path in (tmp_path / "objects").rglob("*.parquet")]
    assert len(stored) == await old.scene.value("select count(*) from archives") == 1


async def test_a_file_that_came_back_changed_drops_nothing(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    count = await old.hot()
    put = old.scene.node.objects.put

    async def spoil(key: str, data: bytes, **kwargs: Any) -> None:
        await put(key, data[:100] + bytes([data[100] ^ 1]) + data[101:], **kwargs)

    monkeypatch.setattr(old.scene.node.objects, "put", spoil)
    with pytest.raises(Exception, match="is not what was archived"):
        await old.archive()
    assert await old.hot() == count and await old.scene.value("select count(*) from archives") == 0


async def test_a_row_that_the_file_lacks_drops_nothing(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 5)
    fewer = archive.SQL["rows"].replace("order by h.run_id, h.attempt", "order by h.run_id, h.attempt limit 4")
    monkeypatch.setitem(archive.SQL, "rows", fewer)
    with pytest.raises(Exception, match="does not hold the rows"):
        await old.archive()
    other = archive.SQL["rows"].replace("limit 4", "").replace("h.exit_code", "coalesce(h.exit_code, 0) + 1")
    monkeypatch.setitem(archive.SQL, "rows", other)
    with pytest.raises(Exception, match="does not hold the rows"):
        await old.archive()
    assert await old.scene.value("select count(*) from archived_days") == 0


async def test_large_days_are_several_files_and_no_run_is_torn_apart(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 20)
    count = await old.hot()
    monkeypatch.setattr(archive, "MOST_ROWS", 7)
    assert await old.archive() == [DAY]
    assert await old.scene.value("select sum(rows) from archives") == count
    assert await old.scene.value("select count(*) from archives") >= 3
