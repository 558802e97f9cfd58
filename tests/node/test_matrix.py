"""The matrix: every route × every role × own and foreign ids, held to the table in model/access.

A route whose path has a parameter must say below what that names, so that a foreign one of it can be tried.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, end_of
from tocsin.model.access import PERMISSIONS, ROLES, allowed
from tocsin.node.server import routes, worker_routes
from tocsin.node.server.edge import Edge
from tocsin.node.server.openapi import _EXAMPLES
from tocsin.node.server.operations import OPERATIONS

TABLE = [*routes.ROUTES, *worker_routes.ROUTES]
ALL = [(method, path, permission) for method, path, permission, _ in TABLE]
PLANNED = {(method, path) for method, path, _, handler in TABLE if handler.__name__ == "not_yet"}
NOWHERE = "019a0000-0000-7000-8000-000000000000"

# What the parameter of a path names. `shared`: what is everybody's, so that there is no foreign one.
OWNED = {
    "/v1/jobs/by-name/{name}": "job_name",
    "/v1/jobs/{id}": "job",
    "/v1/runs/{id}": "run",
    "/v1/calendars/{name}": "calendar",
    "/v1/secrets/{name}": "secret",
    "/v1/circuits/{name}": "circuit",
    "/v1/keys/{id}": "key",
    "/v1/tenants/{slug}": "tenant",
    "/v1/worker/{id}": "hand",
    "/v1/workers/{id}": "shared",
    "/v1/pools/{name}": "pool",
    "/v1/backfills/{id}": "backfill",
    "/v1/channels/{name}": "channel",
    "/v1/workflows/by-name/{name}": "workflow_name",
    "/v1/workflows/{id}": "workflow",
    "/v1/workflow-runs/{id}": "workflow_run",
}
# Whoever sends these makes something of its own under the name, whoever else has one.
MAKES = {("PUT", "/v1/calendars/{name}"), ("PUT", "/v1/secrets/{name}"), ("PUT", "/v1/circuits/{name}")} | {
    ("PUT", "/v1/jobs/by-name/{name}"),
    ("PUT", "/v1/workflows/by-name/{name}"),
}


def owner_of(path: str) -> str | None:
    """What the path's parameter names; None if it has none."""
    if "{" not in path:
        return None
    beginnings = [b for b in OWNED if path == b or path.startswith(b + "/")]
    assert beginnings, f"{path}: say in OWNED what its parameter names"
    return OWNED[max(beginnings, key=len)]


def filled(path: str, value: str) -> str:
    head, _, rest = path.partition("{")
    return head + value + rest.partition("}")[2] if rest else path


def examples() -> dict[tuple[str, str], Any]:
    """A body that fits, for each route that wants one."""
    return {key: _EXAMPLES[operation.body] for key, operation in OPERATIONS.items() if operation.body is not None}


def test_every_route_has_a_rule_and_says_what_it_is_about() -> None:
    assert len(ALL) == len({(method, path) for method, path, _ in ALL}) > 60
    assert {permission for _, _, permission in ALL} == set(PERMISSIONS)
    for _, path, _ in ALL:
        owner_of(path)


class House:
    """One tenant with one of each, and a key of every role."""

    def __init__(self, slug: str) -> None:
        self.slug = slug
        self.keys: dict[str, Api] = {}
        self.own: dict[str, str] = {"tenant": slug, "shared": NOWHERE}

    def named_in(self, path: str) -> str:
        """What of its own it may put into the path; of what is not built yet there is nothing."""
        owner = owner_of(path) or "shared"
        built = any(place == path and (method, place) not in PLANNED for method, place, _ in ALL)
        return self.own[owner] if built else NOWHERE

    async def build(self, scene: Scene, worker_key: str) -> House:
        platform = {"headers": {"tocsin-tenant": self.slug}}
        await scene.api.post("/v1/tenants", {"slug": self.slug})
        for role in ROLES:
            self.keys[role] = await scene.api.with_key(role, self.slug if role != "platform" else "default")
        job = {
            "target": PROCESS,
            "schedule": {"manual": True},
            "tags": {"team": self.slug},
            "circuit": f"{self.slug}-c",
        }
        self.own["job_name"] = self.own["calendar"] = self.own["secret"] = f"{self.slug}-only"
        self.own["circuit"] = f"{self.slug}-c"
        self.own["job"] = (await scene.api.post("/v1/jobs", job | {"name": self.own["job_name"]}, **platform))["id"]
        self.own["run"] = (await scene.api.post(f"/v1/jobs/{self.own['job']}/runs", **platform))["id"]
        worker = await scene.employ(str(uuid.uuid4()))
        [taken] = await scene.take(1, worker)
        await scene.end(worker, end_of(taken, "failed", error="SecretError"))
        days = {"mode": "skip", "days": ["2031-01-01"]}
        await scene.api.call("PUT", f"/v1/calendars/{self.own['calendar']}", json=days, **platform)
        await scene.sql.execute(
            "insert into secrets (tenant_id, name, id, key_id, wrapped, sealed)"
            " select id, $2, gen_random_uuid(), 'none', '', '' from tenants where slug = $1",
            self.slug,
            self.own["secret"],
        )
        self.own["workflow_name"] = f"{self.slug}-flow"
        flow = {"name": self.own["workflow_name"], "jobs": {"a": {"target": PROCESS}}}
        self.own["workflow"] = (await scene.api.post("/v1/workflows", flow, **platform))["id"]
        made = await scene.api.post(f"/v1/workflows/{self.own['workflow']}/runs", **platform)
        self.own["workflow_run"] = made["id"]
        hourly = await scene.api.post("/v1/jobs", job | {"schedule": {"cron": "0 * * * *"}}, **platform)
        if ("POST", "/v1/jobs/{id}/backfill") not in PLANNED:
            past = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T05:00:00Z"}
            self.own["backfill"] = (await scene.api.post(f"/v1/jobs/{hourly['id']}/backfill", past, **platform))["id"]
        self.own["key"] = (await scene.api.post("/v1/keys", {"role": "viewer"}, **platform))["id"]
        self.own["pool"] = f"{self.slug}-pool"
        self.own["hand"] = (await WorkerHand.register(scene.node, worker_key, pool=self.own["pool"])).id
        await scene.api.call("PATCH", f"/v1/pools/{self.own['pool']}", json={"tenants": [self.slug]})
        return self


