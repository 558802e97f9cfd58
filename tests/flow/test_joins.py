"""Joins: what the end of a run does to the runs of jobs that depend on its own."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import HORIZON, PROCESS, Scene, end_of
from tocsin.clock import iso
from tocsin.flow import sweep
from tocsin.flow.plan import plan
from tocsin.flow.report import Ending, report
from tocsin.flow.shared.transitions import NewRun, stage
from tocsin.model.ids import new_id
from tocsin.store.db import Database

DAILY = {"cron": "0 3 * * *"}
ONCE = {"max_attempts": 1}


class Graph:
    """Jobs named by letters, and hands to end their runs."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.jobs: dict[str, dict[str, Any]] = {}
        self.worker = str(uuid.uuid4())

    async def add(self, name: str, *parents: Any, **spec: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"name": name, "target": PROCESS, "retry": ONCE} | spec
        body |= {"depends_on": list(parents)} if parents else {}
        if not parents:
            body.setdefault("schedule", DAILY)
        self.jobs[name] = await self.scene.api.post("/v1/jobs", body)
        return self.jobs[name]

    async def occur(self, *names: str, at: datetime | None = None) -> datetime:
        """One instant of a schedule that these jobs share, as the planner stages it."""
        at = at or await self.scene.now() - timedelta(seconds=1)
        tenant_id = await self.scene.value("select tenant_id from jobs limit 1")
        runs = [NewRun(tenant_id, new_id(at), self.jobs[name]["id"], "schedule", at) for name in names]
        async with self.scene.db.transaction("test") as connection:
            assert len(await stage(connection, runs)) == len(names)
        # The planner would have moved the cursor behind it, too.
        await self.scene.sql.execute("update triggers set next_fire_at = greatest(next_fire_at, $1)", at + HORIZON)
        return at

    async def end(self, **outcomes: str) -> list[str]:
        """Claim what can be had, and end of it the runs of these jobs, told together; who could be had."""
        rows = await self.scene.take(worker=self.worker)
        by_job = {job["id"]: name for name, job in self.jobs.items()}
        held = await self.scene.rows("select id, attempt, fence, job_id from runs where worker_id is not null")
        ends = [
            end_of(
                (str(row["id"]), row["attempt"], row["fence"]),
                outcomes[name],
                "Boom" if outcomes[name] == "failed" else None,
            )
            for row in held
            if (name := by_job[str(row["job_id"])]) in outcomes
        ]
        assert len({f.run_id for f in ends}) >= len(outcomes), (outcomes, [by_job[r["job_id"]] for r in rows])
        await self.scene.end(self.worker, *ends)
        return sorted(by_job[row["job_id"]] for row in rows)

    async def live(self) -> dict[str, list[str]]:
        """The states of live runs, by job."""
        found: dict[str, list[str]] = {}
        for name, job in self.jobs.items():
            if states := await self.scene.states(job):
                found[name] = states
        return found

    async def ends(self, name: str) -> list[tuple[str, str | None]]:
        """How a job's runs ended, oldest first."""
        rows = await self.scene.rows(
            "select state, reason from history where job_id = $1 and final order by run_id", self.jobs[name]["id"]
        )
        return [tuple(row) for row in rows]

    async def sweep(self) -> None:
        await sweep.release_joining(self.scene.db, None)

    async def call(self, name: str, verb: str) -> Any:
        return await self.scene.api.post(f"/v1/jobs/{self.jobs[name]['id']}/{verb}")

    async def retry(self, name: str) -> str:
        """Run the last ended run of a job again."""
        run_id = await self.scene.value(
            "select run_id from history where job_id = $1 and final order by run_id desc limit 1",
            self.jobs[name]["id"],
        )
        return (await self.scene.api.post(f"/v1/runs/{run_id}/retry"))["id"]  # type: ignore[no-any-return]


@pytest.fixture
def graph(scene: Scene) -> Graph:
    return Graph(scene)


SKIPPED, NOT_NEEDED = ("skipped", "upstream_failed"), ("skipped", "not_needed")
DONE, DEAD = ("succeeded", None), ("dead", None)


