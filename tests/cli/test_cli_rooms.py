"""Dead letters, fleet, tenants and keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin

WORKER = {
    "id": "w1",
    "name": "host",
    "pool": "default",
    "slots": 8,
    "labels": {"region": "eu"},
    "running": 3,
    "state": "live",
}
LETTER = {"id": "d1", "job_name": "nightly", "error": {"class": "Boom", "message": "no"}, "args": {"n": 1}}


@pytest.mark.parametrize(
    ("args", "path", "item", "shown"),
    [
        (["dead", "list"], "/v1/dead-letters", LETTER, "Boom: no"),
        (["fleet", "list"], "/v1/workers", WORKER, "region=eu"),
        (["tenant", "list"], "/v1/tenants", {"slug": "blue", "weight": 3}, "blue  3"),
        (["key", "list"], "/v1/keys", {"id": "k1", "name": "ci", "role": "editor"}, "editor  active"),
    ],
)
def test_lists(script: Script, tocsin: Tocsin, args: list[str], path: str, item: dict[str, Any], shown: str) -> None:
    script.on("GET", path, {"items": [item], "next_cursor": None})
    result = tocsin(*args)
    assert result.exit_code == 0, result.output
    assert shown in result.stdout
    assert json.loads(tocsin(*args, "--json").stdout) == {"items": [item], "more": False}


@pytest.mark.parametrize(
    ("args", "call", "body"),
    [
        (["dead", "redrive", "d1", "d2"], "POST /v1/dead-letters/redrive", {"ids": ["d1", "d2"]}),
        (["dead", "discard", "d1"], "POST /v1/dead-letters/discard", {"ids": ["d1"]}),
        (["fleet", "drain", "w1"], "POST /v1/workers/w1/drain", None),
        (["fleet", "show", "w1"], "GET /v1/workers/w1", None),
        (["tenant", "create", "blue", "--weight", "3"], "POST /v1/tenants", {"slug": "blue", "weight": 3}),
        (
            ["tenant", "create", "blue", "--quota", "max_jobs=5"],
            "POST /v1/tenants",
            {"slug": "blue", "weight": 1, "quotas": {"max_jobs": 5}},
        ),
        (["key", "create", "--role", "editor", "--name", "ci"], "POST /v1/keys", {"role": "editor", "name": "ci"}),
        (["key", "revoke", "k1"], "DELETE /v1/keys/k1", None),
    ],
)
def test_actions(script: Script, tocsin: Tocsin, args: list[str], call: str, body: Any) -> None:
    method, path = call.split()
    answer = {"id": "x", "key": "tk_secret", "items": [{"id": "r1"}]}
    script.on(method, path, Reply(200, answer))
    result = tocsin(*args)
    assert result.exit_code == 0, result.output
    assert script.asked[0].body == body
    assert json.loads(tocsin(*args, "--json").stdout) == answer


def test_a_new_key_is_shown_with_a_warning(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/keys", Reply(201, {"id": "k1", "role": "viewer", "key": "tk_secret"}))
    result = tocsin("key", "create", "--role", "viewer")
    assert "tk_secret" in result.stdout
    assert "not shown again" in result.stderr


def test_an_answer_without_a_body_is_enough(script: Script, tocsin: Tocsin) -> None:
    script.on("DELETE", "/v1/keys/k1", Reply(204, b""))
    assert tocsin("key", "revoke", "k1").stdout == "revoked k1\n"


def test_acting_for_another_tenant(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/keys", {"items": [], "next_cursor": None})
    tocsin("--tenant", "blue", "key", "list")
    tocsin("key", "list")
    assert [asked.headers.get("tocsin-tenant") for asked in script.asked] == ["blue", None]


def test_many_workers_are_drained_at_once(script: Script, tocsin: Tocsin) -> None:
    fleet = [WORKER | {"id": f"w{n}", "pool": pool} for n, pool in enumerate(["default", "gpu", "gpu"])]
    script.on("GET", "/v1/workers", {"items": [*fleet, WORKER | {"id": "w9", "state": "gone"}], "next_cursor": None})
    for worker in fleet:
        script.on("POST", f"/v1/workers/{worker['id']}/drain", worker | {"state": "draining"})
        script.on("GET", f"/v1/workers/{worker['id']}", worker | {"state": "gone"})
    result = tocsin("fleet", "drain", "--pool", "gpu")
    assert result.exit_code == 0 and result.stdout.strip() == "draining 2 workers", result.output
    assert tocsin("fleet", "drain", "--all", "--wait").stdout.strip() == "drained 3 workers"
    told = json.loads(tocsin("fleet", "drain", "w0", "w2", "--wait", "--json").stdout)["items"]
    assert [(w["id"], w["state"]) for w in told] == [("w0", "gone"), ("w2", "gone")]
    assert [a.path for a in script.asked if a.method == "POST"][:2] == ["/v1/workers/w1/drain", "/v1/workers/w2/drain"]
    for wrong in ([], ["w1", "--all"], ["--all", "--pool", "gpu"]):
        assert tocsin("fleet", "drain", *wrong).exit_code == 2
