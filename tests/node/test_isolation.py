"""That nobody without a key gets in, and that no list shows another tenant. `test_matrix` has the routes one by one."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, end_of
from tests.node.test_dispatcher import tenant
from tocsin.node.server import routes, worker_routes

ALL = [(method, path, permission) for method, path, permission, _ in (*routes.ROUTES, *worker_routes.ROUTES)]
NOWHERE = "019a0000-0000-7000-8000-000000000000"


def filled(path: str, **values: str) -> str:
    for name in ("id", "name", "slug", "kind", "verb"):
        path = path.replace(f"{{{name}}}", values.get(name, NOWHERE if name == "id" else "some"))
    return path


async def test_no_route_answers_without_a_key_that_we_know(scene: Scene) -> None:
    good = scene.api.key
    typo = good[:-1] + ("0" if good[-1] != "0" else "1")
    for method, path, _ in ALL:
        reply = await scene.api.http.request(method, filled(path), headers={"authorization": ""}, json={})
        assert reply.status_code == 401, (method, path)
    for header in ("Bearer", f"Bearer {typo}", f"Basic {good}", f"Bearer {good} {good}", "Bearer tcn_" + "é" * 49):
        reply = await scene.api.http.get("/v1/jobs", headers={"authorization": header.encode("utf-8")})
        assert (reply.status_code, reply.headers["content-type"]) == (401, "application/problem+json"), header
    twice = [("authorization", f"Bearer {good}"), ("authorization", f"Bearer {good}")]
    scene.api.http.headers.pop("authorization")
    assert (await scene.api.http.get("/v1/jobs", headers=twice)).status_code == 401
    assert (await scene.api.http.get(f"/v1/jobs?key={good}")).status_code == 400
    assert (await scene.api.http.get("/healthz")).status_code == 200


async def test_a_revoked_or_expired_key_is_refused(scene: Scene) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer", "name": "v"})
    api = Api(scene.node, made["key"])
    await api.get("/v1/jobs")
    await scene.api.delete(f"/v1/keys/{made['id']}")
    scene.node.authenticator._known.clear()  # remembered for a second
    await api.get("/v1/jobs", expect=401)
    other = await scene.api.post("/v1/keys", {"role": "viewer"})
    await scene.sql.execute("update api_keys set expires_at = now() where id = $1", other["id"])
    await Api(scene.node, other["key"]).get("/v1/jobs", expect=401)
    listed = await scene.api.get("/v1/keys")
    assert other["key"] not in str(listed) and not any("hash" in k for k in listed["items"])


async def test_an_admin_makes_no_worker_or_platform_keys_and_acts_for_nobody_else(scene: Scene) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    admin = await scene.api.with_key("admin", "other")
    for role in ("worker", "platform"):
        await admin.post("/v1/keys", {"role": role}, expect=403)
    for slug in ("default", "other", "unknown"):
        await admin.get("/v1/jobs", headers={"tocsin-tenant": slug}, expect=403)
    for slug in ("unknown", "", "A", "a b"):
        await scene.api.get("/v1/jobs", headers={"tocsin-tenant": slug}, expect=404)


@pytest.fixture
async def theirs(scene: Scene) -> dict[str, str]:
    """A job, runs and a key of tenant `default`, in every state that routes look at."""
    worker = str(uuid.uuid4())
    job = await scene.job(name="secret-name", retry={"max_attempts": 1}, tags={"team": "secret"})
    [dead] = await scene.ask(job, args={"secret": 1})
    [key] = await scene.taken(worker)
    await scene.end(worker, end_of(key, "failed", error="SecretError"))
    [ready] = await scene.ask(job)
    made = await scene.api.post("/v1/keys", {"role": "viewer", "name": "secret-key"})
    return {"job": job["id"], "dead": dead, "ready": ready, "key": made["id"]}


async def test_dead_letters_of_others_are_neither_redriven_nor_discarded(scene: Scene, theirs: dict[str, str]) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("admin", "other")
    for verb in ("redrive", "discard"):
        await other.post(f"/v1/dead-letters/{verb}", {"ids": [theirs["dead"]]}, expect=404)
    assert len((await scene.api.get("/v1/dead-letters"))["items"]) == 1


async def test_no_list_shows_another_tenant(scene: Scene, theirs: dict[str, str]) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("admin", "other")
    for path in ("/v1/jobs", "/v1/runs", "/v1/dead-letters", "/v1/jobs?q=secret", "/v1/jobs?tag=team:secret"):
        assert (await other.get(path))["items"] == [], path
    for query in (f"job={theirs['job']}", f"cursor={NOWHERE}", "state=dead", "error_class=SecretError"):
        assert (await other.get(f"/v1/runs?{query}"))["items"] == [], query
    assert "secret" not in str(await other.get("/v1/keys"))
    assert len((await scene.api.get("/v1/runs"))["items"]) == 2


async def test_workers_that_serve_others_alone_are_not_shown(scene: Scene) -> None:
    acme, beta = await tenant(scene, "acme"), await tenant(scene, "beta")
    for name, pool, scopes in (
        ("for all", "default", {}),
        ("for acme", "default", {"tenants": ["acme"]}),
        ("of a pool of acme's", "gpu", {}),
    ):
        made = await scene.api.post("/v1/keys", {"role": "worker"} | ({"scopes": scopes} if scopes else {}))
        await WorkerHand.register(scene.node, made["key"], name=name, pool=pool, functions=["merger.with_gamma"])
    await scene.api.call("PATCH", "/v1/pools/gpu", json={"tenants": ["acme"]})
    listed = {api: (await api.get("/v1/workers"))["items"] for api in (scene.api, acme, beta)}
    everybody = {"for all", "for acme", "of a pool of acme's"}
    assert {w["name"] for w in listed[scene.api]} == {w["name"] for w in listed[acme]} == everybody
    assert {w["name"] for w in listed[beta]} == {"for all"}
    for hidden in (w for w in listed[acme] if w["name"] != "for all"):
        await beta.get(f"/v1/workers/{hidden['id']}", expect=404)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "invalid_limit"),
        ("limit=-1", "invalid_limit"),
        ("limit=1000000000", "invalid_limit"),
        ("limit=²", "invalid_limit"),
        ("cursor=forged", "invalid_cursor"),
        ("sort=name", "unknown_parameter"),
        ("from=yesterday", "invalid_time"),
        ("job=1", "invalid_id"),
        ("tag=nocolon", "invalid_tag"),
    ],
)
async def test_a_list_refuses_what_it_does_not_understand(still_api: Api, query: str, code: str) -> None:
    assert (await still_api.get(f"/v1/runs?{query}", expect=400))["code"] == code


async def test_lists_go_page_by_page_over_live_and_ended_alike(scene: Scene) -> None:
    worker = str(uuid.uuid4())
    job = await scene.job(tags={"a": "b"})
    await scene.ask(job, 12)
    keys = await scene.taken(worker, 6)
    await scene.end(worker, *(end_of(k) for k in keys))
    await scene.ask(job, 5)
    whole = [r["id"] for r in (await scene.api.get("/v1/runs?tag=a:b"))["items"]]
    assert whole == sorted(whole, reverse=True) and len(whole) == 17
    found: list[str] = []
    cursor: Any = ""
    while cursor is not None:
        page = await scene.api.get(f"/v1/runs?limit=4{cursor and f'&cursor={cursor}'}")
        found += [r["id"] for r in page["items"]]
        cursor = page["next_cursor"]
    assert found == whole
    by_state = await scene.api.get("/v1/runs?state=succeeded&outcome=succeeded")
    assert len(by_state["items"]) == 6
    assert len((await scene.api.get(f"/v1/jobs/{job['id']}/runs?worker={worker}"))["items"]) == 6
    names = [await scene.job(name=n, target=PROCESS) for n in ("Alpha", "beta")]
    assert [j["id"] for j in (await scene.api.get("/v1/jobs?q=ALPHA"))["items"]] == [names[0]["id"]]
    assert (await scene.api.get("/v1/jobs?q=%25"))["items"] == [], "no wildcards"
