"""What workers say at the wrong time, of the wrong run, or in the wrong words harms nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.kit import Scene, WorkerHand
from tocsin.failpoints import Failpoints
from tocsin.model.workflow import CONDUCTOR
from tocsin.node import gateway
from tocsin.wire import PROTOCOL


async def two_workers(scene: Scene, worker_key: str) -> tuple[WorkerHand, WorkerHand]:
    return await WorkerHand.register(scene.node, worker_key), await WorkerHand.register(scene.node, worker_key)


async def one_run(scene: Scene, worker: WorkerHand) -> dict[str, Any]:
    """A success to be reported by the worker that holds the run."""
    await scene.ask(await scene.job())
    [(run_id, attempt, fence)] = await scene.taken(worker.id)
    return {"run_id": run_id, "attempt": attempt, "fence": fence, "outcome": "succeeded"}


async def test_a_forged_report_in_the_same_commit_takes_nothing_from_the_owner(scene: Scene, worker_key: str) -> None:
    owner, stranger = await two_workers(scene, worker_key)
    mine = await one_run(scene, owner)
    # The first report is under way while the other two gather for the next commit.
    _, told, forged = await asyncio.gather(
        stranger.report(finished=[mine | {"fence": 1}]),
        owner.report(finished=[mine]),
        stranger.report(finished=[mine | {"outcome": "failed"}]),
    )
    assert told["accepted"] and not told["superseded"]
    assert forged["superseded"] and not forged["accepted"]
    assert (await scene.run(mine["run_id"]))["state"] == "succeeded"


@pytest.mark.parametrize("bad", [{"run_id": "nope"}, {"fence": 2**70}, {"attempt": 2**40}])
async def test_keys_that_cannot_be_ours_fail_no_neighbour(scene: Scene, worker_key: str, bad: dict[str, Any]) -> None:
    owner, stranger = await two_workers(scene, worker_key)
    mine = await one_run(scene, owner)
    _, told, odd = await asyncio.gather(
        stranger.report(finished=[mine | {"fence": 1}]),
        owner.report(finished=[mine]),
        stranger.api.http.post(f"/v1/worker/{stranger.id}/report", json={"finished": [mine | bad]}),
    )
    assert told["accepted"]
    assert odd.status_code in (200, 400, 422), odd.text
    if odd.status_code == 200:
        assert not odd.json()["accepted"]


async def test_odd_hand_backs_are_superseded(scene: Scene, worker_key: str) -> None:
    worker, _ = await two_workers(scene, worker_key)
    answer = await worker.report(returned=[["nope", 1], ["01a1e179-8d3d-7000-ac38-3fe1fad22687", -5]])
    assert not answer["accepted"] and len(answer["superseded"]) == 2


async def test_a_worker_that_was_declared_gone_gets_no_run(live: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    await live.sql.execute(
        "update workers set state = 'gone', gone_at = now(), lease_until = now() where id <> $1", CONDUCTOR
    )
    [run_id] = await live.ask(await live.job())
    assert (await worker.claim(wait=0.5))["runs"] == []
    assert (await live.run(run_id))["state"] == "ready"


async def test_a_worker_that_was_declared_gone_hears_so_however_often_it_asks_at_once(
    scene: Scene, worker_key: str
) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    scene.node.gateway._sessions[worker.id].renewed_at = float("-inf")
    await scene.sql.execute("update workers set state = 'gone', gone_at = now() where id = $1", worker.id)
    told = await asyncio.gather(*(worker.report(expect=404) for _ in range(3)))
    assert {each["code"] for each in told} == {"unknown_worker"}


async def test_workers_that_went_without_a_word_are_forgotten(
    scene: Scene, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = scene.node.gateway
    monkeypatch.setattr(gateway, "_FEW_SESSIONS", 2)
    monkeypatch.setattr(known, "_many", 2)
    gone, stays = await two_workers(scene, worker_key)
    known._sessions[gone.id].renewed_at -= 1000 * scene.node.settings.lease_seconds
    new = await WorkerHand.register(scene.node, worker_key)
    assert known._sessions.keys() == {stays.id, new.id}
    await gone.report()
    assert gone.id in known._sessions, "one that was only slow is known again"


async def test_a_claim_that_failed_after_its_commit_comes_back_to_its_living_worker(
    live: Scene, worker_key: str
) -> None:
    worker = await WorkerHand.register(live.node, worker_key)
    live.db.failpoints = Failpoints("claim.after_commit=raise:1")
    [run_id] = await live.ask(await live.job())
    answer = await worker.claim(wait=1)
    if not answer["runs"]:
        answer = await worker.claim(wait=5, last_claim=answer["claim_id"])
    assert [run["run_id"] for run in answer["runs"]] == [run_id]
    run = await live.run(run_id)
    assert (run["failures"], run["losses"]) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a\x00b"},
        {"name": "w", "pool": "no such\npool"},
        {"name": "w", "labels": {"zone": "\x00"}},
        {"name": "w", "resources": {"cpu": -1}},
        {"name": "w", "labels": {f"label-{n}": "" for n in range(101)}},
        {"name": "w", "targets": ["process"] * 101},
    ],
)
async def test_an_odd_registration_is_refused(scene: Scene, worker_key: str, body: dict[str, Any]) -> None:
    worker, _ = await two_workers(scene, worker_key)
    reply = await worker.api.http.post("/v1/worker/register", json=body)
    assert reply.status_code == 422, reply.text


@pytest.mark.parametrize(
    ("protocol", "status", "code", "who"),
    [
        ("0", 426, "protocol_too_old", "upgrade the worker"),
        (str(PROTOCOL + 1), 426, "protocol_too_new", "upgrade the servers first"),
        ("one", 400, "invalid_protocol", "is a number"),
        ("9" * 5000, 400, "invalid_protocol", "is a number"),
    ],
)
async def test_a_worker_of_another_protocol_hears_whom_to_upgrade_whatever_it_asks(
    scene: Scene, worker_key: str, protocol: str, status: int, code: str, who: str
) -> None:
    worker, _ = await two_workers(scene, worker_key)
    mine = await one_run(scene, worker)
    before = await scene.value("select count(*) from workers")
    for path in ("register", f"{worker.id}/claim", f"{worker.id}/report", f"{worker.id}/logs", f"{worker.id}/notes"):
        # Nothing of the body is looked at: a server may not be able to read it.
        reply = await worker.api.http.post(f"/v1/worker/{path}", content=b"\x00", headers={"Tocsin-Protocol": protocol})
        assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
        assert who in reply.json()["detail"]
        assert reply.headers.get("upgrade") == ("tocsin-worker/1" if status == 426 else None)
    assert await scene.value("select count(*) from workers") == before
    assert (await worker.report(finished=[mine]))["accepted"], "one that names none speaks the first"
