"""reap: what a silent worker held is taken back, and what it says afterwards is void."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flow.kit import Scene, WorkerHand, end_of
from tocsin.flow import claim, fleet, reap
from tocsin.node.reaper import Reaper


async def lapse(scene: Scene, worker: WorkerHand) -> list[Any]:
    """The worker's lease runs out, and the reaper turns once; what it told the dispatcher."""
    await scene.sql.execute("update workers set lease_until = now() - interval '1 ms' where id = $1", worker.id)
    heard: list[Any] = []
    await Reaper(scene.db, scene.node.specs, heard.extend).run_once()
    # The node that served it learns so at the next renewal, a second later at most.
    scene.node.gateway._sessions.pop(worker.id, None)
    return heard


async def hold(scene: Scene, worker: WorkerHand, count: int = 1) -> list[tuple[str, int, int]]:
    await scene.ask(await scene.job(), count)
    return await scene.taken(worker.id)


async def test_runs_of_a_lapsed_worker_are_staged_again(scene: Scene, worker_key: str) -> None:
    lost, living = [await WorkerHand.register(scene.node, worker_key) for _ in range(2)]
    keys, [kept] = await hold(scene, lost, 3), await hold(scene, living)
    hints = await lapse(scene, lost)
    assert hints, "the dispatcher is told"
    for run_id, _, _ in keys:
        run = await scene.run(run_id)
        assert (run["state"], run["failures"], run["losses"]) == ("staged", 0, 1)
        [attempt] = (await scene.api.get(f"/v1/runs/{run_id}/attempts"))["items"]
        assert (attempt["outcome"], attempt["error"]["class"]) == ("lost", "lost")
        due = await scene.value("select extract(epoch from ready_at - now())::float8 from runs where id = $1", run_id)
        assert due <= 0.5, "spread over half a second, no back-off"
    assert (await scene.run(kept[0]))["state"] == "running"
    assert (await scene.api.get(f"/v1/workers/{lost.id}"))["state"] == "gone"


async def test_who_lost_his_worker_keeps_his_place_before_a_backlog(scene: Scene, worker_key: str) -> None:
    lost = await WorkerHand.register(scene.node, worker_key)
    [(run_id, _, _)] = await hold(scene, lost)
    backlog = await scene.ask(await scene.job(), 3)
    await lapse(scene, lost)
    await scene.wake(run_id)
    order = "select id::text as id from runs where id = any($1::uuid[]) order by order_key"
    rows = await scene.rows(order, [run_id, *backlog])
    assert [row["id"] for row in rows] == [run_id, *backlog]


async def test_the_third_loss_is_the_end(scene: Scene, worker_key: str) -> None:
    [run_id, other] = await scene.ask(await scene.job(retry={"max_attempts": 1}), 2)
    for loss in (1, 2, 3):
        worker = await WorkerHand.register(scene.node, worker_key)
        await unsuspected(scene, run_id, other)
        assert len(await scene.taken(worker.id)) == 2
        await lapse(scene, worker)
        run = await scene.run(run_id)
        assert (run["losses"], run["failures"]) == (loss, 0)
    assert (run["state"], run["outcome"], run["error"]["class"]) == ("dead", "lost", "lost")
    assert await scene.value("select count(*) from dead_letters") == 2


# ── poison: a run that takes its workers down ────────────────────────────────────────────────────────────────────


async def unsuspected(scene: Scene, *run_ids: str) -> None:
    """Make runs due for so long that they are no longer suspects."""
    await scene.sql.execute(
        "update runs set ready_at = now() - interval '11 s' where state = 'staged' and id = any($1::uuid[])",
        list(run_ids),
    )


async def loses(scene: Scene, worker_key: str, *run_ids: str, **body: Any) -> WorkerHand:
    """Register a worker that takes only these runs, and lose it with them."""
    worker = await WorkerHand.register(scene.node, worker_key, **body)
    await scene.wake(*run_ids)
    assert {run_id for run_id, _, _ in await scene.taken(worker.id)} == set(run_ids)
    await lapse(scene, worker)
    return worker


async def test_a_run_that_two_workers_in_a_row_went_down_with_is_poison(scene: Scene, worker_key: str) -> None:
    [run_id] = await scene.ask(await scene.job(retry={"max_attempts": 9}))
    await loses(scene, worker_key, run_id)
    assert (await scene.run(run_id))["state"] == "staged", "once is nobody's fault"
    await loses(scene, worker_key, run_id)
    run = await scene.run(run_id)
    assert (run["state"], run["outcome"], run["error"]["class"], run["losses"]) == ("dead", "lost", "poison", 2)
    [letter] = (await scene.api.get("/v1/dead-letters?error_class=poison"))["items"]
    assert letter["run_id"] == run_id, "it can be redriven like any dead letter"


