"""Parquet: what PostgreSQL wrote as CSV comes back as it was, from a folder and from S3."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE
from tocsin.errors import Contention, Unavailable
from tocsin.store import parquet as module
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import File, Parquet

COLUMNS = {"id": "UUID", "n": "INTEGER", "at": "TIMESTAMP", "text": "VARCHAR"}
ALL = 'select id::varchar as id, n, "at", text from read_parquet($FILES) order by n'
ENDLESS = "select sum(a.range * b.range) from read_parquet($FILES), range(10000000) a, range(10000000) b"
ID = "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071"


@pytest.fixture
async def parquet(store: ObjectStore, tmp_path: Path) -> AsyncIterator[Parquet]:
    made = Parquet(store, tmp_path / "cold")
    yield made
    made.close()


async def stored(parquet: Parquet, store: ObjectStore, tmp_path: Path, *texts: str, first: int = 1) -> File:
    """A file with a row for each text, as CSV has it."""
    rows = tmp_path / "rows.csv"
    rows.write_text("".join(f"{ID},{n},2026-03-01 00:00:00.000001,{text}\n" for n, text in enumerate(texts, first)))
    data = await parquet.write(rows, COLUMNS)
    file = File(f"history/{first}.parquet", len(data), hashlib.sha256(data).digest())
    await store.put(file.object, data)
    return file


async def test_rows_come_back_as_they_were(parquet: Parquet, store: ObjectStore, tmp_path: Path) -> None:
    texts = {"\\N": None, '""': "", '"\\N"': "\\N", '"a ""b"",\n\r\nc"': 'a "b",\n\r\nc', "é\u2028☃": "é\u2028☃"}
    file = await stored(parquet, store, tmp_path, *texts)
    rows = await parquet.query(ALL, [file])
    assert [row["text"] for row in rows] == list(texts.values())
    assert (rows[0]["id"], rows[0]["at"]) == (ID, datetime(2026, 3, 1, microsecond=1, tzinfo=UTC))


async def test_the_same_rows_make_the_same_bytes(parquet: Parquet, store: ObjectStore, tmp_path: Path) -> None:
    assert await stored(parquet, store, tmp_path, "a", "b") == await stored(parquet, store, tmp_path, "a", "b")


async def test_several_files_are_read_as_one(parquet: Parquet, store: ObjectStore, tmp_path: Path) -> None:
    files = [await stored(parquet, store, tmp_path, "a", "b", first=n) for n in (1, 11, 21)]
    rows = await parquet.query(ALL.replace("order", "where n > $least order"), files, {"least": 11})
    assert [row["n"] for row in rows] == [12, 21, 22]


async def test_what_is_not_what_was_stored_is_refused(parquet: Parquet, store: ObjectStore, tmp_path: Path) -> None:
    file = await stored(parquet, store, tmp_path, "a")
    await store.put(file.object, bytes(file.size))
    with pytest.raises(Unavailable) as refused:
        await parquet.query_stored(ALL, file)
    assert refused.value.code == "archive_damaged"
    with pytest.raises(Unavailable) as unread:
        await parquet.query(ALL, [file])
    assert unread.value.code in ("archive_damaged", "archive_unavailable")


async def test_a_query_that_takes_too_long_is_given_up(
    parquet: Parquet, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await stored(parquet, store, tmp_path, "a")
    monkeypatch.setattr(module, "_SECONDS", 0.05)
    with pytest.raises(Contention):
        await parquet.query(ENDLESS, [file])
    monkeypatch.setattr(module, "_SECONDS", 60.0)
    assert len(await parquet.query(ALL, [file])) == 1, "its thread is free again"


async def test_a_query_whose_caller_went_before_it_began_ends_too(
    parquet: Parquet, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await stored(parquet, store, tmp_path, "a")
    await parquet.query(ALL, [file])
    begins, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    engine, ask = parquet._engine._engine, parquet._engine._ask

    class Slow:
        def cursor(self) -> Any:
            begins.set()
            goes_on.wait()
            return engine.cursor()

    def watched(*args: Any) -> Any:
        try:
            return ask(*args)
        finally:
            ended.set()

    monkeypatch.setattr(parquet._engine, "_engine", Slow())
    monkeypatch.setattr(parquet._engine, "_ask", watched)
    asking = asyncio.create_task(parquet.query(ENDLESS, [file]))
    assert await asyncio.to_thread(begins.wait, PATIENCE)
    asking.cancel()
    await asyncio.wait([asking])
    goes_on.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
async def test_what_nobody_waits_for_gives_way(parquet: Parquet) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    reads, writes = (engine._threads.submit(niceness).result() for engine in (parquet._engine, parquet._patient))
    assert reads == niceness() < writes


@pytest.mark.parametrize("store", ["s3"], indirect=True)
async def test_copies_stay_until_there_is_no_room(
    parquet: Parquet, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [await stored(parquet, store, tmp_path, "a", first=n) for n in (1, 2, 3)]
    await parquet.query(ALL, files[:2])
    await store.delete(files[0].object)
    assert len(await parquet.query(ALL, files[:2])) == 2, "the copy is read"
    first, second = (tmp_path / "cold" / f"{file.checksum.hex()}.parquet" for file in files[:2])
    monkeypatch.setattr(module, "_KEPT_BYTES", files[1].size + files[2].size)
    os.utime(first, (0, 0))
    await parquet.query(ALL, files[1:])
    assert not first.exists() and second.exists(), "the one that was used longest ago makes room"


@pytest.mark.parametrize("store", ["s3"], indirect=True)
async def test_copies_that_nobody_used_for_a_day_go(parquet: Parquet, store: ObjectStore, tmp_path: Path) -> None:
    files = [await stored(parquet, store, tmp_path, "a", first=n) for n in (1, 2)]
    await parquet.query(ALL, files)
    first, second = (tmp_path / "cold" / f"{file.checksum.hex()}.parquet" for file in files)
    halves = [tmp_path / "cold" / name for name in ("ab12.77.1", "spill/left.tmp", "spill/new.tmp")]
    (tmp_path / "cold" / "spill").mkdir(exist_ok=True)
    for half in halves:
        half.touch()
    for left in (first, *halves[:2]):
        os.utime(left, (0, 0))
    await parquet.tidy()
    assert not first.exists() and second.exists()
    assert [half.exists() for half in halves] == [False, False, True], "what a server left that was killed"
