"""`tocsin pool`, and the quotas of `tocsin tenant`."""

from __future__ import annotations

import json

from scripted import Script, Tocsin

POOL = {
    "name": "default",
    "version": 2,
    "policy": "fair",
    "head_start": "PT0.02S",
    "worst_case_wait": "PT20S",
    "paused_at": None,
    "tenants": ["acme"],
    "depth": {"staged": 0, "ready": 7, "waiting": 0, "running": 2, "stopping": 1},
    "due": 7,
    "oldest_due_at": "2026-06-01T00:00:00.000000Z",
    "lag_ms": 1500.0,
    "workers": 1,
    "slots": 4,
    "wanted_workers": 3,
}
TENANT = {
    "id": 2,
    "slug": "acme",
    "weight": 2,
    "quotas": {"max_jobs": 10, "max_queued": None},
    "usage": {"jobs": 3, "queued": 0, "running": 0, "log_bytes_today": 0},
    "created_at": "2026-06-01T00:00:00.000000Z",
}


def test_list_and_show(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/pools", {"items": [POOL], "next_cursor": None})
    listed = tocsin("pool", "list").stdout
    assert "default" in listed and "active" in listed and "1.5" in listed
    script.on("GET", "/v1/pools/default", POOL)
    shown = tocsin("pool", "show", "default").stdout
    assert "PT20S" in shown and "7 ready" in shown and "acme" in shown
    assert json.loads(tocsin("pool", "show", "default", "--json").stdout) == POOL


def test_set_pause_and_resume(script: Script, tocsin: Tocsin) -> None:
    script.on("PATCH", "/v1/pools/default", POOL)
    assert "changed default" in tocsin("pool", "set", "default", "--policy", "priority", "--head-start", "5ms").stdout
    assert script.asked[-1].body == {"policy": "priority", "head_start": "5ms"}
    tocsin("pool", "set", "default", "--tenant", "acme", "--tenant", "beta")
    assert script.asked[-1].body == {"tenants": ["acme", "beta"]}
    tocsin("pool", "set", "default", "--all-tenants")
    assert script.asked[-1].body == {"tenants": None}
    assert tocsin("pool", "set", "default", "--all-tenants", "--tenant", "acme").exit_code == 2
    assert tocsin("pool", "set", "default").exit_code == 2
    assert tocsin("pool", "set", "default", "--policy", "random").exit_code == 2
    script.on("POST", "/v1/pools/default/pause", POOL)
    assert "paused default" in tocsin("pool", "pause", "default", "--reason", "moving").stdout
    assert script.asked[-1].body == {"reason": "moving"}
    script.on("POST", "/v1/pools/default/resume", POOL)
    assert "resumed default" in tocsin("pool", "resume", "default").stdout


def test_quotas_of_a_tenant(script: Script, tocsin: Tocsin) -> None:
    script.on("PATCH", "/v1/tenants/acme", TENANT)
    done = tocsin("tenant", "set", "acme", "--weight", "2", "--quota", "max_jobs=10", "--quota", "submit_rate=none")
    assert done.exit_code == 0, done.output
    assert script.asked[-1].body == {"weight": 2, "quotas": {"max_jobs": 10, "submit_rate": None}}
    assert tocsin("tenant", "set", "acme", "--http-allow", "a.example", "--http-allow", "10.0.0.0/8").exit_code == 0
    assert script.asked[-1].body == {"http_allow": ["a.example", "10.0.0.0/8"]}
    assert tocsin("tenant", "set", "acme", "--http-allow", "none").exit_code == 0
    assert script.asked[-1].body == {"http_allow": []}
    tocsin("tenant", "set", "acme", "--runs-days", "2556", "--legal-hold")
    assert script.asked[-1].body == {"retention": {"runs_days": 2556, "legal_hold": True}}
    tocsin("tenant", "set", "acme", "--runs-days", "0", "--no-legal-hold")
    assert script.asked[-1].body == {"retention": {"runs_days": None, "legal_hold": False}}
    tocsin("tenant", "set", "acme", "--hot-days", "7")
    assert script.asked[-1].body == {"retention": {"hot_days": 7}}
    tocsin("tenant", "set", "acme", "--logs-days", "30", "--audit-days", "0", "--preset", "compliance")
    assert script.asked[-1].body == {"retention": {"logs_days": 30, "audit_days": None, "preset": "compliance"}}
    assert tocsin("tenant", "set", "acme", "--preset", "strict").exit_code == 2
    assert tocsin("tenant", "set", "acme", "--quota", "max_jobs=many").exit_code == 2
    assert tocsin("tenant", "set", "acme").exit_code == 2
    script.on("GET", "/v1/tenants/acme", TENANT)
    shown = tocsin("tenant", "show", "acme").stdout
    assert "max_jobs=10" in shown and "jobs=3" in shown
