"""retention: files go when nobody is to keep them, unless they are held; jobs go when nothing needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, end_of
from tests.flow.old import DAY, Old
from tests.flow.past import A_DAY, DAYS, Past
from tocsin.errors import Unavailable
from tocsin.flow import archive, compact, retention, seal
from tocsin.flow.shared import shelf
from tocsin.node.archivist import Archivist
from tocsin.settings import Settings
from tocsin.store.parquet import Parquet
from tocsin.telemetry import LOOP_ERRORS

NOTHING_SAID = {"runs_days": None, "legal_hold": False, "hot_days": None, "logs_days": None, "audit_days": None}


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
    await retention.expire(old.scene.db, days)
    return await retention.remove(old.scene.db, old.scene.node.objects)


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
    assert shown["retention"] == NOTHING_SAID | {"runs_days": 1, "legal_hold": True}
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
        {"logs_days": 0},
        {"audit_days": 10**9},
        {"preset": "strict"},
    ):
        await scene.api.call("PATCH", "/v1/tenants/default", json={"retention": wrong}, expect=422)
    shown = await scene.api.get("/v1/tenants/default")
    assert shown["retention"] == NOTHING_SAID


async def test_a_preset_stands_for_seven_years_of_what_is_not_named(scene: Scene) -> None:
    path = "/v1/tenants/default"
    await scene.api.call("PATCH", path, json={"retention": {"preset": "compliance", "logs_days": 90}})
    kept = {"runs_days": 2557, "logs_days": 90, "audit_days": 2557}
    assert (await scene.api.get(path))["retention"] == NOTHING_SAID | kept
    await scene.api.call("PATCH", path, json={"retention": {"preset": "compliance"}})
    assert (await scene.api.get(path))["retention"] == NOTHING_SAID | kept | {"logs_days": 2557}


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Logged:
    """Runs of two tenants whose lines lie in the same objects, as workers ship them."""

    def __init__(self, scene: Scene, mine: str, theirs: str, other: Api) -> None:
        self.scene, self.mine, self.theirs, self.other = scene, mine, theirs, other

    async def read(self) -> tuple[int, int]:
        """How many lines of each are read and found; a segment that was just compacted is found a moment later."""
        counts = []
        for column in ("added_at", "replaced_at"):
            await self.scene.sql.execute(f"update log_segments set {column} = now() where {column} > now()")
        for api, run_id in ((self.scene.api, self.mine), (self.other, self.theirs)):
            lines = (await api.get(f"/v1/runs/{run_id}/logs"))["items"]
            found = (await api.get("/v1/logs/search", params={"q": "word"}))["items"]
            assert len(found) == len(lines)
            counts.append(len(lines))
        return counts[0], counts[1]

    async def expire(self, days: int, after: int) -> int:
        """As it would be so many days from now."""
        then = await self.scene.now() + timedelta(days=after)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.scene.db, "read_clock", lambda: asyncio.sleep(0, then))
            return await retention.expire_logs(self.scene.db, days)

    async def clean(self) -> set[str]:
        """An hour later; what is left."""
        await self.scene.sql.execute("update log_garbage set due_at = now() - interval '1 second'")
        await compact.clean(self.scene.db, self.scene.node.objects)
        return set(await self.scene.node.objects.keys("logs/"))


@pytest.fixture
async def logged(scene: Scene, worker_key: str) -> Logged:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("admin", "other")
    worker = await WorkerHand.register(scene.node, worker_key)
    held = []
    for api in (scene.api, other):
        job = await scene.job(api)
        await api.post(f"/v1/jobs/{job['id']}/runs")
        [(run_id, attempt, fence)] = await scene.taken(worker.id, 1)
        held.append({"run_id": run_id, "attempt": attempt, "fence": fence})
    for offset in (0, 2):
        lines = [[time.time(), "stdout", "info", f"word {offset + n}"] for n in range(2)]
        await worker.ship(*(run | {"offset": offset, "lines": lines} for run in held))
    return Logged(scene, held[0]["run_id"], held[1]["run_id"], other)


async def test_logs_go_when_their_time_is_over_each_tenants_by_itself(logged: Logged) -> None:
    await logged.scene.api.call("PATCH", "/v1/tenants/other", json={"retention": {"logs_days": 400}})
    assert await logged.expire(36_500, after=0) == 0, "which is before all time"
    assert await logged.expire(30, after=29) == 0 and await logged.read() == (4, 4)
    assert await logged.expire(30, after=31) == 2 and await logged.read() == (0, 4)
    assert len(await logged.clean()) == 2, "another tenant has lines in the same objects"
    assert await logged.read() == (0, 4)
    assert await logged.expire(30, after=401) == 2 and await logged.read() == (0, 0)
    assert await logged.clean() == set()
    for table in ("log_segments", "log_chunks", "log_garbage"):
        assert await logged.scene.value(f"select count(*) from {table}") == 0


async def test_compacted_logs_go_too(logged: Logged) -> None:
    await logged.scene.sql.execute("update log_segments set added_at = now() - interval '2 hours'")
    for tenant_id in await compact.tenants(logged.scene.db):
        await compact.compact(logged.scene.db, logged.scene.node.objects, tenant_id)
    assert await logged.read() == (4, 4) and len(await logged.clean()) == 2
    assert await logged.expire(30, after=31) == 2 and await logged.read() == (0, 0)
    assert await logged.clean() == set()


async def test_logs_that_are_held_stay(logged: Logged) -> None:
    await logged.scene.api.call("PATCH", "/v1/tenants/default", json={"retention": {"legal_hold": True}})
    assert await logged.expire(1, after=9) == 2 and await logged.read() == (4, 0)


async def test_many_logs_go_in_waves(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_LINES", 1)
    assert await logged.expire(1, after=9) == 4 and await logged.read() == (0, 0)


# ── the audit ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_archived_audit_goes_from_its_beginning_on_and_the_rest_is_still_proved(past: Past) -> None:
    db, objects = past.scene.db, past.scene.node.objects
    await past.shelve()
    age = (await past.scene.now()).date() - DAYS[0]
    assert await retention.expire_audit(db, objects, age.days) == 0
    await past.scene.api.call("PATCH", "/v1/tenants/default", json={"retention": {"legal_hold": True}})
    assert await retention.expire_audit(db, objects, 1) == 0
    await past.scene.api.call("PATCH", "/v1/tenants/default", json={"retention": {"legal_hold": False}})
    assert await retention.expire_audit(db, objects, age.days - 1) == 1
    await seal.seal(db)
    assert len(await objects.keys(shelf.folder(past.tenant_id))) == 1
    assert [record["seq"] for record in await past.every(limit=3)] == list(range(3 * A_DAY + 3, A_DAY, -1))
    pieces = await past.proofs()
    assert all(piece["ok"] and piece["expired_seq"] == A_DAY for piece in pieces), pieces
    assert sum(piece["checked"] for piece in pieces) == 2 * A_DAY + 3
    assert await retention.expire_audit(db, objects, 1) == 1
    assert len(await past.files()) == 1, "where the chain begins"
    assert await past.found() == [] and (await past.every())[-1]["seq"] == 2 * A_DAY + 1
    await past.shelve(DAYS[-1] + timedelta(days=1))
    assert await past.found() == [] and (await past.every())[-1]["seq"] == 2 * A_DAY + 1
    await past.rewrite(lambda rows: [row | {"actor": "key:else"} if row["seq"] == 10 else row for row in rows], file=1)
    assert ("changed", 10) in await past.found()


async def test_what_expires_while_the_audit_is_proved_is_not_missed(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = past.scene.node.objects
    await past.shelve()
    age = (await past.scene.now()).date() - DAYS[0]
    read, gone = objects.read, []

    async def expire_first(key: str) -> bytes | None:
        if not gone and key.startswith(shelf.folder(past.tenant_id)):
            gone.append(key)
            assert await retention.expire_audit(past.scene.db, objects, age.days - 1) == 1
        return await read(key)

    monkeypatch.setattr(objects, "read", expire_first)
    [piece, *_] = await past.proofs()
    assert gone and piece["ok"] and piece["expired_seq"] == A_DAY, piece


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    assert await retention.forget_jobs(scene.db, before, 365) == 0
    await scene.sql.execute("update tenants set hot_days = 8")
    assert await retention.forget_jobs(scene.db, before, 365) == 1, "the tenant's own days go before"
    left = {row["name"] for row in await scene.rows("select name from jobs")}
    assert left == {"hot", "dead", "again", "young", standing["name"]}


async def test_a_one_time_job_that_never_ran_is_kept_as_long_as_its_run_would_have_been(scene: Scene) -> None:
    job = await scene.job(schedule={"delay": "P2D"})
    await scene.api.post(f"/v1/jobs/{job['id']}/cancel", {})
    await scene.sql.execute("update jobs set ended_at = now() - interval '40 days'")
    month = await scene.now() - timedelta(days=30)
    assert await retention.forget_jobs(scene.db, month, 365) == 0
    await scene.sql.execute("update tenants set runs_days = 39, legal_hold = true")
    assert await retention.forget_jobs(scene.db, month, 365) == 0
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"] == "cancelled"
    await scene.sql.execute("update tenants set legal_hold = false")
    assert await retention.forget_jobs(scene.db, month, 365) == 1


@pytest.mark.parametrize("own", [None, 30])
async def test_the_archivist_does_all_of_it_unless_told_not_to(scene: Scene, tmp_path: Path, own: int | None) -> None:
    """By the server's setting, also if nobody set it, or where that says never, by the tenant's."""
    node = scene.node
    parquet = Parquet(node.objects, tmp_path / "cold")
    old = Old(scene, parquet)
    await old.make_day(DAY)
    await old.rows(await scene.job(), DAY, 2)
    for days, left in ((0, True), (None, False)):  # None: nobody set it
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


async def test_a_step_of_the_archivists_that_fails_keeps_none_of_the_others_back(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    async def fail(*_: Any) -> int:
        raise Unavailable("no objects today")

    async def note(*_: Any) -> int:
        done.append(True)
        return 0

    monkeypatch.setattr(archive, "archive", fail)
    monkeypatch.setattr(retention, "expire_logs", note)
    settings = Settings.load({}, home=tmp_path, database_url=scene.node.settings.database_url)
    assert await Archivist(scene.db, scene.node.objects, scene.node.parquet, settings).run_once() == 60
    assert done


@pytest.mark.parametrize("wrong", [{"hot_days": 1}, {"hot_days": -3}, {"runs_days": 0}])
def test_settings_that_would_lose_runs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="must be"):
        Settings.load({}, **wrong)
