"""The dispatcher: fair between tenants, spread over workers, woken by what becomes claimable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, end_of
from tocsin.flow import claim
from tocsin.flow.fleet import Worker
from tocsin.flow.shared.transitions import Hint
from tocsin.model.ids import new_id
from tocsin.node.dispatcher import Dispatcher, Poll


async def worker_of(scene: Scene) -> Worker:
    worker_id = await scene.employ(new_id(scene.db.clock.now()))
    return Worker(worker_id, "default", ["process"], [], "live", 1000)


async def tenant(scene: Scene, slug: str, weight: int = 1) -> Api:
    await scene.api.post("/v1/tenants", {"slug": slug, "weight": weight})
    return await scene.api.with_key("editor", slug)


async def fill(scene: Scene, api: Api, count: int) -> None:
    job = await scene.job(api)
    await api.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}] * count})


def fresh(scene: Scene) -> Dispatcher:
    """A dispatcher without a memory, as on a node that has just started."""
    return Dispatcher(scene.db, scene.node.lanes)


async def served(scene: Scene, dispatcher: Dispatcher, slots: int) -> list[Poll]:
    """Ask for `slots` until they come; the answered polls."""
    poll = dispatcher.open_poll(await worker_of(scene), slots)
    for _ in range(5):
        await dispatcher.run_once()
        if poll.answer.done():
            return [poll]
    raise AssertionError("nothing came")


async def shares(scene: Scene, dispatcher: Dispatcher, slots: int, rounds: int = 1) -> Counter[str]:
    slugs = {r["id"]: r["slug"] for r in await scene.rows("select id, slug from tenants")}
    got: Counter[str] = Counter()
    for _ in range(rounds):
        for poll in await served(scene, dispatcher, slots):
            got.update(slugs[row["tenant_id"]] for row in poll.answer.result())
    return got


async def test_a_tenant_with_a_long_queue_does_not_starve_one_with_a_short(scene: Scene) -> None:
    await fill(scene, await tenant(scene, "big"), 400)
    await fill(scene, await tenant(scene, "small"), 30)
    got = await shares(scene, dispatcher := fresh(scene), 20, rounds=3)
    assert got["small"] >= 28, got
    got += await shares(scene, dispatcher, 20, rounds=2)
    assert got["small"] == 30 and got["big"] >= 50, got


async def test_shares_follow_the_weights_also_one_slot_at_a_time(scene: Scene) -> None:
    await fill(scene, await tenant(scene, "heavy", 3), 200)
    await fill(scene, await tenant(scene, "light", 1), 200)
    dispatcher = fresh(scene)
    await served(scene, dispatcher, 4)  # the first look learns who is there and what they weigh
    assert await shares(scene, dispatcher, 40) == {"heavy": 30, "light": 10}
    got = await shares(scene, dispatcher, 1, rounds=40)
    assert abs(got["heavy"] - 30) <= 1, got


async def test_a_tenant_that_was_away_starts_level(scene: Scene) -> None:
    one, two = await tenant(scene, "one"), await tenant(scene, "two")
    await fill(scene, one, 300)
    dispatcher = fresh(scene)
    await shares(scene, dispatcher, 100)
    await fill(scene, two, 100)
    dispatcher.rescan()
    await dispatcher.run_once()
    await served(scene, dispatcher, 2)
    got = await shares(scene, dispatcher, 40)
    assert abs(got["one"] - got["two"]) <= 2, "its share was lent, not saved up"


async def test_work_is_spread_over_the_waiting_workers(scene: Scene) -> None:
    await fill(scene, scene.api, 10)
    dispatcher = fresh(scene)
    polls = [dispatcher.open_poll(await worker_of(scene), 100) for _ in range(5)]
    for _ in range(3):
        await dispatcher.run_once()
    assert sorted(len(p.answer.result()) if p.answer.done() else 0 for p in polls) == [2] * 5
    held = await scene.rows("select worker_id::text as w, count(*) from runs where state = 'running' group by 1")
    assert {r["w"]: r["count"] for r in held} == {p.worker.id: 2 for p in polls}


async def test_a_hint_is_enough_to_be_served(scene: Scene) -> None:
    dispatcher = scene.node.dispatcher
    poll = dispatcher.open_poll(await worker_of(scene), 1)
    await dispatcher.run_once()
    assert not poll.answer.done()
    [run_id] = await scene.ask(await scene.job())
    await dispatcher.run_once()
    assert [row["id"] for row in poll.answer.result()] == [run_id]


async def test_a_staged_run_is_served_when_it_falls_due(scene: Scene) -> None:
    dispatcher = scene.node.dispatcher
    job = await scene.job()
    [run_id] = await scene.ask(job, at=(await scene.now() + timedelta(hours=1)).isoformat())
    poll = dispatcher.open_poll(await worker_of(scene), 1)
    await dispatcher.run_once()
    assert not poll.answer.done()
    await scene.wake(run_id)
    dispatcher.rescan()
    for _ in range(3):
        await dispatcher.run_once()
    assert [row["id"] for row in poll.answer.result()] == [run_id]


async def test_a_closed_poll_takes_nothing(scene: Scene) -> None:
    dispatcher = scene.node.dispatcher
    poll = dispatcher.open_poll(await worker_of(scene), 5)
    dispatcher.close_poll(poll)
    assert poll.answer.result() == []
    await fill(scene, scene.api, 3)
    await dispatcher.run_once()
    assert await scene.value("select count(*) from runs where state = 'ready'") == 3


async def test_a_deep_backlog_is_drained_without_leaving_anything(scene: Scene) -> None:
    await fill(scene, scene.api, 1200)
    dispatcher, seen = fresh(scene), set()
    while len(seen) < 1200:
        for poll in await served(scene, dispatcher, 500):
            rows = poll.answer.result()
            seen.update(row["id"] for row in rows)
            await scene.end(poll.worker.id, *(end_of(row) for row in rows))
    assert await scene.value("select count(*) from runs") == 0
    assert await scene.value("select count(*) from history where state = 'succeeded'") == 1200


async def test_a_hint_that_comes_during_a_claim_is_not_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await scene.job()
    await scene.ask(job, 1)
    dispatcher = fresh(scene)
    poll = dispatcher.open_poll(await worker_of(scene), 5)
    take, late = claim.take, []

    async def take_and_be_told(*args: Any) -> claim.Taken:
        taken = await take(*args)
        if not late:
            late.extend(await scene.ask(job, 1))
            dispatcher.hint(scene.node.dispatcher.told)  # type: ignore[attr-defined]
        return taken

    scene.node.dispatcher = Told()  # type: ignore[assignment]
    monkeypatch.setattr(claim, "take", take_and_be_told)
    while not poll.answer.done():
        await dispatcher.run_once()
    assert [row["id"] for row in poll.answer.result()] != late
    monkeypatch.setattr(claim, "heads", None)  # no scan: the hint alone must do
    monkeypatch.setattr("tocsin.node.dispatcher._HUNGRY_SCAN", 3600)
    second = dispatcher.open_poll(await worker_of(scene), 5)
    await dispatcher.run_once()
    assert [row["id"] for row in second.answer.result()] == late


class Told:
    """Stands where the node's dispatcher does, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Hint] = []

    def hint(self, hints: Iterable[Hint]) -> None:
        self.told += hints
