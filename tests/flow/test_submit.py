"""submit: what is stored, what is refused, and that a call repeated with its key does nothing twice."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import HORIZON, PROCESS, Scene
from tocsin.clock import iso
from tocsin.errors import Conflict, InvalidInput
from tocsin.flow.submit import Stored, job_request, submit_jobs
from tocsin.wire import decode_job_spec, encode


async def plans(scene: Scene, job: dict[str, Any]) -> tuple[list[tuple[str, datetime]], datetime | None]:
    """A job's live runs as (state, scheduled_for), and its cursor."""
    runs = await scene.rows("select state, scheduled_for from runs where job_id = $1", job["id"])
    cursor = await scene.value("select next_fire_at from triggers where job_id = $1", job["id"])
    return [tuple(r) for r in runs], cursor


async def test_a_job_gets_a_run_if_it_is_due_within_the_horizon_and_else_a_cursor(scene: Scene) -> None:
    now = await scene.now()
    soon, later, just_past = now + timedelta(seconds=5), now + timedelta(hours=1), now - timedelta(minutes=10)
    at_once = await scene.job(schedule=None)
    assert at_once["next_run_at"] is not None
    [(state, due)], cursor = await plans(scene, at_once)
    assert (state, cursor) == ("ready", None) and abs(due - now) < timedelta(seconds=2)
    assert await plans(scene, await scene.job(schedule={"at": iso(soon)})) == ([("staged", soon)], None)
    assert await plans(scene, await scene.job(schedule={"at": iso(later)})) == ([], later)
    # A little in the past: runs now, but stands for the instant that was asked for.
    assert await plans(scene, await scene.job(schedule={"at": iso(just_past)})) == ([("ready", just_past)], None)
    delayed = await scene.job(schedule={"delay": "PT10M"})
    created = datetime.fromisoformat(delayed["created_at"])
    assert await plans(scene, delayed) == ([], created + timedelta(minutes=10))
    soon_delayed = await scene.job(schedule={"delay": "PT2S"})
    created = datetime.fromisoformat(soon_delayed["created_at"])
    assert await plans(scene, soon_delayed) == ([("staged", created + timedelta(seconds=2))], None)
    assert await plans(scene, await scene.job(schedule={"manual": True})) == ([], None)


async def test_recurring_jobs_get_a_cursor_and_no_run(scene: Scene) -> None:
    every = await scene.job(schedule={"every": "PT5S"})
    first = datetime.fromisoformat(every["created_at"]) + timedelta(seconds=5)
    assert await plans(scene, every) == ([], first)
    assert every["next_run_at"] == iso(first)
    start = await scene.now() + timedelta(days=1)
    anchored = await scene.job(schedule={"every": "PT1H", "starting_at": iso(start)})
    assert await plans(scene, anchored) == ([], start)
    cron = await scene.job(schedule={"cron": "0 9 * * *", "timezone": "America/New_York"})
    _, cursor = await plans(scene, cron)
    assert cursor is not None and cursor.minute == 0 and cursor.hour in (13, 14)


async def test_the_answer_has_every_default_and_says_the_schedule_in_words(scene: Scene) -> None:
    job = await scene.job(name="full", schedule={"every": "PT5M"})
    assert job["retry"]["max_attempts"] == 4 and job["timeout"] == "PT1H" and job["overlap"] == "skip"
    assert job["schedule"]["description"] == "every 5 minutes"
    assert (job["state"], job["version"], job["tenant"], job["last_run"]) == ("active", 1, "default", None)


