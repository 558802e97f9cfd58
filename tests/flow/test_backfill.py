"""backfill: what is asked for is counted, checked and kept; paused, resumed and cancelled."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene, end_of
from tests.flow.old import DAY, Old
from tests.flow.test_fill import DAILY, NEW_YEAR, ask, days, drain, logical, shown, turn
from tests.node.test_scopes import key_for
from tocsin.flow import backfill as step

W = str(uuid.uuid4())
JANUARY = {"from": "2026-01-01T00:00:00Z", "to": "2026-02-01T00:00:00Z"}


async def refused(scene: Scene, job: dict[str, Any], expect: int = 422, **request: Any) -> str:
    """The code of what is wrong with it."""
    reply = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", JANUARY | request, expect=expect)
    return reply["errors"][0]["code"] if "errors" in reply else reply["code"]  # type: ignore[no-any-return]


async def do(scene: Scene, verb: str, backfill: dict[str, Any], expect: int = 200, **body: Any) -> dict[str, Any]:
    return await scene.api.post(f"/v1/backfills/{backfill['id']}/{verb}", body, expect=expect)  # type: ignore[no-any-return]


# ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_dry_run_counts_and_stores_nothing(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    told = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", JANUARY | {"dry_run": True}, expect=200)
    assert (told["dry_run"], told["total"], told["too_many"]) == (True, 31, False)
    assert told["first"] == [f"2026-01-0{n}T00:00:00.000000Z" for n in range(1, 6)]
    assert told["last"] == "2026-01-31T00:00:00.000000Z"
    assert (await scene.api.get("/v1/backfills"))["items"] == []
    assert await scene.value("select count(*) from audit where action like 'backfill%'") == 0


async def test_a_year_of_minutes_is_counted_and_refused(scene: Scene) -> None:
    job = await scene.job(schedule={"cron": "* * * * *"})
    year = {"from": "2025-01-01T00:00:00Z", "to": "2026-01-01T00:00:00Z"}
    told = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", year | {"dry_run": True}, expect=200)
    assert (told["total"], told["too_many"], told["last"]) == (525_600, True, "2025-12-31T23:59:00.000000Z")
    assert await refused(scene, job, **year) == "too_many"
    assert await scene.states(job) == []


async def test_what_is_asked_for_is_kept_and_told(scene: Scene) -> None:
    job = await scene.job(name="report", schedule=DAILY)
    made = await ask(scene, job, 3, max_concurrency=2, priority=300, args={"a": 1})
    expected = {"job_id": job["id"], "job_name": "report", "state": "running", "total": 3, "made": 0, "live": 0}
    expected |= {"from": "2026-01-01T00:00:00.000000Z", "to": "2026-01-04T00:00:00.000000Z", "args": {"a": 1}}
    expected |= {"max_concurrency": 2, "priority": 300, "next_at": "2026-01-01T00:00:00.000000Z", "finished_at": None}
    assert expected.items() <= made.items()
    assert await shown(scene, made) == made
    [entry] = await scene.rows("select detail::jsonb ->> 'runs' as runs from audit where action = 'backfill.create'")
    assert entry["runs"] == "3"
    assert await scene.states(job) == [], "the call itself makes none"


async def test_what_cannot_be_filled_is_refused_with_what_to_do(scene: Scene) -> None:
    daily, manual = await scene.job(schedule=DAILY), await scene.job()
    assert await refused(scene, daily, to="2025-01-01T00:00:00Z") == "invalid_range"
    assert await refused(scene, daily, **{"from": "2010-01-01T00:00:00Z"}) == "invalid_range"
    assert await refused(scene, daily, to="2999-01-01T00:00:00Z", **{"from": "2998-01-01T00:00:00Z"}) == "in_the_future"
    assert await refused(scene, daily, to="2026-01-01T12:00:00Z", **{"from": "2026-01-01T11:00:00Z"}) == "nothing_owed"
    assert await refused(scene, manual) == "no_schedule"
    assert await refused(scene, daily, schedule={"at": "2026-01-01T00:00:00Z"}) == "no_schedule"
    assert await refused(scene, daily, args={"large": "x" * 40_000}) == "too_large"
    for wrong in ({"max_concurrency": 0}, {"max_concurrency": 101}, {"priority": 1001}, {"rerun": "some"}):
        await refused(scene, daily, **wrong)
    await scene.api.delete(f"/v1/jobs/{daily['id']}")
    assert await refused(scene, daily, 409) == "job_cancelled"
    await scene.api.post("/v1/jobs/019a0000-0000-7000-8000-000000000000/backfill", JANUARY, expect=404)
    assert await scene.value("select count(*) from backfills") == 0


async def test_a_job_without_a_schedule_is_filled_by_one_that_is_given(scene: Scene) -> None:
    job = await scene.job()
    made = await ask(scene, job, 2, schedule=DAILY | {"timezone": "Europe/Berlin"})
    assert made["next_at"] == "2026-01-01T23:00:00.000000Z"
    assert len(await drain(scene)) == 2


async def test_a_repeat_with_the_same_key_answers_the_first_and_fills_once(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    key = {"headers": {"idempotency-key": "january"}}
    made = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", JANUARY, expect=202, **key)
    again = await scene.api.http.post(f"/v1/jobs/{job['id']}/backfill", json=JANUARY, **key)
    assert (again.status_code, again.headers["idempotent-replayed"], again.json()["id"]) == (202, "true", made["id"])
    other = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", JANUARY | {"priority": 1}, expect=422, **key)
    assert other["code"] == "idempotency_mismatch"


async def test_the_same_range_is_not_filled_twice_at_a_time(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    url = f"/v1/jobs/{job['id']}/backfill"
    tried = await asyncio.gather(*(scene.api.http.post(url, json=JANUARY) for _ in range(4)))
    assert sorted(reply.status_code for reply in tried) == [202, 409, 409, 409]
    assert {reply.json().get("code") for reply in tried} == {None, "backfill_overlaps"}
    assert await refused(scene, job, 409, to="2026-01-02T00:00:00Z") == "backfill_overlaps"
    await scene.api.post(url, JANUARY | {"args": {"other": True}}, expect=202)
    await scene.api.post(url, {"from": JANUARY["to"], "to": "2026-02-03T00:00:00Z"}, expect=202)
    [first] = [reply.json() for reply in tried if reply.status_code == 202]
    await do(scene, "cancel", first)
    await scene.api.post(url, JANUARY, expect=202)


async def test_what_never_ran_or_never_succeeded_alone(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, retry={"max_attempts": 1})
    await ask(scene, job, 4, max_concurrency=4)
    await turn(scene)
    taken = await scene.take(worker=W)
    outcomes = ["succeeded", "failed", "succeeded", "failed"]
    await scene.end(W, *(end_of(row, how) for row, how in zip(taken, outcomes, strict=True)))
    again = await scene.api.post(f"/v1/runs/{taken[3]['id']}/retry")
    [row] = await scene.take(worker=W)
    assert row["id"] == again["id"]
    assert await drain(scene) == []
    # The fourth is under way again: whatever becomes of it, nobody is to run it beside that.
    assert await left(scene, job, 6, "missing") == days(4, 5)
    assert await left(scene, job, 6, "failed") == days(1, 4, 5)
    await scene.end(W, end_of(row))
    assert await left(scene, job, 6, "failed") == days(1, 4, 5), "what was tried again has succeeded"
    made = await ask(scene, job, 6, rerun="failed", max_concurrency=2)
    assert (made["rerun"], made["total"], made["next_at"]) == ("failed", 3, "2026-01-02T00:00:00.000000Z")
    assert await drain(scene) == days(1, 4, 5)
    done = await shown(scene, made)
    assert (done["state"], done["made"], done["succeeded"]) == ("completed", 3, 3)
    assert await refused(scene, job, to="2026-01-07T00:00:00Z", rerun="failed") == "nothing_owed"
    assert await left(scene, job, 6, "all") == days(*range(5))


async def left(scene: Scene, job: dict[str, Any], until: int, rerun: str) -> list[datetime]:
    """The first that there are in so many days, by a dry run."""
    body = {"from": NEW_YEAR.isoformat(), "to": days(until)[0].isoformat(), "rerun": rerun, "dry_run": True}
    told = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", body, expect=200)
    assert told["total"] == len(told["first"]) or rerun == "all"
    return [datetime.fromisoformat(at) for at in told["first"]]


async def test_what_is_archived_has_run_too_and_what_is_kept_no_longer_is_not_called_missing(
    scene: Scene, old: Old
) -> None:
    job = await old.job()
    await scene.sql.execute("update jobs set created_at = '2026-01-01'")
    for back, state in ((0, "succeeded"), (1, "dead")):
        day = DAY - timedelta(days=back)
        await old.make_day(day)
        [run_id] = await old.rows(job, day, 1, state=state)
        await scene.sql.execute(
            "update history set trigger = 'schedule', scheduled_for = $2 where run_id = $1",
            *(run_id, datetime.combine(day, time(), UTC)),
        )
    assert await old.archive() and not await old.hot()
    march = {"from": "2026-03-08T00:00:00Z", "to": "2026-03-12T00:00:00Z", "schedule": DAILY}
    for rerun, expected in (("missing", (8, 11)), ("failed", (8, 9, 11)), ("all", (8, 9, 10, 11))):
        body = march | {"rerun": rerun, "dry_run": True}
        told = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", body, expect=200)
        assert [int(at[8:10]) for at in told["first"]] == list(expected), rerun
    await scene.sql.execute("update tenants set runs_days = 30")
    assert await refused(scene, job, **march, rerun="missing") == "expired"
    assert (await scene.api.post(f"/v1/jobs/{job['id']}/backfill", march, expect=202))["rerun"] == "all"


async def test_a_tenant_has_so_many_open_at_a_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MOST_OPEN", 2)
    job = await scene.job(schedule=DAILY)
    for n in range(2):
        await ask(scene, job, args={"n": n})
    assert await refused(scene, job, 409) == "too_many_backfills"


async def test_they_are_listed_newest_first_by_job_and_state(scene: Scene) -> None:
    one, two = await scene.job(schedule=DAILY), await scene.job(schedule=DAILY)
    first, second = await ask(scene, one), await ask(scene, two)
    third = await ask(scene, one, args={})

    async def listed(query: str) -> list[str]:
        return [item["id"] for item in (await scene.api.get(f"/v1/backfills{query}"))["items"]]

    assert await listed("") == [third["id"], second["id"], first["id"]]
    assert await listed(f"?job={one['id']}") == [third["id"], first["id"]]
    await do(scene, "pause", second)
    assert await listed("?state=paused") == [second["id"]]
    page = await scene.api.get("/v1/backfills?limit=2")
    assert await listed(f"?cursor={page['next_cursor']}") == [first["id"]]
    await scene.api.get("/v1/backfills?state=odd", expect=422)


async def test_a_key_that_is_kept_to_some_jobs_sees_no_others_backfills(scene: Scene) -> None:
    inside, beyond = [await scene.job(name=name, schedule=DAILY) for name in ("billing-a", "payroll")]
    mine, theirs = await ask(scene, inside), await ask(scene, beyond)
    api = await key_for(scene, "operator", jobs=["billing-*"])
    assert [item["id"] for item in (await api.get("/v1/backfills"))["items"]] == [mine["id"]]
    await api.get(f"/v1/backfills/{theirs['id']}", expect=404)
    for verb in ("pause", "resume", "cancel"):
        await api.post(f"/v1/backfills/{theirs['id']}/{verb}", expect=404)
    assert (await shown(scene, theirs))["state"] == "running"
    assert (await api.post(f"/v1/backfills/{mine['id']}/cancel"))["state"] == "cancelled"


# ── pause, resume, cancel ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_paused_one_makes_no_more_until_it_is_resumed(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    backfill = await ask(scene, job, 3)
    await turn(scene)
    assert (await do(scene, "pause", backfill, reason="lunch"))["state"] == "paused"
    assert (await do(scene, "pause", backfill))["state"] == "paused", "idempotent"
    assert await drain(scene) == days(0), "what was made goes on"
    assert (await shown(scene, backfill))["succeeded"] == 1
    assert (await do(scene, "resume", backfill))["state"] == "running"
    assert await drain(scene) == days(1, 2)
    actions = await scene.rows("select action from audit where target = $1 order by id", f"backfill:{backfill['id']}")
    assert [row[0] for row in actions] == ["backfill.create", "backfill.pause", "backfill.resume"]
    for verb in ("pause", "resume"):
        assert (await do(scene, verb, backfill, 409))["code"] == "backfill_ended"


async def test_one_that_is_paused_at_its_end_completes(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    backfill = await ask(scene, job, 1)
    await turn(scene)
    await do(scene, "pause", backfill)
    await drain(scene)
    assert (await shown(scene, backfill))["state"] == "completed"


async def test_a_cancelled_one_ends_with_its_runs(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    other, backfill = await ask(scene, job, 9, args={"n": 1}), await ask(scene, job, 9, max_concurrency=3)
    await turn(scene)
    by_hand = await scene.ask(job)
    mine = await scene.rows("select id::text from runs where backfill_id = $1 order by id", backfill["id"])
    await scene.sql.execute("update runs set order_key = order_key - interval '1 hour' where id = $1", mine[0][0])
    [run] = await scene.take(1, W)
    told = await do(scene, "cancel", backfill, reason="wrong")
    assert (told["state"], told["made"], told["live"], told["cancelled"]) == ("cancelled", 3, 1, 2)
    assert (await scene.run(run["id"]))["state"] == "stopping"
    left = {row[0] for row in await scene.rows("select id::text from runs where job_id = $1", job["id"])}
    assert len(left) == 3 and left > {*by_hand, run["id"]}, "others' runs go on"
    await scene.end(W, end_of(run, "cancelled"))
    await turn(scene)
    told = await do(scene, "cancel", backfill)
    assert (told["state"], told["live"], told["cancelled"]) == ("cancelled", 0, 3)
    assert (await shown(scene, other))["state"] == "running"
    assert await scene.value("select count(*) from audit where action = 'backfill.cancel'") == 1


async def test_what_runs_may_be_left_and_is_counted_as_it_ends(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, max_concurrency=1)
    backfill = await ask(scene, job, 9, max_concurrency=2)
    await turn(scene)
    [run] = await scene.take(worker=W)
    await do(scene, "cancel", backfill, running="leave")
    assert (await scene.run(run["id"]))["state"] == "running"
    await scene.end(W, end_of(run))
    await turn(scene)
    told = await shown(scene, backfill)
    assert (told["state"], told["made"], told["succeeded"], told["cancelled"]) == ("cancelled", 2, 1, 1)
    assert await logical(scene, job) == []


async def test_a_cancel_frees_the_limit_for_those_that_wait(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, concurrency_key={"key": "one", "max": 1})
    backfill = await ask(scene, job, 2, max_concurrency=2)
    await turn(scene)
    [run] = await scene.take(worker=W)
    [by_hand] = await scene.ask(job)
    assert await scene.take(worker=W) == []
    await do(scene, "cancel", backfill)
    await scene.end(W, end_of(run, "cancelled"))
    [taken] = await scene.take(worker=W)
    assert taken["id"] == by_hand
