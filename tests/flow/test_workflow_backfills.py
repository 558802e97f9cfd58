"""Backfills of workflows: a past range as workflow runs, behind live work, stopped and retried whole."""

from __future__ import annotations

from typing import Any

from tests.flow.kit import PROCESS
from tests.flow.stage import DIAMOND, Says, Stage, nodes
from tocsin.flow.fill import Tables, fill

JANUARY = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-04T00:00:00Z", "max_concurrency": 2}


async def fill_all(stage: Stage, says: Says = lambda node, n: {}) -> None:
    """Create and run everything that a backfill owes."""
    while (await fill(stage.scene.db, Tables(), True)).hints:
        await stage.play_all(says)


async def begin_backfill(stage: Stage) -> dict[str, Any]:
    await stage.make(nodes(DIAMOND), schedule={"cron": "0 0 * * *"})
    path = f"/v1/workflows/{stage.workflow['id']}/backfill"
    counted = await stage.api.post(path, JANUARY | {"dry_run": True}, expect=200)
    assert counted["total"] == 3
    return await stage.api.post(path, JANUARY, expect=202)  # type: ignore[no-any-return]


async def test_a_backfill_runs_the_whole_for_each_instant_behind_live_work(stage: Stage) -> None:
    backfill = await begin_backfill(stage)
    while (await fill(stage.scene.db, Tables(), True)).held_back:
        pass
    await stage.turn()
    taken = await stage.claim_all()
    assert [node for node, _ in taken] == ["a", "a"], "as many workflow runs at a time as it may have"
    first = await stage.scene.run(taken[0][1]["id"])
    assert (first["logical_at"], first["priority"]) == ("2026-01-01T00:00:00.000000Z", 100)
    for _, row in taken:
        await stage.end(row)
    await stage.play_all(lambda node, place: {})
    await fill_all(stage)
    done = await stage.api.get(f"/v1/backfills/{backfill['id']}")
    assert (done["state"], done["succeeded"], done["made"]) == ("completed", 3, 3)
    runs = (await stage.api.get(f"/v1/workflow-runs?workflow={stage.workflow['id']}"))["items"]
    assert sorted(run["logical_at"][:10] for run in runs) == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert stage.started.count("d") == 3


async def test_no_job_of_a_workflow_that_is_filled_goes_before_the_backfill(stage: Stage) -> None:
    own = {"before": 900, "usual": None, "behind": 7}
    await stage.make({name: {"target": PROCESS} | ({"priority": p} if p else {}) for name, p in own.items()})
    range_ = JANUARY | {"schedule": {"cron": "0 0 1 1 *"}}
    await stage.api.post(f"/v1/workflows/{stage.workflow['id']}/backfill", range_, expect=202)
    await fill(stage.scene.db, Tables(), True)
    await stage.turn()
    found = {node: (await stage.scene.run(row["id"]))["priority"] for node, row in (await stage.claim()).items()}
    assert found == {"before": 100, "usual": 100, "behind": 7}


async def test_a_cancelled_backfill_stops_the_whole_of_its_workflow_runs(stage: Stage) -> None:
    backfill = await begin_backfill(stage)
    while (await fill(stage.scene.db, Tables(), True)).held_back:
        pass
    await stage.turn()
    taken = await stage.claim_all()
    told = await stage.api.post(f"/v1/backfills/{backfill['id']}/cancel")
    assert (told["state"], told["live"]) == ("cancelled", 2)
    await stage.turn()
    for _, row in taken:
        await stage.end(row, "cancelled")
    await stage.turn()
    assert await stage.scene.value("select count(*) from runs") == 0
    told = await stage.api.get(f"/v1/backfills/{backfill['id']}")
    assert (told["live"], told["cancelled"]) == (0, 2)
    assert stage.started == ["a", "a"]


async def test_what_failed_in_a_backfill_is_retried_in_its_own_workflow_run(stage: Stage) -> None:
    backfill = await begin_backfill(stage)
    await fill_all(stage, lambda node, _: {"outcome": "failed"} if node == "b" else {})
    done = await stage.api.get(f"/v1/backfills/{backfill['id']}")
    assert (done["state"], done["failed"]) == ("completed", 3)
    run_id = done["failures"][0]["id"]
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    run = await stage.play(run_id)
    assert (run["state"], run["logical_at"]) == ("succeeded", "2026-01-01T00:00:00.000000Z")
    done = await stage.api.get(f"/v1/backfills/{backfill['id']}")
    assert (done["failed"], done["made"]) == (3, 3), "what was tried again later is not the backfill's"


async def test_a_job_of_a_workflow_has_no_past_of_its_own(stage: Stage) -> None:
    await stage.make(nodes(DIAMOND), schedule={"cron": "0 0 * * *"})
    node = await stage.scene.value("select id::text from jobs where node = 'a'")
    told = await stage.api.post(f"/v1/jobs/{node}/backfill", JANUARY, expect=409)
    assert told["code"] == "part_of_workflow"
    job = await stage.scene.job()
    await stage.api.post(f"/v1/workflows/{job['id']}/backfill", JANUARY, expect=404)