@pytest.mark.parametrize(
    ("body", "code", "path"),
    [
        ({"target": {"kind": "http", "url": "file:///etc/passwd"}}, "invalid_input", "target.url"),
        (
            {"target": {"kind": "container", "image": "x", "env": {"TOCSIN_URL": ""}}},
            "invalid_input",
            "target.env.TOCSIN_URL",
        ),
        ({"target": {"kind": "kubernetes", "image": "x", "command": [""]}}, "invalid_input", "target.command[0]"),
        ({"schedule": {"rrule": "FREQ=DAILY;BYHOUR=24"}}, "invalid_rrule", "schedule.rrule"),
        ({"schedule": {"interval": "R/PT1H"}}, "invalid_interval", "schedule.interval"),
        ({"schedule": {"text": "every day"}}, "unclear_text", "schedule.text"),
        ({"schedule": {"delay": "PT1S", "max_runs": 3}}, "invalid", "schedule.max_runs"),
        ({"secrets": {"A": "b"}}, "unknown_secret", "secrets.A"),
        ({"secrets": {"PATH": "b"}}, "invalid_input", "secrets.PATH"),
        ({"pool": "nowhere"}, "unknown_pool", "pool"),
        ({"schedule": {"at": "2020-01-01T00:00:00Z"}}, "in_the_past", "schedule.at"),
        ({"schedule": {"cron": "0 0 31 2 *"}}, "never_fires", "schedule.cron"),
        ({"priority": 1001}, "invalid_input", "priority"),
        ({"schedule": {"manual": True, "every": "PT1M"}}, "invalid_input", "schedule"),
    ],
)
async def test_what_cannot_be_kept_is_refused_and_named(
    still_api: Api, body: dict[str, Any], code: str, path: str
) -> None:
    problem = await still_api.post("/v1/jobs", {"target": PROCESS} | body, expect=422)
    assert problem["code"] == code
    assert path in [error["path"] for error in problem["errors"]]
    assert (await still_api.get("/v1/jobs"))["items"] == []


async def test_an_unknown_field_is_named(still_api: Api) -> None:
    problem = await still_api.post("/v1/jobs", {"target": PROCESS, "prioritty": 3}, expect=422)
    assert "prioritty" in problem["detail"]


async def test_an_integer_that_no_worker_can_be_told_is_refused_wherever_a_client_writes_it(scene: Scene) -> None:
    job = await scene.job(name="named")
    large = 99999999999999999999999
    for path, body in (
        ("/v1/jobs", {"target": {"kind": "http", "url": "https://x.example/", "body": [large]}}),
        ("/v1/jobs", {"target": {"kind": "python", "function": "f", "kwargs": {"n": -large}}, "sensitive": True}),
        (f"/v1/jobs/{job['id']}/runs", {"args": {"n": large}}),
        (f"/v1/jobs/{job['id']}/runs", {"args": {"n": {"m": [large]}}, "sensitive": True}),
        (f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{"args": {"n": large}}]}),
    ):
        problem = await scene.api.post(path, body, expect=422)
        assert problem["code"] == "integer_out_of_range"
    patch = {"target": {"kind": "http", "url": "https://x.example/", "body": large}}
    problem = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json=patch, expect=422)
    assert problem["code"] == "integer_out_of_range"


async def test_a_nul_character_is_refused_wherever_a_client_writes_it(scene: Scene) -> None:
    job = await scene.job(name="named")
    bad = '{"reason": "a\\u0000b"}'
    for path, body in (
        ("/v1/jobs", '{"target": {"kind": "process", "command": ["true"]}, "description": "\\u0000"}'),
        (f"/v1/jobs/{job['id']}/pause", bad),
        (f"/v1/jobs/{job['id']}/cancel", bad),
        (f"/v1/jobs/{job['id']}/runs", '{"args": {"k\\u0000": 1}}'),
    ):
        headers = {"content-type": "application/json"}
        problem = await scene.api.call("POST", path, content=body, headers=headers, expect=422)
        assert problem["code"] == "nul_character"
    # An escaped backslash before the letters is no such character.
    await scene.api.call(
        "POST",
        f"/v1/jobs/{job['id']}/pause",
        content='{"reason": "a\\\\u0000b"}',
        headers={"content-type": "application/json"},
    )
    for path in ("/v1/jobs?q=a%00b", "/v1/jobs?tag=k:%00", "/v1/runs?error_class=%00"):
        await scene.api.get(path, expect=400)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_name_is_unique_among_open_jobs_of_a_tenant_only(scene: Scene) -> None:
    first = await scene.job(name="mine")
    assert (await scene.api.post("/v1/jobs", {"target": PROCESS, "name": "mine"}, expect=409))["code"] == "name_taken"
    await scene.api.post("/v1/tenants", {"slug": "other"})
    await scene.job(await scene.api.with_key("editor", "other"), name="mine")
    await scene.api.delete(f"/v1/jobs/{first['id']}")
    again = await scene.job(name="mine")
    assert again["id"] != first["id"]


