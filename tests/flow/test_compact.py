"""compact: fewer, larger segments with the same lines, whatever dies at whatever step."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.flow.kit import Scene, WorkerHand, end_of
from tocsin.errors import Unavailable
from tocsin.failpoints import NO_FAILPOINTS, Failpoints, InjectedFault
from tocsin.flow import compact, logs, retention
from tocsin.flow.shared.segments import loose_object
from tocsin.model.ids import new_id
from tocsin.node.compactor import Compactor
from tocsin.settings import Settings
from tocsin.telemetry import LOOP_ERRORS

Run = dict[str, Any]
NOW = time.time()


@pytest.fixture
async def worker(scene: Scene, worker_key: str) -> WorkerHand:
    return await WorkerHand.register(scene.node, worker_key)


@pytest.fixture
async def tenant(scene: Scene) -> int:
    return int(await scene.value("select id from tenants where slug = 'default'"))


async def held(scene: Scene, worker: WorkerHand) -> Run:
    await scene.ask(await scene.job())
    [key] = await scene.taken(worker.id)
    return {"run_id": key[0], "attempt": key[1], "fence": key[2]}


def chunk(run: Run, offset: int, *texts: str) -> Run:
    return run | {"offset": offset, "lines": [[NOW + offset + i, "stdout", "info", t] for i, t in enumerate(texts)]}


async def logged(scene: Scene, worker: WorkerHand) -> dict[str, list[str]]:
    """Two runs with lines in ten segments, which have lain there for long."""
    runs = [await held(scene, worker) for _ in range(2)]
    wanted: dict[str, list[str]] = {run["run_id"]: [] for run in runs}
    for turn in range(10):
        texts = [[f"run {n} line {turn * 3 + i}" for i in range(3)] for n in range(2)]
        await worker.ship(*(chunk(run, turn * 3, *texts[n]) for n, run in enumerate(runs)))
        for n, run in enumerate(runs):
            wanted[run["run_id"]] += texts[n]
    await ripen(scene)
    return wanted


async def ripen(scene: Scene) -> None:
    await scene.sql.execute("update log_segments set added_at = now() - interval '2 hours' where replaced_at is null")


async def pages(scene: Scene, path: str, key: str, **query: Any) -> list[Any]:
    items: list[Any] = []
    while True:
        page = await scene.api.get(path, params=query)
        items += page["items"]
        if page[f"next_{key}"] is None:
            return items
        query[key] = page[f"next_{key}"]


async def check(scene: Scene, wanted: dict[str, list[str]]) -> None:
    """Each line is read once, and found once."""
    for run_id, texts in wanted.items():
        read = await pages(scene, f"/v1/runs/{run_id}/logs", "after")
        assert [(line["seq"], line["text"]) for line in read] == list(enumerate(texts, 1))
    # The new segments become visible a moment after their commit.
    await scene.sql.execute("update log_segments set added_at = now() where added_at > now()")
    await scene.sql.execute("update log_segments set replaced_at = now() where replaced_at > now()")
    found = await pages(scene, "/v1/logs/search", "cursor", q="line")
    assert sorted(line["text"] for line in found) == sorted(text for texts in wanted.values() for text in texts)


async def clean(scene: Scene) -> int:
    """An hour later."""
    await scene.sql.execute("update log_garbage set due_at = now() - interval '1 second'")
    return await compact.clean(scene.db, scene.node.objects)


def objects(settings: Settings) -> set[str]:
    root = settings.home / "objects"
    return {str(path.relative_to(root)) for path in Path(root).rglob("*.zst")}


async def named(scene: Scene) -> set[str]:
    """The objects that something lies in."""
    return {
        row["object"] for row in await scene.rows("select object from log_chunks union select object from log_segments")
    }


async def test_small_segments_become_one(scene: Scene, worker: WorkerHand, tenant: int, settings: Settings) -> None:
    wanted = await logged(scene, worker)
    assert await compact.tenants(scene.db) == [tenant]
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 10
    assert await scene.value("select count(*) from log_chunks") == 2
    assert await scene.value("select count(*) from log_segments where replaced_at is null") == 1
    await check(scene, wanted)
    assert await compact.tenants(scene.db) == []
    assert await clean(scene) == 10
    assert len(objects(settings)) == 1 and objects(settings) == await named(scene)
    await check(scene, wanted)
    assert await clean(scene) == 0


@pytest.mark.parametrize("how", ["gone", "directory", "frame"])
async def test_a_segment_that_is_lost_stays_alone(
    scene: Scene, worker: WorkerHand, tenant: int, settings: Settings, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    await logged(scene, worker)
    monkeypatch.setattr(compact, "_MOST_SEGMENTS", 1)  # it is all that is seen at first
    count = await scene.value("select count(*) from log_segments")
    lost = await scene.row("select object, position from log_segments order by id limit 1")
    path = settings.home / "objects" / lost["object"]
    whole = path.read_bytes()
    zeros = {"directory": lost["position"], "frame": 0}
    path.unlink()
    if how != "gone":
        path.write_bytes(whole[: zeros[how]] + bytes(20) + whole[zeros[how] + 20 :])
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 1
    monkeypatch.undo()
    assert await compact.compact(scene.db, scene.node.objects, tenant) == count - 2
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 0
    path.write_bytes(whole)
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 1


async def test_what_is_fresh_or_little_is_left_alone(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "a"))
    assert await compact.tenants(scene.db) == []
    await scene.sql.execute("update log_segments set added_at = now() - interval '10 minutes'")
    assert await compact.tenants(scene.db) == [tenant]
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 0


POINTS = [f"compact.{point}" for point in (*compact.POINTS, "before_commit", "after_commit")]


@pytest.mark.parametrize("point", POINTS)
async def test_whoever_dies_anywhere_loses_nothing_and_the_next_turn_repairs(
    scene: Scene, worker: WorkerHand, tenant: int, settings: Settings, point: str
) -> None:
    wanted = await logged(scene, worker)
    scene.db.failpoints = Failpoints(f"{point}=raise")
    with pytest.raises(InjectedFault):
        await compact.compact(scene.db, scene.node.objects, tenant)
        await clean(scene)
    scene.db.failpoints = NO_FAILPOINTS
    await check(scene, wanted)
    await compact.compact(scene.db, scene.node.objects, tenant)
    assert await scene.value("select count(*) from log_chunks") == 2
    await check(scene, wanted)
    await clean(scene)
    assert objects(settings) == await named(scene) and len(objects(settings)) == 1
    await check(scene, wanted)
    assert await scene.value("select count(*) from log_garbage") == 0


async def test_two_at_once_are_one(scene: Scene, worker: WorkerHand, tenant: int, settings: Settings) -> None:
    wanted = await logged(scene, worker)
    rows = await scene.db.fetch("engine", compact.SQL["loose"], tenant, compact.SETTLED, str(uuid.UUID(int=0)), 512)
    group = compact._Group(scene.db, scene.node.objects, tenant, rows)
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 10
    assert not await group.compact()
    await check(scene, wanted)
    assert await clean(scene) == 11
    assert objects(settings) == await named(scene)


async def test_a_search_that_has_begun_goes_on_as_if_nothing_had_been_compacted(
    scene: Scene, worker: WorkerHand, tenant: int
) -> None:
    wanted = await logged(scene, worker)
    first = await scene.api.get("/v1/logs/search?q=line&limit=25")
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 10
    rest = await pages(scene, "/v1/logs/search", "cursor", q="line", limit=7, cursor=first["next_cursor"])
    texts = [line["text"] for line in first["items"] + rest]
    assert sorted(texts) == sorted(text for lines in wanted.values() for text in lines)


async def test_lines_behind_a_cut_keep_their_numbers(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    run = await held(scene, worker)
    await scene.sql.execute("update tenants set log_bytes_per_day = 10 where id = $1", tenant)
    await worker.ship(chunk(run, 0, "12345678", "cut", "cut"))
    await scene.sql.execute("update tenants set log_bytes_per_day = null")
    await worker.ship(chunk(run, 3, "behind"))
    path = f"/v1/runs/{run['run_id']}/logs"
    before = await pages(scene, path, "after")
    await ripen(scene)
    assert await compact.compact(scene.db, scene.node.objects, tenant) == 2
    assert await pages(scene, path, "after") == before
    assert (before[-1]["seq"], before[-1]["text"]) == (4, "behind")


async def test_what_cannot_be_read_of_one_tenant_keeps_nothing_else_back(
    scene: Scene, worker: WorkerHand, tenant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await logged(scene, worker)

    async def both(_db: Any) -> list[int]:
        return [tenant - 1, tenant, tenant + 1]

    async def compacted(db: Any, objects: Any, tenant_id: int) -> int:
        if tenant_id != tenant:
            raise Unavailable("an object is gone")
        return await whole(db, objects, tenant_id)

    whole = compact.compact
    monkeypatch.setattr(compact, "tenants", both)
    monkeypatch.setattr(compact, "compact", compacted)
    failed = LOOP_ERRORS.labels("compactor")._value.get()
    await scene.sql.execute("insert into log_garbage (object, due_at) values ('logs/nothing', now() - interval '1 s')")
    assert await Compactor(scene.db, scene.node.objects).run_once() == 0
    assert await scene.value("select count(*) from log_segments where replaced_at is null") == 1
    assert await scene.value("select count(*) from log_garbage where object = 'logs/nothing'") == 0
    assert LOOP_ERRORS.labels("compactor")._value.get() == failed + 2
    await check(scene, wanted)


async def test_objects_that_nothing_names_are_swept_away(
    scene: Scene, worker: WorkerHand, settings: Settings, tenant: int
) -> None:
    """Whoever shipped the lines died before it could say that they are there."""
    wanted = await logged(scene, worker)
    await compact.compact(scene.db, scene.node.objects, tenant)
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "a loose line"))
    named = objects(settings)
    now = await scene.now()
    strays = [loose_object(run["run_id"], new_id(now - timedelta(hours=hours))) for hours in (2, 3, 0)]
    for key in (*strays, "logs/abcdef/no-id.zst"):
        await scene.node.objects.put(key, b"lines")
    long_ago = "update migrations set applied_at = $1 where name = '0032_log_segments'"
    await scene.sql.execute(long_ago, now)
    assert await compact.sweep(scene.db, scene.node.objects) == 0, "who knows what named it then"
    await scene.sql.execute(long_ago, now - timedelta(days=100))
    assert await compact.sweep(scene.db, scene.node.objects) == 2
    assert objects(settings) == named | {strays[2], "logs/abcdef/no-id.zst"}
    await check(scene, wanted | {run["run_id"]: ["a loose line"]})


# ── rows that go ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def settle(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    """All runs end, and a month goes by in which their lines are compacted."""
    keys = await scene.rows("select id::text as id, attempt, fence from runs where state = 'running'")
    await scene.end(worker.id, *(end_of(tuple(key)) for key in keys))
    await ripen(scene)
    await compact.compact(scene.db, scene.node.objects, tenant)
    await age(scene)


async def age(scene: Scene) -> None:
    await scene.sql.execute("update history set finished_at = finished_at - interval '1 day'")
    await scene.sql.execute(
        "update log_segments set id = ('018f' || substr(id::text, 5))::uuid, added_at = now() - interval '1 month'"
        " where compacted"
    )


async def unlist(scene: Scene, hot_days: int = 30) -> int:
    return await compact.unlist(scene.db, scene.node.objects, hot_days)


async def listed(scene: Scene) -> int:
    return await scene.value("select count(*) from log_chunks")  # type: ignore[no-any-return]


async def check_runs(scene: Scene, wanted: dict[str, list[str]]) -> None:
    """The same by every way that leads to them."""
    await check(scene, wanted)
    for run_id, texts in wanted.items():
        found = await pages(scene, "/v1/logs/search", "cursor", run=run_id, limit=7)
        assert [line["text"] for line in found] == texts
        [told] = await logs.look(scene.db, scene.node.objects, [(1, run_id)])
        assert told is not None and told.ended and told.last == (1, len(texts))


async def test_a_page_of_old_segments_reads_those_of_one_tenant(scene: Scene) -> None:
    """It does not read a page of each tenant to keep only one of them."""
    await scene.sql.execute("insert into tenants (slug) select 'old-' || i from generate_series(1, 20) as i")
    await scene.sql.execute(
        "insert into log_segments (tenant_id, id, object, position, bytes, lines, raw_bytes, stored_bytes, first_at,"
        "                          last_at, compacted)"
        " select t.id, format('01900000-0000-7000-8000-%s', lpad(i::text, 12, '0'))::uuid, format('x/%s/%s', t.id, i),"
        "        0, 1, 1, 1, 1, now(), now(), true"
        "  from tenants t, generate_series(1, 10) as i where t.slug like 'old-%'"
    )
    await scene.sql.execute("analyze log_segments")
    rows = await scene.rows("select id from tenants where slug like 'old-%' order by id")
    upper, lower = str(uuid.UUID(int=2**128 - 1)), str(uuid.UUID(int=0))
    async with scene.sql.transaction():
        await scene.sql.execute("set local enable_seqscan = off; set local enable_bitmapscan = off")
        found = await scene.sql.fetch(compact.SQL["listed"], rows[0]["id"], upper, lower, 5)
        read = await scene.sql.fetchval(
            "select coalesce(idx_tup_fetch, 0) + seq_tup_read from pg_stat_xact_user_tables"
            " where relname = 'log_segments' and schemaname = 'tocsin'"
        )
    assert len(found) == read == 5
    asked = {"tenants": 0, "pages": 0}
    fetch = scene.db.fetch

    async def counted(pool: Any, sql: str, *given: Any) -> Any:
        asked["tenants"] += sql == compact.SQL["with_listed"]
        asked["pages"] += sql == compact.SQL["listed"]
        return await fetch(pool, sql, *given)

    scene.db.fetch = counted  # type: ignore[method-assign]
    assert await unlist(scene) == 0, "their objects are nowhere"
    assert asked == {"tenants": 1, "pages": 40}


async def test_old_lines_are_read_and_found_without_their_rows(
    scene: Scene, worker: WorkerHand, tenant: int, settings: Settings
) -> None:
    wanted = await logged(scene, worker)
    await settle(scene, worker, tenant)
    assert await unlist(scene) == 1 and await listed(scene) == 0
    await check_runs(scene, wanted)
    assert await unlist(scene) == 0
    await clean(scene)
    await check_runs(scene, wanted)
    assert len(objects(settings)) == 1
    for path in ("", "/download"):
        await scene.api.get(f"/v1/runs/{new_id(await scene.now())}/logs{path}", expect=404)


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
async def test_rows_go_all_at_once(scene: Scene, worker: WorkerHand, tenant: int, point: str) -> None:
    wanted = await logged(scene, worker)
    await settle(scene, worker, tenant)
    scene.db.failpoints = Failpoints(f"compact.{point}=raise")
    with pytest.raises(InjectedFault):
        await unlist(scene)
    scene.db.failpoints = NO_FAILPOINTS
    assert await listed(scene) == (2 if point == "before_commit" else 0)
    await check_runs(scene, wanted)
    await unlist(scene)
    assert await listed(scene) == 0
    await check_runs(scene, wanted)


async def test_rows_stay_while_they_are_hot_or_a_run_may_log(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "line a", "line b"))
    await ripen(scene)
    await compact.compact(scene.db, scene.node.objects, tenant)
    assert await unlist(scene) == 0, "they are of today"
    await age(scene)
    assert await unlist(scene) == 0, "it runs"
    await worker.ship(chunk(run, 2, "line c"))
    await scene.end(worker.id, end_of(run))
    assert await unlist(scene) == 0, "it has just ended"
    await worker.ship(chunk(run, 3, "line d"))
    await age(scene)
    assert await unlist(scene, 0) == 0, "nobody is to let them go"
    await scene.sql.execute("update tenants set hot_days = 3650")
    assert await unlist(scene) == 0, "the tenant's own word goes before"
    await scene.sql.execute("update tenants set hot_days = 2")
    assert await unlist(scene, 0) == 1
    assert await listed(scene) == 2, "of what is not compacted"
    await check_runs(scene, {run["run_id"]: [f"line {letter}" for letter in "abcd"]})


async def test_lines_whose_rows_are_about_to_go_are_told_once(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    """As somebody finds them who read the rows before that commit, and the segments after it."""
    wanted = await logged(scene, worker)
    await settle(scene, worker, tenant)
    await scene.sql.execute("create temporary table kept as select * from log_chunks")
    assert await unlist(scene) == 1
    await scene.sql.execute("insert into log_chunks select * from kept")
    await check_runs(scene, wanted)


async def test_the_latest_attempt_is_known_without_rows(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    first = await held(scene, worker)
    await worker.ship(chunk(first, 0, "one"))
    await scene.end(worker.id, end_of(first, "failed", "Boom"))
    await scene.wake(first["run_id"])
    [key] = await scene.taken(worker.id)
    await worker.ship(chunk({"run_id": key[0], "attempt": key[1], "fence": key[2]}, 0, "two", "three"))
    await settle(scene, worker, tenant)
    assert await unlist(scene) == 1 and await listed(scene) == 0
    path = f"/v1/runs/{first['run_id']}/logs"
    assert [line["text"] for line in await pages(scene, path, "after")] == ["two", "three"]
    assert [line["text"] for line in await pages(scene, path, "after", attempt=1)] == ["one"]
    found = await pages(scene, "/v1/logs/search", "cursor", run=first["run_id"], limit=1)
    assert [line["text"] for line in found] == ["one", "two", "three"]
    # As if its day were archived, too.
    await scene.sql.execute("delete from history")
    [told] = await logs.look(scene.db, scene.node.objects, [(tenant, first["run_id"])])
    assert (told.attempt, told.ended, told.last) == (2, "gone", (2, 2))


async def test_a_segment_that_cannot_be_read_keeps_no_other_back(
    scene: Scene, worker: WorkerHand, tenant: int, settings: Settings
) -> None:
    lost = await held(scene, worker)
    await worker.ship(chunk(lost, 0, "lost"))
    await settle(scene, worker, tenant)
    gone = await scene.value("select object from log_segments where compacted")
    wanted = await logged(scene, worker)
    await settle(scene, worker, tenant)
    (settings.home / "objects" / gone).unlink()
    assert await unlist(scene) == 1 and await listed(scene) == 1
    [kept] = await scene.rows("select run_id::text as run_id from log_chunks")
    assert kept["run_id"] == lost["run_id"] not in wanted


async def test_old_lines_are_found_by_a_run_that_has_expired(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    run = await held(scene, worker)
    job_id = (await scene.run(run["run_id"]))["job_id"]
    await worker.ship(chunk(run, 0, "needle"))
    await settle(scene, worker, tenant)
    assert await unlist(scene) == 1
    for table, key in (("runs", "id"), ("history", "run_id")):
        await scene.sql.execute(f"delete from {table} where {key} = $1", run["run_id"])
    for query, count in (({}, 1), ({"job": job_id}, 1), ({"job": run["run_id"]}, 0), ({"error_class": "Boom"}, 0)):
        page = await scene.api.get("/v1/logs/search", params={"q": "needle", "run": run["run_id"], **query})
        assert [line["job_id"] for line in page["items"]] == [job_id] * count


async def test_old_lines_that_may_be_lost_are_told(
    scene: Scene, worker: WorkerHand, tenant: int, settings: Settings
) -> None:
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "lost"))
    await settle(scene, worker, tenant)
    assert await unlist(scene) == 1
    (settings.home / "objects" / await scene.value("select object from log_segments where compacted")).unlink()
    [told] = (await scene.api.get(f"/v1/runs/{run['run_id']}/logs"))["items"]
    assert told["seq"] == 0 and told["stream"] == "system" and "has lost lines of that time" in told["text"]


async def test_lines_go_with_their_segment_when_nobody_is_to_keep_them(
    scene: Scene, worker: WorkerHand, tenant: int
) -> None:
    wanted = await logged(scene, worker)
    await settle(scene, worker, tenant)
    assert await unlist(scene) == 1
    assert await retention.expire_logs(scene.db, 30) == 1
    for run_id in wanted:
        assert (await scene.api.get(f"/v1/runs/{run_id}/logs"))["items"] == []
