"""plan: each occurrence is staged or counted, once, whoever plans and however late."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest

from tests.flow.kit import HORIZON, Scene
from tocsin.clock import iso
from tocsin.flow.plan import SQL, next_due, plan
from tocsin.store.db import Database, columns

MINUTE = timedelta(minutes=1)


async def owed(scene: Scene, job: dict[str, Any]) -> list[datetime]:
    found = await scene.rows("select scheduled_for from runs where job_id = $1 order by 1", job["id"])
    return [row["scheduled_for"] for row in found]


async def cursor(scene: Scene, job: dict[str, Any]) -> datetime | None:
    return await scene.value("select next_fire_at from triggers where job_id = $1", job["id"])  # type: ignore[no-any-return]


async def age(scene: Scene, job: dict[str, Any], by: timedelta) -> datetime:
    """Move the job's making and its cursor back, as if no planner had run since; its cursor."""
    await scene.down(by)
    await scene.sql.execute("update jobs set created_at = created_at - $2::interval where id = $1", job["id"], by)
    return await scene.value(  # type: ignore[no-any-return]
        "update triggers set next_fire_at = next_fire_at - $2::interval where job_id = $1 returning next_fire_at",
        job["id"],
        by,
    )


async def test_two_planners_racing_stage_each_occurrence_once(scene: Scene, other: Database) -> None:
    jobs = [await scene.job(schedule={"every": "PT1S"}) for _ in range(20)]
    await asyncio.gather(*(plan(db, HORIZON) for _ in range(4) for db in (scene.db, other)))
    for job in jobs:
        first = datetime.fromisoformat(job["created_at"]) + timedelta(seconds=1)
        instants = await owed(scene, job)
        assert len(instants) >= 9
        assert instants == [first + timedelta(seconds=i) for i in range(len(instants))]
        assert await cursor(scene, job) == instants[-1] + timedelta(seconds=1)