# ── chains ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_child_runs_once_for_each_run_of_its_parent_and_stands_for_its_instant(graph: Graph) -> None:
    await graph.add("a")
    await graph.add("b", "a")
    at = await graph.occur("a")
    assert await graph.end(a="succeeded") == ["a"]
    run = await graph.scene.row("select * from runs")
    assert (run["state"], run["trigger"], run["logical_at"], run["scheduled_for"]) == ("ready", "dependency", at, at)
    assert [str(id_) for id_ in run["parents"]] == [
        str(row["run_id"]) for row in await graph.scene.rows("select run_id from history")
    ]
    assert await graph.end(b="succeeded") == ["b"]
    assert await graph.ends("b") == [DONE] and await graph.live() == {}
    shown = await graph.scene.run(str(run["id"]))
    assert shown["trigger"] == "dependency" and shown["logical_at"] is not None
    await graph.occur("a")
    await graph.end(a="succeeded")
    assert await graph.live() == {"b": ["ready"]}


@pytest.mark.parametrize(
    ("outcome", "success", "failure", "completion"),
    [("succeeded", None, NOT_NEEDED, None), ("failed", SKIPPED, None, None)],
)
async def test_what_each_wants(graph: Graph, outcome: str, success: Any, failure: Any, completion: Any) -> None:
    await graph.add("a")
    wanted = {"success": success, "failure": failure, "completion": completion}
    for on in wanted:
        await graph.add(on, {"job": "a", "on": on})
        await graph.add(f"{on}-next", on)
    await graph.occur("a")
    await graph.end(a=outcome)
    for on, skipped in wanted.items():
        assert await graph.ends(on) == ([skipped] if skipped else [])
        assert await graph.ends(f"{on}-next") == ([skipped] if skipped else []), "and so on down"
    assert set(await graph.live()) == {on for on, skipped in wanted.items() if not skipped}


async def test_retries_are_not_an_end(graph: Graph) -> None:
    await graph.add("a", retry={"max_attempts": 2, "backoff": "immediate"})
    await graph.add("b", {"job": "a", "on": "completion"})
    await graph.occur("a")
    await graph.end(a="failed")
    assert set(await graph.live()) == {"a"}
    await graph.scene.wake(str(await graph.scene.value("select id from runs")))
    await graph.end(a="failed")
    assert await graph.live() == {"b": ["ready"]}


async def test_a_join_waits_for_all_and_tells_them_apart_by_instant(graph: Graph) -> None:
    await graph.add("a")
    await graph.add("b")
    await graph.add("c", "a", "b")
    first = await graph.occur("a", "b")
    await graph.end(a="succeeded")
    assert await graph.live() == {"b": ["running"], "c": ["waiting"]}
    await graph.occur("a", "b", at=first + timedelta(milliseconds=1))
    # A second occurrence of `b` while the first runs is skipped, and with it that instant of `c`.
    await graph.end(a="succeeded")
    assert await graph.ends("c") == [SKIPPED]
    assert await graph.live() == {"b": ["running"], "c": ["waiting"]}
    await graph.end(b="succeeded")
    assert await graph.live() == {"c": ["ready"]}
    assert await graph.scene.value("select cardinality(parents) from runs") == 2


async def test_all_parents_told_in_one_report(graph: Graph) -> None:
    names = [f"p{i}" for i in range(20)]
    for name in names:
        await graph.add(name)
    await graph.add("c", *names)
    await graph.occur(*names)
    await graph.end(**dict.fromkeys(names, "succeeded"))
    assert await graph.live() == {"c": ["ready"]}


