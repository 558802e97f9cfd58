"""secrets: written and never read back, handed to claims alone, bound to their place, wrapped anew while in use."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene, WorkerHand
from tocsin.errors import ApiProblem
from tocsin.flow import secrets
from tocsin.flow.secrets import SecretBook
from tocsin.flow.shared.idempotency import digest
from tocsin.settings import Settings
from tocsin.store.vault import MasterKeys

OLD, NEW = (base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))
VALUE = "correct horse battery staple"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return replace(settings, master_key=OLD)


class Hand(WorkerHand):
    """A worker that knows what it has been given."""

    last_claim = 0
    specs: Mapping[str, Any] = MappingProxyType({})
    contents: Mapping[str, Any] = MappingProxyType({})
    wants: Mapping[str, Any] = MappingProxyType({})

    async def claim(self, slots: int = 100, last_claim: int = 0, wait: float = 0.0, **kwargs: Any) -> Any:
        body = {"slots": slots, "last_claim": last_claim, "wait": wait, **self.wants}
        return await self.api.post(f"/v1/worker/{self.id}/claim", body, **kwargs)


@pytest.fixture
async def hand(scene: Scene, worker_key: str) -> Hand:
    return await Hand.register(scene.node, worker_key)  # type: ignore[return-value]


async def put(scene: Scene, name: str = "token", value: Any = VALUE, expect: int | None = None, **more: Any) -> Any:
    return await scene.api.call("PUT", f"/v1/secrets/{name}", json={"value": value}, expect=expect, **more)


async def claimed(scene: Scene, hand: Hand) -> list[dict[str, Any]]:
    """What the dispatcher finds for a worker that waits."""
    scene.node.dispatcher.rescan()
    poll = asyncio.ensure_future(hand.claim(last_claim=hand.last_claim, wait=30.0))
    while not poll.done():
        await scene.node.dispatcher.run_once()
        await asyncio.sleep(0)
    answer = await poll
    hand.last_claim = answer["claim_id"]
    hand.specs, hand.contents = answer["specs"], answer["contents"]
    return answer["runs"]  # type: ignore[no-any-return]


async def book(scene: Scene, *keys: bytes) -> dict[str, Any]:
    """What a server with other master keys reads, by name."""
    rows = await scene.rows("select tenant_id, name from secrets")
    found = await SecretBook(scene.db, MasterKeys(keys)).read([tuple(row) for row in rows])
    return {name: value for (_, name), value in found.items()}


# ── keeping them ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_put_get_list_delete_tell_everything_but_the_value(scene: Scene) -> None:
    made = await put(scene, expect=201)
    assert set(made) == {"name", "version", "created_at", "updated_at"} and made["version"] == 1
    again = await put(scene, value="another value", expect=200, headers={"if-match": '"1"'})
    assert again["version"] == 2
    assert (await put(scene, expect=412, headers={"if-match": '"1"'}))["code"] == "precondition_failed"
    await put(scene, "also", expect=201)
    page = await scene.api.get("/v1/secrets?limit=1")
    rest = await scene.api.get(f"/v1/secrets?cursor={page['next_cursor']}")
    assert [s["name"] for s in page["items"] + rest["items"]] == ["also", "token"]
    assert await scene.api.get("/v1/secrets/token") == again
    await scene.api.delete("/v1/secrets/token", expect=204)
    await scene.api.get("/v1/secrets/token", expect=404)
    await scene.api.delete("/v1/secrets/token", expect=404)
    audit = await scene.rows("select action, target, detail from audit where action like 'secret.%' order by id")
    assert [tuple(row)[:2] for row in audit] == [
        *[("secret.put", "secret:token")] * 2,
        ("secret.put", "secret:also"),
        ("secret.delete", "secret:token"),
    ]
    assert VALUE not in str(audit)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        *(("a b", VALUE, 422), ("x" * 129, VALUE, 422), ("t", "abc", 422), ("t", "a\n\n\nb", 422)),
        *(("t", "a\0bcd", 422), ("t", "x" * 65_537, 422), ("t", 5, 422), ("t", None, 422)),
    ],
)
async def test_bad_secrets_leave_nothing(scene: Scene, name: str, value: Any, status: int) -> None:
    told = await put(scene, name, value, expect=status)
    assert str(value)[:20] not in told["detail"] or len(str(value)) < 5
    assert await scene.value("select count(*) from secrets") == 0


async def test_a_repeat_is_answered_alike_and_its_digest_tells_nothing(scene: Scene) -> None:
    key = {"idempotency-key": "once"}
    first = await put(scene, headers=key, expect=201)
    assert await put(scene, headers=key, expect=201) == first
    assert (await put(scene, value="other", headers=key, expect=422))["code"] == "idempotency_mismatch"
    plain = await scene.api.http.request("PUT", "/v1/secrets/token", json={"value": VALUE})
    guess = digest("PUT", "/v1/secrets/token", plain.request.content)
    assert await scene.value("select count(*) from idempotency where digest = $1", guess) == 0


async def test_who_may(scene: Scene) -> None:
    viewer, editor, worker = [await scene.api.with_key(role) for role in ("viewer", "editor", "worker")]
    await viewer.call("PUT", "/v1/secrets/token", json={"value": VALUE}, expect=403)
    await editor.call("PUT", "/v1/secrets/token", json={"value": VALUE}, expect=201)
    await editor.get("/v1/secrets/token")
    await viewer.get("/v1/secrets/token", expect=403)
    await worker.get("/v1/secrets/token", expect=403)
    await editor.post("/v1/master-keys/rotate", expect=403)
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("admin", "other")
    await other.get("/v1/secrets/token", expect=404)
    await other.delete("/v1/secrets/token", expect=404)
    assert (await other.get("/v1/secrets"))["items"] == []


async def test_two_at_once_store_one_after_the_other(scene: Scene) -> None:
    done = await asyncio.gather(*(scene.api.http.put("/v1/secrets/t", json={"value": f"value {n}"}) for n in range(8)))
    assert {reply.status_code for reply in done} <= {200, 201, 503}
    stored = sum(reply.is_success for reply in done)
    assert stored >= 1 and (await scene.api.get("/v1/secrets/t"))["version"] == stored


async def test_without_a_master_key_it_is_said(scene: Scene) -> None:
    scene.node.master_keys = MasterKeys()
    assert (await put(scene, expect=503))["code"] == "no_master_key"
    assert (await scene.api.get("/v1/secrets"))["items"] == []
    assert (await scene.api.get("/v1/master-keys"))["items"] == []


# ── jobs that name them ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_job_names_secrets_that_there_are(scene: Scene) -> None:
    await put(scene)
    body = {"target": PROCESS, "schedule": {"manual": True}, "secrets": {"TOKEN": "nowhere"}}
    refused = await scene.api.post("/v1/jobs", body, expect=422)
    assert refused["code"] == "unknown_secret" and refused["errors"][0]["path"] == "secrets.TOKEN"
    batch = await scene.api.post("/v1/jobs/batch", {"jobs": [body | {"secrets": {}}, body]}, expect=422)
    assert batch["errors"][0]["path"] == "jobs[1].secrets.TOKEN"
    for name in ("PATH", "TOCSIN_X", "1A", "A-B", ""):
        told = await scene.api.post("/v1/jobs", body | {"secrets": {name: "token"}}, expect=422)
        assert told["errors"][0]["path"] == f"secrets.{name}"
    assert await scene.value("select count(*) from jobs") == 0
    job = await scene.job(secrets={"TOKEN": "token"})
    assert job["secrets"] == {"TOKEN": "token"}
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"secrets": {"MORE": "nowhere"}}, expect=422)
    await put(scene, "more")
    changed = await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"secrets": {"MORE": "more"}})
    assert changed["secrets"] == {"TOKEN": "token", "MORE": "more"} and changed["version"] == 2


async def test_another_tenants_secret_does_not_exist(scene: Scene) -> None:
    await put(scene)
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other = await scene.api.with_key("admin", "other")
    body = {"target": PROCESS, "secrets": {"TOKEN": "token"}}
    assert (await other.post("/v1/jobs", body, expect=422))["code"] == "unknown_secret"


async def test_a_claim_brings_them_and_the_newest(scene: Scene, hand: Hand) -> None:
    await put(scene)
    await put(scene, "other", "the other one")
    job, plain = await scene.job(secrets={"A": "token", "B": "other"}), await scene.job()
    await scene.ask(job, 2)
    await scene.ask(plain)
    runs = await claimed(scene, hand)
    given = {run["run_id"]: run.get("secrets", {}) for run in runs if run["job_id"] == job["id"]}
    assert list(given.values()) == [{"A": VALUE, "B": "the other one"}] * 2
    assert [run.get("secrets") for run in runs if run["job_id"] == plain["id"]] == [None]
    await put(scene, value="a new value")
    await scene.ask(job)
    [run] = await claimed(scene, hand)
    assert run["secrets"] == {"A": "a new value", "B": "the other one"}
    await scene.api.delete("/v1/secrets/token")
    await put(scene, value="made again")
    await scene.ask(job)
    [run] = await claimed(scene, hand)
    assert run["secrets"]["A"] == "made again", "version 1 again, and yet another value"


async def test_a_batch_of_claims_is_one_question(scene: Scene, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(scene)
    jobs = [await scene.job(secrets={"A": "token"}) for _ in range(3)]
    for job in jobs:
        await scene.ask(job, 5)
    asked, fetch = [], scene.db.fetch

    async def noted(pool: str, sql: str, *args: Any) -> Any:
        asked.append(sql)
        return await fetch(pool, sql, *args)

    monkeypatch.setattr(scene.db, "fetch", noted)
    assert len(await claimed(scene, hand)) == 15
    assert asked.count(secrets.SQL["read"]) == 1
    [plain] = [await scene.job()]
    await scene.ask(plain)
    asked.clear()
    assert len(await claimed(scene, hand)) == 1
    assert secrets.SQL["read"] not in asked, "who names no secret pays nothing"


async def test_a_missing_secret_ends_the_attempt_with_its_own_class(scene: Scene, hand: Hand) -> None:
    await put(scene)
    job = await scene.job(secrets={"A": "token"}, retry={"max_attempts": 1})
    plain = await scene.job()
    [run_id] = await scene.ask(job)
    await scene.ask(plain)
    await scene.api.delete("/v1/secrets/token")
    assert [run["job_id"] for run in await claimed(scene, hand)] == [plain["id"]]
    run = await scene.run(run_id)
    assert (run["state"], run["error"]["class"]) == ("dead", "secret_missing")
    assert "token" in run["error"]["message"]


# ── fails closed ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("column", ["wrapped", "sealed"])
async def test_a_changed_byte_gives_no_value(scene: Scene, hand: Hand, column: str) -> None:
    await put(scene)
    job = await scene.job(secrets={"A": "token"}, retry={"max_attempts": 1})
    [run_id] = await scene.ask(job)
    await scene.sql.execute(f"update secrets set {column} = set_byte({column}, 40, get_byte({column}, 40) # 1)")
    assert await claimed(scene, hand) == []
    run = await scene.run(run_id)
    assert (run["state"], run["error"]["class"]) == ("dead", "seal_broken")


async def test_a_row_that_is_put_elsewhere_opens_nothing(scene: Scene) -> None:
    await put(scene)
    await put(scene, "victim", "another value")
    key = bytes([1]) * 32
    copy = "update secrets v set {} from secrets s where v.name = 'victim' and s.name = 'token'"
    for moved in ("sealed = s.sealed", "wrapped = s.wrapped, sealed = s.sealed", "version = 7"):
        await put(scene, "victim", "another value")
        await scene.sql.execute(copy.format(moved))
        found = (await book(scene, key))["victim"]
        assert isinstance(found, ApiProblem) and found.code == "seal_broken", moved
    await put(scene, "victim", "another value")
    await scene.api.post("/v1/tenants", {"slug": "thief"})
    await scene.sql.execute("update secrets set tenant_id = (select id from tenants where slug = 'thief')")
    assert all(isinstance(value, ApiProblem) for value in (await book(scene, key)).values())


async def test_another_master_key_opens_nothing(scene: Scene) -> None:
    await put(scene)
    found = (await book(scene, bytes([2]) * 32))["token"]
    assert isinstance(found, ApiProblem) and found.code == "no_master_key"


# ── rotation ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_rotation_under_load(scene: Scene, hand: Hand) -> None:
    """Keys are wrapped anew in waves, by two at once, while values are stored and claimed; none is ever missing."""
    for n in range(30):
        await put(scene, f"s{n}", f"value of s{n}")
    jobs = [await scene.job(secrets={"A": f"s{n}"}) for n in range(30)]
    old, both = bytes([1]) * 32, MasterKeys([bytes([2]) * 32, bytes([1]) * 32])
    scene.node.master_keys = both
    scene.node.gateway._courier._secrets._keys = both
    who = await scene.who()

    async def rotate() -> int:
        total = 0
        while done := await secrets.rotate(scene.db, both, who, most=4):
            total += done
        return total

    async def use() -> None:
        for n in range(30, 40):
            await put(scene, f"s{n}", f"value of s{n}")
            await put(scene, f"s{n - 30}", f"new value of s{n - 30}")

    first, second, _ = await asyncio.gather(rotate(), rotate(), use())
    assert first + second <= 30
    for job in jobs:
        await scene.ask(job)
    given = sorted(run["secrets"]["A"] for run in await claimed(scene, hand))
    assert given == sorted(f"{'new ' if n < 10 else ''}value of s{n}" for n in range(30))
    await rotate()
    assert {row["key_id"] for row in await scene.rows("select key_id from secrets")} == {both.ids[0]}
    values = await book(scene, bytes([2]) * 32)
    assert values["s29"] == "value of s29" and values["s35"] == "value of s35"
    assert isinstance((await book(scene, old))["s29"], ApiProblem), "the old key is not needed any more"


async def test_rotation_goes_on_where_it_was_and_says_what_is_left(scene: Scene) -> None:
    for n in range(3):
        await put(scene, f"s{n}")
    both = MasterKeys([bytes([2]) * 32, bytes([1]) * 32])
    before = MasterKeys([bytes([1]) * 32]).ids[0]
    assert (await scene.api.post("/v1/master-keys/rotate")) == {"rewrapped": 0, "remaining": 0}
    scene.node.master_keys = both
    assert await secrets.rotate(scene.db, both, await scene.who(), most=2) == 2
    listed = {key["id"]: key for key in (await scene.api.get("/v1/master-keys"))["items"]}
    assert (listed[both.ids[0]]["secrets"], listed[before]["secrets"]) == (2, 1)
    assert listed[both.ids[0]]["seals"] and not listed[before]["seals"] and listed[before]["known"]
    await scene.sql.execute("update secrets set wrapped = 'broken' where key_id = $1", before)
    assert (await scene.api.post("/v1/master-keys/rotate")) == {"rewrapped": 0, "remaining": 1}
    await put(scene, "s2")
    assert (await scene.api.post("/v1/master-keys/rotate"))["remaining"] == 0
    assert (await scene.row("select target, detail from audit where action = 'master_key.rotate'"))["target"] == (
        f"master_key:{both.ids[0]}"
    )


async def test_a_key_that_the_server_lacks_is_told(scene: Scene) -> None:
    await put(scene)
    scene.node.master_keys = MasterKeys([bytes([2]) * 32])
    assert (await scene.api.post("/v1/master-keys/rotate")) == {"rewrapped": 0, "remaining": 1}
    lacking = [key for key in (await scene.api.get("/v1/master-keys"))["items"] if not key["known"]]
    assert [key["secrets"] for key in lacking] == [1]
