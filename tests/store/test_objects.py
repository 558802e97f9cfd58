"""Object storage: one list of checks that the folder and an S3 server pass alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tocsin.errors import SetupError, Unavailable
from tocsin.settings import Settings
from tocsin.store.objects import ObjectStore


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


async def test_folders_and_what_is_in_them_are_listed(store: ObjectStore) -> None:
    for key in ("logs/b/2", "logs/a/1", "logs/a/c/3", "logs/4", "other/5"):
        await store.put(key, b"")
    assert await store.folders("logs/") == ["logs/a/", "logs/b/"]
    assert await store.keys("logs/a/") == ["logs/a/1", "logs/a/c/3"]
    assert await store.folders("nobody/") == await store.keys("nobody/") == []
