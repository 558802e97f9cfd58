"""A crash at each failpoint of each command: kill -9 around the commit, restart, repeat, and there is one effect.

A story says how a command is prepared and given. It is given to a server that dies at the first fault, then again, the
same bytes with the same Idempotency-Key, to one that dies at the next, and at last to one that lives.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.conftest import Cluster
from tocsin.clock import iso
from tocsin.flow import control

from .cluster import ROOT, Site, until
from .evidence import instant
from .play import STORIES, Document, Play, end, story
from .workflow_stories import WORKFLOWS

MAY = {"from": "2026-05-01T00:00:00Z", "to": "2026-05-13T00:00:00Z"}

# Steps that no crash is tried at, each with the reason.
LEFT_OUT = {
    "history": "only reads",
    "catalog": "only reads",
    "backfills": "only reads",
    "logs": "only reads",
    "search": "only reads",
    "compact": "tests/cluster/test_records.py kills it at each of its points",
    "occurrences": "only reads",
    "cold": "only reads",
    "preview": "only reads",
    "reports": "only reads",
    "workflow_runs": "only reads",
    "found": "runs before any server does",
    "register": "a worker that registers twice is two workers, and the first one lapses",
    "drain": "setting one flag twice is setting it once",
    "keys": "one row, as `dead` is tried; its key is told once, so a replay has nothing to compare",
    "tenants": "one row, the same way",
    "retention": "takes away what is left over; the next turn goes on where it was",
    "retire": "pages through jobs and runs; the next turn goes on where the last one committed",
    "rotate": "wraps what is not wrapped yet, so that what a crash left is done by the next call",
}


# ── what people and programs ask ─────────────────────────────────────────────────────────────────────────────────


@story("submit.before_commit", "submit.after_commit", "server.before_reply")
async def create_a_job(play: Play) -> None:
    spec = {"target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}, "tags": {"story": "1"}}
    job = await play.survive(lambda: play.post("/v1/jobs", spec, key="create"))
    assert job["replayed"]
    assert [j["id"] for j in (await play.get("/v1/jobs", tag="story:1"))["items"]] == [job["id"]]


@story("submit.before_commit=kill:2", "submit.after_commit", "server.before_reply")
async def ask_for_runs(play: Play) -> None:
    job_id = await play.job()
    body = {"runs": [{"args": {"n": n}} for n in range(5)]}
    made = await play.survive(lambda: play.post(f"/v1/jobs/{job_id}/runs/batch", body, key="runs"))
    assert made["replayed"]
    assert sorted(r["id"] for r in await play.runs(job_id)) == sorted(made["ids"])
    assert len(made["ids"]) == 5


@story("control.before_commit", "control.after_commit")
async def cancel_a_job(play: Play) -> None:
    job_id, run_ids = await play.queued(3)
    job = await play.survive(lambda: play.post(f"/v1/jobs/{job_id}/cancel", {}, key="cancel"))
    assert (job["state"], job["replayed"]) == ("cancelled", True)
    runs = await play.runs(job_id)
    assert sorted((r["id"], r["state"]) for r in runs) == [(i, "cancelled") for i in sorted(run_ids)]


@story("cancel.before_commit", "cancel.after_commit")
async def cancel_a_job_in_pieces(play: Play) -> None:
    """The server dies while it goes on with the second piece; the next server ends all of them."""
    job_id, run_ids = await play.queued(control.PIECE + 50)
    await play.survive(lambda: play.post(f"/v1/jobs/{job_id}/cancel", {}, key="cancel"))

    async def ended() -> bool:
        newest = [run for run in await play.runs(job_id) if run["id"] in run_ids[-50:]]
        return [run["state"] for run in newest] == ["cancelled"] * 50

    await until("the last piece is cancelled", ended)


@story("edit.before_commit", "edit.after_commit")
async def change_a_job(play: Play) -> None:
    job_id, _ = await play.queued(2)
    asked = {"priority": 900}
    job = await play.survive(lambda: play.send("PATCH", f"/v1/jobs/{job_id}", asked, key="edit"))
    assert (job["version"], job["priority"], job["replayed"]) == (2, 900, True)
    assert {r["job_version"] for r in await play.runs(job_id)} == {1}, "what was queued keeps its version"


@story("edit.before_commit", "edit.after_commit")
async def give_a_job_other_parents(play: Play) -> None:
    for name in "ab":
        await play.job(name=name)
    child = await play.job(schedule=None, depends_on=["a"])
    asked = {"depends_on": ["b"]}
    job = await play.survive(lambda: play.send("PATCH", f"/v1/jobs/{child}", asked, key="edit"))
    assert (job["version"], job["replayed"]) == (2, True)
    feeds = {each["name"]: [fed["job"] for fed in each["feeds"]] for each in (await play.get("/v1/jobs"))["items"]}
    assert feeds == {"a": [], "b": [child], None: []}


@story("calendars.before_commit", "calendars.after_commit")
async def keep_a_calendar(play: Play) -> None:
    asked = {"days": ["2030-12-25"], "mode": "skip"}
    kept = await play.survive(lambda: play.send("PUT", "/v1/calendars/holidays", asked, key="calendar"))
    assert (kept["version"], kept["days"]) == (1, ["2030-12-25"])
    [listed] = (await play.get("/v1/calendars"))["items"]
    assert listed["name"] == "holidays" and listed["version"] == 1


@story("secrets.before_commit", "secrets.after_commit")
async def keep_a_secret(play: Play) -> None:
    asked = {"value": "correct horse"}
    kept = await play.survive(lambda: play.send("PUT", "/v1/secrets/token", asked, key="secret"))
    assert (kept["version"], kept["replayed"]) == (1, True)
    [listed] = (await play.get("/v1/secrets"))["items"]
    assert (listed["name"], listed["version"]) == ("token", 1)


@story("pools.before_commit", "pools.after_commit")
async def pause_a_pool(play: Play) -> None:
    paused = await play.survive(lambda: play.post("/v1/pools/default/pause", {"reason": "night"}, key="pool"))
    assert paused["paused_at"] is not None
    again = await play.post("/v1/pools/default/resume", {}, key="resume")
    assert again["paused_at"] is None
    assert again["version"] == paused["version"] + 1, "each took effect once"


@story("dead.before_commit", "dead.after_commit")
async def redrive_a_dead_letter(play: Play) -> None:
    job_id, [run_id] = await play.queued(1, retry={"max_attempts": 1})
    await play.register()
    [run] = (await play.claim())["runs"]
    await play.report(finished=[end(run, "failed")])
    made = await play.survive(lambda: play.post("/v1/dead-letters/redrive", {"ids": [run_id]}, key="redrive"))
    assert made["replayed"]
    redriven = [(r["id"], r["origin_run_id"]) for r in await play.runs(job_id) if r["trigger"] == "redrive"]
    assert redriven == [(made["items"][0]["id"], run_id)]
    assert (await play.get("/v1/dead-letters"))["items"] == []


@story("circuits.before_commit=kill:3", "circuits.after_commit")
async def open_a_circuit(play: Play) -> None:
    # The first transaction of the step sets it, the second reads it for the answer, the third opens it.
    await play.send("PUT", "/v1/circuits/billing", {"calls": 5}, key="set")
    shown = await play.survive(lambda: play.post("/v1/circuits/billing/open", {"reason": "down"}, key="open"))
    assert (shown["state"], shown["by_hand"], shown["replayed"]) == ("open", True, True)


@story("backfill.before_commit", "backfill.after_commit", "server.before_reply")
async def ask_for_a_backfill(play: Play) -> None:
    job_id = await play.job(schedule={"cron": "0 0 * * *"})
    made = await play.survive(lambda: play.post(f"/v1/jobs/{job_id}/backfill", MAY, key="fill"))
    assert made["replayed"]
    assert [b["id"] for b in (await play.get("/v1/backfills", job=job_id))["items"]] == [made["id"]]


# The first transaction of the step stores it.
@story("backfill.before_commit=kill:2", "backfill.after_commit")
async def cancel_a_backfill(play: Play) -> None:
    job_id = await play.job(schedule={"cron": "0 0 * * *"})
    made = await play.post(f"/v1/jobs/{job_id}/backfill", MAY | {"max_concurrency": 3}, key="fill")

    async def filled() -> bool:
        return len(await play.runs(job_id)) == 3

    await until("its first runs are made", filled)
    ended = await play.survive(lambda: play.post(f"/v1/backfills/{made['id']}/cancel", {}, key="cancel"))
    assert (ended["state"], ended["replayed"], ended["live"], ended["cancelled"]) == ("cancelled", True, 0, 3)
    assert [run["state"] for run in await play.runs(job_id)] == ["cancelled"] * 3


@story("erase.before_commit", "erase.after_commit")
async def erase_a_tenant(play: Play) -> None:
    await play.post("/v1/tenants", {"slug": "acme"})
    shown = await play.survive(lambda: play.send("DELETE", "/v1/tenants/acme", {"confirm": "acme"}, key="erase"))
    assert shown["replayed"] and shown["erasure"]["asked_by"] == "key:tocsin up (platform)"
    asked = await until("the record is sealed", lambda: _sealed(play, "tenant.erase"))
    assert len(asked) == 1


async def _sealed(play: Play, action: str) -> list[Document]:
    return (await play.get("/v1/audit", action=action))["items"]  # type: ignore[no-any-return]


# ── what workers say ─────────────────────────────────────────────────────────────────────────────────────────────


@story("claim.after_commit")
async def claim_runs(play: Play) -> None:
    await _claimed_and_done(play, await play.queued(3))


@story("claim_limited.before_commit", "claim_limited.after_commit")
async def claim_runs_under_a_limit(play: Play) -> None:
    await _claimed_and_done(play, await play.queued(3, max_concurrency=3))


async def _claimed_and_done(play: Play, queued: tuple[str, list[str]]) -> None:
    """An answer that was lost costs nothing: the worker proves that it does not have the runs by asking again."""
    job_id, run_ids = queued
    await play.register()
    answer = await play.survive(play.claim)
    got = {run["run_id"]: run for run in answer["runs"]}
    while len(got) < len(run_ids):
        answer = await play.claim(answer["claim_id"])
        got |= {run["run_id"]: run for run in answer["runs"]}
    assert sorted(got) == sorted(run_ids)
    told = await play.report(last_claim=answer["claim_id"], finished=[end(r, "succeeded") for r in got.values()])
    assert len(told["accepted"]) == 3
    for run in await play.runs(job_id):
        assert (run["state"], run["failures"], run["losses"]) == ("succeeded", 0, 0)
        assert len((await play.get(f"/v1/runs/{run['id']}/attempts"))["items"]) == 1


@story("claim_end.before_commit", "claim_end.after_commit")
async def skip_an_occurrence_that_others_wait_for(play: Play) -> None:
    parent = await play.job(name="parent", schedule={"every": "PT1S"}, overlap="skip")
    child = await play.job(schedule=None, depends_on=["parent"])
    await play.register()
    answer = await play.claim()  # the first one is held, and those that fall due meanwhile are skipped
    await play.survive(lambda: play.ask(answer["claim_id"], wait=1))

    async def skipped(job_id: str, instant_of: str) -> list[str]:
        return sorted(run[instant_of] for run in await play.runs(job_id) if run["state"] == "skipped")

    async def decided() -> bool:
        await play.ask(answer["claim_id"], wait=1)
        first = (await skipped(parent, "scheduled_for"))[:2]
        return len(first) == 2 and (await skipped(child, "logical_at"))[:2] == first

    await until("what waits for them is skipped, too", decided)
    told = await skipped(child, "logical_at")
    assert len(set(told)) == len(told), "each instant is decided once"


@story("report.before_commit", "report.after_commit", "server.before_reply")
async def report_results(play: Play) -> None:
    job_id, _ = await play.queued(3, retry={"max_attempts": 1})
    await play.register()
    answer = await play.claim()
    good, bad, tried = answer["runs"]
    finished = [end(good, "succeeded") | {"result": {"n": 1}}, end(bad, "failed"), end(tried, "cancelled")]
    told = await play.survive(lambda: play.report(last_claim=answer["claim_id"], finished=finished))
    assert (len(told["accepted"]), told["superseded"]) == (3, [])
    runs = {r["id"]: r for r in await play.runs(job_id)}
    assert [runs[r["run_id"]]["state"] for r in (good, bad, tried)] == ["succeeded", "dead", "cancelled"]
    for run in runs.values():
        assert len((await play.get(f"/v1/runs/{run['id']}/attempts"))["items"]) == 1
    assert runs[bad["run_id"]]["failures"] == 1
    assert len((await play.get("/v1/dead-letters"))["items"]) == 1


# The first report ends the run that both of them follow from.
@story("report.before_commit=kill:2", "report.after_commit", "server.before_reply")
async def end_runs_that_other_jobs_wait_for(play: Play) -> None:
    once = {"schedule": None, "retry": {"max_attempts": 1}}
    root = await play.job(name="root")
    parents = [await play.job(name=name, depends_on=["root"], **once) for name in "ab"]
    wanted = {"both": ["a", "b"], "one": ["a"], "broken": [{"job": "b", "on": "failure"}]}
    children = {name: await play.job(depends_on=each, **once) for name, each in wanted.items()}
    after = await play.job(depends_on=[children["both"]], **once)
    await play.post(f"/v1/jobs/{root}/runs", {})
    await play.register()
    answer = await play.claim()
    await play.report(last_claim=answer["claim_id"], finished=[end(run, "succeeded") for run in answer["runs"]])
    held: list[Document] = []
    while len(held) < 2:
        answer = await play.claim(answer["claim_id"])
        held += answer["runs"]
    ends = [end(run, "succeeded" if run["job_id"] == parents[0] else "failed") for run in held]
    told = await play.survive(lambda: play.report(last_claim=answer["claim_id"], finished=ends))
    assert len(told["accepted"]) == 2
    states = {name: [run["state"] for run in await play.runs(id_)] for name, id_ in children.items()}
    assert states == {"both": ["skipped"], "one": ["ready"], "broken": ["ready"]}, "each once, as it must"
    assert [run["reason"] for run in await play.runs(after)] == ["upstream_failed"]


@story("note.before_commit", "note.after_commit")
async def keep_a_checkpoint(play: Play) -> None:
    await play.queued(1, retry={"backoff": "immediate"})
    await play.register()
    answer = await play.claim()
    [run] = answer["runs"]
    word = {"run_id": run["run_id"], "fence": run["fence"], "checkpoint": {"page": 3}}
    kept = await play.survive(lambda: play.note(word))
    assert kept["kept"] == [[run["run_id"], run["fence"]]]
    await play.report(last_claim=answer["claim_id"], finished=[end(run, "failed")])
    [again] = (await play.claim(answer["claim_id"]))["runs"]
    assert (again["run_id"], again["checkpoint"]) == (run["run_id"], {"page": 3})
    assert (await play.note(word))["kept"] == [], "the attempt before has nothing more to say"


@story("give_back.before_commit", "give_back.after_commit")
async def hand_a_run_back(play: Play) -> None:
    await play.queued(1)
    await play.register()
    answer = await play.claim()
    [run] = answer["runs"]
    returned = [[run["run_id"], run["fence"]]]
    await play.survive(lambda: play.report(last_claim=answer["claim_id"], returned=returned))
    [again] = (await play.claim(answer["claim_id"]))["runs"]
    assert again["run_id"] == run["run_id"]
    assert again["fence"] > run["fence"]
    told = await play.report(finished=[end(run, "failed"), end(again, "succeeded")])
    assert told["superseded"] == returned
    run = await play.get(f"/v1/runs/{run['run_id']}")
    assert (run["state"], run["failures"], run["losses"]) == ("succeeded", 0, 0)


# ── what a server does by itself ─────────────────────────────────────────────────────────────────────────────────


@story("plan.before_commit=kill:4", "plan.after_commit=kill:2")
async def plan_occurrences(play: Play) -> None:
    # A planner turns once a second and commits even if it finds nothing; by these turns it has found something.
    job_id = await play.job(schedule={"every": "PT1S"})
    await play.survive(lambda: play.runs(job_id))
    made = instant((await play.get(f"/v1/jobs/{job_id}"))["created_at"])

    async def several() -> list[Document]:
        runs = await play.runs(job_id)
        return runs if len(runs) >= 6 else []

    due = sorted(instant(r["scheduled_for"]) for r in await until("six occurrences", several))
    assert due == [made + timedelta(seconds=k) for k in range(1, len(due) + 1)]


# Before and after the first runs are made, and as those that ended make room for others.
@story("fill.before_commit", "fill.after_commit", "fill.before_commit=kill:2", "fill.after_commit=kill:3")
async def fill_a_past_range(play: Play) -> None:
    job_id = await play.job(schedule={"cron": "0 0 * * *"})
    await play.register()
    held: dict[str, Document] = {}
    last = 0

    async def work() -> Document:
        nonlocal last
        made = await play.post(f"/v1/jobs/{job_id}/backfill", MAY | {"max_concurrency": 2}, key="fill")
        await play.report(last_claim=last, finished=[end(run, "succeeded") for run in held.values()])
        held.clear()
        answer = await play.ask(last)
        last = answer["claim_id"]
        held.update((run["run_id"], run) for run in answer["runs"])
        return await play.get(f"/v1/backfills/{made['id']}")

    async def completed() -> bool:
        return (await work())["state"] == "completed"

    await play.survive(work)
    await until("all of it has run", completed)
    runs = await play.runs(job_id)
    assert sorted(run["logical_at"][:10] for run in runs) == [f"2026-05-{day:02}" for day in range(1, 13)]
    assert {(run["state"], run["attempt"], run["trigger"]) for run in runs} == {("succeeded", 1, "backfill")}
    [filled] = (await play.get("/v1/backfills", job=job_id))["items"]
    assert (filled["made"], filled["succeeded"], filled["live"]) == (12, 12, 0)


@story("take_back.before_commit", "take_back.after_commit")
async def give_the_place_of_an_unclaimed_occurrence_back(play: Play) -> None:
    job_id = await play.job(schedule={"every": "PT1S", "max_runs": 2})

    async def staged() -> list[str]:
        return [run["id"] for run in await play.runs(job_id) if run["state"] in ("staged", "ready", "waiting")]

    [first, _] = await until("two occurrences", lambda: _when(staged, 2))
    await play.survive(lambda: play.post(f"/v1/runs/{first}/cancel", {}))
    await until("another in its place", lambda: _when(staged, 2))
    runs = await play.runs(job_id)
    assert sorted(run["state"] == "cancelled" for run in runs) == [False, False, True]


async def _when(look: Callable[[], Awaitable[list[str]]], many: int) -> list[str]:
    found = await look()
    return found if len(found) == many else []


@story("replan.before_commit", "replan.after_commit")
async def follow_a_calendar(play: Play) -> None:
    await play.send("PUT", "/v1/calendars/days", {"weekdays": ["MON"], "mode": "skip"}, key="days")
    job_id = await play.job(schedule={"cron": "0 12 * * *", "calendar": "days"})
    only = {"weekdays": ["MON"], "mode": "only"}
    await play.survive(lambda: play.send("PUT", "/v1/calendars/days", only, key="calendar"))

    async def moved() -> bool:
        at = (await play.get(f"/v1/jobs/{job_id}"))["next_run_at"]
        return at is not None and instant(at).weekday() == 0

    await until("the cursor stands on a Monday", moved)


@story("circuits.before_commit=kill:3", "circuits.after_commit")
async def probe_a_circuit(play: Play) -> None:
    policy = {"calls": 1, "failure_ratio": 1.0, "cooldown": "PT1S"}
    await play.send("PUT", "/v1/circuits/billing", policy, key="set")
    job_id, _ = await play.queued(1, circuit="billing", retry={"max_attempts": 1})
    await play.register()
    answer = await play.claim()
    await play.report(last_claim=answer["claim_id"], finished=[end(run, "failed") for run in answer["runs"]])
    await play.survive(lambda: play.runs(job_id))
    await play.post(f"/v1/jobs/{job_id}/runs/batch", {"runs": [{}] * 5})
    answer = await play.claim(answer["claim_id"])
    assert len(answer["runs"]) == 1, "one canary, whoever sent it"
    shown = await play.get("/v1/circuits/billing")
    assert (shown["state"], shown["waiting"]) == ("half_open", 4)


# The second time: the first thing a server seals is that its own keys were made.
@story("seal.before_commit=kill:2", "seal.after_commit")
async def chain_the_audit(play: Play) -> None:
    job_id = await play.job()
    wanted = {"target": f"job:{job_id}"}
    listed = await play.survive(lambda: play.get("/v1/audit", **wanted))
    assert len(listed["items"]) <= 1

    async def chained() -> bool:
        return len((await play.get("/v1/audit", **wanted))["items"]) == 1

    await until("the record is sealed", chained)
    proof = await play.get("/v1/audit/verify")
    assert proof["ok"] and proof["checked"] == proof["records"]


@story("sweep.before_commit", "sweep.after_commit")
async def expire_runs(play: Play) -> None:
    job_id, run_ids = await play.queued(3, start_deadline="PT0.5S")
    await play.survive(lambda: play.runs(job_id))
    assert sorted((r["id"], r["state"]) for r in await play.runs(job_id)) == [(i, "expired") for i in sorted(run_ids)]


@story("sweep.before_commit", "sweep.after_commit")
async def release_what_nobody_comes_for(play: Play) -> None:
    soon = {"at": iso(datetime.now(UTC) + timedelta(seconds=5))}
    _, gone = [await play.job(name=name, schedule=soon) for name in "ab"]
    both = await play.job(schedule=None, depends_on=["a", "b"])
    anyhow = await play.job(schedule=None, depends_on=["a", {"job": "b", "on": "completion"}])
    await play.send("DELETE", f"/v1/jobs/{gone}", {}, key="gone")
    await play.register()
    answer = await play.claim()
    await play.report(last_claim=answer["claim_id"], finished=[end(run, "succeeded") for run in answer["runs"]])
    await play.survive(lambda: play.runs(both))

    async def decided() -> bool:
        return [run["state"] for run in await play.runs(both) + await play.runs(anyhow)] == ["skipped", "ready"]

    await until("both are decided, once", decided)


@pytest.mark.parametrize("name", STORIES)
async def test_one_effect_whatever_crashes(cluster: Cluster, database_url: str, tmp_path: Path, name: str) -> None:
    faults, tell = STORIES[name]
    given = {"lease": 30, "heartbeat": 10, "horizon_seconds": 2, "master_key": base64.b64encode(bytes(32)).decode()}
    with Site(tmp_path, database_url, cluster.keys, **given) as site:
        server = await site.server("server", start=False)
        await server.start(faults[0])
        async with site.client(server) as api, site.client(server, "worker_key") as hand:
            await asyncio.wait_for(tell(Play(server, api, hand, faults)), 60)


def test_every_failpoint_is_crashed_at_or_left_out_for_a_reason() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "tocsin").rglob("*.py"))
    steps = set(re.findall(r'db\.(?:transaction\(|tenant\([^()"]*, )"(\w+)"', text))
    points = {f"{step}.{when}" for step in steps - LEFT_OUT.keys() for when in ("before_commit", "after_commit")}
    points |= set(re.findall(r'failpoints\.hit\("([\w.]+)"\)', text))
    tried = {fault.partition("=")[0] for faults, _ in STORIES.values() for fault in faults}
    assert LEFT_OUT.keys() <= steps and STORIES.keys() >= WORKFLOWS
    assert points == tried
