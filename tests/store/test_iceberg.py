"""Iceberg: an engine that is not ours reads the table, from a folder and from S3."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime
from pathlib import Path
from uuid import UUID

from tests.tables import read, table
from tocsin.store import iceberg
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import Parquet

COLUMNS = {"run_id": "UUID", "attempt": "INTEGER", "at": "TIMESTAMP", "done": "BOOLEAN", "fence": "BIGINT"}
ID = "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071"
NOW = datetime(2026, 3, 5, tzinfo=UTC)


def access() -> dict[str, str]:
    """How the engine gets at the S3 server, if there is one."""
    given = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
    given |= {"access-key-id": "AWS_ACCESS_KEY_ID", "secret-access-key": "AWS_SECRET_ACCESS_KEY"}
    return {f"s3.{name}": os.environ[variable] for name, variable in given.items() if variable in os.environ}


async def test_a_table_is_read_by_another_engine(store: ObjectStore, tmp_path: Path) -> None:
    parquet, files = Parquet(store, tmp_path / "cold"), []
    for day in (date(1969, 12, 31), date(2026, 3, 1)):
        rows = tmp_path / "rows.csv"
        rows.write_text(f"{ID},{len(files)},{day} 01:02:03.000004,t,{2**40}\n")
        data = await parquet.write(rows, COLUMNS)
        await store.put(f"history/7/{day}.parquet", data)
        files.append(iceberg.DataFile(store.address(f"history/7/{day}.parquet"), day, 1, len(data)))
    parquet.close()
    described = iceberg.Table(store.address("history/7"), COLUMNS)
    for name, content in zip(iceberg.names(3), iceberg.write(described, files, 3, NOW), strict=True):
        await store.put(f"history/7/{name}", content)
    await store.put(f"history/7/{iceberg.HINT}", b"3")

    assert read(described.location, access()) == [
        {
            **{"run_id": UUID(ID), "attempt": number, "at": datetime(day.year, day.month, day.day, 1, 2, 3, 4)},
            **{"done": True, "fence": 2**40, "day": day},
        }
        for number, day in enumerate((date(1969, 12, 31), date(2026, 3, 1)))
    ]
    found = table(described.location, **access())
    assert [one.file.file_path for one in found.scan(row_filter="day > '2000-01-01'").plan_files()] == [
        files[1].address
    ]
    assert found.metadata.last_sequence_number == 3 and len(found.metadata.snapshots) == 1


def test_versions_that_say_the_same_are_known_by_their_state() -> None:
    described = iceberg.Table("file:///tables/7", COLUMNS)
    files = [iceberg.DataFile("file:///tables/7/x.parquet", date(2026, 3, 1), 1, 100)]
    written = [iceberg.write(described, files, version, NOW)[-1] for version in (1, 2)]
    assert {iceberg.state_of(metadata) for metadata in written} == {described.state(files)}
    others = [
        described.state([]),
        described.state([files[0]._replace(rows=2)]),
        described._replace(location="file:///elsewhere/7").state(files),
        described._replace(columns=COLUMNS | {"more": "VARCHAR"}).state(files),
    ]
    assert len({described.state(files), *others}) == 5
    assert iceberg.state_of(b"{") is iceberg.state_of(b'{"properties": {}}') is None
