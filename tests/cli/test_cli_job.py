from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin, problem

JOB_ID = "01981f7e-0000-7000-8000-000000000001"
OLD_ID = "01981f7e-0000-7000-8000-000000000000"


def job(**fields: Any) -> dict[str, Any]:
    return {
        "id": JOB_ID,
        "name": "nightly",
        "tenant": "default",
        "state": "active",
        "version": 1,
        "schedule": {"cron": "0 9 * * *", "timezone": "UTC", "description": "every day at 9:00"},
        "target": {"kind": "process", "command": ["echo", "hi"]},
        "next_run_at": "2036-12-01T09:00:00.000000Z",
        "last_run": {"id": "r", "state": "succeeded", "finished_at": "2020-01-01T00:00:00.000000Z"},
        "tags": {"team": "blue"},
    } | fields


CREATED: list[tuple[list[str], dict[str, Any]]] = [
    (["--", "echo", "--hi"], {"target": {"kind": "process", "command": ["echo", "--hi"]}}),
    (
        ["--shell", "--no-sandbox", "--", "ls $1 | wc -l", "/tmp"],
        {"target": {"kind": "process", "command": ["ls $1 | wc -l", "/tmp"], "shell": True, "sandbox": False}},
    ),
    (
        ["--name", "n", "--cron", "0 9 * * *", "--tz", "Europe/Paris", "--", "true"],
        {
            "name": "n",
            "schedule": {"cron": "0 9 * * *", "timezone": "Europe/Paris"},
            "target": {"kind": "process", "command": ["true"]},
        },
    ),
    (
        ["--text", "every weekday at 9am", "--until", "2030-01-01T00:00:00Z", "--jitter", "5m", "--", "true"],
        {
            "schedule": {"text": "every weekday at 9am", "until": "2030-01-01T00:00:00Z", "jitter": "5m"},
            "target": {"kind": "process", "command": ["true"]},
        },
    ),
    (
        ["--after", "extract", "--after", "check:failure", "--", "true"],
        {
            "depends_on": [{"job": "extract"}, {"job": "check", "on": "failure"}],
            "target": {"kind": "process", "command": ["true"]},
        },
    ),
    (
        ["--rrule", "FREQ=DAILY", "--", "true"],
        {"schedule": {"rrule": "FREQ=DAILY"}, "target": {"kind": "process", "command": ["true"]}},
    ),
    (
        [
            *("--cpu", "0.5", "--memory", "1.5g", "--gpus", "1", "--require", "arch=arm64", "--require", "os=linux"),
            *("--prefer", "region=eu", "--", "true"),
        ],
        {
            "resources": {"cpu": 0.5, "memory_mb": 1536, "gpus": 1},
            "placement": {"require": {"arch": "arm64", "os": "linux"}, "prefer": {"region": "eu"}},
            "target": {"kind": "process", "command": ["true"]},
        },
    ),
    (
        ["--manual", "--python", "reports.daily", "--kwargs", '{"day": 1}'],
        {"schedule": {"manual": True}, "target": {"kind": "python", "function": "reports.daily", "kwargs": {"day": 1}}},
    ),
    (
        [
            *("--http", "https://x.example/{args.id}", "--method", "PUT", "--header", "X-A=b=c", "--body", '{"n": 1}'),
            *("--secret", "KEY=stored"),
        ],
        {
            "target": {
                "kind": "http",
                "url": "https://x.example/{args.id}",
                "method": "PUT",
                "headers": {"X-A": "b=c"},
                "body": {"n": 1},
            },
            "secrets": {"KEY": "stored"},
        },
    ),
    (["--image", "alpine:3"], {"target": {"kind": "container", "image": "alpine:3"}}),
    (
        ["--image", "alpine:3", "--network", "bridge", "--env", "X=1", "--memory", "64m", "--", "echo", "hi"],
        {
            "target": {
                "kind": "container",
                "image": "alpine:3",
                "command": ["echo", "hi"],
                "env": {"X": "1"},
                "network": "bridge",
            },
            "resources": {"memory_mb": 64},
        },
    ),
    (
        [
            *("--every", "5m", "--priority", "0", "--timeout", "1h", "--max-attempts", "1", "--overlap", "queue"),
            *("--max-concurrency", "2", "--pool", "p", "--tag", "a=b=c", "--tag", "d=", "--env", "X=1"),
            *("--cwd", "/tmp", "--description", "words", "--", "true"),
        ],
        {
            "schedule": {"every": "5m"},
            "priority": 0,
            "timeout": "1h",
            "retry": {"max_attempts": 1},
            "overlap": "queue",
            "max_concurrency": 2,
            "pool": "p",
            "tags": {"a": "b=c", "d": ""},
            "target": {"kind": "process", "command": ["true"], "env": {"X": "1"}, "cwd": "/tmp"},
            "description": "words",
        },
    ),
]


