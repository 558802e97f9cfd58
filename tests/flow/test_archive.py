"""archive: days leave PostgreSQL whole, or not at all, whatever crashes; and are read as before."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, end_of
from tests.flow.old import DAY, Old
from tocsin.clock import iso
from tocsin.errors import Unavailable
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow import archive
from tocsin.flow.shared.cold import COLUMNS
from tocsin.model.ids import new_id
from tocsin.store.db import connect
from tocsin.store.objects import Refusals
from tocsin.store.parquet import File
from tocsin.telemetry import ARCHIVE_LAG


async def test_a_closed_day_becomes_files_and_its_partition_goes(old: Old) -> None:
    await old.scene.api.post("/v1/tenants", {"slug": "other"})
    other = await old.scene.api.with_key("admin", "other")
    mine, theirs = await old.scene.job(name="mine"), await old.scene.job(other, name="theirs")
    await old.make_day(DAY)
    await old.rows(mine, DAY, 30)
    await old.rows(theirs, DAY, 5)
    count = await old.hot()
    assert await old.archive() == [DAY]
    assert await old.hot() == 0 and f"history_{DAY:%Y%m%d}" not in await old.tables()
    files = await old.scene.rows("select * from archives")
    assert sum(file["rows"] for file in files) == count and len({file["tenant_id"] for file in files}) == 2
    assert await old.archive() == []


async def test_a_day_with_a_live_run_waits_for_it(old: Old) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    [run] = await old.scene.ask(job)
    await old.scene.sql.execute(
        "update runs set id = $2 where id = $1", run, new_id(datetime.combine(DAY, time(2), UTC))
    )
    assert await old.archive() == []
    assert await old.hot() > 0
    await old.scene.sql.execute("delete from runs")
    assert await old.archive() == [DAY]


@pytest.mark.parametrize("point", archive.POINTS)
async def test_the_next_turn_repairs_what_a_crash_left(old: Old, point: str, tmp_path: Path) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 10)
    count = await old.hot()
    old.scene.db.failpoints = Failpoints(f"archive.{point}=raise")
    with pytest.raises(InjectedFault):
        await old.archive()
    if point not in ("cold", "detached", "dropped"):
        assert await old.hot() == count
    assert await old.archive() == ([] if point == "dropped" else [DAY])
    assert await old.scene.value("select sum(rows) from archives") == count
    assert await old.hot() == 0 and f"history_{DAY:%Y%m%d}" not in await old.tables()
    stored = [path for path in (tmp_path / "objects").rglob("*.parquet")]
    assert len(stored) == await old.scene.value("select count(*) from archives") == 1


async def test_no_file_of_an_earlier_try_outlives_retention(old: Old, tmp_path: Path) -> None:
    job = await old.scene.job(name="before")
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    for point in ("stored", "listed"):
        old.scene.db.failpoints = Failpoints(f"archive.{point}=raise")
        with pytest.raises(InjectedFault):
            await old.archive()
        await old.scene.sql.execute("update jobs set name = $1", f"after {point}")
    assert await old.archive() == [DAY]
    stored = {str(path.relative_to(tmp_path / "objects")) for path in (tmp_path / "objects").rglob("*.parquet")}
    assert stored == {await old.scene.value("select object from archives")}


async def test_an_archivist_that_was_cut_off_removes_nothing_that_another_has_made(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await old.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    old.scene.db.failpoints = Failpoints("archive.proved=raise")
    with pytest.raises(InjectedFault):
        await old.archive()
    objects, reached, go_on = old.scene.node.objects, asyncio.Event(), asyncio.Event()
    delete = objects.delete

    async def held_up(key: str) -> None:
        if not reached.is_set():
            reached.set()
            await go_on.wait()
        await delete(key)

    monkeypatch.setattr(objects, "delete", held_up)
    cut_off = asyncio.create_task(old.archive())
    await reached.wait()
    turn = "from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()"
    await old.scene.rows(f"select pg_terminate_backend(pid, 10000) {turn}")
    assert await old.archive() == [DAY]
    go_on.set()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await cut_off
    assert await objects.keys("history/") == [await old.scene.value("select object from archives")]
    assert (await old.scene.api.get(f"/v1/runs?job={job['id']}"))["items"]


async def test_a_day_that_cannot_go_is_told_by_the_lag(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    await old.archive(DAY)
    assert ARCHIVE_LAG._value.get() == 0, "it may stay"
    monkeypatch.setattr(old.scene.node.objects, "put", _down)
    late = (await old.scene.now() - datetime.combine(DAY, time(), UTC)) / timedelta(days=1) - 30
    for days, told in ((0, late), (7, late - 7)):
        await old.archive((await old.scene.now()).date() - timedelta(days=30 + days - 1))
        assert ARCHIVE_LAG._value.get() / 86_400 == pytest.approx(told, abs=0.01)
    monkeypatch.undo()
    await old.archive()
    assert ARCHIVE_LAG._value.get() == 0


async def _down(*_args: Any, **_kwargs: Any) -> None:
    raise Unavailable("object storage refused a write: 507")


def spoil(old: Old, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Let the store change what is put under such names."""
    put = old.scene.node.objects.put

    async def put_changed(key: str, data: bytes, **kwargs: Any) -> None:
        changed = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        await put(key, changed if key.startswith(prefix) else data, **kwargs)

    monkeypatch.setattr(old.scene.node.objects, "put", put_changed)


