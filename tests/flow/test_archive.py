"""archive: days leave PostgreSQL whole, or not at all, whatever crashes; and are read as before."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene
from tocsin.clock import iso
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow import archive, history, partitions
from tocsin.flow.shared import cold
from tocsin.flow.shared.cold import COLUMNS
from tocsin.model.ids import new_id
from tocsin.store.db import connect
from tocsin.store.parquet import File, Parquet

DAY = date(2026, 3, 10)
STATES = ("succeeded", "dead", "cancelled", "skipped")


class Old:
    """Days of long ago, with rows in them."""

    def __init__(self, scene: Scene, parquet: Parquet) -> None:
        self.scene, self.parquet = scene, parquet
        self.rng = random.Random(3)

    async def make_day(self, day: date) -> None:
        await partitions.make(self.scene.db, datetime.combine(day, time(), UTC))

    async def job(self, **spec: Any) -> dict[str, Any]:
        """A job that is older than all these days."""
        made = await self.scene.job(**spec)
        old = f"018f{made['id'][4:]}"
        await self.scene.sql.execute("update jobs set id = $2 where id = $1", made["id"], old)
        return made | {"id": old}

    async def rows(self, job: dict[str, Any], day: date, count: int, **given: Any) -> list[str]:
        """Runs of that day, each with one or two attempts; their ids, oldest first."""
        ids = []
        for number in range(count):
            made = datetime.combine(day, time(1), UTC) + timedelta(seconds=number)
            ids.append(new_id(made))
            attempts = self.rng.choice([1, 2])
            for attempt in range(1, attempts + 1):
                state = given.get("state") or self.rng.choice(STATES)
                started = None if state == "skipped" else made + timedelta(microseconds=123_456)
                await self.scene.sql.execute(
                    "insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome,"
                    " reason, count, fence, trigger, priority, failures, losses, max_attempts, scheduled_for, ready_at,"
                    " started_at, finished_at, worker_id, exit_code, error_class, error, usage, result, args, tags)"
                    " select tenant_id, $1, $2, id, version, $3, $4, $5, $6, 1, 7, 'manual', 500, 0, 0, 4, $7, $7, $8,"
                    " $9, $10, $11, $12, $13, $14, $15, $16, tags from jobs where id = $17",
                    *(ids[-1], attempt, attempt == attempts, state, None if started is None else "failed"),
                    *(None if started else "skipped_overlap", made, started, made + timedelta(seconds=2)),
                    *(uuid.uuid4() if started else None, self.rng.choice([None, 0, 137]), "Boom" if started else None),
                    *(
                        self.rng.choice(["", "\\N", 'said "no",\n\\N\r\n']) if started else None,
                        '{"cpu": 1}',
                        None if attempt == 1 else '{"é": "\\u0007"}',
                    ),
                    *('{"n": 1}', job["id"]),
                )
        return ids

    async def archive(self, before: date = DAY + timedelta(days=1)) -> list[date]:
        node = self.scene.node
        return await archive.archive(node.db, node.objects, self.parquet, before)

    async def hot(self) -> int:
        return await self.scene.value("select count(*) from history")  # type: ignore[no-any-return]

    async def tables(self) -> set[str]:
        found = await self.scene.rows("select relname from pg_class where relname ~ '^history_2026[0-9]{4}$'")
        return {row["relname"] for row in found}


@pytest.fixture
async def old(scene: Scene, tmp_path: Path) -> AsyncIterator[Old]:
    parquet = Parquet(scene.node.objects, tmp_path / "cold")
    old = Old(scene, parquet)
    yield old
    parquet.close()
    for name in await old.tables() & {f"history_{DAY + timedelta(days=d):%Y%m%d}" for d in range(-5, 5)}:
        await scene.sql.execute(f"drop table {name}")


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


async def test_a_file_that_came_back_changed_drops_nothing(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    count = await old.hot()
    put = old.scene.node.objects.put

    async def spoil(key: str, data: bytes, **kwargs: Any) -> None:
        await put(key, data[:100] + bytes([data[100] ^ 1]) + data[101:], **kwargs)

    monkeypatch.setattr(old.scene.node.objects, "put", spoil)
    with pytest.raises(Exception, match="is not what was archived"):
        await old.archive()
    assert await old.hot() == count and await old.scene.value("select count(*) from archives") == 0


async def test_a_row_that_the_file_lacks_drops_nothing(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 5)
    fewer = archive.SQL["rows"].replace("order by h.run_id, h.attempt", "order by h.run_id, h.attempt limit 4")
    monkeypatch.setitem(archive.SQL, "rows", fewer)
    with pytest.raises(Exception, match="does not hold the rows"):
        await old.archive()
    other = archive.SQL["rows"].replace("limit 4", "").replace("h.exit_code", "coalesce(h.exit_code, 0) + 1")
    monkeypatch.setitem(archive.SQL, "rows", other)
    with pytest.raises(Exception, match="does not hold the rows"):
        await old.archive()
    assert await old.scene.value("select count(*) from archived_days") == 0


async def test_large_days_are_several_files_and_no_run_is_torn_apart(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 20)
    count = await old.hot()
    monkeypatch.setattr(archive, "MOST_ROWS", 7)
    assert await old.archive() == [DAY]
    assert await old.scene.value("select sum(rows) from archives") == count
    assert await old.scene.value("select count(*) from archives") >= 3


async def test_days_of_large_rows_are_several_files_however_few_rows(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 6)
    await old.scene.sql.execute(
        "update history set result = (select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
    )
    count = await old.hot()
    monkeypatch.setattr(archive, "MOST_BYTES", 5_000)
    assert await old.archive() == [DAY]
    files = await old.scene.rows("select rows from archives")
    assert sum(file["rows"] for file in files) == count and len(files) >= 3


async def test_a_jobs_document_is_written_once_for_each_version_in_a_file(old: Old) -> None:
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


async def test_nothing_goes_by_itself_while_a_server_lives_that_would_not_find_it(old: Old) -> None:
    two = await Two.make(old)
    await two.keep("default", -1)
    await old.scene.sql.execute(
        "insert into servers (id, name, version, newest_migration) values ($1, 'old', '0', '0043_x')", uuid.uuid4()
    )
    assert await old.archive(DAY) == [] and await old.hot() == two.count
    await old.scene.sql.execute("delete from servers where name = 'old'")
    assert await old.archive(DAY) == [DAY]


async def test_what_is_being_detached_is_finished_before_another_is_begun(old: Old) -> None:
    """PostgreSQL detaches one at a time: an older day that closes meanwhile must not stand in the way for ever."""
    job = await old.scene.job()
    days = [DAY - timedelta(days=1), DAY]
    for day in days:
        await old.make_day(day)
        await old.rows(job, day, 2)
    [run] = await old.scene.ask(job)
    live = new_id(datetime.combine(days[0], time(2), UTC))
    await old.scene.sql.execute("update runs set id = $2 where id = $1", run, live)
    reader = await connect(old.scene.db.url, "owner", idle_in_transaction_session_timeout="0")
    async with reader.transaction(isolation="repeatable_read"):
        assert await reader.fetchval("select count(*) from history") > 0
        with pytest.raises(Exception, match="lock timeout"):
            await old.archive()
    await reader.close()
    await old.scene.sql.execute("delete from runs")
    assert await old.archive() == days[::-1]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def page(old: Old, **query: Any) -> list[dict[str, Any]]:
    """All pages of a list."""
    found: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    for _ in range(100):
        answer = await old.scene.api.get("/v1/runs", params=query | cursor)
        found += answer["items"]
        if answer["next_cursor"] is None:
            return found
        cursor = {"cursor": answer["next_cursor"]}
    raise AssertionError("the pages have no end")


async def test_runs_are_read_as_before_by_one_cursor(old: Old) -> None:
    """Cold, hot and live ones, page by page, by each filter: the same before and after."""
    a, b = await old.job(name="a", tags={"team": "blue"}), await old.job(name="b")
    days = [DAY + timedelta(days=d) for d in (-2, -1, 0, 1)]
    for day in days:
        await old.make_day(day)
        await old.rows(a, day, 6)
        await old.rows(b, day, 4)
    [live] = await old.scene.ask(a)
    one = (await old.scene.api.get("/v1/runs", params={"limit": 20}))["items"][12]
    queries: list[dict[str, Any]] = [
        {"limit": 3},
        {"limit": 500},
        {"job": a["id"], "state": "dead", "limit": 2},
        {"outcome": "failed"},
        {"error_class": "Boom", "limit": 7},
        {"worker": one["worker"] or str(uuid.uuid4())},
        {"tag": "team:blue"},
        {"from": f"{days[1]}T01:00:02Z", "to": f"{days[3]}T01:00:01Z", "limit": 4},
        {"state": "ready"},
    ]
    before = [await page(old, **query) for query in queries]
    seen = {run["id"]: await old.scene.run(run["id"]) for run in before[1]}
    tried = {id_: await old.scene.api.get(f"/v1/runs/{id_}/attempts") for id_ in seen}
    assert await old.archive() == days[:3]
    assert live in seen and len(before[2]) > 0 and len(before[6]) == 25
    for query, wanted in zip(queries, before, strict=True):
        assert await page(old, **query) == wanted, query
    for id_ in seen:
        assert await old.scene.run(id_) == seen[id_]
        assert await old.scene.api.get(f"/v1/runs/{id_}/attempts") == tried[id_]


async def test_a_page_that_would_take_too_long_goes_on_at_its_cursor(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job()
    days = [DAY + timedelta(days=d) for d in (-2, -1, 0)]
    for day in days:
        await old.make_day(day)
        await old.rows(job, day, 2, state="dead")
    await old.archive()
    monkeypatch.setattr(cold, "_WAVE", 1)
    monkeypatch.setattr(history, "_MOST_WAVES", 1)
    first = await old.scene.api.get("/v1/runs", params={"state": "succeeded"})
    assert first["items"] == [] and first["next_cursor"] is not None
    assert await page(old, state="succeeded") == []
    assert len(await page(old, limit=5)) == 6


async def test_nobody_reads_another_tenants_archive(old: Old) -> None:
    await old.scene.api.post("/v1/tenants", {"slug": "other"})
    other = await old.scene.api.with_key("admin", "other")
    await old.make_day(DAY)
    [run] = await old.rows(await old.scene.job(), DAY, 1)
    await old.archive()
    assert (await other.get("/v1/runs"))["items"] == []
    await other.get(f"/v1/runs/{run}", expect=404)
    await other.post(f"/v1/runs/{run}/retry", expect=404)


async def test_an_archived_run_can_be_run_again(old: Old) -> None:
    await old.make_day(DAY)
    [run] = await old.rows(await old.scene.job(), DAY, 1)
    await old.archive()
    again = await old.scene.api.post(f"/v1/runs/{run}/retry")
    assert (again["origin_run_id"], again["args"]) == (run, {"n": 1})


@pytest.mark.parametrize(
    "report", ["runs?by=job", "runs?by=day", "failures", "failures?by=job", "utilisation?by=worker"]
)
async def test_reports_are_of_hot_and_cold_alike(old: Old, report: str) -> None:
    """Also between the two: while a day's files are read and its partition is still there."""
    job = await old.scene.job(name="a")
    for day in (DAY, DAY + timedelta(days=1)):
        await old.make_day(day)
        await old.rows(job, day, 12)
    path, _, by = report.partition("?")
    query = {"from": f"{DAY}T00:00:00Z", "to": f"{DAY + timedelta(days=2)}T00:00:00Z"}
    query |= dict([by.split("=")]) if by else {}
    before = await old.scene.api.get(f"/v1/reports/{path}", params=query)
    old.scene.db.failpoints = Failpoints("archive.cold=raise")
    with pytest.raises(InjectedFault):
        await old.archive()
    assert await old.hot() > 0
    assert await old.scene.api.get(f"/v1/reports/{path}", params=query) == before
    await old.archive()
    assert await old.scene.api.get(f"/v1/reports/{path}", params=query) == before
    assert before["items"]


