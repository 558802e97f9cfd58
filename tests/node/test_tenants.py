"""Tenants over HTTP: suspended ones start nothing, lose nothing, and go on; erased ones go."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from tests import PATIENCE
from tests.cluster.cluster import until
from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, end_of, keys, told
from tests.node.test_dispatcher import tenant
from tocsin.flow import claim
from tocsin.node.events import Wanted


@pytest.fixture
async def acme(scene: Scene) -> Api:
    """A tenant of its own."""
    return await tenant(scene, "acme")


async def switch(scene: Scene, verb: str) -> None:
    """Suspend or resume, and let the node forget whom it knows: it would by itself within a second."""
    found = await scene.api.post(f"/v1/tenants/acme/{verb}", {"reason": "unpaid"})
    assert (found["suspended_at"] is not None) == (verb == "suspend")
    scene.node.authenticator._known.clear()


async def asked(scene: Scene, api: Api, count: int = 1) -> list[str]:
    job = await scene.job(api)
    made = await api.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}] * count})
    return sorted(made["ids"])


async def test_nothing_of_a_suspended_tenant_is_claimed_until_it_goes_on(scene: Scene, acme: Api) -> None:
    theirs = await asked(scene, acme, 3)
    await switch(scene, "suspend")
    mine = await asked(scene, scene.api, 2)
    # Whatever a dispatcher has heard: the statement itself starts nothing of it.
    assert sorted(row["id"] for row in await scene.take(10)) == mine
    await scene.node.dispatcher._scan()
    assert [r["state"] for r in await scene.rows("select state from runs where id = any($1)", theirs)] == ["ready"] * 3
    await switch(scene, "resume")
    assert sorted(row["id"] for row in await scene.take(10)) == theirs


async def test_neither_does_it_start_ahead_of_its_instant(scene: Scene, acme: Api) -> None:
    job = await scene.job(acme, schedule={"every": "PT1H"})
    await scene.occur(job, -0.9)
    await switch(scene, "suspend")
    worker = await scene.employ("019a0000-0000-7000-8000-000000000001")
    lead = timedelta(seconds=60)
    taken = await claim.take_ahead(scene.db, await scene.shares(10), [worker] * 10, lead)
    assert taken.rows == [] and next(iter(taken.next_due.values())) is not None
    await switch(scene, "resume")
    assert len((await claim.take_ahead(scene.db, await scene.shares(10), [worker] * 10, lead)).rows) == 1


async def test_a_dispatcher_leaves_it_out_and_takes_it_up_again(live: Scene, worker_key: str) -> None:
    acme = await tenant(live, "acme")
    await switch(live, "suspend")
    job = await live.job(live.api, target=PROCESS)
    worker = await WorkerHand.register(live.node, worker_key)
    await live.api.post(f"/v1/jobs/{job['id']}/runs")
    [run] = (await worker.claim(1, wait=30))["runs"]
    await worker.report(finished=[told(run)])
    await switch(live, "resume")
    [theirs] = await asked(live, acme)
    [run] = (await worker.claim(1, last_claim=1, wait=30))["runs"]
    assert run["run_id"] == theirs


async def test_keys_of_a_suspended_tenant_only_read_and_its_attempts_end(scene: Scene, acme: Api) -> None:
    [run_id] = await asked(scene, acme)
    [taken] = await scene.take(1, worker := await scene.employ("019a0000-0000-7000-8000-000000000001"))
    await switch(scene, "suspend")
    for method, path in (("POST", "/v1/jobs"), ("POST", f"/v1/runs/{run_id}/cancel"), ("POST", "/v1/jobs/batch")):
        reply = await acme.http.request(method, path, json={})
        assert (reply.status_code, reply.json()["code"]) == (403, "tenant_suspended")
    assert (await acme.get(f"/v1/runs/{run_id}"))["state"] == "running"
    await scene.end(worker, end_of(taken))
    assert (await acme.get(f"/v1/runs/{run_id}"))["state"] == "succeeded"
    # The platform may act for it: somebody has to look after what it left.
    await scene.job(scene.api)
    await scene.api.post("/v1/jobs", {"target": PROCESS}, headers={"tocsin-tenant": "acme"})


async def test_suspending_twice_is_one_suspension_and_leaves_one_record(scene: Scene, acme: Api) -> None:
    await switch(scene, "suspend")
    since = (await scene.api.get("/v1/tenants/acme"))["suspended_at"]
    await switch(scene, "suspend")
    assert (await scene.api.get("/v1/tenants/acme"))["suspended_at"] == since
    await switch(scene, "resume")
    await switch(scene, "resume")
    records = await scene.rows("select action, detail from audit where target = 'tenant:acme' order by id")
    assert [r["action"] for r in records] == ["tenant.create", "tenant.suspend", "tenant.resume"]
    assert "unpaid" in records[1]["detail"]
    await scene.api.post("/v1/tenants/none/suspend", expect=404)
    await (await scene.api.with_key("admin")).post("/v1/tenants/acme/suspend", expect=403)


async def test_a_node_erases_by_itself_and_tells_workers_to_stop(live: Scene, worker_key: str) -> None:
    acme = await tenant(live, "acme")
    worker = await WorkerHand.register(live.node, worker_key)
    [theirs] = await asked(live, acme)
    answer = await worker.claim(1, wait=30)
    assert [run["run_id"] for run in answer["runs"]] == [theirs]
    await live.api.call("DELETE", "/v1/tenants/acme", json={"confirm": "acme"}, expect=202)

    async def told_to_stop() -> Any:
        return (await worker.report(last_claim=answer["claim_id"], running=keys(answer["runs"])))["stop"]

    assert await until("its worker is told", told_to_stop)
    await worker.report(last_claim=answer["claim_id"], finished=[told(answer["runs"][0], "cancelled")])

    async def emptied() -> Any:
        erasure = (await live.api.get("/v1/tenants/acme"))["erasure"]
        return erasure["state"] == "erasing" and not await live.rows("select from jobs where tenant_id <> 1")

    await until("its rows are gone", emptied)


async def test_a_stream_of_an_erased_tenant_ends_and_others_go_on(live: Scene) -> None:
    """Also one that the platform opened, whose key is as good as before: it would hold the feed open for ever."""
    await tenant(live, "acme")
    key_id = await live.value("select id::text from api_keys where role = 'platform'")
    callers = [(await live.who(slug))._replace(key_id=key_id) for slug in ("default", "acme")]
    own, foreign = (live.node.events.stream(who, Wanted(), None) for who in callers)
    for stream in (own, foreign):
        async with asyncio.timeout(PATIENCE):
            while b"event: open" not in await anext(stream):
                pass
    await live.api.call("DELETE", "/v1/tenants/acme", json={"confirm": "acme"}, expect=202)
    async with asyncio.timeout(PATIENCE):
        assert b"unauthorized" in [word async for word in foreign][-1]
    await live.job(name="goes-on")
    async with asyncio.timeout(PATIENCE):
        while b"goes-on" not in await anext(own):
            pass
    await own.aclose()


async def test_an_admin_says_how_long_the_runs_and_logs_of_its_tenant_are_kept_and_nothing_else(
    scene: Scene, acme: Api
) -> None:
    admin, editor = await scene.api.with_key("admin", "acme"), await scene.api.with_key("editor", "acme")
    path, days = "/v1/tenants/acme", scene.node.settings.runs_days

    async def refused(body: Any) -> str:
        problem = await admin.call("PATCH", path, json=body, expect=403)
        return str(problem["errors"][0]["path"])

    kept = (await admin.call("PATCH", path, json={"retention": {"runs_days": 30, "logs_days": days}}))["retention"]
    assert (kept["runs_days"], kept["logs_days"], kept["audit_days"]) == (30, days, None)
    assert (await admin.call("PATCH", path, json={"retention": {"runs_days": None}}))["retention"]["runs_days"] is None
    for body, term in (
        ({"weight": 5}, "weight"),
        ({"http_allow": ["10.0.0.0/8"]}, "http_allow"),
        ({"quotas": {"max_jobs": None}}, "quotas.max_jobs"),
        ({"retention": {"runs_days": 5, "audit_days": 1}}, "retention.audit_days"),
        ({"retention": {"legal_hold": False}}, "retention.legal_hold"),
        ({"retention": {"hot_days": 2}}, "retention.hot_days"),
        ({"retention": {"preset": "compliance"}}, "retention.preset"),
        ({"retention": {"logs_days": days + 1}}, "retention.logs_days"),
    ):
        assert await refused(body) == term
    await scene.api.call("PATCH", path, json={"retention": {"preset": "compliance"}})
    for value in (1, None):
        assert await refused({"retention": {"runs_days": value}}) == "retention.runs_days", "the platform wants it so"
    await editor.call("PATCH", path, json={"retention": {"runs_days": 1}}, expect=403)
    await admin.call("PATCH", "/v1/tenants/default", json={"retention": {"runs_days": 1}}, expect=404)
    rows = await scene.rows(
        "select actor from audit where action = 'tenant.update'"
        " and tenant_id = (select id from tenants where slug = 'acme')"
    )
    assert len(rows) == 2, "its own changes stand in its own audit"
