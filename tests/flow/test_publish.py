"""publish: other engines read what is archived, all of it and nothing else, whatever crashed."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene
from tests.flow.old import DAY, Old
from tests.tables import read, table
from tocsin.errors import Unavailable
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow import archive, publish, retention
from tocsin.flow.shared.cold import COLUMNS
from tocsin.node.archivist import Archivist
from tocsin.settings import Settings
from tocsin.store import iceberg, parquet

Rows = list[dict[str, Any]]


@pytest.fixture
async def job(old: Old) -> dict[str, Any]:
    """With runs of two days, which are archived."""
    made = await old.scene.job()
    for day in (DAY - timedelta(days=1), DAY):
        await old.make_day(day)
        await old.rows(made, day, 4)
    await old.archive()
    return made


async def bring_up(old: Old, seen: dict[int, str] | None = None) -> list[int]:
    return await publish.publish(old.scene.db, old.scene.node.objects, {} if seen is None else seen)


async def tenant(old: Old, slug: str = "default") -> int:
    return await old.scene.value("select id from tenants where slug = $1", slug)  # type: ignore[no-any-return]


def folder(home: Path, tenant_id: int) -> Path:
    return home / "objects" / "history" / str(tenant_id)


def location(home: Path, tenant_id: int) -> str:
    return f"file://{folder(home, tenant_id)}"


async def archived(old: Old) -> Rows:
    """What is in the files, read without their table."""
    files = [parquet.File(*row) for row in await old.scene.rows("select object, bytes, checksum from archives")]
    rows = await old.parquet.query("select * from read_parquet($FILES) order by run_id, attempt", files)
    return [{name: _naive(value) for name, value in row.items()} for row in rows]


def _naive(value: Any) -> Any:
    return value.replace(tzinfo=None) if hasattr(value, "tzinfo") else value


async def test_another_engine_reads_what_is_archived(old: Old, job: dict[str, Any], tmp_path: Path) -> None:
    own = await tenant(old)
    assert await bring_up(old) == [own]
    rows, wanted = read(location(tmp_path, own)), await archived(old)
    assert len(rows) >= 8 and [{name: row[name] for name in COLUMNS} for row in rows] == wanted
    assert {row["job_id"] for row in rows} == {UUID(job["id"])}


async def test_files_whose_columns_have_no_numbers_are_read_as_well(
    old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier releases, which lack the newest columns, too."""
    plain = parquet.SQL["write"].replace(", field_ids $NUMBERS", "")
    assert plain != parquet.SQL["write"]
    fewer = plain.replace("select *", "select * exclude (logical_at, workflow_run_id)")
    await old.make_day(DAY)
    await old.rows(await old.scene.job(), DAY, 3)
    with monkeypatch.context() as before:
        before.setitem(parquet.SQL, "write", fewer)
        before.setitem(archive.SQL, "proof_of_file", _without(archive.SQL["proof_of_file"]))
        await old.archive()
    await bring_up(old)
    rows = read(location(tmp_path, await tenant(old)))
    assert [{name: row[name] for name in COLUMNS} for row in rows] == [
        row | {"logical_at": None, "workflow_run_id": None} for row in await archived(old)
    ]


def _without(proof: str) -> str:
    return proof.replace(
        "epoch_us(logical_at) as logical_at, workflow_run_id", "null as logical_at, null as workflow_run_id"
    )


async def test_days_are_found_without_opening_the_files_of_others(
    old: Old, job: dict[str, Any], tmp_path: Path
) -> None:
    own = await tenant(old)
    await bring_up(old)
    asked = {"row_filter": f"day = '{DAY}'"}
    [file] = table(location(tmp_path, own)).scan(**asked).plan_files()
    assert f"/{DAY}-" in file.file.file_path
    assert {row["day"] for row in read(location(tmp_path, own), **asked)} == {DAY}
    assert {row["day"] for row in read(location(tmp_path, own))} == {DAY - timedelta(days=1), DAY}


async def test_tenants_have_tables_of_their_own(old: Old, job: dict[str, Any], tmp_path: Path) -> None:
    other = await _another(old, DAY - timedelta(days=2))
    own = await tenant(old)
    assert await bring_up(old) == sorted([own, other])
    for id_ in (own, other):
        assert {row["tenant_id"] for row in read(location(tmp_path, id_))} == {id_}


async def _another(old: Old, day: date) -> int:
    await old.scene.api.post("/v1/tenants", {"slug": "other"})
    api: Api = await old.scene.api.with_key("admin", "other")
    await old.make_day(day)
    await old.rows(await old.scene.job(api), day, 2)
    await old.archive()
    return await tenant(old, "other")


