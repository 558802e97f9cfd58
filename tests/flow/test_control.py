"""control: pause, resume and cancel, of jobs and runs, in every state they can be in."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, Scene, end_of
from tocsin.clock import iso
from tocsin.flow.plan import plan

W = str(uuid.uuid4())


async def trigger(scene: Scene, job: dict[str, Any]) -> tuple[datetime | None, datetime | None]:
    row = await scene.row("select next_fire_at, held_at from triggers where job_id = $1", job["id"])
    return row["next_fire_at"], row["held_at"]


async def do(scene: Scene, verb: str, job: dict[str, Any], expect: int = 200, **body: Any) -> dict[str, Any]:
    return await scene.api.post(f"/v1/jobs/{job['id']}/{verb}", body, expect=expect)  # type: ignore[no-any-return]


# ── pause and resume ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_pause_retracts_what_nobody_holds_and_sets_the_cursor_back(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S"}, overlap="allow")
    first = datetime.fromisoformat(job["created_at"]) + timedelta(seconds=2)
    await plan(scene.db, HORIZON)
    await scene.sql.execute("update runs set state = 'ready', ready_at = now() where scheduled_for = $1", first)
    [held] = await scene.taken(W)
    paused = await do(scene, "pause", job, reason="lunch")
    assert (paused["state"], paused["next_run_at"]) == ("paused", None)
    assert await scene.states(job) == ["running"], "what a worker holds goes on"
    assert await trigger(scene, job) == (None, first + timedelta(seconds=2)), "not behind the claimed occurrence"
    await plan(scene.db, HORIZON)
    assert await scene.states(job) == ["running"], "nothing is planned during a pause"
    assert (await do(scene, "pause", job))["state"] == "paused", "idempotent"
    await scene.end(W, end_of(held))
    assert await scene.value("select count(*) from audit where action = 'job.pause'") == 1


async def test_what_was_recorded_before_a_pause_is_not_counted_again_after_it(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M"}, overlap="queue")
    await scene.sql.execute("update jobs set created_at = created_at - interval '4 minutes 30 seconds'")
    await scene.sql.execute("update triggers set next_fire_at = next_fire_at - interval '30 seconds'")
    await scene.occur(job, 210, 150, 90, 30)
    await scene.sql.execute("update runs set state = 'ready'")
    [held] = await scene.taken(W, 1)
    assert await scene.take() == []
    assert await scene.missed(job) == [("coalesced", 1), ("coalesced", 1)] and len(await scene.states(job)) == 2
    await do(scene, "pause", job)
    await do(scene, "resume", job)
    assert sorted(await scene.missed(job)) == [("coalesced", 1), ("coalesced", 1), ("skipped_paused", 1)]
    await scene.end(W, end_of(held))


async def test_resume_before_the_next_occurrence_loses_nothing(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT5S"})
    await plan(scene.db, HORIZON)
    before = await scene.rows("select scheduled_for from runs order by 1")
    await do(scene, "pause", job)
    resumed = await do(scene, "resume", job)
    assert (resumed["state"], resumed["next_run_at"]) == ("active", iso(before[0][0]))
    await plan(scene.db, HORIZON)
    assert (await scene.rows("select scheduled_for from runs order by 1"))[: len(before)] == before
    assert await scene.missed(job) == []


async def test_resume_counts_what_was_owed_meanwhile_in_one_row_and_does_not_fire(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1M"})
    await do(scene, "pause", job)
    shift = timedelta(minutes=10, seconds=30)
    await scene.sql.execute("update jobs set created_at = created_at - $1::interval", shift)
    held = await scene.value("update triggers set held_at = held_at - $1::interval returning held_at", shift)
    resumed = await do(scene, "resume", job)
    assert await scene.missed(job) == [("skipped_paused", 10)]
    assert await trigger(scene, job) == (held + timedelta(minutes=10), None)
    assert resumed["next_run_at"] == iso(held + timedelta(minutes=10))
    await plan(scene.db, HORIZON)
    assert await scene.states(job) == []
    row = await scene.row("select * from history")
    assert (row["state"], row["scheduled_for"], row["final"]) == ("skipped", held + timedelta(minutes=9), True)
    assert (await do(scene, "resume", job))["state"] == "active", "idempotent"
    assert await scene.missed(job) == [("skipped_paused", 10)]


async def test_runs_by_hand_wait_while_paused_and_run_after_resume(scene: Scene) -> None:
    job = await scene.job()
    [asked_before] = await scene.ask(job)
    await do(scene, "pause", job)
    [asked_after] = await scene.ask(job)
    assert await scene.take() == []
    for run_id in (asked_before, asked_after):
        run = await scene.run(run_id)
        assert (run["state"], run["blocked_by"]) == ("waiting", "paused")
    await do(scene, "resume", job)
    assert sorted(row["id"] for row in await scene.take()) == sorted([asked_before, asked_after])


async def test_a_retry_in_back_off_survives_a_pause(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"})
    [run_id] = await scene.occur(job, 1)
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed"))
    await do(scene, "pause", job)
    assert await scene.states(job) == ["staged"]
    await scene.wake(run_id)
    assert await scene.take() == []
    await do(scene, "resume", job)
    assert [k[:2] for k in await scene.taken(W)] == [(run_id, 2)]


@pytest.mark.parametrize("schedule", [{"delay": "PT5S"}, {"delay": "PT5M"}, None])
async def test_a_one_time_job_paused_past_its_instant_runs_at_resume(scene: Scene, schedule: Any) -> None:
    job = await scene.job(schedule=schedule)
    await do(scene, "pause", job)
    assert await scene.states(job) == []
    due = await scene.value("update triggers set held_at = now() - interval '5 min' returning held_at")
    await do(scene, "resume", job)
    [row] = await scene.take()
    assert row["scheduled_for"] == due
    await scene.end(str(row_worker := await scene.value("select worker_id from runs")), end_of(row))
    assert row_worker and (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "completed"


async def test_a_one_time_job_resumed_in_time_keeps_its_instant(scene: Scene) -> None:
    job = await scene.job(schedule={"delay": "PT5M"})
    before, _ = await trigger(scene, job)
    await do(scene, "pause", job)
    await do(scene, "resume", job)
    assert await trigger(scene, job) == (before, None)
    assert await scene.states(job) == []


async def test_pausing_a_long_queue_is_one_row(scene: Scene) -> None:
    job = await scene.job()
    await scene.ask(job, 1500)
    await do(scene, "pause", job)
    assert await scene.value("select count(*) from runs where state = 'ready'") == 1500
    assert await scene.value("select count(*) from holds") == 1
    while await scene.value("select count(*) from runs where state = 'ready'"):
        assert await scene.take(1000) == []
    await do(scene, "resume", job)
    assert await scene.value("select count(*) from runs where state = 'ready'") == 1000, "in waves"
    await scene.sweep_waiting()
    assert await scene.value("select count(*) from runs where state = 'ready'") == 1500


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def every_state(scene: Scene, **spec: Any) -> tuple[dict[str, Any], dict[str, str], tuple[str, int, int]]:
    """A job with a run in each live state but stopping; their ids by state, and the held one's key."""
    job = await scene.job(name="busy", max_concurrency=1, **spec)
    running, waiting = await scene.ask(job, 2)
    [key] = await scene.taken(W)
    [ready] = await scene.ask(job)
    [staged] = await scene.ask(job, at="2998-01-01T00:00:00Z")
    assert await scene.states(job) == ["running", "waiting", "ready", "staged"]
    return job, {"running": running, "waiting": waiting, "ready": ready, "staged": staged}, key


