"""payloads: arguments that are sealed or large reach the worker whole, and nobody else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.kit import Scene
from tests.flow.test_secrets import Hand, claimed, hand
from tocsin.flow.payloads import LARGE
from tocsin.flow.shared.idempotency import digest
from tocsin.settings import Settings
from tocsin.store.vault import MasterKeys

__all__ = ["hand"]
KEY = base64.b64encode(bytes([1]) * 32).decode()
NOWHERE = "01a1e359-8af4-7000-a6bb-2a7012998007"
CANARY = "canary-4f1d0c"
BIG = {"rows": ["x" * 1000] * 80, "say": CANARY}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return replace(settings, master_key=KEY)


async def run(scene: Scene, job: dict[str, Any], expect: int | None = None, headers: Any = None, **body: Any) -> Any:
    return await scene.api.post(f"/v1/jobs/{job['id']}/runs", body, expect=expect, headers=headers)


async def kept(scene: Scene) -> str:
    """Everything of any run that any table has."""
    tables = ("runs", "history", "dead_letters", "jobs", "job_versions", "audit", "idempotency", "events")
    return "".join([str(await scene.rows(f"select to_jsonb(t)::text from {t} t")) for t in tables])


def objects(scene: Scene) -> Iterator[bytes]:
    for path in (scene.node.settings.home / "objects").rglob("*"):
        if path.is_file():
            yield path.read_bytes()


# ── sensitive ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("args", [{"say": CANARY}, BIG], ids=["small", "large"])
@pytest.mark.parametrize("marked", ["run", "job"])
async def test_sensitive_arguments_are_for_the_worker_alone(
    scene: Scene, hand: Hand, args: dict[str, Any], marked: str
) -> None:
    job = await scene.job(retry={"max_attempts": 1}, **({"sensitive": True} if marked == "job" else {}))
    asked = {"args": args} | ({"sensitive": True} if marked == "run" else {})
    made = await run(scene, job, **asked, headers={"idempotency-key": "once"})
    assert made["args"] == {"$sensitive": True}
    again = await run(scene, job, **asked, headers={"idempotency-key": "once"})
    assert (again["id"], again["args"]) == (made["id"], made["args"])
    assert (await scene.run(made["id"]))["args"] == {"$sensitive": True}
    [given] = await claimed(scene, hand)
    assert given["args"] == args and given["sensitive"] is True and "args_url" not in given
    failed = {k: given[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "failed", "error": {"class": "X"}}
    await hand.report(finished=[failed])
    [letter] = (await scene.api.get("/v1/dead-letters"))["items"]
    assert letter["args"] == {"$sensitive": True}
    await scene.api.post("/v1/dead-letters/redrive", {"ids": [letter["id"]]})
    [again] = await claimed(scene, hand)
    assert again["args"] == args, "a redrive copies what is sealed"
    await hand.report(finished=[{k: again[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "succeeded"}])
    await scene.api.post(f"/v1/runs/{again['run_id']}/retry")
    [third] = await claimed(scene, hand)
    assert third["args"] == args
    assert CANARY not in await kept(scene)
    assert not any(CANARY.encode() in data for data in objects(scene))


async def test_the_digest_of_a_sensitive_call_tells_nothing(scene: Scene) -> None:
    job = await scene.job(sensitive=True)
    body = {"args": {"pin": "1234"}}
    sent = await scene.api.http.post(f"/v1/jobs/{job['id']}/runs", json=body, headers={"idempotency-key": "k"})
    guess = digest("POST", f"/v1/jobs/{job['id']}/runs", sent.request.content)
    assert await scene.value("select count(*) from idempotency where digest = $1", guess) == 0
    assert (await run(scene, job, 422, {"idempotency-key": "k"}, args={"pin": "4321"}))[
        "code"
    ] == "idempotency_mismatch"


async def test_a_batch_of_sensitive_and_other_arguments(scene: Scene, hand: Hand) -> None:
    job = await scene.job()
    runs = [{"args": {"n": 1}}, {"args": {"n": 2}, "sensitive": True}, {"args": BIG}, {}]
    await scene.api.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": runs})
    given = await claimed(scene, hand)
    assert sorted(json.dumps(r.get("args")) for r in given) == sorted(json.dumps(r.get("args")) for r in runs)
    assert sum(r.get("sensitive", False) for r in given) == 1


async def test_sealed_for_one_job_is_sealed_for_no_other(scene: Scene, hand: Hand) -> None:
    job, thief = await scene.job(retry={"max_attempts": 1}), await scene.job(retry={"max_attempts": 1})
    made = await run(scene, job, args={"say": CANARY}, sensitive=True)
    await scene.sql.execute("update runs set job_id = $1 where id = $2", thief["id"], made["id"])
    assert await claimed(scene, hand) == []
    found = await scene.run(made["id"])
    assert (found["state"], found["error"]["class"]) == ("dead", "seal_broken")


async def test_without_a_master_key_nothing_sensitive_is_taken(scene: Scene) -> None:
    job = await scene.job(sensitive=True)
    scene.node.payloads._data_keys._keys = MasterKeys()
    assert (await run(scene, job, 503, args={"say": CANARY}))["code"] == "no_master_key"
    await run(scene, job)
    assert await scene.value("select count(*) from runs where args is not null") == 0


async def test_a_new_master_key_leaves_what_is_sealed_readable(scene: Scene, hand: Hand) -> None:
    job = await scene.job(sensitive=True)
    await run(scene, job, args={"say": CANARY})
    both = MasterKeys([bytes([2]) * 32, bytes([1]) * 32])
    scene.node.master_keys = both
    assert (await scene.api.post("/v1/master-keys/rotate")) == {"rewrapped": 1, "remaining": 0}
    data_keys = scene.node.payloads._data_keys
    data_keys._keys, data_keys._known = MasterKeys([bytes([2]) * 32]), {}
    [given] = await claimed(scene, hand)
    assert given["args"] == {"say": CANARY}


async def test_a_job_is_made_sensitive_later(scene: Scene) -> None:
    job = await scene.job()
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"sensitive": True})
    assert changed["sensitive"] is True
    assert (await run(scene, job, args={"say": CANARY}))["args"] == {"$sensitive": True}
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"sensitive": None})
    assert (await run(scene, job, args={"n": 1}))["args"] == {"n": 1}


HTTP = {"kind": "http", "url": "https://example.com/", "body": {"say": CANARY, "n": [1, 2]}}
SAYING = {
    "http": HTTP,
    "python": {"kind": "python", "function": "f", "args": [CANARY], "kwargs": {"say": CANARY}},
    "process": {"kind": "process", "command": ["cat"], "stdin": CANARY},
}


@pytest.mark.parametrize("target", SAYING.values(), ids=SAYING)
async def test_what_a_sensitive_job_says_is_for_the_worker_alone(
    scene: Scene, worker_key: str, target: dict[str, Any]
) -> None:
    headers = {"idempotency-key": "job"}
    body = {"name": "j", "target": target, "schedule": {"manual": True}, "sensitive": True}
    job = await scene.api.post("/v1/jobs", body, headers=headers)
    assert (await scene.api.post("/v1/jobs", body, headers=headers))["id"] == job["id"]
    worker = await Hand.register(scene.node, worker_key, targets=["http", "python", "process"], functions=["f"])
    await run(scene, job)
    for wants in ({}, {"shared_specs": True}):
        worker.wants = wants  # type: ignore[attr-defined]
        [given] = await claimed(scene, worker)  # type: ignore[arg-type]
        told = given["spec"]["target"]
        assert {name: told[name] for name in target} == target and given["sensitive"] is True
        await run(scene, job)
    shown = [
        await scene.api.get(f"/v1/jobs/{job['id']}"),
        await scene.api.get(f"/v1/jobs/{job['id']}/versions"),
        await scene.api.get("/v1/jobs"),
        await scene.api.call("PUT", "/v1/jobs/by-name/j", json=body),
    ]
    assert shown[-1]["version"] == 1, "the same again is no new version"
    assert CANARY not in str(shown) + str(job) + await kept(scene)


async def test_a_sealed_target_is_kept_changed_and_given_back(scene: Scene, worker_key: str) -> None:
    job = await scene.job(name="j", target=HTTP, sensitive=True)
    worker = await Hand.register(scene.node, worker_key, targets=["http"])

    async def body() -> Any:
        await run(scene, job)
        [given] = await claimed(scene, worker)  # type: ignore[arg-type]
        return given["spec"]["target"]["body"]

    path = f"/v1/jobs/{job['id']}"
    changed = await scene.api.call("PATCH", path, json={"priority": 900})
    assert changed["sealed"] == job["sealed"] and await body() == HTTP["body"]
    mine = {name: changed[name] for name in ("target", "sensitive", "sealed")} | {"schedule": {"manual": True}}
    again = await scene.api.call("PUT", "/v1/jobs/by-name/j", json=mine)
    assert again["sealed"] == job["sealed"] and await body() == HTTP["body"], "what was read is written back"
    await scene.api.call("PATCH", path, json={"target": {"body": "something else"}})
    assert await body() == "something else"
    assert (await scene.api.call("PATCH", path, json={"sensitive": None}, expect=422))["errors"][0]["path"] == "sealed"
    for odd in ("x", "1.x", "7." + job["sealed"][2:], job["sealed"][:-8], "9" * 30 + ".x"):
        refused = await scene.api.call("PATCH", path, json={"sealed": odd}, expect=422)
        assert refused["errors"][0]["path"] == "sealed"
    open_ = {"sensitive": None, "sealed": None, "target": {"body": {"n": 1}}}
    assert (await scene.api.call("PATCH", path, json=open_))["target"]["body"] == {"n": 1}
    await scene.api.post("/v1/tenants", {"slug": "thief"})
    thief = await scene.api.with_key("admin", "thief")
    stolen = {"target": HTTP | {"body": None}, "sensitive": True, "sealed": job["sealed"]}
    assert (await thief.post("/v1/jobs", stolen, expect=422))["errors"][0]["path"] == "sealed"
    batch = {"jobs": [{"target": HTTP, "sensitive": True}, {"target": HTTP}]}
    made = (await scene.api.post("/v1/jobs/batch", batch))["items"]
    assert [item["target"]["body"] for item in made] == [None, HTTP["body"]]


@pytest.mark.parametrize("sensitive", [True, False])
async def test_a_concurrency_key_from_packed_arguments_outlives_a_redrive(
    scene: Scene, hand: Hand, sensitive: bool
) -> None:
    job = await scene.job(concurrency_key="customer-{args.customer}", retry={"max_attempts": 1})
    await run(scene, job, args=BIG | {"customer": "acme"}, sensitive=sensitive)
    key = await scene.value("select key_id from runs")
    assert key is not None
    [given] = await claimed(scene, hand)
    failed = {k: given[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "failed", "error": {"class": "X"}}
    await hand.report(finished=[failed])
    await scene.api.post("/v1/dead-letters/redrive", {"filter": {}})
    assert await scene.value("select key_id from runs") == key


# ── large ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_large_arguments_leave_the_row_and_come_back(scene: Scene, hand: Hand) -> None:
    job = await scene.job()
    text = json.dumps(BIG, separators=(",", ":")).encode()
    assert len(text) > LARGE
    made = await run(scene, job, args=BIG)
    assert made["args"] == {"$payload": {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}}
    assert await scene.value("select max(length(args)) from runs") < 1000
    [given] = await claimed(scene, hand)
    assert given["args"] == BIG, "a worker that knows of no URLs gets them with the run"


async def test_who_fetches_them_gets_a_url_that_ends(scene: Scene, hand: Hand) -> None:
    job = await scene.job()
    await run(scene, job, args=BIG)
    hand.wants = {"payload_urls": True}
    [given] = await claimed(scene, hand)
    assert "args" not in given
    anybody = scene.api.http
    found = await anybody.get(given["args_url"], headers={"authorization": ""})
    assert (found.status_code, found.json()) == (200, BIG)
    assert hashlib.sha256(found.content).hexdigest() == given["args_sha256"]
    *_, token = given["args_url"].rpartition("/")
    for i in (0, 20, 60, len(token) - 3):
        other = token[:i] + ("A" if token[i] != "A" else "B") + token[i + 1 :]
        assert (await anybody.get(f"/v1/payloads/{other}")).status_code == 404
    for odd in ("x", "%F0%9F%98%80", "a" * 5000):
        assert (await anybody.get(f"/v1/payloads/{odd}")).status_code == 404
    later = scene.db.clock.now() + timedelta(minutes=16)
    with pytest.raises(Exception, match="leads nowhere"):
        await scene.node.payloads.fetch(token, later)


async def test_what_was_changed_in_object_storage_is_noticed(scene: Scene, hand: Hand) -> None:
    job = await scene.job(retry={"max_attempts": 1})
    made = await run(scene, job, args=BIG)
    [path] = [p for p in (scene.node.settings.home / "objects" / "payloads").rglob("*") if p.is_file()]
    path.write_bytes(path.read_bytes().replace(b"canary", b"CANARY"))
    assert await claimed(scene, hand) == []
    assert (await scene.run(made["id"]))["error"]["class"] == "payload_broken"
    path.unlink()
    made = await run(scene, job, args={"n": 1})
    await scene.api.post(f"/v1/runs/{made['id']}/cancel")


async def test_what_comes_to_nothing_or_comes_twice_leaves_nothing_more(scene: Scene) -> None:
    job = await scene.job()
    for _ in range(2):
        await run(scene, job, args=BIG, headers={"idempotency-key": "once"})
    assert len(list(objects(scene))) == 1
    await scene.api.post(f"/v1/jobs/{job['id']}/cancel")
    await run(scene, job, 409, args=BIG | {"other": 1})
    await run(scene, {"id": NOWHERE}, 404, args=BIG | {"other": 1})
    assert len(list(objects(scene))) == 1


async def test_what_is_too_large_is_413(scene: Scene) -> None:
    job = await scene.job()
    assert (await run(scene, job, 413, args={"x": "y" * 9 * 1024 * 1024}))["code"] == "too_large"
    assert await scene.value("select count(*) from runs") == 0
    assert list(objects(scene)) == []
