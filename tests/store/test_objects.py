"""Object storage: one list of checks that the folder and an S3 server pass alike."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tocsin.errors import ObjectLost, SetupError, Unavailable
from tocsin.settings import Settings
from tocsin.store import objects
from tocsin.store.objects import ObjectStore


@pytest.mark.parametrize("durable", [False, True])
async def test_what_was_put_is_read_by_ranges_until_it_is_deleted(store: ObjectStore, durable: bool) -> None:
    key = f"runs/7/2026-03-01/{durable}.parquet"
    await store.put(key, b"0123456789", durable=durable)
    assert await store.get(key, 0, 10) == b"0123456789"
    assert await store.get(key, 3, 4) == b"3456"
    await store.delete(key)
    with pytest.raises(ObjectLost):
        await store.get(key, 0, 10)
    await store.put(key, b"01234")
    for start in (2, 7):
        with pytest.raises(ObjectLost):
            await store.get(key, start, 4)


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
    own = f"{uuid.uuid4()}/"  # the server keeps what other tests put there
    for key in ("logs/b/2", "logs/a/1", "logs/a/c/3", "logs/4", "other/5"):
        await store.put(own + key, b"")
    assert await store.folders(f"{own}logs/") == [f"{own}logs/a/", f"{own}logs/b/"]
    assert await store.keys(f"{own}logs/a/") == [f"{own}logs/a/1", f"{own}logs/a/c/3"]
    assert await store.folders(f"{own}nobody/") == await store.keys(f"{own}nobody/") == []


# ── a store that is not well ─────────────────────────────────────────────────────────────────────────────────────────


class Sick:
    """An S3 server that gives these answers, one after the other; None: none at all."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: (\d+)", head)
                await reader.readexactly(int(length.group(1)) if length else 0)
                answer = self.answers[min(self.asked, len(self.answers) - 1)]
                self.asked += 1
                if answer is None:
                    await reader.read()
                    break
                writer.write(f'HTTP/1.1 {answer}\r\ncontent-length: 0\r\netag: "x"\r\n\r\n'.encode())
        writer.close()

    @contextlib.asynccontextmanager
    async def store(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[ObjectStore]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        given = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
        given["ENDPOINT_URL"] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name, value in given.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield ObjectStore("s3://records", folder)
        server.close()


async def test_what_a_store_refuses_for_a_moment_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sick = Sick("500 Internal Server Error", "503 Slow Down", "200 OK")
    async with sick.store(monkeypatch, tmp_path) as store:
        await store.put("logs/a", b"lines")
    assert sick.asked == 3


@pytest.mark.parametrize("answer", ["500 Internal Server Error", "507 Insufficient Storage", None])
async def test_a_store_that_stays_sick_is_unavailable_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str | None
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "100ms")
    monkeypatch.setitem(objects._RETRIES, "max_retries", 2)
    async with Sick(answer).store(monkeypatch, tmp_path) as store:
        for call in (
            store.put("logs/a", b"lines"),
            store.get("logs/a", 0, 5),
            store.read("logs/a"),
            store.keys("logs/"),
        ):
            with pytest.raises(Unavailable) as problem:
                await call
            assert problem.value.code == "objects_unavailable" and problem.value.status == 503
            assert "http" not in problem.value.detail
