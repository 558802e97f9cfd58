"""Mapped nodes at random: elements succeed, fail, lose their workers, are cancelled one by one, all at once, or with
the whole. Whatever happens, the node ends after the last of them and as they did, and nothing of it starts once it is
to stop."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.flow.kit import end_of
from tests.flow.stage import Stage, nodes
from tocsin.node.reaper import Reaper

ROUNDS = 20


class Played:
    """One workflow run with a mapped node, and what its elements did."""

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self.stage, self.rng, self.scene = stage, rng, stage.scene
        self.reaper = Reaper(stage.scene.db, stage.scene.node.specs, lambda hints: None)
        self.size = rng.randint(1, 6)
        self.stopped = ""  # `node` or `whole`, once it was asked for
        self.ends: list[str] = []  # as the workers told them
        self.held: list[tuple[str, Any]] = []
        self.workers = 0
        self.run_id = self.each = ""

    async def begin(self) -> None:
        jobs = nodes({"list": [], "each": ["list"], "sum": ["each"], "alarm": [{"job": "each", "on": "failure"}]})
        jobs["each"]["map"] = {"over": "list"}
        await self.stage.make(jobs)
        self.run_id = await self.stage.ask()
        await self.stage.turn()
        await self.stage.end((await self.stage.claim())["list"], result=list(range(self.size)))
        self.each = (await self.node("each"))["run_id"]

    async def node(self, name: str) -> dict[str, Any]:
        return {each["name"]: each for each in (await self.stage.get(self.run_id))["nodes"]}[name]

    async def play(self) -> None:
        while (await self.node("each"))["finished_at"] is None:
            await self.rng.choice((self.take, self.take, self.end, self.end, self.lose, self.cancel, self.stop))()
            await self.stage.turn()
            live = await self.scene.value("select count(*) from runs where origin_run_id = $1", self.each)
            assert bool(live) == ((await self.node("each"))["finished_at"] is None)

    async def take(self) -> None:
        self.workers += 1
        worker = f"00000000-0000-7000-9000-{self.workers:012x}"
        await self.scene.sql.execute("update runs set ready_at = now() where state = 'staged'")
        rows = await self.scene.take(self.rng.randint(1, 3), worker)
        assert not (rows and self.stopped), "it was to stop"
        self.held += [(worker, row) for row in rows]

    async def end(self) -> None:
        if not self.held:
            return
        worker, row = self.held.pop(self.rng.randrange(len(self.held)))
        outcome = self.rng.choice(("succeeded", "succeeded", "succeeded", "failed"))
        await self.scene.end(worker, end_of(row, outcome, error="bad" if outcome == "failed" else None))
        self.ends.append(outcome)

    async def lose(self) -> None:
        """A worker dies without a word, of which no run was lost before: three losses are an end of their own."""
        if not self.held or self.rng.random() < 0.5:
            return
        worker = self.held[0][0]
        if await self.scene.value("select count(*) from runs where losses > 0"):
            return
        self.held = [each for each in self.held if each[0] != worker]
        await self.scene.sql.execute("update workers set lease_until = now() - interval '1 ms' where id = $1", worker)
        await self.reaper.run_once()

    async def cancel(self) -> None:
        """One element, whatever it is doing."""
        live = await self.scene.rows("select id::text from runs where origin_run_id = $1", self.each)
        if live and self.rng.random() < 0.3:
            await self.stage.api.post(f"/v1/runs/{self.rng.choice(live)['id']}/cancel")

    async def stop(self) -> None:
        if self.rng.random() < 0.2 and not self.stopped:
            self.stopped = self.rng.choice(("node", "whole"))
            path = f"/v1/workflow-runs/{self.run_id}" if self.stopped == "whole" else f"/v1/runs/{self.each}"
            await self.stage.api.post(f"{path}/cancel")

    async def judge(self) -> None:
        each = await self.node("each")
        elements = each["elements"]
        assert sum(elements.values()) == self.size
        assert elements.get("succeeded", 0) == self.ends.count("succeeded"), "what was done is done"
        well = elements == {"succeeded": self.size}
        assert each["state"] == ("succeeded" if well else "cancelled" if self.stopped else "dead")
        stage = self.stage
        await stage.play(self.run_id)
        if self.stopped == "whole":
            assert (await stage.get(self.run_id))["state"] == "cancelled"
            return
        states = await stage.states(self.run_id)
        assert states["sum"] == ("succeeded" if well else "skipped (upstream_failed)")
        assert states["alarm"] == ("succeeded" if each["state"] == "dead" else "skipped (not_needed)")
        assert (await stage.get(self.run_id))["state"] == ("succeeded" if well else "dead")


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_a_mapped_node_ends_as_its_elements_do(stage: Stage, number: int) -> None:
    played = Played(stage, random.Random(number))
    await played.begin()
    await played.play()
    await played.judge()
