"""Keys with a scope: a job that is not in it does not exist, in no route, list, search or stream."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, end_of, told
from tests.flow.test_logs import chunk
from tocsin.flow import keys
from tocsin.model.access import PERMISSIONS, Scope, kept_by
from tocsin.node.events import Wanted
from tocsin.node.server import routes
from tocsin.store.db import kept_to

MANUAL = {"target": PROCESS, "schedule": {"manual": True}}


async def key_for(scene: Scene, role: str = "editor", **scopes: Any) -> Api:
    made = await scene.api.post("/v1/keys", {"role": role, "scopes": scopes})
    assert made["scopes"] == scopes
    return Api(scene.node, made["key"])


class Case:
    """Two jobs with an ended, a dead and a ready run each: one of the key's scope, one beyond it."""

    def __init__(self) -> None:
        self.job: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, list[str]] = {}


@pytest.fixture
async def case(scene: Scene) -> Case:
    case = Case()
    for side, name, team in (("inside", "billing-nightly", "billing"), ("beyond", "payroll", "hr")):
        job = await scene.job(name=name, tags={"team": team}, retry={"max_attempts": 1})
        worker = str(uuid.uuid4())
        made = await scene.ask(job, 2)
        first, second = await scene.taken(worker, 2)
        await scene.end(worker, end_of(first), end_of(second, "failed", error="Oops"))
        case.job[side], case.runs[side] = job, sorted([*made, *await scene.ask(job)], reverse=True)
    return case


@pytest.mark.parametrize(
    "scopes", [{"jobs": ["billing-*"]}, {"tags": ["team:billing"]}, {"jobs": ["x"], "tags": ["team:billing"]}]
)
async def test_lists_show_what_is_in_scope_alone(scene: Scene, case: Case, scopes: dict[str, Any]) -> None:
    api = await key_for(scene, "viewer", **scopes)
    mine = case.runs["inside"]
    assert [job["id"] for job in (await api.get("/v1/jobs"))["items"]] == [case.job["inside"]["id"]]
    assert [run["id"] for run in (await api.get("/v1/runs"))["items"]] == mine
    # In the query, not after it: a page has as many as it may.
    assert [run["id"] for run in (await api.get("/v1/runs?limit=3"))["items"]] == mine
    assert {x["job_id"] for x in (await api.get("/v1/dead-letters"))["items"]} == {case.job["inside"]["id"]}
    beyond = case.job["beyond"]["id"]
    assert (await api.get(f"/v1/runs?job={beyond}"))["items"] == []
    assert (await api.get("/v1/jobs?q=payroll"))["items"] == []
    await api.get("/v1/jobs/by-name/payroll", expect=404)
    assert (await api.get("/v1/jobs/by-name/billing-nightly"))["id"] == case.job["inside"]["id"]


BODIES = {"runs/batch": {"runs": [{}]}, "backfill": {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}}


async def test_ids_beyond_it_do_not_exist_on_any_route(scene: Scene, case: Case) -> None:
    api = await key_for(scene, "editor", jobs=["billing-*"])
    before = await scene.rows("select * from runs order by id"), await scene.rows("select * from jobs order by id")
    nowhere, tried = "019a0000-0000-7000-8000-000000000000", 0
    for method, path, permission, _ in routes.ROUTES:
        kept = kept_by(path)
        if kept not in ("job", "run") or PERMISSIONS[permission] == "run":
            continue
        body = BODIES.get(path.partition("{id}/")[2], {})
        for id_ in [case.job["beyond"]["id"]] if kept == "job" else case.runs["beyond"]:
            found = await api.http.request(method, path.replace("{id}", id_), json=body)
            nobody = await api.http.request(method, path.replace("{id}", nowhere), json=body)
            assert (found.status_code, found.content) == (404, nobody.content), (method, path, found.text)
            tried += 1
    assert tried > 30
    ids = case.runs["beyond"]
    for verb in ("redrive", "discard"):
        await api.post(f"/v1/dead-letters/{verb}", {"ids": ids}, expect=404)
        done = await api.post(f"/v1/dead-letters/{verb}", {"filter": {"job": case.job["beyond"]["id"]}})
        assert not done.get("items") and not done.get("discarded")
    after = await scene.rows("select * from runs order by id"), await scene.rows("select * from jobs order by id")
    assert after == before


