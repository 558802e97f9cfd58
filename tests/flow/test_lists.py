"""Lists: a page costs what it returns, or stops after a set number of rows, however much history one job has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import combinations

import pytest

from tests.conftest import Cluster
from tests.flow.crowd import RARE_WORKER, ROWS, SMALL_JOBS, WORKER, Crowd
from tests.flow.kit import Scene, end_of
from tocsin.flow.shared import windows

GROWTH = 3  # the first measurement has a third of the rows
SLACK = 40  # pages that planning may cost
SMALL = "018f0000-0000-7000-8000-000000000002"
NO_JOB = "018f0000-0000-7000-8000-00000000ffff"


@pytest.fixture
def database_url(cluster: Cluster) -> Iterator[str]:
    """Create a separate database: other tests would count the pages that a crowd leaves behind."""
    name = asyncio.run(cluster.clone())
    yield cluster.url(name)
    asyncio.run(cluster.drop(name))


@pytest.fixture
async def crowd(scene: Scene) -> AsyncIterator[Crowd]:
    crowd = Crowd(scene)
    await crowd.begin()
    await crowd.grow(ROWS // GROWTH)
    yield crowd


def filters(crowd: Crowd) -> dict[str, list[str]]:
    """Return for each filter of runs a value of most rows, a value of the oldest row alone, and a value of no row."""
    return {
        "job": [crowd.big["id"], SMALL, NO_JOB],
        "state": ["succeeded", "dead", "expired", "ready"],
        "outcome": ["succeeded", "failed", "lost"],
        "error_class": ["Rare", "None"],
        "worker": [WORKER, RARE_WORKER],
        "tag": ["rare:yes", "rare:no"],
        "from": [f"{crowd.day:%Y-%m-%dT%H:%M:%SZ}"],
        "to": [f"{crowd.day:%Y-%m-%dT00:00:02Z}"],
    }


def queries(crowd: Crowd) -> list[dict[str, str]]:
    """No filter, each filter alone, and each pair."""
    every = filters(crowd)
    alone = [{name: value} for name, values in every.items() for value in values]
    pairs = [
        {one: value, other: second}
        for one, other in combinations(every, 2)
        for value in every[one]
        for second in every[other]
    ]
    return [{}, *alone, *pairs]


Asked = tuple[str, dict[str, str]]


async def cost(crowd: Crowd, asked: Asked, hoped: int = 0) -> int:
    """Return how many pages a call reads: the minimum of several tries, until it is at most `hoped`. Autovacuum, or a
    session that plans the statement again, makes some tries more expensive."""
    path, query = asked
    least = (await crowd.pages(path, **query))[0]
    for _ in range(6):
        if least <= hoped:
            break
        least = min(least, (await crowd.pages(path, **query))[0])
    return least


async def assert_flat(crowd: Crowd, asked: list[Asked], grow: Callable[[], Awaitable[None]] | None = None) -> None:
    """Check that each of these calls costs the same after the history has become three times as large."""
    before = [await cost(crowd, one, 150) for one in asked]
    await (grow or crowd.grow_to_the_end)()
    dearer = []
    for one, then in zip(asked, before, strict=True):
        allowed = then + then // 2 + SLACK
        now = await cost(crowd, one, allowed)
        if now > allowed:
            dearer.append(f"{one[0]} {one[1]}: {then} → {now} pages")
    assert not dearer, "\n".join(dearer)


async def test_jobs_cost_what_they_return(crowd: Crowd) -> None:
    paths: list[Asked] = [
        ("/v1/jobs", {}),
        ("/v1/jobs", {"limit": "500"}),
        ("/v1/jobs", {"q": "small-99"}),
        (f"/v1/jobs/{crowd.big['id']}", {}),
        (f"/v1/jobs/{SMALL}", {}),
    ]
    await assert_flat(crowd, paths)
    assert await cost(crowd, ("/v1/jobs", {"limit": "500"}), 500 * 15) < 500 * 15


async def test_every_filter_of_runs_is_bounded(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOWS", (300, 3_000))
    asked = [("/v1/runs", query | {"limit": "20"}) for query in queries(crowd)]
    asked += [(f"/v1/jobs/{crowd.big['id']}/runs", {"state": state}) for state in ("dead", "expired", "succeeded")]
    await assert_flat(crowd, asked)


async def test_a_rare_value_is_found_at_once(crowd: Crowd) -> None:
    """Rare values have an index of their own, because people search for them."""
    for query in ({"state": "dead"}, {"state": "expired"}, {"outcome": "failed"}, {"error_class": "Rare"}):
        _, answer = await crowd.pages("/v1/runs", **query)
        assert answer["next_cursor"] is None and len(answer["items"]) == (query.get("state") != "expired"), query
        assert await cost(crowd, ("/v1/runs", query), 60) <= 60, query


async def test_the_pages_together_hold_what_was_asked_for(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor of a page that stops early continues there: the oldest run is found, and no run twice."""
    monkeypatch.setattr(windows, "WINDOWS", (300, 3_000))
    await crowd.queue(5_000, "ready")
    for query in ({"worker": RARE_WORKER}, {"tag": "rare:yes"}, {"state": "dead", "tag": "rare:yes"}):
        assert [run["tags"] for run in await crowd.all_pages("/v1/runs", **query)] == [{"rare": "yes"}]
    small = await crowd.all_pages("/v1/runs", job=SMALL, worker=WORKER)
    assert [run["state"] for run in small] == ["succeeded"]
    found = await crowd.all_pages("/v1/runs", state="succeeded", limit="500")
    ids = [run["id"] for run in found]
    assert len(ids) == crowd.rows + SMALL_JOBS and ids == sorted(set(ids), reverse=True)
    assert len(await crowd.all_pages("/v1/runs", state="ready", limit="500")) == 5_000


async def test_live_runs_are_bounded_too(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOWS", (300, 1_000))
    await crowd.queue(2_000, "ready")
    asked: list[Asked] = [
        ("/v1/runs", {"state": "staged"}),
        ("/v1/runs", {"worker": WORKER}),
        ("/v1/runs", {"job": SMALL}),
        ("/v1/jobs", {}),
        (f"/v1/jobs/{crowd.big['id']}", {}),
    ]
    await assert_flat(crowd, asked, lambda: crowd.queue(20_000, "ready"))


async def test_a_key_of_few_jobs_does_not_read_all_others(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOWS", (300, 3_000))
    made = await crowd.scene.api.post("/v1/keys", {"role": "viewer", "scopes": {"jobs": ["small-7"]}})
    crowd.scene.api.http.headers["authorization"] = f"Bearer {made['key']}"
    await crowd.pages("/v1/runs")
    pages, answer = await crowd.pages("/v1/runs")
    assert answer["items"] == [] and answer["next_cursor"] is not None
    assert pages < 30_000
    assert len(await crowd.all_pages("/v1/runs")) == 1


async def test_a_run_made_in_the_same_instant_as_its_job_is_listed(scene: Scene) -> None:
    """Ids of one instant are not ordered: the run of a one-time job may have a lower id than the job."""
    job = await scene.job(schedule=None)
    worker = "019a0000-0000-7000-8000-000000000001"
    [run] = await scene.take(1, worker)
    await scene.end(worker, end_of(run))
    low = job["id"][:14] + "7000-8000-000000000001"
    await scene.sql.execute("update history set run_id = $1 where job_id = $2", low, job["id"])
    assert [each["id"] for each in (await scene.api.get("/v1/runs", params={"job": job["id"]}))["items"]] == [low]
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["last_run"]["id"] == low