async def test_every_is_anchored_at_creation_and_fires_first_one_step_later(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT5S"})
    created = datetime.fromisoformat(job["created_at"])
    assert await scene.value("select created_at from jobs where id = $1", job["id"]) == created
    for _ in range(3):
        await plan(scene.db, HORIZON)
    first, *rest = await owed(scene, job)
    assert first == created + timedelta(seconds=5)
    assert rest == [created + timedelta(seconds=10)]


async def test_nothing_beyond_the_horizon_is_staged(scene: Scene) -> None:
    near = await scene.job(schedule={"at": iso(await scene.now() + timedelta(seconds=12))})
    far = await scene.job(schedule={"at": iso(await scene.now() + timedelta(minutes=5))})
    assert (await plan(scene.db, HORIZON)).cursors == 0
    assert await next_due(scene.db) == await cursor(scene, near)
    assert (await plan(scene.db, timedelta(seconds=30))).cursors == 1
    assert await scene.states(near) == ["staged"] and await scene.states(far) == []
    assert await cursor(scene, near) is None, "a one-time cursor is exhausted by its one occurrence"
    assert (await plan(scene.db, timedelta(seconds=30))).cursors == 0


async def test_the_cursor_moves_by_compare_and_set_only(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"})
    was = await cursor(scene, job)
    assert was is not None
    other = await scene.job(schedule={"every": "PT1H"})
    places = {
        row["job_id"]: (row["place"], row["job_place"])
        for row in await scene.rows(
            "select t.ctid as place, j.ctid as job_place, j.id::text as job_id"
            " from triggers t join jobs j on j.id = t.job_id"
        )
    }
    (here, its_job), (elsewhere, other_job) = places[job["id"]], places[other["id"]]
    later = was + MINUTE
    stale = [
        (here, its_job, job["id"], was - MINUTE, 1, later, None),  # the cursor has moved
        (here, its_job, job["id"], was, 2, later, None),  # the job is at another version
        (elsewhere, its_job, job["id"], was, 1, later, None),  # another row has its ctid by now
        (here, other_job, job["id"], was, 1, later, None),
    ]
    for row in stale:
        assert await scene.db.fetch("engine", SQL["advance"], *columns([row], 7)) == []
    assert await cursor(scene, job) == was
    good = (here, its_job, job["id"], was, 1, later, None)
    assert len(await scene.db.fetch("engine", SQL["advance"], *columns([good], 7))) == 1


async def test_a_cursor_set_back_stages_no_live_occurrence_twice(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT2S"})
    before = await cursor(scene, job)
    await plan(scene.db, HORIZON)
    staged = await owed(scene, job)
    await scene.sql.execute("update triggers set next_fire_at = $2 where job_id = $1", job["id"], before)
    await plan(scene.db, HORIZON)
    assert (await owed(scene, job))[: len(staged)] == staged, "the unique index is the second wall"
    assert len(set(await owed(scene, job))) == len(await owed(scene, job))


async def test_ids_of_occurrences_rise_with_their_instants(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "misfire": {"policy": "all"}})
    await age(scene, job, timedelta(seconds=90))  # some are late, some due, some to come
    await plan(scene.db, HORIZON)
    by_id = await scene.rows("select scheduled_for from runs where job_id = $1 order by id", job["id"])
    assert [r["scheduled_for"] for r in by_id] == await owed(scene, job)


@pytest.mark.parametrize(
    ("misfire", "staged", "missed"),
    [
        # Owed: 9.5, 8.5 … 0.5 minutes ago, all during the outage.
        ({"policy": "latest"}, [0.5], [("coalesced", 9)]),
        ({"policy": "latest", "window": "PT5M"}, [0.5], [("misfire_expired", 5), ("coalesced", 4)]),
        ({"policy": "all"}, [9.5, 8.5, 7.5, 6.5, 5.5, 4.5, 3.5, 2.5, 1.5, 0.5], []),
        ({"policy": "all", "max": 3}, [2.5, 1.5, 0.5], [("misfire_expired", 7)]),
        ({"policy": "skip"}, [], [("misfire_expired", 10)]),
    ],
)
async def test_occurrences_missed_by_downtime_are_run_or_counted(
    scene: Scene, misfire: dict[str, Any], staged: list[float], missed: list[tuple[str, int]]
) -> None:
    job = await scene.job(schedule={"every": "PT1M", "misfire": misfire})
    first = await age(scene, job, timedelta(minutes=10, seconds=30))
    await plan(scene.db, HORIZON)
    assert await owed(scene, job) == [first + (9.5 - ago) * MINUTE for ago in staged]
    assert await scene.missed(job) == missed
    assert await cursor(scene, job) == first + 10 * MINUTE
    # None of it has an attempt, and all of it is final.
    rows = await scene.rows("select * from history where job_id = $1", job["id"])
    assert all(r["final"] and r["state"] == "skipped" and r["started_at"] is None for r in rows)


DOWN = [
    # Back after a month, a year, a decade of `* * * * *`: one run, and a counted row for all the others.
    (30, {"window": "P31D"}, [("coalesced", 43_199)]),
    (365, {"window": "P366D"}, [("coalesced", 525_599)]),
    (3650, {"window": "P3660D"}, [("coalesced", 5_255_999)]),
    # By default what is older than an hour is not stood for by anything.
    (30, {}, [("misfire_expired", 43_140), ("coalesced", 59)]),
    (365, {}, [("misfire_expired", 525_540), ("coalesced", 59)]),
]


@pytest.mark.parametrize(("days", "misfire", "missed"), DOWN)
async def test_the_first_turn_after_a_long_time_down_makes_one_run_and_counts_the_rest(
    scene: Scene, statements: list[str], days: int, misfire: dict[str, Any], missed: list[tuple[str, int]]
) -> None:
    job = await scene.job(schedule={"cron": "* * * * *", "misfire": misfire})
    first = (await scene.now()).replace(second=0, microsecond=0) - timedelta(days=days) + MINUTE
    await scene.sql.execute("update jobs set created_at = $1", first - MINUTE)
    await scene.sql.execute("update triggers set next_fire_at = $1", first)
    await scene.down(timedelta(days=days + 1))
    statements.clear()
    await plan(scene.db, timedelta(0))
    words = "reasons, begin, due, outages, advance, stage, note, commit, completed: however long it was"
    assert len(statements) == 9, words
    planned_at = await scene.value("select max(finished_at) from history")
    [latest] = await owed(scene, job)
    assert latest == planned_at.replace(second=0, microsecond=0)
    # The minute may have changed since the cursor was set.
    (reason, count), *rest = missed
    assert await scene.missed(job) == [(reason, count + (latest - first) // MINUTE + 1 - days * 24 * 60), *rest]
    assert await cursor(scene, job) == latest + MINUTE


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is sent to the database, from any connection."""
    sent: list[str] = []
    for name in ("execute", "fetch"):
        method = getattr(asyncpg.Connection, name)

        def noted(self: Any, text: str, *args: Any, _method: Any = method, **kwargs: Any) -> Any:
            sent.append(text)
            return _method(self, text, *args, **kwargs)

        monkeypatch.setattr(asyncpg.Connection, name, noted)
    return sent


async def test_a_one_time_job_that_downtime_kept_from_running_runs_within_its_window(scene: Scene) -> None:
    job = await scene.job(schedule={"delay": "PT1M"})
    due = await age(scene, job, timedelta(minutes=30))
    await plan(scene.db, HORIZON)
    assert await owed(scene, job) == [due]
    assert await scene.missed(job) == []


@pytest.mark.parametrize("misfire", [{"policy": "latest"}, {"policy": "skip"}])
async def test_a_one_time_job_missed_for_good_is_completed_and_not_left_open(
    scene: Scene, misfire: dict[str, Any]
) -> None:
    job = await scene.job(name="missed", schedule={"delay": "PT1M", "misfire": misfire})
    await age(scene, job, timedelta(hours=3))
    await plan(scene.db, HORIZON)
    assert await scene.states(job) == []
    assert await scene.missed(job) == [("misfire_expired", 1)]
    assert await cursor(scene, job) is None
    ended = await scene.api.get(f"/v1/jobs/{job['id']}")
    assert (ended["state"], ended["last_run"]["state"]) == ("completed", "skipped")
