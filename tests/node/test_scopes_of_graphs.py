"""Keys with a scope among workflows, backfills and dependencies: what is not of its jobs does not exist there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene
from tests.flow.stage import Stage, nodes
from tests.node.test_scopes import MANUAL, key_for
from tocsin.node.server import routes

NOWHERE = "019a0000-0000-7000-8000-000000000000"
PAST = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T05:00:00Z"}


async def graphs(api: Api, prefix: str) -> dict[str, str]:
    """A workflow that runs and a backfill; their ids by the beginning of the paths that name them."""
    flow = {"name": f"{prefix}-flow", "jobs": {"a": {"target": PROCESS}, "b": {"target": PROCESS}}}
    workflow = await api.post("/v1/workflows", flow)
    run = await api.post(f"/v1/workflows/{workflow['id']}/runs")
    hourly = {"target": PROCESS, "name": f"{prefix}-hourly", "schedule": {"cron": "0 * * * *"}}
    job = await api.post("/v1/jobs", hourly)
    backfill = await api.post(f"/v1/jobs/{job['id']}/backfill", PAST)
    named = {"workflows": workflow, "workflow-runs": run, "backfills": backfill}
    return {f"/v1/{kind}/{{id}}": made["id"] for kind, made in named.items()}


class Case:
    """One of each of the key's scope, and one beyond it."""

    def __init__(self, api: Api, inside: dict[str, str], beyond: dict[str, str]) -> None:
        self.api, self.inside, self.beyond = api, inside, beyond


@pytest.fixture
async def case(scene: Scene) -> Case:
    inside, beyond = [await graphs(scene.api, prefix) for prefix in ("billing", "payroll")]
    return Case(await key_for(scene, "editor", jobs=["billing-*"]), inside, beyond)


async def everything(scene: Scene) -> list[Any]:
    return [await scene.rows(f"select * from {table} order by 1, 2") for table in ("jobs", "runs", "backfills")]


async def test_ids_beyond_it_do_not_exist_on_any_route(scene: Scene, case: Case) -> None:
    before, tried = await everything(scene), 0
    for method, path, _, _ in routes.ROUTES:
        beyond = next(
            (id_ for start, id_ in case.beyond.items() if path == start or path.startswith(start + "/")), None
        )
        if beyond is None:
            continue
        body = PAST if path.endswith("/backfill") else {}
        found, nobody = [
            await case.api.http.request(method, path.replace("{id}", id_), json=body) for id_ in (beyond, NOWHERE)
        ]
        assert (found.status_code, found.content) == (404, nobody.content), (method, path, found.text)
        tried += 1
    assert tried >= 14
    assert await everything(scene) == before


async def test_lists_show_what_is_in_scope_alone(case: Case) -> None:
    for kind in ("workflows", "workflow-runs", "backfills"):
        items = (await case.api.get(f"/v1/{kind}"))["items"]
        assert [item["id"] for item in items] == [case.inside[f"/v1/{kind}/{{id}}"]], kind


async def test_what_is_in_scope_is_seen_and_worked_with(case: Case) -> None:
    for start, id_ in case.inside.items():
        assert (await case.api.get(start.replace("{id}", id_)))["id"] == id_
    workflow = case.inside["/v1/workflows/{id}"]
    for verb in ("pause", "resume", "runs", "cancel"):
        await case.api.post(f"/v1/workflows/{workflow}/{verb}")
    backfill = case.inside["/v1/backfills/{id}"]
    for verb in ("pause", "resume", "cancel"):
        await case.api.post(f"/v1/backfills/{backfill}/{verb}")


async def test_no_workflow_is_made_or_replaced_beyond_it(scene: Scene, case: Case) -> None:
    flow = {"jobs": {"a": {"target": PROCESS}}}
    before = await everything(scene)
    refused = [
        await case.api.http.post("/v1/workflows", json=flow | {"name": "payroll-other"}),
        await case.api.http.put("/v1/workflows/by-name/payroll-other", json=flow | {"name": "payroll-other"}),
        await case.api.http.put("/v1/workflows/by-name/payroll-flow", json=flow | {"name": "payroll-flow"}),
    ]
    assert [(reply.status_code, reply.json()["code"]) for reply in refused] == [(403, "out_of_scope")] * 3
    assert await everything(scene) == before
    await case.api.post("/v1/workflows", flow | {"name": "billing-other"})


async def test_no_job_waits_for_one_beyond_it_nor_is_seen_to_feed_one(scene: Scene, case: Case) -> None:
    beyond = await scene.job(name="payroll-last")
    replies = {
        ref: await case.api.http.post("/v1/jobs", json=MANUAL | {"name": "billing-x", "depends_on": [{"job": ref}]})
        for ref in ("payroll-last", "unheard-of", beyond["id"], NOWHERE)
    }
    assert len({(reply.status_code, reply.text.replace(ref, "")) for ref, reply in replies.items()}) == 1
    parent = await case.api.post("/v1/jobs", MANUAL | {"name": "billing-first"})
    for name in ("payroll-next", "billing-next"):
        await scene.job(name=name, depends_on=[{"job": "billing-first"}])
    fed = [child["name"] for child in (await case.api.get(f"/v1/jobs/{parent['id']}"))["feeds"]]
    assert fed == ["billing-next"]


async def test_who_cancels_one_node_tells_those_beyond_it_too(scene: Scene) -> None:
    """Whoever may cancel a node's run need not see what waits for it: that is decided about all the same."""
    stage = Stage(scene)
    jobs = nodes({"first": [], "next": ["first"]})
    jobs["first"]["tags"] = {"team": "billing"}
    await stage.make(jobs)
    run_id = await stage.ask()
    await stage.turn()
    first = await scene.value("select id::text from runs where state = 'ready'")
    api = await key_for(scene, "operator", tags=["team:billing"])
    await api.post(f"/v1/runs/{first}/cancel")
    await stage.turn()
    assert await stage.states(run_id) == {"first": "cancelled (cancelled)", "next": "skipped (upstream_failed)"}
    assert (await stage.get(run_id))["state"] == "dead"


async def test_a_workflow_keeps_its_names_with_a_key_that_could_not_give_them(scene: Scene) -> None:
    tagged = {"target": PROCESS, "tags": {"team": "billing"}}
    flow = {"name": "pay", "tags": {"team": "billing"}, "jobs": {"a": tagged}}
    made = await scene.api.post("/v1/workflows", flow)
    api = await key_for(scene, "editor", tags=["team:billing"])
    changed = flow | {"jobs": {"a": tagged | {"priority": 7}}}
    assert (await api.call("PUT", "/v1/workflows/by-name/pay", json=changed))["id"] == made["id"]
    await scene.job(name="pay.taken")
    for node in ("taken", "free"):
        more = changed | {"jobs": {"a": tagged, node: tagged}}
        refused = await api.call("PUT", "/v1/workflows/by-name/pay", json=more, expect=403)
        assert refused["code"] == "out_of_scope"
