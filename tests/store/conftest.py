"""Object storage of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tocsin.store.objects import ObjectStore


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """An S3 server's address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Object storage of each kind."""
    if request.param == "folder":
        return ObjectStore("", tmp_path / "objects")
    endpoint = request.getfixturevalue("s3")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    httpx.put(f"{endpoint}/records").raise_for_status()
    return ObjectStore("s3://records/some/prefix", tmp_path / "unused")