async def test_cancelling_a_job_ends_what_is_not_held_and_stops_what_is(scene: Scene) -> None:
    job, ids, key = await every_state(scene)
    assert (await do(scene, "cancel", job, reason="wrong one"))["state"] == "cancelled"
    for state in ("staged", "ready", "waiting"):
        run = await scene.run(ids[state])
        assert (run["state"], run["reason"], run["started_at"]) == ("cancelled", "cancelled", None)
    assert (await scene.run(ids["running"]))["state"] == "stopping"
    await scene.end(W, end_of(key, "failed"))
    assert (await scene.run(ids["running"]))["state"] == "cancelled"
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "cancelled"
    assert (await scene.job(name="busy"))["id"] != job["id"], "the name is free"
    assert await scene.value("select count(*) from holds") == 0


async def test_cancel_can_leave_what_runs(scene: Scene) -> None:
    job, ids, key = await every_state(scene)
    await do(scene, "cancel", job, running="leave")
    assert (await scene.run(ids["running"]))["state"] == "running"
    await scene.end(W, end_of(key))
    assert (await scene.run(ids["running"]))["state"] == "succeeded"


async def test_delete_is_cancel_and_may_be_repeated(scene: Scene) -> None:
    job, ids, _ = await every_state(scene)
    for _ in range(2):
        assert (await scene.api.delete(f"/v1/jobs/{job['id']}", expect=200))["state"] == "cancelled"
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "cancelled"
    assert (await scene.run(ids["running"]))["state"] == "stopping"
    assert await scene.value("select count(*) from audit where action = 'job.delete'") == 1


