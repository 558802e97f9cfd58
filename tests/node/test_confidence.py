"""What a run was told in confidence, on the server's side: ends that are told with its token are masked, and the state
that one attempt leaves to the next is sealed."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from tests import PATIENCE
from tests.cluster.cluster import until
from tests.flow.kit import Scene, WorkerHand, told
from tests.node.test_http_jobs import ALL, HTTP, claimed, complete, hand, taken
from tocsin.settings import Settings
from tocsin.store.vault import MasterKeys

TOKEN, IBAN = "correct horse battery staple", "DE02 1203 0000 0000 2020 51"
AGAIN = {"backoff": "immediate"}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return replace(settings, master_key=base64.b64encode(bytes(range(32))).decode())


@pytest.fixture
async def worker(live: Scene, worker_key: str) -> WorkerHand:
    await live.api.call("PUT", "/v1/secrets/token", json={"value": TOKEN})
    return await hand(live, worker_key)


async def confided(scene: Scene, worker: WorkerHand, spec: dict[str, Any], **request: Any) -> dict[str, Any]:
    """A run in the worker's hands that was asked for like this."""
    await scene.ask(await scene.job(**{"target": HTTP, "retry": AGAIN} | spec), **request)
    [run] = await taken(worker)
    return run


async def test_an_end_that_is_told_with_a_token_tells_no_secret(live: Scene, worker: WorkerHand) -> None:
    run = await claimed(live, worker, secrets={"TOKEN": "token"})
    encoded = base64.b64encode(TOKEN.encode()).decode()
    assert (await complete(live, run, {"result": {"rows": 3, "was": [TOKEN, f"<{encoded}>"]}}))[0] == 200
    assert (await live.run(run["run_id"]))["result"] == {"rows": 3, "was": ["***", "<***Q==>"]}
    run = await claimed(live, worker, secrets={"TOKEN": "token"}, retry={"max_attempts": 1})
    failed = {"outcome": "failed", "error": {"class": f"no.{TOKEN}", "message": f"cannot log in with {TOKEN}"}}
    assert (await complete(live, run, failed))[0] == 200
    assert (await live.run(run["run_id"]))["error"] == {"class": "no.***", "message": "cannot log in with ***"}


@pytest.mark.parametrize(
    ("spec", "request_"),
    [
        ({"sensitive": True}, {"args": {"iban": IBAN}}),
        ({}, {"args": {"iban": IBAN}, "sensitive": True}),
        ({"sensitive": True, "target": HTTP | {"body": {"iban": IBAN}}}, {}),
    ],
)
async def test_nor_anything_sensitive(
    live: Scene, worker: WorkerHand, spec: dict[str, Any], request_: dict[str, Any]
) -> None:
    run = await confided(live, worker, spec, **request_)
    assert (await complete(live, run, {"result": f"paid to {IBAN}"}))[0] == 200
    assert (await live.run(run["run_id"]))["result"] == "paid to ***"


async def test_what_a_workflow_run_is_told_in_confidence_reaches_the_jobs_that_get_it(
    live: Scene, worker: WorkerHand
) -> None:
    """Sealed for the workflow, and opened for its jobs; also when one of them is run again."""
    first, after = {"target": HTTP, "retry": {"max_attempts": 1}}, {"target": HTTP, "depends_on": ["pay"]}
    flow = await live.api.post("/v1/workflows", {"name": "flow", "jobs": {"pay": first, "tell": after}})
    asked = {"args": {"iban": IBAN}, "sensitive": True}
    whole = await live.api.post(f"/v1/workflows/{flow['id']}/runs", asked)
    assert whole["args"] == {"$sensitive": True}
    [run] = await taken(worker)
    assert (run["args"], run["sensitive"]) == ({"iban": IBAN}, True)
    assert not await live.value("select exists (select from runs r where r::text like $1)", f"%{IBAN}%")
    failed = {"outcome": "failed", "error": {"class": "no", "message": f"cannot pay to {IBAN}"}}
    assert (await complete(live, run, failed))[0] == 200
    assert (await live.run(run["run_id"]))["error"]["message"] == "cannot pay to ***"

    async def dead() -> bool:
        return (await live.api.get(f"/v1/workflow-runs/{whole['id']}"))["state"] == "dead"

    await until("it has failed", dead)
    await live.api.post(f"/v1/runs/{run['run_id']}/retry")
    [again] = await taken(worker)
    assert (again["args"], again["sensitive"]) == ({"iban": IBAN}, True)
    assert (await complete(live, again, {"result": f"paid to {IBAN}"}))[0] == 200
    [last] = await taken(worker)
    assert "args" not in last and "sensitive" not in last


