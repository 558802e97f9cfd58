"""A run moves only when the reason that blocks it has changed: its state changes are counted.

A trigger records each change of state. Between any two events the sweeper turns several times and a claim looks at all
runs: neither may add a move.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene, end_of
from tocsin.flow import circuits
from tocsin.flow.shared.transitions import Hint, NewRun, Stop, stage
from tocsin.model.ids import new_id
from tocsin.node.reaper import Sweeper
from tocsin.store.db import Row

W = "01900000-0000-7000-8000-000000000001"
NORMAL = ["ready", "running", "ended"]
WAITED = ["ready", "waiting", "ready", "running", "ended"]
_RECORD = """
    create table tocsin.moves (n bigserial, id uuid, state text);
    grant all on tocsin.moves to public;
    grant all on sequence tocsin.moves_n_seq to public;
    create function tocsin.record_move() returns trigger language plpgsql as $$
    begin
        if tg_op = 'DELETE' then
            insert into tocsin.moves (id, state) values (old.id, 'ended');
        elsif tg_op = 'INSERT' or old.state is distinct from new.state then
            insert into tocsin.moves (id, state) values (new.id, new.state);
        end if;
        return null;
    end $$;
    create trigger record_move after insert or update or delete on tocsin.runs
        for each row execute function tocsin.record_move();
"""
_FORGET = "drop trigger record_move on tocsin.runs; drop function tocsin.record_move; drop table tocsin.moves"


class Watch:
    """Claims and sweeps between the events of a test, and the moves that each run has made."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.stops: list[Stop] = []
        self.held: dict[str, Row] = {}
        self._sweeper = Sweeper(scene.db, self._told, lambda: set(), lambda: self._lanes)
        self._lanes: set[int] = set()

    def _told(self, hints: Sequence[Hint], stops: Sequence[Stop]) -> None:
        self.stops += stops

    async def settle(self, slots: int = 10) -> list[str]:
        """Run claims and sweeps until nothing changes. Return the runs that started. Without slots no run starts."""
        started: list[str] = []
        for _ in range(4):
            if slots:
                rows = await self.scene.take(slots, await self.scene.employ(W))
                self.held |= {row["id"]: row for row in rows}
                started += [row["id"] for row in rows]
            await self.sweep(slots > 0)
        return started

    async def sweep(self, free: bool = True) -> None:
        self._lanes = set(await self.scene.lanes()) if free else set()
        await self._sweeper.run_once()

    async def end(self, run_id: str, outcome: str = "succeeded", error: str | None = None) -> None:
        await self.scene.end(W, end_of(self.held[run_id], outcome, error))

    async def moves(self, run_id: str) -> list[str]:
        rows = await self.scene.rows("select state from moves where id = $1 order by n", run_id)
        return [row["state"] for row in rows]


@pytest.fixture
async def watch(scene: Scene) -> AsyncIterator[Watch]:
    await scene.sql.execute(_RECORD)
    yield Watch(scene)
    await scene.sql.execute(_FORGET)


# ── overlap ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def overlapping(watch: Watch, overlap: str, **spec: Any) -> tuple[str, str]:
    """Create an occurrence that runs, and one that has fallen due behind it."""
    job = await watch.scene.job(schedule={"every": "PT1H"}, overlap=overlap, **spec)
    [first] = await watch.scene.occur(job, 9)
    assert await watch.settle() == [first]
    [second] = await watch.scene.occur(job, 6)
    await watch.settle()
    return first, second


async def test_allow(watch: Watch) -> None:
    first, second = await overlapping(watch, "allow")
    for run in (first, second):
        await watch.end(run)
        await watch.settle()
        assert await watch.moves(run) == NORMAL


async def test_skip(watch: Watch) -> None:
    first, second = await overlapping(watch, "skip")
    assert await watch.moves(second) == ["ready", "ended"]
    await watch.end(first)
    assert await watch.moves(first) == NORMAL


async def test_queue(watch: Watch) -> None:
    first, second = await overlapping(watch, "queue")
    job = await watch.scene.value("select job_id from runs where id = $1", first)
    [third] = await watch.scene.occur({"id": job}, 3)
    await watch.settle()
    assert await watch.moves(third) == ["ready", "ended"], "coalesced"
    await watch.end(first)
    assert await watch.settle() == [second]
    await watch.end(second)
    assert await watch.moves(first) == NORMAL
    assert await watch.moves(second) == WAITED


async def test_queue_behind_a_run_that_is_tried_again(watch: Watch) -> None:
    retry = {"max_attempts": 3, "delay": "PT1H"}
    first, second = await overlapping(watch, "queue", retry=retry)
    for _ in range(2):
        await watch.end(first, "failed", "broken")
        assert await watch.settle() == [], "it is between two attempts"
        await watch.scene.wake(first)
        assert await watch.settle() == [first]
    await watch.end(first)
    assert await watch.settle() == [second]
    await watch.end(second)
    assert await watch.moves(second) == WAITED


