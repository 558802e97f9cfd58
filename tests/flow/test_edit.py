"""edit: a new version; what is held keeps its own, what is not belongs to the new one, and nothing fires twice."""

from __future__ import annotations

import asyncio
import random
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, PROCESS, Scene, end_of
from tocsin.clock import iso
from tocsin.flow import plan as step
from tocsin.flow.plan import plan

W = str(uuid.uuid4())
SECOND = timedelta(seconds=1)


async def patch(scene: Scene, job: dict[str, Any], expect: int = 200, headers: Any = None, **body: Any) -> Any:
    return await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json=body, expect=expect, headers=headers)


async def trigger(scene: Scene, job: dict[str, Any]) -> tuple[datetime | None, datetime | None]:
    return tuple(await scene.row("select next_fire_at, held_at from triggers where job_id = $1", job["id"]))


async def occurrences(scene: Scene, job: dict[str, Any]) -> list[tuple[datetime, int, str]]:
    statement = "select scheduled_for, job_version, state from runs where job_id = $1 order by id"
    return [tuple(row) for row in await scene.rows(statement, job["id"])]


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_edit_is_a_new_version_and_the_same_again_is_none(scene: Scene) -> None:
    job = await scene.job(name="a", tags={"k": "v"}, priority=100)
    changed = await patch(scene, job, description="x", tags={"k": None, "l": "w"}, priority=None)
    assert (changed["version"], changed["description"], changed["tags"], changed["priority"]) == (
        2,
        "x",
        {"l": "w"},
        500,
    )
    assert changed["target"] == job["target"] and changed["created_at"] == job["created_at"]
    assert changed["updated_at"] > job["updated_at"]
    assert (await patch(scene, job, description="x"))["version"] == 2
    assert (await patch(scene, job))["version"] == 2
    assert await scene.value("select count(*) from audit where action = 'job.edit'") == 1
    row = await scene.row("select * from jobs")
    assert (row["priority"], row["tags"], row["version"]) == (500, '{"l": "w"}', 2)
    old = await scene.row("select * from job_versions")
    assert (old["version"], old["spec"] != row["spec"]) == (1, True)


async def test_one_and_true_and_one_point_nought_are_three_things(scene: Scene) -> None:
    job = await scene.job(target={"kind": "python", "function": "f", "kwargs": {"x": 1, "big": 1e23}})
    for version, value in ((1, 1), (2, 1.0), (3, True), (3, True)):
        assert (await patch(scene, job, target={"kwargs": {"x": value}}))["version"] == version


async def test_every_column_follows_the_document(scene: Scene) -> None:
    job = await scene.job(schedule={"cron": "0 3 * * *"})
    await patch(
        scene,
        job,
        name="b",
        target={
            "kind": "python",
            "command": None,
            "env": None,
            "cwd": None,
            "stdin": None,
            "shell": None,
            "sandbox": None,
            "function": "f",
        },
        schedule={"cron": None, "at": iso(await scene.now() + timedelta(days=1))},
        retry={"max_attempts": 9},
        max_concurrency=3,
        start_deadline="PT5M",
        overlap="queue",
    )
    row = await scene.row("select j.*, l.kind, l.function from jobs j join lanes l on l.id = j.lane_id")
    assert (row["name"], row["kind"], row["function"], row["once"]) == ("b", "python", "f", True)
    assert (row["max_attempts"], row["max_concurrency"], row["start_deadline"]) == (9, 3, timedelta(minutes=5))
    assert row["overlap"] is None, "a one-time job has nothing to overlap with"
    await patch(scene, job, schedule={"at": None, "cron": "0 3 * * *"})
    assert await scene.value("select overlap from jobs") == "queue"


async def test_if_match_ended_names_and_strangers(scene: Scene) -> None:
    job, other = await scene.job(name="a"), await scene.job(name="b")
    assert (await patch(scene, job, 412, {"if-match": '"2"'}, priority=1))["code"] == "precondition_failed"
    assert (await patch(scene, job, headers={"if-match": '"1"'}, priority=1))["version"] == 2
    assert (await patch(scene, job, 409, name="b"))["code"] == "name_taken"
    assert (await patch(scene, job, name="c"))["name"] == "c"
    await scene.api.delete(f"/v1/jobs/{other['id']}")
    assert (await patch(scene, other, 409, priority=1))["code"] == "job_cancelled"
    assert (await patch(scene, job, name="b"))["version"] == 4, "the name of an ended job is free"
    await scene.api.post("/v1/tenants", {"slug": "else"})
    stranger = await scene.api.with_key("editor", "else")
    await stranger.call("PATCH", f"/v1/jobs/{job['id']}", json={"priority": 2}, expect=404)


