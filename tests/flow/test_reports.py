"""reports: what became of runs, counted the same way as by hand."""

from __future__ import annotations

import csv
import io
import uuid
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene, end_of
from tocsin.clock import iso
from tocsin.flow import fleet, partitions, reports
from tocsin.model.ids import new_id


class Past:
    """Hands that write history as reports of workers would have."""

    def __init__(self, scene: Scene, now: datetime) -> None:
        self.scene, self.now = scene, now

    async def attempt(
        self,
        job: dict[str, Any],
        outcome: str | None = "succeeded",
        *,
        state: str | None = None,
        ran: float = 1.0,
        lag: float = 0.0,
        ago: timedelta = timedelta(minutes=5),
        final: bool = True,
        error: str | None = None,
        worker: str | None = None,
        run_id: str | None = None,
        attempt: int = 1,
        count: int = 1,
    ) -> str:
        """One row; its run's id."""
        made = self.now - ago
        run_id = run_id or new_id(made)
        started = None if outcome is None else made + timedelta(seconds=lag)
        await self.scene.sql.execute(
            "insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, count, fence,"
            " trigger, priority, failures, losses, max_attempts, scheduled_for, ready_at, started_at, finished_at,"
            " worker_id, error_class, tags)"
            " select tenant_id, $1, $2, id, version, $3, $4, $5, $6, 1, 'manual', 500, 0, 0, 1, $7, $7, $8, $9, $10,"
            " $11, tags from jobs where id = $12",
            *(run_id, attempt, final, state or ("succeeded" if outcome == "succeeded" else "dead"), outcome, count),
            *(made, started, (started or made) + timedelta(seconds=ran), worker, error, job["id"]),
        )
        return run_id


@pytest.fixture
async def past(scene: Scene) -> AsyncIterator[Past]:
    yield Past(scene, await scene.now())


async def test_runs_are_counted_by_job_with_their_durations_and_lags(scene: Scene, past: Past) -> None:
    quick, slow = await scene.job(name="quick"), await scene.job(name="slow")
    for _ in range(9):
        await past.attempt(quick, ran=0.1, lag=0.02)
    await past.attempt(quick, "failed", ran=10.0, lag=0.02)
    await past.attempt(slow, ran=100.0)
    await past.attempt(slow, None, state="skipped", count=7)
    found = await scene.api.get("/v1/reports/runs?by=job")
    assert found["complete"] is True and [item["label"] for item in found["items"]] == ["quick", "slow"]
    first, second = found["items"]
    assert (first["key"], first["runs"], first["succeeded"], first["dead"]) == (quick["id"], 10, 9, 1)
    assert first["success_rate"] == 0.9
    assert first["duration_p50_ms"] == pytest.approx(100, rel=0.03)
    assert first["duration_p95_ms"] == pytest.approx(10_000, rel=0.03)
    assert first["start_lag_p99_ms"] == pytest.approx(20, rel=0.03)
    assert (second["runs"], second["skipped"], second["success_rate"]) == (8, 7, 1.0)
    [total] = (await scene.api.get("/v1/reports/runs"))["items"]
    assert (total["key"], total["runs"]) == ("total", 18)


async def test_days_stand_in_order_and_only_those_asked_for(scene: Scene, past: Past) -> None:
    job = await scene.job()
    yesterday = timedelta(days=1)
    for ago in (timedelta(), timedelta(), yesterday):
        await past.attempt(job, ago=ago)
    found = await scene.api.get("/v1/reports/runs", params={"by": "day", "from": iso(past.now - timedelta(days=3))})
    days = [f"{past.now - ago:%Y-%m-%d}" for ago in (yesterday, timedelta())]
    assert [(item["key"], item["runs"]) for item in found["items"]] == [(days[0], 1), (days[1], 2)]
    before = await scene.api.get("/v1/reports/runs", params={"by": "day", "to": iso(past.now - timedelta(hours=12))})
    assert sum(item["runs"] for item in before["items"]) == 1


async def test_failures_are_of_attempts_and_name_the_last_run(scene: Scene, past: Past) -> None:
    job = await scene.job(name="a")
    first = await past.attempt(job, "failed", error="ValueError", final=False)
    await past.attempt(job, "failed", error="ValueError", run_id=first, attempt=2, state="dead")
    last = await past.attempt(job, "timeout", ago=timedelta(minutes=1), final=False)
    await past.attempt(job)
    found = {item["key"]: item for item in (await scene.api.get("/v1/reports/failures"))["items"]}
    assert list(found) == ["ValueError", "timeout"]
    assert {k: found["ValueError"][k] for k in ("failures", "runs", "dead")} == {"failures": 2, "runs": 1, "dead": 1}
    assert (found["timeout"]["last_run_id"], found["timeout"]["dead"]) == (last, 0)


