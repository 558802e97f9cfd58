"""The sweep covers everything in bounded turns: rows that do not change never hide the others."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene, end_of
from tocsin.flow import claim, sweep
from tocsin.node.reaper import Sweeper

W = "01900000-0000-7000-8000-000000000001"
# Keys with one running and one waiting run. A key sorts by its number.
FULL_KEYS = """
    with k as (
        select ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid as key
          from generate_series(1, $3::int) n
    ), limited as (
        insert into limits (tenant_id, key, max) select $1, key, 1 from k
    )
    insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, scheduled_for, ready_at,
                      order_key, max_attempts, limited, key_id, worker_id, blocked_by, blocked_key)
    select j.tenant_id, uuidv7(), j.id, 1, j.lane_id, s.state, 'api', 500, now(), now(), now(), 1, true, k.key,
           case s.state when 'running' then $4::uuid end, case s.state when 'waiting' then 'limit' end,
           case s.state when 'waiting' then k.key end
      from k
     cross join (values ('running'), ('waiting')) s(state)
     cross join (select * from jobs where tenant_id = $1 and id = $2) j
"""


# Ready runs of a job, the first $3 of them past their deadline.
PAST_DEADLINE = """
    insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, scheduled_for, ready_at,
                      order_key, max_attempts, deadline_at, limited, key_id, overlap)
    select j.tenant_id, uuidv7(), j.id, 1, j.lane_id, 'ready', 'api', 500, t.at, t.at, t.at, 1,
           case when n <= $3 then now() - interval '1 minute' end,
           j.max_concurrency is not null or j.key_id is not null, j.key_id, j.overlap
      from generate_series(1, $3::int + $4::int) n
     cross join (select * from jobs where tenant_id = $1 and id = $2) j
     cross join lateral (select now() - interval '1 hour' + n * interval '1 millisecond' as at) t
"""


def sweeper(scene: Scene, lanes: list[int]) -> Sweeper:
    return Sweeper(scene.db, lambda hints, stops: None, lambda: set(), lambda: set(lanes))


async def test_a_thousand_keys_that_stay_full_do_not_hide_the_one_with_room(scene: Scene) -> None:
    job = await scene.job(concurrency_key="{args.customer}")
    tenant_id = (await scene.who()).tenant_id
    await scene.employ(W)
    await scene.sql.execute(FULL_KEYS, tenant_id, job["id"], 2_500, W)
    last = uuid.UUID(f"00000000-0000-4000-8000-{2_500:012x}")
    await scene.sql.execute("delete from runs where state = 'running' and key_id = $1", last)
    sweeps = sweeper(scene, await scene.lanes())
    for turns in range(1, 4):
        await sweeps.run_once()
        ready = await scene.rows("select key_id from runs where state = 'ready'")
        assert [row["key_id"] for row in ready] == ([last] if turns == 3 else []), f"after {turns} turns"
    await sweeps.run_once()
    assert await scene.value("select count(*) from runs where state = 'ready'") == 1


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────


async def past_deadline(scene: Scene, expired: int, fresh: int, **spec: Any) -> dict[str, Any]:
    job = await scene.job(**spec)
    await scene.sql.execute(PAST_DEADLINE, (await scene.who()).tenant_id, job["id"], expired, fresh)
    await scene.sql.execute(
        "insert into limits (tenant_id, key, max) select tenant_id, key_id, key_max from jobs where key_id is not null"
    )
    await scene.employ(W)
    return job


async def ended(scene: Scene, job: dict[str, Any]) -> int:
    return await scene.value("select count(*) from history where job_id = $1 and state = 'expired'", job["id"])  # type: ignore[no-any-return]


async def test_a_claim_ends_runs_past_their_deadline_and_takes_those_behind_them(scene: Scene) -> None:
    job = await past_deadline(scene, 20, 4)
    taken = await claim.take(scene.db, await scene.shares(10), [W] * 10)
    assert [row["attempt"] for row in taken.rows] == [1] * 4
    assert len({row["slot"] for row in taken.rows}) == 4
    assert await ended(scene, job) == 10, "as many as it had looked at"
    assert taken.left.total() == 4, "it has seen all that could start"


async def test_a_claim_whose_slots_are_used_up_says_that_there_is_more(scene: Scene) -> None:
    job = await past_deadline(scene, 2, 8)
    await scene.sql.execute("update runs set order_key = order_key + interval '1 day' where deadline_at is not null")
    await scene.sql.execute(
        "update runs set order_key = order_key - interval '2 days' where id = (select id from runs where deadline_at is"
        " not null limit 1)"
    )
    [share] = await scene.shares(3)
    taken = await claim.take(scene.db, [share], [W] * 2)
    assert (len(taken.rows), await ended(scene, job)) == (2, 1)
    assert taken.left[share.lane_id, share.tenant_id] >= share.most


@pytest.mark.parametrize(
    "spec",
    [{"max_concurrency": 2}, {"concurrency_key": {"key": "k", "max": 2}}, {"overlap": "queue"}],
    ids=["max_concurrency", "concurrency_key", "overlap"],
)
async def test_runs_under_a_limit_end_in_a_claim_too(scene: Scene, spec: dict[str, Any]) -> None:
    job = await past_deadline(scene, 20, 2, **spec)
    taken = await claim.take(scene.db, await scene.shares(10), [W] * 10)
    assert (len(taken.rows), await ended(scene, job)) == (2, 10)


async def test_a_one_time_job_whose_run_is_past_its_deadline_is_completed_by_the_claim(scene: Scene) -> None:
    at = (await scene.now() + timedelta(hours=1)).isoformat()
    job = await scene.job(schedule={"at": at})
    [run] = await scene.occur(job, 5)
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 second'")
    assert await scene.take(10, W) == []
    assert ((await scene.run(run))["state"], await ended(scene, job)) == ("expired", 1)
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "completed"


async def test_a_claim_that_ends_an_expired_occurrence_releases_the_next_one(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="queue")
    first, second = await scene.occur(job, 9, 6)
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 second' where id = $1", first)
    assert await scene.take(10, W) == [], "it is judged while the first one lives"
    assert [row["id"] for row in await scene.take(10, W)] == [second]


async def test_the_sweep_ends_all_that_is_past_its_deadline_in_bounded_turns(scene: Scene) -> None:
    job = await past_deadline(scene, 25_000, 0)
    sweeps = sweeper(scene, [])
    assert await sweeps.run_once() == 0.0, "there is more to do"
    assert await ended(scene, job) == 20_000
    assert await sweeps.run_once() == 1.0
    assert await ended(scene, job) == 25_000


async def test_many_late_occurrences_are_judged_one_by_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows were compared with each other: 20,000 of them held the event loop for four seconds."""

    class Alone(dict[str, Any]):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared with another row")

        __hash__ = None  # type: ignore[assignment]

    fetch = scene.db.fetch

    async def fetch_alone(*args: Any) -> Any:
        return [Alone(row) for row in await fetch(*args)]

    jobs = [
        await scene.job(schedule={"every": "PT1H", "misfire": {"policy": policy}}, overlap="allow")
        for policy in ("skip", "latest", "all")
    ]
    for job in jobs:
        await scene.occur(job, -1, -2, -3)
    await scene.sql.execute("update runs set ready_at = now() - interval '5 minutes'")
    monkeypatch.setattr(scene.db, "fetch", fetch_alone)
    await sweep.misfires(scene.db, await scene.lanes())
    assert [len(await scene.states(job)) for job in jobs] == [0, 1, 3]


