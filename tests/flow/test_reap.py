"""reap: what a silent worker held is taken back, and what it says afterwards is void."""

from __future__ import annotations

from typing import Any

from tests.flow.kit import Scene, WorkerHand, end_of
from tocsin.flow import reap
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
    [run_id] = await scene.ask(await scene.job(retry={"max_attempts": 1}))
    for loss in (1, 2, 3):
        worker = await WorkerHand.register(scene.node, worker_key)
        await scene.wake(run_id)
        assert len(await scene.taken(worker.id)) == 1
        await lapse(scene, worker)
        run = await scene.run(run_id)
        assert (run["losses"], run["failures"]) == (loss, 0)
    assert (run["state"], run["outcome"]) == ("dead", "lost")
    assert await scene.value("select count(*) from dead_letters") == 1


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