async def test_what_is_in_scope_works_as_ever(scene: Scene, case: Case) -> None:
    api = await key_for(scene, "editor", jobs=["billing-*"])
    job, [ready, *ended] = case.job["inside"]["id"], case.runs["inside"]
    await api.call("PATCH", f"/v1/jobs/{job}", json={"priority": 600})
    await api.post(f"/v1/jobs/{job}/pause")
    await api.post(f"/v1/jobs/{job}/resume")
    await api.post(f"/v1/jobs/{job}/runs")
    await api.post(f"/v1/runs/{ready}/cancel")
    await api.post(f"/v1/runs/{ended[0]}/retry")
    for what in ("", "/attempts", "/explain", "/logs"):
        await api.get(f"/v1/runs/{ended[0]}{what}")
    assert len((await api.post("/v1/dead-letters/redrive", {"filter": {}}))["items"]) == 1
    await api.get(f"/v1/jobs/{job}/versions")
    await api.delete(f"/v1/jobs/{job}")


async def test_no_job_is_made_beyond_it_nor_led_out_of_it(scene: Scene, case: Case) -> None:
    api = await key_for(scene, "editor", jobs=["billing-*"], tags=["team:billing"])

    async def refused(method: str, path: str, body: Any) -> None:
        assert (await api.call(method, path, json=body, expect=403))["code"] == "out_of_scope"

    await refused("POST", "/v1/jobs", MANUAL)
    await refused("POST", "/v1/jobs", MANUAL | {"name": "payroll-2"})
    await refused("PUT", "/v1/jobs/by-name/payroll", MANUAL)
    batch = await api.post("/v1/jobs/batch", {"jobs": [MANUAL | {"name": "billing-2"}, MANUAL]}, expect=422)
    assert batch["code"] == "out_of_scope" and "jobs[1]" in batch["detail"]
    await api.post("/v1/jobs", MANUAL | {"tags": {"team": "billing"}})
    await api.call("PUT", "/v1/jobs/by-name/billing-3", json=MANUAL, expect=201)
    inside = case.job["inside"]["id"]
    await refused("PATCH", f"/v1/jobs/{inside}", {"name": "payroll-3", "tags": {"team": None}})
    await api.call("PATCH", f"/v1/jobs/{inside}", json={"tags": {"team": None}})  # its name still fits
    # A name beyond the scope stays its owner's, also where a tag would let the new one pass.
    await refused("PUT", "/v1/jobs/by-name/payroll", MANUAL | {"tags": {"team": "billing"}})
    assert (await scene.api.get(f"/v1/jobs/{case.job['beyond']['id']}"))["version"] == 1


@pytest.mark.parametrize("scopes", [{"tags": ["team:billing"]}, {"jobs": ["bill*"], "tags": ["team:billing"]}])
async def test_a_key_cannot_find_out_which_names_outside_its_scope_are_taken(
    scene: Scene, case: Case, scopes: dict[str, Any]
) -> None:
    """Names are unique in a tenant: each call that gives a name gets the same answer, whether the name is taken outside
    of the scope or free."""
    api = await key_for(scene, "editor", **scopes)
    tagged, flow = MANUAL | {"tags": {"team": "billing"}}, {"jobs": {"a": {"target": PROCESS}}}
    flow["tags"] = {"team": "billing"}
    inside = case.job["inside"]["id"]
    await scene.job(name="pay.a")

    async def answers(name: str) -> list[tuple[int, str]]:
        calls = [
            ("POST", "/v1/jobs", tagged | {"name": name}, {}),
            ("POST", "/v1/jobs/batch", {"jobs": [tagged | {"name": name}]}, {}),
            ("PUT", f"/v1/jobs/by-name/{name}", tagged, {}),
            ("PUT", f"/v1/jobs/by-name/{name}", tagged, {"if-none-match": "*"}),
            ("PUT", f"/v1/jobs/by-name/{name}", tagged, {"if-match": '"1"'}),
            ("PATCH", f"/v1/jobs/{inside}", {"name": name}, {}),
            ("POST", "/v1/workflows", flow | {"name": name}, {}),
            ("PUT", f"/v1/workflows/by-name/{name}", flow | {"name": name}, {}),
        ]
        replies = [await api.http.request(m, path, json=body, headers=headers) for m, path, body, headers in calls]
        return [(reply.status_code, reply.json()["detail"].replace(name, "NAME")) for reply in replies]

    taken, free, with_node = [await answers(name) for name in ("payroll", "nobody", "pay")]
    assert taken == free == with_node
    assert {status for status, _ in taken} == {403, 412, 422}
    assert (await api.call("PATCH", f"/v1/jobs/{inside}", json={"priority": 7}))["name"] == "billing-nightly"


async def test_a_taken_name_within_the_scope_is_reported(scene: Scene, case: Case) -> None:
    api = await key_for(scene, "editor", jobs=["billing-*"])
    taken = await api.call("POST", "/v1/jobs", json=MANUAL | {"name": "billing-nightly"}, expect=409)
    assert taken["code"] == "name_taken"


