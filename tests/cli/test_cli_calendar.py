"""`tocsin calendar` and `tocsin job occurrences`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripted import Reply, Script, Tocsin

TIMES = {"created_at": "2026-06-01T00:00:00.000000Z", "updated_at": "2026-06-01T00:00:00.000000Z"}
HOLIDAYS = {"name": "off", "version": 1, "mode": "skip", "days": ["2026-12-25"], "weekdays": ["SAT"]} | TIMES
JOB = "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071"


def test_put_show_list_and_delete(script: Script, tocsin: Tocsin) -> None:
    script.on("PUT", "/v1/calendars/off", Reply(201, HOLIDAYS))
    done = tocsin("calendar", "put", "off", "--day", "2026-12-25", "--weekday", "sat", "--mode", "skip")
    assert done.exit_code == 0, done.output
    assert script.asked[0].body == {"mode": "skip", "days": ["2026-12-25"], "weekdays": ["SAT"]}
    assert "2026-12-25" in done.stdout
    script.on("GET", "/v1/calendars/off", HOLIDAYS)
    assert json.loads(tocsin("calendar", "show", "off", "--json").stdout) == HOLIDAYS
    script.on("GET", "/v1/calendars", {"items": [HOLIDAYS], "next_cursor": None})
    assert "SAT" in tocsin("calendar", "list").stdout
    script.on("DELETE", "/v1/calendars/off", Reply(204, b""))
    assert "deleted off" in tocsin("calendar", "delete", "off", "--if-match", "1").stdout
    assert script.asked[-1].headers["if-match"] == '"1"'


def test_import(script: Script, tocsin: Tocsin, tmp_path: Path) -> None:
    script.on("PUT", "/v1/calendars/off", Reply(201, HOLIDAYS))
    file = tmp_path / "off.ics"
    file.write_text("BEGIN:VCALENDAR\nEND:VCALENDAR\n", "utf-8-sig")
    done = tocsin("calendar", "import", "off", str(file), "--mode", "only")
    assert done.exit_code == 0, done.output
    assert script.asked[0].body == {"ical": "BEGIN:VCALENDAR\nEND:VCALENDAR\n", "mode": "only"}
    assert "calendar off has 1 days" in done.stdout
    assert tocsin("calendar", "import", "off", str(tmp_path / "none.ics")).exit_code == 2


def test_occurrences(script: Script, tocsin: Tocsin) -> None:
    at = "2026-05-31T00:00:00.000000Z"
    ran: dict[str, Any] = {"status": "ran", "from": at, "to": at, "count": 1, "reason": None}
    missed = {
        "status": "coalesced",
        "from": at,
        "to": "2026-06-02T00:00:00.000000Z",
        "count": 24,
        "reason": "coalesced",
    }
    items = [ran | {"run_id": JOB, "state": "succeeded"}, missed | {"run_id": None, "state": None}]
    script.on("GET", f"/v1/jobs/{JOB}/occurrences", {"items": items, "next_cursor": None})
    done = tocsin("job", "occurrences", JOB, "--from", at, "--to", "2026-06-03T00:00:00Z")
    assert done.exit_code == 0, done.output
    assert script.asked[0].query | {"limit": ""} == {"from": at, "to": "2026-06-03T00:00:00Z", "limit": ""}
    assert "succeeded" in done.stdout and "24" in done.stdout
    assert json.loads(tocsin("job", "occurrences", JOB, "--json").stdout)["items"] == items


def test_a_job_that_goes_by_a_calendar(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/jobs", Reply(201, {"id": JOB, "state": "active"}))
    done = tocsin("job", "create", "--cron", "0 9 * * *", "--calendar", "off", "--", "true")
    assert done.exit_code == 0, done.output
    assert script.asked[0].body["schedule"] == {"cron": "0 9 * * *", "calendar": "off"}
