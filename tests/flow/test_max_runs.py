"""`max_runs`: as many occurrences as were claimed, whoever plans, whatever is skipped, taken back or edited."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, Scene, end_of
from tests.flow.test_plan import age, cursor, owed
from tocsin.flow.plan import SQL, plan, take_back
from tocsin.flow.sweep import expire
from tocsin.store.db import Database

SECOND = timedelta(seconds=1)


async def used(scene: Scene, job: dict[str, Any]) -> int | None:
    return await scene.value("select used from run_counts where job_id = $1", job["id"])  # type: ignore[no-any-return]


async def turn(scene: Scene) -> None:
    """What a planner's loop does."""
    await take_back(scene.db)
    await plan(scene.db, HORIZON)


async def patch(scene: Scene, job: dict[str, Any], **schedule: Any) -> None:
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"schedule": schedule})


async def fetch(scene: Scene, job: dict[str, Any]) -> dict[str, Any]:
    return await scene.api.get(f"/v1/jobs/{job['id']}")  # type: ignore[no-any-return]


async def fall_due(scene: Scene, job: dict[str, Any]) -> None:
    """Let all of its staged occurrences be due now."""
    await scene.sql.execute(
        "update runs set ready_at = now(), state = 'ready' where job_id = $1 and state = 'staged'", job["id"]
    )


async def test_no_more_than_max_runs_are_staged_and_then_the_schedule_is_over(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 3}, overlap="allow")
    assert job["schedule"]["description"].endswith("3 runs at most")
    for _ in range(3):
        await turn(scene)
    assert len(await owed(scene, job)) == 3
    assert await cursor(scene, job) is None
    await fall_due(scene, job)
    worker = await scene.employ("01900000-0000-7000-8000-000000000001")
    runs = await scene.take(10, worker)
    assert len(runs) == 3
    await scene.end(worker, *(end_of(run) for run in runs))
    await turn(scene)
    assert (await fetch(scene, job))["next_run_at"] is None
    assert (await scene.states(job), await used(scene, job)) == ([], 3)


async def test_retries_of_an_occurrence_count_once(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 1}, retry={"max_attempts": 3})
    await turn(scene)
    for _ in range(3):
        await fall_due(scene, job)
        worker = await scene.employ("01900000-0000-7000-8000-000000000001")
        [run] = await scene.take(10, worker)
        await scene.end(worker, end_of(run, "failed", "boom"))
        await turn(scene)
    assert await scene.value("select count(*) from history where job_id = $1", job["id"]) == 3
    assert (await scene.states(job), await cursor(scene, job)) == ([], None)


async def test_two_planners_racing_keep_to_it(scene: Scene, other: Database) -> None:
    jobs = [await scene.job(schedule={"every": "PT1S", "max_runs": 4}, overlap="allow") for _ in range(20)]
    await asyncio.gather(*(plan(db, HORIZON) for _ in range(4) for db in (scene.db, other)))
    for job in jobs:
        assert len(await owed(scene, job)) == 4


async def test_an_occurrence_that_is_skipped_gives_its_place_back(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S", "max_runs": 2}, overlap="skip")
    await turn(scene)
    first, second = await owed(scene, job)
    await fall_due(scene, job)
    worker = await scene.employ("01900000-0000-7000-8000-000000000001")
    [run] = await scene.take(10, worker)
    assert await scene.missed(job) == [("skipped_overlap", 1)]
    assert await cursor(scene, job) is None
    await turn(scene)
    third = await owed(scene, job)
    assert third == [first, second + 2 * SECOND]
    await scene.end(worker, end_of(run))
    await fall_due(scene, job)
    [run] = await scene.take(10, worker)
    await scene.end(worker, end_of(run))
    await turn(scene)
    assert await cursor(scene, job) is None
    assert await scene.value("select count(*) from history where job_id = $1 and outcome = 'succeeded'", job["id"]) == 2


async def test_expired_cancelled_and_misfired_occurrences_do_not_count(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 2}, overlap="allow", start_deadline="PT1H")
    await turn(scene)
    [one, two] = await scene.rows("select id::text as id from runs where job_id = $1 order by id", job["id"])
    await scene.api.post(f"/v1/runs/{one['id']}/cancel", {})
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 second' where id = $1", two["id"])
    await expire(scene.db)
    assert await scene.states(job) == []
    await turn(scene)
    assert (await used(scene, job), len(await owed(scene, job))) == (2, 2)