async def test_the_same_key_five_times_at_once_is_one_edit(scene: Scene) -> None:
    job = await scene.job()
    headers = {"idempotency-key": "k", "if-match": '"1"'}
    url = f"/v1/jobs/{job['id']}"
    replies = await asyncio.gather(
        *(scene.api.http.request("PATCH", url, json={"priority": 7}, headers=headers) for _ in range(5))
    )
    assert {(r.status_code, r.json()["version"], r.headers["etag"]) for r in replies} == {(200, 2, '"2"')}
    assert sorted("idempotent-replayed" in r.headers for r in replies) == [False, True, True, True, True]
    assert await scene.value("select version from jobs") == 2
    await patch(scene, job, priority=8)
    again = await scene.api.http.request("PATCH", url, json={"priority": 7}, headers=headers)
    assert (again.json()["version"], again.json()["priority"]) == (2, 7), "as it was answered then"
    assert (await patch(scene, job, 422, headers, priority=9))["code"] == "idempotency_mismatch"


async def test_an_edit_that_is_refused_leaves_nothing(scene: Scene) -> None:
    job = await scene.job(name="a", schedule={"every": "PT2S"})
    await scene.job(name="b")
    await plan(scene.db, HORIZON)
    before = await occurrences(scene, job)
    await patch(scene, job, 409, name="b", schedule={"every": "PT1H"})
    await patch(scene, job, 422, pool="nowhere")
    assert await occurrences(scene, job) == before
    assert await scene.value("select count(*) from job_versions") == 0


# ── runs and occurrences ─────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_held_retrying_or_asked_for_keeps_its_version(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="allow")
    await scene.occur(job, 3)
    [retrying] = await scene.taken(W)
    await scene.end(W, end_of(retrying, "failed"))
    await scene.occur(job, 2)
    [held] = await scene.taken(W)
    [asked] = await scene.ask(job)
    await patch(scene, job, schedule={"every": "PT2H"}, priority=900)
    rows = await scene.rows("select id::text, job_version, priority from runs")
    assert {tuple(row) for row in rows} == {(id_, 1, 500) for id_ in (retrying[0], held[0], asked)}
    [new] = await scene.ask(job)
    assert (await scene.run(new))["job_version"] == 2
    keys = [((await scene.who()).tenant_id, job["id"], version) for version in (1, 2)]
    specs = await scene.node.specs.get(keys)
    assert [specs[key].spec.priority for key in keys] == [500, 900], "a worker gets the document of its run"