async def test_what_is_not_about_a_job_is_closed_to_it(scene: Scene) -> None:
    api = await key_for(scene, "editor", jobs=["*"])
    closed = [(m, path) for m, path, permission, _ in routes.ROUTES if kept_by(path) is None and m == "GET"]
    for method, path in closed:
        reply = await api.http.request(method, path.replace("{name}", "x").replace("{slug}", "default"))
        assert reply.status_code in (403, 404), path
    reply = await api.call("PUT", "/v1/secrets/x", json={"value": "long enough"}, expect=403)
    assert reply["code"] == "out_of_scope"
    assert {"/v1/secrets", "/v1/reports/runs", "/v1/circuits", "/v1/calendars"} <= {path for _, path in closed}
    await api.post("/v1/schedules/preview", {"schedule": {"cron": "0 9 * * *"}})


async def test_logs_are_searched_within_it(scene: Scene, worker_key: str) -> None:
    worker = await WorkerHand.register(scene.node, worker_key)
    jobs = [await scene.job(name=name) for name in ("billing-a", "payroll-a")]
    for job in jobs:
        await scene.ask(job)
    worker_row = worker.id
    for row in await scene.take(10, worker_row):
        run = {"run_id": row["id"], "attempt": row["attempt"], "fence": row["fence"]}
        await worker.ship(chunk(run, 0, "a needle"))
        await worker.report(finished=[told(run)])
    api = await key_for(scene, "viewer", jobs=["billing-*"])
    assert len((await scene.api.get("/v1/logs/search?q=needle"))["items"]) == 2
    assert [line["job_id"] for line in (await api.get("/v1/logs/search?q=needle"))["items"]] == [jobs[0]["id"]]


async def test_a_stream_of_events_tells_of_nothing_beyond_it(live: Scene) -> None:
    made = await live.api.post("/v1/keys", {"role": "viewer", "scopes": {"jobs": ["billing-*"]}})
    found = await keys.identify(live.db, live.node.key_hashes, made["key"])
    assert found is not None
    stream = live.node.events.stream(found.who, Wanted(), None)
    words = b""
    while b"event: open" not in words:
        words = await anext(stream)
    await live.job(name="payroll")
    inside = await live.job(name="billing-b")
    while b"event: job" not in words:
        words = await anext(stream)
    assert inside["id"].encode() in words and words.count(b"event: job") == 1
    await stream.aclose()


async def test_scopes_are_for_their_roles_and_are_read_strictly(scene: Scene) -> None:
    for wrong in (
        {"role": "admin", "scopes": {"jobs": ["*"]}},
        {"role": "platform", "scopes": {"tags": ["a:b"]}},
        {"role": "worker", "scopes": {"jobs": ["*"]}},
        {"role": "viewer", "scopes": {"pools": ["default"]}},
        {"role": "viewer", "scopes": {"jobs": []}},
        {"role": "viewer", "scopes": {"jobs": ["a|b"]}},
        {"role": "viewer", "scopes": {"jobs": ["*a*a*a*a*a*a*a*a*b"]}},
        {"role": "viewer", "scopes": {"tags": ["nocolon"]}},
        {"role": "viewer", "scopes": {"color": 1}},
        {"role": "worker", "scopes": {"tenants": ["unknown"]}},
        {"role": "viewer", "expires_at": "2020-01-01T00:00:00Z"},
    ):
        await scene.api.post("/v1/keys", wrong, expect=422)
    assert len((await scene.api.get("/v1/keys"))["items"]) == 2, "nothing was left behind"


@pytest.mark.parametrize("tag", ["team:o'brien", 'a:"}]; drop table jobs', "a:\\", "a:$2", "a:ö"])
async def test_no_tag_is_more_than_a_tag(scene: Scene, tag: str) -> None:
    key, _, value = tag.partition(":")
    job = await scene.job(tags={key: value})
    await scene.job(tags={key: "other"})
    api = await key_for(scene, "viewer", tags=[tag])
    assert [found["id"] for found in (await api.get("/v1/jobs"))["items"]] == [job["id"]]


async def test_the_scope_ends_with_its_call(scene: Scene, case: Case) -> None:
    who = await scene.who()
    with kept_to(Scope(("billing-*",))):
        async with scene.db.tenant(who.tenant_id, "test") as connection:
            assert await connection.fetchval("select count(*) from jobs") == 1
    for _ in range(20):  # every connection there is
        async with scene.db.tenant(who.tenant_id, "test") as connection:
            assert await connection.fetchval("select count(*) from jobs") == 2
            assert not await connection.fetchval("select current_setting('tocsin.scope', true)")
