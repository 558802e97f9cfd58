"""`tocsin workflow`: stored from files, run, followed, drawn, retried and stopped."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin, problem

from tests import PATIENCE

WORKFLOW_ID = "01900000-0000-7000-8000-000000000001"
RUN_ID = "01900000-0000-7000-8000-000000000002"
PATH, RUN_PATH = f"/v1/workflows/{WORKFLOW_ID}", f"/v1/workflow-runs/{RUN_ID}"
TARGET = {"kind": "process", "command": ["true"], "env": {}, "cwd": None, "stdin": None, "shell": False}
JOBS = {
    "extract": {"target": TARGET},
    "load": {"target": TARGET, "depends_on": ["extract"]},
    "alarm": {"target": TARGET, "depends_on": [{"job": "load", "on": "failure"}]},
}
WORKFLOW: dict[str, Any] = {
    **{"id": WORKFLOW_ID, "name": "nightly", "tenant": "default", "version": 1, "state": "active", "jobs": JOBS},
    **{"schedule": {"cron": "0 2 * * *", "timezone": "UTC", "description": "at 02:00 every day"}, "priority": 500},
    **{"timeout": "P7D", "start_deadline": None, "overlap": "skip", "max_concurrency": None, "tags": {}},
    **{"description": "", "created_at": "2026-11-01T00:00:00.000000Z", "updated_at": "2026-11-01T00:00:00.000000Z"},
    **{"next_run_at": None, "estimated_start_at": None, "last_run": None, "stats": {}},
}
JOB = {"id": WORKFLOW_ID, "name": "nightly", "version": 1, "schedule": {"timezone": "UTC"}}
YAML = """\
name: nightly
jobs:
  extract: {target: {kind: process, command: ["true"]}}
  load:
    target: {kind: process, command: ["true"]}
    depends_on: [extract, nobody]
