"""The commands that run Tocsin itself: what they hand over, with stand-ins for what they start."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted import Tocsin

from tocsin.cli import up
from tocsin.cli.shared import megabytes
from tocsin.worker import machine

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, Any], Calls]:
    """Put a function that only remembers its calls where a heavy module would be."""
    monkeypatch.setenv("TOCSIN_HOME", str(tmp_path))
    for name in ("TOCSIN_URL", "TOCSIN_KEY", "TOCSIN_WORKER_KEY", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)

    def replace(module: str, function: str, answer: Any) -> Calls:
        calls: Calls = []
        fake = ModuleType(module)

        def remember(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return answer

        setattr(fake, function, remember)
        monkeypatch.setitem(sys.modules, module, fake)
        return calls

    return replace


def test_up(tocsin: Tocsin, stand_in: Any, tmp_path: Path) -> None:
    calls = stand_in("tocsin.cli.up", "up", 0)
    result = tocsin("up", "jobs:app", "--port", "9000", "--workers", "2", "--slots", "3", "--insecure")
    assert result.exit_code == 0, result.output
    (((settings,), rest),) = calls
    assert (settings.port, settings.insecure, settings.home) == (9000, True, tmp_path)
    assert rest == {"workers": 2, "slots": 3, "module": "jobs:app"}


def test_server_answers_with_its_exit_code(tocsin: Tocsin, stand_in: Any) -> None:
    calls = stand_in("tocsin.node.assemble", "serve", 7)
    assert tocsin("server", "--host", "::1", "--database", "postgresql://db/x").exit_code == 7
    (((settings,), _),) = calls
    assert (settings.host, settings.database_url, settings.insecure) == ("::1", "postgresql://db/x", False)


def test_worker(tocsin: Tocsin, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in("tocsin.worker.main", "run", 0)
    monkeypatch.setenv("TOCSIN_URL", "http://server:8470/")
    monkeypatch.setenv("TOCSIN_WORKER_KEY", "wkey")
    monkeypatch.setenv("TOCSIN_CA", "/ca.pem")
    result = tocsin("worker", "jobs:app", "--pool", "gpu", "--slots", "2", "--label", "region=eu", "--name", "w")
    assert result.exit_code == 0, result.output
    ((_, given),) = calls
    del given["settings"]
    assert given.pop("resources") | {"disk_mb": 0} == machine.resources() | {"disk_mb": 0}, "all that there is"
    assert given == {
        "url": "http://server:8470",
        "key": "wkey",
        "ca": "/ca.pem",
        "module": "jobs:app",
        "pool": "gpu",
        "slots": 2,
        "labels": {"region": "eu"},
        "name": "w",
        "editor": None,
    }


def test_a_worker_offers_what_it_is_told(tocsin: Tocsin, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in("tocsin.worker.main", "run", 0)
    monkeypatch.setenv("TOCSIN_URL", "http://server:8470/")
    monkeypatch.setenv("TOCSIN_WORKER_KEY", "wkey")
    result = tocsin("worker", "--cpu", "1.5", "--memory", "8g", "--disk", "512", "--gpus", "2")
    assert result.exit_code == 0, result.output
    ((_, given),) = calls
    assert given["resources"] == {"cpu": 1.5, "memory_mb": 8192, "disk_mb": 512, "gpus": 2}
    for option, value in (("--memory", "much"), ("--disk", "-1g"), ("--cpu", "-1"), ("--gpus", "0.5")):
        assert tocsin("worker", option, value).exit_code == 2, option


@pytest.mark.parametrize(
    ("text", "size"), [("8g", 8192), ("1.5G", 1536), ("512m", 512), ("512", 512), ("1tb", 1 << 20), ("1k", 1)]
)
def test_sizes(text: str, size: int) -> None:
    assert megabytes(text, "--memory") == size


def test_several_workers_share_the_machine() -> None:
    have = machine.resources()
    commands = up._worker_commands(3, 2, None)
    assert len(commands) == 3
    for command in commands:
        offered = dict(itertools.pairwise(command))
        assert float(offered["--cpu"]) * 3 <= have["cpu"] + 0.01
        assert (megabytes(offered["--memory"], "") or 0) * 3 <= have["memory_mb"]
    assert "--cpu" not in up._worker_commands(1, 2, None)[0], "one has it all"


def test_a_worker_needs_nothing_on_the_machine_of_up(tocsin: Tocsin, stand_in: Any, tmp_path: Path) -> None:
    calls = stand_in("tocsin.worker.main", "run", 0)
    (tmp_path / "credentials.toml").write_text('url = "http://127.0.0.1:1"\nkey = "k"\nworker_key = "wk"\n')
    assert tocsin("worker").exit_code == 0
    ((_, given),) = calls
    assert (given["key"], given["pool"], given["module"]) == ("wk", "default", None)
    assert given["slots"] >= 8
    assert given["name"]


def test_a_worker_without_a_server_says_so(tocsin: Tocsin, stand_in: Any) -> None:
    stand_in("tocsin.worker.main", "run", 0)
    result = tocsin("worker")
    assert result.exit_code == 1
    assert "TOCSIN_WORKER_KEY" in result.stderr