async def test_of_two_concurrent_creates_with_one_name_one_wins(still_api: Api) -> None:
    body = {"target": PROCESS, "name": "raced", "schedule": {"manual": True}}
    replies = await asyncio.gather(*(still_api.http.post("/v1/jobs", json=body) for _ in range(6)))
    assert sorted(r.status_code for r in replies) == [201, 409, 409, 409, 409, 409]
    assert len((await still_api.get("/v1/jobs"))["items"]) == 1


async def test_a_taken_name_does_not_touch_its_neighbours_in_the_same_commit(scene: Scene) -> None:
    await scene.job(name="taken")
    who, now = await scene.who(), await scene.now()
    specs = [decode_job_spec(encode({"target": PROCESS, "name": n})) for n in ("left", "taken", "right", "left")]
    requests = [job_request(who, spec, None, now) for spec in specs]
    answers, hints = await submit_jobs(scene.db, scene.node.lanes, requests, HORIZON)
    assert [type(a) for a in answers] == [Stored, Conflict, Stored, Conflict]
    assert hints
    names = await scene.rows("select name from jobs order by name")
    assert [r["name"] for r in names] == ["left", "right", "taken"]
    assert await scene.value("select count(*) from runs") == 2
    assert await scene.value("select count(*) from audit where action = 'job.create'") == 3


async def test_names_in_opposite_order_on_two_nodes_never_deadlock(scene: Scene) -> None:
    who, now = await scene.who(), await scene.now()
    for turn in range(10):
        names = [f"n{turn}-{i}" for i in range(40)]
        batches = [
            [job_request(who, decode_job_spec(encode({"target": PROCESS, "name": n})), None, now) for n in order]
            for order in (names, names[::-1])
        ]
        both = await asyncio.gather(*(submit_jobs(scene.db, scene.node.lanes, batch, HORIZON) for batch in batches))
        stored = [a for answers, _ in both for a in answers if isinstance(a, Stored)]
        assert len(stored) == len(names)


# ── idempotency ──────────────────────────────────────────────────────────────────────────────────────────────────

KEY = {"idempotency-key": "k-1"}


async def test_a_repeat_answers_the_first_reply_and_says_so(scene: Scene) -> None:
    body = {"target": PROCESS, "name": "once", "schedule": {"manual": True}}
    first = await scene.api.http.post("/v1/jobs", json=body, headers=KEY)
    again = await scene.api.http.post("/v1/jobs", json=body, headers=KEY)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.headers.get("idempotent-replayed") is None and again.headers["idempotent-replayed"] == "true"
    assert again.json() == first.json()
    other = await scene.api.http.post("/v1/jobs", json=body | {"priority": 1}, headers=KEY)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    assert await scene.value("select count(*) from audit where action = 'job.create'") == 1


async def test_five_at_once_with_one_key_make_one_job(still_api: Api) -> None:
    body = {"target": PROCESS, "schedule": {"manual": True}}
    replies = await asyncio.gather(*(still_api.http.post("/v1/jobs", json=body, headers=KEY) for _ in range(5)))
    assert {r.status_code for r in replies} == {201}
    assert len({r.json()["id"] for r in replies}) == 1
    assert [r.headers.get("idempotent-replayed") for r in replies].count("true") == 4


