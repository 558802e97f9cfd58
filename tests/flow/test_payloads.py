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
from tocsin.errors import Unavailable
from tocsin.flow import payloads
from tocsin.flow.fill import Tables, fill
from tocsin.flow.shared.transitions import NewRun, stage
from tocsin.model.ids import new_id
from tocsin.model.packed import LARGE
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
    tables = ("runs", "history", "dead_letters", "jobs", "job_versions", "audit", "idempotency", "events", "backfills")
    return "".join([str(await scene.rows(f"select to_jsonb(t)::text from {t} t")) for t in tables])


def objects(scene: Scene) -> Iterator[bytes]:
    for path in (scene.node.settings.home / "objects").rglob("*"):
        if path.is_file() and path.parent.name != "marker":
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


async def test_the_sensitive_arguments_of_a_backfill_are_for_the_worker_alone(scene: Scene, hand: Hand) -> None:
    job = await scene.job(sensitive=True, schedule={"cron": "0 0 * * *"})
    body = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-03T00:00:00Z", "args": {"say": CANARY}, "max_concurrency": 2}
    key = {"idempotency-key": "fill"}
    made = await scene.api.post(f"/v1/jobs/{job['id']}/backfill", body, headers=key)
    assert made["args"] == {"$sensitive": True}
    assert (await scene.api.post(f"/v1/jobs/{job['id']}/backfill", body, headers=key))["id"] == made["id"]
    await fill(scene.db, Tables(), True)
    given = await claimed(scene, hand)
    assert [(run["args"], run["sensitive"]) for run in given] == [({"say": CANARY}, True)] * 2
    assert CANARY not in await kept(scene)


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
        told = (given.get("spec") or worker.specs[given["spec_ref"]])["target"]  # type: ignore[attr-defined]
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


# ── what a job itself says ───────────────────────────────────────────────────────────────────────────────────────

LARGE_BODY = {"rows": ["x" * 1000] * 80, "say": "{args.who}"}
LARGE_TARGETS = {
    "body": HTTP | {"body": LARGE_BODY},
    "text": HTTP | {"body": "ü" * LARGE},
    "kwargs": {"kind": "python", "function": "f", "kwargs": LARGE_BODY},
    "args": {"kind": "python", "function": "f", "args": [1, LARGE_BODY]},
}
MANUAL = {"schedule": {"manual": True}}
CALLER = {"targets": ["http", "python"], "functions": ["f"]}


def said(target: dict[str, Any]) -> Any:
    return target.get("body") or target.get("kwargs") or target.get("args")


async def given_target(scene: Scene, job: dict[str, Any], worker: Any, **wants: Any) -> Any:
    """What a worker is told to run, with all that it has to fetch for that."""
    await run(scene, job)
    worker.wants = wants
    [given] = await claimed(scene, worker)
    target = (given.get("spec") or worker.specs[given["spec_ref"]])["target"]
    for name, part in worker.contents.get(given.get("spec_ref"), {}).items():
        found = await scene.api.http.get(part["url"], headers={"authorization": ""})
        assert hashlib.sha256(found.content).hexdigest() == part["sha256"]
        target[name] = found.json()
    return target


@pytest.mark.parametrize("target", LARGE_TARGETS.values(), ids=LARGE_TARGETS)
async def test_a_large_content_leaves_the_document_and_reaches_the_worker(
    scene: Scene, worker_key: str, target: dict[str, Any]
) -> None:
    body = {"name": "j", "target": target} | MANUAL
    job = await scene.api.post("/v1/jobs", body, headers={"idempotency-key": "k"})
    text = json.dumps(said(target), separators=(",", ":"), ensure_ascii=False).encode()
    shown = said(job["target"])
    [shown] = shown if isinstance(shown, list) else [shown]
    assert (shown["$payload"]["size"], shown["$payload"]["sha256"]) == (len(text), hashlib.sha256(text).hexdigest())
    assert (await scene.api.post("/v1/jobs", body, headers={"idempotency-key": "k"}))["id"] == job["id"]
    again = await scene.api.call("PUT", "/v1/jobs/by-name/j", json=body)
    mine = {"name": "j", "target": job["target"]} | MANUAL
    back = await scene.api.call("PUT", "/v1/jobs/by-name/j", json=mine)
    assert (again["version"], back["version"]) == (1, 1), "neither the same again nor what was read is a new version"
    assert len(list(objects(scene))) == 1
    assert await scene.value("select max(length(spec)) from jobs") < 3000
    worker = await Hand.register(scene.node, worker_key, **CALLER)
    assert said(await given_target(scene, job, worker)) == said(target)
    assert worker.contents == {}, "a worker that knows of no URLs gets it with the run"  # type: ignore[attr-defined]
    wants = {"shared_specs": True, "content_urls": True}
    assert said(await given_target(scene, job, worker, **wants)) == said(target)
    assert worker.contents  # type: ignore[attr-defined]