async def test_nothing_is_written_when_nothing_is_new(old: Old, job: dict[str, Any], tmp_path: Path) -> None:
    own, seen = await tenant(old), dict[int, str]()
    assert await bring_up(old, seen) == [own]
    before = {path: path.stat().st_mtime_ns for path in folder(tmp_path, own).rglob("*")}
    assert await bring_up(old, seen) == [], "it is known"
    assert await bring_up(old) == [], "another server sees that it is there"
    assert {path: path.stat().st_mtime_ns for path in folder(tmp_path, own).rglob("*")} == before


async def test_a_table_that_came_to_harm_is_published_anew(old: Old, job: dict[str, Any], tmp_path: Path) -> None:
    own = await tenant(old)
    await bring_up(old)
    whole = read(location(tmp_path, own))
    (folder(tmp_path, own) / iceberg.names(1)[-1]).write_text("{")
    assert await bring_up(old) == [own]
    assert read(location(tmp_path, own)) == whole


async def test_a_tenant_without_files_has_no_table(scene: Scene, old: Old, tmp_path: Path) -> None:
    assert await bring_up(old) == []
    assert not folder(tmp_path, await tenant(old)).exists()


@pytest.mark.parametrize("point", publish.POINTS)
async def test_the_next_turn_repairs_what_a_crash_left(
    old: Old, job: dict[str, Any], point: str, tmp_path: Path
) -> None:
    own = await tenant(old)
    await bring_up(old)
    before = read(location(tmp_path, own))
    day = DAY + timedelta(days=1)
    await old.make_day(day)
    await old.rows(job, day, 2)
    await old.archive(day + timedelta(days=1))
    old.scene.db.failpoints = Failpoints(f"publish.{point}=raise")
    with pytest.raises(InjectedFault):
        await bring_up(old)
    left = read(location(tmp_path, own))
    assert len(left) > len(before) if point == "named" else left == before, "whole at any time"
    assert await bring_up(old) == ([] if point == "named" else [own])
    assert len(read(location(tmp_path, own))) == await old.scene.value("select sum(rows) from archives")


async def test_no_table_names_a_file_that_retention_took_away(
    old: Old, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = await tenant(old)
    age = (await old.scene.now()).date() - DAY
    settings = Settings(iceberg=True, runs_days=age.days)
    archivist = Archivist(old.scene.db, old.scene.node.objects, old.parquet, settings)
    named = []
    remove = retention.remove

    async def look(*args: Any) -> int:
        named.extend(file.file.file_path for file in table(location(tmp_path, own)).scan().plan_files())
        return await remove(*args)

    monkeypatch.setattr(retention, "remove", look)
    await archivist.run_once()
    assert len(named) == 1 and f"/{DAY}-" in named[0], "before the other went"
    assert {row["day"] for row in read(location(tmp_path, own))} == {DAY}
    await old.scene.api.call("PATCH", "/v1/tenants/default", json={"retention": {"runs_days": 1}})
    await archivist.run_once()
    assert read(location(tmp_path, own)) == []
    assert list(folder(tmp_path, own).glob("*.parquet")) == []


async def test_versions_of_long_ago_go(
    old: Old, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_KEPT", 2)
    own = await tenant(old)
    for days in range(1, 5):
        day = DAY + timedelta(days=days)
        await old.make_day(day)
        await old.rows(job, day, 1)
        await old.archive(day + timedelta(days=1))
        assert await bring_up(old) == [own]
    left = {path.name for path in (folder(tmp_path, own) / "metadata").iterdir()}
    kept = {Path(name).name for version in (3, 4) for name in iceberg.names(version)}
    assert left == kept | {Path(iceberg.HINT).name}
    assert len({row["day"] for row in read(location(tmp_path, own))}) == 6


async def test_servers_leave_it_be_unless_they_are_told(old: Old, job: dict[str, Any], tmp_path: Path) -> None:
    await Archivist(old.scene.db, old.scene.node.objects, old.parquet, Settings()).run_once()
    assert not (folder(tmp_path, await tenant(old)) / "metadata").exists()


async def test_nothing_is_published_of_a_tenant_that_is_erased(old: Old, job: dict[str, Any], tmp_path: Path) -> None:
    other = await _another(old, DAY - timedelta(days=2))
    await old.scene.sql.execute(
        "insert into erasures (tenant_id, slug, home_id, actor) values ($1, 'other', $2, 'someone')",
        other,
        await tenant(old),
    )
    assert await bring_up(old) == [await tenant(old)]
    assert not (folder(tmp_path, other) / "metadata").exists()


async def test_a_table_that_cannot_be_published_keeps_no_other_back(
    old: Old, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, own, seen = await _another(old, DAY - timedelta(days=2)), await tenant(old), dict[int, str]()
    put = old.scene.node.objects.put

    async def refuse(key: str, data: bytes, **kwargs: Any) -> None:
        if key.startswith(f"history/{own}/"):
            raise Unavailable("object storage refused a write: 403")
        await put(key, data, **kwargs)

    monkeypatch.setattr(old.scene.node.objects, "put", refuse)
    assert await bring_up(old, seen) == [other]
    monkeypatch.undo()
    assert await bring_up(old, seen) == [own]
