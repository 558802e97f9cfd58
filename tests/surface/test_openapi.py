"""The served document: agrees with the routes and with what is answered, and the page shows it without a script."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest

from tests.conftest import Api
from tests.flow.kit import Scene
from tocsin.errors import NotSupported
from tocsin.model import states
from tocsin.model.job import check
from tocsin.node.server import replies, routes, worker_routes
from tocsin.node.server.app import described
from tocsin.node.server.openapi import NOT_BUILT, document
from tocsin.node.server.operations import OPERATIONS
from tocsin.store.vault import MasterKeys
from tocsin.wire import decode_job_spec

ALL = [*routes.ROUTES, *worker_routes.ROUTES]
DOCUMENT = document(ALL)
BUILT = [(method, path) for method, path, _, handler in ALL if handler.__name__ != "not_yet"]
PLANNED = [(method, path) for method, path, _, handler in ALL if handler.__name__ == "not_yet"]


def operation(method: str, path: str) -> Any:
    return DOCUMENT["paths"][path][method.lower()]


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]}, validate_formats=True)


@pytest.mark.parametrize(("method", "path"), BUILT)
def test_every_built_route_is_listed(method: str, path: str) -> None:
    assert (method, path) in OPERATIONS, "tocsin/node/server/operations.py: OPERATIONS has no row for it"
    assert operation(method, path)["summary"]


def test_nothing_else_is_listed() -> None:
    assert set(BUILT) <= set(OPERATIONS)
    listed = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert listed == set(BUILT) and not listed & set(PLANNED)
    names = [op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert len(names) == len(set(names))


def test_examples_fit_their_schemas() -> None:
    for (method, path), op in OPERATIONS.items():
        if op.body is not None and (method, path) in BUILT:
            content = next(iter(operation(method, path)["requestBody"]["content"].values()))
            validator(content["schema"]).validate(content["example"])


def test_states_are_those_of_the_model() -> None:
    assert set(replies.LiveState.__args__) == set(states.LIVE)  # type: ignore[attr-defined]
    assert set(replies.FinalState.__args__) == set(states.FINAL)  # type: ignore[attr-defined]
    assert set(replies.JobState.__args__) == set(states.JOB_STATES)  # type: ignore[attr-defined]
    assert set(replies.Outcome.__args__) == set(states.OUTCOMES)  # type: ignore[attr-defined]
    assert set(replies.Trigger.__args__) == set(states.TRIGGERS)  # type: ignore[attr-defined]
    told = {f"run.{state}" for state in (*states.LIVE, *states.FINAL, "retrying")}
    assert set(replies.RunEventType.__args__) == told  # type: ignore[attr-defined]


def test_durations_and_names_read_as_the_server_reads_them() -> None:
    spec = validator({"$ref": "#/components/schemas/JobSpec"})
    target = {"kind": "process", "command": ["true"]}
    for good in ("PT5M", "P1DT2H30M", "PT0.5S", "1h30m", "90s", "250ms"):
        assert spec.is_valid({"target": target, "timeout": good}), good
    for bad in ("5 minutes", "PT5M\n", "-PT5M", 300):
        assert not spec.is_valid({"target": target, "timeout": bad}), bad
    assert spec.is_valid({"target": target, "name": "nightly"})
    assert not spec.is_valid({"target": target, "name": "nightly\n"})
    assert "(?!" not in described()[0].decode()


def test_what_is_not_built_is_not_promised_and_refused() -> None:
    """And the other way round: a field that the model begins to act on must come into the document."""
    values: dict[str, Any] = {
        "notify": [{"on": ["failure"]}],
    }
    spec = validator({"$ref": "#/components/schemas/JobSpec"})
    target = {"kind": "process", "command": ["true"]}
    refused: list[dict[str, Any]] = [{name: values.get(name, "a")} for name in NOT_BUILT["JobSpec"]]
    for fields in refused:
        document = {"target": target} | fields
        assert not spec.is_valid(document), fields
        with pytest.raises(NotSupported):
            check(decode_job_spec(json.dumps(document).encode()))


async def test_replies_fit_their_schemas(scene: Scene) -> None:
    """Each read, with something to read: an ended, a dead and a waiting run, a worker, a key, a tenant."""
    api = scene.api
    job = await api.post("/v1/jobs", {"target": {"kind": "process", "command": ["true"]}, "tags": {"a": "b"}})
    cron = await api.post(
        "/v1/jobs",
        {"name": "daily", "target": {"kind": "python", "function": "a.b"}, "schedule": {"cron": "0 9 * * *"}},
    )
    run = await api.post(f"/v1/jobs/{cron['id']}/runs", {"args": {"n": [1, 2.5, None, "é"]}})
    await api.post("/v1/tenants", {"slug": "acme"})
    scene.node.master_keys = MasterKeys([bytes(32)])
    await api.call("PUT", "/v1/secrets/daily", json={"value": "correct horse"})
    await api.call("PUT", "/v1/calendars/daily", json={"days": ["2026-12-25"], "weekdays": ["SUN"]})
    await api.call("PUT", "/v1/circuits/daily", json={})
    worker = await api.node.gateway.register(await scene.who(), _registration())
    ids = {"jobs": cron["id"], "runs": run["id"], "workers": worker.worker_id}
    names = {"pools": "default"}
    for (method, path), op in OPERATIONS.items():
        if method == "GET" and (method, path) in BUILT and op.media == "application/json":
            noun = path.split("/")[2]
            named = path.replace("{name}", names.get(noun, "daily")).replace("{slug}", "acme")
            found = await api.get(named.replace("{id}", ids.get(noun, "")))
            validator(
                operation(method, path)["responses"][str(op.status)]["content"]["application/json"]["schema"]
            ).validate(found)
    for path, reply in ((f"/v1/jobs/{job['id']}/pause", "Job"), (f"/v1/runs/{run['id']}/cancel", "Run")):
        validator({"$ref": f"#/components/schemas/{reply}"}).validate(await api.post(path))


def _registration() -> Any:
    from tocsin.wire import Register

    return Register(name="w", labels={"region": "eu"}, targets=["process"])


async def test_it_is_served_to_everybody(still_api: Api) -> None:
    reply = await still_api.http.get("/openapi.json", headers={"authorization": ""})
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    assert reply.json()["openapi"] == "3.1.0" and set(reply.json()["paths"]) == {path for _, path in BUILT}


async def test_the_page_needs_nothing_from_elsewhere(still_api: Api) -> None:
    reply = await still_api.http.get("/docs", headers={"authorization": ""})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert not re.search(r"<script|\son\w+=|\bstyle=|https?://|//\w", reply.text)
    for method, path in BUILT:
        assert f"<b>{method}</b><code>{path}</code>" in reply.text
    links = set(re.findall(r'href="#([^"]+)"', reply.text))
    assert links <= set(re.findall(r'id="([^"]+)"', reply.text))