@pytest.mark.parametrize(("flags", "sent"), CREATED)
def test_flags_become_a_document(script: Script, tocsin: Tocsin, flags: list[str], sent: dict[str, Any]) -> None:
    script.on("POST", "/v1/jobs", Reply(201, job()))
    result = tocsin("job", "create", "--json", *flags)
    assert result.exit_code == 0, result.output
    assert script.asked[0].body == sent
    assert json.loads(result.stdout) == job()


@pytest.mark.parametrize("source", ["file", "-"])
def test_a_document_may_come_from_a_file(script: Script, tocsin: Tocsin, tmp_path: Path, source: str) -> None:
    script.on("POST", "/v1/jobs", Reply(201, job()))
    document = {"target": {"kind": "process", "command": ["true"]}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    result = tocsin("job", "create", "--file", str(path) if source == "file" else "-", input=json.dumps(document))
    assert result.exit_code == 0, result.output
    assert script.asked[0].body == document
    assert "every day at 9:00" in result.stdout


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--name", "n"],
        ["--cron", "* * * * *", "--every", "5m", "--", "true"],
        ["--tz", "UTC", "--", "true"],
        ["--python", "f", "--", "true"],
        ["--python", "f", "--kwargs", "[1]"],
        ["--python", "f", "--kwargs", "{"],
        ["--kwargs", "{}", "--", "true"],
        ["--python", "f", "--env", "A=B"],
        ["--python", "f", "--shell"],
        ["--sandbox"],
        ["--http", "http://x", "--", "true"],
        ["--http", "http://x", "--python", "f"],
        ["--http", "http://x", "--env", "A=B"],
        ["--http", "http://x", "--body", "{"],
        ["--method", "GET", "--", "true"],
        ["--image", "alpine", "--python", "f"],
        ["--image", "alpine", "--http", "http://x"],
        ["--image", "alpine", "--shell", "--", "true"],
        ["--network", "none", "--", "true"],
        ["--env", "A=B"],
        ["--tag", "novalue", "--", "true"],
        ["--file", "/does/not/exist"],
        ["--file", "-", "--name", "n"],
        ["--priority", "high", "--", "true"],
    ],
)
def test_wrong_usage_is_told_before_anything_is_sent(script: Script, tocsin: Tocsin, flags: list[str]) -> None:
    result = tocsin("job", "create", *flags, input="{}")
    assert result.exit_code == 2, result.output
    assert "Error" in result.stderr
    assert script.asked == []


