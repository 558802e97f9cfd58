"""`tocsin worker --reload`: a changed file starts the worker anew, a broken one does not end it, a signal does."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from tests import PATIENCE

ROOT = Path(__file__).parents[2]
# Stands for a worker: says what its module says, then waits to be asked to go.
WORKER = """
import signal, sys, threading
from module import WORD
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
print("started", WORD, flush=True)
asked.wait()
print("ended", WORD, flush=True)
"""
SUPERVISOR = """
import sys
from pathlib import Path
from tocsin.cli.reload import reloading
sys.exit(reloading([sys.executable, "worker.txt"], Path.cwd()))
"""


class Reloading:
    """A supervisor, and what it and its worker say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("'one'")
        folder.joinpath("worker.txt").write_text(WORKER)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR],
            cwd=folder,
            # Without caches: Python takes a file of the same size and second for the one it has compiled.
            env={"PYTHONPATH": f"{ROOT}:{folder}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def write(self, word: str) -> None:
        self.folder.joinpath("module.py").write_text(f"WORD = {word}\n")

    def until(self, text: str) -> None:
        while text not in self._lines.get(timeout=PATIENCE):
            pass


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Reloading]:
    made = Reloading(tmp_path)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def test_a_change_starts_it_anew_and_what_is_broken_waits_for_the_next(running: Reloading) -> None:
    running.until("started one")
    running.write("'the second'")
    running.until("module.py changed")
    running.until("ended one")
    running.until("started the second")
    running.write("1 / 0")
    running.until("it is started again when a file changes")
    running.write("'and the third'")
    running.until("started and the third")
    running.process.send_signal(signal.SIGTERM)
    running.until("ended and the third")
    assert running.process.wait(60) == 0


def test_a_signal_ends_it_also_while_it_waits(running: Reloading) -> None:
    running.until("started one")
    running.write("1 / 0")
    running.until("it is started again when a file changes")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(60) == 1