async def test_a_worker_is_given_one_suspect_at_a_time(scene: Scene, worker_key: str) -> None:
    job = await scene.job()
    suspects = await scene.ask(job, 5)
    await loses(scene, worker_key, *suspects)
    fresh = await scene.ask(job, 2)
    await scene.wake(*suspects)
    first, second = [await WorkerHand.register(scene.node, worker_key) for _ in range(2)]
    shares = await scene.shares(100)
    for _ in range(2):  # the second time neither worker may get another suspect
        taken = await claim.take(scene.db, shares, [first.id, second.id] * 10)
    held = await scene.rows(
        "select id::text as id, worker_id::text as worker, losses from runs where state = 'running'"
    )
    assert {row["id"] for row in held} >= set(fresh), "those behind them are not held up"
    assert sorted(row["worker"] for row in held if row["losses"]) == sorted([first.id, second.id])
    [ended] = [row["id"] for row in held if row["losses"] and row["worker"] == first.id]
    attempt, fence = await scene.row("select attempt, fence from runs where id = $1", ended)
    await scene.end(first.id, end_of((ended, attempt, fence)))
    taken = await claim.take(scene.db, shares, [first.id, second.id] * 10)
    assert len(taken.rows) == 1, "who has ended makes room for the next suspect"
    await unsuspected(scene, *suspects)
    await scene.sql.execute("update runs set ready_at = ready_at - interval '11 s' where state = 'ready'")
    assert len((await claim.take(scene.db, shares, [first.id, second.id] * 10)).rows) == 2, "they wait for seconds only"


async def test_a_machine_that_fails_twice_makes_no_run_poison(scene: Scene, worker_key: str) -> None:
    runs = await scene.ask(await scene.job(), 100)
    await loses(scene, worker_key, *runs)
    await unsuspected(scene, *runs)
    worker = await WorkerHand.register(scene.node, worker_key)
    assert len(await scene.taken(worker.id)) == 100
    await lapse(scene, worker)
    assert await scene.value("select count(*) from runs where state = 'staged' and losses = 2") == 100


async def test_bystanders_of_a_poison_run_are_not_poison(scene: Scene, worker_key: str) -> None:
    job = await scene.job()
    [poison] = await scene.ask(job)
    bystanders = await scene.ask(job, 3)
    await loses(scene, worker_key, poison, *bystanders)
    fresh = await scene.ask(job, 3)
    await loses(scene, worker_key, poison, *fresh)
    assert (await scene.run(poison))["error"]["class"] == "poison"
    for run_id in [*bystanders, *fresh]:
        assert (await scene.run(run_id))["losses"] == 1


async def test_an_attempt_in_between_clears_a_run(scene: Scene, worker_key: str) -> None:
    [run_id] = await scene.ask(await scene.job(retry={"max_attempts": 9, "delay": "1s"}))
    await loses(scene, worker_key, run_id)
    worker = await WorkerHand.register(scene.node, worker_key)
    await scene.wake(run_id)
    [key] = await scene.taken(worker.id)
    await scene.end(worker.id, end_of(key, "failed", error="bad"))
    await loses(scene, worker_key, run_id)
    run = await scene.run(run_id)
    assert (run["state"], run["losses"]) == ("staged", 2)


async def test_a_worker_that_was_to_be_drained_did_not_go_down(scene: Scene, worker_key: str) -> None:
    [run_id] = await scene.ask(await scene.job())
    for _ in range(2):
        worker = await WorkerHand.register(scene.node, worker_key)
        await scene.wake(run_id)
        [_] = await scene.taken(worker.id)
        await scene.api.post(f"/v1/workers/{worker.id}/drain")
        await lapse(scene, worker)
    run = await scene.run(run_id)
    assert (run["state"], run["losses"]) == ("staged", 2)


async def test_losses_that_workers_report_themselves_are_no_sign_of_poison(scene: Scene, worker_key: str) -> None:
    [run_id] = await scene.ask(await scene.job())
    worker = await WorkerHand.register(scene.node, worker_key)
    [key] = await scene.taken(worker.id)
    await scene.end(worker.id, end_of(key, "lost", error="drained"))
    await lapse(scene, worker)
    await loses(scene, worker_key, run_id)
    run = await scene.run(run_id)
    assert (run["state"], run["losses"]) == ("staged", 2)


async def test_a_process_that_comes_back_did_not_go_down(scene: Scene, worker_key: str) -> None:
    [run_id] = await scene.ask(await scene.job())
    cut_off = await loses(scene, worker_key, run_id)
    await loses(scene, worker_key, run_id, formerly=cut_off.id)
    run = await scene.run(run_id)
    assert (run["state"], run["losses"]) == ("staged", 2)


