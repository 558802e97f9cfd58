"""Worker messages doubled, shuffled, late and forged, many at once: one wins, and each repeat hears the same."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from tests.flow.kit import Scene, WorkerHand

RUNS = 5
Message = tuple[WorkerHand, str, dict[str, Any], str]  # who says it, which call, the body, and whose word it is


class Storm:
    """All that a worker might say of the runs it holds, true or not, and what it was answered."""

    def __init__(self, scene: Scene, rng: random.Random, owner: WorkerHand, forger: WorkerHand) -> None:
        self.scene, self.rng = scene, rng
        self.owner, self.forger = owner, forger
        self.accepted: dict[str, set[str]] = defaultdict(set)  # the words that counted, by run
        self.refused: dict[str, set[str]] = defaultdict(set)

    def messages(self, held: list[tuple[str, int, int]], last_claim: int) -> list[Message]:
        out: list[Message] = []
        running = [[run_id, fence] for run_id, _, fence in held]
        for run_id, attempt, fence in held:
            key = {"run_id": run_id, "attempt": attempt, "fence": fence}
            for outcome in ("succeeded", "failed", "cancelled", "timeout"):
                out.append((self.owner, "report", {"finished": [key | {"outcome": outcome}]}, outcome))
            out.append((self.owner, "report", {"returned": [[run_id, fence]]}, "returned"))
            for other in (fence - 1, fence + 1):
                out.append((self.owner, "report", {"finished": [key | {"fence": other, "outcome": "lost"}]}, "forged"))
            out.append((self.forger, "report", {"finished": [key | {"outcome": "lost"}]}, "forged"))
            out.append((self.forger, "report", {"returned": [[run_id, fence]]}, "forged by hand"))
            for offset in (0, 1, 2, 5):
                lines = [[0.0, "stdout", "info", f"{run_id} {n}"] for n in range(offset, offset + 3)]
                out.append((self.owner, "logs", {"chunks": [key | {"offset": offset, "lines": lines}]}, "log"))
        for claim in (last_claim - 1, last_claim):
            out.append((self.owner, "report", {"running": running, "last_claim": claim}, "heartbeat"))
        copies = [message for message in out for _ in range(self.rng.choice((1, 1, 2, 4)))]
        self.rng.shuffle(copies)
        return copies

    async def send(self, message: Message) -> None:
        who, call, body, word = message
        reply = await who.api.http.post(f"/v1/worker/{who.id}/{call}", json=body)
        assert reply.status_code == 200 or (call == "logs" and reply.status_code == 409), reply.text
        if call == "report":
            told = reply.json()
            for run_id, _ in told["accepted"]:
                self.accepted[run_id].add(word)
            for run_id, _ in told["superseded"]:
                self.refused[run_id].add(word)

    async def rage(self, messages: list[Message]) -> None:
        while messages:
            few = self.rng.randint(1, 6)
            at_once, messages = messages[:few], messages[few:]
            await asyncio.gather(*map(self.send, at_once))


@pytest.mark.parametrize("seed", range(8))
async def test_one_word_wins_whatever_the_order(scene: Scene, worker_key: str, seed: int) -> None:
    rng = random.Random(seed)
    owner, forger = [await WorkerHand.register(scene.node, worker_key) for _ in range(2)]
    storm = Storm(scene, rng, owner, forger)
    ids = await scene.ask(await scene.job(retry={"max_attempts": 2, "delay": "PT1H", "jitter": "none"}), RUNS)
    held = await scene.taken(owner.id)
    messages = storm.messages(held, await scene.value("select max(claim_id) from runs"))
    cancelled = set(rng.sample(ids, 2))
    cancels = [scene.api.post(f"/v1/runs/{run_id}/cancel") for run_id in cancelled]
    await asyncio.gather(storm.rage(messages), *cancels)

    after = {"succeeded": "succeeded", "failed": "staged", "timeout": "staged", "cancelled": "cancelled"}
    for run_id, _, _ in held:
        [word] = storm.accepted[run_id] or {"nobody"}
        assert word in (*after, "returned"), f"{word} won, seed {seed}"
        assert {"forged", "forged by hand"} <= storm.refused[run_id]
        assert word not in storm.refused[run_id], "a repeat of what counted is answered as before"
        run, attempts = await scene.run(run_id), await scene.api.get(f"/v1/runs/{run_id}/attempts")
        rows = await scene.rows("select attempt, fence, outcome from history where run_id = $1", run_id)
        stopped = run_id in cancelled and word != "succeeded"
        assert run["state"] == ("cancelled" if stopped else after.get(word, "ready")), (word, run, seed)
        assert run["failures"] == int(word in ("failed", "timeout")) and run["losses"] == 0
        outcomes = [(a["attempt"], a["outcome"]) for a in attempts["items"]]
        assert outcomes == ([] if word == "returned" else [(1, word)])
        assert len(rows) == len({row["attempt"] for row in rows}) <= 2
        lines = [line["text"] for line in (await scene.api.get(f"/v1/runs/{run_id}/logs"))["items"]]
        assert lines == [f"{run_id} {n}" for n in range(len(lines))], "in order, each once"

    # Long after, when others have the runs, not one of those words changes anything.
    before = await scene.rows("select * from history order by run_id, attempt")
    newer = await scene.taken(forger.id)
    states = await scene.rows("select id, state, worker_id, fence from runs order by id")
    storm.rng.shuffle(messages)
    stale = [m for m in messages if m[0] is owner and m[3] != "heartbeat"]
    await storm.rage(stale)
    assert await scene.rows("select * from history order by run_id, attempt") == before
    assert await scene.rows("select id, state, worker_id, fence from runs order by id") == states
    done = await forger.report(
        finished=[{"run_id": r, "attempt": a, "fence": f, "outcome": "succeeded"} for r, a, f in newer]
    )
    assert len(done["accepted"]) == len(newer) and done["superseded"] == []


async def test_five_reports_at_once_of_one_end_are_one_end_and_all_accepted(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    ids = await scene.ask(await scene.job(), 20)
    ends = [
        {"run_id": r, "attempt": a, "fence": f, "outcome": "succeeded", "result": {"n": n}}
        for n, (r, a, f) in enumerate(await scene.taken(worker.id))
    ]
    answers = await asyncio.gather(*(worker.report(finished=ends) for _ in range(5)))
    keys = [[e["run_id"], e["fence"]] for e in ends]
    assert all(answer["accepted"] == keys and answer["superseded"] == [] for answer in answers)
    assert await scene.value("select count(*) from history where run_id = any($1::uuid[])", ids) == 20
    late = await worker.report(running=keys, last_claim=10**9)
    assert sorted([o["run_id"], o["fence"]] for o in late["stop"] if o["ended"]) == sorted(keys)
    assert await scene.value("select count(*) from runs") == 0, "nothing comes back to life"
