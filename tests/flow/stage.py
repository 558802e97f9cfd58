"""A workflow on a node whose loops stand still, and hands to move its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.flow.kit import PROCESS, Scene, end_of

WORKER = "00000000-0000-7000-8000-0000000000aa"
Says = Callable[[str, int], dict[str, Any]]  # how a node's attempt ends: its outcome, result, …
DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


def nodes(graph: dict[str, list[Any]], **more: Any) -> dict[str, Any]:
    """Jobs that wait for each other so, tried once."""
    return {name: {"target": PROCESS, "depends_on": wanted, "retry": {"max_attempts": 1}} | more
            for name, wanted in graph.items()}  # fmt: skip


class Stage:
    """One workflow on a scene, and hands to move its runs."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.api = scene, scene.api
        self.workflow: dict[str, Any] = {}
        self.started: list[str] = []  # nodes in the order in which their attempts were claimed

    async def make(self, jobs: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.workflow = await self.api.post("/v1/workflows", {"name": "flow", "jobs": jobs} | more)
        return self.workflow

    async def ask(self, **body: Any) -> str:
        made = await self.api.post(f"/v1/workflows/{self.workflow['id']}/runs", body)
        return made["id"]  # type: ignore[no-any-return]

    async def turn(self) -> None:
        """Let the conductor do all that there is to do."""
        while not await self.scene.node.conductor.run_once():
            pass

    async def claim(self) -> dict[str, Any]:
        """What became claimable, by node."""
        return dict(await self.claim_all())

    async def claim_all(self) -> list[tuple[str, Any]]:
        """The same, of a mapped node each of its runs."""
        taken = await self.scene.take(100, WORKER)
        names = {r["id"]: r["node"] for r in await self.scene.rows("select id::text, node from jobs where node <> ''")}
        self.started += [names[row["job_id"]] for row in taken]
        return [(names[row["job_id"]], row) for row in taken]

    async def end(self, row: Any, outcome: str = "succeeded", **more: Any) -> None:
        await self.scene.end(WORKER, end_of(row, outcome, error=None if outcome == "succeeded" else "bad", **more))

    async def play(self, run_id: str, says: Says = lambda node, n: {}) -> dict[str, Any]:
        """Run it to its end; answers it."""
        await self.play_all(says)
        return await self.get(run_id)

    async def play_all(self, says: Says) -> None:
        """Run all that there is to its end."""
        await self.turn()
        while rows := await self.claim_all():
            for place, (node, row) in enumerate(rows):
                await self.end(row, **says(node, place))
            await self.turn()
        await self.turn()

    async def get(self, run_id: str) -> dict[str, Any]:
        return await self.api.get(f"/v1/workflow-runs/{run_id}")  # type: ignore[no-any-return]

    async def states(self, run_id: str) -> dict[str, str]:
        """Each node's state, with the reason if there is one."""
        return {
            node["name"]: node["state"] + (f" ({node['reason']})" if node["reason"] else "")
            for node in (await self.get(run_id))["nodes"]
        }
