"""cold: what is archived is read as before, by whatever it is asked for."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest

from tests.flow.old import DAY, Old
from tocsin.clock import iso
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow import archive, history
from tocsin.flow.shared import cold
from tocsin.model.ids import new_id


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
        earlier.setattr(cold, "COLUMNS", {name: kind for name, kind in cold.COLUMNS.items() if name not in new})
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
