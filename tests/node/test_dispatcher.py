"""The dispatcher: fair between tenants, spread over workers, woken by what becomes claimable."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from tests import PATIENCE
from tests.conftest import Api
from tests.flow.kit import Scene, end_of
from tocsin.flow import claim
from tocsin.flow.claim import THE_BEGINNING
from tocsin.flow.fleet import Worker
from tocsin.flow.shared.transitions import Hint
from tocsin.model.ids import new_id
from tocsin.node.dispatcher import Dispatcher, Poll
from tocsin.node.loop import Pace


async def worker_of(scene: Scene, slots: int = 1) -> Worker:
    worker_id = await scene.employ(new_id(scene.db.clock.now()))
    return Worker(worker_id, "default", ["process"], [], "live", slots)


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
    dispatcher._full_scans = Pace()  # however long the last one took
    dispatcher.rescan()
    await dispatcher.run_once()
    await served(scene, dispatcher, 2)
    got = await shares(scene, dispatcher, 40)
    assert abs(got["one"] - got["two"]) <= 2, "its share was lent, not saved up"


async def test_what_falls_due_is_not_passed_over_while_what_is_ready_takes_every_slot(scene: Scene) -> None:
    job = await scene.job(retry={"max_attempts": 3})
    [again] = await scene.ask(job)
    worker = await scene.employ(new_id(scene.db.clock.now()))
    [held] = await scene.take(1, worker)
    await scene.end(worker, end_of(held, "lost"))
    await scene.wake(again)
    await fill(scene, scene.api, 50)
    dispatcher = fresh(scene)
    # Somebody waits for work of another kind all the time, so the node never counts as busy.
    dispatcher.open_poll(Worker(worker, "default", ["python"], ["none"], "live", 1000), 1)
    for _ in range(10):
        [poll] = await served(scene, dispatcher, 1)
        if [row["id"] for row in poll.answer.result()] == [again]:
            return
        dispatcher._scanned, dispatcher._full_scans = 0.0, Pace()  # however long the last one took
    raise AssertionError("ten others started that stand behind it")


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


# ── ahead of the instant ─────────────────────────────────────────────────────────────────────────────────────────


async def staged_in(scene: Scene, job: dict[str, Any], *seconds: float) -> list[str]:
    """Runs for these instants, known to the node's dispatcher by their hints."""
    now = await scene.now()
    return [(await scene.ask(job, at=(now + timedelta(seconds=s)).isoformat()))[0] for s in seconds]


def told(scene: Scene, lead: float) -> Dispatcher:
    """A dispatcher without a memory that hears what the node's would."""
    dispatcher = scene.node.dispatcher = Dispatcher(scene.db, scene.node.lanes, timedelta(seconds=lead))
    return dispatcher


async def got(dispatcher: Dispatcher, poll: Poll) -> list[str] | None:
    await dispatcher.run_once()
    return [row["id"] for row in poll.answer.result()] if poll.answer.done() else None


async def test_who_takes_runs_ahead_gets_them_before_their_instant_and_nobody_else(scene: Scene) -> None:
    dispatcher = told(scene, 60)
    ids = await staged_in(scene, await scene.job(), 10, 20, 50, 90)
    plain = dispatcher.open_poll(await worker_of(scene), 5)
    assert await got(dispatcher, plain) is None
    ready = dispatcher.open_poll(await worker_of(scene), 5, ahead=True)
    assert await got(dispatcher, ready) == ids[:3] and not plain.answer.done()


async def test_what_is_due_goes_before_what_is_soon_and_takes_its_slot(scene: Scene) -> None:
    dispatcher = told(scene, 60)
    job = await scene.job()
    [soon] = await staged_in(scene, job, 10)
    due = await scene.ask(job, 3)
    worker = await worker_of(scene)
    first = dispatcher.open_poll(worker, 2, ahead=True)
    assert await got(dispatcher, first) == due[:2], "no slot is given ahead while something waits for it"
    third = dispatcher.open_poll(worker, 0, ahead=True, held=1, held_for=5)
    assert await got(dispatcher, third) == due[2:], "the slot of a run that waits for its instant is good enough"
    last = dispatcher.open_poll(worker, 1, ahead=True)
    assert await got(dispatcher, last) == [soon]


