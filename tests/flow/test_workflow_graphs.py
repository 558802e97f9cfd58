"""Random workflows against a reference: whatever fails, is cancelled or loses its worker, every node ends as it must,
and none starts before the runs have ended that it waits for.

What did not succeed is run again now and then, while the rest goes on or when all of it has ended; and some that wait
are cancelled. Two servers are told the ends at once, and never wait for each other in a circle.

Many workflows are played at once on one database, as a fleet would. The ledger is that of the jobs: what was handed out
when, and what was told to have ended.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene, end_of
from tests.flow.stage import WORKER, Stage, nodes
from tests.model import reference_workflow as reference
from tocsin.flow import report
from tocsin.flow.report import Ending
from tocsin.node.reaper import Reaper
from tocsin.store.db import Database

# `make test` plays some of them, `make graphs` as many as are wanted. A round that fails says its number: the seed.
ROUNDS, AT_ONCE = max(1, int(os.environ.get("GRAPHS", "240")) // 20), 20
SMALL, LARGE = 14, 200
ON = ("success", "success", "success", "completion", "failure")
OWN = ("succeeded",) * 8 + ("dead", "cancelled")


class Played:
    """One random workflow, how its nodes will end if they come to run, and what was seen of it."""

    def __init__(self, rng: random.Random, number: int) -> None:
        size = rng.randint(2, LARGE if number == 0 else SMALL)
        names = [f"n{i}" for i in range(size)]
        self.parents: dict[str, list[tuple[str, str]]] = {
            name: [(p, rng.choice(ON)) for p in sorted(rng.sample(names[:i], rng.randint(0, min(i, 3))))]
            for i, name in enumerate(names)
        }
        self.own = {name: rng.choice(OWN) for name in names}
        self.name = f"w{number}"
        self.cancel_after = rng.randint(1, size) if rng.random() < 0.15 else None
        self.run_id = ""
        self.retries = rng.choice((0, 0, 1, 3))
        # When something was run again: how the others had ended, or were to end because they were on their way.
        self.known: dict[str, reference.End] = {}
        self.withdrawn: set[str] = set()  # cancelled while they waited
        self.started: set[str] = set()
        self.ended: set[str] = set()
        self.cancelled = False

    @property
    def wanted(self) -> dict[str, reference.End]:
        """How each node must end by all that happened so far."""
        return reference.ends(self.parents, self.own, self.known)

    @property
    def document(self) -> dict[str, Any]:
        jobs = {
            name: {
                "target": PROCESS,
                "retry": {"max_attempts": 1},
                "depends_on": [{"job": parent, "on": on} for parent, on in parents],
            }
            for name, parents in self.parents.items()
        }
        return {"name": self.name, "jobs": jobs}


class Fleet:
    """Workers that take what there is, end it as it must end, and die now and then."""

    def __init__(self, scene: Scene, other: Database, played: list[Played], rng: random.Random) -> None:
        self.scene, self.rng = scene, rng
        self.servers = scene.db, other
        self.played = played
        self.by_job: dict[str, tuple[Played, str]] = {}
        self.reaper = Reaper(scene.db, scene.node.specs, lambda hints: None)

    async def play(self) -> None:
        for one in self.played:
            made = await self.scene.api.post("/v1/workflows", one.document)
            rows = await self.scene.rows("select id::text, node from jobs where workflow_id = $1", made["id"])
            self.by_job |= {row["id"]: (one, row["node"]) for row in rows}
            one.run_id = (await self.scene.api.post(f"/v1/workflows/{made['id']}/runs"))["id"]
        worker, turns = 0, 0
        while await self.scene.value("select count(*) from runs") or await self.try_again():
            turns += 1
            assert turns < 2_000, await self.scene.rows("select * from runs limit 5")
            await self.conduct()
            worker += 1
            name = f"00000000-0000-7000-9000-{worker:012x}"
            await self.scene.sql.execute("update runs set ready_at = now() where state = 'staged'")
            rows = await self.scene.take(self.rng.randint(1, 60), name)
            if rows and self.rng.random() < 0.1:
                await self.lose(name, rows)
            elif rows:
                await self.work(name, rows)
            await self.maybe_cancel()
            if self.rng.random() < 0.3:
                await self.withdraw()
            if self.rng.random() < 0.2:
                await self.try_again()

    async def conduct(self) -> None:
        while not await self.scene.node.conductor.run_once():
            pass

    async def lose(self, worker: str, rows: list[Any]) -> None:
        """The worker dies without a word; nobody's third loss, for that is an end of its own."""
        risky = {r["id"] for r in await self.scene.rows("select id::text from runs where losses >= 1")}
        kept = [row for row in rows if row["id"] in risky]
        if kept:
            await self.work(worker, kept)
        await self.scene.sql.execute("update workers set lease_until = now() - interval '1 ms' where id = $1", worker)
        await self.reaper.run_once()

    async def work(self, worker: str, rows: list[Any]) -> None:
        self.rng.shuffle(rows)
        ends = []
        for row in rows:
            one, node = self.by_job[row["job_id"]]
            waited = {parent for parent, _ in one.parents[node]}
            over = one.ended | self.skipped(one)
            assert waited <= over or node in one.known, f"{node} started before what it waits for"
            assert node not in one.started, f"{node} started twice"
            one.started.add(node)
            state = one.own[node]
            if state == "cancelled":
                await self.scene.api.post(f"/v1/runs/{row['id']}/cancel")
            outcome = {"succeeded": "succeeded", "dead": "failed", "cancelled": "cancelled"}[state]
            ends.append((one, node, end_of(row, outcome, error="bad" if outcome == "failed" else None)))
        told = [Ending(worker, end) for _, _, end in ends]
        half = self.rng.randint(0, len(told))
        await asyncio.gather(
            *(
                report.report(db, self.scene.node.specs, part, self.rng)
                for db, part in zip(self.servers, (told[:half], told[half:]), strict=True)
                if part
            )
        )
        for one, node, _ in ends:
            one.ended.add(node)

    async def withdraw(self) -> None:
        """Cancel a run that waits for others."""
        waiting = await self.scene.rows(
            "select id::text, job_id::text from runs where blocked_by = 'parent' order by id"
        )
        found = [(row["id"], *self.by_job[row["job_id"]]) for row in waiting]
        if found := [each for each in found if not each[1].cancelled]:
            run_id, one, node = self.rng.choice(found)
            assert (await self.scene.api.post(f"/v1/runs/{run_id}/cancel"))["state"] == "cancelled"
            one.known[node] = ("cancelled", None)
            one.withdrawn.add(node)
            one.ended.add(node)

    def skipped(self, one: Played) -> set[str]:
        """Nodes that never come to run, by the reference."""
        return {node for node, (state, _) in one.wanted.items() if state == "skipped"}

    async def maybe_cancel(self) -> None:
        for one in self.played:
            if one.cancel_after is not None and not one.cancelled and len(one.ended) >= one.cancel_after:
                answer = await self.scene.api.post(f"/v1/workflow-runs/{one.run_id}/cancel")
                one.cancelled = answer["state"] in ("stopping", "cancelled")
                one.cancel_after = None

    async def try_again(self) -> bool:
        """Run a node again that did not succeed, of those that may be; whether one was."""
        await self.conduct()
        return any([await self.retry(one) for one in self.played if one.retries and not one.cancelled])

    async def retry(self, one: Played) -> bool:
        run = await self.scene.api.get(f"/v1/workflow-runs/{one.run_id}")
        found = {each["name"]: each for each in run["nodes"]}
        failed = [name for name, each in found.items() if each["state"] in ("dead", "cancelled")]
        # What was cancelled while it waited may have parents that are themselves to be tried again.
        failed = [name for name in failed if name not in one.withdrawn]
        if not failed or run["state"] not in ("running", "dead"):
            return False
        node = self.rng.choice(failed)
        one.retries -= 1
        await self.scene.api.post(f"/v1/runs/{found[node]['run_id']}/retry")
        known = {name: _told((each["state"], each["reason"])) for name, each in found.items() if each["finished_at"]}
        anew = reference.again(one.parents, known, node)
        on_their_way = {name for name, each in found.items() if each["blocked_by"] != "parent"} - known.keys()
        known |= {name: (one.own[name], None) for name in on_their_way}
        one.known = {name: end for name, end in known.items() if name not in anew}
        one.own[node] = self.rng.choice(OWN)
        one.started -= anew
        one.ended -= anew
        return True

    async def judge(self) -> None:
        for one in self.played:
            run = await self.scene.api.get(f"/v1/workflow-runs/{one.run_id}")
            found = {node["name"]: (node["state"], node["reason"]) for node in run["nodes"]}
            wanted = one.wanted
            if one.cancelled:
                self.judge_cancelled(one, run["state"], found, wanted)
                continue
            assert {n: _told(end) for n, end in found.items()} == wanted, (one.parents, one.own)
            assert run["state"] == reference.outcome(wanted)

    def judge_cancelled(
        self, one: Played, state: str, found: dict[str, reference.End], wanted: dict[str, reference.End]
    ) -> None:
        """What had ended keeps its end; whatever had not is cancelled or, by then, could not run."""
        for node, end in found.items():
            if node in one.ended:
                assert end[0] in (wanted[node][0], "cancelled")
            else:
                assert end[0] in ("cancelled", "skipped"), (node, end)
        assert state == reference.outcome({n: _told(end) for n, end in found.items()}, cancelled=True)


