"""replan: a release of tzdata that changes a zone moves the cursors that were set by its old rules, and no others."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, Scene
from tests.flow.test_plan import age, cursor, owed
from tocsin.flow import replan
from tocsin.flow.plan import plan
from tocsin.flow.replan import follow
from tocsin.flow.shared.failed import Failed
from tocsin.model.zones import TZDATA_VERSION, rules_of

NOON = {"cron": "0 12 * * *", "timezone": "Europe/Berlin"}


async def read_by(scene: Scene, job: dict[str, Any], rules: str) -> None:
    """As if the cursor had been set by other rules, which had the zone an hour off."""
    await scene.sql.execute("update jobs set zone_rules = $2 where id = $1", job["id"], rules)
    await scene.sql.execute(
        "update triggers set next_fire_at = next_fire_at + interval '1 hour', held_at = held_at + interval '1 hour'"
        " where job_id = $1",
        job["id"],
    )


async def test_the_release_of_tzdata_is_written_down(scene: Scene) -> None:
    job = await scene.job(schedule=NOON)
    assert job["schedule"]["tzdata"] == TZDATA_VERSION
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["schedule"]["tzdata"] == TZDATA_VERSION
    plain = await scene.job(schedule={"cron": "0 12 * * *"})
    assert plain["schedule"]["tzdata"] is None, "of UTC there is nothing to know"
    moved = await scene.api.call("PATCH", f"/v1/jobs/{plain['id']}", json={"schedule": NOON})
    assert moved["schedule"]["tzdata"] == TZDATA_VERSION


async def test_cursors_follow_rules_that_changed(scene: Scene) -> None:
    job, paused = [await scene.job(schedule=NOON) for _ in range(2)]
    right = await cursor(scene, job)
    await scene.api.post(f"/v1/jobs/{paused['id']}/pause", {})
    for each in (job, paused):
        await read_by(scene, each, "Europe/Berlin 0123456789ab 2001.1")
    assert (await follow(scene.db)).jobs == 2
    assert await cursor(scene, job) == right
    assert await scene.value("select held_at from triggers where job_id = $1", paused["id"]) == right
    assert await scene.value("select zone_rules from jobs where id = $1", job["id"]) == rules_of("Europe/Berlin")
    assert (await follow(scene.db)).jobs == 0


async def test_what_a_release_leaves_alone_is_left_alone(scene: Scene) -> None:
    job = await scene.job(schedule=NOON)
    name, digest, _ = (rules_of("Europe/Berlin") or "").split(" ")
    await read_by(scene, job, f"{name} {digest} 2001.1")
    was = await cursor(scene, job)
    assert (await follow(scene.db)).jobs == 0
    assert await cursor(scene, job) == was


async def test_a_node_that_is_behind_leaves_newer_rules_to_others(scene: Scene) -> None:
    job = await scene.job(schedule={"cron": "* * * * *", "timezone": "Europe/Berlin"})
    here = await scene.job(schedule={"cron": "* * * * *", "timezone": "Europe/Paris"})
    await age(scene, job, timedelta(minutes=1))
    await age(scene, here, timedelta(minutes=1))
    await scene.sql.execute(
        "update jobs set zone_rules = $2 where id = $1", job["id"], "Europe/Berlin 0123456789ab 2999.1"
    )
    was = await cursor(scene, job)
    assert (await follow(scene.db)).jobs == 0
    await plan(scene.db, HORIZON)
    assert (await owed(scene, job), await cursor(scene, job)) == ([], was)
    assert await owed(scene, here)


async def test_what_is_due_stays_owed_and_nothing_fires_again(scene: Scene) -> None:
    job = await scene.job(schedule={"cron": "* * * * * *", "timezone": "Europe/Berlin"}, overlap="allow")
    await plan(scene.db, HORIZON)
    staged = await owed(scene, job)
    await scene.sql.execute(
        "update runs set ready_at = now(), state = 'ready', scheduled_for = scheduled_for - interval '1 minute'"
        " where job_id = $1 and scheduled_for <= $2",
        job["id"],
        staged[3],
    )
    claimed = await scene.take(2)
    await scene.sql.execute("update jobs set zone_rules = 'Europe/Berlin 0123456789ab 2001.1' where id = $1", job["id"])
    await follow(scene.db)
    left = await owed(scene, job)
    assert len(left) == 4, "two that are held, two that were due"
    assert {run["scheduled_for"] for run in claimed} < set(left)
    following: datetime | None = await cursor(scene, job)
    assert following is not None
    assert following <= staged[4] + timedelta(seconds=1)


async def test_a_job_that_fails_keeps_no_other_from_following(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "WAVE", 2)
    jobs = [await scene.job(schedule=NOON) for _ in range(5)]
    for job in jobs:
        await read_by(scene, job, "Europe/Berlin 0123456789ab 2001.1")
    broken = {job["id"] for job in jobs[:3]}
    await scene.sql.execute("update jobs set schedule = '{' where id = any($1::uuid[])", list(broken))
    failed = Failed()
    for _ in range(10):
        if not (await follow(scene.db, failed)).jobs:
            break
    else:
        raise AssertionError("the jobs that fail are tried again without a pause")
    behind = await scene.rows("select id::text from jobs where zone_rules like '% 2001.1'")
    assert {row["id"] for row in behind} == broken
