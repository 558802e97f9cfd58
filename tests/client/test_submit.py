"""Submitting declared jobs to a server, in both kinds of code, and waiting for their runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import Reply, Script, problem

from tests.conftest import Cluster
from tests.flow.kit import Scene
from tocsin import App, AsyncClient, Client, Context
from tocsin.client import ApiError, Retries

Do = Callable[[Callable[[], Any]], Awaitable[Any]]


@pytest.fixture(params=["sync", "async"])
def do(request: pytest.FixtureRequest) -> Do:
    """Do the same in both kinds of code: as it stands in a thread, or awaited on the loop."""

    async def in_thread(work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)

    async def on_loop(work: Callable[[], Any]) -> Any:
        found = work()
        return await found if inspect.isawaitable(found) else found

    return in_thread if request.param == "sync" else on_loop


def reports(url: str, key: str) -> App:
    app = App("reports", url=url, key=key)

    @app.job(cron="0 9 * * MON-FRI", timezone="America/New_York", retries=5, timeout="10m")
    async def daily(ctx: Context, region: str = "us", pages: int = 1) -> dict[str, int]:
        return {"rows": 42}

    return app


async def registered(scene: Scene, served: str, cluster: Cluster) -> App:
    app = reports(served, cluster.keys["key"])
    await app.register()
    return app


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_registering_again_changes_nothing_and_many_at_once_make_one_version(
    scene: Scene, served: str, cluster: Cluster
) -> None:
    apps = [reports(served, cluster.keys["key"]) for _ in range(6)]
    for _ in range(2):
        made = await asyncio.gather(*(app.register() for app in apps))
        assert {(job["id"], job["version"]) for [job] in made} == {(made[0][0]["id"], 1)}
    [job] = made[0]
    assert (job["name"], job["schedule"]["cron"], job["retry"]["max_attempts"]) == (
        "reports.daily",
        "0 9 * * MON-FRI",
        6,
    )
    assert job["tags"] == {"tocsin.app": "reports"}


async def test_a_pause_outlasts_every_start(scene: Scene, served: str, cluster: Cluster) -> None:
    app = await registered(scene, served, cluster)
    [job] = await app.register()
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    [again] = await app.register()
    assert (again["id"], again["version"], again["state"]) == (job["id"], 1, "paused")


# ── submitting ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_runs_are_asked_for_now_later_and_in_numbers(scene: Scene, served: str, cluster: Cluster, do: Do) -> None:
    daily = (await registered(scene, served, cluster)).jobs["reports.daily"]
    run = await do(lambda: daily.submit("eu", pages=3))
    stored = await scene.run(run.id)
    assert (stored["args"], stored["trigger"], run.state) == ({"region": "eu", "pages": 3}, "api", "ready")
    at = await do(lambda: daily.submit_at("2030-01-01T00:00:00Z"))
    assert (at.state, at.document["scheduled_for"]) == ("staged", "2030-01-01T00:00:00.000000Z")
    later = await do(lambda: daily.submit_in("10m", region="us"))
    wait = await scene.value("select extract(epoch from ready_at - now())::float8 from runs where id = $1", later.id)
    assert 500 < wait <= 600 and (await scene.run(later.id))["args"] == {"region": "us"}
    many = await do(lambda: daily.submit_many([{"region": "eu"}, {"pages": 2}]))
    assert [(await scene.run(one.id))["args"] for one in many] == [{"region": "eu"}, {"pages": 2}]
    assert await do(lambda: daily.submit_many([])) == []
    urgent = [await do(lambda: daily.using(priority=900, idempotency_key="once").submit()) for _ in range(2)]
    assert urgent[0].id == urgent[1].id and urgent[0].document["priority"] == 900
    with pytest.raises(TypeError, match="regoin"):
        daily.submit(regoin="eu")


async def test_a_job_that_was_made_anew_is_found_again(scene: Scene, served: str, cluster: Cluster, do: Do) -> None:
    app = await registered(scene, served, cluster)
    daily = app.jobs["reports.daily"]
    first = await do(daily.submit)
    await scene.api.delete(f"/v1/jobs/{first.document['job_id']}")
    with pytest.raises(ApiError, match="404"):
        await do(daily.submit)
    await app.register()
    assert (await do(daily.submit)).document["job_id"] != first.document["job_id"]


async def test_a_delay_and_an_instant_are_too_much(scene: Scene) -> None:
    job = await scene.job()
    both = {"at": "2030-01-01T00:00:00Z", "delay": "PT1M"}
    refused = await scene.api.post(f"/v1/jobs/{job['id']}/runs", both, expect=422)
    assert refused["errors"][0]["path"] == "delay"
    far = await scene.api.post(f"/v1/jobs/{job['id']}/runs", {"delay": "P3661D"}, expect=422)
    assert far["errors"][0]["path"] == "delay"
    assert await scene.value("select count(*) from runs") == 0


async def test_what_is_not_awaited_says_so(scene: Scene, served: str, cluster: Cluster) -> None:
    daily = (await registered(scene, served, cluster)).jobs["reports.daily"]
    run = daily.submit()
    with pytest.raises(RuntimeError, match="awaited"):
        run.id  # noqa: B018
    assert repr(run) == "Run(not awaited)"
    assert (await run).state == "ready" and (await run).id == run.id


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────

RUNNING, ENDED = {"id": "r", "job_id": "j", "state": "running"}, {"id": "r", "job_id": "j", "state": "dead"}


def told(*events: tuple[str, str]) -> Reply:
    """A stream of these (kind, data), which then breaks."""
    lines = "".join(f"id: {n}\nevent: {kind}\ndata: {data}\n\n" for n, (kind, data) in enumerate(events, 1))
    return Reply(body=lines.encode(), headers={"Content-Type": "text/event-stream"})


@pytest.fixture(params=["Client", "AsyncClient"])
def wait(request: pytest.FixtureRequest, script: Script) -> Callable[..., Awaitable[Any]]:
    quick = Retries(attempts=2, first_pause=0.01, longest_pause=0.01)

    async def waited(run: Any, timeout: float | None = None) -> Any:
        if request.param == "AsyncClient":
            async with AsyncClient(script.url, "key", retries=quick) as client:
                return await client.wait(run, timeout)
        with Client(script.url, "key", retries=quick) as client:
            return await asyncio.to_thread(client.wait, run, timeout)

    return waited


@pytest.mark.parametrize("run", ["r", RUNNING])
async def test_a_run_that_has_ended_is_not_waited_for(script: Script, wait: Any, run: Any) -> None:
    script.on("GET", "/v1/runs/r", ENDED)
    assert await wait(run) == ENDED
    assert len(script.asked) == 1


async def test_the_events_of_its_job_tell_when_it_has_ended(script: Script, wait: Any) -> None:
    script.on("GET", "/v1/runs/r", RUNNING, RUNNING, ENDED)
    other, over = '{"id": "o", "state": "dead"}', '{"id": "r", "state": "dead"}'
    going = '{"id": "r", "state": "running"}'
    script.on("GET", "/v1/events", told(("open", "{}"), ("run", other), ("run", going)), told(("run", over)))
    assert await wait("r") == ENDED
    assert [asked.path for asked in script.asked].count("/v1/runs/r") == 3
    assert {asked.query["job"] for asked in script.asked if asked.path == "/v1/events"} == {"j"}


async def test_an_end_that_fell_into_a_gap_of_the_stream_is_found(script: Script, wait: Any) -> None:
    script.on("GET", "/v1/runs/r", RUNNING, ENDED)
    script.on("GET", "/v1/events", told(("reset", "{}")))
    assert await wait("r") == ENDED


async def test_where_no_stream_is_to_be_had_it_looks_now_and_then(
    script: Script, wait: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("aio", "sync"):
        monkeypatch.setattr(f"tocsin.client.{module}.LOOK_AGAIN", 0.01)
    script.on("GET", "/v1/runs/r", RUNNING, RUNNING, RUNNING, ENDED)
    script.on("GET", "/v1/events", problem(429, "too_many_requests", headers={"Retry-After": "3600"}))
    assert await wait("r") == ENDED


async def test_it_does_not_wait_for_ever(script: Script, wait: Any) -> None:
    script.on("GET", "/v1/runs/r", RUNNING)
    script.on("GET", "/v1/events", told(("open", "{}")))
    with pytest.raises(TimeoutError):
        await wait("r", 0.2)