async def test_a_report_under_way_delays_the_end_of_a_partition_and_nobody_else(old: Old) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    await old.rows(job, DAY, 3)
    # As a report does, but with all the time it wants.
    reader = await connect(old.scene.db.url, "owner", idle_in_transaction_session_timeout="0")
    async with reader.transaction(isolation="repeatable_read"):
        count = await reader.fetchval("select count(*) from history")
        with pytest.raises(Exception, match="lock timeout"):
            await old.archive()
        assert await reader.fetchval("select count(*) from history") == count > 0
        pending = await old.scene.value("select bool_or(inhdetachpending) from pg_inherits")
        assert pending, "the detachment was begun, and is finished by the next turn"
        assert len((await old.scene.api.get("/v1/runs"))["items"]) == 3
    await reader.close()
    assert await old.archive() == [DAY]


async def test_all_that_history_holds_is_archived(scene: Scene) -> None:
    """A column that comes to the table must come to the files."""
    rows = await scene.rows(
        "select attname from pg_attribute where attrelid = 'history'::regclass and attnum > 0 and not attisdropped"
    )
    assert {row["attname"] for row in rows} == COLUMNS.keys() - {"job_name", "pool", "spec"}


async def test_what_is_archived_has_ended(old: Old) -> None:
    job = await old.scene.job()
    await old.make_day(DAY)
    [run] = await old.rows(job, DAY, 1, state="dead")
    before = await old.scene.api.get(f"/v1/runs/{run}/explain")
    await old.archive()
    assert (await old.scene.api.post(f"/v1/runs/{run}/cancel"))["id"] == run
    assert (await old.scene.api.get(f"/v1/runs/{run}/logs"))["items"] == []
    assert await old.scene.api.get(f"/v1/runs/{run}/explain") == before
    await old.scene.api.get(f"/v1/runs/{new_id(datetime.combine(DAY, time(), UTC))}/explain", expect=404)


