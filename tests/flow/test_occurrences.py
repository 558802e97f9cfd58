"""occurrences: every instant a job owed is told, once, with what became of it; never silence, never a flood."""

from __future__ import annotations

import asyncio
import random
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, Scene, end_of
from tocsin.clock import iso
from tocsin.flow.plan import plan
from tocsin.model.ids import new_id

W = str(uuid.uuid4())
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
Item = dict[str, Any]


async def occurrences(
    scene: Scene, job: Item, from_: datetime | None = None, to: datetime | None = None, limit: int = 500
) -> list[Item]:
    """All pages; from the job's making unless told, to a moment from now."""
    if from_ is None:
        from_ = await scene.db.fetchval("engine", "select created_at from jobs where id = $1", job["id"])
    to = to or scene.db.clock.now() + HORIZON
    found, cursor = [], None
    while True:
        query = {"from": iso(from_), "to": iso(to), "limit": limit} | ({"cursor": cursor} if cursor else {})
        page = await scene.api.get(f"/v1/jobs/{job['id']}/occurrences", params=query)
        assert len(page["items"]) <= limit
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def brief(items: list[Item]) -> list[tuple[str, str | None, int]]:
    return [(i["status"], i["reason"], i["count"]) for i in items]


async def age(scene: Scene, job: Item, by: timedelta) -> None:
    """As if the job had been made so long ago, and nobody had planned since."""
    await scene.down(by)
    await scene.sql.execute("update jobs set created_at = created_at - $2::interval where id = $1", job["id"], by)
    await scene.sql.execute(
        "update triggers set next_fire_at = next_fire_at - $2::interval, held_at = held_at - $2::interval"
        " where job_id = $1",
        job["id"],
        by,
    )


