"""calendars: kept by name, gone by by jobs, changed under them without firing the past again."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, PROCESS, Scene, end_of
from tests.flow.test_occurrences import W, age, brief, occurrences
from tocsin.flow import replan
from tocsin.flow.plan import plan
from tocsin.model.ical import days_of

DAY = timedelta(days=1)
ICAL = """BEGIN:VCALENDAR
BEGIN:VEVENT
DTSTART;VALUE=DATE:20261225
RRULE:FREQ=YEARLY;COUNT=2
END:VEVENT
END:VCALENDAR
"""
EVENT = "BEGIN:VEVENT\nDTSTART:20200101\nRRULE:FREQ=DAILY;COUNT=9000\nEND:VEVENT\n"


async def put(scene: Scene, name: str, expect: int | None = None, headers: Any = None, **body: Any) -> Any:
    return await scene.api.call("PUT", f"/v1/calendars/{name}", json=body, expect=expect, headers=headers)


async def cursor(scene: Scene, job: dict[str, Any]) -> datetime:
    return await scene.value("select coalesce(next_fire_at, held_at) from triggers where job_id = $1", job["id"])  # type: ignore[no-any-return]


async def days_from_now(scene: Scene, *ahead: int) -> list[str]:
    today = (await scene.now()).date()
    return [(today + n * DAY).isoformat() for n in ahead]


def noon(day: str) -> datetime:
    return datetime.combine(date.fromisoformat(day), datetime.min.time(), UTC) + timedelta(hours=12)


# ── the calendars themselves ─────────────────────────────────────────────────────────────────────────────────────


async def test_put_get_list_delete(scene: Scene) -> None:
    made = await put(scene, "holidays", 201, days=["2027-01-01", "2026-12-25", "2026-12-25"], weekdays=["SUN", "SAT"])
    assert (made["days"], made["weekdays"], made["mode"]) == (["2026-12-25", "2027-01-01"], ["SAT", "SUN"], "skip")
    assert made["version"] == 1
    same = await put(scene, "holidays", 200, weekdays=["SAT", "SUN"], days=["2026-12-25", "2027-01-01"])
    assert same == made, "the same again is no new version"
    other = await put(scene, "holidays", 200, {"if-match": '"1"'}, weekdays=["SUN"], mode="only")
    assert (other["version"], other["days"], other["mode"]) == (2, [], "only")
    assert (await put(scene, "holidays", 412, {"if-match": '"1"'}, weekdays=["SUN"]))["code"] == "precondition_failed"
    await put(scene, "another", 201, weekdays=["MON"])
    page = await scene.api.get("/v1/calendars?limit=1")
    assert [c["name"] for c in page["items"]] == ["another"]
    rest = await scene.api.get(f"/v1/calendars?cursor={page['next_cursor']}")
    assert (rest["items"], rest["next_cursor"]) == ([other], None)
    assert await scene.api.get("/v1/calendars/holidays") == other
    await scene.api.delete("/v1/calendars/another", expect=204)
    await scene.api.delete("/v1/calendars/another", expect=404)
    await scene.api.get("/v1/calendars/another", expect=404)
    done = await scene.rows("select action, target from audit where action like 'calendar.%' order by id")
    assert [tuple(row) for row in done] == [
        ("calendar.put", "calendar:holidays"),
        ("calendar.put", "calendar:holidays"),
        ("calendar.put", "calendar:another"),
        ("calendar.delete", "calendar:another"),
    ]


async def test_from_an_icalendar_file(scene: Scene) -> None:
    days = ["2026-12-25", "2027-12-25"]
    assert (await put(scene, "a", ical=ICAL, days=["2026-05-01"]))["days"] == ["2026-05-01", *days]
    reply = await scene.api.http.put(
        "/v1/calendars/b?mode=only", content=ICAL, headers={"content-type": "text/calendar; charset=utf-8"}
    )
    assert (reply.status_code, reply.json()["days"], reply.json()["mode"]) == (201, days, "only")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid"),
        ({"days": ["2026-02-30"]}, "invalid_input"),
        ({"days": ["1812-12-25"]}, "invalid"),
        ({"weekdays": ["Monday"]}, "invalid_input"),
        ({"weekdays": ["MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"]}, "invalid"),
        ({"days": ["2026-12-25"], "mode": "sometimes"}, "invalid_input"),
        ({"ical": "hello"}, "invalid_ical"),
        ({"ical": ICAL.replace("YEARLY;COUNT=2", "SECONDLY")}, "invalid_ical"),
        ({"ical": ICAL.replace("YEARLY;COUNT=2", "DAILY;BYHOUR=1,2")}, "invalid_ical"),
        ({"ical": ICAL.replace("END:VC", EVENT * 300 + "END:VC")}, "invalid_ical"),
        ({"days": ["2026-12-25"], "colour": "red"}, "invalid_input"),
    ],
)
async def test_what_is_refused_leaves_nothing(scene: Scene, body: dict[str, Any], code: str) -> None:
    assert (await put(scene, "a", 422, **body))["code"] == code
    assert await scene.value("select count(*) from calendars") == 0


async def test_a_file_is_expanded_beside_the_event_loop(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call is answered while a file is being expanded."""
    begun, answered = threading.Event(), threading.Event()

    def slowly(*args: Any) -> list[date]:
        begun.set()
        assert answered.wait(60), "the event loop stood still meanwhile"
        return days_of(*args)

    monkeypatch.setattr("tocsin.node.server.routes.calendars.days_of", slowly)
    under_way = asyncio.create_task(put(scene, "a", 201, ical=ICAL))
    await asyncio.to_thread(begun.wait, 60)
    assert (await scene.api.get("/v1/calendars"))["items"] == []
    answered.set()
    assert (await under_way)["days"] == ["2026-12-25", "2027-12-25"]


