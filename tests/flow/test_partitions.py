"""A missing partition is a fault of the servers, and no result is lost by it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand, end_of, told
from tocsin.flow import partitions
from tocsin.flow.shared.transitions import NewRun, stage
from tocsin.model.ids import new_id
from tocsin.node.reaper import Caretaker

W = str(uuid.uuid4())


@pytest.fixture(autouse=True)
async def made_again(scene: Scene) -> AsyncIterator[None]:
    """Recreate the partitions that a test has dropped."""
    yield
    await scene.sql.execute("delete from archived_days")
    await partitions.make_ahead(scene.db)


def caretaker(scene: Scene) -> Caretaker:
    [found] = [loop for loop in scene.node._loops if isinstance(loop, Caretaker)]
    return found


async def drop_today(scene: Scene) -> str:
    """Drop the partition of today. Return its name."""
    name = partitions.partition_name(await scene.now())
    await scene.sql.execute(f"drop table {name}")
    return name


async def yesterdays_run(scene: Scene, job: dict[str, Any]) -> str:
    """Create a run that was made yesterday and is due now."""
    now = await scene.now()
    tenant_id = (await scene.who()).tenant_id
    run = NewRun(tenant_id, new_id(now - timedelta(days=1)), job["id"], "manual", now)
    async with scene.db.transaction("test") as connection:
        await stage(connection, [run])
    return run.id


async def test_a_result_without_a_partition_is_stored_once_the_partition_is_made(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    [row] = await scene.take(1, worker.id)
    end = told({"run_id": run_id, "attempt": row["attempt"], "fence": row["fence"]}, result={"made": "with effort"})
    await drop_today(scene)
    for _ in range(2):
        answer = await worker.report(finished=[end])
        assert (answer["accepted"], answer["superseded"]) == ([], []), "the worker keeps it, and reports it again"
    assert await scene.states(await scene.api.get(f"/v1/jobs/{row['job_id']}")) == ["running"]
    await caretaker(scene).run_once()
    assert (await worker.report(finished=[end]))["accepted"] == [[run_id, row["fence"]]]
    run = await scene.run(run_id)
    assert (run["state"], run["result"], run["losses"]) == ("succeeded", {"made": "with effort"}, 0)


async def test_runs_of_other_days_end_all_the_same(scene: Scene) -> None:
    job = await scene.job()
    early = await yesterdays_run(scene, job)
    await scene.ask(job, 3)
    rows = await scene.take(10, W)
    assert len(rows) == 4
    await drop_today(scene)
    done = await scene.end(W, *(end_of(row) for row in rows))
    assert {run_id for run_id, _ in done.accepted} == {early}
    assert done.postponed == {(row["id"], row["fence"]) for row in rows if row["id"] != early}


async def test_the_partition_of_an_older_day_is_made_for_its_run(scene: Scene) -> None:
    early = await yesterdays_run(scene, await scene.job())
    [row] = await scene.take(1, W)
    name = partitions.partition_name(await scene.now() - timedelta(days=1))
    await scene.sql.execute(f"drop table {name}")
    assert (await scene.end(W, end_of(row))).postponed
    await caretaker(scene).run_once()
    assert {run_id for run_id, _ in (await scene.end(W, end_of(row))).accepted} == {early}


async def test_an_end_reported_with_a_token_must_be_repeated(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    [row] = await scene.take(1, worker.id)
    token = scene.node.gateway.tokens.make(row["tenant_id"], run_id, row["fence"])
    await drop_today(scene)
    api = Api(scene.node, token)
    problem = await api.post(f"/v1/runs/{run_id}/complete", {"outcome": "succeeded"}, expect=503)
    assert problem["code"] == "partition_missing"
    await caretaker(scene).run_once()
    await api.post(f"/v1/runs/{run_id}/complete", {"outcome": "succeeded"})
    assert (await scene.run(run_id))["state"] == "succeeded"


async def test_api_calls_that_end_a_run_are_unavailable_without_a_partition(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    await drop_today(scene)
    problem = await scene.api.post(f"/v1/runs/{run_id}/cancel", {}, expect=503)
    assert problem["code"] == "partition_missing"
    await caretaker(scene).run_once()
    await scene.api.post(f"/v1/runs/{run_id}/cancel", {})
    assert (await scene.run(run_id))["state"] == "cancelled"


async def test_no_partition_is_made_for_a_day_that_is_read_from_files(scene: Scene) -> None:
    await yesterdays_run(scene, await scene.job())
    yesterday = await scene.now() - timedelta(days=1)
    await scene.sql.execute(f"drop table {partitions.partition_name(yesterday)}")
    await scene.sql.execute("insert into archived_days (day) values ($1)", yesterday.date())
    assert await partitions.make_missing(scene.db) == []
    await scene.sql.execute("delete from archived_days")
    assert await partitions.make_missing(scene.db) == [partitions.partition_name(yesterday)]


async def test_a_refused_payload_does_not_lose_a_result_without_a_partition(scene: Scene) -> None:
    await scene.ask(await scene.job(), 3)
    rows = await scene.take(3, W)
    await drop_today(scene)
    ends = [end_of(row, exit_code=2**40 if n == 1 else 0) for n, row in enumerate(rows)]
    done = await scene.end(W, *ends)
    assert (done.accepted, len(done.postponed)) == (set(), 3)
    await caretaker(scene).run_once()
    assert len((await scene.end(W, *ends)).accepted) == 3
