"""What is retried over budget is put off and says so; a fleet that was lost at once comes back over a while."""

from __future__ import annotations

from datetime import timedelta

from tests.flow.kit import Scene, end_of
from tocsin.flow.report import Ending, report
from tocsin.model.retry import RetryBudgets
from tocsin.model.workflow import CONDUCTOR
from tocsin.node.reaper import Reaper

W = "01900000-0000-7000-8000-000000000001"


async def test_what_is_over_budget_is_put_off_and_marked(scene: Scene) -> None:
    budgets = RetryBudgets()
    job = await scene.job(retry={"backoff": "immediate", "max_attempts": 2})
    await scene.ask(job, 400)
    runs = await scene.take(400, await scene.employ(W))
    ends = [Ending(W, end_of(run, "failed", "Down")) for run in runs]
    done = await report(scene.db, scene.node.specs, ends, scene.rng, budgets=budgets)
    assert len(done.accepted) == 400, "none is dropped"
    reasons = await scene.rows("select reason, count(*) from history group by reason order by reason nulls first")
    assert [tuple(row) for row in reasons] == [(None, 300), ("retry_budget", 100)]
    waits = await scene.rows("select id::text as id, ready_at - now() as wait from runs order by ready_at desc")
    assert timedelta(seconds=15) < waits[0]["wait"] <= timedelta(seconds=20), "a hundred at five a second"
    [attempt] = (await scene.api.get(f"/v1/runs/{waits[0]['id']}/attempts"))["items"]
    assert (attempt["outcome"], attempt["reason"]) == ("failed", "retry_budget")


async def test_what_dies_anyway_uses_no_budget(scene: Scene) -> None:
    budgets = RetryBudgets()
    job = await scene.job(retry={"max_attempts": 1})
    await scene.ask(job, 400)
    runs = await scene.take(400, await scene.employ(W))
    ends = [Ending(W, end_of(run, "failed", "Down")) for run in runs]
    await report(scene.db, scene.node.specs, ends, scene.rng, budgets=budgets)
    assert await scene.value("select count(*) from dead_letters") == 400
    assert budgets.stretch(1, job["id"], 0.0) == 0


async def test_a_lost_fleet_comes_back_spread_over_time(scene: Scene) -> None:
    job = await scene.job()
    await scene.ask(job, 2_500)
    while await scene.take(1_000, await scene.employ(W)):
        pass
    await scene.sql.execute("update workers set lease_until = now() - interval '1 second' where id <> $1", CONDUCTOR)
    reaper = Reaper(scene.db, scene.node.specs, lambda hints: None)
    turns = 1
    while await reaper.run_once() == 0:
        turns += 1
    assert turns == 3
    spread = await scene.value("select max(ready_at) - min(ready_at) from runs where state = 'staged'")
    assert timedelta(seconds=2) < spread < timedelta(seconds=4)
    back = await scene.value("select count(*) from runs where state = 'staged' and losses = 1 and failures = 0")
    assert back == 2_500
