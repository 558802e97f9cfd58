"""fill: the runs of backfills are made as those before them end, each once, whoever makes them."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, Scene, end_of
from tocsin.flow import fill as step
from tocsin.flow import sweep
from tocsin.flow.fill import PIECE, Filled, Tables, fill
from tocsin.flow.plan import plan
from tocsin.store.db import Database, Row

W = str(uuid.uuid4())
DAY = timedelta(days=1)
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
DAILY = {"cron": "0 0 * * *"}


async def ask(scene: Scene, job: dict[str, Any], days: int = 3, **request: Any) -> dict[str, Any]:
    """A backfill of the first days of the year."""
    body = {"from": NEW_YEAR.isoformat(), "to": (NEW_YEAR + days * DAY).isoformat()} | request
    return await scene.api.post(f"/v1/jobs/{job['id']}/backfill", body, expect=202)  # type: ignore[no-any-return]


async def shown(scene: Scene, backfill: dict[str, Any]) -> dict[str, Any]:
    return await scene.api.get(f"/v1/backfills/{backfill['id']}")  # type: ignore[no-any-return]


async def turn(scene: Scene) -> Filled:
    """What a backfiller's loop does every second."""
    return await fill(scene.db, Tables(), True)


async def logical(scene: Scene, job: dict[str, Any]) -> list[datetime]:
    """What the job's live runs stand for, oldest first."""
    rows = await scene.rows("select logical_at from runs where job_id = $1 order by id", job["id"])
    return [row["logical_at"] for row in rows]


async def drain(scene: Scene) -> list[datetime]:
    """Make, run and end all there is; what the runs stood for, in the order in which they ran."""
    ran: list[datetime] = []
    while True:
        await turn(scene)
        taken = await scene.take(worker=W)
        if not taken:
            return ran
        ran += [row["logical_at"] for row in taken]
        await scene.end(W, *(end_of(row) for row in taken))


def days(*numbers: int) -> list[datetime]:
    return [NEW_YEAR + n * DAY for n in numbers]


# ── one after the other ──────────────────────────────────────────────────────────────────────────────────────────


