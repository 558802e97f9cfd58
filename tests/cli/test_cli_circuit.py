"""`tocsin circuit`."""

from __future__ import annotations

import json

from scripted import Script, Tocsin

BILLING = {
    "name": "billing",
    "state": "open",
    "since": "2026-12-01T09:00:00.000000Z",
    "by_hand": True,
    "probes_at": None,
    "waiting": 12,
    "wave": None,
    "recent": {"calls": 20, "failures": 11},
    "policy": {
        "failure_ratio": 0.5,
        "calls": 20,
        "window": "PT1M",
        "cooldown": "PT5S",
        "max_cooldown": "PT5M",
        "release_rate": 500,
    },
    "created_at": "2026-12-01T08:00:00.000000Z",
}


def test_circuits_are_listed_shown_set_opened_and_closed(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/circuits", {"items": [BILLING], "next_cursor": None})
    listed = tocsin("circuit", "list", "--state", "open").stdout
    assert "open by hand" in listed and "11 of 20 failed" in listed
    assert script.asked[-1].query["state"] == "open"
    script.on("GET", "/v1/circuits/billing", BILLING)
    assert "50% of 20 calls within PT1M" in tocsin("circuit", "show", "billing").stdout
    assert json.loads(tocsin("circuit", "show", "billing", "--json").stdout) == BILLING
    script.on("PUT", "/v1/circuits/billing", BILLING)
    tocsin("circuit", "set", "billing", "--failure-ratio", "0.3", "--cooldown", "10s")
    assert script.asked[-1].body == {"failure_ratio": 0.3, "cooldown": "10s"}
    script.on("POST", "/v1/circuits/billing/open", BILLING)
    assert "opened billing" in tocsin("circuit", "open", "billing", "--reason", "maintenance").stdout
    assert script.asked[-1].body == {"reason": "maintenance"}
    script.on("POST", "/v1/circuits/billing/close", BILLING | {"state": "closed"})
    assert "12 runs that waited go in waves" in tocsin("circuit", "close", "billing").stdout