async def test_a_cancelled_schedule_never_fires_again(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S"})
    await plan(scene.db, HORIZON)
    await do(scene, "cancel", job)
    await plan(scene.db, HORIZON)
    assert await scene.states(job) == [] and await trigger(scene, job) == (None, None)
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["next_run_at"] is None


async def test_cancel_of_a_paused_job_and_of_a_one_time_job(scene: Scene) -> None:
    paused = await scene.job(schedule={"every": "PT1H"})
    await do(scene, "pause", paused)
    assert (await do(scene, "cancel", paused))["state"] == "cancelled"
    once = await scene.job(schedule=None)
    assert (await do(scene, "cancel", once))["state"] == "cancelled", "not completed by its cancelled run"


@pytest.mark.parametrize("state", ["cancelled", "completed"])
async def test_ended_jobs_stay_ended(scene: Scene, state: str) -> None:
    job = await scene.job(name="done")
    await scene.sql.execute("update jobs set state = $1, ended_at = now()", state)
    for verb in ("pause", "resume"):
        assert (await do(scene, verb, job, expect=409))["code"] == f"job_{state}"
    assert (await do(scene, "cancel", job))["state"] == state
    assert (await scene.api.delete(f"/v1/jobs/{job['id']}"))["state"] == state


async def test_submitting_runs_while_the_job_is_cancelled_leaves_none_behind(scene: Scene) -> None:
    for _ in range(5):
        job = await scene.job()
        path = f"/v1/jobs/{job['id']}"
        calls = [scene.api.http.post(f"{path}/runs/batch", json={"runs": [{}] * 20}) for _ in range(4)]
        await asyncio.gather(*calls[:2], scene.api.http.post(f"{path}/cancel", json={}), *calls[2:])
        assert await scene.states(job) == []


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_is_cancelled_in_each_state(scene: Scene) -> None:
    job, ids, key = await every_state(scene)
    cancel = {state: await scene.api.post(f"/v1/runs/{run_id}/cancel") for state, run_id in ids.items()}
    assert {state: run["state"] for state, run in cancel.items()} == {
        "staged": "cancelled",
        "ready": "cancelled",
        "waiting": "cancelled",
        "running": "stopping",
    }
    again = await scene.api.post(f"/v1/runs/{ids['running']}/cancel")
    assert again["state"] == "stopping"
    await scene.end(W, end_of(key, "cancelled"))
    for run_id in ids.values():
        assert (await scene.api.post(f"/v1/runs/{run_id}/cancel", expect=200))["state"] == "cancelled"
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "active"
    assert await scene.value("select count(*) from audit where action = 'run.cancel'") == 4
    await scene.api.post("/v1/runs/019a0000-0000-7000-8000-000000000000/cancel", expect=404)


async def test_cancelling_what_others_wait_for_lets_the_next_one_go(scene: Scene) -> None:
    job = await scene.job(overlap="queue_all", schedule={"every": "PT1H"})
    first, second, third = await scene.occur(job, 3, 2, 1)
    [key] = await scene.taken(W)
    await scene.api.post(f"/v1/runs/{second}/cancel")
    await scene.end(W, end_of(key))
    assert key[0] == first and [k[0] for k in await scene.taken(W)] == [third]


async def test_a_cancelled_run_completes_its_one_time_job(scene: Scene) -> None:
    job = await scene.job(schedule={"delay": "PT5S"})
    run_id = str(await scene.value("select id from runs"))
    await scene.api.post(f"/v1/runs/{run_id}/cancel")
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "completed"


async def test_a_repeated_control_call_replays_although_the_world_has_changed(scene: Scene) -> None:
    job = await scene.job()
    headers = {"idempotency-key": "p1"}
    first = await scene.api.http.post(f"/v1/jobs/{job['id']}/pause", json={}, headers=headers)
    await do(scene, "resume", job)
    again = await scene.api.http.post(f"/v1/jobs/{job['id']}/pause", json={}, headers=headers)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.headers["idempotent-replayed"] == "true" and again.json()["state"] == "active"
    await do(scene, "cancel", job)
    gone = await scene.api.http.post(f"/v1/jobs/{job['id']}/pause", json={}, headers=headers)
    assert gone.status_code == 200 and gone.json()["state"] == "cancelled"