async def test_each_occurrence_gets_one_run_in_order_so_many_at_a_time(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    backfill = await ask(scene, job, 5, max_concurrency=2, args={"region": "eu"})
    assert (await turn(scene)).hints
    assert await logical(scene, job) == days(0, 1)
    assert not (await turn(scene)).hints, "there is no room for more"
    first, second = await scene.take(worker=W)
    await scene.end(W, end_of(second))
    await turn(scene)
    assert await logical(scene, job) == days(0, 2)
    run = await scene.run(first["id"])
    assert (run["trigger"], run["priority"], run["args"]) == ("backfill", 100, {"region": "eu"})
    assert run["logical_at"] == "2026-01-01T00:00:00.000000Z" and run["scheduled_for"] > backfill["created_at"]
    await scene.end(W, end_of(first))
    assert await drain(scene) == days(2, 3, 4)
    done = await shown(scene, backfill)
    assert (done["state"], done["made"], done["succeeded"], done["live"]) == ("completed", 5, 5, 0)
    assert done["next_at"] is None and done["finished_at"] is not None
    assert await scene.value("select count(*) from backfill_ends") == 0
    assert not (await turn(scene)).hints


async def test_a_backfill_that_cannot_be_read_keeps_no_other_from_its_runs(scene: Scene) -> None:
    broken, whole = [await scene.job(schedule=DAILY) for _ in range(2)]
    bad = await ask(scene, broken)
    await ask(scene, whole, max_concurrency=2)
    await scene.sql.execute("update backfills set plan = '{}' where id = $1", bad["id"])
    await turn(scene)
    assert await logical(scene, whole) == days(0, 1)
    assert await logical(scene, broken) == []


async def test_two_nodes_filling_at_once_make_no_occurrence_twice(scene: Scene, other: Database) -> None:
    jobs = [await scene.job(schedule=DAILY) for _ in range(10)]
    asked = [await ask(scene, job, 9, max_concurrency=4) for job in jobs]
    ran: list[tuple[str, datetime]] = []
    while True:
        await asyncio.gather(*(fill(db, Tables(), True) for _ in range(3) for db in (scene.db, other)))
        taken = await scene.take(100, W)
        if not taken:
            break
        ran += [(row["job_id"], row["logical_at"]) for row in taken]
        await scene.end(W, *(end_of(row) for row in taken))
    assert sorted(ran) == sorted((job["id"], at) for job in jobs for at in days(*range(9)))
    for backfill in asked:
        assert (await shown(scene, backfill))["succeeded"] == 9


async def test_what_is_left_to_do_is_bounded_however_long_the_range(scene: Scene) -> None:
    job = await scene.job(schedule={"cron": "*/10 * * * *"})
    backfill = await ask(scene, job, 300, max_concurrency=3)
    assert backfill["total"] == 300 * 144
    await turn(scene)
    assert len(await scene.states(job)) == 3


async def test_no_more_than_so_many_backfills_a_turn_and_none_is_forgotten(scene: Scene, monkeypatch: Any) -> None:
    monkeypatch.setattr(step, "AT_ONCE", 2)
    jobs = [await scene.job(schedule=DAILY) for _ in range(5)]
    for job in jobs:
        await ask(scene, job)
    while (await turn(scene)).more:
        pass
    assert [len(await scene.states(job)) for job in jobs] == [1] * 5


async def test_what_one_turn_holds_another_leaves_for_later(scene: Scene, other: Database) -> None:
    job = await scene.job(schedule=DAILY)
    await ask(scene, job)
    async with other.transaction("test") as connection:
        await connection.fetch("select from backfills for no key update")
        assert await turn(scene) == Filled([], 0, True)
    async with other.transaction("test") as connection:
        await connection.fetch("select from jobs for no key update")
        assert await turn(scene) == Filled([], 0, True)
    assert (await turn(scene)).hints


async def test_a_backfill_waits_while_its_tenant_has_as_many_waiting_as_it_may(scene: Scene) -> None:
    await scene.api.call("PATCH", "/v1/tenants/default", json={"quotas": {"max_queued": 4}})
    one, other = await scene.job(schedule=DAILY), await scene.job(schedule=DAILY)
    first, second = await ask(scene, one, 9, max_concurrency=3), await ask(scene, other, 9, max_concurrency=3)
    await turn(scene)
    assert len(await logical(scene, one)) + len(await logical(scene, other)) == 4
    assert await turn(scene) == Filled([], 0, False), "it is not asked for again and again"
    assert {(await shown(scene, each))["state"] for each in (first, second)} == {"running"}
    taken = await scene.take(1, W)
    await turn(scene)
    assert await scene.value("select count(*) from runs where state in ('staged', 'ready')") == 4
    await scene.end(W, *(end_of(row) for row in taken))
    ran = [row["logical_at"] for row in taken] + await drain(scene)
    assert sorted(ran) == sorted(days(*range(9)) * 2)
    assert {(await shown(scene, each))["state"] for each in (first, second)} == {"completed"}


async def test_a_backfill_of_a_workflow_counts_with_its_nodes(scene: Scene) -> None:
    node = {"target": {"kind": "process", "command": ["true"]}}
    flow = {"name": "flow", "jobs": {"a": node, "b": node}, "schedule": DAILY}
    workflow = await scene.api.post("/v1/workflows", flow)
    await ask(scene, workflow, 9, max_concurrency=9)
    await scene.api.call("PATCH", "/v1/tenants/default", json={"quotas": {"max_queued": 7}})
    await turn(scene)
    assert await logical(scene, workflow) == days(0, 1), "two of three runs each"
    await scene.sql.execute("delete from runs where job_id = $1", workflow["id"])
    await scene.api.call("PATCH", "/v1/tenants/default", json={"quotas": {"max_queued": 2}})
    await turn(scene)
    assert await logical(scene, workflow) == days(2), "one at a time, although it is larger than the quota"
    await turn(scene)
    assert await logical(scene, workflow) == days(2)


async def test_a_backfill_gets_its_runs_in_pieces(scene: Scene) -> None:
    """All that it may have at once would hold up live work."""
    job = await scene.job(schedule=DAILY)
    await ask(scene, job, 20, max_concurrency=10)
    assert (await turn(scene))[1:] == (PIECE, False, True)
    assert (await turn(scene))[1:] == (2, False, False)
    node = {"target": {"kind": "process", "command": ["true"]}}
    flow = {"name": "flow", "jobs": {"a": node, "b": node}, "schedule": DAILY}
    await ask(scene, await scene.api.post("/v1/workflows", flow), 9, max_concurrency=3)
    assert (await turn(scene))[1:] == (2 * 3, False, True), "two runs of a workflow, each with its two nodes"
    assert (await turn(scene))[1:] == (3, False, False)


# ── how runs end ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_whatever_ends_a_run_it_is_counted_and_the_next_one_is_made(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, retry={"max_attempts": 1})
    backfill = await ask(scene, job, 6, max_concurrency=3)
    await turn(scene)
    good, bad, stopped = await scene.take(worker=W)
    await scene.end(W, end_of(good), end_of(bad, "failed", "Boom"))
    await scene.api.post(f"/v1/runs/{stopped['id']}/cancel")
    told = await shown(scene, backfill)
    assert (told["succeeded"], told["failed"], told["live"]) == (1, 1, 1), "counted before anybody took it up"
    await scene.end(W, end_of(stopped, "cancelled"))
    await turn(scene)
    [third, *_] = await scene.rows("select id::text as id from runs where job_id = $1 order by id", job["id"])
    await scene.api.post(f"/v1/runs/{third['id']}/cancel")
    assert await drain(scene) == days(4, 5)
    told = await shown(scene, backfill)
    assert (told["state"], told["made"]) == ("completed", 6)
    assert (told["succeeded"], told["failed"], told["cancelled"]) == (3, 1, 2)
    assert told["failures"] == [{"id": bad["id"], "logical_at": "2026-01-02T00:00:00.000000Z", "state": "dead"}]


async def test_a_retry_is_the_same_run_and_keeps_its_place(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, retry={"max_attempts": 2})
    backfill = await ask(scene, job, 2)
    await turn(scene)
    [run] = await scene.take(worker=W)
    await scene.end(W, end_of(run, "failed", "Boom"))
    await turn(scene)
    assert await logical(scene, job) == days(0)
    await scene.wake(run["id"])
    assert await drain(scene) == days(0, 1)
    assert (await shown(scene, backfill))["succeeded"] == 2


async def test_what_was_made_again_of_a_failed_run_stands_for_the_same_instant(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, retry={"max_attempts": 1})
    await ask(scene, job, 1)
    await turn(scene)
    [run] = await scene.take(worker=W)
    await scene.end(W, end_of(run, "failed", "Boom"))
    again = await scene.api.post(f"/v1/runs/{run['id']}/retry")
    [redriven] = (await scene.api.post("/v1/dead-letters/redrive", {"ids": [run["id"]]}))["items"]
    for made in (again, redriven):
        assert (await scene.run(made["id"]))["logical_at"] == "2026-01-01T00:00:00.000000Z"


async def test_many_failures_are_counted_and_the_first_are_named(scene: Scene, monkeypatch: Any) -> None:
    monkeypatch.setattr(step, "MOST_FAILURES", 2)
    job = await scene.job(schedule=DAILY, retry={"max_attempts": 1})
    backfill = await ask(scene, job, 4, max_concurrency=4)
    await turn(scene)
    taken = await scene.take(worker=W)
    await scene.end(W, *(end_of(run, "failed", "Boom") for run in taken))
    await turn(scene)
    told = await shown(scene, backfill)
    assert (told["state"], told["failed"]) == ("completed", 4)
    assert [f["logical_at"][:10] for f in told["failures"]] == ["2026-01-01", "2026-01-02"]


async def test_it_is_never_too_late_for_a_past_that_is_filled(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, start_deadline="PT0.001S")
    await ask(scene, job, 1)
    await turn(scene)
    await sweep.expire(scene.db)
    assert await drain(scene) == days(0)


# ── beside the job's own life ────────────────────────────────────────────────────────────────────────────────────


async def test_occurrences_do_not_wait_for_it_nor_are_they_skipped(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="skip")
    await ask(scene, job, 1, schedule=DAILY)
    await turn(scene)
    [filling] = await scene.take(worker=W)
    [occurrence] = await scene.occur(job, 1)
    [taken] = await scene.take(worker=W)
    assert (taken["id"], await scene.missed(job)) == (occurrence, [])
    await scene.end(W, end_of(filling), end_of(taken))


async def test_live_work_goes_first(scene: Scene) -> None:
    # More than the test may take, on whatever machine.
    await scene.sql.execute("update pools set head_start = interval '10 seconds' where name = 'default'")
    job = await scene.job(schedule=DAILY)
    await ask(scene, job, 5, max_concurrency=5)
    await turn(scene)
    asked = await scene.ask(await scene.job(), 3)
    taken = await scene.take(3, W)
    assert sorted(row["id"] for row in taken) == sorted(asked)


async def test_its_runs_are_none_of_max_runs(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1S", "max_runs": 1}, overlap="allow")
    await ask(scene, job, 2, schedule=DAILY)
    assert await drain(scene) == days(0, 1)
    await plan(scene.db, HORIZON)
    assert len(await scene.states(job)) == 1, "the one that its schedule may have"


async def test_the_jobs_own_limit_holds_for_it_too(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY, max_concurrency=1)
    await ask(scene, job, 3, max_concurrency=3)
    await turn(scene)
    [one] = await scene.take(worker=W)
    assert sorted(await scene.states(job)) == ["running", "waiting", "waiting"]
    await scene.end(W, end_of(one))
    assert await drain(scene) == days(1, 2)


async def test_a_paused_job_holds_it_and_resume_lets_it_go_on(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    backfill = await ask(scene, job, 2)
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    assert await drain(scene) == []
    told = await shown(scene, backfill)
    assert (told["state"], told["made"], told["live"]) == ("running", 1, 1)
    await scene.api.post(f"/v1/jobs/{job['id']}/resume")
    assert await drain(scene) == days(0, 1)


async def test_a_cancelled_job_ends_it(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    backfill = await ask(scene, job, 5, max_concurrency=2)
    await turn(scene)
    [run] = await scene.take(1, W)
    paused = await ask(scene, job, 5, args={"n": 1})
    await scene.api.post(f"/v1/backfills/{paused['id']}/pause")
    await scene.api.delete(f"/v1/jobs/{job['id']}")
    assert (await shown(scene, paused))["state"] == "cancelled"
    told = await shown(scene, backfill)
    assert (told["state"], told["made"], told["live"], told["cancelled"]) == ("cancelled", 2, 1, 1)
    assert not (await turn(scene)).hints
    ended = told["finished_at"]
    await scene.end(W, end_of(run, "cancelled"))
    await turn(scene)
    told = await shown(scene, backfill)
    assert (told["state"], told["cancelled"], told["finished_at"]) == ("cancelled", 2, ended)
    assert await scene.value("select count(*) from backfill_ends") == 0


async def test_a_one_time_job_that_is_over_ends_it(scene: Scene) -> None:
    job = await scene.job(schedule={"delay": "PT1H"})
    backfill = await ask(scene, job, 5, schedule=DAILY)
    await scene.sql.execute("update jobs set state = 'completed' where id = $1", job["id"])
    await turn(scene)
    assert ((await shown(scene, backfill))["state"], await scene.states(job)) == ("cancelled", [])


async def test_an_edit_changes_what_its_runs_do_but_not_which_there_are(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    backfill = await ask(scene, job, 3)
    await turn(scene)
    await scene.api.call(
        "PATCH", f"/v1/jobs/{job['id']}", json={"schedule": {"cron": "30 5 1 * *"}, "tags": {"v": "2"}}
    )
    versions: list[int] = []
    ran: list[datetime] = []
    while taken := await scene.take(worker=W):
        versions += [row["job_version"] for row in taken]
        ran += [row["logical_at"] for row in taken]
        await scene.end(W, *(end_of(row) for row in taken))
        await turn(scene)
    assert (ran, versions) == (days(0, 1, 2), [1, 2, 2])
    assert (await shown(scene, backfill))["state"] == "completed"


async def test_ends_of_a_backfill_that_went_with_its_job_are_forgotten(scene: Scene) -> None:
    job = await scene.job(schedule=DAILY)
    await ask(scene, job, 2)
    await turn(scene)
    [run] = await scene.take(worker=W)
    await scene.end(W, end_of(run))
    await scene.sql.execute("delete from jobs where id = $1", job["id"])
    await turn(scene)
    assert await scene.value("select count(*) from backfill_ends") == 0


async def test_a_concurrency_key_that_follows_from_its_args_is_shared_with_others(scene: Scene) -> None:
    keyed = {"concurrency_key": {"key": "tenant-{args.of}", "max": 1}}
    job = await scene.job(schedule=DAILY, **keyed)
    await ask(scene, job, 2, max_concurrency=2, args={"of": "a"})
    await turn(scene)
    taken: list[Row] = await scene.take(worker=W)
    assert len(taken) == 1 and sorted(await scene.states(job)) == ["running", "waiting"]


async def test_what_depends_on_the_job_follows_with_the_same_logical_time(scene: Scene) -> None:
    job = await scene.job(name="extract", schedule=DAILY)
    child = await scene.job(name="load", schedule=None, depends_on=[{"job": "extract"}])
    backfill = await ask(scene, job, 2)
    await turn(scene)
    [run] = await scene.take(worker=W)
    await scene.end(W, end_of(run))
    assert await logical(scene, child) == days(0)
    await drain(scene)
    done = await scene.rows("select logical_at from history where job_id = $1 and final order by 1", child["id"])
    assert [row["logical_at"] for row in done] == days(0, 1)
    assert (await shown(scene, backfill))["succeeded"] == 2, "those that follow are none of its own"


async def test_what_follows_from_it_does_not_go_before_it(scene: Scene) -> None:
    job = await scene.job(name="extract", schedule=DAILY)
    await scene.job(name="load", schedule=None, depends_on=["extract"])
    await scene.job(name="least", schedule=None, depends_on=["load"], priority=7)
    await scene.job(name="last", schedule=None, depends_on=["least"])
    await ask(scene, job, 1)
    await turn(scene)
    await drain(scene)
    by_name = "select j.name, h.priority from history h join jobs j on j.id = h.job_id where h.final"
    filled = {row["name"]: row["priority"] for row in await scene.rows(by_name)}
    assert filled == {"extract": 100, "load": 100, "least": 7, "last": 100}
    await scene.ask(job)
    await drain(scene)
    by_hand = await scene.rows(by_name + " order by h.run_id desc limit 4")
    assert {row["name"]: row["priority"] for row in by_hand} == {"extract": 500, "load": 500, "least": 7, "last": 500}


# ── whatever happens ─────────────────────────────────────────────────────────────────────────────────────────────


class Life:
    """What may happen to a backfill and its job, in any order."""

    def __init__(self, scene: Scene, other: Database, job: dict[str, Any], backfill: dict[str, Any], seed: int) -> None:
        self.scene, self.other, self.job, self.backfill = scene, other, job, backfill
        self.rng = random.Random(seed)
        self.held: list[Row] = []

    async def go_on(self) -> None:
        """One thing."""
        happens = self.rng.choice([self.turn, self.turn, self.claim, self.claim, self.end, self.end, self.cancel_run,
                                   self.pause, self.resume, self.edit, self.lose])  # fmt: skip
        await happens()
        live = await self.scene.value("select count(*) from runs where backfill_id = $1", self.backfill["id"])
        assert live <= self.backfill["max_concurrency"]
        told = await shown(self.scene, self.backfill)
        assert told["made"] == told["live"] + told["succeeded"] + told["failed"] + told["cancelled"]

    async def turn(self) -> None:
        await asyncio.gather(*(fill(db, Tables(), self.rng.random() < 0.7) for db in (self.scene.db, self.other)))

    async def claim(self) -> None:
        await self.scene.sql.execute("update runs set ready_at = now() where state = 'staged' and trigger = 'backfill'")
        self.held += await self.scene.take(self.rng.randint(1, 3), W)

    async def end(self) -> None:
        ends = [self.held.pop() for _ in range(min(len(self.held), self.rng.randint(1, 3)))]
        outcomes = ("succeeded", "succeeded", "failed", "timeout", "cancelled")
        told = [(run, self.rng.choice(outcomes)) for run in ends]
        if told:
            await self.scene.end(W, *(end_of(run, o, None if o == "succeeded" else "Boom") for run, o in told))

    async def lose(self) -> None:
        """As if its worker were gone; what that says later is too late."""
        await self.scene.end(W, *(end_of(run, "lost") for run in self.held[-1:]))

    async def cancel_run(self) -> None:
        ids = await self.scene.rows("select id::text from runs where backfill_id = $1 order by id", self.backfill["id"])
        if ids and self.rng.random() < 0.5:
            await self.scene.api.post(f"/v1/runs/{self.rng.choice(ids)[0]}/cancel")

    async def pause(self) -> None:
        what = self.rng.choice([f"/v1/backfills/{self.backfill['id']}", f"/v1/jobs/{self.job['id']}"])
        await self.scene.api.http.post(f"{what}/pause", json={})  # 409 if it has ended

    async def resume(self) -> None:
        for what in (f"/v1/backfills/{self.backfill['id']}", f"/v1/jobs/{self.job['id']}"):
            await self.scene.api.http.post(f"{what}/resume", json={})

    async def edit(self) -> None:
        changed = {"max_concurrency": self.rng.choice([None, 1, 5]), "priority": self.rng.randint(0, 1000)}
        await self.scene.api.call("PATCH", f"/v1/jobs/{self.job['id']}", json=changed)

    async def come_to_an_end(self) -> None:
        while (await shown(self.scene, self.backfill))["state"] != "completed":
            await self.resume()
            await self.turn()
            await self.scene.sweep_waiting()
            await self.claim()
            while self.held:
                await self.end()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_each_occurrence_is_run_once(scene: Scene, other: Database, seed: int) -> None:
    job = await scene.job(schedule=DAILY, retry={"max_attempts": 2, "backoff": "immediate"})
    life = Life(scene, other, job, await ask(scene, job, 15, max_concurrency=1 + seed), seed)
    for _ in range(60):
        await life.go_on()
    await life.come_to_an_end()
    ended = await scene.rows("select logical_at from history where job_id = $1 and final order by 1", job["id"])
    assert [row["logical_at"] for row in ended] == days(*range(15))
    told = await shown(scene, life.backfill)
    assert (told["made"], told["live"], await scene.value("select count(*) from backfill_ends")) == (15, 0, 0)
    states = Counter(
        row[0] for row in await scene.rows("select state from history where job_id = $1 and final", job["id"])
    )
    assert (told["succeeded"], told["failed"], told["cancelled"]) == (
        states["succeeded"], states["dead"], states["cancelled"]
    )  # fmt: skip