async def test_two_servers_that_end_two_parents_at_once_make_one_child(graph: Graph, scene: Scene) -> None:
    """Each in its own transaction, as far as it comes before either commits."""
    await graph.add("a")
    await graph.add("b")
    await graph.add("c", "a", "b")
    other = Database(scene.db.url, size=2)
    await other.open()
    try:
        for second in range(5):
            await graph.occur("a", "b", at=await scene.now() + timedelta(seconds=-5 + second))
            taken = await scene.take(worker=graph.worker)
            assert len(taken) == 2
            servers = [scene.db, other]
            await asyncio.gather(
                *(
                    report(db, scene.node.specs, [Ending(graph.worker, end_of(row))], scene.rng)
                    for db, row in zip(servers, taken, strict=True)
                )
            )
            assert await graph.live() == {"c": ["ready"]}
            await graph.end(c="succeeded")
    finally:
        await other.close()
    assert await graph.ends("c") == [DONE] * 5


async def test_one_that_was_cancelled_while_it_waited_does_not_come_back(graph: Graph, scene: Scene) -> None:
    for name in "abd":
        await graph.add(name)
    await graph.add("c", "a", "b", "d")
    await graph.add("e", "c")
    await graph.occur("a", "b", "d")
    await graph.end(a="succeeded")
    waiting = await scene.value("select id::text from runs where job_id = $1", graph.jobs["c"]["id"])
    await scene.api.post(f"/v1/runs/{waiting}/cancel")
    for name in "bd":
        await sweep.forget_joins(scene.db, None)
        assert await graph.end(**{name: "succeeded"}) == []
        await graph.sweep()
        assert await graph.ends("c") == [("cancelled", "cancelled")]
    assert await graph.live() == {}
    assert await graph.ends("e") == [SKIPPED]
    # Of the next instant it is as ever, and of this one nobody has to know any more.
    assert await scene.value("select count(*) from ended_joins") == 1
    assert await sweep.forget_joins(scene.db, None) is None
    assert await scene.value("select count(*) from ended_joins") == 0
    await graph.occur("a", "b", "d")
    await graph.end(a="succeeded", b="succeeded", d="succeeded")
    assert await graph.live() == {"c": ["ready"]}


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_a_cancel_and_an_end_at_once_leave_nothing_to_run(
    graph: Graph, scene: Scene, cancelled_first: bool
) -> None:
    """The one commits while the other waits for it."""
    waiting, first, last = await _joining(graph)
    told = [
        lambda: scene.api.post(f"/v1/runs/{waiting}/cancel"),
        lambda: scene.end(graph.worker, end_of(first)),
    ]
    async with scene.sql.transaction():
        await scene.sql.fetch("select from runs where id = $1 for update", waiting)
        calls = []
        for call in told if cancelled_first else reversed(told):
            calls.append(asyncio.create_task(call()))
            while await scene.value("select count(distinct pid) from pg_locks where not granted") < len(calls):
                pass
    await asyncio.gather(*calls)
    await scene.end(graph.worker, end_of(last))
    await graph.sweep()
    assert await graph.live() == {}
    assert await graph.ends("c") == [("cancelled", "cancelled")]


async def _joining(graph: Graph) -> tuple[str, Any, Any]:
    """A run that waits for two that are held, the third has ended: its id, and theirs."""
    for name in "abd":
        await graph.add(name)
    await graph.add("c", "a", "b", "d")
    await graph.occur("a", "b", "d")
    await graph.end(a="succeeded")
    held = await graph.scene.rows("select id::text, attempt, fence from runs where worker_id is not null order by id")
    first, last = (tuple(row) for row in held)
    return await graph.scene.value("select id::text from runs where state = 'waiting'"), first, last


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_by_hand_begins_a_chain_of_its_own(graph: Graph) -> None:
    await graph.add("a")
    await graph.add("b", "a")
    await graph.add("c", "a", "b")
    await graph.call("a", "runs")
    await graph.end(a="succeeded")
    assert await graph.live() == {"b": ["ready"], "c": ["waiting"]}
    await graph.end(b="succeeded")
    assert await graph.live() == {"c": ["ready"]}
    await graph.end(c="succeeded")
    await graph.call("c", "runs")
    assert await graph.live() == {"c": ["ready"]}, "one that is asked for by itself waits for nobody"


async def test_a_run_by_hand_goes_on_only_where_nothing_else_is_waited_for(graph: Graph) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    await graph.add("only-a", "a")
    await graph.call("a", "runs")
    await graph.end(a="succeeded")
    assert await graph.live() == {"only-a": ["ready"]} and await graph.ends("c") == []


