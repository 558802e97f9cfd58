"""What README and quickstart tell people to type works: every `sh` block runs, in order, against a real Tocsin.

A block that cannot run here stands behind a comment `<!-- not run: why -->`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quickstart.md")}
MOST_NOT_RUN = 3

_SHELL = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
_OTHER = re.compile(r"^```(python|json)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Running:
    """A Tocsin with a folder in which the blocks are typed."""

    folder: Path
    environ: dict[str, str]
    address: str

    def type(self, shell: list[str], text: str) -> subprocess.CompletedProcess[str]:
        text = text.replace("127.0.0.1:8470", self.address)
        return subprocess.run(
            [*shell, text],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,  # a page takes a tenth of that, where nobody else works
        )


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """`tocsin up` as the pages leave it: with the functions of the tour, and the files they tell you to write."""
    base = Path(tempfile.mkdtemp(prefix="tocsin-docs-"))
    base.chmod(0o711)  # for the user PostgreSQL runs as
    folder = base / "folder"
    folder.mkdir()
    folder.joinpath("reports.py").write_text(_block("README.md", "python", "@app.job"))
    folder.joinpath("ask.py").write_text(_block("README.md", "python", "daily.submit("))
    folder.joinpath("nightly.json").write_text(_block("docs/quickstart.md", "json", "nightly-report"))
    folder.joinpath(".venv").symlink_to(sys.prefix)
    port = _free_port()
    outer = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_") and k != "DATABASE_URL"}
    path = f"{Path(sys.executable).parent}:{outer['PATH']}"
    environ = outer | {"TOCSIN_HOME": str(base / "home"), "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tocsin", "up", "--port", str(port), "reports:app"]
    up = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert up.stdout is not None
        assert any("Tocsin is ready" in line for line in up.stdout)
        made = Running(folder, environ, f"127.0.0.1:{port}")
        _until(lambda: made.type(["sh", "-c"], "tocsin job show reports.daily").returncode == 0)
        yield made
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.communicate(timeout=40)
        finally:
            up.kill()
            shutil.rmtree(base)


def _until(done: Callable[[], bool]) -> None:
    """What the worker does when it starts, nobody is told of."""
    give_up_at = time.monotonic() + 60
    while not done():
        assert time.monotonic() < give_up_at


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def _block(page: str, kind: str, about: str) -> str:
    [found] = [text for k, text in _OTHER.findall(PAGES[page]) if k == kind and about in text]
    return str(found)


def shell_blocks(page: str) -> list[str]:
    """The blocks of a page's text that can be run here."""
    return [text for skipped, text in _SHELL.findall(page) if not skipped]


def _script(page: str) -> str:
    """All blocks of a page as one session, as in one terminal; the last one told of is the one that failed."""
    blocks = enumerate(shell_blocks(PAGES[page]), start=1)
    return "set -e\n" + "".join(f"echo '## block {n}'\n{text}" for n, text in blocks)


@pytest.mark.parametrize("page", PAGES)
def test_every_shell_block_runs(running: Running, page: str) -> None:
    done = running.type(["sh", "-c"], _script(page))
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    if page == "README.md":
        assert 'got {"who":"Ada"}' in done.stdout
        assert done.stdout.splitlines().count("no luck") == 2
        assert "succeeded {'rows': 42}" in done.stdout and "rendering region=asia" in done.stdout
        assert '"name":"once"' in done.stdout.replace(": ", ":")


def test_the_python_of_the_quickstart_runs(running: Running) -> None:
    done = running.type([sys.executable, "-c"], _block("docs/quickstart.md", "python", "Client"))
    assert done.returncode == 0, done.stdout


def test_few_blocks_are_left_out() -> None:
    skipped = [text for page in PAGES.values() for why, text in _SHELL.findall(page) if why]
    assert len(skipped) <= MOST_NOT_RUN
    assert all("make " in text or "worker reports" in text or "kill -9" in text for text in skipped)