async def test_a_large_body_is_changed_merged_and_taken_away(scene: Scene, worker_key: str) -> None:
    job = await scene.job(name="j", target=HTTP | {"body": LARGE_BODY})
    worker = await Hand.register(scene.node, worker_key, **CALLER)
    path = f"/v1/jobs/{job['id']}"

    async def patched(patch: dict[str, Any], version: int) -> Any:
        assert (await scene.api.call("PATCH", path, json=patch))["version"] == version
        return (await given_target(scene, job, worker))["body"]

    assert await patched({"priority": 900}, 2) == LARGE_BODY
    assert len(list(objects(scene))) == 1, "it is kept as it was"
    more = LARGE_BODY | {"more": 1}
    assert await patched({"target": {"body": {"more": 1}}}, 3) == more
    assert await patched({"target": {"body": dict(reversed(more.items()))}}, 3) == more, (
        "the order of keys is no change"
    )
    assert await patched({"target": {"body": more | {"more": True}}}, 4) == more | {"more": True}, "1 is not true"
    small = await patched({"target": {"body": None}}, 5)
    assert small is None
    versions = (await scene.api.get(f"{path}/versions"))["items"]
    assert ["$payload" in (v["spec"]["target"]["body"] or {}) for v in versions] == [False, True, True, True, True]
    batch = {"jobs": [{"target": HTTP | {"body": LARGE_BODY}} | MANUAL, {"target": HTTP} | MANUAL] * 2}
    made = (await scene.api.post("/v1/jobs/batch", batch))["items"]
    assert ["$payload" in item["target"]["body"] for item in made] == [True, False] * 2
    assert (await given_target(scene, made[2], worker))["body"] == LARGE_BODY


async def test_a_reference_to_nothing_is_refused(scene: Scene) -> None:
    job = await scene.job(name="j", target=HTTP | {"body": LARGE_BODY})
    payload = job["target"]["body"]["$payload"]
    odd = [payload | {"sha256": "0" * 64}, payload | {"day": "2020-01-01"}]
    await scene.api.post("/v1/tenants", {"slug": "thief"})
    thief = await scene.api.with_key("admin", "thief")
    for api, body in [*((scene.api, p) for p in odd), (thief, payload)]:
        refused = await api.post("/v1/jobs", {"target": HTTP | {"body": {"$payload": body}}}, expect=422)
        assert refused["errors"][0]["path"] == "target.body" and refused["errors"][0]["code"] == "unknown_payload"
    swapped = {"kind": "python", "function": "f", "args": [{"$payload": payload}]}
    refused = await scene.api.post("/v1/jobs", {"target": swapped}, expect=422)
    assert refused["errors"][0]["path"] == "target.args"
    patch = {"target": {"body": {"$payload": odd[0]}}}
    refused = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json=patch, expect=422)
    assert refused["errors"][0]["code"] == "unknown_payload"
    mine = {"target": HTTP | {"body": {"$payload": {"day": 7}}}} | MANUAL
    assert (await scene.api.post("/v1/jobs", mine))["target"]["body"] == mine["target"]["body"], "that is no reference"


async def test_what_is_wrong_with_a_large_document_leaves_nothing(scene: Scene) -> None:
    large = HTTP | {"body": LARGE_BODY}
    for wrong in ({"schedule": {"cron": "61 * * * *"}}, {"timeout": "PT0S"}, {"target": large | {"url": "ftp://x"}}):
        await scene.api.post("/v1/jobs", {"target": large} | wrong, expect=422)
    too_large = HTTP | {"body": "x" * 9 * 1024 * 1024}
    assert (await scene.api.post("/v1/jobs", {"target": too_large}, expect=413))["code"] == "too_large"
    assert list(objects(scene)) == [] and await scene.value("select count(*) from payloads") == 0