async def test_a_run_by_hand_in_the_middle_reaches_what_follows_from_it_alone(graph: Graph) -> None:
    await graph.add("r")
    await graph.add("a", "r")
    await graph.add("e", "a")
    await graph.add("f", "e", "a")
    await graph.add("g", "f", "r")
    await graph.call("a", "runs")
    await graph.end(a="succeeded")
    assert await graph.live() == {"e": ["ready"]}
    await graph.end(e="succeeded")
    assert await graph.live() == {"f": ["ready"]}
    await graph.end(f="succeeded")
    assert await graph.live() == {} and await graph.ends("g") == [], "`r` had no run in it"


# ── ends without a run of their own ──────────────────────────────────────────────────────────────────────────────


async def test_a_cancelled_parent(graph: Graph, scene: Scene) -> None:
    await graph.add("a")
    await graph.add("b", "a")
    await graph.add("after-all", {"job": "a", "on": "completion"})
    await graph.occur("a")
    [run_id] = [str(row["id"]) for row in await scene.rows("select id from runs")]
    await scene.api.post(f"/v1/runs/{run_id}/cancel")
    assert await graph.ends("b") == [SKIPPED] and await graph.live() == {"after-all": ["ready"]}


async def test_a_deleted_parent_and_what_waits_for_another(graph: Graph) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    await graph.add("d", {"job": "a", "on": "completion"}, {"job": "b", "on": "completion"})
    await graph.occur("a", "b")
    await graph.end(a="succeeded")
    await graph.scene.api.delete(f"/v1/jobs/{graph.jobs['b']['id']}")
    await graph.end(b="cancelled")
    assert await graph.ends("c") == [SKIPPED] and await graph.live() == {"d": ["ready"]}
    await graph.end(d="succeeded")
    await graph.occur("a")
    await graph.end(a="succeeded")
    assert await graph.live() == {"c": ["waiting"], "d": ["waiting"]}
    await graph.sweep()
    assert await graph.ends("c") == [SKIPPED] * 2, "a deleted parent comes no more"
    assert await graph.live() == {"d": ["ready"]}


async def test_an_expired_parent(graph: Graph, scene: Scene) -> None:
    await graph.add("a", start_deadline="1s")
    await graph.add("b", "a")
    await graph.occur("a")
    await scene.sql.execute("update runs set deadline_at = now() - interval '1 second'")
    await sweep.expire(scene.db)
    assert await graph.ends("a") == [("expired", "expired")] and await graph.ends("b") == [SKIPPED]


@pytest.mark.parametrize("policy", ["skip", "latest"])
async def test_a_parent_found_too_late(graph: Graph, scene: Scene, policy: str) -> None:
    """Staged in time, and nobody there to take it."""
    await graph.add("a", schedule=DAILY | {"misfire": {"policy": policy}})
    await graph.add("b", "a")
    now = await scene.now()
    await graph.occur("a", at=now - timedelta(seconds=90))
    await graph.occur("a", at=now - timedelta(seconds=80))
    await scene.sql.execute("update runs set state = 'staged', ready_at = scheduled_for")
    lanes = [row["lane_id"] for row in await scene.rows("select distinct lane_id from runs")]
    await sweep.misfires(scene.db, lanes)
    missed = {"skip": ["misfire_expired"] * 2, "latest": ["coalesced"]}[policy]
    assert [reason for _, reason in await graph.ends("a")] == missed
    assert await graph.ends("b") == [SKIPPED] * len(missed)


async def test_a_parent_that_is_paused_gets_no_run_and_nobody_waits_for_it(graph: Graph, scene: Scene) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    await graph.add("d", {"job": "b", "on": "completion"}, "a")
    await graph.add("e", "c")
    await graph.call("b", "pause")
    await scene.sql.execute("update triggers set held_at = now() - interval '1 minute' where held_at is not null")
    await graph.occur("a")
    await graph.end(a="succeeded")
    assert await graph.live() == {"c": ["waiting"], "d": ["waiting"]}
    await graph.sweep()
    assert await graph.ends("c") == [SKIPPED] == await graph.ends("e")
    assert await graph.live() == {"d": ["ready"]}, "whatever became of it is well"


