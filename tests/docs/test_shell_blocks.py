"""What README and quickstart tell people to type works: every `sh` block runs, in order, against a real Tocsin.

A block that cannot run here stands behind a comment `<!-- not run: why -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.docs.kit import SHELL, Running, block, page, session, started

PAGES = {name: page(name) for name in ("README.md", "docs/quickstart.md")}
MOST_NOT_RUN = 3


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """`tocsin up` as the pages leave it: with the functions of the tour, and the files they tell you to write."""
    files = {
        "reports.py": block(PAGES["README.md"], "python", "@app.job"),
        "ask.py": block(PAGES["README.md"], "python", "daily.submit("),
        "nightly.json": block(PAGES["docs/quickstart.md"], "json", "nightly-report"),
    }
    with started(files, "reports:app", "tocsin job show reports.daily") as made:
        yield made


@pytest.mark.parametrize("page", PAGES)
def test_every_shell_block_runs(running: Running, page: str) -> None:
    done = running.type(["sh", "-c"], session(PAGES[page]))
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    if page == "README.md":
        assert 'got {"who":"Ada"}' in done.stdout
        assert done.stdout.splitlines().count("no luck") == 2
        assert "succeeded {'rows': 42}" in done.stdout and "rendering region=asia" in done.stdout
        assert '"name":"once"' in done.stdout.replace(": ", ":")


def test_the_python_of_the_quickstart_runs(running: Running) -> None:
    done = running.type([sys.executable, "-c"], block(PAGES["docs/quickstart.md"], "python", "Client"))
    assert done.returncode == 0, done.stdout


def test_few_blocks_are_left_out() -> None:
    skipped = [text for page in PAGES.values() for why, text in SHELL.findall(page) if why]
    assert len(skipped) <= MOST_NOT_RUN
    assert all("make " in text or "worker reports" in text or "kill -9" in text for text in skipped)
