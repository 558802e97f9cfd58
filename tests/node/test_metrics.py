"""What a server tells at /metrics of what it has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand
from tocsin.flow import fleet, plan
from tocsin.node.assemble import Node
from tocsin.node.server import http
from tocsin.settings import Settings
from tocsin.telemetry import REGISTRY


def told(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tocsin_{name}", labels) or 0.0


async def test_writes_are_counted_by_how_they_were_answered(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> list[float]:
        return [told("writes_total", answered=how) for how in ("in_time", "slow", "failed")]

    async def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    before = counted()
    monkeypatch.setattr(http, "_SLOW_SECONDS", 3600.0)
    await scene.job()
    await scene.api.post("/v1/jobs", {"pool": 7}, expect=422)
    await scene.api.get("/v1/jobs")
    monkeypatch.setattr(http, "_SLOW_SECONDS", 0.0)
    await scene.job()
    monkeypatch.setattr(scene.node, "submit_job", fails)
    await scene.api.post("/v1/jobs", {"target": {"kind": "process", "command": ["true"]}}, expect=500)
    assert [now - was for now, was in zip(counted(), before, strict=True)] == [2, 1, 1]


async def test_what_was_given_up_is_counted(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    before = told("dead_letters_total")
    for attempts in (1, 2):
        await scene.ask(await scene.job(retry={"max_attempts": attempts}))
        [(run_id, attempt, fence)] = await scene.taken(worker.id)
        for _ in range(2):  # a repeat counts once
            await worker.report(finished=[{"run_id": run_id, "attempt": attempt, "fence": fence, "outcome": "failed"}])
    assert told("dead_letters_total") == before + 1


async def test_schedules_that_nobody_plans_are_told(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"})
    await plan.measure(scene.db)
    assert told("schedules_stuck") == 0
    await scene.sql.execute(
        "update triggers set next_fire_at = now() - interval '61 seconds' where job_id = $1", job["id"]
    )
    await plan.measure(scene.db)
    assert told("schedules_stuck") == 1


async def test_runs_that_are_left_with_workers_that_are_gone_are_told(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    await scene.ask(await scene.job())
    await scene.taken(worker.id)
    await fleet.measure(scene.db)
    assert told("slots_leaked") == 0
    await scene.sql.execute("update workers set state = 'gone', gone_at = now() where id = $1", worker.id)
    await fleet.measure(scene.db)
    assert told("slots_leaked") == 1


async def test_log_lines_that_wait_with_living_workers_are_told(scene: Scene, worker_key: str) -> None:
    one, two, gone = [await WorkerHand.register(scene.node, worker_key) for _ in range(3)]
    await one.report(log_backlog=1000)
    await two.report(log_backlog=-5)
    await gone.report(log_backlog=10**9)
    scene.node.gateway._sessions[gone.id].renewed_at -= scene.node.settings.lease_seconds
    assert told("log_upload_backlog_bytes") == 1000
    await one.report(log_backlog=0)
    assert told("log_upload_backlog_bytes") == 0


@pytest.mark.parametrize(
    ("place", "objects", "known"),
    [("run", "", {"logs", "table", "wal"}), ("elsewhere", "", {"logs"}), ("elsewhere", "memory://", set())],
)
def test_disks_are_those_of_this_machine(tmp_path: Path, place: str, objects: str, known: set[str]) -> None:
    url = f"postgresql://tocsin@/tocsin?host={quote(str(tmp_path / place))}&port=5432"
    node = Node(Settings.load({}, home=tmp_path, database_url=url, objects_url=objects))
    assert node._folders().keys() == known


async def test_all_of_it_is_served(still_api: Api) -> None:
    text = (await still_api.http.get("/metrics")).text
    for name in ("disk_free_ratio", "log_upload_backlog_bytes", "pg_pool_wait_seconds_bucket", "writes_total"):
        assert f"tocsin_{name}" in text