async def test_the_same_key_is_one_call_and_tenants_have_their_own(scene: Scene) -> None:
    headers = {"idempotency-key": "k"}
    replies = await asyncio.gather(
        *(scene.api.http.put("/v1/calendars/a", json={"weekdays": ["SUN"]}, headers=headers) for _ in range(4))
    )
    assert {(r.status_code, r.json()["version"]) for r in replies} == {(201, 1)}
    assert sorted("idempotent-replayed" in r.headers for r in replies) == [False, True, True, True]
    await scene.api.post("/v1/tenants", {"slug": "else"})
    stranger = await scene.api.with_key("editor", "else")
    await stranger.get("/v1/calendars/a", expect=404)
    assert (await stranger.get("/v1/calendars"))["items"] == []
    body = {"target": PROCESS, "schedule": {"cron": "0 9 * * *", "calendar": "a"}}
    assert (await stranger.post("/v1/jobs", body, expect=422))["code"] == "unknown_calendar"


# ── jobs that go by one ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_goes_by_its_calendar_from_its_first_cursor_on(scene: Scene) -> None:
    skipped = await days_from_now(scene, 0, 1, 2)
    await put(scene, "off", days=skipped)
    [open_day] = await days_from_now(scene, 3)
    job = await scene.job(schedule={"cron": "0 12 * * *", "calendar": "off"})
    assert await cursor(scene, job) == noon(open_day)
    assert job["next_run_at"].startswith(open_day) and "by the calendar off" in job["schedule"]["description"]
    batch = await scene.api.post("/v1/jobs/batch", {"jobs": [{"target": PROCESS, "schedule": job_schedule("off")}]})
    assert batch["items"][0]["next_run_at"].startswith(open_day)
    preview = await scene.api.post("/v1/schedules/preview", {"schedule": job_schedule("off"), "count": 1})
    assert preview["runs"][0].startswith(open_day)
    await plan(scene.db, noon(open_day) - await scene.now() + timedelta(hours=1))
    [staged] = await scene.rows("select scheduled_for from runs where job_id = $1", job["id"])
    assert staged["scheduled_for"] == noon(open_day)


def job_schedule(calendar: str) -> dict[str, Any]:
    return {"cron": "0 12 * * *", "calendar": calendar}


async def test_calendars_that_are_not_there_or_leave_nothing(scene: Scene) -> None:
    await put(scene, "past", mode="only", days=["2020-01-01"])
    await put(scene, "later", mode="next_business_day", weekdays=["SUN"])
    job = await scene.job(schedule={"cron": "0 12 * * *"})
    for schedule, code in (
        (job_schedule("nowhere"), "unknown_calendar"),
        (job_schedule("past"), "never_fires"),
        ({"cron": "* * * * *", "calendar": "later"}, "too_often"),
        ({"delay": "PT1H", "calendar": "later"}, "invalid"),
    ):
        body = {"target": PROCESS, "schedule": schedule}
        assert (await scene.api.post("/v1/jobs", body, expect=422))["code"] == code
        assert (await scene.api.post("/v1/schedules/preview", {"schedule": schedule}, expect=422))["code"] == code
        if "delay" not in schedule:
            in_batch = await scene.api.post("/v1/jobs/batch", {"jobs": [body]}, expect=422)
            assert (in_batch["code"], in_batch["errors"][0]["path"]) == (code, "jobs[0].schedule.calendar")
            edited = {"schedule": schedule}
            url = f"/v1/jobs/{job['id']}"
            assert (await scene.api.call("PATCH", url, json=edited, expect=422))["code"] == code
    assert await scene.value("select count(*) from jobs") == 1
    assert await scene.value("select count(*) from calendar_uses") == 0


