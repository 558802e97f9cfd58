"""The worker protocol over HTTP: claims whose answer was lost, heartbeats, stop orders, and who may speak."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest

from tests import PATIENCE
from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, keys, poll_opened, told
from tocsin.clock import iso
from tocsin.node.assemble import Node
from tocsin.node.server.app import build
from tocsin.node.server.protocol import ClientGone, Request
from tocsin.settings import Settings
from tocsin.worker.timing import Lease


async def test_a_long_poll_is_answered_when_a_run_comes(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    opened = poll_opened(live.node)
    poll = asyncio.create_task(worker.claim(slots=2, wait=30))
    await opened.wait()
    job = await live.job(name="n", schedule=None, timeout="PT90S")
    answer = await asyncio.wait_for(poll, PATIENCE)
    [run] = answer["runs"]
    assert answer["claim_id"] > 0
    assert (run["job_id"], run["job_name"], run["timeout_ms"], run["attempt"]) == (job["id"], "n", 90_000, 1)
    assert run["spec"]["target"]["command"] == ["true"] and run["token"].startswith("tcr_")
    assert run["start_at"] and run["scheduled_for"]
    assert run["tenant"] == (await live.who()).tenant_id


async def test_only_lanes_that_the_worker_can_take_are_handed_out(live: Scene, worker_key: str) -> None:
    python = await live.job(target={"kind": "python", "function": "reports.daily"})
    await live.ask(python)
    await live.ask(await live.job())
    knows = {"targets": ["python"], "functions": ["reports.daily"]}
    processes = await WorkerHand.register(live.node, worker_key)
    ignorant = await WorkerHand.register(live.node, worker_key, targets=["python"], functions=["other"])
    elsewhere = await WorkerHand.register(live.node, worker_key, pool="elsewhere", **knows)
    knowing = await WorkerHand.register(live.node, worker_key, **knows)
    assert [r["spec"]["target"]["kind"] for r in (await processes.claim(wait=30))["runs"]] == ["process"]
    assert [r["job_id"] for r in (await knowing.claim(wait=30))["runs"]] == [python["id"]]
    assert (await ignorant.claim(wait=0.3))["runs"] == (await elsewhere.claim(wait=0.3))["runs"] == []


async def test_a_sandbox_is_asked_of_workers_that_have_one(live: Scene, worker_key: str) -> None:
    job = await live.job(target={"kind": "process", "command": ["true"], "sandbox": True})
    await live.ask(job)
    without = await WorkerHand.register(live.node, worker_key)
    has = await WorkerHand.register(live.node, worker_key, targets=["process", "sandbox"])
    assert (await without.claim(wait=0.3))["runs"] == []
    assert [r["job_id"] for r in (await has.claim(wait=30))["runs"]] == [job["id"]]


async def test_slots_are_clamped_and_nothing_comes_to_who_asks_for_none(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key, slots=3)
    await live.ask(await live.job(), 10)
    for slots in (0, -1):
        assert (await worker.claim(slots=slots, wait=5))["runs"] == []
    assert len((await worker.claim(slots=1_000_000, wait=30))["runs"]) == 3


async def test_a_lost_answer_is_taken_back_when_the_worker_asks_again(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    ids = await live.ask(await live.job(retry={"max_attempts": 1}), 3)
    lost = await worker.claim(wait=30)
    assert len(lost["runs"]) == 3
    again = await worker.claim(wait=30)  # it knows of no claim: the answer never came
    assert sorted(r["run_id"] for r in again["runs"]) == sorted(ids)
    assert {r["attempt"] for r in again["runs"]} == {2}
    for run_id in ids:
        run = await live.run(run_id)
        assert (run["failures"], run["losses"]) == (0, 0)
    # What was sent with the lost answer's fence is void, what was sent with the new one counts.
    stale = await worker.report(finished=[told(r) for r in lost["runs"]])
    assert stale["accepted"] == [] and len(stale["superseded"]) == 3
    done = await worker.report(finished=[told(r) for r in again["runs"]], last_claim=again["claim_id"])
    assert done["accepted"] == keys(again["runs"])


async def test_an_answer_that_arrived_is_not_taken_back(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    job = await live.job()
    await live.ask(job)
    first = await worker.claim(wait=30)
    await live.ask(job)
    second = await worker.claim(wait=30, last_claim=first["claim_id"])
    assert len(first["runs"]) == len(second["runs"]) == 1
    assert (await live.run(first["runs"][0]["run_id"]))["state"] == "running"


async def test_a_heartbeat_gives_back_what_the_worker_does_not_have(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    kept, dropped, returned = await scene.ask(await scene.job(), 3)
    held = {run_id: fence for run_id, _, fence in await scene.taken(worker.id)}
    claim = await scene.value("select max(claim_id) from runs")
    # A claim newer than what the worker has heard of may still be on its way.
    await worker.report(running=[[kept, held[kept]]], last_claim=claim - 1)
    assert await scene.value("select count(*) from runs where state = 'running'") == 3
    answer = await worker.report(running=[[kept, held[kept]]], returned=[[returned, held[returned]]], last_claim=claim)
    assert answer["accepted"] == [[returned, held[returned]]]
    states = {run_id: await scene.run(run_id) for run_id in (kept, dropped, returned)}
    assert [r["state"] for r in states.values()] == ["running", "ready", "ready"]
    assert {(r["failures"], r["losses"]) for r in states.values()} == {(0, 0)}
    # Without `running` (no heartbeat) nothing is compared.
    await worker.report(last_claim=claim)
    assert (await scene.run(kept))["state"] == "running"


async def test_a_stop_order_comes_with_the_next_report(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    [(_, attempt, fence)] = await scene.taken(worker.id)
    await scene.api.post(f"/v1/runs/{run_id}/cancel", {"reason": "enough"})
    order = {"run_id": run_id, "fence": fence}
    first = await worker.report()
    assert [{k: s[k] for k in order} for s in first["stop"]] == [order]
    # It missed that answer: its heartbeat says that the run still runs, so it is told again.
    again = await worker.report(running=[[run_id, fence]], last_claim=10**9)
    assert [{k: s[k] for k in order} for s in again["stop"]] == [order]
    ended = {"run_id": run_id, "attempt": attempt, "fence": fence, "outcome": "cancelled"}
    assert (await worker.report(finished=[ended], running=[], last_claim=10**9))["stop"] == []
    assert (await scene.run(run_id))["state"] == "cancelled"


async def test_a_stop_order_ends_a_pending_long_poll(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    job = await live.job()
    await live.ask(job)
    held = await worker.claim(wait=30)
    opened = poll_opened(live.node)
    poll = asyncio.create_task(worker.claim(wait=60, last_claim=held["claim_id"]))
    await opened.wait()
    await live.api.post(f"/v1/jobs/{job['id']}/cancel")
    answer = await asyncio.wait_for(poll, PATIENCE)
    assert answer["runs"] == [] and [s["run_id"] for s in answer["stop"]] == [held["runs"][0]["run_id"]]


async def test_a_run_handed_back_while_stopping_is_cancelled(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    [(_, _, fence)] = await scene.taken(worker.id)
    await scene.api.post(f"/v1/runs/{run_id}/cancel")
    answer = await worker.report(returned=[[run_id, fence]])
    assert answer["accepted"] == [[run_id, fence]]
    run = await scene.run(run_id)
    assert (run["state"], run["reason"]) == ("cancelled", "cancelled")


async def test_a_worker_speaks_only_with_its_own_key(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    stranger = WorkerHand(await scene.api.with_key("worker"), worker.id)
    for call in (stranger.report(expect=404), stranger.claim(expect=404), stranger.ship(expect=404)):
        assert (await call)["code"] == "unknown_worker"
    unknown = WorkerHand(Api(scene.node, worker_key), "019a0000-0000-7000-8000-000000000000")
    assert (await unknown.report(expect=404))["code"] == "unknown_worker"


async def test_a_drained_worker_gets_nothing_and_is_told(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    await scene.ask(await scene.job())
    await scene.api.post(f"/v1/workers/{worker.id}/drain")
    assert (await worker.report())["drain"] is True
    answer = await worker.claim(wait=30)
    assert (answer["runs"], answer["drain"]) == ([], True)


async def test_restarting_is_a_new_worker_whatever_its_name(scene: Scene, worker_key: str) -> None:
    first, second = [await WorkerHand.register(scene.node, worker_key, name="same") for _ in range(2)]
    assert first.id != second.id
    assert len((await scene.api.get("/v1/workers"))["items"]) == 2


async def test_bodies_may_be_msgpack_and_unknown_fields_are_ignored(live: Scene, worker_key: str) -> None:
    http = Api(live.node, worker_key).http
    packed = {"content-type": "application/msgpack", "accept": "application/msgpack"}

    async def call(path: str, body: dict[str, object]) -> dict[str, object]:
        reply = await http.post(path, content=msgspec.msgpack.encode(body | {"from_the_future": 1}), headers=packed)
        assert reply.status_code == 200 and reply.headers["content-type"] == "application/msgpack"
        return msgspec.msgpack.decode(reply.content)  # type: ignore[no-any-return]

    me = await call("/v1/worker/register", {"name": "w", "slots": 9, "targets": ["process"]})
    await live.ask(await live.job(), 2)
    answer = await call(f"/v1/worker/{me['worker_id']}/claim", {"slots": 9, "wait": 30, "shared_specs": True})
    runs: list[dict[str, object]] = answer["runs"]  # type: ignore[assignment]
    [spec] = answer["specs"].values()  # type: ignore[attr-defined]
    assert len(runs) == 2 and {"target": PROCESS | {"command": ["true"]}}["target"].items() <= spec["target"].items()
    assert {r["spec_ref"] for r in runs} == set(answer["specs"])  # type: ignore[call-overload]
    done = await call(f"/v1/worker/{me['worker_id']}/report", {"finished": [told(r) for r in runs]})
    assert done["accepted"] == keys(runs)


async def test_a_worker_that_hangs_up_holds_nothing(live: Scene, worker_key: str) -> None:
    worker, other = [await WorkerHand.register(live.node, worker_key) for _ in range(2)]
    opened = poll_opened(live.node)
    headers = {"authorization": f"Bearer {worker_key}"}
    path = f"/v1/worker/{worker.id}/claim"
    request = Request("POST", path, b"", headers, body=b'{"slots": 5, "wait": 60}')
    answer = asyncio.ensure_future(build(live.node)(request))
    await asyncio.wait_for(opened.wait(), PATIENCE)
    request.fail(ClientGone())
    assert (await asyncio.wait_for(answer, PATIENCE)).status == 499 and live.node.dispatcher.polls == []
    [run_id] = await live.ask(await live.job())
    assert [(r["run_id"], r["attempt"]) for r in (await other.claim(wait=30))["runs"]] == [(run_id, 1)]


async def test_a_claim_that_comes_late_or_twice_takes_nothing_back(live: Scene, worker_key: str) -> None:
    """A copy of an old request knows of no later answer either, but it proves nothing."""
    worker = await WorkerHand.register(live.node, worker_key)
    ids = await live.ask(await live.job(), 2)
    heard = (await worker.report())["now"]
    first = {"slots": 1, "last_claim": 0, "wait": 30, "number": 1, "heard": heard}
    given = await worker.say("claim", first)
    second = await worker.say("claim", first | {"last_claim": given["claim_id"], "number": 2, "heard": given["now"]})
    assert sorted(r["run_id"] for r in (*given["runs"], *second["runs"])) == sorted(ids)
    for _ in range(3):
        assert (await worker.say("claim", first))["runs"] == []
    # Another node has not seen that request before.
    live.node.gateway._sessions.clear()
    assert (await worker.say("claim", first | {"wait": 0}))["runs"] == []
    for run_id in ids:
        run = await live.run(run_id)
        assert (run["state"], run["attempt"]) == ("running", 1)


async def test_a_lost_answer_is_proved_once_the_worker_has_heard_of_a_later_time(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    heard = (await worker.report())["now"]
    [run_id] = await live.ask(await live.job())
    lost = await worker.say("claim", {"slots": 1, "wait": 30, "number": 1, "heard": heard})
    assert len(lost["runs"]) == 1
    again = await worker.say("claim", {"slots": 1, "wait": 0, "number": 2, "heard": heard})
    assert again["runs"] == [] and (await live.run(run_id))["state"] == "running", "it may be on its way"
    await live.node.db.read_clock()
    heard = (await worker.report())["now"]
    [run] = (await worker.say("claim", {"slots": 1, "wait": 30, "number": 3, "heard": heard}))["runs"]
    assert (run["run_id"], run["attempt"]) == (run_id, 2)
    assert (await live.run(run_id))["losses"] == 0


async def test_a_heartbeat_proves_it_too_when_it_says_when_the_worker_last_asked(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    [(_, _, _)] = await scene.taken(worker.id)
    claimed = await scene.value("select claimed_at from runs")
    await worker.report(running=[], last_claim=0, asked=iso(claimed))
    assert (await scene.run(run_id))["state"] == "running", "that claim may be the one it waits for"
    await worker.report(running=[], last_claim=0, asked=iso(claimed + timedelta(microseconds=1)))
    run = await scene.run(run_id)
    assert (run["state"], run["losses"]) == ("ready", 0)


async def test_a_time_that_is_still_to_come_proves_nothing(live: Scene, worker_key: str) -> None:
    """The database's clock was set back since the worker heard of it, and its answer may be on its way."""
    worker = await WorkerHand.register(live.node, worker_key)
    [run_id] = await live.ask(await live.job())
    asks = {"slots": 1, "wait": 30, "number": 1, "heard": iso(await live.now() + timedelta(hours=1))}
    assert len((await worker.say("claim", asks))["runs"]) == 1
    await worker.report(running=[], last_claim=0, asked=asks["heard"])
    assert (await worker.say("claim", asks | {"wait": 0, "number": 2}))["runs"] == []
    run = await live.run(run_id)
    assert (run["state"], run["attempt"]) == ("running", 1)