async def test_a_file_that_came_back_changed_drops_nothing(
    old: Old, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    count = await old.hot()
    spoil(old, monkeypatch, "history/")
    assert await old.archive() == [] and "is not what was archived" in capsys.readouterr().out
    assert await old.hot() == count and await old.scene.value("select count(*) from archives") == 0


async def test_a_row_that_the_file_lacks_drops_nothing(
    old: Old, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 5)
    fewer = archive.SQL["rows"].replace("order by h.run_id, h.attempt", "order by h.run_id, h.attempt limit 4")
    monkeypatch.setitem(archive.SQL, "rows", fewer)
    assert await old.archive() == [] and "does not hold the rows" in capsys.readouterr().out
    other = archive.SQL["rows"].replace("limit 4", "").replace("h.exit_code", "coalesce(h.exit_code, 0) + 1")
    monkeypatch.setitem(archive.SQL, "rows", other)
    assert await old.archive() == [] and "does not hold the rows" in capsys.readouterr().out
    assert await old.scene.value("select count(*) from archived_days") == 0


async def test_large_days_are_several_files_and_no_run_is_torn_apart(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 20)
    count = await old.hot()
    monkeypatch.setattr(archive, "SLICE_ROWS", 3)
    monkeypatch.setattr(archive, "MOST_BYTES", 2_000)
    assert await old.archive() == [DAY]
    assert await old.scene.value("select sum(rows) from archives") == count
    assert 3 <= await old.scene.value("select count(*) from archives") < count / 3, "of several slices each"


async def test_days_of_large_rows_are_several_files_however_few_rows(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 6)
    await old.scene.sql.execute(
        "update history set result = (select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
    )
    count = await old.hot()
    monkeypatch.setattr(archive, "SLICE_BYTES", 5_000)
    monkeypatch.setattr(archive, "MOST_BYTES", 5_000)
    assert await old.archive() == [DAY]
    files = await old.scene.rows("select rows from archives")
    assert sum(file["rows"] for file in files) == count and len(files) >= 3


async def test_a_jobs_document_is_written_once_for_each_version_in_a_file(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "SLICE_ROWS", 2)
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 5)
    await old.archive()
    [file] = [
        File(row["object"], row["bytes"], row["checksum"]) for row in await old.scene.rows("select * from archives")
    ]
    rows = await old.parquet.query("select spec from read_parquet($FILES) order by run_id, attempt", [file])
    assert [row["spec"] is not None for row in rows] == [True] + [False] * (len(rows) - 1)
    assert "process" in rows[0]["spec"]


# ── tenants that let a day go before others do ───────────────────────────────────────────────────────────────────────


class Two(NamedTuple):
    """Two tenants with runs of one day, and what each was told of them."""

    old: Old
    other: Api
    jobs: tuple[dict[str, Any], dict[str, Any]]
    count: int
    before: list[Any]

    @classmethod
    async def make(cls, old: Old) -> Two:
        await old.scene.api.post("/v1/tenants", {"slug": "other"})
        other = await old.scene.api.with_key("admin", "other")
        jobs = await old.job(name="mine"), await old.scene.job(other, name="theirs")
        await old.make_day(DAY)
        for job in jobs:
            await old.rows(job, DAY, 8)
        made = cls(old, other, jobs, await old.hot(), [])
        return made._replace(before=await made.told())

    async def told(self) -> list[Any]:
        span = {"from": f"{DAY}T00:00:00Z", "to": f"{DAY + timedelta(days=1)}T00:00:00Z"}
        paths = (("/v1/runs", {}), ("/v1/reports/runs", span), ("/v1/reports/failures", span))
        return [await api.get(path, params=query) for api in (self.old.scene.api, self.other) for path, query in paths]

    async def keep(self, slug: str, days: int) -> None:
        """Let a tenant have its days in the database until this long after `DAY`."""
        age = (await self.old.scene.now()).date() - DAY
        asked = {"retention": {"hot_days": age.days + days}}
        await self.old.scene.api.call("PATCH", f"/v1/tenants/{slug}", json=asked)

    async def own(self) -> int:
        return await self.old.scene.value(  # type: ignore[no-any-return]
            "select count(*) from history h join tenants t on t.id = h.tenant_id where t.slug = 'default'"
        )


