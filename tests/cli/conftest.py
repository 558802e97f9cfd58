from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "client"))
from scripted import Script, Stage, Tocsin

from tests.flow.conftest import database_url, washed_database
from tocsin.cli.main import app

__all__ = ["database_url", "washed_database"]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def script(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """A scripted server that the command line finds by its environment."""
    script = stage.new_script()
    monkeypatch.setenv("TOCSIN_URL", script.url)
    monkeypatch.setenv("TOCSIN_KEY", "key")
    monkeypatch.setenv("TOCSIN_HOME", str(tmp_path))
    return script


@pytest.fixture
def tocsin() -> Tocsin:
    """Run a command line in this process."""

    def invoke(*args: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, list(args), input=input, prog_name="tocsin")

    return invoke
