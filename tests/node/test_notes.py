"""What runs say of themselves, over HTTP: kept, shown, handed to the next attempt, and only from whom it may come."""

from __future__ import annotations

from tests.flow.kit import Scene, WorkerHand, told


async def test_a_checkpoint_goes_to_the_next_attempt_whoever_has_it(live: Scene, worker_key: str) -> None:
    [run_id] = await live.ask(await live.job(retry={"backoff": "immediate"}))
    first, second = [await WorkerHand.register(live.node, worker_key) for _ in range(2)]
    answer = await first.claim(wait=30)
    [run] = answer["runs"]
    assert "checkpoint" not in run
    word = {"run_id": run_id, "fence": run["fence"], "progress": 0.25, "checkpoint": {"page": 3}}
    assert await second.say("notes", {"notes": [word]}) == {"kept": []}
    assert await first.say("notes", {"notes": [word]}) == {"kept": [[run_id, run["fence"]]]}
    assert (await live.run(run_id))["progress"] == 0.25
    await first.report(finished=[told(run, "failed")], last_claim=answer["claim_id"])
    [again] = (await second.claim(wait=30))["runs"]
    assert (again["run_id"], again["attempt"], again["checkpoint"]) == (run_id, 2, {"page": 3})


async def test_notes_are_refused_in_clear_words(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    path = f"/v1/worker/{worker.id}/notes"
    key = {"run_id": "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071", "fence": 1}
    too_far = await worker.api.post(path, {"notes": [key | {"progress": 1.5}]}, expect=422)
    assert "progress" in too_far["detail"]
    too_large = await worker.api.post(path, {"notes": [key | {"checkpoint": "x" * 70_000}]}, expect=422)
    assert too_large["code"] == "too_large" and too_large["errors"][0]["path"] == "notes[0].checkpoint"
    await live.api.post(path, {"notes": []}, expect=403)
