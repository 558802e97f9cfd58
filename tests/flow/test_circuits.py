"""Circuits on the real database: calls are counted, runs are parked without burning an attempt, and go in waves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.kit import Scene, end_of
from tocsin.flow import circuits, claim
from tocsin.store.db import Row

W = "01900000-0000-7000-8000-000000000001"
RETRY = {"max_attempts": 5, "backoff": "fixed", "delay": "PT1H", "jitter": "none"}


async def circuit(scene: Scene, name: str = "billing") -> dict[str, Any]:
    return await scene.api.get(f"/v1/circuits/{name}")  # type: ignore[no-any-return]


async def take(scene: Scene, slots: int = 100) -> list[Row]:
    return await scene.take(slots, await scene.employ(W))


async def fail(scene: Scene, runs: list[Row], outcome: str = "failed") -> None:
    await scene.end(W, *(end_of(run, outcome, "Down") for run in runs))


async def parked(scene: Scene) -> int:
    return await scene.value(  # type: ignore[no-any-return]
        "select count(*) from runs where state = 'waiting' and blocked_by = 'breaker'"
    )


async def cool_down(scene: Scene) -> None:
    await scene.sql.execute("update circuits set next_at = now() where next_at is not null")


async def turn(scene: Scene) -> circuits.Kept:
    """The next turn, without the wait for it."""
    await cool_down(scene)
    return await circuits.keep(scene.db)


async def broken(scene: Scene, runs: int = 0, **spec: Any) -> dict[str, Any]:
    """A job whose circuit has opened, with runs that wait for it."""
    job = await scene.job(circuit="billing", **{"retry": RETRY, **spec})
    await scene.ask(job, 10)
    await fail(scene, await take(scene))
    assert (await circuit(scene))["state"] == "open"
    if runs:
        await scene.ask(job, runs)
        assert await take(scene) == []
    return job


async def test_it_opens_and_parks_what_comes_without_burning_an_attempt(scene: Scene) -> None:
    job = await scene.job(circuit="billing", retry=RETRY)
    other = await scene.job()
    await scene.ask(job, 20)
    first = await take(scene, 9)
    await fail(scene, first)
    assert (await circuit(scene))["recent"] == {"calls": 9, "failures": 9}
    await fail(scene, await take(scene, 1))
    shown = await circuit(scene)
    assert (shown["state"], shown["by_hand"]) == ("open", False) and shown["probes_at"] is not None
    await scene.ask(other, 1)
    taken = await take(scene)
    assert [row["job_id"] for row in taken] == [other["id"]], "only what does not use it"
    assert await parked(scene) == 10
    rows = await scene.rows("select attempt, failures from runs where state = 'waiting'")
    assert {tuple(row) for row in rows} == {(0, 0)}
    assert (await circuit(scene))["waiting"] == 10


async def test_time_outs_count_and_what_says_nothing_of_the_target_does_not(scene: Scene) -> None:
    job = await scene.job(circuit="billing", retry=RETRY)
    await scene.ask(job, 40)
    await fail(scene, await take(scene, 10), "lost")
    await fail(scene, await take(scene, 10), "cancelled")
    assert (await circuit(scene))["recent"]["calls"] == 0
    await fail(scene, await take(scene, 10), "timeout")
    assert (await circuit(scene))["state"] == "open"


async def test_a_repeated_or_stale_report_counts_once(scene: Scene) -> None:
    job = await scene.job(circuit="billing", retry=RETRY)
    await scene.ask(job, 3)
    runs = await take(scene)
    for _ in range(5):
        await fail(scene, runs)
    assert (await circuit(scene))["recent"] == {"calls": 3, "failures": 3}


async def test_successes_keep_it_closed_though_the_gateway_would_take_them_for_plain(scene: Scene) -> None:
    job = await scene.job(circuit="billing", retry=RETRY)
    await scene.ask(job, 29)
    runs = await take(scene)
    assert all(run["special"] for run in runs)
    await scene.end(W, *(end_of(run) for run in runs[:20]))
    await fail(scene, runs[20:29])
    assert (await circuit(scene))["recent"] == {"calls": 20, "failures": 9}
    assert (await circuit(scene))["state"] == "closed"


async def test_canaries_and_waves_until_all_have_gone(scene: Scene) -> None:
    job = await broken(scene, 90)
    waves = []
    for _ in range(4):
        await turn(scene)
        wave = await take(scene)
        waves.append(len(wave))
        assert (await turn(scene)).hints == [], "not while the wave is under way"
        await scene.end(W, *(end_of(run) for run in wave))
    assert waves == [1, 2, 4, 8]
    kept = await turn(scene)
    assert kept.moved == [("billing", "closed")]
    assert len(await take(scene)) == 16
    for left in (25, 25, 90 - 15 - 16 - 50):
        await turn(scene)
        assert len(await take(scene)) == left
    assert await parked(scene) == 0
    assert await scene.value("select count(*) from runs where canary") == 0
    assert (await scene.states(job)).count("staged") == 10, "those in back-off"


async def test_a_failing_canary_opens_it_again_for_twice_as_long(scene: Scene) -> None:
    await broken(scene, 5)
    for times in (2, 3):
        await turn(scene)
        [canary] = await take(scene)
        await fail(scene, [canary])
        row = await scene.row("select state, trips, next_at - since as wait from circuits")
        assert (row["state"], row["trips"]) == ("open", times)
        assert row["wait"].total_seconds() == 5 * 2 ** (times - 1)
    assert await take(scene) == []
    assert await parked(scene) == 3


async def test_canaries_that_vanish_are_replaced(scene: Scene) -> None:
    job = await broken(scene, 5)
    await turn(scene)
    [canary] = await scene.rows("select id::text as id from runs where canary")
    await scene.api.post(f"/v1/runs/{canary['id']}/cancel", {})
    await turn(scene)
    [second] = await take(scene)
    await fail(scene, [second], "lost")
    await turn(scene)
    [third] = await take(scene)
    assert third["id"] not in (canary["id"], second["id"])
    await scene.end(W, end_of(third))
    assert (await scene.row("select state, good from circuits"))["good"] == 1
    assert job["id"] == third["job_id"]


async def test_a_canary_handed_back_is_still_one(scene: Scene) -> None:
    from tocsin.flow.report import Returned, give_back

    await broken(scene, 2)
    await turn(scene)
    [canary] = await take(scene)
    await give_back(scene.db, [Returned(W, canary["id"], canary["fence"])])
    [again] = await take(scene)
    assert again["id"] == canary["id"]


async def test_a_retry_waits_for_the_circuit_too(scene: Scene) -> None:
    job = await broken(scene)
    ids = [row["id"] for row in await scene.rows("select id from runs where job_id = $1", job["id"])]
    await scene.wake(*map(str, ids))
    assert await take(scene) == []
    rows = await scene.rows("select attempt, failures, blocked_by from runs")
    assert {tuple(row) for row in rows} == {(1, 1, "breaker")}


async def test_it_is_shared_by_jobs_and_not_by_tenants(scene: Scene) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    await broken(scene)
    same = await scene.job(circuit="billing")
    await scene.ask(same, 1)
    spec = {"target": {"kind": "process", "command": ["true"]}, "circuit": "billing"}
    theirs = await scene.api.post("/v1/jobs", spec, headers={"tocsin-tenant": "other"})
    taken = await take(scene)
    assert [row["job_id"] for row in taken] == [theirs["id"]]
    found = await scene.api.get("/v1/circuits/billing", headers={"tocsin-tenant": "other"})
    assert found["state"] == "closed"


async def test_it_holds_what_a_limit_would_let_go(scene: Scene) -> None:
    await broken(scene)
    job = await scene.job(circuit="billing", max_concurrency=1)
    await scene.ask(job, 3)
    assert await take(scene) == []
    await turn(scene)
    assert len(await take(scene)) == 1


async def test_nothing_is_taken_ahead_of_its_instant(scene: Scene) -> None:
    from datetime import timedelta

    job = await scene.job(circuit="billing", schedule={"every": "PT1H"})
    await scene.occur(job, -0.5)
    ahead = await claim.take_ahead(scene.db, await scene.shares(10), [await scene.employ(W)] * 10, timedelta(seconds=1))
    assert ahead.rows == []


async def test_by_hand_it_stays_open_until_it_is_closed(scene: Scene) -> None:
    job = await scene.job(circuit="billing")
    await scene.ask(job, 40)
    shown = await scene.api.post("/v1/circuits/billing/open", {"reason": "maintenance"})
    assert (shown["state"], shown["by_hand"], shown["probes_at"]) == ("open", True, None)
    assert await take(scene) == []
    await turn(scene)
    assert await take(scene) == []
    again = await scene.api.post("/v1/circuits/billing/open", {})
    assert again["since"] == shown["since"], "opening it twice is opening it once"
    shown = await scene.api.post("/v1/circuits/billing/close", {})
    assert (shown["state"], shown["by_hand"], shown["waiting"]) == ("closed", False, 40)
    await turn(scene)
    assert len(await take(scene)) == 16
    actions = await scene.rows("select action from audit where target = 'circuit:billing' order by id")
    assert [row["action"] for row in actions] == ["circuit.open", "circuit.open", "circuit.close"]


async def test_a_circuit_of_its_own_making_and_an_edit(scene: Scene) -> None:
    policy = {"calls": 2, "failure_ratio": 1.0, "cooldown": "PT1S", "max_cooldown": "PT1M"}
    made = await scene.api.call("PUT", "/v1/circuits/crm", json=policy)
    assert made["policy"] == policy | {"window": "PT1M", "release_rate": 500} and made["state"] == "closed"
    job = await scene.job(retry=RETRY)
    await scene.ask(job, 2)
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"circuit": "crm"})
    assert changed["circuit"] == "crm"
    await fail(scene, await take(scene))
    assert (await circuit(scene, "crm"))["state"] == "closed", "what was made before does not count"
    await scene.ask(job, 2)
    await fail(scene, await take(scene))
    assert (await circuit(scene, "crm"))["state"] == "open"
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"circuit": None})
    await scene.ask(job, 1)
    assert len(await take(scene)) == 1
    listed = await scene.api.get("/v1/circuits?state=open")
    assert [one["name"] for one in listed["items"]] == ["crm"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/circuits/none", None, 404),
        ("POST", "/v1/circuits/none/open", {}, 404),
        ("POST", "/v1/circuits/none/close", {}, 404),
        ("POST", "/v1/circuits/none/explode", {}, 404),
        ("PUT", "/v1/circuits/x", {"failure_ratio": 0}, 422),
        ("PUT", "/v1/circuits/x", {"calls": 1000}, 422),
        ("PUT", "/v1/circuits/x", {"cooldown": "PT0S"}, 422),
        ("PUT", "/v1/circuits/x", {"colour": "red"}, 422),
        ("PUT", "/v1/circuits/%20", {}, 422),
        ("GET", "/v1/circuits?state=ajar", None, 422),
    ],
)
async def test_what_is_wrong_is_refused(scene: Scene, method: str, path: str, body: Any, status: int) -> None:
    await scene.api.call(method, path, json=body, expect=status)
    assert await scene.value("select count(*) from circuits") == 0


async def test_two_nodes_send_one_wave(scene: Scene) -> None:
    await broken(scene, 20)
    await cool_down(scene)
    await asyncio.gather(*(circuits.keep(scene.db) for _ in range(5)))
    assert await scene.value("select count(*) from runs where canary") == 1


async def test_reports_at_the_same_moment_are_all_counted(scene: Scene) -> None:
    await scene.api.call("PUT", "/v1/circuits/billing", json={"calls": 100})
    job = await scene.job(circuit="billing", retry=RETRY)
    await scene.ask(job, 40)
    runs = await take(scene)
    await asyncio.gather(*(fail(scene, runs[i::8]) for i in range(8)))
    assert (await circuit(scene))["recent"] == {"calls": 40, "failures": 40}
