"""retention: files go when nobody is to keep them, unless they are held; jobs go when nothing needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene, end_of
from tests.flow.old import DAY, Old
from tocsin.errors import Unavailable
from tocsin.flow import retention
from tocsin.node.archivist import Archivist
from tocsin.settings import Settings
from tocsin.store.parquet import Parquet
from tocsin.telemetry import LOOP_ERRORS


@pytest.fixture
async def old(scene: Scene, tmp_path: Path) -> AsyncIterator[Old]:
    """A day with runs, archived."""
    parquet = Parquet(scene.node.objects, tmp_path / "cold")
    old = Old(scene, parquet)
    await old.make_day(DAY)
    await old.rows(await scene.job(), DAY, 3)
    assert await old.archive() == [DAY]
    yield old
    parquet.close()


def objects(folder: Path) -> list[Path]:
    return list((folder / "objects").rglob("*.parquet"))


async def keep(old: Old, **retention: Any) -> None:
    await old.scene.api.call("PATCH", "/v1/tenants/default", json={"retention": retention})


async def expire(old: Old, days: int) -> int:
    return await retention.expire(old.scene.db, old.scene.node.objects, days)


async def test_files_go_when_their_time_is_over(old: Old, tmp_path: Path) -> None:
    age = (await old.scene.now()).date() - DAY
    assert await expire(old, age.days) == 0 and len(objects(tmp_path)) == 1
    await keep(old, runs_days=age.days + 1)
    assert await expire(old, 1) == 0, "the tenant's own word goes before"
    await keep(old, runs_days=None)
    assert await expire(old, age.days - 1) == 1
    assert objects(tmp_path) == [] and await old.scene.value("select count(*) from archives") == 0
    assert (await old.scene.api.get("/v1/runs"))["items"] == []


async def test_what_is_held_stays(old: Old, tmp_path: Path) -> None:
    await keep(old, legal_hold=True, runs_days=1)
    assert await expire(old, 1) == 0 and len((await old.scene.api.get("/v1/runs"))["items"]) == 3
    shown = await old.scene.api.get("/v1/tenants/default")
    assert shown["retention"] == {"runs_days": 1, "legal_hold": True, "hot_days": None}
    await keep(old, legal_hold=False)
    assert await expire(old, 365) == 1 and objects(tmp_path) == []


async def test_what_a_crash_left_goes_with_the_next_turn(
    old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = old.scene.node.objects.delete

    async def crash(key: str) -> None:
        await delete(key)
        raise RuntimeError("crashed")

    monkeypatch.setattr(old.scene.node.objects, "delete", crash)
    with pytest.raises(RuntimeError):
        await expire(old, 1)
    assert (await old.scene.api.get("/v1/runs"))["items"] == [], "nobody looks for what is gone"
    monkeypatch.setattr(old.scene.node.objects, "delete", delete)
    assert await expire(old, 1) == 1
    assert await old.scene.value("select count(*) from archives") == 0


async def test_a_retention_that_is_none_is_refused(scene: Scene) -> None:
    for wrong in (
        {"runs_days": 0},
        {"runs_days": -1},
        {"runs_days": 10**9},
        {"legal_hold": "yes"},
        {"years": 7},
        {"hot_days": 1},
    ):
        await scene.api.call("PATCH", "/v1/tenants/default", json={"retention": wrong}, expect=422)
    shown = await scene.api.get("/v1/tenants/default")
    assert shown["retention"] == {"runs_days": None, "legal_hold": False, "hot_days": None}


async def test_one_time_jobs_leave_once_nothing_needs_them(scene: Scene) -> None:
    made = {}
    for name in ("gone", "hot", "dead", "again", "young"):
        made[name] = await scene.api.post("/v1/jobs", {"name": name, "target": PROCESS, "retry": {"max_attempts": 1}})
    standing = await scene.job(name="standing")
    worker = "019a0000-0000-7000-8000-000000000001"
    for run in await scene.take(5, worker):
        await scene.end(worker, end_of(run, "failed" if str(run["job_id"]) == made["dead"]["id"] else "succeeded"))
    [ended] = (await scene.api.get("/v1/runs", params={"job": made["again"]["id"]}))["items"]
    await scene.api.post(f"/v1/runs/{ended['id']}/retry")
    await scene.sql.execute("delete from history where job_id <> $1", made["hot"]["id"])
    await scene.sql.execute("update jobs set ended_at = now() - interval '9 days' where name <> 'young' and once")
    before = await scene.now() - timedelta(days=10)
    assert await retention.forget_jobs(scene.db, before) == 0
    await scene.sql.execute("update tenants set hot_days = 8")
    assert await retention.forget_jobs(scene.db, before) == 1, "the tenant's own days go before"
    left = {row["name"] for row in await scene.rows("select name from jobs")}
    assert left == {"hot", "dead", "again", "young", standing["name"]}


@pytest.mark.parametrize("own", [None, 30])
async def test_the_archivist_does_all_of_it_if_it_is_told_to(scene: Scene, tmp_path: Path, own: int | None) -> None:
    """By the server's setting or, if that says nothing, by the tenant's."""
    node = scene.node
    parquet = Parquet(node.objects, tmp_path / "cold")
    old = Old(scene, parquet)
    await old.make_day(DAY)
    await old.rows(await scene.job(), DAY, 2)
    for days, left in ((0, True), (30, False)):
        if own is not None and not left:
            await scene.sql.execute("update tenants set hot_days = $1", own)
            days = 0
        settings = Settings.load({}, home=tmp_path, database_url=node.settings.database_url, hot_days=days)
        await Archivist(node.db, node.objects, parquet, settings).run_once()
        assert (await old.hot() > 0) == left
    assert len((await scene.api.get("/v1/runs"))["items"]) == 2
    parquet.close()


async def test_an_archivist_that_fails_says_so_and_takes_its_time(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> int:
        raise Unavailable("no objects today")

    monkeypatch.setattr(retention, "expire", fail)
    failed = LOOP_ERRORS.labels("archivist")._value.get()
    settings = Settings.load({}, home=tmp_path, database_url=scene.node.settings.database_url)
    assert await Archivist(scene.db, scene.node.objects, scene.node.parquet, settings).run_once() == 60
    assert LOOP_ERRORS.labels("archivist")._value.get() == failed + 1


@pytest.mark.parametrize("wrong", [{"hot_days": 1}, {"hot_days": -3}, {"runs_days": 0}])
def test_settings_that_would_lose_runs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="must be"):
        Settings.load({}, **wrong)
