"""The audit on a whole node: sealed and anchored by its loops, with the address that the socket tells."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests import PATIENCE
from tests.cluster.cluster import until
from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand
from tests.node.test_dispatcher import tenant
from tocsin.flow import seal
from tocsin.node.server.edge import Edge

JOB = {"target": PROCESS, "schedule": {"manual": True}}


async def test_what_a_call_did_is_chained_and_anchored_by_itself(live: Scene) -> None:
    job = await live.job(name="by-itself")

    async def sealed() -> Any:
        return (await live.api.get("/v1/audit", params={"target": f"job:{job['id']}"}))["items"]

    [record] = await until("the record is sealed", sealed)

    async def anchored() -> Any:
        proof = await live.api.get("/v1/audit/verify")
        assert proof["ok"], proof["findings"]
        return proof["anchored_seq"]

    await until("the head is anchored", anchored)
    assert record["action"] == "job.create"


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        ({}, "127.0.0.1"),
        ({"x-forwarded-for": "192.0.2.7"}, "192.0.2.7"),
        ({"x-forwarded-for": "203.0.113.9, 2001:db8::7"}, "2001:db8::7"),  # the first is what the caller said
        ({"x-forwarded-for": "203.0.113.9, 127.0.0.1"}, "203.0.113.9"),  # the last is a proxy of ours
        ({"x-forwarded-for": "=cmd()"}, "127.0.0.1"),
    ],
)
async def test_a_record_has_the_address_of_the_caller(
    scene: Scene, served: str, headers: dict[str, str], address: str
) -> None:
    scene.node.edge = Edge(replace(scene.node.settings, proxies="127.0.0.0/8"))
    async with httpx.AsyncClient(base_url=served, headers={"authorization": f"Bearer {scene.api.key}"}) as client:
        made = await client.post("/v1/jobs", json=JOB, headers=headers)
    assert made.status_code == 201
    await seal.seal(scene.db)
    [record] = (await scene.api.get("/v1/audit", params={"target": f"job:{made.json()['id']}"}))["items"]
    assert record["address"] == address
    assert record["request_id"] == made.headers["x-request-id"]


@pytest.mark.parametrize("name", ["x" * 129, "=1+1", "two words", ""])
async def test_a_name_of_a_call_that_is_none_is_replaced(scene: Scene, name: str) -> None:
    made = await scene.api.http.post("/v1/jobs", json=JOB, headers={"x-request-id": name})
    assert made.headers["x-request-id"] not in ("", name)


async def test_many_callers_and_sealers_make_one_chain(scene: Scene) -> None:
    """Where each writer locked the tail of the chain, six of them forked it 135 times in 300 records."""
    count = 60

    async def say(number: int, api: Api) -> None:
        await api.post("/v1/jobs", JOB | {"name": f"many-{number}"})

    async def keep_sealing() -> None:
        while await scene.value("select count(*) from audit_chain") < await scene.value("select count(*) from audit"):
            await seal.seal(scene.db)

    calling = asyncio.gather(*(say(number, scene.api) for number in range(count)))
    while not calling.done():
        await asyncio.gather(*(seal.seal(scene.db) for _ in range(6)))
    await calling
    async with asyncio.timeout(PATIENCE):
        await keep_sealing()
    proof = await scene.api.get("/v1/audit/verify")
    assert proof["ok"] and proof["records"] == proof["checked"] >= count and proof["unsealed"] == 0


async def test_what_the_platform_does_for_itself_is_not_told_to_the_tenant_it_acts_for(scene: Scene) -> None:
    acme = await tenant(scene, "acme")
    admin = await scene.api.with_key("admin", "acme")
    worker = await WorkerHand.register(scene.node, (await scene.api.post("/v1/keys", {"role": "worker"}))["key"])
    acting = {"headers": {"tocsin-tenant": "acme"}}
    await scene.api.post("/v1/tenants", {"slug": "secret-customer"}, **acting)
    await scene.api.call("PATCH", "/v1/tenants/secret-customer", json={"quotas": {"max_jobs": 7}}, **acting)
    await scene.api.post("/v1/tenants/secret-customer/suspend", {}, **acting)
    await scene.api.call("PATCH", "/v1/pools/default", json={"tenants": ["acme", "secret-customer"]}, **acting)
    await scene.api.post("/v1/pools/default/pause", {}, **acting)
    await scene.api.post(f"/v1/workers/{worker.id}/drain", {}, **acting)
    made = await scene.api.post("/v1/keys", {"role": "worker", "scopes": {"tenants": ["secret-customer"]}}, **acting)
    rotated = await scene.api.post(f"/v1/keys/{made['id']}/rotate", {}, **acting)
    await scene.api.delete(f"/v1/keys/{rotated['id']}", **acting)
    await acme.post("/v1/jobs", {"target": PROCESS, "schedule": {"manual": True}})
    theirs = await scene.api.post("/v1/keys", {"role": "viewer"}, **acting)
    await seal.seal(scene.db)
    told = {(record["action"], record["target"]) for record in (await admin.get("/v1/audit"))["items"]}
    assert {action for action, _ in told} == {"key.create", "job.create"}, told
    assert ("key.create", f"key:{theirs['id']}") in told and ("key.create", f"key:{made['id']}") not in told
    kept = [record["action"] for record in (await scene.api.get("/v1/audit"))["items"]]
    assert {
        "tenant.create", "tenant.update", "tenant.suspend", "pool.update", "pool.pause", "worker.drain", "key.rotate",
        "key.revoke",
    } <= set(kept)  # fmt: skip