async def test_queue_all(watch: Watch) -> None:
    first, second = await overlapping(watch, "queue_all")
    job = await watch.scene.value("select job_id from runs where id = $1", first)
    [third] = await watch.scene.occur({"id": job}, 3)
    await watch.settle()
    for run, following in ((first, [second]), (second, [third]), (third, [])):
        await watch.end(run)
        assert await watch.settle() == following
    assert [await watch.moves(run) for run in (first, second, third)] == [NORMAL, WAITED, WAITED]


async def test_queue_while_no_worker_is_free(watch: Watch) -> None:
    first, second = await overlapping(watch, "queue_all")
    await watch.end(first)
    await watch.settle(slots=0)
    assert await watch.moves(second) == ["ready", "waiting", "ready"]
    assert await watch.settle() == [second]


async def test_queue_with_jitter_runs_in_the_order_of_instants(watch: Watch) -> None:
    """The order of claims may differ from the order of instants, which overlap uses."""
    first, second = await overlapping(watch, "queue_all")
    job = await watch.scene.value("select job_id from runs where id = $1", first)
    [third] = await watch.scene.occur({"id": job}, 3)
    await watch.settle()
    await watch.scene.sql.execute("update runs set order_key = now() - interval '1 day' where id = $1", third)
    await watch.end(first)
    assert await watch.settle() == [second]
    await watch.end(second)
    assert await watch.settle() == [third]
    assert await watch.moves(third) == WAITED[:-1]


async def test_replace(watch: Watch) -> None:
    first, second = await overlapping(watch, "replace")
    assert [stop.run_id for stop in watch.stops] == [first], "told to stop once, when the second fell due"
    await watch.end(first, "cancelled")
    assert await watch.settle() == [second]
    job = await watch.scene.value("select job_id from runs where id = $1", second)
    [third] = await watch.scene.occur({"id": job}, 3)
    await watch.settle()
    assert [stop.run_id for stop in watch.stops] == [first, second]
    await watch.end(second, "cancelled")
    assert await watch.settle() == [third]
    await watch.end(third)
    assert await watch.moves(first) == ["ready", "running", "stopping", "ended"]
    assert await watch.moves(second) == ["ready", "waiting", "ready", "running", "stopping", "ended"]
    assert await watch.moves(third) == WAITED


async def test_replace_while_the_earlier_run_holds_the_only_slot(watch: Watch) -> None:
    """No claim finds the new occurrence then, and the old run must stop all the same."""
    job = await watch.scene.job(schedule={"every": "PT1H"}, overlap="replace")
    [first] = await watch.scene.occur(job, 9)
    assert await watch.settle() == [first]
    [second] = await watch.scene.occur(job, 6)
    await watch.settle(slots=0)
    assert [stop.run_id for stop in watch.stops] == [first]
    await watch.end(first, "cancelled")
    assert await watch.settle() == [second]
    assert await watch.moves(second) == ["ready", "running"]


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "spec",
    [
        {"max_concurrency": 1},
        {"concurrency_key": "one"},
        {"concurrency_key": "{args.none}", "max_concurrency": 1},
        {"max_concurrency": 1, "rate_limit": {"rate": "1000/s", "burst": 1000}},
    ],
    ids=["max_concurrency", "concurrency_key", "both", "with_a_rate"],
)
async def test_limits(watch: Watch, spec: dict[str, Any]) -> None:
    runs = await watch.scene.ask(await watch.scene.job(**spec), 4)
    for n, run in enumerate(runs):
        assert await watch.settle() == [run]
        await watch.end(run)
        # While no worker is free, one run takes the free place, and the others keep waiting.
        await watch.settle(slots=0)
        states = [row["state"] for row in await watch.scene.rows("select state from runs order by id")]
        assert states == ["ready"][: len(runs) - n - 1] + ["waiting"] * (len(runs) - n - 2)
    assert [await watch.moves(run) for run in runs] == [NORMAL] + [WAITED] * 3


async def test_a_limit_of_several_while_no_worker_is_free(watch: Watch) -> None:
    runs = await watch.scene.ask(await watch.scene.job(max_concurrency=2), 6)
    assert await watch.settle() == runs[:2]
    for run in runs[:2]:
        await watch.end(run)
        await watch.settle(slots=0)
    assert await watch.settle() == runs[2:4]
    for run in runs[2:4]:
        await watch.end(run)
    assert await watch.settle() == runs[4:]
    for run in runs[4:]:
        await watch.end(run)
    assert [await watch.moves(run) for run in runs] == [NORMAL] * 2 + [WAITED] * 4


