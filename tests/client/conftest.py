from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted import Script, Stage

from tests.flow.conftest import database_url, scene, washed_database

__all__ = ["database_url", "scene", "washed_database"]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def script(stage: Stage) -> Script:
    return stage.new_script()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TOCSIN_URL", "TOCSIN_KEY", "TOCSIN_WORKER_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOCSIN_HOME", str(tmp_path / "home"))
