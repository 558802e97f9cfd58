"""Programs: how they are started, what they see, how their end and their output arrive."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from .conftest import HOSTILE, alive, until
from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_program_that_succeeds(shared: Gateway) -> None:
    run = shared.process("sh", "-c", "echo out; echo err >&2")
    end = await shared.end_of(run)
    assert (end.outcome, end.exit_code, end.error, end.result) == ("succeeded", 0, None, None)
    assert end.ran_ms > 0 and end.held_ms >= 0
    assert end.log == {"lines": 2, "dropped": 0}
    assert end.usage is not None and end.usage["max_rss_kb"] > 0
    assert shared.text_of(run, "stdout") == ["out"] and shared.text_of(run, "stderr") == ["err"]


async def test_a_program_that_fails(shared: Gateway) -> None:
    by_code, by_signal = shared.process("sh", "-c", "exit 3"), shared.process("sh", "-c", "kill -9 $$")
    end = await shared.end_of(by_code)
    assert (end.outcome, end.exit_code) == ("failed", 3)
    assert end.error is not None and (end.error.class_, end.error.message) == ("exit", "exit code 3")
    end = await shared.end_of(by_signal)
    assert end.error is not None and (end.error.class_, end.error.message) == ("signal", "killed by SIGKILL")


@pytest.mark.parametrize("command", ["/no/such/program", "/etc/passwd", "/"])
async def test_a_program_that_cannot_start(shared: Gateway, command: str) -> None:
    end = await shared.end_of(shared.process(command))
    assert end.outcome == "failed" and end.error is not None and end.error.class_ == "start"


async def test_what_a_program_sees(shared: Gateway) -> None:
    code = (
        "import os, sys, json;"
        "print(json.dumps([dict(os.environ), os.getcwd(), sys.stdin.read(), os.getsid(0) == os.getpid(),"
        " os.environ['TOCSIN_RUN_TOKEN'][::-1]]))"
    )
    run = shared.process(
        sys.executable, "-c", code, env={"MINE": "ü"}, cwd="/tmp", stdin="hello" * 10_000, args={"day": 3}
    )
    assert (await shared.end_of(run)).outcome == "succeeded"
    env, cwd, stdin, own_session, token = json.loads("".join(shared.text_of(run)))
    assert (cwd, stdin, own_session) == ("/tmp", "hello" * 10_000, True)
    assert env["MINE"] == "ü" and env["TOCSIN_RUN_ID"] == run.run_id and env["TOCSIN_JOB_ID"] == run.job_id
    assert env["TOCSIN_JOB_NAME"] == run.job_name and env["TOCSIN_ATTEMPT"] == "1"
    assert env["TOCSIN_FENCE"] == str(run.fence) and env["TOCSIN_SCHEDULED_FOR"] == run.scheduled_for
    assert env["TOCSIN_LOGICAL_AT"] == run.scheduled_for, "unless it stands for another instant"
    assert json.loads(env["TOCSIN_ARGS"]) == {"day": 3}
    assert env["TOCSIN_URL"] == shared.url
    assert env["TOCSIN_RUN_TOKEN"] == "***" and token[::-1] == run.token, "it is given, and masked in the log"
    assert "TOCSIN_WORKER_KEY" not in env and "SECRET_OF_WORKER" not in env and "the-key" not in str(env)


async def test_a_program_that_outlives_its_timeout_is_asked_first(shared: Gateway) -> None:
    run = shared.process("sh", "-c", "trap 'echo asked; exit 0' TERM; echo up; sleep 300 & wait", timeout=2.0)
    end = await shared.end_of(run)
    assert end.outcome == "timeout" and end.error is not None and end.error.class_ == "timeout"
    assert shared.text_of(run) == ["up", "asked"]
    # The clock of an event loop may be a millisecond ahead of the one that the attempt is measured with.
    assert end.ran_ms >= 1999


async def test_a_timeout_kills_the_whole_tree(shared: Gateway) -> None:
    """A grandchild that left the session, and one that also ignores the polite signal."""
    script = (
        "trap '' TERM; setsid sleep 300 & echo pid $!; (trap '' TERM; sleep 300) & echo pid $!; sleep 300; sleep 300"
    )
    run = shared.process("bash", "-c", script, timeout=2.0)
    end = await shared.end_of(run)
    assert end.outcome == "timeout"
    pids = [int(line.split()[1]) for line in shared.text_of(run)]
    assert len(pids) == 2 and not any(map(alive, pids))


async def test_what_a_program_leaves_in_the_background_ends_with_it(shared: Gateway) -> None:
    run = shared.process("bash", "-c", "setsid sleep 300 & echo $!; disown; exit 0")
    assert (await shared.end_of(run)).outcome == "succeeded"
    assert not alive(int(shared.text_of(run)[0]))


async def test_two_trees_are_told_apart(shared: Gateway) -> None:
    """One run's orphan is not killed when another run ends."""
    keeps = shared.process("bash", "-c", "(setsid sleep 300 & echo $!); read -t 300 < <(sleep 300)", timeout=60)
    pid = int(await shared.line_of(keeps, ""))
    await shared.end_of(shared.process("true"))
    assert alive(pid)
    shared.order_stop(keeps)
    assert (await shared.end_of(keeps)).outcome == "cancelled"
    await until(lambda: not alive(pid))