async def test_the_same_instants_are_made_again_for_the_new_version_due_or_not(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S"}, overlap="queue_all")
    await plan(scene.db, HORIZON)
    [due] = await scene.occur(job, 1)
    before, cursor = await occurrences(scene, job), await trigger(scene, job)
    changed = await patch(scene, job, priority=900, schedule={"misfire": {"policy": "all"}})
    after = await occurrences(scene, job)
    assert sorted(at for at, _, _ in after) == sorted(at for at, _, _ in before), "none lost, none twice"
    assert {version for _, version, _ in after} == {2}
    assert await trigger(scene, job) == cursor
    assert changed["next_run_at"] is not None and await scene.missed(job) == []
    [row] = await scene.take()
    assert row["job_version"] == 2 and row["id"] != due


async def test_another_schedule_begins_after_now_and_counts_what_it_dropped(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S"}, overlap="queue_all")
    await scene.occur(job, 3, 2, 1)
    [held] = await scene.taken(W, 1)
    assert await scene.take() == []
    await plan(scene.db, HORIZON)
    changed = await patch(scene, job, schedule={"every": None, "cron": "0 3 * * *"})
    assert await scene.states(job) == ["running"]
    assert await scene.missed(job) == [("cancelled", 2)]
    cursor, _ = await trigger(scene, job)
    assert cursor is not None and cursor > await scene.now() and cursor.hour == 3
    assert changed["next_run_at"] == iso(cursor)
    await scene.end(W, end_of(held))
    await plan(scene.db, HORIZON)
    assert await scene.states(job) == [], "the past is not fired again"


async def test_every_keeps_its_anchor_unless_it_changes(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"})
    await scene.sql.execute("update jobs set created_at = created_at - interval '90 minutes'")
    await scene.sql.execute("update triggers set next_fire_at = next_fire_at - interval '30 minutes'")
    made = await scene.value("select created_at from jobs")
    await patch(scene, job, schedule={"timezone": "Europe/Berlin"})
    assert (await trigger(scene, job))[0] == made + timedelta(hours=2)
    before = await scene.now()
    await patch(scene, job, schedule={"every": "PT2H"})
    cursor, _ = await trigger(scene, job)
    assert cursor is not None and timedelta() <= cursor - timedelta(hours=2) - before < 5 * SECOND
    anchor = await scene.value("select anchored_at from jobs")
    assert cursor == anchor + timedelta(hours=2)
    # The planner, resume and the next edit count from there, too.
    await scene.sql.execute("update triggers set next_fire_at = now() + interval '1 second'")
    await plan(scene.db, HORIZON)
    assert (await trigger(scene, job))[0] == cursor
    await patch(scene, job, schedule={"timezone": "UTC"})
    assert (await trigger(scene, job))[0] == cursor
    start = await scene.now() + timedelta(minutes=7)
    await patch(scene, job, schedule={"starting_at": iso(start)})
    assert (await trigger(scene, job))[0] == start


async def test_a_paused_job_stays_paused_and_is_held_where_the_new_schedule_begins(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S"})
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    held = (await trigger(scene, job))[1]
    await patch(scene, job, priority=1)
    assert await trigger(scene, job) == (None, held)
    changed = await patch(scene, job, schedule={"every": "PT1H"})
    assert (changed["state"], changed["next_run_at"]) == ("paused", None)
    _, held = await trigger(scene, job)
    assert held is not None and held > await scene.now() + timedelta(minutes=59)
    resumed = await scene.api.post(f"/v1/jobs/{job['id']}/resume")
    assert resumed["next_run_at"] == iso(held)


async def test_a_paused_one_time_job_put_to_now_runs_at_resume(scene: Scene) -> None:
    job = await scene.job(schedule={"delay": "PT1H"})
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    await patch(scene, job, schedule=None)
    await plan(scene.db, HORIZON)
    assert await scene.states(job) == []
    await scene.api.post(f"/v1/jobs/{job['id']}/resume")
    assert [row["job_version"] for row in await scene.take()] == [2]


# ── one-time jobs ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_one_time_job_is_put_off_and_brought_forward(scene: Scene) -> None:
    job = await scene.job(schedule=None)
    tomorrow = await scene.now() + timedelta(days=1)
    await patch(scene, job, schedule={"at": iso(tomorrow)})
    assert await scene.states(job) == [] and (await trigger(scene, job))[0] == tomorrow
    await patch(scene, job, schedule={"at": None, "delay": "PT1S"})
    assert await trigger(scene, job) == (None, None)
    [(_at, version, state)] = await occurrences(scene, job)
    assert (version, state) == (3, "staged")
    await scene.sql.execute("update runs set ready_at = now()")
    [key] = await scene.taken(W)
    await patch(scene, job, description="while it runs")
    assert await scene.states(job) == ["running"], "it is not made again"
    await scene.end(W, end_of(key))
    assert await scene.value("select state from jobs") == "completed"
    assert await scene.missed(job) == []


@pytest.mark.parametrize("schedule", [{"at": None, "manual": True}, {"at": None, "delay": "PT1H"}])
async def test_a_run_that_was_the_only_one_does_not_complete_a_job_with_another_time(
    scene: Scene, schedule: Any
) -> None:
    job = await scene.job(schedule={"at": iso(await scene.now())})
    [key] = await scene.taken(W)
    await patch(scene, job, schedule=schedule)
    await scene.end(W, end_of(key))
    assert await scene.value("select state from jobs") == "active"


async def test_an_instant_that_is_past_by_now_does_not_forbid_other_changes(scene: Scene) -> None:
    job = await scene.job(schedule={"at": iso(await scene.now())}, target=PROCESS)
    [key] = await scene.taken(W)
    await scene.sql.execute(
        "update jobs set spec = jsonb_set(spec::jsonb, '{schedule,at}', '\"2020-01-01T00:00:00.000000Z\"')::text"
    )
    assert (await patch(scene, job, description="x"))["version"] == 2
    assert (await patch(scene, job, 422, schedule={"at": "2020-01-02T00:00:00Z"}))["code"] == "in_the_past"
    await scene.end(W, end_of(key))


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_limit_raised_lowered_and_taken_away(scene: Scene) -> None:
    job = await scene.job(max_concurrency=1)
    await scene.ask(job, 6)
    assert [len(await scene.take()) for _ in range(2)] == [1, 0]
    await patch(scene, job, max_concurrency=3)
    assert sorted(await scene.states(job)).count("ready") == 2, "what there is room for is released"
    assert len(await scene.take()) == 2
    await patch(scene, job, max_concurrency=1)
    assert len(await scene.take()) == 0
    await patch(scene, job, max_concurrency=None)
    assert len(await scene.take()) == 3, "what was made under the limit is still claimed"
    await scene.ask(job, 2)
    assert len(await scene.take()) == 2


async def test_a_new_limit_binds_the_runs_made_from_now_on(scene: Scene) -> None:
    job = await scene.job()
    await scene.ask(job, 2)
    await patch(scene, job, max_concurrency=1)
    await scene.ask(job, 2)
    assert len(await scene.take()) == 3
    assert await scene.states(job) == ["running", "running", "running", "waiting"]


# ── races ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_planner_that_read_the_old_schedule_does_not_follow_it_with_the_new_cursor(scene: Scene) -> None:
    """The planner's cursor is locked after its snapshot: an edit in between shows in the version only."""
    job = await scene.job(schedule={"every": "PT2S"})
    await scene.sql.execute("update jobs set version = version + 1")
    async with scene.db.transaction("test") as connection:
        found = await connection.fetch(step.SQL["these"], [(await scene.who()).tenant_id], [job["id"]])
        rows = [dict(row) | {"version": 1} for row in found]
        turns, _ = await step._turns(connection, rows, rows[0]["now"] + HORIZON)
        assert await step._advance(connection, turns) == set()
    await plan(scene.db, HORIZON)
    assert {version for _, version, _ in await occurrences(scene, job)} == {2}


async def test_edits_planners_and_claims_at_once_run_each_instant_once(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S"}, overlap="allow")
    await scene.employ(W)
    ran: list[datetime] = []
    over = asyncio.Event()

    async def edits() -> None:
        for i in range(500):
            await patch(scene, job, priority=i)
            if i >= 20 and ran:
                break
        over.set()

    async def plans() -> None:
        while not over.is_set():
            await plan(scene.db, HORIZON)

    async def claims() -> None:
        while not over.is_set():
            await scene.db.fetch("engine", "update runs set ready_at = now() where state = 'staged' and random() < 0.1")
            rows = await scene.take(2, W)
            ran.extend(row["scheduled_for"] for row in rows)
            await scene.end(W, *map(end_of, rows))

    await asyncio.gather(edits(), plans(), claims(), plans())
    await plan(scene.db, HORIZON)
    cursor, _ = await trigger(scene, job)
    instants = sorted(ran + [at for at, _, _ in await occurrences(scene, job)])
    first = datetime.fromisoformat(job["created_at"]) + SECOND
    assert cursor is not None and instants == [first + i * SECOND for i in range((cursor - first) // SECOND)]
    assert ran and await scene.missed(job) == []


@pytest.mark.parametrize("seed", range(6))
async def test_no_edit_fires_the_past_again(scene: Scene, seed: int) -> None:
    """Any row of edits, pauses, claims and turns of the planner: no instant is claimed twice, none is skipped without
    a record, and what an edit that moves the schedule leaves to be staged lies behind it."""
    rng = random.Random(seed)
    await scene.api.call("PUT", "/v1/calendars/off", json={"days": ["2020-01-01"]})
    job = await scene.job(schedule={"every": "PT1S"}, overlap="allow")
    await scene.sql.execute("update jobs set created_at = created_at - interval '20 seconds'")
    await scene.sql.execute("update triggers set next_fire_at = next_fire_at - interval '20 seconds'")
    url, claimed, moved_at = f"/v1/jobs/{job['id']}", [], None
    kinds = [
        {"every": "PT1S"},
        {"every": "PT2S"},
        {"cron": "* * * * * *"},
        {"cron": "*/3 * * * * *", "calendar": "off"},
    ]
    for _ in range(25):
        match rng.choice(["move", "edit", "pause", "plan", "plan", "claim", "claim", "calendar"]):
            case "move":
                before, was = await scene.now(), await scene.value("select version from jobs")
                schedule = {"every": None, "cron": None, "calendar": None} | rng.choice(kinds)
                if (await patch(scene, job, schedule=schedule))["version"] > was:
                    moved_at = before
            case "edit":
                await patch(scene, job, priority=rng.randrange(1000))
            case "pause":
                await scene.api.post(f"{url}/pause")
                await scene.api.post(f"{url}/resume")
            case "calendar":
                days = [f"2020-01-0{rng.randrange(1, 9)}"]
                await scene.api.call("PUT", "/v1/calendars/off", json={"days": days})
            case "plan":
                await plan(scene.db, HORIZON)
                unclaimed = "select min(scheduled_for) from runs where attempt = 0"
                first = await scene.value(unclaimed)
                assert moved_at is None or first is None or first > moved_at
            case "claim":
                rows = await scene.take(rng.randrange(1, 4), W)
                claimed += [row["scheduled_for"] for row in rows]
                await scene.end(W, *map(end_of, rows))
    assert len(claimed) == len(set(claimed))
    told = await scene.api.get(f"{url}/occurrences", params={"limit": 500})
    assert "unknown" not in {item["reason"] for item in told["items"]}
    assert [item["from"] for item in told["items"] if item["status"] == "ran"] == [iso(at) for at in sorted(claimed)]
