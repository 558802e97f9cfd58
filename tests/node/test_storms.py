"""A storm on a whole node: what is down is left alone, probed, and comes back without a second trip."""

from __future__ import annotations

from typing import Any

from tests.flow.kit import Scene, WorkerHand, told
from tests.node.test_events import listening

SOON = {"cooldown": "PT0.2S", "max_cooldown": "PT0.4S"}
RETRY = {"max_attempts": 50, "delay": "PT0.1S", "max_delay": "PT0.2S"}


class Endpoint:
    """A worker whose runs call something that is down or up, and count it."""

    def __init__(self, hand: WorkerHand) -> None:
        self.hand = hand
        self.up = False
        self.calls = 0
        self._last_claim = 0

    async def serve(self) -> list[dict[str, Any]]:
        """Take what comes within a while, and call."""
        answer = await self.hand.claim(slots=20, last_claim=self._last_claim, wait=30)
        self._last_claim = answer["claim_id"]
        runs: list[dict[str, Any]] = answer["runs"]
        self.calls += len(runs)
        if runs:
            ends = [told(run, "succeeded" if self.up else "failed") for run in runs]
            await self.hand.report(last_claim=self._last_claim, finished=ends)
        return runs


async def test_a_storm_calms_down(live: Scene, worker_key: str) -> None:
    await live.api.call("PUT", "/v1/circuits/api", json=SOON)
    endpoint = Endpoint(await WorkerHand.register(live.node, worker_key))
    job = await live.job(circuit="api", retry=RETRY)
    async with listening(live.node, live.api.key, "type=circuit") as heard:
        assert await heard.type() == "open"
        await live.ask(job, 300)
        while (await live.api.get("/v1/circuits/api"))["state"] == "closed":
            await endpoint.serve()
        assert endpoint.calls <= 60, "it opened long before all had called"
        before = endpoint.calls
        for _ in range(3):
            assert len(await endpoint.serve()) == 1, "one canary after each cool-down"
        assert endpoint.calls == before + 3
        endpoint.up = True
        while (await live.states(job)) != []:
            await endpoint.serve()
        types = [await heard.type() for _ in range(9)]
    assert types == ["circuit.opened", "circuit.probing"] * 4 + ["circuit.closed"], "and no second trip"
    assert await live.value("select count(*) from history where final and state = 'succeeded'") == 300
    assert await live.value("select count(*) from dead_letters") == 0
    calls = await live.value("select count(*) from history")
    assert endpoint.calls == calls, "what waited burned no attempt"