async def told(old: Old, job: dict[str, Any], start: datetime, end: datetime, limit: int) -> list[dict[str, Any]]:
    """All pages of a job's occurrences."""
    query: dict[str, Any] = {"from": iso(start), "to": iso(end), "limit": limit}
    found: list[dict[str, Any]] = []
    while True:
        answer = await old.scene.api.get(f"/v1/jobs/{job['id']}/occurrences", params=query)
        found += answer["items"]
        if answer["next_cursor"] is None:
            return found
        query["cursor"] = answer["next_cursor"]


async def test_occurrences_are_told_of_archived_days_as_before(old: Old) -> None:
    """In time, late, counted over midnight, and not there at all: hot, between the two, cold."""
    days = [DAY + timedelta(days=d) for d in (-1, 0, 1)]
    start = datetime.combine(days[0], time(), UTC)
    hour = timedelta(hours=1)
    job = await old.scene.job(schedule={"every": "PT1H", "starting_at": iso(start)})
    await old.scene.sql.execute("update jobs set created_at = $1, anchored_at = $1", start - hour)
    await old.scene.sql.execute("update triggers set next_fire_at = $1", start + 72 * hour)
    for day in days:
        await old.make_day(day)

    async def occurrence(due: datetime, made: datetime, **given: Any) -> None:
        first, count, reason = given.get("first"), given.get("count", 1), given.get("reason")
        await old.scene.sql.execute(
            "insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, reason,"
            " count, fence, trigger, priority, failures, losses, max_attempts, first_for, scheduled_for, ready_at,"
            " finished_at) select tenant_id, $1, 1, id, version, true, $2, $3, $4, $5, 7, 'schedule', 500, 0, 0, 4, $6,"
            " $7, $8, $8 from jobs where id = $9",
            *(new_id(made), "skipped" if reason else "succeeded", None if reason else "succeeded", reason, count),
            *(first, due, made, job["id"]),
        )

    for n in range(72):
        if n in range(20, 30):  # paused over midnight, and resumed at once
            continue
        if n not in (5, 40):  # nobody knows of these
            await occurrence(start + n * hour, start + n * hour + (26 * hour if n == 7 else timedelta(seconds=2)))
    await occurrence(start + 29 * hour, start + 30 * hour, first=start + 20 * hour, count=10, reason="skipped_paused")
    spans = [(start, start + 72 * hour, 500), (start, start + 72 * hour, 7), (start + 22 * hour, start + 40 * hour, 3)]
    before = [await told(old, job, *span) for span in spans]
    assert len(before[0]) == 63 and len(before[2]) == 11
    assert sorted(item["status"] for item in before[0] if item["status"] != "ran") == ["missed", "missed", "skipped"]
    old.scene.db.failpoints = Failpoints("archive.cold=raise")
    with pytest.raises(InjectedFault):
        await old.archive()
    assert [await told(old, job, *span) for span in spans] == before
    assert await old.archive() == days[:2]
    assert [await told(old, job, *span) for span in spans] == before