@pytest.fixture
async def houses(scene: Scene, worker_key: str) -> tuple[House, House]:
    return await House("mine").build(scene, worker_key), await House("theirs").build(scene, worker_key)


async def belongings(scene: Scene, slug: str) -> dict[str, list[str]]:
    """All rows that a tenant has, in every table."""
    tables = await scene.rows(
        "select c.relname from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant_id'"
        " where c.relnamespace = 'tocsin'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition"
    )
    tenant = await scene.value("select id from tenants where slug = $1", slug)
    found = {}
    for (table,) in tables:
        rows = await scene.rows(f"select t::text from {table} t where tenant_id = $1 order by 1", tenant)
        found[table] = [row[0] for row in rows]
    return found


async def test_every_role_meets_every_route_as_the_table_says(scene: Scene, houses: tuple[House, House]) -> None:
    mine, _ = houses
    for method, path, permission in ALL:
        own = filled(path, mine.named_in(path))
        for role, api in mine.keys.items():
            # Nothing is to come of it: this is no body of any route.
            reply = await api.http.request(method, own, content=b"[]")
            if allowed(role, permission):
                assert reply.status_code not in (401, 403) and reply.status_code < 500, (method, path, role, reply.text)
            else:
                assert (reply.status_code, reply.json()["code"]) == (403, "forbidden"), (method, path, role)


def foreign_calls() -> Iterator[tuple[str, str, str, str]]:
    for method, path, permission in ALL:
        owner = owner_of(path)
        if owner not in (None, "shared") and (method, path) not in MAKES | PLANNED:
            yield method, path, permission, str(owner)


async def test_a_foreign_id_does_not_exist_on_any_route_for_any_role(scene: Scene, houses: tuple[House, House]) -> None:
    mine, theirs = houses
    bodies, before = examples(), await belongings(scene, "theirs")
    tried = set()
    for method, path, permission, owner in foreign_calls():
        for role, api in mine.keys.items():
            if not allowed(role, permission) or (owner in ("tenant", "pool") and role == "platform"):
                continue
            # The platform is held to the tenant that it acts for.
            acting = {"tocsin-tenant": "mine"} if role == "platform" else {}
            wanted = {"json": bodies[method, path]} if (method, path) in bodies else {}
            if owner == "key" and method == "POST":
                wanted = {"json": {}}
            found = await api.http.request(method, filled(path, theirs.own[owner]), headers=acting, **wanted)
            nothing = NOWHERE if "{id}" in path else theirs.own[owner].replace("theirs", "nobody")
            nobody = await api.http.request(method, filled(path, nothing), headers=acting, **wanted)
            assert found.status_code == 404, (method, path, role, found.text)
            assert found.text.replace("theirs", "nobody") == nobody.text, "as if it did not exist"
            tried.add((method, path))
    assert len(tried) >= 35
    assert await belongings(scene, "theirs") == before


async def test_a_run_token_opens_its_own_run_alone(scene: Scene, houses: tuple[House, House]) -> None:
    mine, theirs = houses
    tenant = await scene.value("select id from tenants where slug = 'mine'")
    token = scene.node.gateway.tokens.make(tenant, mine.own["run"], 1)
    scene.node.edge = Edge(replace(scene.node.settings, auth_failures_per_address=0))
    api = Api(scene.node, token)
    for method, path, permission in ALL:
        own = filled(path, mine.named_in(path))
        reply = await api.http.request(method, own, content=b"[]")
        if PERMISSIONS[permission] == "run":
            assert reply.status_code not in (401, 403), reply.text
        else:
            # A token is known at its run alone; and there it may do these things.
            assert reply.status_code == (403 if "/v1/runs/{id}" in path else 401), (method, path, reply.text)
    await api.post(f"/v1/runs/{theirs.own['run']}/complete", expect=401)