async def test_cancel_is_proved(shared: Gateway) -> None:
    run = shared.process("bash", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done")
    pid = int(await shared.line_of(run, ""))
    shared.order_stop(run)
    end = await shared.end_of(run)
    assert end.outcome == "cancelled" and not alive(pid)


async def test_huge_output_is_cut_and_never_blocks_the_program(shared: Gateway) -> None:
    code = "import sys\nfor i in range(30_000): sys.stdout.write('x' * 999 + '\\n')\nprint('x' * 50_000)"
    end = await shared.end_of(run := shared.process(sys.executable, "-c", code))
    assert end.outcome == "succeeded" and end.log is not None
    assert end.log["lines"] + end.log["dropped"] == 30_001 + 1  # one more says so
    assert shared.text_of(run)[-1] == "[tocsin: output beyond 10 MiB is dropped]"
    assert sum(map(len, shared.text_of(run))) <= 10 * 1024 * 1024


async def test_binary_output_becomes_text(shared: Gateway) -> None:
    code = r"import os; os.write(1, b'\xff\x00\x1b[31m ok \xc3\xa9\r\nlong ' + b'\xc3\xa9' * 10_000 + b'\nno end')"
    end = await shared.end_of(run := shared.process(sys.executable, "-c", code))
    assert end.outcome == "succeeded"
    first, *long, last = shared.text_of(run)
    assert first == "\ufffd\\x00\\x1b[31m ok é" and last == "no end"
    assert "".join(long) == "long " + "é" * 10_000 and all(len(line.encode()) <= 16_384 for line in long)


async def test_many_programs_at_once(shared: Gateway) -> None:
    runs = [shared.process("sh", "-c", f"echo {i}") for i in range(40)]
    for i, run in enumerate(runs):
        assert (await shared.end_of(run)).outcome == "succeeded" and shared.text_of(run) == [str(i)]


async def test_an_unreadable_document_ends_the_run_only(shared: Gateway) -> None:
    end = await shared.end_of(shared.submit({"kind": "teleport"}))
    assert end.outcome == "failed" and end.error is not None and end.error.class_ == "start"
    assert (await shared.end_of(shared.process("true"))).outcome == "succeeded"


def noted(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("role", ["hide", "hop", "bomb", "brand"])
async def test_nothing_that_a_run_forked_outlives_its_cancel(shared: Gateway, tmp_path: Path, role: str) -> None:
    """A new session, a new parent, no environment, no files, deaf to TERM: killed before `cancelled` is said."""
    pids = tmp_path / "pids"
    neighbour = shared.process("bash", "-c", "(setsid sleep 300 & echo $!); sleep 300")
    kept = int(await shared.line_of(neighbour, ""))
    run = shared.process(*HOSTILE, role, str(pids))
    await until(lambda: len(noted(pids)) >= (100 if role == "bomb" else 20 if role == "hop" else 1))
    shared.order_stop(run)
    assert (await shared.end_of(run)).outcome == "cancelled"
    assert not [pid for pid in noted(pids) if alive(pid)]
    assert alive(kept), "another run's orphan is not ours to kill"
    seen = len(noted(pids))
    await shared.end_of(shared.process("sleep", "0.1"))
    assert len(noted(pids)) == seen, "nothing of it is on the hop"
    shared.order_stop(neighbour)
    await shared.end_of(neighbour)


async def test_what_hides_ends_with_its_run_though_nobody_stops_it(shared: Gateway, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f'{shlex.join([*HOSTILE, "hide", str(pids)])} & while [ ! -s "{pids}" ]; do sleep 0.01; done'
    assert (await shared.end_of(shared.process("bash", "-c", script))).outcome == "succeeded"
    assert noted(pids) and not any(map(alive, noted(pids)))


async def test_a_program_gives_way_to_its_worker(shared: Gateway) -> None:
    run = shared.process("sh", "-c", "sleep 0.05; nice")
    await shared.end_of(run)
    assert int(shared.text_of(run)[0]) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