async def test_a_held_slot_is_taken_only_if_none_is_free_and_only_in_time(scene: Scene) -> None:
    dispatcher = told(scene, 60)
    holder = dispatcher.open_poll(await worker_of(scene), 0, ahead=True, held=5, held_for=60)
    free = dispatcher.open_poll(await worker_of(scene), 2, ahead=True)
    late = dispatcher.open_poll(await worker_of(scene), 0, ahead=True, held=5, held_for=0)
    due = await scene.ask(await scene.job(), 4)
    await dispatcher.run_once()
    assert sorted(row["id"] for p in (holder, free) for row in p.answer.result()) == sorted(due)
    assert len(free.answer.result()) == 2 and not late.answer.done()


async def test_an_idle_dispatcher_sleeps_until_the_next_instant_less_half_the_lead(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_HUNGRY_SCAN", "_BUSY_SCAN"):
        monkeypatch.setattr(f"tocsin.node.dispatcher.{name}", 3600)
    dispatcher = told(scene, 60)
    poll = dispatcher.open_poll(await worker_of(scene), 5, ahead=True)
    await dispatcher.run_once()
    assert await dispatcher.run_once() == 3600
    job = await scene.job()
    [later] = await staged_in(scene, job, 600)
    assert 560 < await dispatcher.run_once() <= 570
    [sooner] = await staged_in(scene, job, 100)
    assert 60 < await dispatcher.run_once() <= 70
    [soonest] = await staged_in(scene, job, 5)
    assert await got(dispatcher, poll) == [soonest]
    second = dispatcher.open_poll(await worker_of(scene), 5, ahead=True)
    assert 60 < await dispatcher.run_once() <= 70, "the claim told what comes next"
    dispatcher.close_poll(second)
    assert 90 < await dispatcher.run_once() <= 100, "with nobody to hand out to, the instant itself"
    assert not {later, sooner} & {row["id"] for row in poll.answer.result()}


async def test_what_could_not_go_ahead_is_claimed_at_its_instant(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.node.dispatcher._HUNGRY_SCAN", 3600)
    dispatcher = told(scene, 60)
    [run_id] = await staged_in(scene, await scene.job(max_concurrency=1), 0.5)
    poll = dispatcher.open_poll(await worker_of(scene), 5, ahead=True)
    dispatcher.start()
    try:
        [row] = await asyncio.wait_for(poll.answer, PATIENCE)
    finally:
        await dispatcher.stop()
    assert row["id"] == run_id and row["claimed_at"] >= row["ready_at"]
    assert row["claimed_at"] - row["ready_at"] < timedelta(seconds=5), "woken for it, not found by a scan"


async def test_a_run_staged_into_a_window_that_was_handed_out_goes_ahead_too(scene: Scene) -> None:
    dispatcher = told(scene, 60)
    job = await scene.job()
    [first] = await staged_in(scene, job, 20)
    assert await got(dispatcher, dispatcher.open_poll(await worker_of(scene), 5, ahead=True)) == [first]
    poll = dispatcher.open_poll(await worker_of(scene), 5, ahead=True)
    assert await got(dispatcher, poll) is None
    [second] = await staged_in(scene, job, 25)
    assert await got(dispatcher, poll) == [second]


class Told:
    """Stands where the node's dispatcher does, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Hint] = []

    def hint(self, hints: Iterable[Hint]) -> None:
        self.told += hints


async def test_what_a_held_snapshot_keeps_is_not_read_again(scene: Scene) -> None:
    """A claim and a scan cost as much behind fifteen hundred dead rows as they would without them."""
    await fill(scene, scene.api, 2000)
    idle = await asyncpg.connect(scene.node.settings.database_url)
    await idle.execute("begin isolation level repeatable read")
    await idle.fetchval("select count(*) from pg_class")
    try:
        dispatcher, worker = fresh(scene), await worker_of(scene)
        for _ in range(3):
            [poll] = await served(scene, dispatcher, 500)
            await scene.end(poll.worker.id, *(end_of(row) for row in poll.answer.result()))
        [(key, place)] = [(k, p) for k, p in dispatcher._places.items() if p.may_have]
        from_floor = await buffers(scene, "heads_from", [key[0]], [key[1]], [place.floor], [place.due_floor])
        from_start = await buffers(scene, "heads_from", [key[0]], [key[1]], [THE_BEGINNING], [THE_BEGINNING])
        assert from_floor * 4 < from_start, (from_floor, from_start)
        shares = [[key[0]], [key[1]], [10]]
        cheap = await buffers(scene, "take", [worker.id], [1] * 10, *shares, [place.floor], [place.due_floor], False)
        dear = await buffers(scene, "take", [worker.id], [1] * 10, *shares, [THE_BEGINNING], [THE_BEGINNING], False)
        assert dear - cheap > (from_start - from_floor) / 2, (cheap, dear)
    finally:
        await idle.close()


async def buffers(scene: Scene, statement: str, *args: object) -> int:
    """How many pages a statement of the claim looks at."""
    async with scene.db._borrowed("vital") as connection:
        await connection.execute("begin")
        rows = await connection.fetch(f"explain (analyze, buffers, format json) {claim.SQL[statement]}", *args)
        await connection.execute("rollback")
    plan = json.loads(rows[0][0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def test_some_slots_stay_free_for_what_falls_due_meanwhile(scene: Scene) -> None:
    dispatcher = told(scene, 60)
    job = await scene.job()
    soon = await staged_in(scene, job, *range(10, 20))
    worker = await worker_of(scene, slots=8)
    assert await got(dispatcher, dispatcher.open_poll(worker, 8, ahead=True)) == soon[:6], "a quarter of a small worker"
    rest = dispatcher.open_poll(worker, 2, ahead=True, held=6, held_for=5)
    assert await got(dispatcher, rest) is None
    assert await dispatcher.run_once() > 0.1, "it does not look again and again for what it may not give"
    due = await scene.ask(job, 2)
    assert await got(dispatcher, rest) == due, "without one of the six giving way"
    large = await worker_of(scene, slots=1000)
    assert await got(dispatcher, dispatcher.open_poll(large, 18, ahead=True)) == soon[6:8], "sixteen of a large one"


async def test_after_a_claim_at_its_instant_the_next_one_is_known(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that fall due between two scans, for somebody who takes nothing ahead."""
    dispatcher = told(scene, 60)
    ids = await staged_in(scene, await scene.job(), 0.5, 1.0, 1.5)
    monkeypatch.setattr("tocsin.node.dispatcher._HUNGRY_SCAN", 3600)
    monkeypatch.setattr("tocsin.node.dispatcher._BUSY_SCAN", 3600)
    worker = await worker_of(scene)
    dispatcher.start()
    try:
        for run_id in ids:
            [row] = await asyncio.wait_for(dispatcher.open_poll(worker, 1).answer, PATIENCE)
            assert row["id"] == run_id
    finally:
        await dispatcher.stop()


async def test_a_hint_that_comes_while_a_scan_is_under_way_is_not_forgotten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, job = told(scene, 60), await scene.job()
    await staged_in(scene, job, 600)
    heads = claim.heads

    async def late(*args: Any) -> list[claim.Head]:
        found = await heads(*args)
        await staged_in(scene, job, 100)
        return found

    monkeypatch.setattr(claim, "heads", late)
    dispatcher.open_poll(await worker_of(scene), 1)
    dispatcher.rescan()
    await dispatcher.run_once()
    monkeypatch.setattr("tocsin.node.dispatcher._HUNGRY_SCAN", 3600)
    assert await dispatcher.run_once() <= 100


async def test_what_falls_due_while_a_claim_ahead_is_under_way_is_not_passed_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = told(scene, 60)
    first, second = await staged_in(scene, await scene.job(), 1, 50)
    await dispatcher.run_once()  # the scan of the beginning
    monkeypatch.setattr("tocsin.node.dispatcher._HUNGRY_SCAN", 3600)
    monkeypatch.setattr("tocsin.node.dispatcher._BUSY_SCAN", 3600)
    take_ahead = claim.take_ahead

    async def late(*args: Any) -> claim.Ahead:
        await scene.sql.execute("select pg_sleep_until(ready_at) from runs where id = $1", first)
        return await take_ahead(*args)

    monkeypatch.setattr(claim, "take_ahead", late)
    worker = await worker_of(scene)
    assert await got(dispatcher, dispatcher.open_poll(worker, 2, ahead=True)) == [second]
    poll = dispatcher.open_poll(worker, 2, ahead=True)
    assert await got(dispatcher, poll) == [first]