async def test_a_calendar_in_use_is_not_deleted(scene: Scene) -> None:
    await put(scene, "off", weekdays=["SUN"])
    job = await scene.job(name="nightly", schedule=job_schedule("off"))
    refused = await scene.api.delete("/v1/calendars/off", expect=409)
    assert (refused["code"], "nightly" in refused["detail"]) == ("calendar_in_use", True)
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"schedule": {"calendar": None}})
    await scene.api.delete("/v1/calendars/off", expect=204)
    await put(scene, "off", weekdays=["SUN"])
    ended = await scene.job(schedule=job_schedule("off"))
    await scene.api.delete(f"/v1/jobs/{ended['id']}")
    await scene.api.delete("/v1/calendars/off", expect=204)


async def test_a_changed_calendar_moves_the_cursors_of_its_jobs(scene: Scene) -> None:
    tomorrow, following, third = await days_from_now(scene, 1, 2, 3)
    await put(scene, "off", days=[*await days_from_now(scene, 0), tomorrow])
    job = await scene.job(schedule=job_schedule("off"))
    paused = await scene.job(schedule=job_schedule("off"))
    await scene.api.post(f"/v1/jobs/{paused['id']}/pause")
    assert await cursor(scene, job) == await cursor(scene, paused) == noon(following)
    await put(scene, "off", days=[*await days_from_now(scene, 0), following])
    assert await cursor(scene, job) == await cursor(scene, paused) == noon(tomorrow), "a day that opens is taken"
    await put(scene, "off", days=[*await days_from_now(scene, 0), tomorrow, following])
    assert await cursor(scene, job) == await cursor(scene, paused) == noon(third)
    assert {row[0] for row in await scene.rows("select version from calendar_uses")} == {3}
    assert await scene.missed(job) == []


async def test_a_day_that_closes_takes_back_what_is_staged_but_not_what_is_due_or_held(scene: Scene) -> None:
    today, tomorrow, then = await days_from_now(scene, 0, 1, 2)
    await put(scene, "off", days=["2020-01-01"])
    job = await scene.job(schedule={"every": "PT1S", "calendar": "off"}, overlap="queue_all")
    await plan(scene.db, HORIZON)
    await scene.occur(job, 5, 4, 3)
    [held] = await scene.taken(W, 1)
    await put(scene, "off", days=[today, tomorrow, then])
    states = await scene.states(job)
    assert states.count("running") == 1 and len(states) == 3, "two are due, and waited for the first"
    assert (await cursor(scene, job)).date() > date.fromisoformat(then)
    await scene.end(W, end_of(held))
    assert await scene.missed(job) == []


async def test_a_planner_that_is_behind_goes_on_from_where_it_was(scene: Scene) -> None:
    """Changing a calendar fires nothing of the past again, and loses nothing of it."""
    await put(scene, "off", days=["2020-01-01"])
    schedule = {"every": "PT1M", "calendar": "off", "misfire": {"policy": "skip"}}
    job = await scene.job(schedule=schedule)
    await age(scene, job, timedelta(minutes=10, seconds=30))
    was = await cursor(scene, job)
    await put(scene, "off", days=["2020-01-02"])
    assert await cursor(scene, job) == was
    await plan(scene.db, timedelta(0))
    assert await scene.missed(job) == [("misfire_expired", 10)]
    assert brief(await occurrences(scene, job)) == [("missed", "misfire_expired", 10)]


async def test_resume_counts_by_the_calendar(scene: Scene) -> None:
    yesterday, today = await days_from_now(scene, -1, 0)
    await put(scene, "off", days=[yesterday])
    job = await scene.job(schedule={"cron": "0 * * * *", "calendar": "off"})
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    before = noon(yesterday) - DAY
    await scene.sql.execute("update triggers set held_at = $1", before)
    await scene.sql.execute("update jobs set created_at = $1", before - DAY)
    await scene.api.post(f"/v1/jobs/{job['id']}/resume")
    hours = 12 + (await scene.now()).hour + 1
    assert await scene.missed(job) == [("skipped_paused", hours)]
    assert (await cursor(scene, job)).date() >= date.fromisoformat(today)


async def test_more_jobs_than_a_wave_follow_in_waves(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replan, "WAVE", 2)
    await put(scene, "off", days=["2020-01-01"])
    jobs = [await scene.job(schedule=job_schedule("off")) for _ in range(5)]
    closed = await days_from_now(scene, 0, 1, 2)
    await put(scene, "off", days=closed)
    waves = [(await replan.follow(scene.db)).jobs for _ in range(3)]
    assert waves == [2, 1, 0], "two went with the call"
    [opens] = await days_from_now(scene, 3)
    assert {await cursor(scene, job) for job in jobs} == {noon(opens)}
