"""A slow payload delays only its own run, not the other runs of the same claim."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests import PATIENCE
from tests.flow.kit import Scene, WorkerHand, poll_opened
from tocsin.model.packed import LARGE


class SlowStorage:
    """Object storage whose reads wait until the test releases them."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.reads = 0
        self._read = scene.node.objects.read
        monkeypatch.setattr(scene.node.objects, "read", self._slowly)

    async def _slowly(self, *args: Any, **kwargs: Any) -> Any:
        self.reads += 1
        await self.open.wait()
        return await self._read(*args, **kwargs)


@pytest.fixture
def storage(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> SlowStorage:
    return SlowStorage(scene, monkeypatch)


async def claimed(scene: Scene, worker: WorkerHand, last_claim: int = 0) -> dict[str, Any]:
    """Return the claim of a worker after two turns of the dispatcher: the first turn finds runs, the second claims
    them."""
    opened = poll_opened(scene.node)
    answer = asyncio.ensure_future(worker.claim(10, wait=PATIENCE, last_claim=last_claim))
    await opened.wait()
    for _ in range(2):
        scene.node.dispatcher.rescan()
        await scene.node.dispatcher.run_once()
    return {run["run_id"]: run for run in (await answer)["runs"]}


async def again(scene: Scene, run_id: str) -> Any:
    """Return the run after it was handed back, as if it had never been claimed."""
    row = await scene.row("select *, ready_at > now() as later from runs where id = $1", run_id)
    assert (row["state"], row["attempt"], row["failures"], row["losses"]) == ("staged", 0, 0, 0)
    return row


async def test_slow_arguments_delay_their_own_run_alone(scene: Scene, worker_key: str, storage: SlowStorage) -> None:
    job = await scene.job()
    [slow] = await scene.ask(job, args={"text": "x" * LARGE})
    [other] = await scene.ask(job)
    worker = await WorkerHand.register(scene.node, worker_key)
    assert list(await claimed(scene, worker)) == [other], "what is ready is handed over"
    assert (await again(scene, slow))["later"], "it is not claimed again at once"
    storage.open.set()
    await scene.wake(slow)
    assert (await claimed(scene, worker, last_claim=10**9))[slow]["args"] == {"text": "x" * LARGE}
    assert storage.reads == 1, "what was begun went on meanwhile"


async def test_a_slow_document_delays_the_runs_of_its_job_alone(
    scene: Scene, worker_key: str, storage: SlowStorage
) -> None:
    large = {"kind": "python", "function": "f", "kwargs": {"text": "x" * LARGE}}
    storage.open.set()
    slow = await scene.ask(await scene.job(target=large), 2)
    [other] = await scene.ask(await scene.job(target={"kind": "python", "function": "f"}))
    storage.open.clear()
    storage.reads = 0
    worker = await WorkerHand.register(scene.node, worker_key, targets=["python"], functions=["f"])
    assert list(await claimed(scene, worker)) == [other]
    for run_id in slow:
        assert (await again(scene, run_id))["later"]
    assert storage.reads == 1
    storage.open.set()


async def test_a_claim_of_nothing_but_slow_runs_is_answered_without_any(
    scene: Scene, worker_key: str, storage: SlowStorage
) -> None:
    [slow] = await scene.ask(await scene.job(), args={"text": "x" * LARGE})
    worker = await WorkerHand.register(scene.node, worker_key)
    assert await claimed(scene, worker) == {}
    await again(scene, slow)
    storage.open.set()
