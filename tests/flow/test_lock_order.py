"""Locks are taken in one order everywhere: jobs, triggers, limits by key, runs by id, circuits.

Steps with different orders could deadlock. Here one step is stopped right before it locks limits, until the other one
waits for it or is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest

from tests import PATIENCE
from tests.flow.kit import Scene, end_of
from tocsin.flow import control, report, sweep
from tocsin.flow.report import Returned
from tocsin.flow.shared import endings
from tocsin.store.db import Database

W = "01900000-0000-7000-8000-000000000001"
_WAITS = "select count(*) from pg_locks where not granted"


async def blocked_or_done(scene: Scene, task: asyncio.Task[Any]) -> None:
    """Wait until the task has ended, or its statement waits for a lock."""
    async with asyncio.timeout(PATIENCE):
        while not task.done():
            if await scene.value(_WAITS):
                return


async def meet(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    one: Callable[[], Awaitable[Any]],
    other: Callable[[], Awaitable[Any]],
) -> None:
    """Run `one` until it locks limits, then `other` as far as it gets, then both to their ends."""
    lock_limits = module.lock_limits
    task: asyncio.Task[Any] | None = None

    async def held(*args: Any) -> None:
        nonlocal task
        if task is None:
            task = asyncio.ensure_future(other())
            await blocked_or_done(scene, task)
        await lock_limits(*args)

    monkeypatch.setattr(module, "lock_limits", held)
    await asyncio.wait_for(one(), PATIENCE)
    assert task is not None, "no limit was locked"
    await asyncio.wait_for(task, PATIENCE)


async def test_the_sweep_of_deadlines_and_a_report(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, stopped: list[BaseException]
) -> None:
    """The sweep ends the waiting run. The report, which holds the limit, would release it."""
    job = await scene.job(max_concurrency=1)
    [first, second] = await scene.ask(job, 2)
    [run] = await scene.take(10, await scene.employ(W))
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 second' where id = $1", second)
    await meet(scene, monkeypatch, endings, lambda: sweep.expire(scene.db), lambda: scene.end(W, end_of(run)))
    assert stopped == []
    assert [(await scene.run(run_id))["state"] for run_id in (first, second)] == ["succeeded", "expired"]


async def test_a_run_that_is_handed_back_and_a_cancel_of_its_job(
    scene: Scene, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has a stop order, so it ends when it is handed back. The cancel holds the limit and needs the run."""
    job = await scene.job(max_concurrency=1)
    [run_id] = await scene.ask(job)
    [run] = await scene.take(10, await scene.employ(W))
    who = await scene.who()
    await control.cancel_run(scene.db, who, run_id, "test", None)
    await meet(
        scene,
        monkeypatch,
        report,
        lambda: report.give_back(scene.db, [Returned(W, run_id, run["fence"])]),
        lambda: control.cancel(other, who, job["id"], "test", True, None, "job.cancel"),
    )
    assert (await scene.run(run_id))["state"] == "cancelled"
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "cancelled"
