"""restored: nothing that another past handed out is believed after it; what ran then runs again at nobody's cost."""

from __future__ import annotations

from datetime import date
from typing import Any

from tests.flow.kit import Scene, WorkerHand, keys, told
from tocsin.flow import reap
from tocsin.flow.report import Ending, report
from tocsin.flow.restored import restored
from tocsin.flow.servers import Server
from tocsin.node.reaper import Caretaker
from tocsin.store.db import Row
from tocsin.store.room import Room

SAFE = 2**53  # up to here a number of JSON is a whole number everywhere


async def test_fences_go_on_above_all_that_were_handed_out(scene: Scene) -> None:
    job = await scene.job()
    await scene.ask(job, 2)
    [first] = await scene.take(1)
    done = await restored(scene.node.settings.database_url)
    assert done.epoch > (await scene.now()).date().toordinal() - date(2026, 1, 1).toordinal()
    again = await scene.take(2)
    assert first["id"] in {row["id"] for row in again}
    assert all(row["fence"] >> 40 == done.epoch and first["fence"] < row["fence"] < SAFE for row in again)
    assert (await restored(scene.node.settings.database_url)).epoch == done.epoch + 1, "as often as need be"


def claimed(row: Row) -> dict[str, Any]:
    """A claimed row as a worker is told of it."""
    return {"run_id": row["id"], "attempt": row["attempt"], "fence": row["fence"]}


async def test_what_ran_is_run_again_at_nobodys_cost(scene: Scene, worker_key: str) -> None:
    job = await scene.job(retry={"max_attempts": 1})
    [run_id, stopped] = await scene.ask(job, 2)
    hand = await WorkerHand.register(scene.node, worker_key)
    held = {row["id"]: claimed(row) for row in await scene.take(2, hand.id)}
    await scene.api.post(f"/v1/runs/{stopped}/cancel")
    done = await restored(scene.node.settings.database_url)
    assert (done.workers, done.runs) == (1, 1)

    anew = await WorkerHand.register(scene.node, worker_key)
    scene.node.gateway._sessions[hand.id].renewed_at = float("inf")  # a server that has not looked since
    for late in (hand, anew):
        answer = await late.report(finished=[told(held[run_id])])
        assert answer["superseded"] == keys([held[run_id]]) and answer["accepted"] == []
    scene.node.gateway._sessions.clear()  # as in a server that was started after the restore
    assert (await hand.report(expect=404, finished=[told(held[run_id])]))["code"] == "unknown_worker"

    run = await scene.run(run_id)
    assert (run["state"], run["failures"], run["losses"]) == ("ready", 0, 0)
    [again] = [claimed(row) for row in await scene.take(1, anew.id)]
    assert (again["run_id"], again["attempt"]) == (run_id, 2) and again["fence"] > held[run_id]["fence"]
    await anew.report(finished=[told(again)])
    attempts = (await scene.api.get(f"/v1/runs/{run_id}/attempts"))["items"]
    assert sorted((a["attempt"], a["outcome"]) for a in attempts) == [(1, "lost"), (2, "succeeded")]

    lost = [Ending(o.worker_id, o.finished) for o in await reap.orphans(scene.db)]
    await report(scene.db, scene.node.specs, lost, scene.rng)
    assert (await scene.run(stopped))["state"] == "cancelled", "what was to be stopped has been"


async def test_it_stands_in_the_audit(scene: Scene) -> None:
    await restored(scene.node.settings.database_url)
    row = await scene.row("select actor, detail ->> 'epoch' as epoch from audit where action = 'cluster.restored'")
    assert row["actor"] == "tocsin restored" and int(row["epoch"]) > 0


async def test_a_server_that_knows_another_past_goes(scene: Scene) -> None:
    caretaker = Caretaker(
        scene.db, Server.this(8470, "0.1.0"), scene.node.retire, scene.node._measure_pools, Room(scene.db, {})
    )
    await caretaker.run_once()
    assert not scene.node.retired
    assert len((await restored(scene.node.settings.database_url)).servers) == 1, "it is told who was running already"
    await caretaker.run_once()
    assert scene.node.retired and scene.node.leave.is_set()
