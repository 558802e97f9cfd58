from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin, problem

from tocsin import __version__
from tocsin.cli.doctor import metrics

METRICS = """# HELP tocsin_overdue_oldest_seconds Age of the oldest due, unclaimed run.
tocsin_overdue_oldest_seconds 0.0
tocsin_queue_depth{state="ready"} 7.0
tocsin_clock_skew_seconds 0.001
"""


def worker(seconds: float = 86_400, **fields: Any) -> dict[str, Any]:
    until = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
    common = {"id": "w1", "name": "host-1", "pool": "default", "state": "live", "slots": 8, "version": __version__}
    return common | {"lease_until": until} | fields


def items(*found: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(found), "next_cursor": None}


@pytest.fixture
def healthy(script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    script.on("GET", "/healthz", {"status": "ok"}).on("GET", "/readyz", {"status": "ready"})
    script.on("GET", "/metrics", Reply(200, METRICS.encode(), {"Content-Type": "text/plain"}))
    script.on("GET", "/v1/workers", items(worker())).on("GET", "/v1/jobs", items())
    return script.on("GET", "/v1/dead-letters", items())


def examine(tocsin: Tocsin) -> tuple[int, dict[str, tuple[str, str, str]]]:
    result = tocsin("doctor", "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is (result.exit_code == 0)
    return result.exit_code, {c["check"]: (c["status"], c["detail"], c["advice"]) for c in document["checks"]}


def test_nothing_is_wrong(healthy: Script, tocsin: Tocsin) -> None:
    code, found = examine(tocsin)
    assert code == 0
    assert {status for status, _, _ in found.values()} == {"ok"}
    assert found.keys() >= {"client", "settings", "server", "clock", "ready", "queue", "workers", "disk", "schedules"}
    shown = tocsin("doctor")
    assert shown.exit_code == 0
    assert "1 alive with 8 slots" in shown.stdout
    assert shown.stdout.splitlines()[-1].strip() == "nothing is wrong here"
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize(
    ("path", "reply", "check", "status", "words"),
    [
        ("/readyz", problem(503, "schema_old", "the schema is not current"), "ready", "fail", "tocsin migrate"),
        ("/readyz", problem(503, "unavailable", "no database"), "ready", "fail", "PostgreSQL"),
        ("/v1/workers", items(), "workers", "fail", "tocsin worker"),
        ("/v1/workers", items(worker(-60)), "workers", "fail", "none is alive"),
        ("/v1/workers", items(worker(), worker(-60, name="silent-one")), "leases", "warn", "silent-one"),
        ("/v1/workers", items(worker(version="0.0.9")), "versions", "warn", "0.0.9"),
        ("/v1/workers", problem(401, "unauthorized"), "key", "fail", "TOCSIN_KEY"),
        ("/v1/workers", problem(403, "forbidden"), "key", "warn", "another role"),
        ("/v1/dead-letters", items({"id": "d1"}), "dead letters", "warn", "tocsin dead list"),
        (
            "/v1/jobs",
            items({"id": "j1", "name": "late-one", "next_run_at": "2020-01-01T00:00:00.000000Z"}),
            "schedules",
            "warn",
            "late-one",
        ),
        ("/metrics", Reply(200, b"tocsin_overdue_oldest_seconds 90.0\n"), "queue", "warn", "due for 1 m 30 s"),
        ("/metrics", Reply(200, b"tocsin_clock_skew_seconds -3.0\n"), "server clock", "warn", "NTP"),
        ("/metrics", Reply(200, b'tocsin_loop_errors_total{loop="plan"} 4.0\n'), "loops", "warn", "plan 4"),
        ("/metrics", problem(500, "oops"), "queue", "warn", "answers 500"),
        ("/metrics", problem(403, "no"), "queue", "warn", "TOCSIN_METRICS_FROM"),
        ("/openapi.json", {"info": {"version": "9.9"}}, "server", "warn", "the same version"),
        ("/healthz", problem(404, "nothing"), "server", "fail", "Tocsin's address"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(
    healthy: Script, tocsin: Tocsin, path: str, reply: Any, check: str, status: str, words: str
) -> None:
    healthy.on("GET", path, reply)
    code, found = examine(tocsin)
    assert found[check][0] == status
    assert words in " ".join(found[check])
    assert found[check][2], "says what to do"
    assert code == (status == "fail")


def test_a_clock_that_is_off(healthy: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.cli.doctor.parsedate_to_datetime", lambda _: datetime.now(UTC) + timedelta(minutes=5))
    _, found = examine(tocsin)
    assert found["clock"][0] == "warn"
    assert "behind the server" in found["clock"][1]


def test_no_server(healthy: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TOCSIN_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        code, found = examine(tocsin)
    assert code == 1
    assert found["server"][0] == "fail"
    assert "tocsin up" in found["server"][2]


def test_no_credentials(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TOCSIN_URL", "TOCSIN_KEY", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOCSIN_HOME", str(tmp_path))
    code, found = examine(tocsin)
    assert code == 1
    assert found["credentials"][0] == "fail"


def test_a_misspelt_setting(healthy: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOCSIN_PROT", "1")
    code, found = examine(tocsin)
    assert code == 1
    assert "did you mean TOCSIN_PORT?" in found["settings"][1]


def test_a_file_others_can_read_and_a_full_disk(
    healthy: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text("")
    file.chmod(0o640)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 100 << 20))
    code, found = examine(tocsin)
    assert code == 1
    assert "mode 0640" in found["credentials"][1]
    assert f"chmod 600 {file}" in found["credentials"][2]
    assert found["disk"][0] == "fail"


def test_databases(healthy: Script, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "not running" in examine(tocsin)[1]["database"][1]
    (tmp_path / "data" / "postmaster.pid").write_text("999999999\n")
    assert "was killed" in examine(tocsin)[1]["database"][1]
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:9/nowhere")
    code, found = examine(tocsin)
    assert code == 1
    assert "cannot connect" in found["database"][1]


def test_metrics_are_read_by_name_and_labels() -> None:
    assert metrics('# TYPE a gauge\na 1.5\nb{x="y z"} 2\nc nonsense\n') == {"a": 1.5, 'b{x="y z"}': 2.0}
