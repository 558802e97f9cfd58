"""`tocsin report`."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from scripted import Script, Tocsin


def report(kind: str, item: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"report": kind, "by": "job", "complete": True, "items": [item]} | more


RUNS = {
    "key": "j1",
    "label": "nightly",
    **{"runs": 10, "succeeded": 9, "dead": 1, "cancelled": 0, "expired": 0, "skipped": 0, "success_rate": 0.9},
    **{f"{name}_p{share}_ms": 1500.0 for name in ("duration", "start_lag") for share in (50, 95, 99)},
}


def test_runs_are_shown_to_people_machines_and_spreadsheets(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/reports/runs", report("runs", RUNS))
    shown = tocsin("report", "runs", "--by", "job", "--from", "2026-03-01T00:00:00Z").stdout
    assert "nightly" in shown and "90.0%" in shown and "1.5" in shown
    assert script.asked[-1].query == {"by": "job", "from": "2026-03-01T00:00:00Z", "limit": "100"}
    assert json.loads(tocsin("report", "runs", "--json").stdout) == report("runs", RUNS)
    [row] = csv.DictReader(io.StringIO(tocsin("report", "runs", "--csv").stdout))
    assert (row["label"], row["success_rate"]) == ("nightly", "0.9")


def test_failures_and_utilisation_are_shown(script: Script, tocsin: Tocsin) -> None:
    failure = {"key": "Boom", "label": None, "failures": 3, "runs": 2, "dead": 1, "last_at": None, "last_run_id": "r9"}
    script.on("GET", "/v1/reports/failures", report("failures", failure))
    assert "Boom" in tocsin("report", "failures").stdout
    use = {"key": "w", "label": "eu-1", "attempts": 4, "busy_seconds": 25.0, "utilisation": 0.25}
    script.on("GET", "/v1/reports/utilisation", report("utilisation", use))
    shown = tocsin("report", "utilisation", "--by", "worker").stdout
    assert "eu-1" in shown and "25.0%" in shown


def test_a_report_that_did_not_read_all_says_so(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/reports/runs", report("runs", RUNS, complete=False))
    assert "newest" in tocsin("report", "runs").stderr
