"""Late occurrences: those that waited while a worker lived run, those that found no worker are misfires."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene
from tocsin.flow import claim, sweep
from tocsin.flow.claim import THE_BEGINNING, Share

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
SKIP = {"every": "PT1H", "misfire": {"policy": "skip"}}


async def worker(
    scene: Scene, since: timedelta, until: timedelta | None = None, pool: str = "default", kind: str = "process"
) -> str:
    """Create a worker that registered `since` ago, and that either went `until` ago or lives."""
    id_ = str(uuid.uuid4())
    await scene.sql.execute(
        "insert into workers (id, key_id, name, pool, slots, targets, state, registered_at, lease_until, gone_at)"
        " values ($1, $1, 'test', $2, 10, array[$3::text], $4, now() - $5::interval,"
        " now() - coalesce($6::interval, interval '-1 hour'), now() - $6::interval)",
        id_,
        pool,
        kind,
        "live" if until is None else "gone",
        since,
        until,
    )
    return id_


async def late(scene: Scene, job: dict[str, Any], *minutes: float) -> list[str]:
    """Create occurrences of a job that fell due this many minutes ago and are still staged."""
    ids = await scene.occur(job, *(-10 - n for n, _ in enumerate(minutes)))
    for id_, ago in zip(ids, minutes, strict=True):
        await scene.sql.execute(
            "update runs set ready_at = now() - $2::interval, order_key = now() - $2::interval where id = $1",
            id_,
            ago * MINUTE,
        )
    return ids


async def lanes(scene: Scene) -> list[int]:
    return [row["lane_id"] for row in await scene.rows("select distinct lane_id from runs order by 1")]


async def take(scene: Scene, worker_id: str) -> set[str]:
    places = await scene.rows("select distinct lane_id, tenant_id from runs")
    shares = [Share(p["lane_id"], p["tenant_id"], 10, THE_BEGINNING) for p in places]
    return {row["id"] for row in (await claim.take(scene.db, shares, [worker_id] * 10)).rows}


async def test_an_occurrence_that_waits_while_a_worker_lives_is_late_not_missed(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule=SKIP)
    busy = await worker(scene, timedelta(hours=2))
    ids = await late(scene, job, 90, 10, 2)
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == []
    assert await scene.states(job) == ["staged"] * 3, "claims take them as they are"
    assert await take(scene, busy) == set(ids)


async def test_promotion_takes_late_occurrences_while_a_worker_lives(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule=SKIP)
    await worker(scene, timedelta(hours=2))
    await late(scene, job, 10, 2)
    [place] = [(s.lane_id, s.tenant_id) for s in await scene.shares(1)]
    assert await claim.promote(scene.db, [place], 1000) == 0, "nobody vouches for the lane yet"
    await sweep.misfires(scene.db, await lanes(scene))
    assert await claim.promote(scene.db, [place], 1000) == 2


async def test_an_occurrence_without_a_worker_is_a_misfire(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule=SKIP)
    # One worker was there until 30 minutes ago, the next one came five minutes ago.
    await worker(scene, timedelta(hours=2), 30 * MINUTE)
    back = await worker(scene, 5 * MINUTE)
    before, _, _, just, after = await late(scene, job, 40, 25, 7, 5.5, 4)
    assert await take(scene, back) == set(), "the sweep decides first"
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == [("misfire_expired", 1)] * 2
    assert await take(scene, back) == {before, just, after}


@pytest.mark.parametrize("other", [{"pool": "elsewhere"}, {"kind": "http"}])
async def test_a_worker_that_may_not_take_it_does_not_count(scene: Scene, other: dict[str, str]) -> None:
    await scene.sql.execute("insert into pools (name) values ('elsewhere') on conflict do nothing")
    job = await scene.job(overlap="allow", schedule=SKIP)
    await worker(scene, timedelta(hours=2), **other)
    await worker(scene, 1 * SECOND)
    await late(scene, job, 10)
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == [("misfire_expired", 1)]


async def test_a_worker_that_vouches_for_a_lane_must_live(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule=SKIP)
    old = await worker(scene, timedelta(hours=2))
    await late(scene, job, 90)
    await sweep.misfires(scene.db, await lanes(scene))
    await scene.sql.execute(
        "update workers set state = 'gone', gone_at = now() - interval '20 minutes',"
        " lease_until = now() - interval '20 minutes' where id = $1",
        old,
    )
    new = await worker(scene, MINUTE)
    [missed] = await late(scene, job, 10)
    assert await take(scene, new) == set()
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == [("misfire_expired", 1)]
    assert missed not in await take(scene, new)


async def test_a_pause_of_its_pool_is_time_without_a_worker(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule=SKIP)
    there = await worker(scene, timedelta(hours=2))
    await scene.api.post("/v1/pools/default/pause", {"reason": "test"})
    await scene.sql.execute("update pools set paused_at = now() - interval '30 minutes'")
    await late(scene, job, 10)
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == [("misfire_expired", 1)], "while the pause lasts"
    before, _ = await late(scene, job, 40, 20)
    await scene.api.post("/v1/pools/default/resume", {"reason": "test"})
    assert await take(scene, there) == {before}
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == [("misfire_expired", 1)] * 2, "and after it"


async def test_a_suspension_of_its_tenant_is_time_without_a_worker(scene: Scene) -> None:
    await scene.api.post("/v1/tenants", {"slug": "acme"})
    acme = await scene.api.with_key("editor", "acme")
    job, other = await scene.job(acme, overlap="allow", schedule=SKIP), await scene.job(overlap="allow", schedule=SKIP)
    there = await worker(scene, timedelta(hours=2))
    await scene.api.post("/v1/tenants/acme/suspend", {"reason": "test"})
    await scene.sql.execute("update tenants set suspended_at = now() - interval '30 minutes' where slug = 'acme'")
    await scene.api.post("/v1/tenants/acme/resume", {"reason": "test"})
    await late(scene, job, 10)
    [not_suspended] = await late(scene, other, 10)
    await sweep.misfires(scene.db, await lanes(scene))
    assert await scene.missed(job) == [("misfire_expired", 1)]
    assert await take(scene, there) == {not_suspended}
