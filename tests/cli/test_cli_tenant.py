"""`tocsin tenant erase`, which nothing undoes; and `tocsin tenant usage`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin

from tocsin.cli import live, tenant

USAGE = {"jobs": 12, "queued": 3, "running": 1, "log_bytes_today": 0}
ACME: dict[str, Any] = {"slug": "acme", "usage": USAGE, "suspended_at": None, "erasure": None}
ERASURE = {"state": "erasing", "asked_at": "2026-11-16T00:00:00.000000Z", "asked_by": "key:x", "rows": 7, "objects": 2}


@pytest.fixture(autouse=True)
def acme(script: Script) -> None:
    script.on("GET", "/v1/tenants/acme", ACME)
    script.on("DELETE", "/v1/tenants/acme", Reply(202, ACME | {"erasure": ERASURE}))


def erased(script: Script) -> list[Any]:
    return [asked.body for asked in script.asked if asked.method == "DELETE"]


def test_it_says_what_goes_and_wants_the_name(script: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant, "_at_a_terminal", lambda: True)
    refused = tocsin("tenant", "erase", "acme", input="yes\n")
    assert refused.exit_code == 1 and "jobs=12" in refused.stderr and "Nothing brings it back" in refused.stderr
    assert erased(script) == []
    done = tocsin("tenant", "erase", "acme", input="acme\n")
    assert done.exit_code == 0 and "tocsin tenant show acme" in done.stdout
    assert erased(script) == [{"confirm": "acme"}]


def test_it_does_not_ask_a_machine(script: Script, tocsin: Tocsin) -> None:
    assert tocsin("tenant", "erase", "acme").exit_code == 2
    assert erased(script) == []
    told = tocsin("tenant", "erase", "acme", "--yes", "--json")
    assert json.loads(told.stdout)["erasure"] == ERASURE and erased(script) == [{"confirm": "acme"}]


def test_it_waits_until_there_is_no_such_tenant(
    script: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WATCH_SECONDS", 0.0)
    gone = Reply(404, {"status": 404, "code": "not_found", "detail": "there is no such tenant"})
    script.on("GET", "/v1/tenants/acme", ACME | {"erasure": ERASURE}, gone)
    assert tocsin("tenant", "erase", "acme", "--yes", "--wait").stdout == "erased acme\n"


def test_how_far_it_is_is_shown(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/tenants/acme", ACME | {"erasure": ERASURE})
    assert "being erased: 7 rows and 2 objects are gone" in tocsin("tenant", "show", "acme").stdout


def test_usage_is_told_beside_the_quotas(script: Script, tocsin: Tocsin) -> None:
    used = {
        "tenant": "acme",
        "jobs": {"used": 3, "quota": 10},
        "queued": {"used": 4, "quota": None},
        "running": {"used": 0, "quota": 5},
        "log_bytes_today": {"used": 1_500_000, "quota": 2_000_000_000},
        "last_day": {"since": "2026-11-15T00:00:00.000000Z", "submitted": 9, "ran": 8, "failed": 1},
        "stored": {"history_bytes": 999, "audit_bytes": 0, "log_bytes": 999_999, "payloads": 2},
    }
    script.on("GET", "/v1/tenants/acme/usage", used)
    shown = tocsin("tenant", "usage", "acme").stdout
    for words in ("3 of 10", "0 of 5", "1.5 MB of 2 GB", "9 submitted, 8 ran, 1 failed", "999 B of history", "1 MB"):
        assert words in shown, shown
    assert json.loads(tocsin("tenant", "usage", "acme", "--json").stdout) == used
