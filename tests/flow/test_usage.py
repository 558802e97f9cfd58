"""usage: a tenant's jobs, runs and bytes beside its quotas, counted up to a bound."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand, end_of
from tocsin.clock import iso
from tocsin.flow import usage
from tocsin.model.ids import instant_of

QUOTAS = {"max_jobs": 10, "max_queued": 20, "max_running": 30}


@pytest.fixture
async def acme(scene: Scene) -> Api:
    await scene.api.post("/v1/tenants", {"slug": "acme", "quotas": QUOTAS})
    return await scene.api.with_key("admin", "acme")


async def used(api: Api) -> Any:
    return await api.get("/v1/tenants/acme/usage")


async def test_who_has_nothing_uses_nothing(acme: Api) -> None:
    found = await used(acme)
    assert found.pop("last_day").pop("since") is not None
    assert found == {
        "tenant": "acme",
        "jobs": {"used": 0, "quota": 10},
        "queued": {"used": 0, "quota": 20},
        "running": {"used": 0, "quota": 30},
        "log_bytes_today": {"used": 0, "quota": None},
        "stored": {"history_bytes": 0, "audit_bytes": 0, "log_bytes": 0, "payloads": 0},
    }


async def test_an_admin_sees_its_own_and_the_platform_everybodys(scene: Scene, acme: Api) -> None:
    await (await scene.api.with_key("editor", "acme")).get("/v1/tenants/acme/usage", expect=403)
    await (await scene.api.with_key("admin")).get("/v1/tenants/acme/usage", expect=404)
    await acme.get("/v1/tenants/default/usage", expect=404)
    assert (await used(scene.api))["jobs"] == {"used": 0, "quota": 10}
    await scene.api.get("/v1/tenants/nobody/usage", expect=404)


async def ran(scene: Scene, acme: Api) -> list[str]:
    """A job's runs: one that succeeded, one that died after a retry, one cancelled before it ran, one that runs, one
    that waits; and an occurrence that was skipped."""
    worker = await scene.employ(str(uuid.uuid4()))
    job = await scene.job(acme, retry={"max_attempts": 2, "backoff": "immediate"})
    ids = (await acme.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}] * 3}))["ids"]
    await acme.post(f"/v1/runs/{ids[2]}/cancel")
    first, second = await scene.take(2, worker)
    await scene.end(worker, end_of(first), end_of(second, "failed", error="Boom"))
    await scene.wake(second["id"])
    [again] = await scene.take(2, worker)
    await scene.end(worker, end_of(again, "failed", error="Boom"))
    ids += (await acme.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}]}))["ids"]
    await scene.take(1, worker)
    ids += (await acme.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}]}))["ids"]
    occurs = await scene.job(acme, schedule={"every": "PT1H"}, start_deadline="PT0.001S")
    await scene.sql.execute(
        "insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, reason, fence, trigger,"
        " priority, failures, losses, max_attempts, scheduled_for, ready_at, finished_at)"
        " select tenant_id, $2, 1, id, 1, true, 'skipped', 'skipped_paused', 0, 'schedule', 500, 0, 0, 1, now(), now(),"
        " now() from jobs where id = $1",
        *(occurs["id"], ids[-1][:-4] + "ffff"),
    )
    return ids


async def test_what_it_did_in_a_day(scene: Scene, acme: Api) -> None:
    await ran(scene, acme)
    found = await used(acme)
    assert {name: found[name]["used"] for name in ("jobs", "queued", "running")} == {
        "jobs": 2,
        "queued": 1,
        "running": 1,
    }
    assert {k: found["last_day"][k] for k in ("submitted", "ran", "failed")} == {"submitted": 5, "ran": 2, "failed": 1}


async def test_no_more_than_so_many_rows_are_looked_at(
    scene: Scene, acme: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await ran(scene, acme)
    monkeypatch.setattr(usage, "_MOST_ENDED", 2)
    monkeypatch.setattr(usage, "_MOST_COUNTED", 1)
    found = await used(acme)
    # Two live ones are as many as are looked at: from the older of them on it is counted.
    assert found["last_day"] == {"since": iso(instant_of(ids[3])), "submitted": 2, "ran": 0, "failed": 0}
    assert found["jobs"]["used"] == 1 and found["queued"]["used"] + found["running"]["used"] == 1


async def test_what_is_stored(scene: Scene, acme: Api, worker_key: str) -> None:
    hand = await WorkerHand.register(scene.node, worker_key)
    tenant_id = await scene.value("select id from tenants where slug = 'acme'")
    await scene.sql.execute(
        "insert into archives (tenant_id, day, object, rows, bytes, checksum)"
        " select $1, now()::date, n::text, 1, 1000, '' from generate_series(1, 3) n",
        tenant_id,
    )
    await scene.sql.execute("update archives set expired_at = now() where object = '3'")
    await scene.sql.execute("insert into payloads values ($1, 'p', now())", tenant_id)
    job = await scene.job(acme)
    await acme.post(f"/v1/jobs/{job['id']}/runs")
    [run] = await scene.take(1, hand.id)
    line = {"run_id": run["id"], "attempt": run["attempt"], "fence": run["fence"], "offset": 0}
    await hand.ship(line | {"lines": [[0.0, "stdout", "info", "x" * 500]]})
    found = await used(acme)
    assert (found["stored"]["history_bytes"], found["stored"]["payloads"]) == (2000, 1)
    assert 0 < found["stored"]["log_bytes"] < found["log_bytes_today"]["used"] == 500
    # With a quota, what that goes by is told.
    await scene.api.call("PATCH", "/v1/tenants/acme", json={"quotas": {"log_bytes_per_day": 1000}})
    assert (await used(acme))["log_bytes_today"] == {"used": 0, "quota": 1000}
