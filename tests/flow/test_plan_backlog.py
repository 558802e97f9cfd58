"""plan with a backlog: a turn is bounded, schedules do not wait behind each other, and a backlog is not an outage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from tests.flow.kit import HORIZON, PROCESS, Scene
from tests.flow.test_plan import age, cursor, owed
from tocsin.flow import plan as step
from tocsin.flow.plan import Rotation, next_due, plan
from tocsin.model.job import Schedule
from tocsin.model.misfire import Outage, plan_occurrences
from tocsin.model.scalars import decode_scalar
from tocsin.model.timetable import Every

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
NEWER_RULES = "Europe/Berlin 0123456789ab 2999.1"


async def late(scene: Scene, job: dict[str, Any], by: timedelta) -> datetime:
    """Move the job and its cursor back while planners kept working: a backlog, not an outage."""
    await scene.sql.execute("update jobs set created_at = created_at - $2::interval where id = $1", job["id"], by)
    return await scene.value(  # type: ignore[no-any-return]
        "update triggers set next_fire_at = next_fire_at - $2::interval where job_id = $1 returning next_fire_at",
        job["id"],
        by,
    )


async def turns(scene: Scene, most: int = 500) -> int:
    """Run turns until nothing is left to plan now. Return how many there were."""
    rotation = Rotation()
    for n in range(most):
        if not (await plan(scene.db, HORIZON, rotation)).more:
            return n + 1
    raise AssertionError(f"more to plan after {most} turns")


async def heavy(scene: Scene, count: int, ago: timedelta = 3 * HOUR, **misfire: Any) -> list[dict[str, Any]]:
    """Create jobs that missed an occurrence each second of an outage, and whose rule runs all of them."""
    rule = {"policy": "all", "max": 10_000, "window": "PT24H"} | misfire
    jobs = [await scene.job(schedule={"every": "PT1S", "misfire": rule}, overlap="allow") for _ in range(count)]
    for job in jobs:
        await age(scene, job, ago)
    return jobs


async def read_by_nobody(scene: Scene, *jobs: dict[str, Any]) -> None:
    """Set these cursors as another node with newer rules of their zone would."""
    for job in jobs:
        await scene.sql.execute("update jobs set zone_rules = $2 where id = $1", job["id"], NEWER_RULES)


async def berlin(scene: Scene, **more: Any) -> dict[str, Any]:
    return await scene.job(schedule={"cron": "* * * * *", "timezone": "Europe/Berlin"} | more)


# ── a budget of runs ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_turn_stages_no_more_than_its_budget_and_the_next_ones_go_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "RUNS", 300)
    jobs = await heavy(scene, 2, 10 * MINUTE)
    await plan(scene.db, HORIZON)
    assert 0 < await scene.value("select count(*) from runs") <= 300
    await turns(scene)
    for job in jobs:
        instants = await owed(scene, job)
        assert 600 <= len(instants) <= 640
        assert instants == [instants[0] + i * SECOND for i in range(len(instants))]
        assert await cursor(scene, job) == instants[-1] + SECOND
        assert await scene.missed(job) == []


async def test_ordinary_jobs_are_planned_first_beside_some_that_catch_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "RUNS", 200)
    monkeypatch.setattr(step, "BATCH", 20)
    await heavy(scene, 20)
    rotation = Rotation()
    await plan(scene.db, HORIZON, rotation)  # each cursor that is behind has had one turn
    ordinary = [await scene.job(schedule={"every": "PT1S"}) for _ in range(5)]
    await plan(scene.db, HORIZON, rotation)
    for job in ordinary:
        assert len(await owed(scene, job)) >= 9
    staged = await scene.value("select count(*) from runs")
    await plan(scene.db, HORIZON, rotation)
    assert await scene.value("select count(*) from runs") > staged, "those that catch up go on, too"


async def test_those_that_catch_up_take_turns(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "RUNS", 60)
    monkeypatch.setattr(step, "BEHIND", 3)
    jobs = await heavy(scene, 9, HOUR)
    rotation = Rotation()
    for _ in range(12):
        await plan(scene.db, HORIZON, rotation)
    made = [len(await owed(scene, job)) for job in jobs]
    assert min(made) > 0 and max(made) - min(made) <= 2 * max(step.PIECE, 60)


@pytest.mark.parametrize(
    "misfire",
    [
        {"policy": "all", "max": 137},
        {"policy": "all", "max": 10_000, "window": "PT5M"},
        {"policy": "all", "max": 100, "window": "PT1M"},
        {"policy": "latest"},
        {"policy": "skip"},
    ],
)
async def test_many_turns_make_the_rows_that_one_would_have_made(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, misfire: dict[str, Any]
) -> None:
    monkeypatch.setattr(step, "RUNS", 40)
    monkeypatch.setattr(step, "PIECE", 7)
    monkeypatch.setattr(step, "LARGE_PIECE", 11)
    job = await scene.job(schedule={"every": "PT2S", "misfire": misfire}, overlap="allow")
    await scene.down(20 * MINUTE)
    first = await late(scene, job, 30 * MINUTE)
    await turns(scene)
    [outage] = [Outage(*span) for span in await outages(scene)]
    schedule = msgspec.convert({"every": "PT2S", "misfire": misfire}, type=Schedule, dec_hook=decode_scalar)
    whole = plan_occurrences(schedule, Every(first, 2 * SECOND), first, outage.end, [outage], 100_000)
    assert (await owed(scene, job))[: len(whole.stage)] == whole.stage
    assert await scene.missed(job) == [(row.reason, row.count) for row in whole.missed]


async def test_a_turn_yields_the_event_loop(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the occurrences that are computed between two turns of the event loop."""
    await heavy(scene, 30)
    computed, longest = 0, 0
    compute = step.plan_occurrences

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        planned = compute(*args, **kwargs)
        computed += len(planned.stage)
        return planned

    async def watch() -> None:
        nonlocal computed, longest
        while True:
            longest, computed = max(longest, computed), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(step, "plan_occurrences", counted)
    watching = asyncio.ensure_future(watch())
    rotation = Rotation()
    for _ in range(3):
        await plan(scene.db, HORIZON, rotation)
    watching.cancel()
    assert await scene.value("select count(*) from runs") > 3000
    assert 0 < longest <= 100 + step.LARGE_PIECE