async def test_a_refused_call_leaves_no_key(scene: Scene) -> None:
    taken = await scene.job(name="n")
    body = {"target": PROCESS, "name": "n", "schedule": {"manual": True}}
    replies = await asyncio.gather(*(scene.api.http.post("/v1/jobs", json=body, headers=KEY) for _ in range(5)))
    assert [r.status_code for r in replies] == [409] * 5
    assert await scene.value("select count(*) from idempotency") == 0
    await scene.api.delete(f"/v1/jobs/{taken['id']}")
    assert (await scene.api.http.post("/v1/jobs", json=body, headers=KEY)).status_code == 201


async def test_a_key_belongs_to_its_tenant(scene: Scene) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("editor", "other")
    body = {"target": PROCESS, "schedule": {"manual": True}}
    mine = await scene.api.http.post("/v1/jobs", json=body, headers=KEY)
    theirs = await other.http.post("/v1/jobs", json=body | {"priority": 3}, headers=KEY)
    assert theirs.status_code == 201 and theirs.json()["id"] != mine.json()["id"]


async def test_an_unusable_key_is_refused(still_api: Api) -> None:
    for key in ("", "x" * 256, "tab\there"):
        await still_api.post("/v1/jobs", {"target": PROCESS}, headers={"idempotency-key": key}, expect=422)


async def test_a_batch_of_runs_is_replayed_with_all_its_ids(scene: Scene) -> None:
    job = await scene.job()
    path, body = f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{"args": {"i": i}} for i in range(20)]}
    replies = await asyncio.gather(*(scene.api.http.post(path, json=body, headers=KEY) for _ in range(3)))
    assert [r.status_code for r in replies] == [202] * 3
    ids = [tuple(r.json()["ids"]) for r in replies]
    assert len(set(ids)) == 1 and len(set(ids[0])) == 20
    assert await scene.value("select count(*) from runs") == 20
    assert await scene.value("select count(*) from audit where action = 'run.create'") == 1


# ── runs by hand ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_by_hand_has_its_own_time_priority_and_args(scene: Scene) -> None:
    job = await scene.job(priority=400)
    at = await scene.now() + timedelta(hours=2)
    run = await scene.api.post(f"/v1/jobs/{job['id']}/runs", {"at": iso(at), "args": {"a": [1]}, "priority": 900})
    assert (run["state"], run["scheduled_for"], run["args"], run["priority"]) == ("staged", iso(at), {"a": [1]}, 900)
    now = await scene.api.post(f"/v1/jobs/{job['id']}/runs")
    assert (now["state"], now["priority"], now["args"], now["trigger"]) == ("ready", 400, None, "api")
    row = await scene.row("select ready_at, order_key from runs where id = $1", run["id"])
    assert row["ready_at"] - row["order_key"] == timedelta(milliseconds=400 * 20)


async def test_ended_foreign_and_unknown_jobs_take_no_runs(scene: Scene) -> None:
    job = await scene.job()
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("operator", "other")
    await other.post(f"/v1/jobs/{job['id']}/runs", expect=404)
    await scene.api.post("/v1/jobs/019a0000-0000-7000-8000-000000000000/runs", expect=404)
    await scene.api.post("/v1/jobs/not-an-id/runs", expect=404)
    for state in ("completed", "cancelled"):
        await scene.sql.execute("update jobs set state = $1 where id = $2", state, job["id"])
        replies = await asyncio.gather(
            *(scene.api.http.post(f"/v1/jobs/{job['id']}/runs", json={}, headers=KEY) for _ in range(3))
        )
        assert {(r.status_code, r.json()["code"]) for r in replies} == {(409, f"job_{state}")}
    assert await scene.value("select count(*) from runs") == 0
    assert await scene.value("select count(*) from idempotency") == 0


async def test_a_check_names_what_is_wrong_before_anything_is_stored(scene: Scene) -> None:
    who, now = await scene.who(), await scene.now()
    with pytest.raises(InvalidInput):
        job_request(who, decode_job_spec(encode({"target": PROCESS, "timeout": "PT0S"})), None, now)