def test_a_list_is_aligned_in_a_pipe(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/jobs", {"items": [job(), job(name=None, schedule=None, last_run=None)], "next_cursor": None})
    result = tocsin("job", "list", "--tag", "team=blue")
    header, first, second = result.stdout.splitlines()
    assert script.asked[0].query == {"limit": "51", "tag": "team:blue"}
    assert header.split() == ["ID", "NAME", "STATE", "SCHEDULE", "NEXT", "RUN", "LAST", "RUN"]
    assert header.index("STATE") == first.index("active") == second.index("active")
    assert "every day at 9:00" in first
    assert " in " in first
    assert "succeeded" in first
    assert " once" in second
    assert "\x1b" not in result.stdout


def test_a_list_stops_at_its_limit_and_says_so(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/jobs", {"items": [job(), job(), job()], "next_cursor": "c"})
    assert json.loads(tocsin("job", "list", "--limit", "2", "--json").stdout) == {"items": [job(), job()], "more": True}
    assert "more with --limit" in tocsin("job", "list", "--limit", "2").stderr


def test_all_pages_of_a_list(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/jobs", {"items": [job()], "next_cursor": "c"}, {"items": [job()], "next_cursor": None})
    shown = json.loads(tocsin("job", "list", "--limit", "0", "--json").stdout)
    assert len(shown["items"]) == 2
    assert shown["more"] is False


def test_a_job_is_found_by_id_without_a_search(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", f"/v1/jobs/{JOB_ID}", job())
    result = tocsin("job", "show", JOB_ID)
    assert result.exit_code == 0
    assert len(script.asked) == 1
    assert "team=blue" in result.stdout


def test_a_name_means_exactly_that_job(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/jobs/by-name/nightly", job())
    script.on("POST", f"/v1/jobs/{JOB_ID}/pause", job(state="paused"))
    result = tocsin("job", "pause", "nightly", "--reason", "holiday")
    assert result.stdout == f"paused nightly {JOB_ID}\n"
    assert script.asked[-1].body == {"reason": "holiday"}


def test_an_ended_job_is_found_last(script: Script, tocsin: Tocsin) -> None:
    ended = [job(id=OLD_ID, name="nightly-report"), job(state="completed")]
    script.on("GET", "/v1/jobs", {"items": ended, "next_cursor": None})
    assert json.loads(tocsin("job", "show", "nightly", "--json").stdout)["state"] == "completed"
    assert [asked.path for asked in script.asked] == ["/v1/jobs/by-name/nightly", "/v1/jobs"]


def test_an_unknown_name(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/jobs", {"items": [], "next_cursor": None})
    result = tocsin("job", "show", "nightly")
    assert result.exit_code == 1
    assert "no job named 'nightly' [not_found]" in result.stderr


@pytest.mark.parametrize(
    ("args", "call", "body"),
    [
        (["pause"], ("POST", "/pause"), {"reason": ""}),
        (["resume"], ("POST", "/resume"), {"reason": ""}),
        (["cancel", "--reason", "r"], ("POST", "/cancel"), {"reason": "r", "running": "stop"}),
        (["cancel", "--leave-running"], ("POST", "/cancel"), {"reason": "", "running": "leave"}),
        (["delete"], ("DELETE", ""), None),
        (["run"], ("POST", "/runs"), {}),
        (["run", "--args", '{"n": 1}', "--priority", "9"], ("POST", "/runs"), {"args": {"n": 1}, "priority": 9}),
        (["run", "--at", "2030-01-01T00:00:00Z"], ("POST", "/runs"), {"at": "2030-01-01T00:00:00Z"}),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_actions(
    script: Script, tocsin: Tocsin, args: list[str], call: tuple[str, str], body: Any, as_json: bool
) -> None:
    script.on(call[0], f"/v1/jobs/{JOB_ID}{call[1]}", job())
    verb, *options = args
    result = tocsin("job", verb, JOB_ID, *options, *(["--json"] if as_json else []))
    assert result.exit_code == 0, result.output
    assert script.asked[0].body == body
    assert "idempotency-key" in script.asked[0].headers
    assert json.loads(result.stdout) == job() if as_json else JOB_ID in result.stdout


def test_arguments_of_a_run_must_be_an_object(script: Script, tocsin: Tocsin) -> None:
    result = tocsin("job", "run", JOB_ID, "--args", "[1]")
    assert result.exit_code == 2
    assert "--args" in result.stderr
    assert script.asked == []


def test_a_refusal_names_each_field(script: Script, tocsin: Tocsin) -> None:
    wrong = [{"path": "timeout", "code": "invalid", "message": "too \x1b[31mlong"}]
    script.on("POST", "/v1/jobs", problem(422, "invalid_input", "not acceptable", errors=wrong))
    result = tocsin("job", "create", "--", "true")
    assert result.exit_code == 1
    assert result.stderr == "tocsin: not acceptable; timeout: too long [invalid_input]\n"
    assert result.stdout == ""
