"""A Tocsin for the pages: what they tell you to write stands in a folder, and what they tell you to type runs there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SHELL = re.compile(r"(<!-- not run: [^>]+ -->\n)?^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
_OTHER = re.compile(r"^```(python|json|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def page(name: str) -> str:
    """The text of a page."""
    return (ROOT / name).read_text(encoding="utf-8")


def block(text: str, kind: str, about: str) -> str:
    """The one block of a page that is of this kind and has these words."""
    [found] = [body for k, body in _OTHER.findall(text) if k == kind and about in body]
    return str(found)


def shell_blocks(text: str) -> list[str]:
    """The blocks of a page's text that can be run here."""
    return [body for skipped, body in SHELL.findall(text) if not skipped]


def session(text: str) -> str:
    """All of these blocks as one session, as in one terminal; the last one told of is the one that failed."""
    blocks = enumerate(shell_blocks(text), start=1)
    return "set -e\n" + "".join(f"echo '## block {n}'\n{body}" for n, body in blocks)


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


@contextmanager
def started(files: Mapping[str, str], module: str, ready: str) -> Iterator[Running]:
    """`tocsin up` with a worker of this module; `ready`: a command that succeeds when it has declared what it has."""
    base = Path(tempfile.mkdtemp(prefix="tocsin-docs-"))
    base.chmod(0o711)  # for the user PostgreSQL runs as
    folder = base / "folder"
    folder.mkdir()
    for name, text in files.items():
        folder.joinpath(name).write_text(text, encoding="utf-8")
    folder.joinpath(".venv").symlink_to(sys.prefix)
    port = free_port()
    outer = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_") and k != "DATABASE_URL"}
    path = f"{Path(sys.executable).parent}:{outer['PATH']}"
    environ = outer | {"TOCSIN_HOME": str(base / "home"), "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tocsin", "up", "--port", str(port), module]
    up = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert up.stdout is not None
        assert any("Tocsin is ready" in line for line in up.stdout)
        made = Running(folder, environ, f"127.0.0.1:{port}")
        _until(lambda: made.type(["sh", "-c"], ready).returncode == 0)
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