"""


def node(name: str, layer: int, state: str = "waiting", **more: Any) -> dict[str, Any]:
    found = dict.fromkeys(("reason", "blocked_by", "started_at", "finished_at", "duration_ms", "error", "elements"))
    found |= {"name": name, "layer": layer, "run_id": f"run-of-{name}", "state": state, "attempt": 0}
    if state not in ("waiting", "skipped"):
        found |= {"started_at": "2026-11-01T00:00:00.000000Z", "attempt": 1}
    if state in ("succeeded", "dead"):
        found |= {"finished_at": "2026-11-01T00:00:02.000000Z", "duration_ms": 2000.0}
    return found | more


def run(state: str, extract: str, load: str, alarm: str, **more: Any) -> dict[str, Any]:
    nodes = [node("extract", 0, extract), node("load", 1, load), node("alarm", 2, alarm)]
    if load == "dead":
        nodes[1]["error"] = {"class": "Boom", "message": "no\nat all"}
    path = [each["name"] for each in nodes if each["duration_ms"]]
    states = [each["state"] for each in nodes]
    return {
        **{"id": RUN_ID, "workflow_id": WORKFLOW_ID, "workflow_name": "nightly", "workflow_version": 1},
        **{"state": state, "reason": None, "blocked_by": None, "trigger": "api", "args": {"day": 1}, "retries": 0},
        **{"scheduled_for": None, "logical_at": None, "started_at": "2026-11-01T00:00:00.000000Z"},
        **{"finished_at": None, "duration_ms": None, "error": None, "head_run_id": RUN_ID},
        "progress": {state: states.count(state) for state in states},
        "nodes": nodes,
        "edges": [
            {"from": "extract", "to": "load", "on": "success"},
            {"from": "load", "to": "alarm", "on": "failure"},
        ],
        "critical_path": {"nodes": path, "duration_ms": 2000.0 * len(path)},
        "now": "2026-11-01T00:00:05.000000Z",
    } | more


BEGUN = run("ready", "waiting", "waiting", "waiting")
GOES = run("running", "succeeded", "running", "waiting")
GOOD = run("succeeded", "succeeded", "succeeded", "skipped", duration_ms=4000.0)
BAD = run("dead", "succeeded", "dead", "succeeded", error={"class": "workflow_failed", "message": "load is dead"})


def items(*found: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(found), "next_cursor": None}


@pytest.fixture
def server(script: Script) -> Script:
    """One that knows the workflow, and a run that goes on each time it is looked at."""
    script.on("GET", "/v1/jobs/by-name/nightly", JOB).on("GET", PATH, WORKFLOW)
    script.on("POST", f"{PATH}/runs", Reply(202, BEGUN)).on("GET", RUN_PATH, BEGUN, GOES, GOOD)
    return script


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_made_changed_or_left(server: Script, tocsin: Tocsin, tmp_path: Path) -> None:
    file = tmp_path / "nightly.yaml"
    file.write_text(YAML.replace(", nobody", ""))
    server.on("GET", "/v1/jobs/by-name/nightly", problem(404, "not_found"), JOB)
    put = "/v1/workflows/by-name/nightly"
    server.on("PUT", put, WORKFLOW, WORKFLOW, WORKFLOW | {"version": 2})
    said = [tocsin("workflow", "apply", str(file)).stdout.split(" ")[0] for _ in range(3)]
    assert said == ["created", "unchanged", "changed"]
    sent = next(asked for asked in server.asked if asked.method == "PUT")
    assert sent.body["jobs"]["load"]["depends_on"] == ["extract"]
    told = tocsin("workflow", "apply", str(file), "--json")
    assert json.loads(told.stdout)["items"][0]["version"] == 2


def test_what_the_server_refuses_is_told_with_its_line(server: Script, tocsin: Tocsin, tmp_path: Path) -> None:
    file = tmp_path / "nightly.yaml"
    file.write_text(YAML + "---\n" + YAML)
    errors = [
        {"path": "jobs.load.depends_on[1]", "code": "unknown_job", "message": "there is no job 'nobody'"},
        {"path": "jobs.load.target.cwd", "code": "invalid", "message": "is no folder"},
    ]
    server.on("PUT", "/v1/workflows/by-name/nightly", problem(422, "invalid", errors=errors))
    told = tocsin("workflow", "apply", str(file))
    assert told.exit_code == 1 and told.stdout == ""
    assert told.stderr.splitlines() == [
        f"{file}:6: jobs.load.depends_on[1]: there is no job 'nobody'",
        f"{file}:5: jobs.load.target.cwd: is no folder",
        f"{file}:13: jobs.load.depends_on[1]: there is no job 'nobody'",
        f"{file}:12: jobs.load.target.cwd: is no folder",
    ]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "name: a\njobs: {a: 1, a: 2}\n", ":2: the key 'a' stands twice"),
        ("a.yaml", "- name: a\n", ":1: a workflow is an object with a name, and with jobs"),
        ("a.yaml", "\njobs: {}\n", ":2: a workflow is an object with a name, and with jobs"),
        ("a.yaml", "# nothing\n", ": holds no workflow"),
    ],
)
def test_nothing_is_stored_if_a_file_cannot_be_read(
    server: Script, tocsin: Tocsin, tmp_path: Path, name: str, text: str, told: str
) -> None:
    bad, good = tmp_path / name, tmp_path / "good.yaml"
    bad.write_text(text)
    good.write_text(YAML)
    done = tocsin("workflow", "apply", str(good), str(bad))
    assert (done.exit_code, done.stderr) == (1, f"{bad}{told}\n")
    assert server.asked == []


def test_json_is_read_as_json(server: Script, tocsin: Tocsin, tmp_path: Path) -> None:
    file = tmp_path / "nightly.json"
    file.write_text('{\n\t"name": "nightly",\n\t"description": "\\ud83d\\ude00",\n\t"jobs": {}\n}')
    server.on("PUT", "/v1/workflows/by-name/nightly", WORKFLOW)
    assert tocsin("workflow", "apply", str(file)).exit_code == 0
    assert server.asked[-1].body == {"name": "nightly", "description": "😀", "jobs": {}}
    file.write_text('{"name": "nightly", "name": "again"}')
    assert tocsin("workflow", "apply", str(file)).exit_code == 2


def test_an_exported_workflow_is_what_its_owner_wrote(server: Script, tocsin: Tocsin, tmp_path: Path) -> None:
    told = tocsin("workflow", "export", "nightly")
    assert told.stdout.startswith("name: nightly\nschedule: {cron: 0 2 * * *}\njobs:\n  extract:\n    target:\n")
    server.on("PUT", "/v1/workflows/by-name/nightly", WORKFLOW)
    for option, ending in (((), "yaml"), (("--json",), "json")):
        file = tmp_path / f"nightly.{ending}"
        file.write_text(tocsin("workflow", "export", "nightly", *option).stdout)
        tocsin("workflow", "apply", str(file))
        bare = {"kind": "process", "command": ["true"]}
        assert server.asked[-1].body == {
            "name": "nightly",
            "schedule": {"cron": "0 2 * * *"},
            "jobs": {name: job | {"target": bare} for name, job in JOBS.items()},
        }


# ── seeing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_workflow_is_drawn(server: Script, tocsin: Tocsin) -> None:
    shown = tocsin("workflow", "show", "nightly").stdout
    assert shown.splitlines()[-1] == "extract ─► load ─► alarm on failure"
    assert "schedule  at 02:00 every day" in shown
    assert json.loads(tocsin("workflow", "show", WORKFLOW_ID, "--json").stdout) == WORKFLOW


def test_a_run_is_drawn_with_its_states_and_what_failed(server: Script, tocsin: Tocsin) -> None:
    server.on("GET", RUN_PATH, BAD).on("GET", "/v1/workflow-runs", items(BAD))
    for asked in ((RUN_ID,), ("nightly", "--last")):
        shown = tocsin("workflow", "show", *asked)
        assert shown.exit_code == 0
        assert shown.stdout.partition("\n\n")[2].splitlines() == [
            "✓ extract 2 s ─► ✗ load 2 s ─► ✓ alarm 2 s",
            "",
            "load: Boom: no  run run-of-load",
            "critical path 6 s: extract 2 s → load 2 s → alarm 2 s",
            f"tocsin workflow retry {RUN_ID} runs again what did not succeed",
        ]
    assert json.loads(tocsin("workflow", "show", RUN_ID, "--json").stdout) == BAD
    several = [node | {"state": "dead"} for node in BAD["nodes"]]
    server.on("GET", RUN_PATH, BAD | {"nodes": several})
    shown = tocsin("workflow", "show", RUN_ID)
    assert "tocsin run retry RUN runs again one of these" in shown.stdout.splitlines()[-1]


def test_elements_tries_and_blocks_are_told(server: Script, tocsin: Tocsin) -> None:
    changed = run("running", "succeeded", "running", "waiting")
    changed["nodes"][1] |= {"elements": {"succeeded": 3, "running": 2, "ready": 5}, "attempt": 2}
    changed["nodes"][2] |= {"blocked_by": "paused"}
    server.on("GET", RUN_PATH, changed)
    drawing = tocsin("workflow", "show", RUN_ID).stdout.partition("\n\n")[2].splitlines()[0]
    assert drawing == "✓ extract 2 s ─► ● load 3/10, try 2, 5 s ─► · alarm paused, on failure"


def test_without_unicode_it_is_drawn_in_ascii(server: Script) -> None:
    server.on("GET", RUN_PATH, BAD)
    command = [sys.executable, "-m", "tocsin", "workflow", "show", RUN_ID]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=environ, capture_output=True, check=True).stdout.decode("ascii")
    assert "+ extract 2 s -> x load 2 s -> + alarm 2 s" in shown
    assert "extract 2 s > load 2 s" in shown


def test_too_narrow_for_a_drawing_it_is_a_list(server: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    server.on("GET", RUN_PATH, BAD)
    monkeypatch.setenv("COLUMNS", "40")
    assert "✓ extract ─► ✗ load ─► ✓ alarm" in tocsin("workflow", "show", RUN_ID).stdout
    monkeypatch.setenv("COLUMNS", "29")
    assert tocsin("workflow", "show", RUN_ID).stdout.partition("\n\n")[2].splitlines()[:3] == [
        "   0  ✓ extract 2 s",
        "   1  ✗ load 2 s     after extract",
        "   2  ✓ alarm 2 s    after load",
    ]


def test_of_ten_thousand_there_is_a_summary(server: Script, tocsin: Tocsin) -> None:
    fan = [node("first", 0, "succeeded"), *(node(f"n{n}", 1, "running") for n in range(9_998)), node("last", 2)]
    fan[5] = node("bad", 1, "dead", error={"class": "Boom", "message": "no"})
    edges = [{"from": "first", "to": each["name"], "on": "success"} for each in fan[1:-1]]
    edges += [{"from": each["name"], "to": "last", "on": "success"} for each in fan[1:-1]]
    server.on("GET", RUN_PATH, GOES | {"nodes": fan, "edges": edges})
    lines = tocsin("workflow", "show", RUN_ID).stdout.partition("\n\n")[2].splitlines()
    assert lines[:4] == [
        "layer   0  jobs      1  ✓ 1 succeeded",
        "layer   1  jobs  9,998  ✗ 1 dead  ● 9,997 running",
        "layer   2  jobs      1  · 1 waiting",
        "✗ bad 2 s  Boom: no",
    ]
    assert len(lines) < 80 and "and 9,944 more jobs" in lines


def test_lists(server: Script, tocsin: Tocsin) -> None:
    server.on("GET", "/v1/workflows", items(WORKFLOW)).on("GET", "/v1/workflow-runs", items(BAD, GOOD))
    shown = tocsin("workflow", "list", "--state", "active", "-q", "night").stdout
    assert "nightly  active  3     at 02:00 every day" in shown
    assert server.asked[-1].query == {"state": "active", "q": "night", "limit": "51"}
    assert "workflow_failed: load is dead" in tocsin("workflow", "list", "--runs").stdout
    assert tocsin("workflow", "list", "--workflow", "nightly", "--ids").stdout == f"{RUN_ID}\n" * 2
    assert server.asked[-1].query == {"workflow": WORKFLOW_ID, "limit": "51"}
    assert json.loads(tocsin("workflow", "list", "--runs", "--json").stdout) == {"items": [BAD, GOOD], "more": False}


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_asked_for(server: Script, tocsin: Tocsin) -> None:
    told = tocsin("workflow", "run", "nightly", "--args", '{"day": 1}', "--priority", "7")
    assert told.stdout == f"run {RUN_ID} ready; tocsin workflow show -f {RUN_ID}\n"
    assert server.asked[-1].body == {"args": {"day": 1}, "priority": 7}
    assert tocsin("workflow", "run", "nightly", "--ids").stdout == f"{RUN_ID}\n"
    assert json.loads(tocsin("workflow", "run", WORKFLOW_ID, "--json").stdout) == BEGUN


def test_in_a_pipe_each_change_is_a_line(server: Script, tocsin: Tocsin) -> None:
    told = tocsin("workflow", "run", "nightly", "--follow")
    assert told.exit_code == 0
    assert [line.partition("  ")[2] for line in told.stdout.splitlines()[:-1]] == [
        "nightly  ready",
        "extract  succeeded  2 s",
        "load  running",
        "nightly  running",
        "load  succeeded  2 s",
        "alarm  skipped",
        "nightly  succeeded",
    ]
    assert told.stdout.splitlines()[-1] == "critical path 4 s: extract 2 s → load 2 s"


@pytest.mark.parametrize(("end", "code"), [(GOOD, 0), (BAD, 1)])
def test_the_exit_code_is_that_of_the_run(server: Script, tocsin: Tocsin, end: Any, code: int) -> None:
    server.on("GET", RUN_PATH, end).on("GET", f"/v1/runs/{RUN_ID}", {"id": RUN_ID, "state": end["state"]})
    server.on("POST", f"{RUN_PATH}/retry", Reply(202, BEGUN))
    assert tocsin("workflow", "run", "nightly", "-f").exit_code == code
    assert tocsin("workflow", "show", RUN_ID, "-f").exit_code == code
    assert tocsin("workflow", "retry", RUN_ID, "-f").exit_code == code
    told = tocsin("workflow", "run", "nightly", "--wait")
    why = "" if code == 0 else ": workflow_failed: load is dead"
    assert (told.exit_code, told.stdout) == (code, f"run {RUN_ID} {end['state']}{why}\n")
    for words in (("run", "nightly", "-f"), ("show", RUN_ID, "-f")):
        told = tocsin("workflow", *words, "--json")
        assert (told.exit_code, json.loads(told.stdout)) == (code, end)


def test_a_retry_is_waited_for_by_the_head_that_it_goes_on_with(server: Script, tocsin: Tocsin) -> None:
    head = "01900000-0000-7000-8000-000000000003"
    server.on("POST", f"{RUN_PATH}/retry", Reply(202, GOES)).on("GET", RUN_PATH, GOES | {"head_run_id": head}, GOOD)
    server.on("GET", f"/v1/runs/{head}", {"id": head, "state": "succeeded"})
    told = tocsin("workflow", "retry", RUN_ID, "--wait")
    assert (told.exit_code, told.stdout) == (0, f"run {RUN_ID} succeeded\n"), told.output


def test_at_a_terminal_it_is_drawn_in_place(server: Script) -> None:
    outer, inner = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "20", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "tocsin", "workflow", "run", "nightly", "-f"]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environ) as following:
        shown, deadline = b"", time.monotonic() + PATIENCE
        while b"critical path" not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(outer, 65536)
        following.wait(10)
    os.close(inner)
    os.close(outer)
    assert following.returncode == 0
    text = shown.decode()
    assert "\x1b[1A" in text, "the second picture is drawn over the first"
    assert "\x1b[36m● load 5 s" in text and "\x1b[32m✓ load 2 s" in text
    assert "Traceback" not in text


def test_who_looks_away_leaves_the_run_alone(server: Script) -> None:
    server.on("GET", RUN_PATH, GOES)
    command = [sys.executable, "-m", "tocsin", "workflow", "run", "nightly", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert "extract" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=PATIENCE)
    assert following.returncode == 130
    assert f"it goes on; tocsin workflow show -f {RUN_ID}, or cancel {RUN_ID}" in errors
    assert not [asked for asked in server.asked if asked.path.endswith("/cancel")]


# ── changing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_by_name_the_last_run_is_retried_and_the_one_that_lives_is_cancelled(server: Script, tocsin: Tocsin) -> None:
    server.on("POST", f"{RUN_PATH}/retry", Reply(202, GOES)).on("POST", f"{RUN_PATH}/cancel", GOES)
    ended = GOOD | {"id": "01900000-0000-7000-8000-000000000009"}
    server.on("GET", "/v1/workflow-runs", items(BAD))
    assert tocsin("workflow", "retry", "nightly").stdout.startswith(f"run {RUN_ID} running again; ")
    server.on("GET", "/v1/workflow-runs", items(ended, GOES))
    assert tocsin("workflow", "cancel", "nightly", "--reason", "why").stdout == f"run {RUN_ID} is running\n"
    assert server.asked[-1].body == {"reason": "why"}
    server.on("GET", "/v1/workflow-runs", items(ended))
    assert tocsin("workflow", "cancel", "nightly").exit_code == 1
    server.on("GET", "/v1/workflow-runs", items(GOES, GOES))
    told = tocsin("workflow", "cancel", "nightly")
    assert told.exit_code == 2 and "several runs that live" in told.stderr
    assert [asked.path for asked in server.asked if asked.method == "POST"] == [
        f"{RUN_PATH}/retry",
        f"{RUN_PATH}/cancel",
    ]


def test_pause_resume_and_delete(server: Script, tocsin: Tocsin) -> None:
    for verb in ("pause", "resume"):
        server.on("POST", f"{PATH}/{verb}", WORKFLOW)
        told = tocsin("workflow", verb, "nightly", "--reason", "why", "--if-match", "3")
        assert told.stdout == f"{verb.removesuffix('e')}ed nightly {WORKFLOW_ID}\n"
        assert server.asked[-1].body == {"reason": "why"} and server.asked[-1].headers["if-match"] == '"3"'
    server.on("DELETE", PATH, WORKFLOW)
    assert json.loads(tocsin("workflow", "delete", "nightly", "--json").stdout) == WORKFLOW


def test_a_past_range_is_counted(server: Script, tocsin: Tocsin) -> None:
    counted = {"total": 2, "too_many": False, "first": ["2026-01-01T02:00:00Z", "2026-01-02T02:00:00Z"], "last": None}
    server.on("POST", f"/v1/jobs/{WORKFLOW_ID}/backfill", counted)
    told = tocsin("workflow", "backfill", "nightly", "--from", "2026-01-01", "--to", "2026-01-03", "--dry-run")
    assert told.exit_code == 0 and told.stdout.startswith("2 runs: ")