async def test_a_tenant_with_fewer_hot_days_goes_before_others(old: Old) -> None:
    two = await Two.make(old)
    await two.keep("default", 0)
    assert await old.archive(DAY) == [], "its last day here"
    await two.keep("default", -1)
    assert await old.archive(DAY) == [DAY] and await old.archive(DAY) == []
    assert await two.own() == 0 and 0 < await old.hot() < two.count
    assert await old.scene.value("select count(*) from archived_days") == 0
    assert await two.told() == two.before
    assert await old.archive() == [DAY]
    assert await old.hot() == 0 and f"history_{DAY:%Y%m%d}" not in await old.tables()
    assert await old.scene.value("select sum(rows) from archives") == two.count
    assert await two.told() == two.before


async def test_a_tenant_with_more_hot_days_keeps_its_rows_alone(old: Old) -> None:
    two = await Two.make(old)
    await two.keep("default", 1)
    own = await two.own()
    assert await old.archive() == [DAY]
    assert await two.own() == await old.hot() == own > 0
    assert await two.told() == two.before
    await two.keep("default", -1)
    assert await old.archive() == [DAY] and await old.hot() == 0
    assert await two.told() == two.before


async def test_a_live_run_keeps_only_what_is_its_tenants(old: Old) -> None:
    two = await Two.make(old)
    [run] = await old.scene.ask(two.jobs[0])
    live = new_id(datetime.combine(DAY, time(2), UTC))
    await old.scene.sql.execute("update runs set id = $2 where id = $1", run, live)
    own = await two.own()
    assert await old.archive() == [DAY]
    assert await old.hot() == await two.own() == own
    await old.scene.sql.execute("delete from runs")
    assert await two.told() == two.before
    assert await old.archive() == [DAY] and await old.hot() == 0
    assert await two.told() == two.before


@pytest.mark.parametrize("point", archive.POINTS_OF_PART)
async def test_the_next_turn_repairs_what_a_crash_left_of_a_tenants_part(old: Old, point: str, tmp_path: Path) -> None:
    two = await Two.make(old)
    await two.keep("default", -1)
    old.scene.db.failpoints = Failpoints(f"archive.{point}=raise")
    with pytest.raises(InjectedFault):
        await old.archive(DAY)
    assert await two.told() == two.before
    assert await old.archive(DAY) == ([] if point == "listed" else [DAY])
    assert await two.told() == two.before and await two.own() == 0
    stored = list((tmp_path / "objects").rglob("*.parquet"))
    assert len(stored) == await old.scene.value("select count(*) from archives") == 1


