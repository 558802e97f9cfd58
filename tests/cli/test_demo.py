"""`tocsin demo`, the whole of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import PATIENCE

COMMAND = [sys.executable, "-m", "tocsin", "demo", "--seconds"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the demo makes its temporary folder; other tests make theirs elsewhere."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        path = Path(name)
        path.chmod(0o711)
        yield path
        assert list(path.iterdir()) == [], "its data is gone"
        left = [p.pid for p in psutil.process_iter() if str(path) in environment_of(p)]
        assert left == [], "nothing runs any more"


def environment_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("TOCSIN_HOME", "") + " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_job_of_each_kind_runs_and_nothing_is_left(folder: Path) -> None:
    environ = os.environ | {"TMPDIR": str(folder), "TOCSIN_URL": "http://127.0.0.1:9", "TOCSIN_KEY": "nobody"}
    done = subprocess.run([*COMMAND, "5"], env=environ, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    assert "Created 8 jobs: now, delay, at, every, cron, manual, args, fragile" in told
    for name in ("now", "delay", "at", "every", "manual", "args"):
        assert any(line.split()[1:3] == [name, "succeeded"] for line in told), name
    assert any(line.split()[1:3] == ["fragile", "dead"] for line in told)
    assert any(line.startswith("Run …") and line.endswith("of `fragile` succeeded") for line in told)
    assert 'log: got {"day":"monday","pages":3}' in done.stdout
    assert "result: Hello, Ada!" in done.stdout
    assert "dead letters left: 0" in done.stdout
    assert "\x1b" not in done.stdout


def test_an_interrupt_leaves_nothing_either(folder: Path) -> None:
    environ = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen([*COMMAND, "60"], env=environ, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        while not running.stdout.readline().startswith("Created"):
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        assert "Stopping …" in running.communicate(timeout=PATIENCE)[0]
    assert running.returncode == 130
