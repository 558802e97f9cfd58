"""dead: dead letters and running ended runs again."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime
from itertools import pairwise
from typing import Any

from tests.flow.kit import Scene, end_of

W = str(uuid.uuid4())
ONE_TRY = {"max_attempts": 1}


async def die(scene: Scene, job: dict[str, Any], error: str = "ValueError", **request: Any) -> str:
    """A dead run of the job."""
    [run_id] = await scene.ask(job, **request)
    return await die_held(scene, run_id, error)


async def die_held(scene: Scene, run_id: str, error: str = "ValueError") -> str:
    [key] = await scene.taken(W)
    assert key[0] == run_id
    await scene.end(W, end_of(key, "failed", error=error))
    return run_id


async def test_dead_letters_are_listed_newest_first_and_by_job_and_class(scene: Scene) -> None:
    one, two = await scene.job(name="one", retry=ONE_TRY), await scene.job(retry=ONE_TRY)
    first = await die(scene, one, args={"n": 1})
    second = await die(scene, two, "OSError")
    third = await die(scene, one)
    ids = [letter["id"] for letter in (await scene.api.get("/v1/dead-letters"))["items"]]
    assert ids == [third, second, first]
    by_job = (await scene.api.get(f"/v1/dead-letters?job={one['id']}"))["items"]
    assert [letter["id"] for letter in by_job] == [third, first]
    assert (by_job[1]["args"], by_job[1]["job_name"], by_job[1]["error"]["class"]) == ({"n": 1}, "one", "ValueError")
    by_class = await scene.api.get("/v1/dead-letters?error_class=OSError")
    assert [letter["id"] for letter in by_class["items"]] == [second]
    page = await scene.api.get("/v1/dead-letters?limit=2")
    rest = await scene.api.get(f"/v1/dead-letters?limit=2&cursor={page['next_cursor']}")
    assert [letter["id"] for letter in page["items"] + rest["items"]] == ids and rest["next_cursor"] is None


async def test_redrive_makes_a_new_run_with_the_same_args(scene: Scene) -> None:
    origin = await die(scene, await scene.job(retry=ONE_TRY), args={"a": 1}, priority=800)
    headers = {"idempotency-key": "r"}
    first = await scene.api.post("/v1/dead-letters/redrive", {"ids": [origin]}, headers=headers)
    again = await scene.api.post("/v1/dead-letters/redrive", {"ids": [origin]}, headers=headers)
    assert first == again
    [made] = first["items"]
    run = await scene.run(made["id"])
    assert (run["state"], run["trigger"], run["origin_run_id"]) == ("ready", "redrive", origin)
    assert (run["args"], run["priority"], run["failures"]) == ({"a": 1}, 800, 0)
    assert (await scene.api.get("/v1/dead-letters"))["items"] == []
    assert (await scene.run(origin))["state"] == "dead", "terminal is final"
    await scene.api.post("/v1/dead-letters/redrive", {"ids": [origin]}, expect=404)


async def test_redrive_works_on_a_completed_one_time_job_and_not_on_a_cancelled_one(scene: Scene) -> None:
    once = await scene.job(schedule=None, retry=ONE_TRY)
    origin = await die_held(scene, str(await scene.value("select id from runs")))
    assert (await scene.api.get(f"/v1/jobs/{once['id']}"))["state"] == "completed"
    await scene.api.post("/v1/dead-letters/redrive", {"ids": [origin]})
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key))
    assert (await scene.run(key[0]))["state"] == "succeeded"
    job = await scene.job(retry=ONE_TRY)
    letters = [await die(scene, job) for _ in range(2)]
    await scene.api.post(f"/v1/jobs/{job['id']}/cancel")
    refused = await scene.api.post("/v1/dead-letters/redrive", {"ids": letters}, expect=409)
    assert refused["code"] == "job_cancelled"
    assert len((await scene.api.get("/v1/dead-letters"))["items"]) == 2, "they stay"
    await scene.api.post(f"/v1/runs/{letters[0]}/retry", expect=409)


async def test_redrive_is_all_or_nothing(scene: Scene) -> None:
    letter = await die(scene, await scene.job(retry=ONE_TRY))
    unknown = "019a0000-0000-7000-8000-000000000000"
    for verb in ("redrive", "discard"):
        await scene.api.post(f"/v1/dead-letters/{verb}", {"ids": [letter, unknown]}, expect=404)
    assert [x["id"] for x in (await scene.api.get("/v1/dead-letters"))["items"]] == [letter]
    assert await scene.value("select count(*) from runs") == 0


async def test_discard_drops_the_letter_and_keeps_the_history(scene: Scene) -> None:
    letter = await die(scene, await scene.job(retry=ONE_TRY))
    assert await scene.api.post("/v1/dead-letters/discard", {"ids": [letter]}) == {"discarded": 1, "remaining": 0}
    assert (await scene.api.get("/v1/dead-letters"))["items"] == []
    assert (await scene.run(letter))["state"] == "dead"


async def test_any_ended_run_can_be_run_again_and_a_live_one_cannot(scene: Scene) -> None:
    job = await scene.job()
    [origin] = await scene.ask(job, args={"x": 2}, priority=10)
    await scene.api.post(f"/v1/runs/{origin}/retry", expect=404)
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key))
    headers = {"idempotency-key": "again"}
    made = [await scene.api.post(f"/v1/runs/{origin}/retry", headers=headers, expect=202) for _ in range(2)]
    assert made[0]["id"] == made[1]["id"] != origin
    assert (made[0]["trigger"], made[0]["origin_run_id"], made[0]["args"]) == ("retry", origin, {"x": 2})
    assert await scene.value("select count(*) from runs") == 1
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    await scene.api.post(f"/v1/runs/{origin}/retry", expect=202)
    assert await scene.take() == [], "a run again on a paused job waits like any run by hand"


async def test_redrive_by_filter_takes_the_oldest_that_match_and_spreads_them(scene: Scene) -> None:
    flaky, other = await scene.job(retry=ONE_TRY, tags={"team": "a"}), await scene.job(retry=ONE_TRY)
    mine = [await die(scene, flaky, "OSError", args={"n": n}) for n in range(4)]
    kept = [await die(scene, flaky, "ValueError"), await die(scene, other, "OSError")]
    asked = {"filter": {"job": flaky["id"], "error_class": "OSError", "tag": {"team": "a"}}, "rate": "60/min"}
    headers = {"idempotency-key": "by-filter"}
    done = await scene.api.post("/v1/dead-letters/redrive", asked, headers=headers)
    assert done["remaining"] == 0 and len(done["items"]) == 4
    assert await scene.api.post("/v1/dead-letters/redrive", asked, headers=headers) == done
    runs = [await scene.run(item["id"]) for item in done["items"]]
    assert [run["origin_run_id"] for run in runs] == mine
    assert [run["state"] for run in runs] == ["ready", "staged", "staged", "staged"]
    due = [datetime.fromisoformat(run["ready_at"]) for run in runs]
    assert [round((b - a).total_seconds()) for a, b in pairwise(due)] == [1, 1, 1]
    left = [letter["id"] for letter in (await scene.api.get("/v1/dead-letters"))["items"]]
    assert sorted(left) == sorted(kept)


async def test_discard_by_filter_and_what_cannot_be_asked_for(scene: Scene) -> None:
    job = await scene.job(retry=ONE_TRY)
    await die(scene, job, "OSError")
    await die(scene, job, "ValueError")
    done = await scene.api.post("/v1/dead-letters/discard", {"filter": {"error_class": "OSError"}})
    assert done == {"discarded": 1, "remaining": 0}
    for odd in ({}, {"ids": ["x"], "filter": {}}, {"filter": {}, "rate": "0/s"}, {"filter": {"jobs": "x"}}):
        await scene.api.post("/v1/dead-letters/redrive", odd, expect=422)
    await scene.api.post("/v1/dead-letters/discard", {"filter": {}, "rate": "1/s"}, expect=422)
    await scene.api.post(f"/v1/jobs/{job['id']}/cancel")
    assert (await scene.api.post("/v1/dead-letters/redrive", {"filter": {}}))["remaining"] == 1, "its job is cancelled"
    assert (await scene.api.post("/v1/dead-letters/discard", {"filter": {}})) == {"discarded": 1, "remaining": 0}


async def test_five_redrives_at_once_with_one_key_have_one_effect(scene: Scene) -> None:
    job = await scene.job(retry=ONE_TRY)
    letters = [await die(scene, job) for _ in range(3)]
    for body in ({"ids": letters[:1]}, {"filter": {}}):
        headers = {"idempotency-key": f"at once {len(body)} {'ids' in body}"}
        told = await asyncio.gather(
            *(scene.api.post("/v1/dead-letters/redrive", body, headers=headers) for _ in range(5))
        )
        assert all(one == told[0] for one in told)
    assert await scene.value("select count(*) from runs where trigger = 'redrive'") == 3