async def test_a_report_of_real_runs_agrees_with_their_documents(scene: Scene) -> None:
    job = await scene.job(retry={"max_attempts": 1})
    await scene.ask(job, 3)
    worker = str(uuid.uuid4())
    runs = await scene.take(3, worker)
    await scene.end(worker, *(end_of(run, held_ms=80, ran_ms=50) for run in runs[:2]))
    await scene.end(worker, end_of(runs[2], "failed", "Boom", held_ms=80, ran_ms=50))
    [total] = (await scene.api.get("/v1/reports/runs"))["items"]
    assert (total["runs"], total["succeeded"], total["dead"]) == (3, 2, 1)
    [failure] = (await scene.api.get("/v1/reports/failures"))["items"]
    assert (failure["key"], failure["last_run_id"]) == ("Boom", runs[2]["id"])
    [busy] = (await scene.api.get("/v1/reports/utilisation"))["items"]
    shown = [(await scene.run(run["id"]))["duration_ms"] for run in runs]
    assert busy["attempts"] == 3 and busy["busy_seconds"] == pytest.approx(sum(shown) / 1000, abs=0.002)


async def test_utilisation_is_a_share_of_what_workers_offered(scene: Scene, past: Past) -> None:
    job = await scene.job()
    worker = await scene.employ(str(uuid.uuid4()))
    await scene.sql.execute(
        "update workers set slots = 2, state = 'gone', registered_at = $2, gone_at = $3 where id = $1",
        *(worker, past.now - timedelta(seconds=100), past.now - timedelta(seconds=50)),
    )
    await past.attempt(job, ran=25.0, worker=worker)
    for by, key in (("worker", worker), ("pool", "default")):
        [item] = (await scene.api.get(f"/v1/reports/utilisation?by={by}"))["items"]
        assert (item["key"], item["busy_seconds"], item["capacity_seconds"], item["utilisation"]) == (
            key,
            25,
            100,
            0.25,
        )
    [item] = (await scene.api.get("/v1/reports/utilisation?by=tenant"))["items"]
    assert (item["label"], item["capacity_seconds"]) == ("default", None)


async def test_nobody_reads_of_other_tenants_but_the_platform_of_their_use(scene: Scene, past: Past) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("admin", "other")
    await past.attempt(await scene.job(), ran=3.0)
    await past.attempt(await scene.job(other), ran=5.0)
    for kind in ("runs", "failures", "utilisation?by=tenant"):
        items = (await other.get(f"/v1/reports/{kind}"))["items"]
        assert "default" not in str(items)
    assert (await other.get("/v1/reports/utilisation?by=tenant"))["items"][0]["busy_seconds"] == 5
    assert (await scene.api.get("/v1/reports/runs"))["items"][0]["runs"] == 1
    shares = (await scene.api.get("/v1/reports/utilisation?by=tenant"))["items"]
    assert [(item["label"], item["busy_seconds"]) for item in shares] == [("other", 5), ("default", 3)]


async def test_a_report_says_when_it_did_not_read_all(
    scene: Scene, past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await scene.job()
    for _ in range(5):
        await past.attempt(job)
    monkeypatch.setattr(reports, "MOST_ROWS", 3)
    found = await scene.api.get("/v1/reports/runs")
    assert (found["complete"], found["items"][0]["runs"]) == (False, 3)


async def test_a_report_is_also_a_table(scene: Scene, past: Past) -> None:
    await past.attempt(await scene.job(), "failed", error="=HYPERLINK(1)")
    reply = await scene.api.http.get("/v1/reports/failures", headers={"accept": "text/csv"})
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    [row] = csv.DictReader(io.StringIO(reply.text))
    assert (row["key"], row["failures"], row["label"]) == ("'=HYPERLINK(1)", "1", "")


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("by=moon", "invalid"),
        ("from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", "invalid_range"),
        ("from=2020-01-01T00:00:00Z", "invalid_range"),
        ("by=hour&from=2026-01-01T00:00:00Z&to=2026-03-01T00:00:00Z", "invalid_range"),
    ],
)
async def test_what_cannot_be_reported_is_said(scene: Scene, query: str, code: str) -> None:
    assert (await scene.api.get(f"/v1/reports/runs?{query}", expect=422))["code"] == code


async def test_what_a_worker_offered_is_known_when_it_is_long_gone(scene: Scene, past: Past) -> None:
    job = await scene.job()
    gone = await scene.employ(str(uuid.uuid4()))
    begun, left = past.now - timedelta(days=20), past.now - timedelta(days=8)
    await scene.sql.execute(
        "update workers set slots = 2, state = 'gone', registered_at = $2, gone_at = $3 where id = $1",
        *(gone, begun, left),
    )
    await partitions.make(scene.db, past.now - timedelta(days=9))
    await past.attempt(job, ran=43_200.0, ago=timedelta(days=9), worker=gone)
    await fleet.measure(scene.db)
    assert await scene.value("select count(*) from workers where id = $1", gone) == 0

    async def told(days: int) -> list[Any]:
        query = {"by": "pool", "from": iso(past.now - timedelta(days=days)), "to": iso(past.now - timedelta(days=7))}
        return [
            (item["capacity_seconds"], item["utilisation"])
            for item in (await scene.api.get("/v1/reports/utilisation", params=query))["items"]
        ]

    offered = 2 * 12 * 86_400.0
    assert await told(25) == [(offered, pytest.approx(43_200 / offered, abs=1e-6))]
    # As after an upgrade: of those who went before nobody knows.
    await scene.sql.execute("update migrations set applied_at = now() - interval '1 year' where name < '0083'")
    assert await told(25) == [(None, None)]