async def test_a_tenant_whose_file_storage_refuses_delays_no_other_archive(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = await Two.make(old)
    theirs, before = await old.hot() - await two.own(), await two.told()
    objects = old.scene.node.objects
    put = objects.put
    other = await old.scene.value("select id from tenants where slug = 'other'")

    async def refuse(key: str, data: bytes, *, durable: bool = False) -> None:
        if key.startswith(f"history/{other}/"):
            raise Unavailable("object storage refused a write")
        await put(key, data, durable=durable)

    with monkeypatch.context() as today:
        today.setattr(objects, "put", refuse)
        assert await old.archive() == [DAY]
        assert await two.own() == 0 and await old.hot() == theirs > 0
        today.setattr(Refusals, "MOST", 1)
        with pytest.raises(Unavailable):
            await old.archive()
    assert await two.told() == before
    assert await old.archive() == [DAY] and await old.hot() == 0


async def test_what_cannot_be_archived_of_one_tenant_keeps_nothing_else_back(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = await Two.make(old)
    following = DAY + timedelta(days=1)
    await old.make_day(following)
    await old.rows(two.jobs[0], following, 2)
    theirs = await old.hot() - await two.own()
    before = await two.told()
    with monkeypatch.context() as today:
        other = await old.scene.value("select id from tenants where slug = 'other'")
        spoil(old, today, f"history/{other}/")
        assert await old.archive(following + timedelta(days=1)) == [DAY, following]
    assert await two.own() == 0 and await old.hot() == theirs > 0
    assert ARCHIVE_LAG._value.get() > 0
    assert await two.told() == before
    assert await old.archive(following + timedelta(days=1)) == [DAY]
    assert ARCHIVE_LAG._value.get() == 0 and await old.hot() == 0
    assert await two.told() == before


async def test_what_was_listed_for_a_whole_day_may_go_by_itself_after_a_crash(old: Old) -> None:
    two = await Two.make(old)
    old.scene.db.failpoints = Failpoints("archive.listed=raise")
    with pytest.raises(InjectedFault):
        await old.archive()
    await two.keep("other", 1)
    assert await old.archive() == [DAY] and await two.own() == 0 and await old.hot() > 0
    assert await two.told() == two.before


async def test_who_erases_a_tenant_waits_for_one_day_at_most(old: Old) -> None:
    await old.scene.api.post("/v1/tenants", {"slug": "other"})
    job = await old.scene.job()
    days = [DAY - timedelta(days=1), DAY]
    for day in days:
        await old.make_day(day)
        await old.rows(job, day, 2)
    await old.scene.api.call("DELETE", "/v1/tenants/other", json={"confirm": "other"})
    assert await old.archive() == days[:1] and await old.archive() == days[1:]


async def test_nothing_goes_by_itself_while_a_server_lives_that_would_not_find_it(old: Old) -> None:
    two = await Two.make(old)
    await two.keep("default", -1)
    await old.scene.sql.execute(
        "insert into servers (id, name, version, newest_migration) values ($1, 'old', '0', '0043_x')", uuid.uuid4()
    )
    assert await old.archive(DAY) == [] and await old.hot() == two.count
    await old.scene.sql.execute("delete from servers where name = 'old'")
    assert await old.archive(DAY) == [DAY]


async def test_what_is_being_detached_is_finished_before_another_is_begun(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL detaches one at a time: an older day that closes meanwhile must not stand in the way for ever."""
    job = await old.scene.job()
    days = [DAY - timedelta(days=1), DAY]
    for day in days:
        await old.make_day(day)
        await old.rows(job, day, 2)
    [run] = await old.scene.ask(job)
    live = new_id(datetime.combine(days[0], time(2), UTC))
    await old.scene.sql.execute("update runs set id = $2 where id = $1", run, live)
    monkeypatch.setattr(archive, "_LOCK_WAIT", "100ms")
    async with long_report(old):
        with pytest.raises(Exception, match="lock timeout"):
            await old.archive()
    await old.scene.sql.execute("delete from runs")
    assert await old.archive() == days[::-1]


async def test_all_that_history_holds_is_archived(scene: Scene) -> None:
    """A column that comes to the table must come to the files."""
    rows = await scene.rows(
        "select attname from pg_attribute where attrelid = 'history'::regclass and attnum > 0 and not attisdropped"
    )
    assert {row["attname"] for row in rows} == COLUMNS.keys() - {"job_name", "pool", "spec"}


# ── while others read ────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def long_report(old: Old) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Somebody who counts rows as a report does, but with all the time he wants; may count once more."""
    reader = await connect(old.scene.db.url, "owner", idle_in_transaction_session_timeout="0")

    async def count() -> int:
        return int(await reader.fetchval("select count(*) from history"))

    async with reader.transaction(isolation="repeatable_read"):
        assert await count() > 0
        yield count
    await reader.close()


async def test_what_a_report_under_way_delays_is_finished_by_the_next_turn(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    rows = await old.hot()
    monkeypatch.setattr(archive, "_LOCK_WAIT", "100ms")
    async with long_report(old) as count:
        with pytest.raises(Exception, match="lock timeout"):
            await old.archive()
        assert await count() == rows
        pending = await old.scene.value("select bool_or(inhdetachpending) from pg_inherits")
        assert pending, "the detachment was begun"
        assert len((await old.scene.api.get("/v1/runs"))["items"]) == 3
    assert await old.archive() == [DAY]


async def test_nobody_waits_while_a_partition_waits_for_a_report_under_way(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await old.scene.job(retry={"max_attempts": 1})
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    await old.scene.ask(job, 6)
    worker = str(uuid.uuid4())
    runs = await old.scene.take(6, worker)
    span = {"from": f"{DAY}T00:00:00Z", "to": iso(await old.scene.now() + timedelta(days=1))}
    monkeypatch.setattr(archive, "_LOCK_WAIT", "10min")
    async with long_report(old):
        archiving = asyncio.create_task(old.archive())
        while not await old.scene.value(
            "select exists (select from pg_stat_activity where wait_event = 'virtualxid' and query like '%detach%')"
        ):
            assert not archiving.done(), archiving
            await asyncio.sleep(0.01)
        for number, run in enumerate(runs, 1):
            assert (await old.scene.end(worker, end_of(run))).accepted
            [total] = (await old.scene.api.get("/v1/reports/runs", params=span))["items"]
            assert total["runs"] == 3 + number
            assert len((await old.scene.api.get("/v1/runs"))["items"]) == 9
        assert not archiving.done(), "it has waited all the time"
    assert await archiving == [DAY]