@pytest.mark.parametrize("target", LARGE_TARGETS.values(), ids=LARGE_TARGETS)
async def test_a_large_sensitive_content_is_sealed_there(scene: Scene, worker_key: str, target: dict[str, Any]) -> None:
    body = {"name": "j", "target": target, "sensitive": True} | MANUAL
    job = await scene.api.post("/v1/jobs", body)
    assert not said(job["target"]) and len(job["sealed"]) < 200
    assert (await scene.api.call("PUT", "/v1/jobs/by-name/j", json=body))["version"] == 1
    back = {name: job[name] for name in ("target", "sensitive", "sealed")} | MANUAL
    assert (await scene.api.call("PUT", "/v1/jobs/by-name/j", json=back))["version"] == 1
    worker = await Hand.register(scene.node, worker_key, **CALLER)
    for wants in ({}, {"shared_specs": True, "content_urls": True}):
        assert said(await given_target(scene, job, worker, **wants)) == said(target)
    [stored] = objects(scene)
    assert b"xxxx" not in stored and "ü".encode() * 9 not in stored and "xxxx" not in await kept(scene)
    for sealed in (job["sealed"][:-1] + "x", job["sealed"].replace("@", "@0")):
        refused = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"sealed": sealed}, expect=422)
        assert refused["errors"][0]["path"] == "sealed"


async def test_a_sensitive_number_is_not_a_truth(scene: Scene) -> None:
    job = await scene.job(name="j", target=HTTP | {"body": {"n": 1}}, sensitive=True)
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"target": {"body": {"n": True}}})
    assert changed["version"] == 2 and changed["sealed"] != job["sealed"]


async def test_while_an_older_server_lives_documents_stay_whole(scene: Scene, worker_key: str) -> None:
    await scene.sql.execute(
        "insert into servers (id, name, version, newest_migration)"
        " values (gen_random_uuid(), 'old', '0', '0036_retention')"
    )
    body = {"name": "j", "target": HTTP | {"body": LARGE_BODY}} | MANUAL
    job = await scene.api.post("/v1/jobs", body)
    assert job["target"]["body"] == LARGE_BODY
    await scene.sql.execute("delete from servers where name = 'old'")
    scene.node.parcels._understood.clear()
    assert (await scene.api.call("PUT", "/v1/jobs/by-name/j", json=body))["version"] == 1
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"target": {"body": {"more": 1}}})
    assert "$payload" in changed["target"]["body"]


async def test_a_lost_content_ends_the_run_and_a_put_mends_the_job(scene: Scene, worker_key: str) -> None:
    body = {"name": "j", "target": HTTP | {"body": LARGE_BODY}, "retry": {"max_attempts": 1}} | MANUAL
    job = await scene.api.post("/v1/jobs", body)
    worker = await Hand.register(scene.node, worker_key, **CALLER)
    for path in (scene.node.settings.home / "objects" / "payloads").rglob("*"):
        if path.is_file():
            path.unlink()
    made = await run(scene, job)
    assert await claimed(scene, worker) == []  # type: ignore[arg-type]
    assert (await scene.run(made["id"]))["error"]["class"] == "payload_gone"
    body["target"]["body"] = LARGE_BODY | {"more": 1}
    assert (await scene.api.call("PUT", "/v1/jobs/by-name/j", json=body))["version"] == 2
    assert (await given_target(scene, job, worker))["body"] == body["target"]["body"]


# ── what nobody needs any more ───────────────────────────────────────────────────────────────────────────────────


async def pass_by(scene: Scene, days: float) -> None:
    """Let all that is to be looked at within so many days be looked at."""
    for table in ("payloads", "payload_uses"):
        await scene.sql.execute(f"update {table} set look_at = look_at - $1 * interval '1 day'", days)
    while await payloads.clean(scene.db, scene.node.objects):
        pass


async def age(scene: Scene) -> None:
    """As if a week went by, with a look at least every hour."""
    for _ in range(7):
        await pass_by(scene, 1.01)


