"""A worker sends back the tenant that came with a run, so that no look-up searches every tenant."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.flow.kit import Scene, WorkerHand, end_of, told
from tests.flow.test_logs import chunk, texts
from tocsin.flow import logs, reap, report
from tocsin.flow.report import Ending
from tocsin.wire import Finished, LogChunk

W = str(uuid.uuid4())
TENANTS = 2000


async def add_tenants(scene: Scene, count: int = TENANTS) -> None:
    await scene.sql.execute("insert into tenants (slug) select 't' || n from generate_series(1, $1) n", count)
    await scene.sql.execute("analyze tenants")


class Meter:
    """Counts the pages that the statements of a step read."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self._fetch, self._db, self.pages = scene.db.fetch, scene.db, 0
        monkeypatch.setattr(scene.db, "fetch", self._counted)

    async def _counted(self, pool: str, statement: str, *args: Any) -> Any:
        async with self._db._borrowed(pool) as connection:
            await connection.execute("begin")
            rows = await connection.fetch(f"explain (analyze, buffers, format json) {statement}", *args)
            await connection.execute("rollback")
        plan = json.loads(rows[0][0])[0]["Plan"]
        self.pages += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return await self._fetch(pool, statement, *args)

    async def cost(self, work: Callable[[], Awaitable[Any]]) -> int:
        before = self.pages
        await work()
        return int(self.pages - before)


async def ended_runs(scene: Scene, count: int) -> list[Finished]:
    """Return the reports of runs whose ends were accepted before."""
    await scene.ask(await scene.job(), count)
    ends = [end_of(row, tenant=row["tenant_id"]) for row in await scene.take(count, W)]
    assert len((await scene.end(W, *ends)).accepted) == count
    return ends


async def test_repeated_reports_cost_the_same_however_many_tenants_there_are(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await ended_runs(scene, 200)
    meter = Meter(scene, monkeypatch)

    async def repeat() -> None:
        plain = [Ending(W, end, plain=True) for end in ends]
        done = await report.report(scene.db, scene.node.specs, plain, scene.rng)
        assert len(done.accepted) == 200

    await repeat()  # reads the catalogue
    alone = await meter.cost(repeat)
    await add_tenants(scene)
    among_many = await meter.cost(repeat)
    assert among_many < 1.5 * alone + 50, (alone, among_many)


async def test_late_lines_cost_the_same_however_many_tenants_there_are(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await ended_runs(scene, 200)
    chunks = [
        LogChunk(
            run_id=e.run_id,
            attempt=e.attempt,
            fence=e.fence,
            tenant=e.tenant,
            offset=0,
            lines=[(1.5, "out", "info", "x")],
        )
        for e in ends
    ]
    meter = Meter(scene, monkeypatch)

    async def find() -> None:
        assert len(await logs._stored(scene.db, W, chunks)) == 200

    await find()
    alone = await meter.cost(find)
    await add_tenants(scene)
    among_many = await meter.cost(find)
    assert among_many < 1.5 * alone + 50, (alone, among_many)


async def test_a_wrong_tenant_finds_nothing_and_changes_nothing(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    await scene.ask(await scene.job())
    [row] = await scene.take(1, worker.id)
    run = {"run_id": row["id"], "attempt": row["attempt"], "fence": row["fence"], "tenant": row["tenant_id"]}
    key = [run["run_id"], run["fence"]]
    first = await worker.report(finished=[told(run) | {"tenant": 77}])
    assert first["accepted"] == [key], "worker and fence are enough while the run is held"
    for tenant, answer in (
        (row["tenant_id"], "accepted"),
        (77, "superseded"),
        (-1, "superseded"),
        (2**40, "superseded"),
    ):
        assert (await worker.report(finished=[told(run) | {"tenant": tenant}]))[answer] == [key]
    await worker.ship(chunk(run, 0, "late"))
    for tenant in (77, -1, 2**40):
        assert (await worker.ship(chunk(run | {"tenant": tenant}, 1, "no"), expect=409))["code"] == "superseded"
    assert await texts(scene, run) == ["late"]


async def test_repeats_without_a_tenant_are_answered_in_portions(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of an older build repeats the reports that were neither accepted nor superseded, and makes progress."""
    ends = [msgspec.structs.replace(end, tenant=0) for end in await ended_runs(scene, 5)]
    monkeypatch.setattr(report, "_MOST_PROBES", 2)  # one tenant: two look-ups
    left, rounds = ends, 0
    while left:
        rounds += 1
        done = await scene.end(W, *left)
        assert len(done.accepted) == min(2, len(left))
        assert done.accepted | done.postponed == {(end.run_id, end.fence) for end in left}
        left = [end for end in left if (end.run_id, end.fence) in done.postponed]
    assert rounds == 3
    await add_tenants(scene, 3)
    assert len((await scene.end(W, *ends)).accepted) == 1, "one at least"


async def test_a_postponed_end_is_neither_accepted_nor_superseded(
    scene: Scene, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    await scene.ask(await scene.job(), 2)
    runs = [{"run_id": r["id"], "attempt": r["attempt"], "fence": r["fence"]} for r in await scene.take(2, worker.id)]
    await worker.report(finished=[told(run) for run in runs])
    monkeypatch.setattr(report, "_MOST_PROBES", 1)
    answer = await worker.report(finished=[told(run) for run in runs])
    assert (len(answer["accepted"]), answer["superseded"]) == (1, [])


async def test_late_lines_without_a_tenant_are_refused_where_they_cost_too_much(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker then sends each run's lines alone, and the first chunk of a shipment is always searched for."""
    ends = await ended_runs(scene, 3)
    chunks = [LogChunk(run_id=e.run_id, attempt=e.attempt, fence=e.fence, offset=0, lines=[]) for e in ends]
    assert set(await logs._stored(scene.db, W, chunks)) == {0, 1, 2}
    monkeypatch.setattr(logs, "_MOST_PROBES", 2)
    assert set(await logs._stored(scene.db, W, chunks)) == {0, 1}
    await add_tenants(scene, 9)
    for one in chunks:
        assert set(await logs._stored(scene.db, W, [one])) == {0}


async def test_a_lost_run_is_reported_with_its_tenant(scene: Scene) -> None:
    await scene.ask(await scene.job())
    [row] = await scene.take(1, W)
    await scene.sql.execute("update workers set state = 'gone', gone_at = now() where id = $1", W)
    [orphan] = await reap.orphans(scene.db)
    assert orphan.finished.tenant == row["tenant_id"]
