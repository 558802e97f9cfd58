"""Object storage of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import s3 as server
from tocsin.store.objects import ObjectStore


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """An S3 server's address."""
    with server.serving() as endpoint:
        yield endpoint


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Object storage of each kind."""
    if request.param == "folder":
        return ObjectStore("", tmp_path / "objects")
    return ObjectStore(server.use(request.getfixturevalue("s3"), monkeypatch), tmp_path / "unused")