async def test_a_key_with_room_goes_to_the_lane_that_has_a_free_worker(watch: Watch) -> None:
    """The run that was released first belongs to busy workers. It does not block the lane of another worker."""
    key = {"key": "shared", "max": 1}
    busy = await watch.scene.job(concurrency_key=key)
    other = await watch.scene.job(concurrency_key=key, target={"kind": "http", "url": "http://127.0.0.1:1/"})
    [first, second] = await watch.scene.ask(busy, 2)
    [third] = await watch.scene.ask(other)
    assert await watch.settle() == [first]
    await watch.end(first)
    await watch.settle(slots=0)
    assert await watch.moves(second) == ["ready", "waiting", "ready"]
    assert await watch.moves(third) == ["ready", "waiting"]
    await watch.sweep()
    assert await watch.moves(third) == ["ready", "waiting", "ready"], "its lane has a free worker"


async def test_rate(watch: Watch) -> None:
    runs = await watch.scene.ask(await watch.scene.job(rate_limit="1/hour"), 3)
    for n, run in enumerate(runs):
        if n:
            assert await watch.settle() == []
            await watch.scene.sql.execute("update limits set tat = now() - interval '1 minute'")
        assert await watch.settle() == [run]
        await watch.end(run)
    assert [await watch.moves(run) for run in runs] == [NORMAL] + [WAITED] * 2


async def test_rate_while_workers_take_none_of_them(watch: Watch) -> None:
    """A free worker does not help if its tenant is over its quota. Still, one run at a time is released."""
    runs = await watch.scene.ask(await watch.scene.job(rate_limit="1/hour"), 4)
    assert await watch.settle() == runs[:1]
    await watch.scene.sql.execute("update limits set tat = now() - interval '1 minute'")
    for _ in range(4):
        await watch.sweep()
    assert await watch.scene.value("select count(*) from runs where state = 'ready'") == 1


# ── everything else that holds a run ─────────────────────────────────────────────────────────────────────────────


async def test_circuit(watch: Watch) -> None:
    job = await watch.scene.job(circuit="down")
    await watch.scene.api.post("/v1/circuits/down/open", {"reason": "test"})
    [run] = await watch.scene.ask(job)
    for _ in range(3):
        assert await watch.settle() == []
        await circuits.keep(watch.scene.db)
    await watch.scene.api.post("/v1/circuits/down/close", {"reason": "test"})
    await circuits.keep(watch.scene.db)
    assert await watch.settle() == [run]
    await watch.end(run)
    assert await watch.moves(run) == WAITED


async def test_pause(watch: Watch) -> None:
    job = await watch.scene.job()
    [run] = await watch.scene.ask(job)
    await watch.scene.api.post(f"/v1/jobs/{job['id']}/pause", {"reason": "test"})
    assert await watch.settle() == []
    await watch.scene.api.post(f"/v1/jobs/{job['id']}/resume", {"reason": "test"})
    assert await watch.settle() == [run]
    await watch.end(run)
    assert await watch.moves(run) == WAITED


async def test_pause_of_a_job_whose_key_has_room(watch: Watch) -> None:
    """Both hold the run: it waits for one after the other, and moves once for each."""
    jobs = [await watch.scene.job(concurrency_key="shared") for _ in range(2)]
    [[first], [second]] = [await watch.scene.ask(job) for job in jobs]
    assert await watch.settle() == [first]
    await watch.scene.api.post(f"/v1/jobs/{jobs[1]['id']}/pause", {"reason": "test"})
    await watch.end(first)
    assert await watch.settle() == []
    assert await watch.moves(second) == ["ready", "waiting", "ready", "waiting"]
    await watch.scene.api.post(f"/v1/jobs/{jobs[1]['id']}/resume", {"reason": "test"})
    assert await watch.settle() == [second]


async def test_resources(watch: Watch) -> None:
    """A run that fits on no worker stays where it is."""
    [run] = await watch.scene.ask(await watch.scene.job(resources={"cpu": 64}))
    assert await watch.settle() == []
    assert await watch.moves(run) == ["ready"]


async def test_parents(watch: Watch) -> None:
    jobs = [await watch.scene.job(name=name, schedule={"cron": "0 3 * * *"}) for name in ("a", "b")]
    child = {"name": "c", "target": PROCESS, "depends_on": ["a", "b"]}
    await watch.scene.api.post("/v1/jobs", child)
    at = await watch.scene.now() - timedelta(seconds=9)
    tenant_id = await watch.scene.value("select tenant_id from jobs limit 1")
    runs = [NewRun(tenant_id, new_id(at), job["id"], "schedule", at) for job in jobs]
    async with watch.scene.db.transaction("test") as connection:
        await stage(connection, runs)
    await watch.scene.sql.execute("update triggers set next_fire_at = now() + interval '1 hour'")
    assert len(await watch.settle()) == 2
    await watch.end(runs[0].id)
    assert await watch.settle() == [], "the other parent runs"
    await watch.end(runs[1].id)
    [third] = await watch.settle()
    await watch.end(third)
    assert await watch.moves(third) == ["waiting", "ready", "running", "ended"]
