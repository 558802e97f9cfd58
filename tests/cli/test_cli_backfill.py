"""`tocsin job backfill` and `tocsin backfill`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from typing import Any

import pytest
from scripted import Script, Tocsin

from tests import PATIENCE

JOB = {"id": "01900000-0000-7000-8000-000000000001", "name": "nightly", "schedule": {"timezone": "Europe/Berlin"}}
COUNTED = {
    "dry_run": True,
    "total": 31,
    "too_many": False,
    "first": [f"2026-01-0{n}T00:00:00.000000Z" for n in range(1, 6)],
    "last": "2026-01-31T00:00:00.000000Z",
}
BEGUN: dict[str, Any] = {
    "id": "01900000-0000-7000-8000-000000000002",
    "job_id": JOB["id"],
    "job_name": "nightly",
    "state": "running",
    "from": "2026-01-01T00:00:00.000000Z",
    "to": "2026-02-01T00:00:00.000000Z",
    **{"total": 31, "made": 0, "live": 0, "succeeded": 0, "failed": 0, "cancelled": 0},
    "failures": [],
    "next_at": "2026-01-01T00:00:00.000000Z",
    **{"max_concurrency": 2, "priority": 100, "args": None},
    "created_at": "2026-11-01T00:00:00.000000Z",
    "finished_at": None,
}
HALF = BEGUN | {"made": 12, "live": 2, "succeeded": 9, "failed": 1}
FAILED = [{"id": "r9", "logical_at": "2026-01-09T00:00:00.000000Z", "state": "dead"}]
DONE = BEGUN | {"state": "completed", "made": 31, "succeeded": 30, "failed": 1, "failures": FAILED, "next_at": None}
GOOD = DONE | {"succeeded": 31, "failed": 0, "failures": []}
PATH = f"/v1/jobs/{JOB['id']}/backfill"
URL = f"/v1/backfills/{BEGUN['id']}"
JANUARY = ("--from", "2026-01-01T00:00:00Z", "--to", "2026-02-01T00:00:00Z")


@pytest.fixture
def asked(script: Script) -> Script:
    """A server that knows the job, counts, begins, and has done half of it when it is asked again."""
    script.on("GET", "/v1/jobs/by-name/nightly", JOB)
    script.on("POST", PATH, COUNTED, BEGUN)
    script.on("GET", URL, HALF, GOOD)
    return script


def test_a_dry_run_counts_and_asks_for_nothing(asked: Script, tocsin: Tocsin) -> None:
    told = tocsin("job", "backfill", "nightly", *JANUARY, "--dry-run", "--max-concurrency", "3")
    assert told.exit_code == 0 and told.stdout.startswith("31 runs: 2026-01-01 ")
    assert asked.asked[-1].body == {
        **{"from": JANUARY[1], "to": JANUARY[3], "max_concurrency": 3, "dry_run": True},
    }
    asked.on("POST", PATH, COUNTED)
    assert json.loads(tocsin("job", "backfill", "nightly", *JANUARY, "--dry-run", "--json").stdout) == COUNTED
    asked.on("POST", PATH, COUNTED | {"total": 0, "first": [], "last": None})
    assert "nothing was owed" in tocsin("job", "backfill", "nightly", *JANUARY, "--dry-run").stdout
    told = tocsin("job", "backfill", "nightly", *JANUARY, "--dry-run", "--rerun", "missing")
    assert told.stdout == "no runs: nothing is missing in this range\n"
    assert asked.asked[-1].body["rerun"] == "missing"
    asked.on("POST", PATH, COUNTED | {"total": 525_600, "too_many": True})
    assert (
        "525,600 runs, more than one backfill may have"
        in tocsin("job", "backfill", "nightly", *JANUARY, "--dry-run").stdout
    )


def test_without_yes_it_counts_and_makes_nothing_where_nobody_can_be_asked(asked: Script, tocsin: Tocsin) -> None:
    told = tocsin("job", "backfill", "nightly", *JANUARY)
    assert told.exit_code == 2 and "31 runs would be made; say --yes" in told.stderr
    assert [a.body.get("dry_run") for a in asked.asked if a.method == "POST"] == [True]


def test_with_yes_it_begins_and_says_where_to_look(asked: Script, tocsin: Tocsin) -> None:
    asked.on("POST", PATH, BEGUN)
    told = tocsin("job", "backfill", "nightly", *JANUARY, "--yes", "--args", '{"a": 1}', "--priority", "7")
    assert told.exit_code == 0, told.output
    assert told.stdout == f"backfill {BEGUN['id']} running, 31 runs; tocsin backfill show {BEGUN['id']}\n"
    assert asked.asked[-1].body == {"from": JANUARY[1], "to": JANUARY[3], "args": {"a": 1}, "priority": 7}
    assert tocsin("job", "backfill", "nightly", *JANUARY, "-y", "--ids").stdout == f"{BEGUN['id']}\n"
    assert json.loads(tocsin("job", "backfill", "nightly", *JANUARY, "-y", "--json").stdout) == BEGUN


def test_a_date_is_its_midnight_where_the_schedule_is(asked: Script, tocsin: Tocsin) -> None:
    tocsin("job", "backfill", "nightly", "--from", "2026-01-01", "--to", "2026-07-01", "--dry-run")
    assert asked.asked[-1].body["from"] == "2026-01-01T00:00:00+01:00"
    assert asked.asked[-1].body["to"] == "2026-07-01T00:00:00+02:00"
    by = ("--schedule", '{"cron": "0 0 * * *", "timezone": "Asia/Tokyo"}')
    tocsin("job", "backfill", "nightly", "--from", "2026-01-01", "--to", "2026-07-01", "--dry-run", *by)
    assert asked.asked[-1].body["to"] == "2026-07-01T00:00:00+09:00"
    wrong = tocsin("job", "backfill", "nightly", "--from", "2026-13-01", "--to", "2026-07-01", "--dry-run")
    assert wrong.exit_code == 2 and "neither a date nor an instant" in wrong.stderr


@pytest.mark.parametrize(("end", "code"), [(GOOD, 0), (DONE, 1), (GOOD | {"state": "cancelled", "succeeded": 3}, 1)])
def test_waited_for_it_tells_whether_all_was_done(asked: Script, tocsin: Tocsin, end: Any, code: int) -> None:
    asked.on("POST", PATH, BEGUN)
    asked.on("GET", URL, end)
    told = tocsin("job", "backfill", "nightly", *JANUARY, "--yes", "--wait")
    assert told.exit_code == code
    assert told.stdout.startswith(f"backfill {BEGUN['id']} {end['state']}, 31 runs: {end['succeeded']} succeeded")
    assert tocsin("backfill", "show", BEGUN["id"], "-w").exit_code == code


def test_at_a_terminal_it_asks_and_then_draws_in_place(asked: Script) -> None:
    asked.on("GET", URL, BEGUN, HALF, GOOD)
    outer, inner = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "20"}
    command = [sys.executable, "-m", "tocsin", "job", "backfill", "nightly", *JANUARY]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environ) as filling:
        shown, deadline, answered = "", time.monotonic() + PATIENCE, False
        while "31 succeeded" not in shown.rpartition("Make them?")[2]:
            assert time.monotonic() < deadline, shown
            shown += os.read(outer, 65536).decode()
            if "Make them?" in shown and not answered:
                os.write(outer, b"y\n")
                answered = True
        filling.wait(10)
    os.close(inner)
    os.close(outer)
    assert filling.returncode == 0
    assert "31 runs: 2026-01-01" in shown and "nightly" in shown and "2 live, 9 succeeded, 1 failed" in shown
    assert "\x1b[2K" in shown, "the second picture is drawn over the first"


def test_backfills_are_listed_shown_paused_resumed_and_cancelled(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/backfills", {"items": [HALF], "next_cursor": None})
    listed = tocsin("backfill", "list", "--state", "running", "--job", str(JOB["id"])).stdout
    assert "10 of 31" in listed and "nightly" in listed
    assert script.asked[-1].query == {"state": "running", "job": JOB["id"], "limit": "51"}
    script.on("GET", URL, DONE)
    shown = tocsin("backfill", "show", BEGUN["id"]).stdout
    assert "31 of 31 made: 30 succeeded, 1 failed" in shown and "run r9" in shown
    assert json.loads(tocsin("backfill", "show", BEGUN["id"], "--json").stdout) == DONE
    for verb, past in (("pause", "paused"), ("resume", "resumed"), ("cancel", "cancelled")):
        script.on("POST", f"{URL}/{verb}", HALF)
        told = tocsin("backfill", verb, BEGUN["id"], "--reason", "why")
        assert told.stdout == f"{past} {BEGUN['id']}, 10 of 31 ended\n"
        assert script.asked[-1].body["reason"] == "why"
    tocsin("backfill", "cancel", BEGUN["id"], "--leave-running")
    assert script.asked[-1].body["running"] == "leave"
