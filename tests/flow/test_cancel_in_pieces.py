"""A job with more runs than one transaction ends is cancelled in pieces, by whichever server comes first."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.flow.kit import Scene, end_of
from tocsin.flow import control
from tocsin.flow.shared.transitions import Controlled

W = str(uuid.uuid4())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PIECE", 3)


async def cancel(scene: Scene, job: dict[str, Any], **body: Any) -> dict[str, Any]:
    return await scene.api.post(f"/v1/jobs/{job['id']}/cancel", body)  # type: ignore[no-any-return]


async def go_on(scene: Scene) -> list[Controlled]:
    """Cancel all remaining pieces."""
    pieces = []
    while (piece := await control.go_on_cancelling(scene.db)) is not None:
        pieces.append(piece)
    return pieces


async def ends(scene: Scene, job: dict[str, Any]) -> list[tuple[str, str]]:
    rows = await scene.rows("select state, reason from history where job_id = $1 and final", job["id"])
    return [(row["state"], row["reason"]) for row in rows]


async def test_one_transaction_ends_one_piece_and_nothing_of_the_rest_starts(scene: Scene) -> None:
    job, other = await scene.job(), await scene.job()
    await scene.ask(job, 8)
    assert (await cancel(scene, job, reason="enough"))["state"] == "cancelled"
    assert len(await ends(scene, job)) == 3 and len(await scene.states(job)) == 5
    [bystander] = await scene.ask(other)
    assert [row["id"] for row in await scene.take()] == [bystander], "the rest is kept from workers"
    assert (await cancel(scene, job))["state"] == "cancelled", "to cancel it again changes nothing"
    assert len(await scene.states(job)) == 5
    assert len(await go_on(scene)) == 2
    assert await scene.states(job) == [] and await ends(scene, job) == [("cancelled", "cancelled")] * 8
    for table in ("holds", "cancels", "dead_letters"):
        assert await scene.value(f"select count(*) from {table}") == 0
    detail = await scene.value("select detail from audit where action = 'job.cancel'")
    assert '"more": true' in detail and '"runs": 3' in detail


async def test_running_runs_of_every_piece_get_a_stop_order(scene: Scene) -> None:
    job = await scene.job()
    runs = await scene.ask(job, 8)
    keys = await scene.taken(W, 8)
    for key in [key for key in keys if key[0] not in (runs[0], runs[7])]:
        await scene.end(W, end_of(key, "failed", error="bad"))  # back to the queue, or dead
    await scene.ask(job, 8)
    await cancel(scene, job)
    told = [stop.run_id for piece in await go_on(scene) for stop in piece.stops]
    assert await scene.value("select state from runs where id = $1", runs[0]) == "stopping"
    assert told == [runs[7]]
    held = {key[0]: key for key in keys}
    await scene.end(W, end_of(held[runs[0]], "cancelled"), end_of(held[runs[7]], "failed", error="bad"))
    assert await scene.states(job) == []
    assert (await scene.run(runs[7]))["state"] == "cancelled", "it gets no further attempt"


async def test_what_is_left_running_gets_no_further_attempt(scene: Scene) -> None:
    job = await scene.job(retry={"max_attempts": 5})
    runs = await scene.ask(job, 6)
    keys = {key[0]: key for key in await scene.taken(W, 6)}
    await cancel(scene, job, running="leave")
    assert [stop for piece in await go_on(scene) for stop in piece.stops] == []
    await scene.end(W, end_of(keys[runs[5]], "failed", error="bad"), end_of(keys[runs[0]]))
    assert (await scene.run(runs[5]))["state"] == "cancelled" and (await scene.run(runs[0]))["state"] == "succeeded"


async def test_dependents_of_runs_in_a_later_piece_are_skipped(scene: Scene) -> None:
    parent = await scene.job(name="parent")
    child = await scene.job(schedule=None, depends_on=[{"job": "parent"}])
    await scene.ask(parent, 8)
    await cancel(scene, parent)
    await go_on(scene)
    assert await scene.states(child) == []
    assert await ends(scene, child) == [("skipped", "upstream_failed")] * 8


async def test_a_deleted_job_frees_its_name_at_once(scene: Scene) -> None:
    job = await scene.job(name="again")
    await scene.ask(job, 8)
    await scene.api.delete(f"/v1/jobs/{job['id']}")
    successor = await scene.job(name="again")
    [run] = await scene.ask(successor)
    assert [row["id"] for row in await scene.take()] == [run]
    await go_on(scene)
    assert await ends(scene, job) == [("cancelled", "cancelled")] * 8


async def test_two_servers_take_turns_with_several_jobs(scene: Scene) -> None:
    jobs = [await scene.job() for _ in range(2)]
    for job in jobs:
        await scene.ask(job, 11)
        await cancel(scene, job)
    for _ in range(2):
        await control.go_on_cancelling(scene.db)
    assert [len(await scene.states(job)) for job in jobs] == [5, 5], "each has its turn"
    async with scene.db.transaction("test") as connection:
        await connection.fetchrow(control.SQL["next_cancel"])
        await control.go_on_cancelling(scene.db)
        assert await control.go_on_cancelling(scene.db) is not None, "the one that is not held goes on"
    await go_on(scene)
    assert [len(await ends(scene, job)) for job in jobs] == [11, 11]


async def test_a_job_with_few_runs_is_cancelled_whole(scene: Scene) -> None:
    job = await scene.job()
    await scene.ask(job, 2)
    await cancel(scene, job)
    assert await scene.states(job) == [] and await control.go_on_cancelling(scene.db) is None
    assert await scene.value("select count(*) from holds") == 0


async def test_the_end_of_a_one_time_run_starts_none_of_the_remaining_runs(scene: Scene) -> None:
    """The end of a one-time job's run removes the hold of a pause. It must not remove the hold of a cancel in
    progress."""
    job = await scene.job(schedule={"delay": "1ms"})
    await scene.ask(job, 8)
    keys = await scene.taken(W, 1)
    await cancel(scene, job)
    await scene.end(W, end_of(keys[0], "cancelled"))
    assert await scene.take() == []
    await go_on(scene)
    assert await scene.states(job) == [] and await scene.value("select count(*) from holds") == 0
