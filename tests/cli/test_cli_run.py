from __future__ import annotations

import json
from typing import Any

from scripted import Reply, Script, Tocsin

from tocsin.cli.run import follow_logs
from tocsin.client import Client

RUN_ID = "01981f7e-0000-7000-8000-0000000000aa"
RUN = f"/v1/runs/{RUN_ID}"


def run(state: str = "succeeded", attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "id": RUN_ID,
        "job_id": "j",
        "job_name": "nightly",
        "job_version": 1,
        "state": state,
        "attempt": attempt,
        "scheduled_for": "2026-12-01T09:00:00.000000Z",
        "duration_ms": 4200,
        "start_lag_ms": 3,
        "error": None,
    } | fields


def line(seq: int, text: str) -> dict[str, Any]:
    return {"seq": seq, "ts": "2026-12-01T09:00:00.000000Z", "stream": "stdout", "level": "info", "text": text}


def lines(*found: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(found), "next_after": None}


def test_a_list_explains_itself(script: Script, tocsin: Tocsin) -> None:
    dead = run("dead", 4, error={"class": "ValueError", "message": "bad\nday"})
    script.on(
        "GET",
        "/v1/runs",
        {
            "items": [dead, run("waiting", 0, blocked_by="limit"), run("skipped", 0, reason="coalesced", count=7)],
            "next_cursor": None,
        },
    )
    result = tocsin("run", "list", "--state", "dead", "--from", "2026-01-01T00:00:00Z")
    assert script.asked[0].query == {"state": "dead", "from": "2026-01-01T00:00:00Z", "limit": "51"}
    _, first, second, third = result.stdout.splitlines()
    assert "ValueError: bad" in first and "day" not in first, "one line; the rest is for `run show --json`"
    assert "4.2 s" in first
    assert "blocked by limit" in second
    assert "coalesced ×7" in third