def _told(end: reference.End) -> reference.End:
    return end if end[0] == "skipped" else (end[0], None)


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_every_node_ends_as_it_must(
    scene: Scene, other: Database, stopped: list[BaseException], number: int
) -> None:
    rng = random.Random(number)
    fleet = Fleet(scene, other, [Played(rng, i) for i in range(AT_ONCE)], rng)
    await fleet.play()
    await fleet.judge()
    assert not stopped


@pytest.mark.parametrize(
    "shape",
    [
        {"fails": [], "other": [], "near": ["fails"], "below": ["near", "other"]},
        {"fails": [], "other": [], "near": ["fails"], "below": ["near", "other"], "far": ["fails", "other"]},
    ],
    ids=["the head is told by both", "what is below comes before what is beside it"],
)
async def test_who_goes_further_down_never_waits_in_a_circle(
    stage: Stage, other: Database, stopped: list[BaseException], shape: dict[str, list[str]]
) -> None:
    """One server ends what dooms others, and goes down by it; the other ends what feeds the same runs."""
    pairs = 15
    order = [(name, i) for name in shape for i in range(pairs)]
    await stage.make(nodes({f"{name}{i}": [f"{parent}{i}" for parent in shape[name]] for name, i in order}))
    run_id = await stage.ask()
    await stage.turn()
    rows = await stage.claim()
    for i in range(pairs):
        ends = end_of(rows[f"fails{i}"], "failed", error="bad"), end_of(rows[f"other{i}"])
        servers = stage.scene.db, other
        await asyncio.gather(
            *(
                report.report(db, stage.scene.node.specs, [Ending(WORKER, end)], stage.scene.rng)
                for db, end in zip(servers, ends, strict=True)
            )
        )
    await stage.turn()
    assert not stopped
    assert (await stage.get(run_id))["state"] == "dead"