async def test_occurrences_that_are_not_kept_are_not_called_missing(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.scene.job(schedule={"every": "PT1H"})
    await old.make_day(DAY)
    await old.rows(job, DAY, 1)
    await old.archive()
    asked = {"from": f"{DAY}T00:00:00Z", "to": f"{DAY}T06:00:00Z"}
    path = f"/v1/jobs/{job['id']}/occurrences"
    age = (await old.scene.now()).date() - DAY
    await old.scene.sql.execute("update tenants set runs_days = $1", age.days - 1)
    await old.scene.api.get(path, params=asked)
    await old.scene.sql.execute("update jobs set created_at = $1", datetime.combine(DAY, time(), UTC))
    refused = await old.scene.api.get(path, params=asked, expect=422)
    assert refused["code"] == "expired"
    await old.scene.sql.execute("update tenants set runs_days = $1", age.days)
    await old.scene.api.get(path, params=asked)


async def test_files_of_before_a_column_came_are_read(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await old.job(name="a")
    days = [DAY + timedelta(days=d) for d in (-1, 0)]
    for day in days:
        await old.make_day(day)
        await old.rows(job, day, 3)
    before = await page(old)
    new = ("logical_at", "workflow_run_id")
    with monkeypatch.context() as earlier:
        earlier.setattr(archive, "COLUMNS", {name: kind for name, kind in COLUMNS.items() if name not in new})
        rows = archive.SQL["rows"].replace("end,\n       h.logical_at at time zone 'UTC', h.workflow_run_id", "end")
        earlier.setitem(archive.SQL, "rows", rows)
        line = "null::timestamp as logical_at, null::uuid as workflow_run_id"
        proof = archive.SQL["proof_of_file"].replace("epoch_us(logical_at) as logical_at, workflow_run_id", line)
        earlier.setitem(archive.SQL, "proof_of_file", proof.replace("null::timestamp", "null::bigint"))
        assert await old.archive(days[1]) == days[:1]
    assert await old.archive() == days[1:]
    assert await page(old) == before
    span = {"from": f"{days[0]}T00:00:00Z", "to": f"{days[1]}T23:00:00Z"}
    assert (await old.scene.api.get("/v1/reports/runs", params=span))["items"][0]["runs"] == 6
    assert await page(old, to=f"{days[1]}T00:00:00Z") == before[3:], "such files alone"