async def test_what_ran_what_runs_and_what_is_to_come(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M", "misfire": {"policy": "all"}}, overlap="allow")
    await age(scene, job, 5 * MINUTE + timedelta(seconds=30))
    await plan(scene.db, HORIZON)
    keys = await scene.taken(W)
    assert len(keys) == 5
    await scene.end(W, end_of(keys[0]), end_of(keys[1], "failed"), *(end_of(k) for k in keys[2:4]))
    await scene.ask(job)
    now = await scene.now()
    told = await occurrences(scene, job, to=now + 2 * MINUTE)
    assert [(i["status"], i["state"]) for i in told] == [
        ("ran", "succeeded"),
        ("running", "staged"),  # it failed and will be tried again
        ("ran", "succeeded"),
        ("ran", "succeeded"),
        ("running", "running"),
        ("planned", None),
        ("planned", None),
    ]
    first = await scene.value("select created_at from jobs") + MINUTE
    assert [i["from"] for i in told] == [i["to"] for i in told] == [iso(first + i * MINUTE) for i in range(7)]
    assert [i["run_id"] for i in told[:5]] == [key[0] for key in keys]
    assert await occurrences(scene, job, to=now + 2 * MINUTE, limit=2) == told
    assert await occurrences(scene, job, from_=first + MINUTE, to=first + 3 * MINUTE) == told[1:3]


async def test_what_was_missed_is_told_as_it_was_counted(scene: Scene) -> None:
    job = await scene.job(schedule={"cron": "* * * * *", "misfire": {"window": "PT10M"}})
    await age(scene, job, 3 * DAY)
    cursor = await scene.value("update triggers set next_fire_at = date_trunc('minute', next_fire_at) returning 1")
    assert cursor
    await plan(scene.db, timedelta(0))
    expired, coalesced, run = await occurrences(scene, job, to=await scene.now())
    assert (expired["status"], expired["reason"], coalesced["status"]) == ("missed", "misfire_expired", "coalesced")
    assert run["status"] == "planned" and run["run_id"] is not None
    assert expired["count"] + coalesced["count"] + 1 == 3 * 24 * 60
    assert datetime.fromisoformat(expired["to"]) + MINUTE == datetime.fromisoformat(coalesced["from"])
    middle = datetime.fromisoformat(expired["from"]) + DAY
    assert await occurrences(scene, job, middle, middle + MINUTE) == [expired], "the row that holds the range"
    assert (await scene.run(expired["run_id"]))["count"] == expired["count"]


async def test_a_pause_is_told_while_it_lasts_and_after_it(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M"})
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    await age(scene, job, 10 * MINUTE + timedelta(seconds=30))
    now = await scene.now()
    told = await occurrences(scene, job, to=now + 2 * MINUTE)
    assert brief(told) == [("skipped", "skipped_paused", 10), ("planned", "paused", 1), ("planned", "paused", 1)]
    await scene.api.post(f"/v1/jobs/{job['id']}/resume")
    after = await occurrences(scene, job, to=now + 2 * MINUTE)
    assert brief(after) == [("skipped", "skipped_paused", 10), ("planned", None, 1), ("planned", None, 1)]
    assert [(i["from"], i["to"]) for i in after] == [(i["from"], i["to"]) for i in told]


async def test_silence_would_be_seen(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M"})
    await age(scene, job, 10 * MINUTE + timedelta(seconds=30))
    assert {i["status"] for i in await occurrences(scene, job)} == {"planned"}, "the planner has not come to it yet"
    # A planner that forgot: the cursor has gone on, and nothing was written.
    await scene.sql.execute("update triggers set next_fire_at = next_fire_at + interval '10 minutes'")
    assert brief(await occurrences(scene, job)) == [("missed", "unknown", 10)]


@pytest.mark.parametrize("paused", [False, True])
async def test_what_a_cancelled_job_still_owed_is_on_record(scene: Scene, paused: bool) -> None:
    job = await scene.job(schedule={"every": "PT1M"})
    if paused:
        await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    await age(scene, job, 10 * MINUTE + timedelta(seconds=30))
    await scene.api.post(f"/v1/jobs/{job['id']}/cancel")
    reason = "skipped_paused" if paused else "cancelled"
    assert brief(await occurrences(scene, job, to=await scene.now() + DAY)) == [("skipped", reason, 10)]


async def test_each_version_owed_what_its_own_schedule_said(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M"}, overlap="allow")
    await age(scene, job, 5 * MINUTE + timedelta(seconds=30))
    url = f"/v1/jobs/{job['id']}"
    await scene.api.call("PATCH", url, json={"priority": 1})
    await scene.api.call("PATCH", url, json={"schedule": {"every": "PT2S"}})
    await plan(scene.db, HORIZON)
    await scene.api.call("PATCH", url, json={"schedule": {"every": None, "cron": "0 3 * * *"}})
    told = await occurrences(scene, job, to=await scene.now() + DAY)
    assert brief(told) == [("skipped", "cancelled", 5), ("planned", None, 1)]


async def test_one_time_jobs_and_jobs_by_hand(scene: Scene) -> None:
    now = await scene.now()
    at_once, later = await scene.job(schedule=None), await scene.job(schedule={"at": iso(now + DAY)})
    by_hand = await scene.job()
    await scene.ask(by_hand)
    span = (now - MINUTE, now + 2 * DAY)
    assert brief(await occurrences(scene, at_once, *span)) == [("planned", None, 1)]
    assert brief(await occurrences(scene, later, *span)) == [("planned", None, 1)]
    assert await occurrences(scene, by_hand, *span) == []
    keys = await scene.taken(W)
    await scene.end(W, *map(end_of, keys))
    assert brief(await occurrences(scene, at_once, *span)) == [("ran", None, 1)]
    await scene.api.post(f"/v1/jobs/{later['id']}/pause")
    assert brief(await occurrences(scene, later, *span)) == [("planned", None, 1)], "it will run at resume"


async def test_strangers_and_bad_ranges(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M"})
    url = f"/v1/jobs/{job['id']}/occurrences"
    assert (await scene.api.get(url))["items"] == []
    for query, code in (
        ({"from": "2026-01-01T00:00:00Z", "to": "2027-01-03T00:00:00Z"}, "invalid_range"),
        ({"from": "2026-01-02T00:00:00Z", "to": "2026-01-01T00:00:00Z"}, "invalid_range"),
        ({"from": "yesterday"}, "invalid_time"),
        ({"cursor": "x"}, "invalid_cursor"),
        ({"cursor": f"2026-01-01T00:00:00Z~2026-01-01T00:00:00Z~{'x' * 36}"}, "invalid_cursor"),
        ({"limit": "0"}, "invalid_limit"),
        ({"state": "ran"}, "unknown_parameter"),
    ):
        assert (await scene.api.get(url, params=query, expect=400))["code"] == code
    await scene.api.get(f"/v1/jobs/{uuid.uuid4()}/occurrences", expect=404)
    await scene.api.post("/v1/tenants", {"slug": "else"})
    stranger = await scene.api.with_key("viewer", "else")
    await stranger.get(url, expect=404)


async def test_planners_claims_pauses_and_edits_at_once_leave_no_instant_untold(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S"}, overlap="allow")
    await age(scene, job, 20 * timedelta(seconds=1))
    await scene.employ(W)
    over, one_ran = asyncio.Event(), asyncio.Event()
    url = f"/v1/jobs/{job['id']}"

    async def owner() -> None:
        await one_ran.wait()
        for i in range(8):
            await scene.api.call("PATCH", url, json={"priority": i})
            if i % 3 == 1:
                await scene.api.call("PATCH", url, json={"schedule": {"every": f"PT{1 + i % 2}S"}})
            await scene.api.post(f"{url}/pause")
            await scene.api.post(f"{url}/resume")
        over.set()

    async def plans() -> None:
        while not over.is_set():
            await plan(scene.db, HORIZON)

    async def claims() -> None:
        while not over.is_set():
            rows = await scene.take(2, W)
            await scene.end(W, *map(end_of, rows))
            if rows:
                one_ran.set()
            await scene.sweep_waiting()

    async def reader() -> None:
        while not over.is_set():
            assert "unknown" not in {i["reason"] for i in await occurrences(scene, job)}

    await asyncio.gather(owner(), plans(), plans(), claims(), reader())
    told = await occurrences(scene, job)
    assert "unknown" not in {i["reason"] for i in told}
    assert {"ran", "planned"} <= {i["status"] for i in told}


@pytest.mark.parametrize("limit", [7, 100, 500])
async def test_records_come_in_the_order_of_their_instants_whatever_their_ids(scene: Scene, limit: int) -> None:
    """A thousand seconds, planned up to a minute late or much later, in an order that their ids do not show."""
    job = await scene.job(schedule={"every": "PT1S"})
    await age(scene, job, timedelta(seconds=1000))
    first = await cursor(scene, job)
    rng = random.Random(7)
    rows = []
    for i in range(1000):
        at = first + timedelta(seconds=i)
        ready = at + timedelta(seconds=rng.choice([0, rng.random() * 59, rng.random() * 600]))
        rows.append((new_id(ready), job["id"], at, ready))
    await scene.sql.executemany(
        "insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, fence, trigger,"
        " priority, failures, losses, max_attempts, scheduled_for, ready_at, finished_at)"
        " values (1, $1, 1, $2, 1, true, 'succeeded', 'succeeded', 1, 'schedule', 500, 0, 0, 1, $3, $4, $4)",
        rows,
    )
    await scene.sql.execute("update triggers set next_fire_at = $1", first + timedelta(seconds=1000))
    told = await occurrences(scene, job, to=first + timedelta(seconds=1000), limit=limit)
    assert [i["run_id"] for i in told] == [row[0] for row in rows]
    assert {i["status"] for i in told} == {"ran"}


async def cursor(scene: Scene, job: Item) -> datetime:
    return await scene.value("select next_fire_at from triggers where job_id = $1", job["id"])  # type: ignore[no-any-return]
