"""Jobs over HTTP: merge patches, PUT by name, batches, versions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene
from tocsin.node.server.routes.edits import merged

MANUAL = {"target": PROCESS, "schedule": {"manual": True}}


async def put(scene: Scene, name: str, body: Any, **more: Any) -> Any:
    return await scene.api.http.put(f"/v1/jobs/by-name/{name}", json=body, **more)


# ── merge patch ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_merge_is_that_of_the_rfc(target: Any, patch: Any, result: Any) -> None:
    assert merged(target, patch) == result


@pytest.mark.parametrize(
    ("patch", "path", "code"),
    [
        ({"id": "x"}, "id", "read_only"),
        ({"version": 1}, "version", "read_only"),
        ({"state": None}, "state", "read_only"),
        ({"schedule": {"description": "x"}}, "schedule.description", "read_only"),
        ({"nonsense": 1}, "nonsense", "invalid"),
        ({"nonsense": None}, "nonsense", "invalid"),
        ({"retry": {"nonsense": None}}, "retry.nonsense", "invalid"),
        ({"schedule": {"misfire": {"nonsense": None}}}, "schedule.misfire.nonsense", "invalid"),
        ({"target": {"nonsense": None}}, "target.nonsense", "invalid"),
        ({"priority": "high"}, "priority", "invalid"),
        ({"priority": 5000}, "priority", "invalid"),
        ({"target": None}, "", "invalid"),
        ({"schedule": {"every": "PT1M"}}, "schedule", "invalid"),
        ({"schedule": {"manual": None, "every": "PT0.1S"}}, "schedule.every", "invalid"),
        ({"schedule": {"manual": None, "cron": "61 * * * *"}}, "schedule.cron", "invalid_cron"),
        ({"pool": "nowhere"}, "pool", "unknown_pool"),
        ({"notify": ["x"]}, "notify", "not_supported"),
        ({"circuit": "two words"}, "circuit", "invalid"),
    ],
)
async def test_a_patch_is_checked_like_a_new_job(scene: Scene, patch: Any, path: str, code: str) -> None:
    job = await scene.job(tags={"a": "b"})
    refused = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json=patch, expect=422)
    assert [(e["path"], e["code"]) for e in refused["errors"]] == [(path, code)]
    assert (await scene.api.get(f"/v1/jobs/{job['id']}"))["version"] == 1


async def test_patches_by_media_type_and_role(scene: Scene) -> None:
    job = await scene.job(tags={"a": "b"})
    url = f"/v1/jobs/{job['id']}"
    for kind, status in (("application/merge-patch+json", 200), ("application/json", 200), ("text/plain", 415)):
        reply = await scene.api.http.patch(url, content=b'{"tags": {"never": null}}', headers={"content-type": kind})
        assert reply.status_code == status
    assert (await scene.api.get(url))["version"] == 1, "to take away what is not there changes nothing"
    for body in (b"[]", b"5", b"null", b'{"a":'):
        reply = await scene.api.http.patch(url, content=body)
        assert reply.status_code in (400, 422)
    operator = await scene.api.with_key("operator")
    await operator.call("PATCH", url, json={"priority": 1}, expect=403)
    await operator.call("PUT", "/v1/jobs/by-name/x", json=MANUAL, expect=403)
    await operator.call("POST", "/v1/jobs/batch", json={"jobs": [MANUAL]}, expect=403)
    await scene.api.call("PATCH", "/v1/jobs/no-id", json={}, expect=404)


# ── PUT by name ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_put_makes_keeps_replaces_and_makes_again(scene: Scene) -> None:
    spec = MANUAL | {"tags": {"a": "b"}, "timeout": "5m"}
    made = await put(scene, "a", spec)
    assert (made.status_code, made.json()["version"], made.json()["name"]) == (201, 1, "a")
    same = await put(scene, "a", spec | {"name": "a", "timeout": "PT5M"})
    assert (same.status_code, same.json()["version"], same.json()["id"]) == (200, 1, made.json()["id"])
    less = await put(scene, "a", MANUAL)
    assert (less.status_code, less.json()["version"], less.json()["tags"], less.headers["etag"]) == (200, 2, {}, '"2"')
    await scene.api.delete(f"/v1/jobs/{made.json()['id']}")
    again = await put(scene, "a", MANUAL)
    assert (again.status_code, again.json()["version"]) == (201, 1) and again.json()["id"] != made.json()["id"]


async def test_put_refuses_another_name_and_a_name_that_is_none(scene: Scene) -> None:
    assert (await put(scene, "a", MANUAL | {"name": "b"})).status_code == 422
    assert (await put(scene, "a%20b", MANUAL)).status_code == 422
    assert (await put(scene, "a%0A", MANUAL)).status_code == 422
    assert (await put(scene, "a", {})).status_code == 422
    assert await scene.value("select count(*) from jobs") == 0


async def test_put_with_conditions(scene: Scene) -> None:
    assert (await put(scene, "a", MANUAL, headers={"if-match": '"1"'})).status_code == 412
    assert (await put(scene, "a", MANUAL, headers={"if-match": "*"})).status_code == 412
    assert (await put(scene, "a", MANUAL, headers={"if-none-match": "*"})).status_code == 201
    assert (await put(scene, "a", MANUAL, headers={"if-none-match": "*"})).status_code == 412
    changed = MANUAL | {"priority": 1}
    assert (await put(scene, "a", changed, headers={"if-match": '"2"'})).status_code == 412
    assert (await put(scene, "a", changed, headers={"if-match": '"1"'})).json()["version"] == 2
    assert (await put(scene, "a", changed, headers={"if-match": "*"})).json()["version"] == 2


async def test_ten_puts_at_once_make_one_job(scene: Scene) -> None:
    replies = await asyncio.gather(*(put(scene, "a", MANUAL | {"priority": i % 2}) for i in range(10)))
    assert sorted(r.status_code for r in replies) == [200] * 9 + [201]
    assert len({r.json()["id"] for r in replies}) == 1
    job = await scene.row("select version from jobs")
    assert await scene.value("select count(*) from job_versions") == job["version"] - 1


async def test_puts_with_one_key_have_one_effect_and_the_first_reply(scene: Scene) -> None:
    headers = {"idempotency-key": "k"}
    replies = await asyncio.gather(*(put(scene, "a", MANUAL, headers=headers) for _ in range(5)))
    assert {(r.status_code, r.json()["id"], r.json()["version"]) for r in replies} == {
        (201, replies[0].json()["id"], 1)
    }
    assert sum("idempotent-replayed" in r.headers for r in replies) == 4
    await put(scene, "a", MANUAL | {"priority": 1})
    replay = await put(scene, "a", MANUAL, headers=headers)
    assert (replay.status_code, replay.json()["version"], replay.json()["priority"]) == (201, 1, 500)
    assert await scene.value("select version from jobs") == 2


async def test_the_replay_of_a_new_job_is_the_job_as_it_was_answered(scene: Scene) -> None:
    headers = {"idempotency-key": "k"}
    made = await scene.api.post("/v1/jobs", MANUAL, headers=headers)
    await scene.api.call("PATCH", f"/v1/jobs/{made['id']}", json={"priority": 1})
    replay = await scene.api.http.post("/v1/jobs", json=MANUAL, headers=headers)
    assert (replay.status_code, replay.headers["etag"], replay.json()["priority"]) == (201, '"1"', 500)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_batch_is_stored_whole_and_answered_in_order(scene: Scene) -> None:
    specs: list[dict[str, Any]] = [
        MANUAL | {"name": "z", "max_concurrency": 2},
        {"target": PROCESS},
        {"target": PROCESS, "name": "a", "schedule": {"every": "PT1H"}},
        {"target": PROCESS, "schedule": {"delay": "PT1S"}, "tags": {"k": "v"}},
        {"target": {"kind": "python", "function": "f"}, "schedule": {"cron": "0 3 * * *"}},
        {"target": {"kind": "python", "function": "f", "kwargs": {"schedule": None, "a": '"schedule":null'}}},
    ]
    made = (await scene.api.post("/v1/jobs/batch", {"jobs": specs}, expect=201))["items"]
    assert [job["name"] for job in made] == ["z", None, "a", None, None, None]
    assert len(await scene.rows("select from runs")) == 3
    assert len(await scene.rows("select from triggers")) == 2
    assert len(await scene.rows("select from limits")) == 1
    assert await scene.value("select count(*) from audit where action = 'job.create'") == 1
    for job in made:
        read = await scene.api.get(f"/v1/jobs/{job['id']}")
        volatile = ("next_run_at", "estimated_start_at")
        assert {k: v for k, v in read.items() if k not in volatile} == {
            k: v for k, v in job.items() if k not in volatile
        }
        assert (read["next_run_at"] is None) == (job["next_run_at"] is None)


@pytest.mark.parametrize(
    ("bad", "status", "path", "code"),
    [
        ({"target": PROCESS, "priority": "x"}, 422, "jobs[3].priority", "invalid"),
        ({"target": {"kind": "process"}}, 422, "jobs[3].target", "invalid"),
        ({}, 422, "jobs[3]", "invalid"),
        (5, 422, "jobs[3]", None),
        ({"target": PROCESS, "nonsense": 1}, 422, "jobs[3]", "invalid"),
        ({"target": PROCESS, "timeout": "PT0S"}, 422, "jobs[3].timeout", "invalid"),
        ({"target": PROCESS, "depends_on": ["x"]}, 422, "jobs[3].depends_on[0]", "unknown_job"),
        ({"target": PROCESS, "schedule": {"cron": "x"}}, 422, "jobs[3].schedule.cron", "invalid_cron"),
        ({"target": PROCESS, "pool": "nowhere"}, 422, "jobs[3].pool", "unknown_pool"),
        ({"target": PROCESS, "name": "a"}, 409, "jobs[3].name", "name_taken"),
        ({"target": PROCESS, "name": "known"}, 409, "jobs[3].name", "name_taken"),
    ],
)
async def test_one_bad_job_leaves_none_and_is_named(scene: Scene, bad: Any, status: int, path: str, code: Any) -> None:
    await scene.job(name="known")
    jobs = [MANUAL, MANUAL | {"name": "a"}, {"target": PROCESS}, bad, {"target": PROCESS}]
    headers = {"idempotency-key": "k"}
    refused = await scene.api.post("/v1/jobs/batch", {"jobs": jobs}, expect=status, headers=headers)
    [error] = refused["errors"]
    assert error["path"] == path and code in (None, error["code"])
    for table, count in (("jobs", 1), ("runs", 0), ("idempotency", 0)):
        assert await scene.value(f"select count(*) from {table}") == count


@pytest.mark.parametrize("body", [{"jobs": []}, {"jobs": [MANUAL] * 1001}, {}, {"jobs": 5}, {"jobs": [MANUAL], "x": 1}])
async def test_a_batch_of_none_or_too_many_is_refused(scene: Scene, body: Any) -> None:
    await scene.api.post("/v1/jobs/batch", body, expect=422)


async def test_a_batch_repeated_with_its_key_is_stored_once(scene: Scene) -> None:
    body = {"jobs": [MANUAL | {"name": f"j{i}"} for i in range(20)]}
    headers = {"idempotency-key": "k"}
    replies = await asyncio.gather(
        *(scene.api.http.post("/v1/jobs/batch", json=body, headers=headers) for _ in range(5))
    )
    assert {r.status_code for r in replies} == {201}
    assert len({tuple(job["id"] for job in r.json()["items"]) for r in replies}) == 1
    assert await scene.value("select count(*) from jobs") == 20
    first = replies[0].json()["items"][0]
    await scene.api.call("PATCH", f"/v1/jobs/{first['id']}", json={"priority": 1})
    replay = await scene.api.post("/v1/jobs/batch", body, headers=headers, expect=201)
    assert [job["version"] for job in replay["items"]] == [1] * 20 and replay["items"][0]["priority"] == 500
    other = await scene.api.post("/v1/jobs/batch", {"jobs": [MANUAL]}, headers=headers, expect=422)
    assert other["code"] == "idempotency_mismatch"


async def test_two_batches_with_crossing_names_leave_one_whole(scene: Scene) -> None:
    names = [f"n{i}" for i in range(50)]
    bodies = [{"jobs": [MANUAL | {"name": name} for name in order]} for order in (names, names[::-1])]
    replies = await asyncio.gather(*(scene.api.http.post("/v1/jobs/batch", json=body) for body in bodies))
    assert sorted(r.status_code for r in replies) == [201, 409]
    assert await scene.value("select count(*) from jobs") == 50


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_versions_newest_first_in_pages(scene: Scene) -> None:
    job = await scene.job(schedule={"every": "PT1H"})
    for priority in range(4):
        await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"priority": priority})
    url = f"/v1/jobs/{job['id']}/versions"
    first = await scene.api.get(f"{url}?limit=2")
    rest = await scene.api.get(f"{url}?cursor={first['next_cursor']}")
    items = first["items"] + rest["items"]
    assert [(v["version"], v["spec"]["priority"]) for v in items] == [(5, 3), (4, 2), (3, 1), (2, 0), (1, 500)]
    assert [v["replaced_at"] is None for v in items] == [True, False, False, False, False]
    assert items[0]["spec"]["schedule"]["description"] == "every hour" and rest["next_cursor"] is None
    assert "id" not in items[0]["spec"]
    await scene.api.get(f"{url}?cursor=x", expect=400)
    await scene.api.post("/v1/tenants", {"slug": "else"})
    stranger = await scene.api.with_key("viewer", "else")
    await stranger.get(url, expect=404)