async def test_missed_ones_that_get_no_run_do_not_count(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M", "max_runs": 3}, overlap="allow")
    await age(scene, job, timedelta(minutes=30))
    await turn(scene)
    assert sum(n for _, n in await scene.missed(job)) >= 29
    assert await used(scene, job) == len(await owed(scene, job)) == 1


async def test_catching_up_keeps_to_it(scene: Scene) -> None:
    misfire = {"policy": "all", "window": "PT1H"}
    job = await scene.job(schedule={"every": "PT1M", "max_runs": 3, "misfire": misfire}, overlap="allow")
    first = await age(scene, job, timedelta(minutes=30))
    await turn(scene)
    assert await owed(scene, job) == [first + i * timedelta(minutes=1) for i in range(3)]
    assert await cursor(scene, job) is None


async def test_pause_takes_the_unclaimed_back_and_resume_goes_on(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S", "max_runs": 2}, overlap="allow")
    await turn(scene)
    first, second = await owed(scene, job)
    await scene.api.post(f"/v1/jobs/{job['id']}/pause", {})
    assert (await scene.states(job), await used(scene, job)) == ([], 0)
    await turn(scene)
    await scene.api.post(f"/v1/jobs/{job['id']}/resume", {})
    await turn(scene)
    assert await owed(scene, job) == [first, second]
    assert await cursor(scene, job) is None


async def test_a_place_given_back_during_a_pause_is_used_after_it(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S", "max_runs": 1}, overlap="allow")
    await turn(scene)
    [run] = await scene.rows("select id::text as id from runs where job_id = $1", job["id"])
    await scene.api.post(f"/v1/runs/{run['id']}/cancel", {})
    await scene.api.post(f"/v1/jobs/{job['id']}/pause", {})
    await turn(scene)
    held = await scene.value("select held_at from triggers where job_id = $1", job["id"])
    assert held is not None
    assert await cursor(scene, job) is None
    await scene.api.post(f"/v1/jobs/{job['id']}/resume", {})
    await turn(scene)
    assert len(await owed(scene, job)) == 1


@pytest.mark.parametrize(("most", "staged"), [(2, 2), (4, 4), (8, 8), (None, 10)])
async def test_more_or_fewer_by_an_edit(scene: Scene, most: int | None, staged: int) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 4}, overlap="allow")
    await turn(scene)
    was = await owed(scene, job)
    await patch(scene, job, max_runs=most)
    await turn(scene)
    now = await owed(scene, job)
    assert now[:2] == was[:2]
    assert len(now) >= 9 if most is None else len(now) == staged
    assert (await used(scene, job) is None) == (most is None)


async def test_what_was_claimed_counts_across_edits(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 2}, overlap="allow")
    await turn(scene)
    await fall_due(scene, job)
    assert len(await scene.take(10)) == 2
    await patch(scene, job, every="PT2S")
    assert (await fetch(scene, job))["next_run_at"] is None, "another rhythm, and no more runs"
    await turn(scene)
    assert len(await owed(scene, job)) == 2
    await patch(scene, job, max_runs=3)
    assert (await fetch(scene, job))["next_run_at"] is not None
    await turn(scene)
    assert len(await owed(scene, job)) == 3
    assert await scene.missed(job) == [], "what it did not owe while it was over is not made up for"


async def test_a_job_is_counted_from_when_it_is_limited(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S"}, overlap="allow")
    await turn(scene)
    await fall_due(scene, job)
    claimed = await scene.take(4)
    await patch(scene, job, max_runs=2)
    await turn(scene)
    assert len(await owed(scene, job)) == len(claimed) + 2


async def test_the_end_of_a_cancelled_job_leaves_nothing_to_plan(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 2}, overlap="allow")
    await turn(scene)
    await scene.api.post(f"/v1/jobs/{job['id']}/cancel", {})
    await turn(scene)
    assert await cursor(scene, job) is None
    assert await scene.value("select count(*) from unclaimed") == 0


async def test_occurrences_tell_as_many_as_there_may_be(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M", "max_runs": 3}, overlap="allow")
    start = datetime.fromisoformat(job["created_at"])
    span = {"from": start.isoformat(), "to": (start + timedelta(hours=1)).isoformat()}
    page = await scene.api.call("GET", f"/v1/jobs/{job['id']}/occurrences", params=span)
    assert [o["status"] for o in page["items"]] == ["planned"] * 3
    await age(scene, job, timedelta(seconds=55))
    await turn(scene)
    await fall_due(scene, job)
    await scene.take(10)
    page = await scene.api.call("GET", f"/v1/jobs/{job['id']}/occurrences", params=span)
    assert [o["status"] for o in page["items"]] == ["running", "planned", "planned"]


async def test_a_turn_reads_a_bounded_number_of_unclaimed_ends(scene: Scene) -> None:
    """A turn must not read all such rows."""
    await scene.sql.execute(
        "insert into unclaimed (tenant_id, job_id)"
        " select t.id, gen_random_uuid() from tenants t, generate_series(1, 5000) where t.slug = 'default'"
    )
    async with scene.sql.transaction():
        await scene.sql.execute(SQL["forget_unclaimed"])
        read = await scene.sql.fetchval(
            "select seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables"
            " where relname = 'unclaimed' and schemaname = 'tocsin'"
        )
    assert read <= 2000
    for _ in range(4):
        assert await scene.value("select count(*) from unclaimed") > 0
        await take_back(scene.db)
    assert await scene.value("select count(*) from unclaimed") == 0