# ── cursors that cannot be planned ───────────────────────────────────────────────────────────────────────────────


async def test_cursors_that_this_node_may_not_plan_hide_no_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "BATCH", 5)
    strange = [await berlin(scene) for _ in range(5)]
    for job in strange:
        await late(scene, job, 2 * MINUTE)
    await read_by_nobody(scene, *strange)
    ordinary = await scene.job(schedule={"every": "PT1S"})
    rotation = Rotation()
    await plan(scene.db, HORIZON, rotation)
    result = await plan(scene.db, HORIZON, rotation)
    assert len(await owed(scene, ordinary)) >= 9
    assert not result.more, "nothing is left that this node can plan: it must not spin"
    assert [await owed(scene, job) for job in strange] == [[]] * 5


async def test_a_node_that_knows_the_rules_plans_them(scene: Scene) -> None:
    job = await berlin(scene)
    rules = await scene.value("select zone_rules from jobs where id = $1", job["id"])
    await late(scene, job, MINUTE)
    await read_by_nobody(scene, job)
    await plan(scene.db, HORIZON)
    assert await owed(scene, job) == []
    # A node with these rules joins: for it they are not newer.
    await scene.sql.execute("update jobs set zone_rules = $2 where id = $1", job["id"], rules)
    await scene.sql.execute("update triggers set waits_for = $2 where job_id = $1", job["id"], f"rules {rules}")
    await plan(scene.db, HORIZON)
    assert await owed(scene, job) != []
    assert await scene.value("select waits_for from triggers where job_id = $1", job["id"]) is None