async def test_who_may_still_come_is_waited_for(graph: Graph, scene: Scene) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("b2", "b")
    await graph.add("c", "a", "b2")
    at = await graph.occur("a")
    await graph.end(a="succeeded")
    job_id = graph.jobs["b"]["id"]
    await scene.sql.execute("update triggers set next_fire_at = $1 where job_id = $2", at, job_id)
    await graph.sweep()
    assert await graph.live() == {"c": ["waiting"]}, "not planned yet"
    await graph.occur("b", at=at)
    await graph.sweep()
    assert await graph.live() == {"b": ["ready"], "c": ["waiting"]}
    await graph.end(b="succeeded")
    await graph.sweep()
    assert await graph.live() == {"b2": ["ready"], "c": ["waiting"]}
    await graph.end(b2="succeeded")
    assert await graph.live() == {"c": ["ready"]}
    await graph.end(c="succeeded")
    await graph.occur("a", at=at + timedelta(milliseconds=1))
    await scene.sql.execute("update triggers set next_fire_at = $1", at + timedelta(days=1))
    await graph.end(a="succeeded")
    await graph.sweep()
    assert await graph.ends("c") == [DONE, SKIPPED], "`b` had no run that `b2` could follow"


async def test_a_run_from_before_its_job_had_children_is_found(graph: Graph, scene: Scene) -> None:
    for name in "ab":
        await graph.add(name)
    at = await graph.occur("a")
    await graph.add("c", "a", "b")
    await graph.end(a="succeeded")
    assert await graph.live() == {}
    await graph.occur("b", at=at)
    await graph.end(b="succeeded")
    assert await graph.live() == {"c": ["waiting"]}
    await graph.sweep()
    assert await graph.live() == {"c": ["ready"]}, "`a` had succeeded"
    assert await scene.value("select cardinality(parents) from runs") == 2


async def test_missed_by_the_planner(graph: Graph, scene: Scene) -> None:
    """One parent makes up for what was missed and the other does not: nobody waits for what never comes."""
    every = {"every": "1h", "starting_at": iso(await scene.now() - timedelta(hours=100, minutes=30))}
    await graph.add("a", schedule=every | {"misfire": {"policy": "all", "window": "PT24H"}}, overlap="allow")
    await graph.add("b", schedule=every | {"misfire": {"policy": "skip"}})
    await graph.add("c", "a", "b")
    await scene.sql.execute("update triggers set next_fire_at = next_fire_at - interval '2 hours'")
    await scene.down(timedelta(hours=3))
    await plan(scene.db, HORIZON)
    count = await scene.value("select count(*) from runs where ready_at <= now()")
    assert count >= 1
    await graph.end(a="succeeded")
    await graph.sweep()
    assert await graph.ends("c") == [SKIPPED] * count and "c" not in await graph.live()


async def test_nothing_is_made_again_for_what_the_sweep_looked_at_twice(graph: Graph) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    await graph.occur("a")
    await graph.end(a="succeeded")
    await asyncio.gather(*(graph.sweep() for _ in range(4)))
    assert await graph.ends("c") == [SKIPPED]


# ── tried again ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_parent_that_was_repaired_feeds_its_children(graph: Graph, scene: Scene) -> None:
    await graph.add("a")
    await graph.add("b", "a")
    await graph.add("c", "a", "b")
    at = await graph.occur("a")
    await graph.end(a="failed")
    assert await graph.ends("b") == [SKIPPED] == await graph.ends("c")
    await graph.retry("a")
    await graph.end(a="succeeded")
    await graph.end(b="succeeded")
    assert await scene.value("select logical_at from runs") == at
    await graph.end(c="succeeded")
    assert await graph.ends("c") == [SKIPPED, DONE]


