"""Keys over HTTP: shown once, kept as keyed hashes, expiring, rotated with overlap, revoked everywhere."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from tests import PATIENCE
from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand, poll_opened
from tocsin.flow import keys
from tocsin.flow.keys import KeyHashes
from tocsin.node.assemble import Node
from tocsin.node.server import authenticator
from tocsin.settings import Settings
from tocsin.store.vault import MasterKeys, new_key


async def test_a_repeated_tenant_is_the_same_tenant(still_api: Api) -> None:
    headers = {"idempotency-key": "t"}
    told = await asyncio.gather(
        *(still_api.post("/v1/tenants", {"slug": "blue", "weight": 3}, headers=headers) for _ in range(5))
    )
    assert all(one == told[0] for one in told) and told[0]["slug"] == "blue"
    await still_api.post("/v1/tenants", {"slug": "blue"}, expect=409)
    await still_api.post("/v1/tenants", {"slug": "green"}, headers=headers, expect=422)


async def test_a_repeated_key_is_made_once_and_shown_once(still_api: Api) -> None:
    headers = {"idempotency-key": "k"}
    first = await still_api.post("/v1/keys", {"role": "viewer", "name": "ci"}, headers=headers)
    again = await still_api.post("/v1/keys", {"role": "viewer", "name": "ci"}, headers=headers)
    assert first["key"] and again == first | {"key": None}
    made = [key for key in (await still_api.get("/v1/keys"))["items"] if key["name"] == "ci"]
    assert [key["id"] for key in made] == [first["id"]]
    assert (await still_api.get(f"/v1/keys/{first['id']}")) == made[0]


# ── how they are stored ──────────────────────────────────────────────────────────────────────────────────────────


async def stored(scene: Scene, key_id: str) -> Any:
    return await scene.row("select hash, hashed_by from api_keys where id = $1", key_id)


def masters(*secrets: bytes) -> MasterKeys:
    return MasterKeys(secrets)


async def test_what_is_stored_opens_nothing_without_the_pepper(scene: Scene) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    row = await stored(scene, made["id"])
    assert row["hashed_by"] == "cluster" and row["hash"] != hashlib.sha256(made["key"].encode()).digest()
    hashes = await KeyHashes.load(scene.db, masters(new_key()))
    sealed = await keys.create_key(scene.db, hashes, await scene.who(), _body("viewer"))
    row = await stored(scene, sealed["id"])
    assert row["hashed_by"] == hashes.first != "cluster"
    # A server without that master key does not know it: the database alone does not make one.
    assert await keys.identify(scene.db, scene.node.key_hashes, sealed["key"]) is None
    assert await keys.identify(scene.db, hashes, sealed["key"]) is not None
    assert await keys.identify(scene.db, hashes, made["key"]) is not None, "those from before it stay good"


def _body(role: Any) -> Any:
    return keys.NewKey(role=role)


async def test_a_key_from_before_keyed_hashes_stays_good_as_it_is(scene: Scene) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    plain = hashlib.sha256(made["key"].encode()).digest()
    await scene.sql.execute("update api_keys set hash = $2, hashed_by = null where id = $1", made["id"], plain)
    api = Api(scene.node, made["key"])
    await api.get("/v1/jobs")
    await scene.node.authenticator.note_used()
    # Not stored anew by being used: a server of the release before knows it by this hash alone.
    assert (await stored(scene, made["id"]))["hash"] == plain
    new = await scene.api.post(f"/v1/keys/{made['id']}/rotate")
    assert (await stored(scene, new["id"]))["hashed_by"] == "cluster"


async def test_a_key_of_an_older_master_key_is_stored_anew_when_it_is_used(scene: Scene) -> None:
    old, new = new_key(), new_key()
    before, after = [await KeyHashes.load(scene.db, masters(*m)) for m in ((old,), (new, old))]
    made = await keys.create_key(scene.db, before, await scene.who(), _body("viewer"))
    found = await keys.identify(scene.db, after, made["key"])
    assert found is not None and found.anew == after.of(made["key"])
    await keys.note_used(scene.db, after, {made["id"]: found.anew})
    assert (await stored(scene, made["id"]))["hashed_by"] == after.first
    # Now the older master key may go.
    assert await keys.identify(scene.db, await KeyHashes.load(scene.db, masters(new)), made["key"]) is not None


async def test_when_a_key_was_last_used_is_noted_now_and_then(scene: Scene) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    assert made["last_used_at"] is None
    api = Api(scene.node, made["key"])
    for _ in range(3):
        await api.get("/v1/jobs")
    assert (await scene.api.get(f"/v1/keys/{made['id']}"))["last_used_at"] is None, "no call writes it"
    await scene.node.authenticator.note_used()
    first = (await scene.api.get(f"/v1/keys/{made['id']}"))["last_used_at"]
    assert first is not None
    scene.node.authenticator._known.clear()
    await api.get("/v1/jobs")
    await scene.node.authenticator.note_used()
    assert (await scene.api.get(f"/v1/keys/{made['id']}"))["last_used_at"] == first, "right to some minutes"


# ── their ends ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_key_ends_when_it_was_to(scene: Scene) -> None:
    ends = (await scene.now() + timedelta(hours=1)).isoformat()
    made = await scene.api.post("/v1/keys", {"role": "viewer", "expires_at": ends})
    api = Api(scene.node, made["key"])
    await api.get("/v1/jobs")
    await scene.sql.execute("update api_keys set expires_at = now() where id = $1", made["id"])
    scene.node.authenticator._known.clear()
    await api.get("/v1/jobs", expect=401)


async def test_a_refusal_does_not_say_why(scene: Scene) -> None:
    """Who tries keys does not learn that one was good once, nor that it could be none."""
    made = [await scene.api.post("/v1/keys", {"role": "viewer"}) for _ in range(2)]
    await scene.api.delete(f"/v1/keys/{made[0]['id']}")
    await scene.sql.execute("update api_keys set expires_at = now() where id = $1", made[1]["id"])
    tried = [made[0]["key"], made[1]["key"], keys.new_key(), made[0]["key"][:-1] + "!", "tcn_", "x" * 10_000]
    replies = [await Api(scene.node, key).http.get("/v1/jobs") for key in tried]
    assert {(reply.status_code, reply.text) for reply in replies} == {(401, replies[0].text)}


async def test_a_key_may_end_after_a_time(scene: Scene) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer", "expires_in": "90d"})
    left = await scene.value("select expires_at - created_at from api_keys where id = $1", made["id"])
    assert abs(left - timedelta(days=90)) < timedelta(minutes=1)
    both = {"role": "viewer", "expires_in": "1d", "expires_at": made["expires_at"]}
    for wrong in (both, {"role": "viewer", "expires_in": "PT0S"}, {"role": "viewer", "expires_in": "soon"}):
        await scene.api.post("/v1/keys", wrong, expect=422)


async def test_rotation_gives_the_same_rights_and_ends_the_old_key_later(scene: Scene) -> None:
    ends = (await scene.now() + timedelta(days=10)).isoformat()
    wanted = {"role": "editor", "name": "ci", "scopes": {"jobs": ["billing-*"]}, "expires_at": ends}
    old = await scene.api.post("/v1/keys", wanted)
    new = await scene.api.post(f"/v1/keys/{old['id']}/rotate", {"overlap": "PT2H"}, headers={"idempotency-key": "r"})
    assert new["replaces"] == old["id"] and new["key"] not in (None, old["key"]) and new["id"] != old["id"]
    assert {k: new[k] for k in ("role", "name", "scopes", "tenant")} == {
        k: old[k] for k in ("role", "name", "scopes", "tenant")
    }
    row = await scene.row(
        "select n.expires_at - n.created_at as life, o.expires_at - now() as overlap from api_keys n, api_keys o"
        " where n.id = $1 and o.id = $2",
        new["id"],
        old["id"],
    )
    assert timedelta(days=9, hours=23) < row["life"] < timedelta(days=10, hours=1), "as long as the old one was to live"
    assert timedelta(hours=1) < row["overlap"] <= timedelta(hours=2)
    again = await scene.api.post(f"/v1/keys/{old['id']}/rotate", {"overlap": "PT2H"}, headers={"idempotency-key": "r"})
    assert (again["id"], again["key"]) == (new["id"], None)
    for key in (old, new):
        await Api(scene.node, key["key"]).get("/v1/jobs")
    await scene.api.post(f"/v1/keys/{new['id']}/rotate", {"overlap": "PT0S"})
    scene.node.authenticator._known.clear()
    await Api(scene.node, new["key"]).get("/v1/jobs", expect=401)
    assert (await scene.api.post(f"/v1/keys/{new['id']}/rotate", expect=409))["code"] == "key_ended"
    for wrong in ({"overlap": "P31D"}, {"overlap": "-PT1H"}, {"until": 1}):
        await scene.api.post(f"/v1/keys/{old['id']}/rotate", wrong, expect=422)


async def test_an_admin_gets_hold_of_no_key_of_the_platform(scene: Scene) -> None:
    admin = await scene.api.with_key("admin")
    before = await scene.rows("select id, hash, expires_at, revoked_at from api_keys order by id")
    for key in (await admin.get("/v1/keys"))["items"]:
        if key["role"] in ("worker", "platform"):
            await admin.post(f"/v1/keys/{key['id']}/rotate", expect=403)
            await admin.delete(f"/v1/keys/{key['id']}", expect=403)
    assert await scene.rows("select id, hash, expires_at, revoked_at from api_keys order by id") == before


async def test_an_admin_does_not_learn_whom_else_a_worker_serves(scene: Scene) -> None:
    for slug in ("acme", "blue"):
        await scene.api.post("/v1/tenants", {"slug": slug})
    made = await scene.api.post("/v1/keys", {"role": "worker", "scopes": {"tenants": ["acme", "default"]}})
    assert set(made["scopes"]["tenants"]) == {"acme", "default"}
    shown = await (await scene.api.with_key("admin")).get(f"/v1/keys/{made['id']}")
    assert shown["scopes"]["tenants"] == ["default"]


@pytest.fixture
async def second(scene: Scene, settings: Settings) -> AsyncIterator[Node]:
    """Another server on the same database."""
    node = Node(settings)
    await node.start(loops=False)
    yield node
    await node.stop()


async def test_a_revoked_key_is_refused_by_every_server_a_second_later(
    scene: Scene, second: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    here, there = Api(scene.node, made["key"]), Api(second, made["key"])
    for api in (here, there):
        await api.get("/v1/jobs")
    await scene.api.delete(f"/v1/keys/{made['id']}")
    await here.get("/v1/jobs", expect=401)
    # Not by waiting for it: their clock goes on by that second. The news of it is lost on the way.
    monotonic = authenticator.time.monotonic
    monkeypatch.setattr(authenticator.time, "monotonic", lambda: monotonic() + 1.0)
    for api in (here, there):
        await api.get("/v1/jobs", expect=401)


async def test_a_server_that_hears_of_a_revoked_key_forgets_what_it_knew_of_it(
    scene: Scene, second: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "_KEY_TTL", 3600.0)
    made = [await scene.api.post("/v1/keys", {"role": "viewer"}) for _ in range(3)]
    revoked, rotated, kept = (Api(second, each["key"]) for each in made)
    for api in (revoked, rotated, kept):
        await api.get("/v1/jobs")
    await second.whisper.run_once()  # it listens
    told = asyncio.Event()
    forget = second.whisper._forget
    monkeypatch.setattr(second.whisper, "_forget", lambda keys: (forget(keys), len(keys) == 2 and told.set()))
    await scene.api.delete(f"/v1/keys/{made[0]['id']}")
    await scene.api.post(f"/v1/keys/{made[1]['id']}/rotate", {"overlap": "PT0S"})
    await scene.node.whisper.run_once()
    await asyncio.wait_for(told.wait(), 30)
    await revoked.get("/v1/jobs", expect=401)
    await rotated.get("/v1/jobs", expect=401)
    assert [who.key_id for _, who in second.authenticator._known.values()] == [made[2]["id"]]


async def test_what_was_read_of_a_key_before_it_was_revoked_is_not_remembered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "_KEY_TTL", 3600.0)
    made = await scene.api.post("/v1/keys", {"role": "viewer"})
    found = keys.identify

    async def slowly(*args: Any) -> Any:
        holder = await found(*args)
        await scene.api.delete(f"/v1/keys/{made['id']}")
        return holder

    await scene.api.get("/v1/jobs")
    monkeypatch.setattr(keys, "identify", slowly)
    await Api(scene.node, made["key"]).get("/v1/jobs")  # it was good when it was looked at
    monkeypatch.setattr(keys, "identify", found)
    await Api(scene.node, made["key"]).get("/v1/jobs", expect=401)


async def test_a_worker_that_waits_is_sent_away_when_its_key_is_revoked(live: Scene) -> None:
    made = await live.api.post("/v1/keys", {"role": "worker"})
    worker = await WorkerHand.register(live.node, made["key"])
    opened = poll_opened(live.node)
    waiting = asyncio.create_task(worker.claim(1, wait=60))
    await opened.wait()
    await live.api.delete(f"/v1/keys/{made['id']}")
    assert (await asyncio.wait_for(waiting, PATIENCE))["runs"] == []
    await worker.claim(1, expect=401)


async def test_a_worker_key_that_is_made_for_a_tenant_serves_that_tenant(scene: Scene) -> None:
    for slug in ("acme", "beta"):
        await scene.api.post("/v1/tenants", {"slug": slug})
    acting = {"headers": {"tocsin-tenant": "acme"}}
    assert (await scene.api.post("/v1/keys", {"role": "worker"}, **acting))["scopes"] == {"tenants": ["acme"]}
    named = {"role": "worker", "scopes": {"tenants": ["acme", "beta"]}}
    assert (await scene.api.post("/v1/keys", named, **acting))["scopes"] == {"tenants": ["acme", "beta"]}
    assert (await scene.api.post("/v1/keys", {"role": "worker"}))["scopes"] is None, "the platform's own serves all"
