"""note: what an attempt says of itself is kept as long as the run is its worker's, and the next attempt finds it."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest

from tests.flow.kit import Scene, WorkerHand, end_of
from tests.flow.test_reap import lapse
from tocsin.errors import InvalidInput
from tocsin.flow.note import CHECKPOINT_LIMIT
from tocsin.wire import RunNote

W, FOREIGN = str(uuid.uuid4()), str(uuid.uuid4())


def said(key: Any, **what: Any) -> RunNote:
    return RunNote(run_id=key[0], fence=key[2], **what)


async def test_a_checkpoint_survives_failures_and_lost_workers_and_progress_does_not(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    for attempt, outcome in enumerate(("failed", "lost", "timeout"), 1):
        [row] = await scene.take(worker=W)
        assert row["checkpoint"] == (None if attempt == 1 else f'{{"done":{attempt - 1}}}')
        key = (row["id"], row["attempt"], row["fence"])
        assert (await scene.run(run_id))["progress"] is None
        notes = [said(key, progress=attempt / 4), said(key, checkpoint={"done": attempt})]
        for one in notes:
            assert await scene.node.notes.keep(W, [one]) == [(run_id, key[2])]
        assert (await scene.run(run_id))["progress"] == attempt / 4
        await scene.end(W, end_of(key, outcome))
        await scene.wake(run_id)
    [row] = await scene.take(worker=W)
    assert row["checkpoint"] == '{"done":3}'
    await scene.end(W, end_of(row))
    assert (await scene.run(run_id))["progress"] is None


async def test_a_checkpoint_survives_a_worker_that_fell_silent(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    [key] = await scene.taken(worker.id)
    await scene.node.notes.keep(worker.id, [said(key, checkpoint=[1, 2])])
    await lapse(scene, worker)
    await scene.wake(run_id)
    [row] = await scene.take()
    assert (row["id"], row["attempt"], row["checkpoint"]) == (run_id, 2, "[1,2]")


async def test_nothing_is_kept_of_what_is_not_the_workers_to_say(scene: Scene) -> None:
    await scene.ask(await scene.job(), 3)
    mine, ended, other = await scene.taken(W)
    await scene.end(W, end_of(ended))
    word = {"progress": 0.5, "checkpoint": "x"}
    stale = (mine[0], mine[1], mine[2] - 1)
    assert await scene.node.notes.keep(W, [said(stale, **word), said(ended, **word)]) == []
    assert await scene.node.notes.keep(FOREIGN, [said(mine, **word)]) == []
    nobody = [RunNote(run_id=odd, fence=fence, progress=0.5) for odd, fence in (("?", 1), (mine[0], -1), (W, 2**70))]
    assert await scene.node.notes.keep(W, nobody) == []
    assert await scene.value("select count(*) from runs where progress is not null or checkpoint is not null") == 0
    assert await scene.node.notes.keep(W, [said(stale, **word), said(other, **word)]) == [(other[0], other[2])]


async def test_a_run_that_is_to_stop_may_still_speak(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    [key] = await scene.taken(W)
    await scene.api.post(f"/v1/runs/{run_id}/cancel")
    assert await scene.node.notes.keep(W, [said(key, progress=0.9)]) == [(run_id, key[2])]


@pytest.mark.parametrize("state", [None, 0, "", [], {"a": [1, None, "\0 ü \U0001f600"]}, "x" * (CHECKPOINT_LIMIT - 2)])
async def test_any_json_is_kept_as_it_is(scene: Scene, state: Any) -> None:
    await scene.ask(await scene.job())
    [key] = await scene.taken(W)
    assert await scene.node.notes.keep(W, [said(key, checkpoint=state)])
    await scene.end(W, end_of(key, "failed"))
    assert msgspec.json.decode(await scene.value("select checkpoint from runs")) == state


async def test_one_that_is_too_large_is_refused_and_nothing_of_it_stays(scene: Scene) -> None:
    await scene.ask(await scene.job(), 2)
    one, two = await scene.taken(W)
    with pytest.raises(InvalidInput, match=r"notes\[1\]\.checkpoint"):
        await scene.node.notes.keep(W, [said(one, progress=0.5), said(two, checkpoint="x" * CHECKPOINT_LIMIT)])
    assert await scene.value("select count(*) from runs where progress is not null") == 0
