"""`tocsin events`: a line for each, for people and for programs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin, problem

from tests import PATIENCE

JOB = "01981f7e-0000-7000-8000-0000000000aa"
RUN = "01981f7e-0000-7000-8000-0000000000bb"
AT = "2026-12-01T09:00:00.000000Z"


def word(id_: str, kind: str, **data: Any) -> bytes:
    return f"id: {id_}\nevent: {kind}\ndata: {json.dumps({'at': AT, **data})}\n\n".encode()


STREAM = b"".join(
    (
        word("1", "open", type="open"),
        word("2", "job", type="job.paused", id=JOB, name="nightly\x1b[31m", version=3, state="paused"),
        word("3", "run", type="run.dead", id=RUN, job_id=JOB, state="dead", attempt=4, outcome="failed"),
        word("4", "reset", type="reset"),
        word("5", "run", type="run.waiting", id=RUN, job_id=JOB, state="waiting", attempt=0, blocked_by="limit"),
    )
)


@pytest.fixture(autouse=True)
def streaming(script: Script) -> None:
    script.on(
        "GET", "/v1/events", Reply(200, STREAM, {"Content-Type": "text/event-stream"}), problem(401, "unauthorized")
    )


def test_people_get_a_line_for_each(tocsin: Tocsin) -> None:
    told = tocsin("events", "--limit", "3")
    assert told.exit_code == 0, told.output
    lines = [line.split()[2:] for line in told.stdout.splitlines()]
    assert lines == [
        ["job.paused", JOB, "nightly", "v3"],
        ["run.dead", RUN, "job", JOB, "try", "4", "failed"],
        ["run.waiting", RUN, "job", JOB, "blocked", "by", "limit"],
    ]
    assert told.stderr.splitlines()[0].startswith("listening") and "were missed" in told.stderr


def test_programs_get_a_document_a_line_with_the_cursor_to_go_on_from(tocsin: Tocsin, script: Script) -> None:
    told = tocsin("events", "--json", "--limit", "2", "--type", "run", "--job", JOB, "--after", "1-2-3-4")
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [(line["cursor"], line["type"]) for line in lines] == [("1", "open"), ("2", "job.paused"), ("3", "run.dead")]
    assert script.asked[0].query == {"type": "run", "job": JOB, "after": "1-2-3-4"}


def test_a_stream_that_is_refused_ends_the_command(tocsin: Tocsin) -> None:
    told = tocsin("events")
    assert told.exit_code == 1 and "TOCSIN_KEY" in told.stderr


def test_at_a_terminal_it_has_colours_and_ctrl_c_ends_it(script: Script) -> None:
    script.on(
        "GET", "/v1/events", Reply(200, STREAM, {"Content-Type": "text/event-stream"}), problem(503, "unavailable")
    )
    outer, inner = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "tocsin", "events"]
    with subprocess.Popen(command, stdout=inner, stderr=subprocess.PIPE, env=environ) as watching:
        shown = ""
        while "run.waiting" not in shown:
            shown += os.read(outer, 65536).decode()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=PATIENCE)
    os.close(inner)
    os.close(outer)
    assert watching.returncode == 130
    assert "\x1b[31m" in shown.split("run.dead")[0].splitlines()[-1], "dead is red"
    assert b"Traceback" not in errors