async def test_joins_are_repaired_one_parent_after_the_other(graph: Graph) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    await graph.add("d", "c", "a")
    await graph.occur("a", "b")
    await graph.end(a="failed", b="failed")
    assert await graph.ends("c") == [SKIPPED]
    await graph.retry("a")
    await graph.end(a="succeeded")
    assert await graph.ends("c") == [SKIPPED] * 2, "`b` is still dead"
    await graph.retry("b")
    await graph.end(b="succeeded")
    assert await graph.live() == {"c": ["ready"]}
    await graph.end(c="succeeded")
    assert await graph.live() == {"d": ["ready"]}
    await graph.end(d="succeeded")


async def test_what_still_waits_goes_by_the_last_end(graph: Graph) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    await graph.occur("a", "b")
    await graph.end(a="failed")
    await graph.retry("a")
    await graph.end(a="succeeded")
    assert await graph.live() == {"b": ["running"], "c": ["waiting"]}
    await graph.end(b="succeeded")
    assert await graph.live() == {"c": ["ready"]}
    await graph.end(c="succeeded")
    assert await graph.ends("c") == [DONE]


async def test_two_repaired_at_once_by_two_servers(graph: Graph, scene: Scene) -> None:
    for name in "ab":
        await graph.add(name)
    await graph.add("c", "a", "b")
    other = Database(scene.db.url, size=2)
    await other.open()
    try:
        await graph.occur("a", "b")
        await graph.end(a="failed", b="failed")
        for name in "ab":
            await graph.retry(name)
        taken = await scene.take(worker=graph.worker)
        await asyncio.gather(
            *(
                report(db, scene.node.specs, [Ending(graph.worker, end_of(row))], scene.rng)
                for db, row in zip([scene.db, other], taken, strict=True)
            )
        )
    finally:
        await other.close()
    assert await graph.live() == {"c": ["ready"]}, "whichever came second saw both"


async def test_a_child_that_is_tried_again_waits_for_nobody_and_knows_its_parents(graph: Graph, scene: Scene) -> None:
    await graph.add("a")
    await graph.add("b", "a")
    await graph.occur("a")
    await graph.end(a="succeeded")
    await graph.end(b="failed")
    await graph.retry("b")
    run = await scene.row("select * from runs")
    assert run["state"] == "ready" and len(run["parents"]) == 1


# ── edits and chains ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_parents_stay_while_a_run_waits_for_them(graph: Graph, scene: Scene) -> None:
    for name in "ab":
        await graph.add(name)
    c = await graph.add("c", "a", "b")
    await graph.occur("a", "b")
    await graph.end(a="succeeded")
    url = f"/v1/jobs/{c['id']}"
    refused = await scene.api.call("PATCH", url, json={"depends_on": ["a"]}, expect=409)
    assert refused["code"] == "runs_waiting"
    await scene.api.call("PATCH", url, json={"description": "x"})
    await graph.end(b="succeeded")
    await scene.api.call("PATCH", url, json={"depends_on": ["a"]})


async def test_a_graph_is_not_changed_under_a_chain_that_is_decided(graph: Graph, scene: Scene) -> None:
    """The edit waits until what is under way has been decided by the parents that were, and then sees it."""
    for name in "ab":
        await graph.add(name)
    c = await graph.add("c", "a", "b")
    await graph.occur("a", "b")
    [row] = [r for r in await scene.take(worker=graph.worker) if r["job_id"] == graph.jobs["a"]["id"]]
    pause = asyncio.Event()

    async def hold(name: str) -> None:
        if name == "report.before_commit":
            reached.set()
            await pause.wait()

    reached = asyncio.Event()
    hit, scene.db.failpoints.hit = scene.db.failpoints.hit, hold
    try:
        reporting = asyncio.create_task(graph.scene.end(graph.worker, end_of(row)))
        await reached.wait()
        body = {"depends_on": ["b"]}
        editing = asyncio.create_task(scene.api.http.patch(f"/v1/jobs/{c['id']}", json=body))
        while not await scene.value("select exists (select from pg_locks where locktype = 'advisory' and not granted)"):
            pass
        pause.set()
        await reporting
        assert (await editing).status_code == 409
    finally:
        scene.db.failpoints.hit = hit
