"""Schedules over HTTP: every kind is kept and planned, jitter and seeds reach the runs, and previews say what comes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, PROCESS, Scene
from tocsin.clock import iso
from tocsin.flow import preview
from tocsin.flow.plan import plan
from tocsin.model.job import Schedule
from tocsin.model.scalars import Duration
from tocsin.model.schedule import spread

MINUTE = timedelta(minutes=1)


async def cursor(scene: Scene, job: dict[str, Any]) -> datetime | None:
    return await scene.value("select next_fire_at from triggers where job_id = $1", job["id"])  # type: ignore[no-any-return]


async def look(scene: Scene, schedule: dict[str, Any], expect: int = 200, **body: Any) -> Any:
    return await scene.api.post("/v1/schedules/preview", {"schedule": schedule} | body, expect=expect)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"text": "every weekday at 9am", "timezone": "Asia/Tokyo"}, "every weekday at 09:00 (Asia/Tokyo)"),
        ({"rrule": "FREQ=DAILY;BYHOUR=9;BYMINUTE=0;BYSECOND=0"}, "every day at 09:00 (UTC)"),
        ({"interval": "R/2026-01-01T09:00:00Z/P1D"}, "every day, first at 2026-01-01T09:00:00Z (UTC)"),
    ],
)
async def test_every_kind_is_kept_planned_and_said_in_words(scene: Scene, schedule: dict[str, Any], words: str) -> None:
    job = await scene.job(schedule=schedule, name="job")
    assert job["schedule"]["description"] == words
    first = await cursor(scene, job)
    assert first is not None and job["next_run_at"] == iso(first)
    shown = await look(scene, schedule, name="job", count=2)
    assert (shown["description"], shown["runs"][0]) == (words, iso(first))
    await scene.sql.execute("update triggers set next_fire_at = next_fire_at - interval '30 days'")
    await scene.down(timedelta(days=60))
    await plan(scene.db, HORIZON)
    following = await cursor(scene, job)
    assert following is not None and following > await scene.now() and following.minute == 0
    [(reason, _)] = await scene.missed(job)
    assert reason == "misfire_expired"


async def test_a_phrase_for_one_time_is_a_one_time_job(scene: Scene) -> None:
    soon = await scene.job(schedule={"text": "in 3 seconds"})
    [run] = await scene.rows("select once, scheduled_for from runs where job_id = $1", soon["id"])
    assert run["once"] and iso(run["scheduled_for"]) == soon["next_run_at"]
    later = await scene.job(schedule={"text": "tomorrow at noon"})
    assert (await cursor(scene, later), await scene.value("select once from jobs where id = $1", later["id"])) == (
        datetime.fromisoformat(later["next_run_at"]),
        True,
    )


async def test_jitter_begins_a_run_later_and_leaves_its_instant(scene: Scene) -> None:
    job = await scene.job(name="spread", overlap="allow", schedule={"every": "PT2S", "jitter": "PT1H"})
    later = spread(
        Schedule(every=Duration(timedelta(seconds=2)), jitter=Duration(timedelta(hours=1))), "default/spread"
    )
    assert timedelta(0) < later < timedelta(hours=1)
    first = await cursor(scene, job)
    assert first is not None and job["next_run_at"] == iso(first + later)
    await plan(scene.db, HORIZON)
    runs = await scene.rows("select scheduled_for, ready_at, state from runs where job_id = $1", job["id"])
    assert len(runs) >= 4 and {(r["ready_at"] - r["scheduled_for"], r["state"]) for r in runs} == {(later, "staged")}
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["next_run_at"] == iso(first + later)
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"schedule": {"jitter": None}})
    assert changed["version"] == 2
    again = await scene.rows("select scheduled_for, ready_at from runs where job_id = $1", job["id"])
    assert {r["scheduled_for"] for r in again} == {r["scheduled_for"] for r in runs}
    assert max(r["ready_at"] for r in again) <= max(r["scheduled_for"] for r in runs) + timedelta(seconds=10)


async def test_another_name_is_another_place_of_h(scene: Scene) -> None:
    jobs = [await scene.job(name=f"job-{i}", schedule={"cron": "H H * * *"}) for i in range(3)]
    places = [await cursor(scene, job) for job in jobs]
    assert len({at and (at.hour, at.minute) for at in places}) > 1
    moved = await scene.api.call("PATCH", f"/v1/jobs/{jobs[0]['id']}", json={"name": "another"})
    assert moved["next_run_at"] != jobs[0]["next_run_at"]
    assert moved["schedule"]["description"] != jobs[0]["schedule"]["description"]
    shown = await look(scene, {"cron": "H H * * *"}, name="another", count=1)
    assert shown["runs"] == [moved["next_run_at"]]


async def test_an_edited_phrase_counts_from_the_edit(scene: Scene) -> None:
    job = await scene.job(schedule={"text": "in 2 hours"})
    await scene.sql.execute("update jobs set created_at = created_at - interval '3 hours' where id = $1", job["id"])
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"schedule": {"text": "in 1 hour"}})
    due = datetime.fromisoformat(changed["next_run_at"]) - await scene.now()
    assert timedelta(minutes=59) < due <= timedelta(hours=1)
    recurring = {"schedule": {"text": "every day at noon"}}
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json=recurring)
    assert await scene.value("select once from jobs where id = $1", job["id"]) is False
    assert changed["schedule"]["description"] == "every day at 12:00 (UTC)"


async def test_a_rule_keeps_its_beginning_when_another_part_changes(scene: Scene) -> None:
    job = await scene.job(schedule={"rrule": "FREQ=HOURLY"})
    first = datetime.fromisoformat(job["next_run_at"])
    changed = await scene.api.call(
        "PATCH", f"/v1/jobs/{job['id']}", json={"schedule": {"rrule": "FREQ=HOURLY;INTERVAL=2"}}
    )
    assert (datetime.fromisoformat(changed["next_run_at"]) - first) % timedelta(hours=2) == timedelta(0)


async def test_a_preview_says_how_many_share_the_minute(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.job(schedule={"cron": "30 3 * * *"})
    assert (await look(scene, {"cron": "30 3 * * *"}))["warnings"] == []
    monkeypatch.setattr(preview, "MANY", 3)
    other = {"jobs": [{"target": PROCESS, "schedule": {"cron": "30 3 * * *"}}] * 3}
    await scene.api.post("/v1/jobs/batch", other, expect=201)
    [warning] = (await look(scene, {"cron": "30 3 * * *"}))["warnings"]
    assert warning.startswith("4 of your jobs share this minute")


async def test_a_preview_begins_where_it_is_told_and_leaves_nothing_behind(scene: Scene) -> None:
    shown = await look(scene, {"text": "tomorrow at noon"}, after="2030-05-01T00:00:00Z")
    assert shown["runs"] == ["2030-05-02T12:00:00.000000Z"]
    refused = await look(scene, {"text": "monthly on the 31st at 9:00"}, 422)
    assert (refused["code"], refused["errors"][0]["path"]) == ("unclear_text", "schedule.text")
    assert await scene.value("select count(*) from jobs") == 0