# ── unused limits ────────────────────────────────────────────────────────────────────────────────────────────────


async def forget_limits(scene: Scene) -> int:
    """Check all limits once. Return how many remain."""
    after = await sweep.forget_limits(scene.db, None)
    while after is not None:
        after = await sweep.forget_limits(scene.db, after)
    return await scene.value("select count(*) from limits")  # type: ignore[no-any-return]


async def test_keys_that_were_used_once_are_forgotten_page_by_page(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_LIMITS", 3)
    job = await scene.job(concurrency_key="{args.customer}")
    for customer in range(8):
        await scene.ask(job, 2, args={"customer": customer})
    await scene.employ(W)
    taken = await scene.take(100, W)
    assert (len(taken), await forget_limits(scene)) == (8, 9), "runs run under all of them"
    await scene.end(W, *(end_of(row) for row in taken))
    assert await forget_limits(scene) == 9, "runs were let go by all of them"
    await scene.end(W, *(end_of(row) for row in await scene.take(100, W)))
    assert await forget_limits(scene) == 1, "that of the job, which may get more runs"
    await scene.api.call("DELETE", f"/v1/jobs/{job['id']}")
    assert await forget_limits(scene) == 0


async def test_a_limit_whose_rate_is_used_up_is_kept(scene: Scene) -> None:
    await scene.ask(await scene.job(concurrency_key="{args.c}", rate_limit="1/hour"), args={"c": 1})
    await scene.employ(W)
    [run] = await scene.take(10, W)
    await scene.end(W, end_of(run))
    assert await forget_limits(scene) == 2
    await scene.sql.execute("update limits set tat = now() - interval '1 second'")
    assert await forget_limits(scene) == 1


async def test_a_claim_recreates_a_limit_that_was_removed(scene: Scene) -> None:
    """Runs were staged while the limit was being removed, or long before."""
    job = await scene.job(concurrency_key={"key": "k-{args.c}", "max": 2})
    await scene.ask(job, 5, args={"c": 1})
    await scene.sql.execute("delete from limits")
    await scene.employ(W)
    assert len(await scene.take(10, W)) == 2, "no more than the key lets go"
    rows = await scene.rows("select key = $1 as of_job, max from limits order by 1", uuid.UUID(job["id"]))
    assert [tuple(row) for row in rows] == [(False, 2), (True, 2147483647)]