async def test_a_cursor_without_its_calendar_is_planned_when_the_calendar_is_there(scene: Scene) -> None:
    await scene.api.call("PUT", "/v1/calendars/off", json={"weekdays": ["SUN"]}, expect=201)
    job = await scene.job(schedule={"every": "PT1S", "calendar": "off"})
    await scene.sql.execute("delete from calendar_uses")
    document = await scene.row("select * from calendars")
    await scene.sql.execute("delete from calendars")
    await plan(scene.db, HORIZON)
    was = await cursor(scene, job)
    assert not (await plan(scene.db, HORIZON)).more
    await scene.sql.execute(
        "insert into calendars (tenant_id, name, document, digest) values ($1, $2, $3, $4)",
        *(document[name] for name in ("tenant_id", "name", "document", "digest")),
    )
    await plan(scene.db, HORIZON)
    assert await cursor(scene, job) != was


async def test_the_misfire_rule_applies_to_occurrences_that_no_node_could_plan(scene: Scene) -> None:
    job = await berlin(scene, misfire={"policy": "skip"})
    await late(scene, job, 10 * MINUTE)
    rules = await scene.value("select zone_rules from jobs where id = $1", job["id"])
    await read_by_nobody(scene, job)
    await plan(scene.db, HORIZON)
    since = await scene.value("select unplanned_since from triggers where job_id = $1", job["id"])
    assert since == await cursor(scene, job)
    await scene.sql.execute("update jobs set zone_rules = $2 where id = $1", job["id"], rules)
    await scene.sql.execute("update triggers set waits_for = $2 where job_id = $1", job["id"], f"rules {rules}")
    await plan(scene.db, timedelta(0))
    [(reason, count)] = await scene.missed(job)
    assert reason == "misfire_expired" and count >= 9
    assert await owed(scene, job) == []
    assert await scene.value("select unplanned_since from triggers where job_id = $1", job["id"]) is None


async def test_an_edit_makes_such_a_cursor_an_ordinary_one(scene: Scene) -> None:
    job = await berlin(scene)
    await late(scene, job, MINUTE)
    await read_by_nobody(scene, job)
    await plan(scene.db, HORIZON)
    await scene.api.call(
        "PATCH", f"/v1/jobs/{job['id']}", json={"schedule": {"every": "PT1S", "cron": None, "timezone": "UTC"}}
    )
    await plan(scene.db, HORIZON)
    assert len(await owed(scene, job)) >= 9


@pytest.mark.parametrize(
    "poison",
    [
        'update jobs set schedule = \'{"cron": "not a cron"}\' where id = $1',
        "update jobs set schedule = '{' where id = $1",
        # The database refuses the run: its deadline is out of range.
        "update jobs set start_deadline = interval '1000000 years' where id = $1",
    ],
)
async def test_a_cursor_that_fails_stops_no_other(scene: Scene, poison: str) -> None:
    bad, *good = [await scene.job(schedule={"every": "PT1S"}) for _ in range(4)]
    await scene.sql.execute(poison, bad["id"])
    rotation = Rotation()
    await plan(scene.db, HORIZON, rotation)
    for job in good:
        assert len(await owed(scene, job)) >= 9
    assert await owed(scene, bad) == []
    assert not (await plan(scene.db, HORIZON, rotation)).more
    assert await scene.value("select waits_for from triggers where job_id = $1", bad["id"]) == "error"


# ── a backlog is not an outage ───────────────────────────────────────────────────────────────────────────────────


async def test_many_schedules_at_one_instant_are_late_and_not_missed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "BATCH", 3)
    body = {"target": PROCESS, "schedule": {"every": "PT1H", "misfire": {"policy": "skip"}}}
    await scene.api.post("/v1/jobs/batch", {"jobs": [body] * 20})
    await scene.sql.execute("update triggers set next_fire_at = now() - interval '5 minutes'")
    assert await turns(scene) >= 20 // 3
    assert await scene.value("select count(*) from runs") == 20
    assert await scene.value("select count(*) from history") == 0


@pytest.fixture
async def quiet(scene: Scene) -> AsyncIterator[Scene]:
    """Remove all records of outages, and record a turn that was just completed."""
    await scene.sql.execute("delete from outages")
    await plan(scene.db, HORIZON)
    yield scene


async def outages(scene: Scene) -> list[tuple[datetime, datetime]]:
    found = await scene.rows("select from_at, to_at from outages order by 1")
    return [tuple(row) for row in found]


async def turned_at(scene: Scene) -> datetime:
    return await scene.value("select turned_at from planner")  # type: ignore[no-any-return]


