"""An S3 server of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

URL = "s3://records/some/prefix"


@contextmanager
def serving() -> Iterator[str]:
    """Its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let this process find it by its environment; answers the URL of a store there."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    httpx.put(f"{endpoint}/records").raise_for_status()
    return URL
