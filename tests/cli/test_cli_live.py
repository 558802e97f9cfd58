"""Lists that go on, many dead letters at once, ids for pipes, completion."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin, problem

from tests import PATIENCE
from tocsin.cli.live import Changes
from tocsin.cli.run import COLUMNS


def run(number: int, state: str = "running", attempt: int = 1) -> dict[str, Any]:
    return {"id": f"r{number}", "job_name": "nightly", "state": state, "attempt": attempt}


def items(*found: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(found), "next_cursor": None}


# ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_changes_are_told_oldest_first() -> None:
    changes = Changes(COLUMNS)
    assert changes.of([run(2), run(1)]) == [run(1), run(2)]
    assert changes.of([run(2), run(1)]) == []
    assert changes.of([run(3), run(2, "succeeded"), run(1, attempt=2)]) == [
        run(1, attempt=2),
        run(2, "succeeded"),
        run(3),
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_pipe_there_is_one_line_per_change(script: Script, as_json: bool) -> None:
    script.on("GET", "/v1/runs", items(run(1)), items(run(1)), items(run(1, "succeeded")))
    command = [sys.executable, "-m", "tocsin", "run", "list", "--watch", *(["--json"] if as_json else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(2 if as_json else 3)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 130
    assert "Traceback" not in errors
    if as_json:
        assert [json.loads(line)["state"] for line in lines] == ["running", "succeeded"]
    else:
        assert [line.split()[:3] for line in lines] == [
            ["ID", "JOB", "STATE"],
            ["r1", "nightly", "running"],
            ["r1", "nightly", "succeeded"],
        ]


def test_a_server_that_is_away_for_a_while_is_waited_for(script: Script) -> None:
    gone = [Reply(hang_up=True)] * 5
    script.on("GET", "/v1/runs", items(run(1)), *gone, items(run(1, "succeeded")))
    command = [sys.executable, "-m", "tocsin", "run", "list", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=PATIENCE)
    assert lines[2].split() == ["r1", "nightly", "succeeded", "1"]
    assert errors.count("trying again") == 1
    assert watching.returncode == 130


@pytest.mark.parametrize("no_color", [True, False])
def test_at_a_terminal_it_is_drawn_in_place(script: Script, no_color: bool) -> None:
    script.on("GET", "/v1/runs", items(run(1)), items(run(1, "succeeded")))
    outer, inner = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "20"} | ({"NO_COLOR": "1"} if no_color else {})
    command = [sys.executable, "-m", "tocsin", "run", "list", "-w"]
    with subprocess.Popen(command, stdout=inner, stderr=inner, env=environ) as watching:
        shown, deadline = "", time.monotonic() + PATIENCE
        while "succeeded" not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(outer, 65536).decode()
        watching.send_signal(signal.SIGINT)
        watching.wait(10)
    os.close(inner)
    os.close(outer)
    assert watching.returncode == 130
    assert "\x1b[1A" in shown, "the second picture is drawn over the first"
    assert ("\x1b[32m" in shown) is not no_color
    assert "Traceback" not in shown
    assert script.asked[0].query["limit"] == "17", "no more than the terminal has room for"


# ── many dead letters ────────────────────────────────────────────────────────────────────────────────────────────


def test_redriving_all_goes_page_by_page_and_in_chunks(script: Script, tocsin: Tocsin) -> None:
    pages = [[{"id": f"d{n}"} for n in range(start, start + 400)] for start in (0, 400, 800)]
    replies = [{"items": page, "next_cursor": f"c{i}" if i < 2 else None} for i, page in enumerate(pages)]
    script.on("GET", "/v1/dead-letters", *replies)
    script.on("POST", "/v1/dead-letters/redrive", {"items": []})
    result = tocsin("dead", "redrive", "--all", "--error-class", "Boom")
    assert result.exit_code == 0, result.output
    assert result.stdout == "redriven: 1200\n"
    assert script.asked[0].query == {"error_class": "Boom", "limit": "500"}
    sent = [asked.body["ids"] for asked in script.asked if asked.method == "POST"]
    assert [len(ids) for ids in sent] == [500, 500, 200]
    assert [id_ for ids in sent for id_ in ids] == [f"d{n}" for n in range(1200)]


def test_one_that_is_refused_does_not_hold_up_the_others(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/dead-letters", items(*({"id": f"d{n}"} for n in range(4))))
    no = problem(409, "job_cancelled", "job j is cancelled")
    # all four; the first two; d0; d1; the last two
    script.on("POST", "/v1/dead-letters/redrive", no, no, Reply(200, {}), no, Reply(200, {}))
    result = tocsin("dead", "redrive", "--all")
    assert result.exit_code == 1
    assert result.stdout == "redriven: 3\n"
    assert result.stderr == "refused: d1: job j is cancelled\n"
    sent = [asked.body["ids"] for asked in script.asked if asked.method == "POST"]
    assert sent == [["d0", "d1", "d2", "d3"], ["d0", "d1"], ["d0"], ["d1"], ["d2", "d3"]]


def test_a_rate_is_the_servers_to_keep_in_one_call(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/dead-letters/redrive", {"items": [{"id": "r1"}], "remaining": 7})
    result = tocsin("dead", "redrive", "--all", "--error-class", "Boom", "--rate", "10/s")
    assert result.stdout == "redriven: 1; left: 7, beyond 5,000 or of cancelled jobs\n"
    tocsin("dead", "redrive", "d1", "--rate", "10/s")
    assert [asked.body for asked in script.asked] == [
        {"filter": {"job": None, "error_class": "Boom"}, "rate": "10/s"},
        {"ids": ["d1"], "rate": "10/s"},
    ]


def test_discarding_all_wants_a_yes(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/dead-letters", items({"id": "d1"}, {"id": "d2"}))
    script.on("POST", "/v1/dead-letters/discard", {"discarded": 2})
    assert tocsin("dead", "discard", "--all").exit_code == 2
    assert [asked.method for asked in script.asked] == ["GET"]
    done = tocsin("dead", "discard", "--all", "--yes", "--json")
    assert json.loads(done.stdout) == {"discarded": 2, "refused": []}


@pytest.mark.parametrize(
    "args", [["redrive"], ["discard"], ["redrive", "d1", "--all"], ["redrive", "d1", "--job", "j"]]
)
def test_what_is_meant_must_be_said(tocsin: Tocsin, script: Script, args: list[str]) -> None:
    assert tocsin("dead", *args).exit_code == 2
    assert script.asked == []


def test_at_a_terminal_there_is_a_progress_bar(script: Script) -> None:
    script.on("GET", "/v1/dead-letters", items(*({"id": f"d{n}"} for n in range(1000))))
    script.on("POST", "/v1/dead-letters/redrive", {})
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "tocsin", "dead", "redrive", "--all"]
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=inner, env=environ, check=True, text=True)
    os.close(inner)
    shown = os.read(outer, 65536).decode()
    os.close(outer)
    assert "/1000" in shown
    assert done.stdout == "redriven: 1000\n"


# ── for pipes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ids_alone(script: Script, tocsin: Tocsin) -> None:
    job = "01981f7e-0000-7000-8000-0000000000aa"
    for path in ("/v1/runs", "/v1/jobs", "/v1/dead-letters"):
        script.on("GET", path, items(run(2), run(1)))
    script.on("POST", f"/v1/jobs/{job}/runs", run(3)).on("POST", "/v1/runs/r1/retry", run(4))
    script.on("POST", "/v1/jobs", run(5))
    for noun in ("run", "job", "dead"):
        assert tocsin(noun, "list", "--ids").stdout == "r2\nr1\n"
    assert tocsin("job", "run", job, "--ids").stdout == "r3\n"
    assert tocsin("run", "retry", "r1", "--ids").stdout == "r4\n"
    assert tocsin("job", "create", "--ids", "--", "true").stdout == "r5\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tocsin: Tocsin, shell: str) -> None:
    shown = tocsin("completion", shell)
    assert shown.exit_code == 0
    assert f"_TOCSIN_COMPLETE=complete_{shell}" in shown.stdout


def test_bash_completes_commands_and_options() -> None:
    def complete(words: str, number: int) -> list[str]:
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(number), "_TOCSIN_COMPLETE": "complete_bash"}
        done = subprocess.run(
            [sys.executable, "-c", "import sys; sys.argv[0] = 'tocsin'; from tocsin.cli.main import main; main()"],
            env=os.environ | asked,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        return done.stdout.split()

    assert complete("tocsin do", 1) == ["doctor"]
    assert complete("tocsin run re", 2) == ["retry"]
    assert complete("tocsin run list --wa", 3) == ["--watch"]


def test_help_tells_the_exit_codes(tocsin: Tocsin) -> None:
    shown = " ".join(tocsin("--help").stdout.split())
    for words in ("0 done", "1 refused", "2 wrong usage", "3 the server cannot be reached", "130 interrupted"):
        assert words in shown
    assert "NO_COLOR" in shown