async def test_what_a_lapsed_worker_says_is_void(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [key] = await hold(scene, worker)
    await lapse(scene, worker)
    finished = [{"run_id": key[0], "attempt": key[1], "fence": key[2], "outcome": "succeeded"}]
    assert (await worker.report(expect=404, finished=finished))["code"] == "unknown_worker"
    assert (await worker.claim(expect=404))["code"] == "unknown_worker"
    # Lines of ends that it told in time may still come; this is none.
    assert (await worker.ship({**finished[0], "offset": 0, "lines": []}, expect=409))["code"] == "superseded"
    # Even past the gateway, the fence holds.
    assert (await scene.end(worker.id, end_of(key))).accepted == set()
    assert (await scene.run(key[0]))["state"] == "staged"


async def test_a_stopping_run_of_a_lost_worker_is_cancelled(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [key] = await hold(scene, worker)
    await scene.api.post(f"/v1/runs/{key[0]}/cancel")
    await lapse(scene, worker)
    run = await scene.run(key[0])
    assert (run["state"], run["outcome"]) == ("cancelled", "lost")


async def test_a_lease_that_was_renewed_in_time_is_left_alone(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [key] = await hold(scene, worker)
    await scene.sql.execute("update workers set lease_until = now() + interval '2 s' where name = 'hand'")
    assert await reap.lapse(scene.db) == [], "until its last moment it is the worker's"
    scene.node.gateway._sessions[worker.id].renewed_at = float("-inf")
    await worker.report(running=[[key[0], key[2]]], last_claim=10**9)
    assert await reap.lapse(scene.db) == []
    until = await scene.value("select lease_until - now() > interval '5 s' from workers where name = 'hand'")
    assert until and (await scene.run(key[0]))["state"] == "running"


async def test_two_reapers_take_back_once(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [key] = await hold(scene, worker)
    await scene.sql.execute("update workers set lease_until = now() - interval '1 ms' where name = 'hand'")
    assert len(await reap.lapse(scene.db)) == 1 and await reap.lapse(scene.db) == []
    first, second = await reap.orphans(scene.db), await reap.orphans(scene.db)
    assert (await scene.end(worker.id, first[0].finished)).accepted == {(key[0], key[2])}
    await scene.end(worker.id, second[0].finished)
    assert (await scene.run(key[0]))["losses"] == 1


async def test_the_runs_of_a_lost_fleet_do_not_come_back_as_a_herd(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    await hold(scene, worker, 100)
    await lapse(scene, worker)
    tenths = "select count(distinct floor(10 * extract(epoch from ready_at))) from runs"
    assert await scene.value(tenths) >= 4, "they fall due one after the other"


@pytest.mark.parametrize("worker_row", ["gone for two days", "pruned"])
async def test_runs_of_a_worker_that_is_long_gone_are_taken_back(
    scene: Scene, worker_key: str, worker_row: str
) -> None:
    """The runs outlived their worker's row, for example because no report arrived for a day, and no step found them any
    more."""
    [run] = await scene.ask(await scene.job())
    worker = await WorkerHand.register(scene.node, worker_key)
    assert len(await scene.taken(worker.id)) == 1
    await scene.sql.execute(
        "update workers set state = 'gone', gone_at = now() - interval '2 days' where id = $1", worker.id
    )
    if worker_row == "pruned":
        await scene.sql.execute("delete from workers where id = $1", worker.id)
    await Reaper(scene.db, scene.node.specs, lambda hints: None).run_once()
    assert (await scene.run(run))["state"] == "staged"


async def test_a_worker_that_holds_a_run_is_not_pruned(scene: Scene, worker_key: str) -> None:
    await scene.ask(await scene.job())
    workers = [await WorkerHand.register(scene.node, worker_key) for _ in range(2)]
    assert len(await scene.taken(workers[0].id)) == 1
    await scene.sql.execute(
        "update workers set state = 'gone', gone_at = now() - interval '8 days' where name = 'hand'"
    )
    await scene.db.fetch("engine", fleet.SQL["prune"])
    left = await scene.rows("select id::text as id from workers where name = 'hand'")
    assert [row["id"] for row in left] == [workers[0].id]


async def test_strays_are_looked_for_page_by_page(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Living workers with runs do not hide the workers that are gone."""
    monkeypatch.setattr(reap, "_HOLDERS", 2)
    runs = await scene.ask(await scene.job(), 5)
    for n in range(5):
        await scene.take(1, f"01900000-0000-7000-8000-00000000000{n}")
    await scene.sql.execute("delete from workers where id = '01900000-0000-7000-8000-000000000004'")
    after, found = None, []
    for _ in range(3):
        looked = await reap.strays(scene.db, after)
        after, found = looked.after, found + looked.orphans
    assert [orphan.worker_id for orphan in found] == ["01900000-0000-7000-8000-000000000004"]
    assert after is None and found[0].finished.run_id in runs