async def test_a_gap_of_more_than_a_minute_is_recorded_once(quiet: Scene) -> None:
    await quiet.sql.execute("update planner set turned_at = now() - interval '59 seconds'")
    await plan(quiet.db, HORIZON)
    assert await outages(quiet) == []
    await quiet.sql.execute("update planner set turned_at = now() - interval '61 seconds'")
    start = await turned_at(quiet)
    await plan(quiet.db, HORIZON)
    await plan(quiet.db, HORIZON)
    [(from_at, to_at)] = await outages(quiet)
    assert from_at == start and timedelta(seconds=61) <= to_at - from_at < timedelta(minutes=5)
    assert to_at <= await turned_at(quiet)


async def test_while_one_of_two_servers_turns_there_is_no_outage(quiet: Scene, other: Any) -> None:
    job = await quiet.job(schedule={"every": "PT1M", "misfire": {"policy": "skip"}})
    await late(quiet, job, 10 * MINUTE)
    await plan(other, HORIZON)  # the other planner did all the turns
    await plan(quiet.db, HORIZON)
    assert await outages(quiet) == []
    assert await quiet.missed(job) == []


async def test_an_outage_counts_for_every_turn_that_catches_up(quiet: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "BATCH", 2)
    jobs = [await quiet.job(schedule={"every": "PT1M", "misfire": {"policy": "skip"}}) for _ in range(6)]
    for job in jobs:
        await age(quiet, job, 10 * MINUTE + 30 * SECOND)
    assert await turns(quiet) >= 3
    for job in jobs:
        [(reason, count)] = await quiet.missed(job)
        assert reason == "misfire_expired" and count == 10
    assert len(await outages(quiet)) == 1


async def test_an_occurrence_due_after_the_outage_is_only_late(quiet: Scene) -> None:
    """The planner has been back for five minutes and reaches this cursor only now."""
    job = await quiet.job(schedule={"every": "PT1M", "misfire": {"policy": "skip"}})
    first = await late(quiet, job, 20 * MINUTE + 30 * SECOND)
    await quiet.sql.execute(
        "insert into outages (from_at, to_at) values (now() - interval '30 minutes', now() - interval '5 minutes')"
    )
    await plan(quiet.db, timedelta(0))
    [(reason, count)] = await quiet.missed(job)
    instants = await owed(quiet, job)
    assert reason == "misfire_expired" and count == 15
    assert instants == [first + (15 + i) * MINUTE for i in range(len(instants))] and len(instants) == 5


async def test_a_clock_that_is_set_back_leaves_no_outage_in_the_future(quiet: Scene) -> None:
    await quiet.sql.execute("update planner set turned_at = now() + interval '1 hour'")
    await quiet.sql.execute(
        "insert into outages (from_at, to_at) values"
        " (now() - interval '1 hour', now() + interval '30 minutes'),"
        " (now() + interval '10 minutes', now() + interval '20 minutes')"
    )
    await plan(quiet.db, HORIZON)
    assert await turned_at(quiet) <= await quiet.now()
    [(_, end)] = await outages(quiet)
    assert end <= await quiet.now()


async def test_recording_a_turn_costs_the_same_however_many_schedules_there_are(quiet: Scene) -> None:
    plain = await _buffers(quiet)
    body = {"target": PROCESS, "schedule": {"every": "PT1H"}}
    for _ in range(3):
        await quiet.api.post("/v1/jobs/batch", {"jobs": [body] * 1000})
    assert await _buffers(quiet) <= plain + 2


async def _buffers(scene: Scene) -> int:
    """Return how many pages the recording of a turn reads."""
    async with scene.sql.transaction():
        [[told]] = await scene.rows("explain (analyze, buffers, format json) " + step.SQL["completed"])
    top = json.loads(told)[0]["Plan"]
    return int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])


async def test_cursors_that_this_node_cannot_plan_do_not_wake_the_planner(scene: Scene) -> None:
    job = await berlin(scene)
    await late(scene, job, MINUTE)
    await read_by_nobody(scene, job)
    await plan(scene.db, HORIZON)
    assert await next_due(scene.db) is None