def test_a_list_of_a_named_job(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/jobs", {"items": [{"id": "j1", "name": "nightly"}], "next_cursor": None})
    script.on("GET", "/v1/runs", {"items": [], "next_cursor": None})
    result = tocsin("run", "list", "--job", "nightly", "--json")
    assert json.loads(result.stdout) == {"items": [], "more": False}
    assert script.asked[-1].query["job"] == "j1"


def test_one_run_with_its_attempts(script: Script, tocsin: Tocsin) -> None:
    attempt = {"attempt": 1, "outcome": "failed", "exit_code": 3}
    script.on("GET", RUN, run()).on("GET", f"{RUN}/attempts", {"items": [attempt]})
    shown = tocsin("run", "show", RUN_ID, "--attempts").stdout
    assert "nightly j v1" in shown
    assert "failed" in shown
    assert json.loads(tocsin("run", "show", RUN_ID, "--attempts", "--json").stdout) == run(attempts=[attempt])
    assert json.loads(tocsin("run", "show", RUN_ID, "--json").stdout) == run()


def test_of_a_large_result_the_beginning_is_shown_and_machines_get_all(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", RUN, run(result="x" * 100_000))
    shown = tocsin("run", "show", RUN_ID).stdout
    assert len(shown) < 3000 and "(100,002 characters: --json has them all)" in shown
    assert json.loads(tocsin("run", "show", RUN_ID, "--json").stdout)["result"] == "x" * 100_000


def test_why_a_run_waits_is_told_in_order(script: Script, tocsin: Tocsin) -> None:
    limit = {"code": "limit", "message": "1 of 1 runs of its job are running", "runs": ["r1"]}
    busy = {"code": "busy", "message": "all 8 slots are in use", "since": "2026-12-01T09:00:00.000000Z"}
    document = {
        "run_id": RUN_ID,
        "state": "waiting",
        "summary": limit["message"],
        "blockers": [limit, busy],
        "estimated_start_at": "2026-12-01T09:00:00.000000Z",
        "estimated_error_seconds": 4.5,
    }
    script.on("GET", f"{RUN}/explain", document)
    first, holder, second, since, start = tocsin("run", "explain", RUN_ID).stdout.splitlines()
    assert first == "waiting: 1 of 1 runs of its job are running"
    assert holder.strip() == "run r1"
    assert second.strip() == "and all 8 slots are in use"
    assert since.strip().startswith("since 2026-12-01")
    assert "give or take 4.5 s" in start
    assert json.loads(tocsin("run", "explain", RUN_ID, "--json").stdout) == document


def test_a_run_that_ended_says_how(script: Script, tocsin: Tocsin) -> None:
    told = {"state": "dead", "summary": "1 of 1 attempt failed", "blockers": []}
    unknown = {"estimated_start_at": None, "estimated_error_seconds": None}
    script.on("GET", f"{RUN}/explain", told | unknown)
    assert tocsin("run", "explain", RUN_ID).stdout == "dead: 1 of 1 attempt failed\n"


def test_a_log_is_printed_page_after_page_and_can_do_no_harm(script: Script, tocsin: Tocsin) -> None:
    pages = [{"items": [line(0, "one")], "next_after": 0}, {"items": [line(1, "\x1b[2Jtwo")], "next_after": None}]
    script.on("GET", f"{RUN}/logs", *pages)
    assert tocsin("run", "logs", RUN_ID, "--attempt", "2").stdout == "one\ntwo\n"
    assert [asked.query for asked in script.asked] == [{"attempt": "2"}, {"attempt": "2", "after": "0"}]


def test_a_log_as_json_and_with_times(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", f"{RUN}/logs", lines(line(0, "one")))
    assert json.loads(tocsin("run", "logs", RUN_ID, "--json").stdout) == {"items": [line(0, "one")]}
    assert tocsin("run", "logs", RUN_ID, "-t").stdout.startswith("2026-12-01 ")


def test_a_log_without_lines_says_so(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", f"{RUN}/logs", lines())
    result = tocsin("run", "logs", RUN_ID)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no lines\n")


def tail(*events: tuple[str, dict[str, Any]]) -> Reply:
    words = []
    for kind, data in events:
        id_ = f"id: {data['attempt']}.{data['seq']}\n" if kind == "line" else ""
        words.append(f"{id_}event: {kind}\ndata: {json.dumps(data)}\n\n")
    return Reply(200, "".join(words).encode(), {"Content-Type": "text/event-stream"})


def test_following_ends_with_the_run_and_goes_on_where_it_broke(script: Script) -> None:
    first, second = line(1, "first try") | {"attempt": 1}, line(1, "second try") | {"attempt": 2}
    script.on(
        "GET",
        f"{RUN}/logs/stream",
        tail(("line", first), ("end", {"reason": "leaving"})),
        tail(("line", second), ("over", {"state": "succeeded"})),
    )
    with Client() as client:
        told = [found["text"] for found in follow_logs(client, RUN_ID, attempt=None, stream="stdout")]
    assert told == ["first try", "second try"]
    assert [a.query for a in script.asked] == [{"stream": "stdout"}] * 2
    assert script.asked[1].headers["last-event-id"] == "1.1"


def test_following_by_command(script: Script, tocsin: Tocsin) -> None:
    evil = line(1, "a\x1b]0;title\x07 \x1b[2Jb") | {"attempt": 1}
    script.on("GET", f"{RUN}/logs/stream", tail(("line", evil), ("over", {"state": "dead"})))
    assert tocsin("run", "logs", "-f", RUN_ID).stdout == "a b\n"
    [told] = tocsin("run", "logs", "-f", RUN_ID, "--json").stdout.splitlines()
    assert json.loads(told) == evil and "\x1b" not in told


def test_cancel_and_retry(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", f"{RUN}/cancel", run("stopping"))
    script.on("POST", f"{RUN}/retry", Reply(202, run("ready", 0, id="new")))
    assert tocsin("run", "cancel", RUN_ID, "--reason", "no").stdout == f"run {RUN_ID} is stopping\n"
    assert script.asked[0].body == {"reason": "no"}
    assert tocsin("run", "retry", RUN_ID).stdout == f"run new ready, again of {RUN_ID}\n"