async def test_of_a_secret_that_is_gone_the_rest_is_still_masked(live: Scene, worker: WorkerHand) -> None:
    await live.api.call("PUT", "/v1/secrets/other", json={"value": "another secret"})
    run = await claimed(live, worker, secrets={"TOKEN": "token", "OTHER": "other"})
    await live.api.call("DELETE", "/v1/secrets/other")
    assert (await complete(live, run, {"result": [TOKEN, 1]}))[0] == 200
    assert (await live.run(run["run_id"]))["result"] == ["***", 1]


async def test_a_server_that_cannot_know_what_is_secret_takes_no_end(
    live: Scene, worker: WorkerHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await claimed(live, worker, secrets={"TOKEN": "token"})
    book = live.node.gateway._courier._secrets
    monkeypatch.setattr(book, "_keys", MasterKeys())
    book._known.clear()
    status, problem = await complete(live, run, {"result": TOKEN})
    assert (status, problem["code"]) == (503, "no_master_key")
    assert (await live.run(run["run_id"]))["state"] == "running"


@pytest.mark.parametrize(
    ("spec", "request_"),
    [
        ({"secrets": {"TOKEN": "token"}}, {}),
        ({"sensitive": True}, {"args": {"iban": IBAN}}),
        ({"sensitive": True, "target": HTTP | {"body": IBAN}}, {}),
    ],
)
async def test_a_state_that_may_repeat_it_is_sealed_and_comes_back_as_it_was(
    live: Scene, worker: WorkerHand, spec: dict[str, Any], request_: dict[str, Any]
) -> None:
    run = await confided(live, worker, spec, **request_)
    state = {"logged in with": TOKEN, "paid": [IBAN], "page": 3}
    word = {"run_id": run["run_id"], "fence": run["fence"], "checkpoint": state, "progress": 0.5}
    assert (await worker.say("notes", {"notes": [word]}))["kept"]
    kept = await live.value("select checkpoint from runs where id = $1", run["run_id"])
    assert kept.startswith("sealed 1 ") and TOKEN not in kept and IBAN not in kept
    await worker.report(finished=[told(run, "failed")])
    [again] = await taken(worker)
    assert (again["run_id"], again["checkpoint"]) == (run["run_id"], state)


async def test_a_sealed_state_opens_for_its_own_run_alone(live: Scene, worker: WorkerHand) -> None:
    retry = {"backoff": "fixed", "delay": "PT1H", "max_attempts": 2}
    job = await live.job(target=HTTP, secrets={"TOKEN": "token"}, retry=retry)
    await live.ask(job, 2)
    one, other = await taken(worker, 2)
    word = {"run_id": one["run_id"], "fence": one["fence"], "checkpoint": {"page": 3}}
    await worker.say("notes", {"notes": [word]})
    await worker.report(finished=[told(one, "failed"), told(other, "failed")])
    await live.sql.execute(
        "update runs set checkpoint = (select checkpoint from runs where id = $1) where id = $2",
        one["run_id"],
        other["run_id"],
    )
    await live.wake(one["run_id"])
    assert (await taken(worker))[0]["checkpoint"] == {"page": 3}
    await live.wake(other["run_id"])
    assert (await worker.claim(wait=PATIENCE, last_claim=ALL))["runs"] == []
    ended = await live.run(other["run_id"])
    assert (ended["state"], ended["error"]["class"]) == ("dead", "seal_broken")


async def test_the_state_of_a_run_without_secrets_stays_readable(live: Scene, worker: WorkerHand) -> None:
    run = await claimed(live, worker)
    word = {"run_id": run["run_id"], "fence": run["fence"], "checkpoint": "sealed 1 YWJj"}
    await worker.say("notes", {"notes": [word]})
    assert await live.value("select checkpoint from runs where id = $1", run["run_id"]) == '"sealed 1 YWJj"'