async def test_a_clock_that_was_set_back_proves_nothing(scene: Scene, worker_key: str) -> None:
    """All that is claimed then seems to be older than what the worker has heard, also what is on its way."""
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    mark = (await worker.report())["mark"]
    await scene.taken(worker.id)
    heard = iso(await scene.now() + timedelta(seconds=90))
    await worker.report(running=[], last_claim=0, asked=heard, marked=mark)
    scene.node.gateway._sessions.clear()  # another node
    again = {"slots": 1, "wait": 0, "heard": heard}
    assert (await worker.say("claim", again | {"number": 1, "marked": mark}))["runs"] == []
    assert (await scene.run(run_id))["state"] == "running"
    scene.node.gateway._sessions[worker.id].renewed_at = float("-inf")
    mark = (await worker.report())["mark"]
    await worker.say("claim", again | {"number": 2, "marked": mark})
    assert (await scene.run(run_id))["state"] == "ready", "who has heard of a claim and asks without it has not got it"


async def test_who_leaves_with_nothing_gives_back_what_it_never_got(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    [run_id] = await scene.ask(await scene.job())
    await scene.taken(worker.id)
    await worker.report(leaving=True)
    run = await scene.run(run_id)
    assert (run["state"], run["losses"], run["failures"]) == ("ready", 0, 0)
    assert (await scene.api.get(f"/v1/workers/{worker.id}"))["state"] == "gone"


async def test_a_worker_without_a_free_slot_hears_orders_at_once(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key, slots=1)
    [run_id] = await live.ask(await live.job())
    held = await worker.claim(slots=1, wait=30)
    for order in ("cancel", "drain"):
        body = {"slots": 0, "listen": True, "wait": 60, "last_claim": held["claim_id"]}
        poll = asyncio.create_task(worker.say("claim", body))
        await until_listening(live, worker)
        where = f"/v1/runs/{run_id}/cancel" if order == "cancel" else f"/v1/workers/{worker.id}/drain"
        await live.api.post(where)
        answer = await asyncio.wait_for(poll, PATIENCE)  # without a heartbeat, which would bring it, too
        assert (len(answer["stop"]), answer["drain"]) == ((1, False) if order == "cancel" else (0, True))


async def until_listening(scene: Scene, worker: WorkerHand) -> None:
    while (s := scene.node.gateway._sessions[worker.id]).listening is None or s.listening.done():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def test_a_drain_reaches_a_worker_of_another_node_at_once(
    live: Scene, worker_key: str, settings: Settings
) -> None:
    other = Node(settings)
    await other.start()
    try:
        worker = await WorkerHand.register(other, worker_key)
        opened = poll_opened(other)
        poll = asyncio.create_task(worker.claim(wait=60))
        await opened.wait()
        await live.api.post(f"/v1/workers/{worker.id}/drain")
        answer = await asyncio.wait_for(poll, PATIENCE)
        assert answer["drain"] is True and answer["runs"] == [], "without a heartbeat, which would bring it, too"
    finally:
        await other.stop()


async def test_a_node_that_goes_answers_every_poll_even_one_that_comes_after(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    opened = poll_opened(live.node)
    poll = asyncio.create_task(worker.claim(wait=60))
    await opened.wait()
    live.node.gateway.end_polls()
    assert (await asyncio.wait_for(poll, PATIENCE))["runs"] == []
    assert (await asyncio.wait_for(worker.claim(wait=60), PATIENCE))["runs"] == []


async def test_a_hand_back_told_again_is_answered_as_before(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    kept, stopped = await scene.ask(await scene.job(), 2)
    held = {run_id: fence for run_id, _, fence in await scene.taken(worker.id)}
    await scene.api.post(f"/v1/runs/{stopped}/cancel")
    back = [[kept, held[kept]], [stopped, held[stopped]]]
    first = await worker.report(returned=back)
    assert sorted(first["accepted"]) == sorted(back)
    assert [sorted((await worker.report(returned=back))["accepted"]) for _ in range(3)] == [sorted(back)] * 3
    strange = [[kept, held[kept] + 1], [kept, held[kept] - 1]]
    assert (await worker.report(returned=strange))["superseded"] == strange
    [(_, attempt, fence)] = await scene.taken(worker.id)
    assert (await worker.report(returned=back[:1]))["accepted"] == back[:1]
    run = await scene.run(kept)
    assert (run["state"], run["attempt"], run["fence"]) == ("running", attempt, fence), "it changes nothing"


@pytest.mark.parametrize("lease", [2.0, 10.0, 60.0, 600.0])
async def test_a_worker_ends_its_lease_before_the_server_does(
    scene: Scene, worker_key: str, lease: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the lease: a report that is too soon after a renewal to renew is covered by it all the same."""
    node = scene.node
    given = replace(node.settings, lease_seconds=lease, heartbeat_seconds=1.0)
    monkeypatch.setattr(node.gateway, "_settings", given)
    worker = await WorkerHand.register(node, worker_key)
    session = node.gateway._sessions[worker.id]
    for age in (0.0, 0.05, 0.4, 1.0, 2.5):
        session.renewed_at = time.monotonic() - age
        before = await scene.now()
        # What the server would still grant if this report came `age` after the last renewal.
        granted = "update workers set lease_until = now() + $1 * interval '1 second' where name = 'hand'"
        await scene.sql.execute(granted, lease - age)
        await worker.report()
        ends = await scene.value("select lease_until from workers where name = 'hand'")
        margin = Lease(lease, 0.0).margin
        assert (ends - before).total_seconds() >= lease - margin / 2, f"{age} s after the last renewal"
