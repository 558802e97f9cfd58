"""Random small graphs of jobs on a real PostgreSQL, ended in random order by two servers at once, against a slow
reference: every job ends once, as it must, and none is claimed before all that it waits for have ended."""

from __future__ import annotations

import asyncio
import random
import uuid
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene, end_of
from tests.model import reference_workflow as reference
from tocsin.flow import sweep
from tocsin.flow.report import Ending, report
from tocsin.flow.shared.transitions import NewRun, stage
from tocsin.model.ids import new_id
from tocsin.store.db import Database, Row
from tocsin.wire import Finished

ONS = ("success", "failure", "completion")
OWN_ENDS = ("succeeded", "succeeded", "succeeded", "dead", "dead", "cancelled", "expired")
WITHDRAWN = 0.1  # of those that are seen to wait, a turn: they are cancelled
Edges = dict[str, list[tuple[str, str]]]
GRAPHS = 12  # of each seed
_MOST_TURNS = 200


def drawn(rng: random.Random, number: int) -> Edges:
    names = [f"g{number}-{i}" for i in range(rng.randint(2, 12))]
    return {
        name: [
            (parent, rng.choice(ONS))
            for parent in rng.sample(names[:place], k=min(place, rng.choice((0, 1, 1, 2, 2, 3, 4))))
        ]
        for place, name in enumerate(names)
    }


class Player:
    """Ends the runs of one graph, each as it is to end, until nothing of it is left."""

    def __init__(self, scene: Scene, other: Database, rng: random.Random, edges: Edges, own: dict[str, str]) -> None:
        self.scene, self.servers, self.rng = scene, (scene.db, other), rng
        self.edges, self.own = edges, own
        self.worker = str(uuid.uuid4())
        self.names: dict[str, str] = {}
        self.withdrawn: dict[str, reference.End] = {}

    async def make(self) -> None:
        """All jobs in one call, written in any order."""
        schedule = {"cron": "0 3 * * *"}
        batch = [
            {"name": name, "target": PROCESS, "retry": {"max_attempts": 1}}
            | ({"depends_on": [{"job": p, "on": on} for p, on in parents]} if parents else {"schedule": schedule})
            for name, parents in self.edges.items()
        ]
        self.rng.shuffle(batch)
        made = await self.scene.api.post("/v1/jobs/batch", {"jobs": batch})
        self.names = {job["id"]: job["name"] for job in made["items"]}

    async def begin(self) -> None:
        """An instant that all schedules share; or, where all follows from one job, perhaps a run of it by hand."""
        roots = [id_ for id_, name in self.names.items() if not self.edges[name]]
        if len(roots) == 1 and self.rng.random() < 0.5:
            await self.scene.api.post(f"/v1/jobs/{roots[0]}/runs")
            return
        at = await self.scene.now() - timedelta(seconds=1)
        tenant_id = await self.scene.value("select tenant_id from jobs limit 1")
        async with self.scene.db.transaction("test") as connection:
            await stage(connection, [NewRun(tenant_id, new_id(at), id_, "schedule", at) for id_ in roots])

    async def play(self) -> None:
        for _ in range(_MOST_TURNS):
            if not await self.scene.value("select exists (select from runs)"):
                return
            await self._expire()
            await self._withdraw()
            claimed = await self.scene.take(self.rng.randint(1, 5), self.worker)
            await self._check_parents(claimed)
            held = await self.scene.rows("select id, job_id, attempt, fence from runs where worker_id is not null")
            chosen = self.rng.sample(held, k=self.rng.randint(min(1, len(held)), len(held)))
            ends = [await self._end(row) for row in chosen]
            half = self.rng.randint(0, len(ends))
            await asyncio.gather(
                *(
                    report(db, self.scene.node.specs, [Ending(self.worker, end) for end in part], self.rng)
                    for db, part in zip(self.servers, (ends[:half], ends[half:]), strict=True)
                    if part
                )
            )
            assert not (await sweep.release_joining(self.scene.db, None)).hints, "nobody needs the safety net here"
        raise AssertionError("something waits for ever")

    async def _expire(self) -> None:
        late = [id_ for id_, name in self.names.items() if self.own[name] == "expired"]
        # One that ends may release another that is late, too.
        while await self.scene.rows(
            "update runs set deadline_at = now() - interval '1 second'"
            " where job_id = any($1::uuid[]) and state in ('ready', 'staged') returning id",
            late,
        ):
            await sweep.expire(self.scene.db)

    async def _withdraw(self) -> None:
        for row in await self.scene.rows("select id, job_id from runs where blocked_by = 'parent' order by id"):
            if self.rng.random() < WITHDRAWN:
                await self.scene.api.post(f"/v1/runs/{row['id']}/cancel")
                self.withdrawn[self.names[str(row["job_id"])]] = ("cancelled", None)

    async def _end(self, row: Any) -> Finished:
        own = self.own[self.names[str(row["job_id"])]]
        if own == "cancelled":
            await self.scene.api.post(f"/v1/runs/{row['id']}/cancel")
        outcome = {"dead": "failed"}.get(own, own)
        return end_of((str(row["id"]), row["attempt"], row["fence"]), outcome, "Boom" if own == "dead" else None)

    async def _check_parents(self, claimed: list[Row]) -> None:
        ended = {name for name, _ in await self.ends()}
        for row in claimed:
            name = self.names[row["job_id"]]
            assert {parent for parent, _ in self.edges[name]} <= ended, f"{name} came too early"

    async def ends(self) -> list[tuple[str, reference.End]]:
        rows = await self.scene.rows(
            "select job_id, state, case when state = 'skipped' then reason end as reason from history"
            " where final and job_id = any($1::uuid[])",
            list(self.names),
        )
        return [(self.names[str(row["job_id"])], (row["state"], row["reason"])) for row in rows]


@pytest.mark.parametrize("seed", range(4))
async def test_every_job_of_a_graph_ends_once_and_as_it_must(
    scene: Scene, other: Database, stopped: list[BaseException], seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(GRAPHS):
        edges = drawn(rng, number)
        own = {name: rng.choice(OWN_ENDS) for name in edges}
        player = Player(scene, other, rng, edges, own)
        await player.make()
        await player.begin()
        await player.play()
        found = await player.ends()
        assert len(found) == len(edges), f"seed {seed}, graph {number}: {edges} {own}"
        assert dict(found) == reference.ends(edges, own, player.withdrawn), (
            f"seed {seed}, graph {number}: {edges} {own}"
        )
    assert not stopped