async def test_arguments_stay_while_a_run_is_live_dead_or_in_hot_history(scene: Scene, hand: Hand) -> None:
    job = await scene.job(retry={"max_attempts": 1})
    made = await run(scene, job, args=BIG)
    await age(scene)
    [given] = await claimed(scene, hand)
    assert given["args"] == BIG, "it lives"
    failed = {k: given[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "failed", "error": {"class": "X"}}
    await hand.report(finished=[failed])
    await scene.sql.execute("delete from history where run_id = $1", made["id"])
    await age(scene)
    await scene.api.post("/v1/dead-letters/redrive", {"filter": {}})
    await age(scene)
    [again] = await claimed(scene, hand)
    assert again["args"] == BIG, "it was a dead letter, and a new run has it"
    await hand.report(finished=[{k: again[k] for k in ("run_id", "attempt", "fence")} | {"outcome": "succeeded"}])
    await age(scene)
    third = await scene.api.post(f"/v1/runs/{again['run_id']}/retry")
    await scene.api.post(f"/v1/runs/{third['id']}/cancel")
    assert len(list(objects(scene))) == 1, "it is in history"
    await scene.sql.execute("delete from history")
    await age(scene)
    assert list(objects(scene)) == []
    assert await scene.value("select (select count(*) from payloads) + (select count(*) from payload_uses)") == 0


async def test_what_a_job_says_stays_while_a_version_of_it_does(scene: Scene) -> None:
    large = HTTP | {"body": LARGE_BODY}
    job, sealed = await scene.job(target=large), await scene.job(target=large, sensitive=True)
    await age(scene)
    assert len(list(objects(scene))) == 2
    for id_ in (job["id"], sealed["id"]):
        patch = {"target": {"body": None}, "sensitive": None, "sealed": None}
        await scene.api.call("PATCH", f"/v1/jobs/{id_}", json=patch)
    await age(scene)
    assert len(list(objects(scene))) == 2
    await scene.sql.execute("delete from job_versions where job_id = $1", job["id"])
    await age(scene)
    assert len(list(objects(scene))) == 1
    await scene.sql.execute("delete from job_versions")
    await age(scene)
    assert list(objects(scene)) == []


async def test_what_was_stored_for_nothing_goes_when_nobody_can_be_at_it_any_more(scene: Scene) -> None:
    await scene.job(name="taken")
    await scene.api.post("/v1/jobs", {"name": "taken", "target": HTTP | {"body": LARGE_BODY}}, expect=409)
    await pass_by(scene, 1.9)
    assert len(list(objects(scene))) == 1
    await pass_by(scene, 0.2)
    assert list(objects(scene)) == []


async def test_a_run_made_of_one_that_goes_keeps_its_arguments(scene: Scene, hand: Hand) -> None:
    """Who has read a row before it went may come to need what it named for an hour."""
    job = await scene.job()
    made = await run(scene, job, args=BIG)
    text = await scene.value("select args from runs")
    await scene.api.post(f"/v1/runs/{made['id']}/cancel")
    await scene.sql.execute("delete from history")
    await pass_by(scene, 3)
    assert len(list(objects(scene))) == 1 and await scene.value("select count(*) from payload_uses") == 0
    other = await run(scene, job)
    tenant_id = await scene.value("select tenant_id from runs")
    async with scene.db.transaction("test") as connection:
        await stage(connection, [NewRun(tenant_id, new_id(await scene.now()), job["id"], "retry", None, args=text)])
    await age(scene)
    given = {r["run_id"]: r.get("args") for r in await claimed(scene, hand)}
    assert given.pop(other["id"]) is None and list(given.values()) == [BIG]


async def test_a_sweep_that_dies_is_taken_up_by_the_next(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await scene.job()
    for n in range(3):
        made = await run(scene, job, args=BIG | {"n": n})
        await scene.api.post(f"/v1/runs/{made['id']}/cancel")
    await scene.sql.execute("delete from history")
    await pass_by(scene, 3)
    delete, left = scene.node.objects.delete, 1

    async def dies(key: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Unavailable("the store is gone", code="objects_unavailable")
        await delete(key)

    with monkeypatch.context() as patched:
        patched.setattr(scene.node.objects, "delete", dies)
        with pytest.raises(Unavailable):
            await pass_by(scene, 1)
    assert len(list(objects(scene))) == 2 and await scene.value("select count(*) from payloads") == 2
    await pass_by(scene, 1)  # an object that was refused is put off
    assert list(objects(scene)) == [] and await scene.value("select count(*) from payloads") == 0


async def test_a_legal_hold_holds_payloads(scene: Scene) -> None:
    job = await scene.job()
    made = await run(scene, job, args=BIG)
    await scene.api.post(f"/v1/runs/{made['id']}/cancel")
    await scene.sql.execute("delete from history")
    await scene.sql.execute("update tenants set legal_hold = true")
    await age(scene)
    assert len(list(objects(scene))) == 1
    await scene.sql.execute("update tenants set legal_hold = false")
    await age(scene)
    assert list(objects(scene)) == []
