"""Object storage: one list of checks that the folder and an S3 server pass alike."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from moto.server import ThreadedMotoServer

from tocsin.errors import SetupError, Unavailable
from tocsin.settings import Settings
from tocsin.store.objects import ObjectStore


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
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


@pytest.mark.parametrize("durable", [False, True])
async def test_what_was_put_is_read_by_ranges_until_it_is_deleted(store: ObjectStore, durable: bool) -> None:
    key = f"runs/7/2026-03-01/{durable}.parquet"
    await store.put(key, b"0123456789", durable=durable)
    assert await store.get(key, 0, 10) == b"0123456789"
    assert await store.get(key, 3, 4) == b"3456"
    await store.delete(key)
    with pytest.raises(Unavailable) as gone:
        await store.get(key, 0, 10)
    assert gone.value.code == "objects_unavailable"


async def test_a_second_put_replaces_the_first(store: ObjectStore) -> None:
    await store.put("again", b"first, and longer")
    await store.put("again", b"second")
    assert await store.get("again", 0, 6) == b"second"


async def test_deleting_what_is_not_there_is_no_error(store: ObjectStore) -> None:
    await store.delete("runs/nobody/wrote/this")


async def test_only_a_folder_has_files(store: ObjectStore, tmp_path: Path) -> None:
    await store.put("a/b", b"here")
    path = store.file("a/b")
    assert path is None or path.read_bytes() == b"here"
    assert (path is None) == (not (tmp_path / "objects").exists())


def test_a_url_that_names_no_store_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="gopher"):
        ObjectStore("gopher://records", tmp_path)


def test_the_store_is_set_by_either_name(tmp_path: Path) -> None:
    assert Settings.load({"TOCSIN_OBJECTS": "s3://records"}).objects_url == "s3://records"
    assert Settings.load({"TOCSIN_OBJECTS_URL": "gs://a", "TOCSIN_OBJECTS": "s3://b"}).objects_url == "gs://a"


def test_who_stores_nothing_loads_no_store() -> None:
    look = "import sys, tocsin.cli.main, tocsin.store.objects; print({'obstore', 'duckdb'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip() == "set()"
