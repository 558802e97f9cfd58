"""claim: who may start, in which order, and what waits, is skipped or expires instead."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene, end_of
from tocsin.flow import claim, report, sweep
from tocsin.flow.claim import Share
from tocsin.flow.report import Returned

W = str(uuid.uuid4())


async def test_a_claim_marks_running_and_gives_a_new_fence(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(), args={"x": 1})
    [row] = await scene.take(5, W)
    assert (row["id"], row["attempt"], row["slot"]) == (run_id, 1, 1)
    assert row["args"] is not None and row["fence"] >> 40 >= 1
    live = await scene.row("select * from runs where id = $1", run_id)
    assert (live["state"], str(live["worker_id"]), live["fence"]) == ("running", W, row["fence"])
    assert live["claimed_at"] is not None
    assert await scene.take(5, W) == []


async def test_each_slot_gets_one_run_and_no_run_goes_twice(scene: Scene) -> None:
    job = await scene.job()
    ids = await scene.ask(job, 60)
    shares = await scene.shares(20)
    await scene.employ(W)
    first, *others = await asyncio.gather(*(claim.take(scene.db, shares, [W] * 20) for _ in range(3)))
    got = [row["id"] for taken in (first, *others) for row in taken.rows]
    assert len(got) == len(set(got))
    got += [row["id"] for row in await scene.take(60)]
    assert sorted(got) == sorted(ids)
    assert [row["slot"] for row in first.rows] == list(range(1, len(first.rows) + 1))


async def test_priority_is_a_head_start_and_waiting_catches_up(scene: Scene) -> None:
    job = await scene.job()
    [low], [middle], [high] = [await scene.ask(job, priority=p) for p in (0, 500, 1000)]
    # 20 ms a point: the low one has waited 21 s longer than the high one.
    await scene.sql.execute(
        "update runs set ready_at = ready_at - interval '21 s', order_key = order_key - interval '21 s' where id = $1",
        low,
    )
    assert [(await scene.take(1))[0]["id"] for _ in range(3)] == [low, high, middle]


async def test_due_staged_runs_are_taken_and_later_ones_left(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule={"every": "PT1H"})
    due, later = await scene.occur(job, -0.001, -3600)
    await asyncio.sleep(0.002)
    assert [row["id"] for row in await scene.take()] == [due]
    assert (await scene.run(later))["state"] == "staged"


async def test_a_share_takes_no_more_than_it_says_from_ready_and_staged_together(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule={"every": "PT1H"})
    await scene.ask(job, 3)
    staged = await scene.occur(job, -1, -2, -3)
    await scene.sql.execute("update runs set ready_at = now() - interval '1 s' where state = 'staged'")
    rows = await scene.take(4)
    assert len(rows) == 4 and sum(row["id"] in staged for row in rows) == 1


async def test_a_staged_occurrence_more_than_a_minute_late_is_left_to_the_misfire_rule(scene: Scene) -> None:
    served = [p.lane_id for p in await scene.shares(1)]
    jobs = {
        policy: await scene.job(overlap="allow", schedule={"every": "PT1H", "misfire": {"policy": policy}})
        for policy in ("latest", "all", "skip")
    }
    once = await scene.job(schedule={"delay": "PT5S"})
    for job in jobs.values():
        await scene.occur(job, -1, -2)
    [by_hand] = await scene.ask(jobs["skip"], at="2998-01-01T00:00:00Z")
    await scene.sql.execute("update runs set ready_at = ready_at - interval '2 min' where trigger = 'schedule'")
    await scene.sql.execute("update runs set ready_at = now() - interval '2 min' where id = $1", by_hand)
    assert [row["id"] for row in await scene.take()] == [by_hand], "a run by hand is never a misfire"
    served = [row["lane_id"] for row in await scene.rows("select distinct lane_id from runs")]
    await sweep.misfires(scene.db, served)
    assert await scene.missed(jobs["latest"]) == [("coalesced", 1)]
    assert await scene.missed(jobs["all"]) == []
    assert await scene.missed(jobs["skip"]) == [("misfire_expired", 1), ("misfire_expired", 1)]
    assert await scene.states(jobs["all"]) == ["ready", "ready"]
    assert await scene.states(jobs["latest"]) == await scene.states(once) == ["ready"]
    assert len(await scene.take()) == 4


async def test_promotion_puts_due_staged_runs_in_order(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule={"every": "PT1H"})
    soon, later = await scene.occur(job, -1, -3600)
    [place] = [(s.lane_id, s.tenant_id) for s in await scene.shares(1)]
    assert await claim.promote(scene.db, [place], 1000) == 0
    await scene.sql.execute("update runs set ready_at = now() where id = $1", soon)
    assert await claim.promote(scene.db, [place], 1000) == 1
    assert [(await scene.run(i))["state"] for i in (soon, later)] == ["ready", "staged"]


async def test_heads_name_every_tenant_with_something_to_claim(scene: Scene) -> None:
    await scene.ask(await scene.job(), 2)
    await scene.api.post("/v1/tenants", {"slug": "other", "weight": 3})
    other = await scene.api.with_key("editor", "other")
    job = await scene.job(other, schedule={"every": "PT1H"})
    await scene.occur(job, -30)
    shares = await scene.shares(1)
    heads = await claim.heads(scene.db, sorted({s.lane_id for s in shares}))
    assert {(h.lane_id, h.tenant_id) for h in heads} == {(s.lane_id, s.tenant_id) for s in shares}
    assert sorted((h.head is None, h.due is None) for h in heads) == [(False, True), (True, False)]
    assert sorted(terms.weight for terms in (await claim.tenants(scene.db)).values()) == [1, 3]


async def test_a_floor_hides_only_what_stands_before_it(scene: Scene) -> None:
    [early, late] = await scene.ask(await scene.job(), 2)
    await scene.sql.execute("update runs set order_key = order_key - interval '1 min' where id = $1", early)
    key = await scene.value("select order_key from runs where id = $1", late)
    [share] = await scene.shares(5)
    await scene.employ(W)
    taken = await claim.take(scene.db, [share._replace(floor=key)], [W] * 5)
    assert [row["id"] for row in taken.rows] == [late]
    assert [row["id"] for row in await scene.take()] == [early]


# ── fences ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_fences_rise_with_each_claim_and_with_each_restore(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    [first] = await scene.taken(W)
    await scene.end(W, end_of(first, "lost"))
    await scene.wake(run_id)
    [second] = await scene.taken(W)
    assert second[0] == run_id and second[2] == first[2] + 1
    await scene.end(W, end_of(second, "lost"))
    # A backup is restored: what was handed out after it was taken is unknown, so the epoch must rise above it.
    await scene.sql.execute("update cluster set restored = restored + 5")
    await scene.wake(run_id)
    [third] = await scene.taken(W)
    assert (third[2] >> 40) == (second[2] >> 40) + 5
    assert (await scene.end(W, end_of(second))).accepted == set()
    assert (await scene.end(W, end_of(third))).accepted == {(run_id, third[2])}


# ── pause and deadline ───────────────────────────────────────────────────────────────────────────────────────────


async def test_runs_of_a_paused_job_are_parked_and_come_back(scene: Scene) -> None:
    job, free = await scene.job(), await scene.job()
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    await scene.ask(job, 3)
    [neighbour] = await scene.ask(free)
    assert [row["id"] for row in await scene.take()] == [neighbour]
    parked = await scene.rows("select state, blocked_by, blocked_key::text from runs where job_id = $1", job["id"])
    assert [tuple(r) for r in parked] == [("waiting", "paused", job["id"])] * 3
    await scene.sweep_waiting()
    assert await scene.states(job) == ["waiting"] * 3
    await scene.sql.execute("delete from holds")
    await scene.sweep_waiting()
    assert len(await scene.take()) == 3


async def test_what_has_not_started_before_its_deadline_expires(scene: Scene) -> None:
    job = await scene.job(schedule=None, start_deadline="PT1M")
    row = await scene.row("select id::text as id, deadline_at - ready_at as left from runs")
    assert row["left"] == timedelta(minutes=1)
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 s'")
    assert await scene.take() == []
    await sweep.expire(scene.db)
    run = await scene.run(row["id"])
    assert (run["state"], run["reason"], run["attempt"], run["started_at"]) == ("expired", "expired", 1, None)
    assert (await scene.api.get(f"/v1/runs/{row['id']}/attempts"))["items"] == []
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "completed"


async def test_a_deadline_does_not_count_after_the_first_attempt(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(start_deadline="PT1M"))
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "lost"))
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 s'")
    await scene.wake(run_id)
    await sweep.expire(scene.db)
    assert [k[1] for k in await scene.taken(W)] == [2]


# ── ahead of the instant ─────────────────────────────────────────────────────────────────────────────────────────


async def ahead(scene: Scene, slots: int = 10, lead: float = 60) -> claim.Ahead:
    await scene.employ(W)
    return await claim.take_ahead(scene.db, await scene.shares(slots), [W] * slots, timedelta(seconds=lead))


def ids_of(taken: claim.Ahead) -> list[str]:
    return [row["id"] for row in taken.rows]


async def test_what_falls_due_soon_is_handed_out_with_its_instant_and_the_rest_is_named(scene: Scene) -> None:
    job = await scene.job(overlap="allow", schedule={"every": "PT1H"})
    late, soon, _, later = await scene.occur(job, 1, -30, -90, -80)
    taken = await ahead(scene)
    assert ids_of(taken) == [soon], "neither what is due, which the claim takes, nor what is too far away"
    [row] = taken.rows
    assert timedelta(seconds=28) < row["ready_at"] - row["claimed_at"] < timedelta(seconds=30)
    assert [(await scene.run(i))["state"] for i in (late, soon, later)] == ["ready", "running", "staged"]
    at = await scene.value("select ready_at from runs where id = $1", later)
    assert list(taken.next_due.values()) == [at] and taken.until < at
    assert (await scene.run(soon))["start_lag_ms"] == 0


async def test_of_more_than_fit_the_foremost_are_handed_out(scene: Scene) -> None:
    job = await scene.job()
    at = (await scene.now() + timedelta(seconds=30)).isoformat()
    ids = {p: (await scene.ask(job, at=at, priority=p))[0] for p in (0, 500, 900, 300)}
    assert ids_of(await ahead(scene, 2)) == [ids[900], ids[500]]
    assert [row["id"] for row in await scene.take()] == [], "the others wait for their instant"


async def test_nothing_is_handed_out_twice(scene: Scene) -> None:
    job = await scene.job()
    ids = await scene.ask(job, 60, at=(await scene.now() + timedelta(seconds=30)).isoformat())
    shares = await scene.shares(30)
    await scene.employ(W)
    several = await asyncio.gather(
        *(claim.take_ahead(scene.db, shares, [W] * 30, timedelta(minutes=1)) for _ in range(4))
    )
    got = [i for taken in several for i in ids_of(taken)]
    while await scene.shares(1):
        got += ids_of(await ahead(scene))
    assert sorted(got) == sorted(ids)


async def test_what_may_yet_be_blocked_waits_for_its_instant(scene: Scene) -> None:
    every = {"every": "PT1H"}
    limited = await scene.job(max_concurrency=1, overlap="allow", schedule=every)
    running, queued, retried = [await scene.job(overlap=o, schedule=every) for o in ("skip", "queue", "queue_all")]
    await scene.occur(limited, -20)
    for job in (running, retried):
        await scene.occur(job, 0)
    taken = {row["job_id"]: row for row in await scene.take(worker=W)}
    await scene.end(W, end_of(taken[retried["id"]], "failed"))
    await scene.sql.execute("update runs set ready_at = now() + interval '1 h' where state = 'staged' and attempt = 1")
    for job in (running, retried):
        await scene.occur(job, -30)
    first, second = await scene.occur(queued, -31, -32)
    left = await ahead(scene)
    assert ids_of(left) == [first], "the second would be blocked by the first, the others by what is alive"
    assert (await scene.run(second))["state"] == "staged"
    assert min(at for at in left.next_due.values() if at) == await scene.value(
        "select ready_at from runs where limited"
    ), "also what was left is woken for at its instant"


async def test_a_run_by_hand_for_an_earlier_instant_blocks_an_occurrence_ahead(scene: Scene) -> None:
    job = await scene.job(overlap="skip", schedule={"every": "PT1H"})
    [by_hand] = await scene.ask(job, at=(await scene.now() + timedelta(seconds=10)).isoformat())
    await scene.occur(job, -20)
    assert ids_of(await ahead(scene)) == [by_hand]


async def test_a_pause_binds_what_is_handed_out_after_it(scene: Scene) -> None:
    before, after = [await scene.job(schedule={"every": "PT1H"}) for _ in range(2)]
    [handed_out] = await scene.occur(before, -30)
    assert ids_of(await ahead(scene)) == [handed_out]
    for job in (before, after):
        await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    await scene.occur(after, -30)
    await scene.ask(after, at=(await scene.now() + timedelta(seconds=30)).isoformat())
    assert ids_of(await ahead(scene)) == []
    assert await scene.states(before) == ["running"] and await scene.states(after) == ["staged", "staged"]


async def test_handed_back_before_its_instant_it_is_as_if_never_claimed(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, start_deadline="PT1M")
    [run_id] = await scene.occur(job, -30)
    [first] = (await ahead(scene)).rows
    back = await report.give_back(scene.db, [Returned(W, run_id, first["fence"])])
    run = await scene.run(run_id)
    assert (run["state"], run["attempt"], run["failures"], run["losses"]) == ("staged", 0, 0, 0)
    assert [hint.ready_at for hint in back.hints] == [first["ready_at"]]
    [second] = (await ahead(scene)).rows
    assert (second["attempt"], second["fence"]) == (1, first["fence"] + 1)
    assert (await scene.end(W, end_of(first))).accepted == set(), "the old claim is worth nothing"
    await report.give_back(scene.db, [Returned(W, run_id, second["fence"])])
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    assert await scene.states(job) == [], "a pause retracts it like any occurrence that nobody holds"


async def test_cancelled_before_its_instant_it_stops_without_having_started(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"})
    [run_id] = await scene.occur(job, -30)
    [row] = (await ahead(scene)).rows
    assert (await scene.api.post(f"/v1/runs/{run_id}/cancel"))["state"] == "stopping"
    await scene.end(W, end_of(row, "cancelled"))
    run = await scene.run(run_id)
    assert (run["state"], run["started_at"]) == ("cancelled", None)


async def test_a_start_is_recorded_between_the_instant_and_now(scene: Scene) -> None:
    job = await scene.job()
    ids = await scene.ask(job, 3, at=(await scene.now() + timedelta(seconds=30)).isoformat())
    rows = (await ahead(scene)).rows
    # Thirty seconds later: the claim was then, the instant is ten seconds ago.
    await scene.sql.execute(
        "update runs set claimed_at = claimed_at - interval '40 s', ready_at = now() - interval '10 s'"
    )
    for row, held in zip(rows, (0, 35_000, 10_000_000), strict=True):
        await scene.end(W, end_of(row, held_ms=held))
    lags = [(await scene.run(i))["start_lag_ms"] for i in ids]
    assert lags[0] == 0 and 4_000 < lags[1] < 6_000 and 9_000 < lags[2] < 11_000


# ── overlap ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def overlapping(scene: Scene, overlap: str, *ago: float) -> tuple[dict[str, Any], list[str]]:
    job = await scene.job(overlap=overlap, schedule={"every": "PT1H"})
    return job, await scene.occur(job, *ago)


async def test_skip_runs_the_earliest_and_records_the_others(scene: Scene) -> None:
    job, (first, second, third) = await overlapping(scene, "skip", 3, 2, 1)
    assert [row["id"] for row in await scene.take()] == [first]
    assert await scene.missed(job) == [("skipped_overlap", 1)] * 2
    for run_id in (second, third):
        run = await scene.run(run_id)
        assert (run["state"], run["reason"], run["attempt"]) == ("skipped", "skipped_overlap", 1)


async def test_a_run_in_back_off_counts_for_overlap_and_one_staged_for_later_does_not(scene: Scene) -> None:
    job, (first, later) = await overlapping(scene, "skip", 3, -3600)
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed"))
    assert (await scene.run(first))["state"] == "staged"
    await scene.sql.execute("update runs set ready_at = now() + interval '1 h' where id = $1", first)
    await scene.occur(job, 0)
    assert await scene.take() == []
    assert await scene.missed(job) == [("skipped_overlap", 1)]
    await scene.sql.execute("delete from runs where id = $1", first)
    [now_due] = await scene.occur(job, 0.5)
    assert [row["id"] for row in await scene.take()] == [now_due]
    assert (await scene.run(later))["state"] == "staged"


async def test_queue_lets_one_wait_and_coalesces_the_rest(scene: Scene) -> None:
    job, [first] = await overlapping(scene, "queue", 3)
    [key] = await scene.taken(W)
    assert key[0] == first
    second, _third = await scene.occur(job, 2, 1)
    assert await scene.take() == []
    assert (await scene.run(second))["blocked_by"] == "overlap"
    assert await scene.missed(job) == [("coalesced", 1)]
    await scene.end(W, end_of(key))
    assert [k[0] for k in await scene.taken(W)] == [second]


async def test_queue_all_runs_them_one_after_the_other(scene: Scene) -> None:
    job, ids = await overlapping(scene, "queue_all", 4, 3, 2, 1)
    order = []
    for _ in ids:
        [key] = await scene.taken(W)
        order.append(key[0])
        await scene.end(W, end_of(key))
    assert order == ids and await scene.missed(job) == []


async def test_a_retry_goes_before_the_occurrence_that_waits_for_it(scene: Scene) -> None:
    _, (first, second) = await overlapping(scene, "queue_all", 2, 1)
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed"))
    await scene.wake(first)
    await scene.sweep_waiting()
    assert [k[:2] for k in await scene.taken(W)] == [(first, 2)]
    assert (await scene.run(second))["state"] == "waiting"


async def test_allow_and_runs_by_hand_never_wait(scene: Scene) -> None:
    _, ids = await overlapping(scene, "allow", 3, 2, 1)
    assert len(await scene.take()) == len(ids)
    skipping, _ = await overlapping(scene, "skip", 1)
    await scene.take()
    await scene.ask(skipping, 3)
    assert len(await scene.take()) == 3
    # …but they count: an occurrence does not start beside them.
    await scene.occur(skipping, 0)
    assert await scene.take() == []


async def test_two_dispatchers_at_once_never_both_pass_an_overlap(scene: Scene) -> None:
    for turn in range(8):
        job, ids = await overlapping(scene, ("skip", "queue", "queue_all")[turn % 3], 4, 3, 2, 1)
        [share] = await scene.shares(1)
        await scene.employ(W)
        await asyncio.gather(*(claim.take(scene.db, [share], [W]) for _ in range(4)))
        while await scene.take():
            pass
        running = await scene.rows("select id::text as id from runs where job_id = $1 and state = 'running'", job["id"])
        assert [r["id"] for r in running] == [ids[0]]


# ── exact limits ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_limit_is_never_exceeded_by_many_takers_and_reports_release_what_waits(scene: Scene) -> None:
    job = await scene.job(max_concurrency=3)
    ids = await scene.ask(job, 30)
    beside = await scene.ask(await scene.job(), 5)
    ended: set[str] = set()
    most = 0

    async def taker(worker: str) -> None:
        nonlocal most
        idle = 0
        while len(ended) < len(ids) + len(beside) and idle < 200:
            keys = await scene.taken(worker, 4)
            running = await scene.db.fetchval(
                "engine", "select count(*) from runs where limited and state in ('running', 'stopping')"
            )
            most = max(most, running)
            if keys:
                await scene.end(worker, *(end_of(k) for k in keys))
                ended.update(k[0] for k in keys)
            idle = 0 if keys else idle + 1

    # `shares` uses the one superuser connection; each taker asks for its own.
    [share, *rest] = await scene.shares(4)
    assert not rest

    async def shares(slots: int) -> list[Share]:
        return [share._replace(most=slots)]

    scene.shares = shares  # type: ignore[method-assign]
    await asyncio.gather(*(taker(str(uuid.uuid4())) for _ in range(5)))
    assert ended == {*ids, *beside}, "what a limit parked was released by reports alone"
    assert most == 3


async def test_beyond_the_limit_runs_wait_and_a_released_one_starts(scene: Scene) -> None:
    job = await scene.job(max_concurrency=2)
    ids = await scene.ask(job, 4)
    keys = await scene.taken(W)
    assert [k[0] for k in keys] == ids[:2]
    assert [(await scene.run(i))["blocked_by"] for i in ids[2:]] == ["limit", "limit"]
    assert await scene.take() == []
    done = await scene.end(W, end_of(keys[0]))
    assert done.hints, "whoever frees a slot says so"
    assert await scene.states(job) == ["running", "ready", "waiting"]
    # Between attempts a run holds no slot.
    await scene.end(W, end_of(keys[1], "failed"))
    assert sorted(k[0] for k in await scene.taken(W)) == sorted(ids[2:])


async def test_a_stopping_run_still_holds_its_slot(scene: Scene) -> None:
    job = await scene.job(max_concurrency=1)
    first, second = await scene.ask(job, 2)
    [key] = await scene.taken(W)
    await scene.api.post(f"/v1/runs/{first}/cancel")
    await scene.sweep_waiting()
    await scene.ask(job)
    assert await scene.take() == [], "neither what waits nor what comes gets it"
    await scene.end(W, end_of(key, "cancelled"))
    assert [k[0] for k in await scene.taken(W)] == [second]


async def test_a_cancelled_waiting_run_leaves_and_the_others_stay(scene: Scene) -> None:
    job = await scene.job(max_concurrency=1)
    ids = await scene.ask(job, 3)
    [key] = await scene.taken(W)
    await scene.api.post(f"/v1/runs/{ids[1]}/cancel")
    assert await scene.states(job) == ["running", "waiting"]
    await scene.end(W, end_of(key))
    assert [k[0] for k in await scene.taken(W)] == [ids[2]]


async def test_nothing_is_claimed_for_a_worker_whose_lease_is_over(scene: Scene) -> None:
    job = await scene.job()
    ids = await scene.ask(job, 6)
    alive, lapsed = await scene.employ(str(uuid.uuid4())), await scene.employ(str(uuid.uuid4()), lease=-1)
    taken = await claim.take(scene.db, await scene.shares(6), [lapsed, alive, lapsed, alive, lapsed, alive])
    assert [(row["id"], row["slot"]) for row in taken.rows] == list(zip(ids, (2, 4, 6), strict=False))
    assert set(await scene.states(job)) == {"running", "ready"}
    held = await scene.rows("select distinct worker_id::text from runs where state = 'running'")
    assert [row["worker_id"] for row in held] == [alive]


async def test_limited_runs_go_to_living_workers_too_after_what_has_no_limit(scene: Scene) -> None:
    free, limited = await scene.job(), await scene.job(max_concurrency=2)
    await scene.ask(free, 1)
    await scene.ask(limited, 3)
    alive, lapsed = await scene.employ(str(uuid.uuid4())), await scene.employ(str(uuid.uuid4()), lease=-1)
    taken = await claim.take(scene.db, await scene.shares(8), [alive, lapsed, alive, lapsed, alive, alive])
    assert sorted(row["slot"] for row in taken.rows) == [1, 3, 5]
    assert await scene.states(limited) == ["running", "running", "waiting"]


async def test_queue_lets_one_occurrence_wait_also_when_all_fall_due_at_once(scene: Scene) -> None:
    job = await scene.job(overlap="queue", schedule={"every": "PT1H"})
    first, *_ = await scene.occur(job, 3, 2, 1)
    assert [row["id"] for row in await scene.take()] == [first]
    assert await scene.states(job) == ["running", "waiting"]
    assert await scene.missed(job) == [("coalesced", 1)]


# ── the database's clock is set back ─────────────────────────────────────────────────────────────────────────────


async def set_back(scene: Scene) -> None:
    """As if the database's clock had been set back by 90 s since this node last read it."""
    before = scene.db.clock.now() + timedelta(seconds=90)
    scene.db.clock.observe(before, time.monotonic(), time.monotonic())


@pytest.mark.parametrize("take", [Scene.take, ahead], ids=["due", "ahead"])
async def test_a_claim_notices_before_anybody_is_told_the_time(
    scene: Scene, take: Callable[[Scene], Awaitable[Any]]
) -> None:
    job = await scene.job()
    await scene.ask(job, 2)
    await scene.ask(job, at=(await scene.now() + timedelta(seconds=120)).isoformat())
    await set_back(scene)
    assert scene.db.clock.reached() > await scene.now() + timedelta(seconds=80)
    await take(scene)
    assert scene.db.clock.reached() <= await scene.now()
