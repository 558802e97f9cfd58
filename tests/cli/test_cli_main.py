"""The whole command line: endings, lightness, terminals."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Reply, Script, Tocsin, problem

import tocsin as package
from tests import PATIENCE
from tocsin.cli.output import Column, fit

HEAVY = {"httpx", "asyncpg", "aiohttp", "starlette", "rich", "msgspec", "uvicorn", "tocsin.settings", "tocsin.worker"}


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["job", "create", "--help"], ["run", "list", "--help"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    code += "from tocsin.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stderr.split())
    assert done.stdout


def test_every_command_has_help(tocsin: Tocsin) -> None:
    rooms = {
        "": ["up", "server", "worker", "migrate", "job", "run", "dead", "fleet", "tenant", "key"],
        "job": [
            *("create", "put", "update", "list", "show", "versions"),
            *("pause", "resume", "cancel", "delete", "run"),
        ],
        "run": ["list", "show", "logs", "cancel", "retry"],
        "dead": ["list", "redrive", "discard"],
        "fleet": ["list", "show", "drain"],
        "tenant": ["create", "list"],
        "key": ["create", "list", "revoke"],
    }
    for room, commands in rooms.items():
        for command in commands:
            result = tocsin(*filter(None, [room, command, "--help"]))
            assert result.exit_code == 0, (room, command)
            assert not room or "--json" in result.stdout, (room, command)


def test_the_version(tocsin: Tocsin) -> None:
    assert tocsin("--version").stdout == f"tocsin {package.__version__}\n"


@pytest.mark.parametrize("args", [["nonsense"], ["job", "nonsense"], ["job", "show"], ["run", "list", "--limit", "-1"]])
def test_wrong_usage_is_2(tocsin: Tocsin, args: list[str]) -> None:
    assert tocsin(*args).exit_code == 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (problem(401, "unauthorized", "who are you?"), "who are you? [unauthorized]; check TOCSIN_KEY"),
        (problem(403, "forbidden"), "another role"),
        (problem(404, "not_found"), "check the id"),
        (problem(409, "conflict", "it has ended"), "it has ended [conflict]\n"),
        (problem(429, "quota", headers={"Retry-After": "7200"}), "try again in 2 h"),
        (Reply(500, b"oops", {"Content-Type": "text/plain"}), "answered 500 [http_500]"),
    ],
)
def test_a_refusal_is_1_and_one_line_that_says_what_to_do(
    script: Script, tocsin: Tocsin, reply: Reply, words: str
) -> None:
    script.on("GET", "/v1/runs/r1", reply)
    result = tocsin("run", "show", "r1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("tocsin: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_no_server_is_3(script: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TOCSIN_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        result = tocsin("run", "list")
    assert result.exit_code == 3
    assert "cannot reach http://127.0.0.1" in result.stderr
    assert "tocsin up" in result.stderr


def test_no_credentials_is_1(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOCSIN_HOME", str(tmp_path))
    monkeypatch.delenv("TOCSIN_URL", raising=False)
    monkeypatch.delenv("TOCSIN_KEY", raising=False)
    result = tocsin("run", "list")
    assert result.exit_code == 1
    assert result.stderr.startswith("tocsin: no server is known: set TOCSIN_URL")


def test_a_misspelt_setting_is_1(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOCSIN_PROT", "1")
    result = tocsin("migrate")
    assert result.exit_code == 1
    assert "did you mean TOCSIN_PORT?" in result.stderr


def test_an_interrupt_is_130(script: Script) -> None:
    line = {"seq": 1, "text": "started", "attempt": 1}
    said = f"id: 1.1\nevent: line\ndata: {json.dumps(line)}\n\n".encode()
    # It breaks off, and is asked for again and again.
    script.on("GET", "/v1/runs/r1/logs/stream", Reply(200, said, {"Content-Type": "text/event-stream"}))
    command = [sys.executable, "-m", "tocsin", "run", "logs", "-f", "r1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "started\n"
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=PATIENCE)
    assert following.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize("no_color", [True, False])
def test_at_a_terminal_there_is_a_table_in_colour(script: Script, no_color: bool) -> None:
    tenant = {"slug": "blue[red]", "weight": 1, "created_at": "\x1b]0;evil\x07"}
    key = {"id": "k1", "name": "[bold]x", "role": "dead", "created_at": None}
    script.on("GET", "/v1/keys", {"items": [key], "next_cursor": None})
    script.on("GET", "/v1/tenants", {"items": [tenant], "next_cursor": None})
    shown = at_terminal("key", "list", no_color=no_color) + at_terminal("tenant", "list", no_color=no_color)
    assert "[bold]x" in shown
    assert "blue[red]" in shown
    assert "evil" not in shown
    assert ("\x1b[31m" in shown) is not no_color


COLUMNS = [
    Column("ID", str, whole=True),
    Column("JOB", str),
    Column("STATE", str, whole=True),
    Column("TRY", str, spare=True),
    Column("LAG", str, spare=True),
    Column("WHY", str),
]


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (100, [36, 10, 9, 3, 6, 20]),
        (94, [36, 10, 9, 3, 6, 20]),
        (90, [36, 10, 9, 3, 6, 16]),
        (85, [36, 10, 9, 3, 0, 19]),
        (80, [36, 10, 9, 3, 0, 14]),
        (75, [36, 10, 9, 0, 0, 14]),
        (70, [36, 9, 9, 0, 0, 9]),
        (20, [36, 4, 9, 0, 0, 4]),
    ],
)
def test_a_narrow_terminal_cuts_long_columns_and_leaves_out_spare_ones(room: int, shown: list[int]) -> None:
    assert fit(COLUMNS, [36, 10, 9, 3, 6, 20], room) == shown


@given(st.lists(st.integers(1, 60), min_size=6, max_size=6), st.integers(1, 200))
def test_a_table_fits_if_it_can_and_cuts_nothing_whole(widths: list[int], room: int) -> None:
    shown = fit(COLUMNS, widths, room)
    used = [w for w in shown if w]
    assert all(s <= w and (s == w or not c.whole) for c, s, w in zip(COLUMNS, shown, widths, strict=True))
    assert all(s in (0, w) for c, s, w in zip(COLUMNS, shown, widths, strict=True) if c.spare)
    shortest = sum(w if c.whole else min(w, 4) for c, w in zip(COLUMNS, widths, strict=True) if not c.spare) + 2 * 3
    assert sum(used) + 2 * (len(used) - 1) <= max(room, shortest)


def at_terminal(*args: str, no_color: bool) -> str:
    """What a command prints on a real (pseudo) terminal."""
    outer, inner = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"TERM": "xterm", "COLUMNS": "100"} | ({"NO_COLOR": "1"} if no_color else {})
    done = subprocess.run([sys.executable, "-m", "tocsin", *args], stdout=inner, env=environ, check=True)
    assert done.returncode == 0
    os.close(inner)
    shown = os.read(outer, 65536).decode()
    os.close(outer)
    return shown
