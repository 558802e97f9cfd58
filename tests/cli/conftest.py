from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "client"))
from scripted import Script, Tocsin, serving

from tocsin.cli.main import app


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Script]:
    """A scripted server that the command line finds by its environment, in a time zone of its own."""
    with serving() as script:
        monkeypatch.setenv("TOCSIN_URL", script.url)
        monkeypatch.setenv("TOCSIN_KEY", "key")
        monkeypatch.setenv("TOCSIN_HOME", str(tmp_path))
        yield script


@pytest.fixture
def tocsin() -> Tocsin:
    """Run a command line in this process."""

    def invoke(*args: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, list(args), input=input, prog_name="tocsin")

    return invoke
