"""The served document: agrees with the routes and with what is answered, and the page shows it without a script."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import jsonschema_rs
import msgspec
import pytest

from tests.conftest import Api
from tests.flow.kit import WorkerHand, told
from tocsin.errors import NotSupported
from tocsin.flow import seal
from tocsin.model import states
from tocsin.model.job import check
from tocsin.node.server import replies, routes, worker_routes
from tocsin.node.server.app import described
from tocsin.node.server.openapi import NOT_BUILT, document
from tocsin.node.server.operations import OPERATIONS
from tocsin.store.vault import MasterKeys
from tocsin.wire import decode_job_spec

UNIONS = (Union, types.UnionType, Annotated)
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


def test_enums_are_those_that_the_decoder_accepts() -> None:
    """Compare each `Literal` of each body and reply with the enum in the document."""
    named = {t for op in OPERATIONS.values() for t in (op.body, op.reply, op.other) if t is not None}
    compared = 0
    for kind in structs_of(named):
        schema = DOCUMENT["components"]["schemas"].get(kind.__name__)
        if schema is None:
            continue
        for field in msgspec.structs.fields(kind):
            if accepted := literals_of(field.type):
                shown = schema["properties"].get(field.encode_name)
                assert shown is None or enums_of(shown) == accepted, f"{kind.__name__}.{field.encode_name}"
                compared += shown is not None
    assert compared >= 40


def structs_of(types: Iterable[Any]) -> set[Any]:
    """Return every struct that these types are made of."""
    found: set[Any] = set()
    waiting = list(types)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        origin = get_origin(kind) or kind
        if isinstance(origin, type) and issubclass(origin, msgspec.Struct) and origin not in found:
            found.add(origin)
            waiting += [field.type for field in msgspec.structs.fields(kind)]
    return found


def literals_of(kind: Any) -> set[Any]:
    """Return the values that a field accepts by name, None left out."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return set().union(*(literals_of(part) for part in get_args(kind))) if get_origin(kind) in UNIONS else set()


def enums_of(schema: dict[str, Any]) -> set[Any]:
    """Return the values that a schema names, null left out."""
    named = set(schema.get("enum", ())) | ({schema["const"]} if "const" in schema else set())
    return named.union(*(enums_of(part) for part in schema.get("anyOf", ()))) - {None}


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


# Queries that a route requires.
QUERIES = {
    "/v1/logs/search": "?q=word",
    "/v1/jobs/{id}/occurrences": "?from=2026-01-01T00:00:00Z&to=2027-01-01T00:00:00Z",
}
# Only the token of a run may read it; tests/node/test_parents.py does.
WITH_RUN_TOKEN = {"/v1/runs/{id}/parents"}
READS = [
    path
    for (method, path), op in OPERATIONS.items()
    if method == "GET" and (method, path) in BUILT and op.media[0] == "application/json" and path not in WITH_RUN_TOKEN
]


async def test_replies_fit_their_schemas(api: Api, worker_key: str) -> None:
    """Call every route that answers a GET with JSON, with data for each."""
    ids = await _something_of_everything(api, worker_key)
    empty = []
    for path in READS:
        noun = path.split("/")[2]
        name = {"pools": "default"}.get(noun, "daily")
        named = path.replace("{name}", name).replace("{slug}", "acme").replace("{id}", ids.get(noun, ""))
        answer = await api.http.get(named + QUERIES.get(path, ""))
        assert answer.status_code == 200, f"{path}: {answer.text}"
        found, reply = answer.json(), operation("GET", path)["responses"]["200"]
        assert ("etag" in answer.headers) == ("ETag" in reply["headers"]), path
        validator(reply["content"]["application/json"]["schema"]).validate(found)
        if found.get("items") == []:
            empty.append(path)
    assert len(READS) >= 39, "the routes are no longer found"
    assert not empty, "nothing was compared there"


async def test_replies_to_actions_fit_their_schemas(api: Api, worker_key: str) -> None:
    ids = await _something_of_everything(api, worker_key)
    waiting = await api.post(f"/v1/jobs/{ids['jobs']}/runs", {})
    for path, reply in ((f"/v1/jobs/{ids['jobs']}/pause", "Job"), (f"/v1/runs/{waiting['id']}/cancel", "Run")):
        validator({"$ref": f"#/components/schemas/{reply}"}).validate(await api.post(path))


async def _something_of_everything(api: Api, worker_key: str) -> dict[str, str]:
    """Create one object of each kind, named `daily` if it has a name. Return the ids by noun."""
    process = {"kind": "process", "command": ["true"]}
    cron = {"name": "daily", "target": {"kind": "python", "function": "a.b"}, "schedule": {"cron": "0 9 * * *"}}
    job = await api.post("/v1/jobs", cron | {"tags": {"a": "b"}, "retry": {"max_attempts": 1}})
    await api.call("PATCH", f"/v1/jobs/{job['id']}", json={"priority": 7})
    await api.post(f"/v1/jobs/{job['id']}/runs", {"args": {"n": [1, 2.5, None, "é"]}})
    workflow = await api.post("/v1/workflows", {"name": "flow", "jobs": {"one": {"target": process}}})
    workflow_run = await api.post(f"/v1/workflows/{workflow['id']}/runs", {})
    range_ = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-03T00:00:00Z"}
    backfill = await api.post(f"/v1/jobs/{job['id']}/backfill", range_)
    await api.post("/v1/tenants", {"slug": "acme"})
    key = await api.post("/v1/keys", {"role": "viewer"})
    api.node.master_keys = MasterKeys([bytes(32)])
    await api.call("PUT", "/v1/secrets/daily", json={"value": "correct horse"})
    await api.call("PUT", "/v1/calendars/daily", json={"days": ["2026-12-25"], "weekdays": ["SUN"]})
    await api.call("PUT", "/v1/circuits/daily", json={})
    hand = await WorkerHand.register(api.node, worker_key, targets=["python"], functions=["a.b"])
    [given] = (await hand.claim(slots=1, wait=30))["runs"]
    chunk = told(given) | {"offset": 0, "lines": [[0.0, "stdout", "info", "a word"]]}
    del chunk["outcome"]
    await hand.ship(chunk)
    await hand.report(finished=[told(given, "failed", error={"class": "GiveUp", "message": "no"})])
    await seal.seal(api.node.db)
    return {
        "jobs": job["id"],
        "runs": given["run_id"],
        "workers": hand.id,
        "workflows": workflow["id"],
        "workflow-runs": workflow_run["id"],
        "backfills": backfill["id"],
        "keys": key["id"],
    }


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
