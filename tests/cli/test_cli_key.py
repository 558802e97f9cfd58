"""`tocsin key`: made with what it is kept to, shown once, rotated, revoked."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin

from tocsin.model.access import ROLES

KEY = {"id": "k1", "name": "ci", "role": "editor", "created_at": "2026-06-01T00:00:00.000000Z"}


def ago(**span: float) -> str:
    return (datetime.now(UTC) - timedelta(**span)).isoformat()


def test_help_says_what_each_role_is_for(tocsin: Tocsin) -> None:
    said = " ".join(tocsin("key", "create", "--help").stdout.split())
    assert all(f"{role}: {words}." in said for role, words in ROLES.items())


@pytest.mark.parametrize(
    ("args", "body"),
    [
        (["--name", "ci"], {"name": "ci"}),
        (["--job", "billing-*", "--job", "tax", "--tag", "team=b"], {"jobs": ["billing-*", "tax"], "tags": ["team:b"]}),
        (["--pool", "gpu", "--serve", "acme", "--serve", "blue"], {"pools": ["gpu"], "tenants": ["acme", "blue"]}),
        (["--expires", "90d"], {"expires_in": "90d"}),
        (["--expires", "2031-01-01T00:00:00Z"], {"expires_at": "2031-01-01T00:00:00Z"}),
    ],
)
def test_a_key_is_made_with_what_it_is_kept_to(
    script: Script, tocsin: Tocsin, args: list[str], body: dict[str, Any]
) -> None:
    script.on("POST", "/v1/keys", Reply(201, KEY | {"key": "tcn_secret"}))
    done = tocsin("key", "create", "--role", "editor", *args)
    assert done.exit_code == 0 and "tcn_secret" in done.stdout and "not shown again" in done.stderr, done.output
    scopes = {name: body.pop(name) for name in ("jobs", "tags", "pools", "tenants") if name in body}
    assert script.asked[0].body == {"role": "editor", "name": ""} | body | ({"scopes": scopes} if scopes else {})


def test_a_key_is_shown_with_its_state(script: Script, tocsin: Tocsin) -> None:
    scopes = {"jobs": ["billing-*"], "tags": ["team:billing"]}
    whole = KEY | {"scopes": scopes, "expires_at": ago(days=-3, hours=-1), "last_used_at": ago(minutes=7)}
    script.on("GET", "/v1/keys/k1", whole)
    shown = tocsin("key", "show", "k1").stdout
    assert "jobs billing-*; tags team:billing" in shown and "expires in 3 d" in shown and "7 m" in shown
    assert json.loads(tocsin("key", "show", "k1", "--json").stdout) == whole


def test_a_list_leaves_out_what_has_ended(script: Script, tocsin: Tocsin) -> None:
    revoked = KEY | {"id": "k2", "revoked_at": ago(days=1)}
    expired = KEY | {"id": "k3", "expires_at": ago(hours=2)}
    script.on("GET", "/v1/keys", {"items": [KEY, revoked, expired], "next_cursor": None})
    assert [key["id"] for key in json.loads(tocsin("key", "list", "--json").stdout)["items"]] == ["k1"]
    every = tocsin("key", "list", "--all").stdout
    assert "active" in every and "revoked 1 d ago" in every and "expired 2 h ago" in every


def test_a_rotated_key_is_shown_once_with_the_end_of_the_old_one(script: Script, tocsin: Tocsin) -> None:
    new = KEY | {"id": "k2", "key": "tcn_new", "replaces": "k1", "old_expires_at": ago(hours=-5, minutes=-1)}
    script.on("POST", "/v1/keys/k1/rotate", Reply(201, new))
    done = tocsin("key", "rotate", "k1", "--overlap", "5h")
    assert "tcn_new" in done.stdout and "in 5 h" in done.stdout and "not shown again" in done.stderr
    assert script.asked[0].body == {"overlap": "5h"}
    assert json.loads(tocsin("key", "rotate", "k1", "--json").stdout) == new
    assert script.asked[1].body == {}


def test_a_key_is_never_made_twice_for_a_lost_answer(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/keys", Reply(503, {"code": "outcome_unknown", "detail": "it broke"}))
    assert tocsin("key", "create", "--role", "viewer").exit_code == 1
    assert len(script.asked) == 1
