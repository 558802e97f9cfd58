"""What could tell one tenant of another although no call shows it: cursors, names that are taken, references, the path
that a refusal takes, metrics; and that no door stands beside the table of routes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import msgspec
import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, end_of
from tests.node import test_matrix as matrix
from tests.node.test_matrix import ALL, MAKES, NOWHERE, PLANNED, House, examples, filled, foreign_calls, houses
from tocsin.model.access import allowed
from tocsin.node.server import app
from tocsin.node.server.operations import OPERATIONS
from tocsin.node.server.routes.table import route

__all__ = ["houses"]
Houses = tuple[House, House]
MANUAL = {"target": PROCESS, "schedule": {"manual": True}}

# What stands open beside the table. A new one must be put here, by somebody who says why.
OPEN = {
    "/healthz": "says that the server lives",
    "/readyz": "says whether it can serve",
    "/metrics": "asks for a platform key itself, of whoever comes from elsewhere than the settings say",
    "/openapi.json": "is the same everywhere",
    "/docs": "is the same everywhere",
    "/": "says that there is no console yet",
    "/v1/payloads/{token}": "its path is a key that was signed for one object and ends",
    "/login": "leads to the issuer",
    "/login/callback": "proves that the issuer sent whoever comes",
    "/logout": "ends the session of whoever calls, if there is one",
    "/logout/everywhere": "asks for the session itself, and ends those of the same person",
}


# ── cursors, names, references ───────────────────────────────────────────────────────────────────────────────────


async def test_a_cursor_of_another_tenant_leads_to_nothing_of_its_own(scene: Scene, houses: Houses) -> None:
    mine, theirs = houses
    lists = [path for (method, path), o in OPERATIONS.items() if method == "GET" and {"limit", "cursor"} <= {*o.query}]
    words = {"/v1/logs/search": "q=line&"}
    tried = 0
    for path in lists:
        own, foreign = [f"{filled(path, house.named_in(path))}?{words.get(path, '')}" for house in houses]
        permission = next(p for method, place, p in ALL if (method, place) == ("GET", path))
        if not allowed("admin", permission):
            continue  # what the platform alone lists is nobody's
        page = await theirs.keys["admin"].get(f"{foreign}limit=1")
        cursors = {page["next_cursor"], theirs.own["job"], theirs.own["run"], theirs.own["job_name"]} - {None}
        known = {item_key(item) for item in (await mine.keys["admin"].get(f"{own}limit=500"))["items"]}
        for cursor in cursors:
            reply = await mine.keys["admin"].http.get(f"{own}cursor={cursor}")
            if reply.status_code == 400:
                assert reply.json()["code"] == "invalid_cursor", path
                continue
            assert reply.status_code == 200, (path, reply.text)
            assert {item_key(item) for item in reply.json()["items"]} <= known, (path, cursor)
            tried += 1
    assert tried > 20


def item_key(item: dict[str, Any]) -> str:
    return str(item.get("id") or item.get("name") or item)


async def test_a_name_that_another_has_is_free(scene: Scene, houses: Houses) -> None:
    mine, theirs = houses
    api = mine.keys["editor"]
    made = await api.post("/v1/jobs", MANUAL | {"name": theirs.own["job_name"]})
    assert made["id"] != theirs.own["job"]
    for method, path in sorted(MAKES - PLANNED):
        taken = "theirs-2" if path == "/v1/jobs/by-name/{name}" else theirs.own[path.split("/")[2].rstrip("s")]
        if path == "/v1/jobs/by-name/{name}":
            await theirs.keys["editor"].post("/v1/jobs", MANUAL | {"name": taken})
        body = {"json": examples()[method, path]}
        replies = [await api.http.request(method, filled(path, name), **body) for name in (taken, "unheard-of")]
        assert replies[0].status_code == replies[1].status_code, (path, replies[0].text)
    key = {"headers": {"idempotency-key": "one"}}
    first = await theirs.keys["editor"].post("/v1/jobs", MANUAL, **key)
    assert (await api.post("/v1/jobs", MANUAL | {"priority": 1}, **key))["id"] != first["id"]


async def test_what_another_has_cannot_be_referred_to(scene: Scene, houses: Houses) -> None:
    mine, theirs = houses
    api = mine.keys["editor"]
    cron = {"cron": "0 * * * *"}
    for told in (
        {"depends_on": [{"job": "NAMED"}]},
        {"schedule": cron | {"calendar": "NAMED"}},
        {"secrets": {"TOKEN": "NAMED"}},
    ):
        ids = [theirs.own["job"], NOWHERE] if "depends_on" in told else []
        for pair in (["theirs-only", "nobody-only"], ids):
            replies = [
                await api.http.post("/v1/jobs", content=encoded(MANUAL | {"schedule": cron} | told, name))
                for name in pair
            ]
            texts = {reply.text.replace(name, "NAMED") for reply, name in zip(replies, pair, strict=True)}
            assert not pair or (len(texts) == 1 and replies[0].status_code in (404, 422)), texts
    dead = await dead_letter(scene, theirs.keys["editor"])
    for verb in ("redrive", "discard"):
        replies = [await api.http.post(f"/v1/dead-letters/{verb}", json={"ids": [i]}) for i in (dead, NOWHERE)]
        assert replies[0].status_code == 404
        assert replies[0].text.replace(dead, NOWHERE) == replies[1].text
    assert [letter["id"] for letter in (await theirs.keys["viewer"].get("/v1/dead-letters"))["items"]] == [dead]
    for query in ("runs?job=", "dead-letters?job=", "backfills?job=", "logs/search?q=x&run=", "logs/search?q=x&job="):
        which = theirs.own["run" if query.endswith("run=") else "job"]
        replies = [await api.http.get(f"/v1/{query}{i}") for i in (which, NOWHERE)]
        assert replies[0].status_code == replies[1].status_code and replies[0].content == replies[1].content, query


async def dead_letter(scene: Scene, api: Api) -> str:
    job = await scene.job(api, retry={"max_attempts": 1})
    run = await api.post(f"/v1/jobs/{job['id']}/runs")
    worker = await scene.employ(str(uuid.uuid4()))
    for taken in await scene.take(10, worker):
        await scene.end(worker, end_of(taken, "failed", error="SecretError"))
    return str(run["id"])


def encoded(spec: dict[str, Any], name: str) -> bytes:
    return msgspec.json.encode(spec).replace(b"NAMED", name.encode())


# ── the path that a refusal takes ────────────────────────────────────────────────────────────────────────────────


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the database is asked meanwhile."""
    asked: list[str] = []
    execute = asyncpg.Connection._execute

    async def noticed(self: Any, query: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(query)
        return await execute(self, query, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(asyncpg.Connection, "_execute", noticed)
        yield asked


async def test_a_foreign_id_is_looked_for_as_one_that_nobody_has(
    scene: Scene, houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same statements in the same order, so that no clock tells them apart."""
    mine, theirs = houses
    bodies, compared = examples(), 0
    for method, path, permission, owner in foreign_calls():
        if owner in ("tenant", "hand") or not allowed("admin", permission):
            continue
        api = mine.keys["admin"]
        wanted = {"json": {} if owner == "key" else bodies.get((method, path), {})}
        nothing = NOWHERE if "{id}" in path else "nobody-only"
        await api.get("/v1/jobs")  # so that the key is known in both
        paths: list[list[str]] = []
        for value in (theirs.own[owner], nothing):
            with statements(monkeypatch) as asked:
                assert (await api.http.request(method, filled(path, value), **wanted)).status_code == 404, (
                    method,
                    path,
                )
            paths.append([query for query in asked if "from api_keys" not in query])
        assert paths[0] == paths[1], (method, path)
        compared += bool(paths[0])
    assert compared >= 30


# ── open doors ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_open_to_all_names_nobody(scene: Scene, houses: Houses) -> None:
    mine, theirs = houses
    await mine.keys["viewer"].get(f"/v1/jobs/{theirs.own['job']}", expect=404)
    await scene.node.pools.measure({})
    names = [*{*mine.own.values(), *theirs.own.values()} - {NOWHERE}, "theirs", "SecretError"]
    for path in ("/healthz", "/readyz"):
        told = (await scene.api.http.get(path, headers={"authorization": ""})).text
        assert not [name for name in names if name in told], path


def test_nothing_is_served_that_is_neither_in_the_table_nor_open_on_purpose(
    still_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: set[tuple[str, str]] = set()
    add = app.Places.add

    def noticed(self: app.Places, method: str, path: str, serve: Any) -> None:
        served.add((method, path))
        add(self, method, path, serve)

    monkeypatch.setattr(app.Places, "add", noticed)
    app.build(still_node)
    assert served - {(method, path) for method, path, _ in ALL} == {
        ("POST" if path.startswith("/logout") else "GET", path) for path in OPEN
    }


@pytest.mark.parametrize("permission", ["", "everything", "viewer", "JOBS.READ"])
def test_a_route_without_a_rule_is_none(permission: str) -> None:
    with pytest.raises(ValueError, match="has no permission"):
        route("GET", "/v1/new", permission)


async def test_a_new_route_is_held_to_its_rule_and_closed_to_keys_with_a_scope(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever adds a route gets the rule with it; the matrix asks what its parameter names."""

    async def new(call: Any) -> Any:
        raise AssertionError("nobody may come here")

    table = [*app.routes.ROUTES, ("POST", "/v1/new/{id}", "keys.manage", new)]
    monkeypatch.setattr(app.routes, "ROUTES", table)
    path = f"/v1/new/{NOWHERE}"
    for role in ("viewer", "operator", "editor", "worker"):
        assert (await (await scene.api.with_key(role)).post(path, expect=403))["code"] == "forbidden"
    await Api(scene.node, "").post(path, expect=401)
    with pytest.raises(AssertionError, match="say in OWNED"):
        matrix.owner_of("/v1/new/{id}")
    monkeypatch.setattr(app.routes, "ROUTES", [("POST", "/v1/new/{id}", "jobs.write", new)])
    made = await scene.api.post("/v1/keys", {"role": "editor", "scopes": {"jobs": ["*"]}})
    assert (await Api(scene.node, made["key"]).post(path, expect=403))["code"] == "out_of_scope"
