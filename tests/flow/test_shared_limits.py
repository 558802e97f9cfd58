"""Limits that jobs share: concurrency keys, rates, and occurrences that replace the one before."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from tests import PATIENCE
from tests.flow.kit import Scene, end_of
from tocsin.flow import claim, sweep
from tocsin.flow.claim import THE_BEGINNING, Share

W = "01900000-0000-7000-8000-000000000001"


async def waiting(scene: Scene) -> list[tuple[str, int]]:
    rows = await scene.rows("select blocked_by, count(*) from runs where state = 'waiting' group by 1 order by 1")
    return [tuple(row) for row in rows]


async def running(scene: Scene, job: dict[str, Any]) -> int:
    return await scene.value("select count(*) from runs where job_id = $1 and state = 'running'", job["id"])  # type: ignore[no-any-return]


# ── concurrency keys ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_key_is_shared_across_jobs(scene: Scene) -> None:
    one = await scene.job(concurrency_key={"key": "billing", "max": 3})
    two = await scene.job(concurrency_key={"key": "billing", "max": 3})
    free = await scene.job()
    for job in (one, two, free):
        await scene.ask(job, 4)
    taken = await scene.take(100, await scene.employ(W))
    by_job = Counter(row["job_id"] for row in taken)
    assert by_job[one["id"]] + by_job[two["id"]] == 3
    assert by_job[free["id"]] == 4
    assert await waiting(scene) == [("limit", 5)]
    done = next(row for row in taken if row["job_id"] != free["id"])
    await scene.end(W, end_of(done))
    assert await waiting(scene) == [("limit", 4)]
    again = await scene.take(100, W)
    assert len(again) == 1


async def test_a_short_key_lets_one_run_at_a_time(scene: Scene) -> None:
    job = await scene.job(concurrency_key="migration")
    await scene.ask(job, 3)
    for left in (2, 1, 0):
        [run] = await scene.take(100, await scene.employ(W))
        await scene.end(W, end_of(run))
        assert len(await scene.states(job)) == left


async def test_keys_from_arguments_are_apart(scene: Scene) -> None:
    job = await scene.job(concurrency_key="customer-{args.customer}")
    for customer in ("a", "a", "b", "c", "c", "c"):
        await scene.ask(job, 1, args={"customer": customer})
    taken = await scene.take(100, await scene.employ(W))
    assert sorted(row["args"] for row in taken) == [f'{{"customer":"{c}"}}' for c in "abc"]
    assert await waiting(scene) == [("limit", 3)]


async def test_retries_by_hand_and_redrives_keep_their_key(scene: Scene) -> None:
    job = await scene.job(concurrency_key="customer-{args.customer}", retry={"max_attempts": 1})
    [first] = await scene.ask(job, 1, args={"customer": "a"})
    [run] = await scene.take(100, await scene.employ(W))
    await scene.end(W, end_of(run, "failed", "boom"))
    await scene.api.post(f"/v1/runs/{first}/retry", {})
    await scene.api.post("/v1/dead-letters/redrive", {"ids": [first]})
    await scene.ask(job, 1, args={"customer": "a"})
    keys = await scene.rows("select distinct key_id from runs where job_id = $1", job["id"])
    assert len(keys) == 1
    assert len(await scene.take(100, W)) == 1


async def test_job_limit_and_key_hold_together(scene: Scene) -> None:
    job = await scene.job(concurrency_key={"key": "k-{args.k}", "max": 2}, max_concurrency=3)
    for k in "aaabbb":
        await scene.ask(job, 1, args={"k": k})
    taken = await scene.take(100, await scene.employ(W))
    assert len(taken) == 3
    assert max(Counter(row["args"] for row in taken).values()) == 2


async def test_who_is_behind_a_blocked_run_is_not_held_up(scene: Scene) -> None:
    job = await scene.job(concurrency_key="k-{args.k}")
    for k in "aab":
        await scene.ask(job, 1, args={"k": k})
    assert len(await scene.take(2, await scene.employ(W))) + len(await scene.take(2, W)) == 2


async def test_edit_of_a_key_binds_new_runs(scene: Scene) -> None:
    job = await scene.job(concurrency_key="one")
    await scene.ask(job, 2)
    assert len(await scene.take(100, await scene.employ(W))) == 1
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"concurrency_key": None})
    await scene.ask(job, 2)
    assert len(await scene.take(100, W)) >= 2


# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_rate_lets_a_burst_go_and_then_one_after_the_other(scene: Scene) -> None:
    job = await scene.job(rate_limit={"rate": "60/min", "burst": 2})
    await scene.ask(job, 5)
    shares = await scene.shares(100)
    taken = await claim.take(scene.db, shares, [await scene.employ(W)] * 100)
    assert len(taken.rows) == 2
    assert await waiting(scene) == [("rate", 3)]
    [(key, at)] = taken.opens.items()
    ahead = at - await scene.now()
    assert timedelta(0) < ahead <= timedelta(seconds=1)
    await scene.sweep_waiting()
    assert await waiting(scene) == [("rate", 3)], "not before it may"
    await scene.sql.execute("update limits set tat = tat - interval '1 second'")
    await sweep.release_keys(scene.db, [key], await scene.lanes())
    assert await waiting(scene) == [("rate", 2)]
    assert len(await scene.take(100, W)) == 1
    assert len(await scene.take(100, W)) == 0


async def test_a_rate_belongs_to_the_key_if_there_is_one(scene: Scene) -> None:
    jobs = [await scene.job(concurrency_key={"key": "api", "max": 100}, rate_limit="1/hour") for _ in range(2)]
    for job in jobs:
        await scene.ask(job, 2)
    assert len(await scene.take(100, await scene.employ(W))) == 1
    assert await waiting(scene) == [("rate", 3)]


async def test_a_rate_that_is_taken_away_holds_nobody(scene: Scene) -> None:
    job = await scene.job(rate_limit="1/hour")
    await scene.ask(job, 4)
    assert len(await scene.take(100, await scene.employ(W))) == 1
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"rate_limit": None})
    assert len(await scene.take(100, W)) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rate_limit", "often"),
        ("rate_limit", {"rate": "0/s"}),
        ("rate_limit", {"rate": "1/s", "burst": 0}),
        ("concurrency_key", ""),
        ("concurrency_key", "{customer}"),
        ("concurrency_key", {"key": "a", "max": 0}),
        ("concurrency_key", {"key": "a", "most": 1}),
    ],
)
async def test_limits_that_mean_nothing_are_refused(scene: Scene, field: str, value: Any) -> None:
    body = {"target": {"kind": "process", "command": ["true"]}, field: value}
    problem = await scene.api.call("POST", "/v1/jobs", json=body, expect=422)
    assert field in problem["errors"][0]["path"]
    assert await scene.value("select count(*) from jobs") == 0


# ── replace ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_occurrence_replaces_the_one_that_runs(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="replace")
    [first] = await scene.occur(job, 3)
    [run] = await scene.take(10, await scene.employ(W))
    [second] = await scene.occur(job, 1)
    taken = await claim.take(scene.db, await scene.shares(10), [W] * 10)
    assert (taken.rows, [key.id for key in taken.replaces]) == ([], [job["id"]])
    replaced = await scene.replace()
    assert [stop.run_id for stop in replaced.stops] == [first]
    assert (await scene.run(first))["state"] == "stopping"
    assert (await scene.replace()).stops == [], "once told is told"
    assert await scene.take(10, W) == [], "not before the proof"
    await scene.end(W, end_of(run, "cancelled"))
    [started] = await scene.take(10, W)
    assert started["id"] == second
    assert (await scene.run(first))["state"] == "cancelled"


async def test_the_youngest_replaces_all_that_stand_before_it(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="replace")
    await scene.occur(job, 9)
    [run] = await scene.take(10, await scene.employ(W))
    waiting_ones = await scene.occur(job, 7, 5, 3)
    await scene.take(10, W)
    replaced = await scene.replace()
    assert len(replaced.stops) == 1
    assert [(await scene.run(id_))["reason"] for id_ in waiting_ones] == ["coalesced", "coalesced", None]
    await scene.end(W, end_of(run, "cancelled"))
    [started] = await scene.take(10, W)
    assert started["id"] == waiting_ones[-1]


async def test_a_success_before_the_order_arrives_stays_a_success(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="replace")
    [first] = await scene.occur(job, 3)
    [run] = await scene.take(10, await scene.employ(W))
    [second] = await scene.occur(job, 1)
    await scene.take(10, W)
    await scene.replace()
    await scene.end(W, end_of(run))
    assert (await scene.run(first))["state"] == "succeeded"
    assert [row["id"] for row in await scene.take(10, W)] == [second]


async def test_what_somebody_asked_for_is_not_replaced_before_it_began(scene: Scene) -> None:
    """Runs by hand are never skipped: the occurrence waits for one that is due, and leaves one that is to come."""
    job = await scene.job(schedule={"every": "PT1H"}, overlap="replace")
    [asked] = await scene.ask(job)
    [later] = await scene.ask(job, at=(await scene.now() + timedelta(hours=1)).isoformat())
    [occurrence] = await scene.occur(job, 0)
    await scene.sql.execute("update runs set order_key = now() - interval '1 hour' where id = $1", occurrence)
    await scene.take(1, await scene.employ(W))
    assert (await scene.run(occurrence))["blocked_by"] == "overlap"
    await scene.replace()
    assert [(await scene.run(id_))["state"] for id_ in (asked, later)] == ["ready", "staged"]
    [run] = await scene.take(10, W)
    assert run["id"] == asked
    replaced = await scene.replace()
    assert [stop.run_id for stop in replaced.stops] == [asked], "once it runs it is in the way as any other"
    await scene.end(W, end_of(run, "cancelled"))
    assert [row["id"] for row in await scene.take(10, W)] == [occurrence]
    assert (await scene.run(later))["state"] == "staged"


# ── whatever happens ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_several_dispatchers_never_pass_a_limit_and_leave_nobody_behind(scene: Scene) -> None:
    """Claims, ends and submissions at once: no key and no job is ever over its limit, and all is done in the end."""
    jobs = [
        await scene.job(concurrency_key={"key": "shared", "max": 4}),
        await scene.job(concurrency_key={"key": "shared", "max": 4}, max_concurrency=2),
        await scene.job(concurrency_key="c-{args.c}"),
        await scene.job(max_concurrency=3),
    ]
    rng = random.Random(11)
    for _ in range(40):
        await scene.ask(rng.choice(jobs), rng.randint(1, 5), args={"c": rng.choice("xyz")})
    total = await scene.value("select count(*) from runs")
    ended = 0
    places = await scene.rows("select distinct lane_id, tenant_id from runs")
    over: list[Any] = []

    async def watch() -> None:
        over.extend(
            await scene.rows(
                "select r.key_id::text, count(*) from runs r join jobs j on j.id = r.job_id"
                " where r.state = 'running' and r.key_id is not null group by r.key_id having count(*) > max(j.key_max)"
                " union all select r.job_id::text, count(*) from runs r join jobs j on j.id = r.job_id"
                " where r.state = 'running' and j.max_concurrency is not null group by r.job_id, j.max_concurrency"
                " having count(*) > j.max_concurrency"
            )
        )

    async def dispatcher(number: int) -> None:
        nonlocal ended
        mine = await scene.employ(f"01900000-0000-7000-8000-00000000000{number}")
        shares = [Share(p["lane_id"], p["tenant_id"], 5, THE_BEGINNING) for p in places]
        while ended < total:
            taken = await claim.take(scene.db, shares, [mine] * 5)
            if taken.rows:
                done = await scene.end(mine, *(end_of(row) for row in taken.rows))
                ended += len(done.accepted)
            await scene.sweep_waiting()

    async def watching() -> None:
        while ended < total:
            await watch()

    await asyncio.wait_for(asyncio.gather(watching(), *(dispatcher(n) for n in (1, 2, 3))), PATIENCE)
    assert over == []
    assert ended == total
    assert await scene.value("select count(*) from runs") == 0
