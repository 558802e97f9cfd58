"""Quotas: who is over one is told so, with a reason and when to come back, and nothing else stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand, end_of
from tests.flow.test_logs import chunk, texts
from tests.node.test_dispatcher import tenant
from tocsin.node.server import http
from tocsin.telemetry import QUOTA_REFUSED

JOB = {"target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}}


@pytest.fixture
async def acme(scene: Scene) -> Api:
    """A tenant of its own."""
    return await tenant(scene, "acme")


async def bind(scene: Scene, **quotas: Any) -> Any:
    """Set quotas, and let the node forget whom it knows: it would by itself within a second."""
    found = await scene.api.call("PATCH", "/v1/tenants/acme", json={"quotas": quotas})
    scene.node.authenticator._known.clear()
    scene.node.allowances._used.clear()
    return found


async def refused(api: Api, path: str, body: Any, **kwargs: Any) -> tuple[int, str, int]:
    reply = await api.http.post(path, json=body, **kwargs)
    return reply.status_code, reply.json().get("code"), int(reply.headers.get("retry-after", 0))


async def test_quotas_are_set_shown_and_taken_away(scene: Scene, acme: Api) -> None:
    found = await bind(scene, max_jobs=5, submit_rate="100/min")
    assert found["quotas"] == {
        "max_jobs": 5,
        "max_queued": None,
        "max_running": None,
        "submit_rate": "100/min",
        "log_bytes_per_day": None,
    }
    job = await scene.job(acme)
    await acme.post(f"/v1/jobs/{job['id']}/runs")
    shown = await acme.get("/v1/tenants/acme")
    assert shown["usage"] == {"jobs": 1, "queued": 1, "running": 0, "log_bytes_today": 0}
    await acme.get("/v1/tenants/default", expect=404)
    again = await bind(scene, max_jobs=None)
    assert again["quotas"]["max_jobs"] is None and again["quotas"]["submit_rate"] == "100/min"
    for wrong in ({"max_jobs": -1}, {"submit_rate": "often"}, {"color": 1}, {"max_jobs": True}):
        await scene.api.call("PATCH", "/v1/tenants/acme", json={"quotas": wrong}, expect=422)
    await scene.api.call("PATCH", "/v1/tenants/none", json={"weight": 2}, expect=404)
    made = await scene.api.post("/v1/tenants", {"slug": "bound", "quotas": {"max_queued": 7}})
    assert made["quotas"]["max_queued"] == 7
    actions = await scene.rows("select action from audit where target = 'tenant:acme' order by id")
    assert [r["action"] for r in actions] == ["tenant.create", "tenant.update", "tenant.update"]


async def test_no_more_open_jobs_than_max_jobs(scene: Scene, acme: Api) -> None:
    await bind(scene, max_jobs=2)
    counted = QUOTA_REFUSED.labels("quota_max_jobs")._value.get()
    headers = {"idempotency-key": "second"}
    await acme.post("/v1/jobs", JOB)
    second = await acme.post("/v1/jobs", JOB, headers=headers)
    assert (await refused(acme, "/v1/jobs", JOB))[:2] == (403, "quota_max_jobs")
    assert (await refused(acme, "/v1/jobs/batch", {"jobs": [JOB]}))[:2] == (403, "quota_max_jobs")
    assert QUOTA_REFUSED.labels("quota_max_jobs")._value.get() == counted + 2
    assert (await acme.post("/v1/jobs", JOB, headers=headers))["id"] == second["id"], "a repeat is answered"
    await scene.job()
    await acme.delete(f"/v1/jobs/{second['id']}")
    scene.node.allowances._used.clear()  # a second later
    await acme.post("/v1/jobs", JOB)


async def test_no_more_waiting_runs_than_max_queued(scene: Scene, acme: Api) -> None:
    job = await scene.job(acme)
    await bind(scene, max_queued=3)
    path = f"/v1/jobs/{job['id']}/runs"
    assert (await refused(acme, f"{path}/batch", {"runs": [{}] * 4}))[:2] == (429, "quota_max_queued")
    await acme.post(f"{path}/batch", {"runs": [{}] * 3})
    status, code, later = await refused(acme, path, {})
    assert (status, code) == (429, "quota_max_queued") and later >= 1
    assert (await refused(acme, "/v1/jobs", {"target": JOB["target"]}))[:2] == (429, "quota_max_queued")
    await acme.post("/v1/jobs", JOB)  # it makes no run
    await scene.take(2)
    scene.node.allowances._used.clear()  # a second later
    await acme.post(f"{path}/batch", {"runs": [{}] * 2})


async def die(scene: Scene, api: Api, count: int) -> None:
    """Runs of a tenant that end as dead letters."""
    job = await scene.job(api, retry={"max_attempts": 1})
    await api.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}] * count})
    worker = await scene.employ("019a0000-0000-7000-8000-000000000009")
    await scene.end(worker, *(end_of(row, "failed", error="X") for row in await scene.take(count, worker)))


async def test_a_redrive_of_all_that_match_takes_as_many_as_there_is_room_for(scene: Scene, acme: Api) -> None:
    await die(scene, acme, 8)
    await bind(scene, max_queued=5)
    path, everything = "/v1/dead-letters/redrive", {"filter": {}}
    done = await acme.post(path, everything, headers={"idempotency-key": "once"})
    assert (len(done["items"]), done["remaining"]) == (5, 3)
    assert (await refused(acme, path, everything))[:2] == (429, "quota_max_queued")
    again = await acme.post(path, everything, headers={"idempotency-key": "once"})
    assert again["items"] == done["items"], "a repeat is answered"
    await scene.take(4)
    scene.node.allowances._used.clear()  # a second later
    rest = await acme.post(path, everything)
    assert (len(rest["items"]), rest["remaining"]) == (3, 0)
    await acme.post(path, everything)
    job = await scene.job(acme)
    await acme.post(f"/v1/jobs/{job['id']}/runs")  # what was granted and not used is there again


async def test_a_redrive_counts_as_what_it_made_by_the_rate(scene: Scene, acme: Api) -> None:
    await die(scene, acme, 6)
    await bind(scene, submit_rate="1/min")
    assert len((await acme.post("/v1/dead-letters/redrive", {"filter": {}}))["items"]) == 6
    _, code, later = await refused(acme, "/v1/jobs", JOB)
    assert code == "quota_submit_rate" and later > 300, "each of the six"


async def test_a_run_of_a_workflow_counts_with_its_nodes(scene: Scene, acme: Api) -> None:
    node = {"target": JOB["target"], "retry": {"max_attempts": 1}}
    small, large = [
        await acme.post("/v1/workflows", {"name": f"w{count}", "jobs": {f"n{n}": node for n in range(count)}})
        for count in (2, 5)
    ]
    await bind(scene, max_queued=5)
    for path in (f"/v1/workflows/{large['id']}/runs", f"/v1/jobs/{large['id']}/runs"):
        assert (await refused(acme, path, {}))[:2] == (429, "quota_max_queued")
    first = await acme.post(f"/v1/workflows/{small['id']}/runs")
    assert (await refused(acme, f"/v1/workflows/{small['id']}/runs", {}))[:2] == (429, "quota_max_queued"), "3 and 3"
    await acme.post(f"/v1/workflow-runs/{first['id']}/cancel")
    scene.node.allowances._used.clear()  # a second later
    job = await scene.job(acme)
    await acme.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}] * 3})
    for path in (f"/v1/workflow-runs/{first['id']}/retry", f"/v1/runs/{first['head_run_id']}/retry"):
        assert (await refused(acme, path, {}))[:2] == (429, "quota_max_queued"), path


async def test_counts_are_read_once_a_second_at_most(scene: Scene, acme: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await bind(scene, max_jobs=1000)
    asked: list[str] = []
    fetchrow = scene.db.fetchrow

    async def noted(pool: str, statement: str, *args: Any) -> Any:
        asked.append(statement)
        return await fetchrow(pool, statement, *args)

    monkeypatch.setattr(scene.db, "fetchrow", noted)
    for _ in range(5):
        await acme.post("/v1/jobs", JOB)
    assert sum("limit $3" in statement for statement in asked) == 1


async def test_submissions_keep_to_their_rate(scene: Scene, acme: Api) -> None:
    await bind(scene, submit_rate="2/min")
    await acme.post("/v1/jobs", JOB)
    status, code, later = await refused(acme, "/v1/jobs", JOB)
    assert (status, code) == (429, "quota_submit_rate") and 25 <= later <= 30
    await scene.job()


async def test_a_flood_of_refused_calls_asks_the_database_nothing(
    scene: Scene, acme: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bind(scene, submit_rate="1/min")
    first = {"headers": {"idempotency-key": "first"}}
    made = await acme.post("/v1/jobs", JOB, **first)
    assert (await acme.post("/v1/jobs", JOB, **first))["id"] == made["id"], "what passed once may be repeated"
    asked: list[str] = []
    fetch = scene.db.fetch

    async def noted(pool: str, statement: str, *args: Any) -> Any:
        asked.append(statement)
        return await fetch(pool, statement, *args)

    monkeypatch.setattr(scene.db, "fetch", noted)
    for number in range(5):
        await acme.post("/v1/jobs", JOB, headers={"idempotency-key": f"new {number}"}, expect=429)
    assert not [statement for statement in asked if "from idempotency" in statement]


async def test_who_comes_too_often_waits_for_his_answer_and_nobody_else_does(
    scene: Scene, acme: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bind(scene, submit_rate="1/min")
    await acme.post("/v1/jobs", JOB)
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    began = asyncio.Event()

    async def hold(_seconds: float) -> None:
        began.set()
        await held

    monkeypatch.setattr(http, "asyncio", SimpleNamespace(sleep=hold, CancelledError=asyncio.CancelledError))
    hasty = asyncio.create_task(acme.post("/v1/jobs", JOB, expect=429))
    await began.wait()
    await scene.job()
    await acme.get("/v1/jobs")
    assert not hasty.done()
    held.set_result(None)
    assert (await hasty)["code"] == "quota_submit_rate"


async def test_logs_beyond_the_quota_are_cut_and_say_so_and_the_run_goes_on(
    scene: Scene, acme: Api, worker_key: str
) -> None:
    await bind(scene, log_bytes_per_day=10)
    job = await scene.job(acme)
    await acme.post(f"/v1/jobs/{job['id']}/runs")
    worker = await WorkerHand.register(scene.node, worker_key)
    [key] = await scene.taken(worker.id)
    run = {"run_id": key[0], "attempt": key[1], "fence": key[2]}
    await worker.ship(chunk(run, 0, "12345", "123"))
    await worker.ship(chunk(run, 2, "1", "123", "1"), chunk(run, 5, "12"))
    await worker.ship(chunk(run, 6, "x"))
    mine = Scene(acme, scene.sql)
    said = await texts(mine, run)
    cut = "{} lines left out: log_bytes_per_day is used up"
    assert said == ["12345", "123", "1", cut.format(3), cut.format(1)]
    page = await acme.get(f"/v1/runs/{run['run_id']}/logs?after=3")
    assert [line["seq"] for line in page["items"]] == [4, 7]
    assert (await acme.get("/v1/tenants/acme"))["usage"]["log_bytes_today"] >= 9
    await scene.sql.execute("update log_usage set day = day - 1")
    await worker.ship(chunk(run, 7, "new day"))
    assert (await texts(mine, run))[-1] == "new day"
