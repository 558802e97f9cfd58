"""erase: nothing of a tenant is left, wherever it could write, and nothing of anybody else is touched."""

from __future__ import annotations

import base64
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests import s3
from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene, WorkerHand, told
from tests.flow.old import Old
from tests.flow.test_lanes import whole_pass
from tests.flow.town import House, Town, key_of
from tocsin.errors import Unavailable
from tocsin.failpoints import NO_FAILPOINTS, Failpoints, InjectedFault
from tocsin.flow import compact, erase, seal
from tocsin.flow.erase import TABLES
from tocsin.settings import Settings

KEY = base64.b64encode(bytes([1]) * 32).decode()

# Tables without a tenant in them, each with the reason why nothing of a tenant is to be looked for there.
NOBODYS = {
    "tenants": "the tenant itself, which goes last",
    "erasures": "that it is erased",
    "archived_days": "days, of all tenants alike",
    "audit_sealer": "how far the sealer is",
    "cluster": "one row",
    "lane_pass": "how far the servers have looked which lanes are in use",
    "lanes": "shared by all tenants whose jobs need the same of a worker",
    "log_garbage": "names of objects, which have ids of tenants and of runs in them",
    "logouts": "digests of people, who may have to do with several tenants",
    "past_workers": "workers serve all",
    "lane_vouchers": "a lane and a worker",
    "planner": "when anybody's schedules were last planned",
    "outages": "when nobody's schedules were planned",
    "migrations": "the schema's",
    "pools": "the platform's",
    "servers": "the platform's",
    "workers": "the platform's",
}


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """With a master key; and, where a test says `s3`, with objects there."""
    settings = replace(settings, master_key=KEY)
    if getattr(request, "param", "folder") == "folder":
        yield settings
    else:
        with s3.serving() as endpoint:
            yield replace(settings, objects_url=s3.use(endpoint, monkeypatch))


@pytest.fixture
async def town(scene: Scene, worker_key: str, old: Old) -> AsyncIterator[Town]:
    town = Town(scene, await WorkerHand.register(scene.node, worker_key), old)
    await town.build()
    yield town


async def test_every_table_is_named(scene: Scene) -> None:
    rows = await scene.rows(
        "select c.relname as name, exists (select from pg_attribute a where a.attrelid = c.oid and a.attnum > 0"
        "        and a.attname = 'tenant_id' and not a.attisdropped) as tenants"
        "  from pg_class c"
        " where c.relnamespace = 'tocsin'::regnamespace and c.relkind in ('r', 'p')"
        "   and c.relname !~ '^history_[0-9]{8}$'"
    )
    theirs = {row["name"] for row in rows if row["tenants"]} - {"erasures"}
    assert theirs == {*TABLES, "history"}, "a table with a tenant in it is not erased: name it in flow/erase.py"
    assert len(TABLES) == len(set(TABLES))
    assert {row["name"] for row in rows} - theirs == NOBODYS.keys(), "say why nothing of a tenant is in it"


@pytest.mark.parametrize("settings", ["folder", "s3"], indirect=True)
async def test_no_trace_is_left_and_nobody_else_is_touched(town: Town) -> None:
    before, others = await town.acme.everything(), await town.other.everything()
    assert [table for table in TABLES if not before[table]] == [], "something of it is in every table"
    traces = await town.traces()
    assert len([trace for trace in traces if "/" in trace]) >= 5 and "history/" in str(traces), traces
    assert "lanes" in traces
    logs = await read_logs(town.other)
    assert sum(map(len, logs.values())) == 6

    await town.erase()

    # What is shared by all who need the same of a worker goes when every server has heard of it.
    assert await town.traces() == ["lanes"]
    for _ in range(2):
        await whole_pass(town.scene)
    assert await town.traces() == []
    assert {table: rows for table, rows in (await town.acme.everything()).items() if rows} == {}
    for folder in erase.folders(town.acme.id):
        assert await town.scene.node.objects.keys(folder) == []
        assert await town.scene.node.objects.keys(folder.replace(str(town.acme.id), str(town.other.id))) != []
    assert await town.scene.rows("select from tenants where slug = 'acme'") == []
    assert await town.other.everything() == others
    assert await read_logs(town.other) == logs
    await prove(town)


async def read_logs(house: House) -> dict[str, list[str]]:
    """What each of its runs said, the archived ones among them."""
    runs = (await house.get("/v1/runs?limit=500"))["items"]
    assert len(runs) == 5
    lines = {run["id"]: (await house.get(f"/v1/runs/{run['id']}/logs"))["items"] for run in runs}
    return {id_: [line["text"] for line in told] for id_, told in lines.items()}


async def prove(town: Town) -> None:
    """What others have is what was stored."""
    proof = await town.other.get("/v1/audit/verify")
    assert proof["next_cursor"] is not None and proof["ok"], proof
    proof = await town.other.get(f"/v1/audit/verify?cursor={proof['next_cursor']}")
    assert proof["ok"] and proof["next_cursor"] is None, proof
    assert (await town.scene.api.get("/v1/audit/verify"))["ok"]
    [file] = await town.scene.rows("select * from archives")
    data = await town.scene.node.objects.read(file["object"])
    assert data is not None and hashlib.sha256(data).digest() == file["checksum"]


# ── asking for it ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def acme(scene: Scene) -> Api:
    """A tenant with a job, and its admin."""
    await scene.api.post("/v1/tenants", {"slug": "acme"})
    admin = await scene.api.with_key("admin", "acme")
    await scene.job(admin, name="theirs")
    return admin


async def ask(scene: Scene, slug: str = "acme", expect: int = 202, **more: Any) -> Any:
    found = await scene.api.call("DELETE", f"/v1/tenants/{slug}", json={"confirm": slug}, expect=expect, **more)
    scene.node.authenticator._known.clear()  # as it would by itself within a second
    return found


async def go_on(scene: Scene, **seconds: float) -> erase.Turn:
    return await erase.turn(scene.db, scene.node.objects, **({"settle_seconds": 0.0} | seconds))


async def test_it_is_asked_for_by_name_and_by_the_platform(scene: Scene, acme: Api) -> None:
    for body in ({"confirm": "acne"}, {"confirm": ""}, {}):
        found = await scene.api.call("DELETE", "/v1/tenants/acme", json=body, expect=422)
        assert found["errors"][0]["path"] in ("confirm", "")
    assert (await scene.api.call("DELETE", "/v1/tenants/acme", expect=400))["code"] == "malformed_json"
    await acme.call("DELETE", "/v1/tenants/acme", json={"confirm": "acme"}, expect=403)
    await ask(scene, "nobody", 404)
    assert await scene.rows("select from erasures") == []
    assert (await scene.api.get("/v1/tenants/acme"))["erasure"] is None


async def test_a_legal_hold_refuses(scene: Scene, acme: Api) -> None:
    held = {"retention": {"legal_hold": True}}
    await scene.api.call("PATCH", "/v1/tenants/acme", json=held)
    assert (await ask(scene, expect=409))["code"] == "legal_hold"
    assert (await acme.get("/v1/jobs"))["items"] != []


@pytest.mark.parametrize("role", ["platform", "worker"])
async def test_a_tenant_whose_keys_others_need_is_not_erased(scene: Scene, acme: Api, role: str) -> None:
    assert (await ask(scene, "default", 409))["code"] == "platform_tenant"
    made = await scene.api.post("/v1/keys", {"role": role}, headers={"tocsin-tenant": "acme"})
    assert (await ask(scene, expect=409))["code"] == "platform_tenant"
    await scene.api.delete(f"/v1/keys/{made['id']}", headers={"tocsin-tenant": "acme"})
    await ask(scene)


async def test_from_then_on_nobody_acts_for_it_and_all_see_how_far_it_is(scene: Scene, acme: Api) -> None:
    shown = await ask(scene)
    assert shown["suspended_at"] is not None
    erasure = shown["erasure"]
    assert erasure == {"state": "stopping", "asked_at": erasure["asked_at"], "rows": 0, "objects": 0} | {
        "asked_by": "key:tocsin up (platform)"
    }
    assert (await ask(scene))["erasure"] == erasure, "asking twice is asking once"
    await acme.get("/v1/jobs", expect=401)
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("POST", "/v1/keys")):
        body = {"headers": {"tocsin-tenant": "acme"}, "json": {"role": "admin"}}
        assert (await scene.api.call(method, path, expect=409, **body))["code"] == "tenant_erasing"
    for verb in ("suspend", "resume"):
        assert (await scene.api.post(f"/v1/tenants/acme/{verb}", expect=409))["code"] == "tenant_erasing"
    patch = {"retention": {"legal_hold": True}}
    assert (await scene.api.call("PATCH", "/v1/tenants/acme", json=patch, expect=409))["code"] == "tenant_erasing"
    assert (await scene.api.post("/v1/tenants", {"slug": "acme"}, expect=409))["code"] == "name_taken"
    await go_on(scene, settle_seconds=3600.0)
    erasure = (await scene.api.get("/v1/tenants/acme"))["erasure"]
    assert erasure["state"] == "erasing" and erasure["rows"] > 3
    assert [one["erasure"] is None for one in (await scene.api.get("/v1/tenants"))["items"]] == [False, True]


async def test_the_platforms_audit_says_who_erased_whom(scene: Scene, acme: Api) -> None:
    """Also if the platform acted for the very tenant."""
    await ask(scene, headers={"tocsin-tenant": "acme", "x-request-id": "ticket-9"})
    for _ in range(2):
        await go_on(scene)
    await seal.seal(scene.db)
    made, asked, done = await scene.rows("select * from audit where target = 'tenant:acme' order by id")
    assert [row["action"] for row in (made, asked, done)] == ["tenant.create", "tenant.erase", "tenant.erased"]
    assert len({(row["tenant_id"], row["actor"], row["key_id"]) for row in (made, asked, done)}) == 1
    assert asked["request_id"] == done["request_id"] == "ticket-9"
    [shown] = (await scene.api.get("/v1/audit?action=tenant.erased"))["items"]
    assert shown["detail"].keys() == {"asked_at", "rows", "objects"} and shown["detail"]["rows"] > 3
    assert (await scene.api.get("/v1/audit/verify"))["ok"]


async def test_a_slug_that_is_used_again_sees_nothing_of_the_old(scene: Scene, acme: Api) -> None:
    before = (await scene.api.get("/v1/tenants/acme"))["id"]
    await ask(scene)
    for _ in range(2):
        await go_on(scene)
    await scene.api.get("/v1/tenants/acme", expect=404)
    await scene.api.post("/v1/tenants", {"slug": "acme"})
    assert (await scene.api.get("/v1/tenants/acme"))["id"] > before
    again = await scene.api.with_key("admin", "acme")
    assert [(await again.get(f"/v1/{what}"))["items"] for what in ("jobs", "runs", "secrets")] == [[], [], []]
    await scene.job(again, name="theirs")
    await go_on(scene)
    assert len((await again.get("/v1/jobs"))["items"]) == 1
    await acme.get("/v1/jobs", expect=401)


async def test_worker_keys_serve_those_who_are_left(scene: Scene, acme: Api) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    scopes = {"tenants": ["acme", "other"]}
    made = await scene.api.post("/v1/keys", {"role": "worker", "scopes": scopes})
    only = await scene.api.post("/v1/keys", {"role": "worker", "scopes": {"tenants": ["acme"]}})
    await ask(scene)
    for _ in range(2):
        await go_on(scene)
    listed = {key["id"]: key["scopes"] for key in (await scene.api.get("/v1/keys"))["items"]}
    assert (listed[made["id"]], listed[only["id"]]) == ({"tenants": ["other"]}, {"tenants": []})


# ── what runs ────────────────────────────────────────────────────────────────────────────────────────────────────


async def running(scene: Scene, acme: Api, hand: WorkerHand) -> dict[str, Any]:
    """A run that a worker holds, one that waits, and one that is to come."""
    job = await scene.job(acme, max_concurrency=1)
    await acme.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [{}] * 2})
    await scene.job(acme, schedule={"every": "PT1S"})
    [run] = await scene.take(10, hand.id)
    return key_of(run)


@pytest.fixture
async def hand(scene: Scene, worker_key: str) -> WorkerHand:
    return await WorkerHand.register(scene.node, worker_key)


async def test_what_runs_is_told_to_stop_and_its_proof_is_waited_for(scene: Scene, acme: Api, hand: WorkerHand) -> None:
    run = await running(scene, acme, hand)
    await ask(scene)
    [stop] = (await go_on(scene)).stops
    assert (stop.run_id, stop.worker_id, stop.fence) == (run["run_id"], hand.id, run["fence"])
    assert (await go_on(scene)).stops == [], "it was told"
    assert [row["state"] for row in await scene.rows("select state from runs")] == ["stopping"]
    assert await scene.rows("select from triggers") == []
    assert (await scene.api.get("/v1/tenants/acme"))["erasure"]["state"] == "stopping"
    answer = await hand.report(finished=[told(run, "cancelled")])
    assert answer["accepted"] == [[run["run_id"], run["fence"]]]
    for _ in range(2):
        await go_on(scene)
    await scene.api.get("/v1/tenants/acme", expect=404)


async def test_a_workflow_that_runs_goes_with_all_its_nodes(scene: Scene, acme: Api, hand: WorkerHand) -> None:
    """Its head is held by no worker, and nobody waits for its proof."""
    jobs = {"first": {"target": PROCESS}, "then": {"target": PROCESS, "depends_on": ["first"]}}
    flow = await acme.post("/v1/workflows", {"name": "flow", "jobs": jobs})
    await acme.post(f"/v1/workflows/{flow['id']}/runs")
    while not await scene.node.conductor.run_once():
        pass
    [run] = await scene.take(10, hand.id)
    assert sorted(row["state"] for row in await scene.rows("select state from runs")) == [
        "running",
        "running",
        "waiting",
    ]
    await ask(scene)
    await go_on(scene)
    assert [row["state"] for row in await scene.rows("select state from runs")] == ["stopping"]
    await hand.report(finished=[told(key_of(run), "cancelled")])
    await scene.node.conductor.run_once()
    for _ in range(2):
        await go_on(scene)
    await scene.api.get("/v1/tenants/acme", expect=404)


async def test_what_does_not_stop_is_fenced_off(scene: Scene, acme: Api, hand: WorkerHand) -> None:
    run = await running(scene, acme, hand)
    await ask(scene)
    for _ in range(2):
        await go_on(scene, stop_seconds=0.0)
    await scene.api.get("/v1/tenants/acme", expect=404)
    line = {"offset": 0, "lines": [[time.time(), "stdout", "info", "still here"]]}
    assert (await hand.ship(run | line, expect=409))["code"] == "superseded"
    answer = await hand.report(finished=[told(run, "succeeded", result={"late": True})])
    assert answer["superseded"] == [[run["run_id"], run["fence"]]]
    assert await scene.rows("select from history") == []
    assert list((scene.node.settings.home / "objects" / "logs").rglob("*.zst")) == []


# ── crashes, and what comes late ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("point", erase.POINTS)
async def test_the_next_turn_goes_on_where_one_was_interrupted(town: Town, point: str) -> None:
    others, logs = await town.other.everything(), await read_logs(town.other)
    await town.scene.api.call("DELETE", "/v1/tenants/acme", json={"confirm": "acme"})
    town.scene.db.failpoints = Failpoints(f"erase.{point}=raise")
    with pytest.raises(InjectedFault):
        await town.go_on()
    town.scene.db.failpoints = NO_FAILPOINTS
    await town.go_on()
    assert await town.traces() == ["lanes"]
    assert await town.other.everything() == others
    assert await read_logs(town.other) == logs
    done = await town.scene.rows("select detail from audit where action = 'tenant.erased'")
    assert len(done) == 1, "told once"


async def test_it_is_not_over_while_something_still_comes(scene: Scene, acme: Api) -> None:
    tenant_id = (await ask(scene))["id"]
    late = "insert into idempotency (tenant_id, key, digest, status, ids) values ($1, 'late', '', 200, '{}')"
    await go_on(scene)
    await scene.sql.execute(late, tenant_id)
    await go_on(scene)
    assert (await scene.api.get("/v1/tenants/acme"))["erasure"]["state"] == "erasing"
    assert await scene.rows("select from idempotency where tenant_id = $1", tenant_id) == []
    await go_on(scene, settle_seconds=3600.0)
    assert (await scene.api.get("/v1/tenants/acme"))["erasure"]["state"] == "erasing", "nothing came, but not for long"
    await go_on(scene)
    await scene.api.get("/v1/tenants/acme", expect=404)
    # What comes even later is found when it is looked for again, and after some days nobody looks any more.
    await scene.sql.execute(late, tenant_id)
    await scene.node.objects.put(f"payloads/{tenant_id}/late", b"late")
    await go_on(scene)
    assert len(await scene.rows("select from idempotency where tenant_id = $1", tenant_id)) == 1, "once an hour"
    await scene.sql.execute("update erasures set looked_at = now() - interval '2 hours'")
    await go_on(scene)
    assert await scene.rows("select from idempotency where tenant_id = $1", tenant_id) == []
    assert await scene.node.objects.keys(f"payloads/{tenant_id}/") == []
    assert len(await scene.rows("select from erasures")) == 1
    await scene.sql.execute(
        "update erasures set looked_at = now() - interval '4 days', erased_at = now() - interval '4 days'"
    )
    await go_on(scene)
    assert await scene.rows("select from erasures") == []


async def test_an_object_that_somebody_removed_meanwhile_is_removed_again(town: Town) -> None:
    """The compactor has found that nobody needs an object, and is about to remove it, when it is written anew."""
    objects, read = town.scene.node.objects, town.scene.node.objects.read
    loose = "select distinct object from log_segments where not compacted and replaced_at is null"
    [shared] = [row["object"] for row in await town.scene.rows(loose)]
    await town.scene.sql.execute("update log_segments set replaced_at = now()")
    await town.scene.sql.execute("insert into log_garbage values ($1, now() - interval '1 second')", shared)
    [due] = await town.scene.db.fetch("engine", compact.SQL["due"], 1)

    async def read_and_lose(key: str) -> bytes | None:
        data = await read(key)
        if key == shared:
            await objects.delete(key)
            await town.scene.db.fetch("engine", compact.SQL["forget"], key, due["due_at"])
        return data

    objects.read = read_and_lose  # type: ignore[method-assign]
    await town.erase()
    assert objects.file(shared) in list((town.scene.node.settings.home / "objects").rglob("*.zst"))
    await town.scene.sql.execute("update log_garbage set due_at = now() - interval '1 second'")
    await compact.clean(town.scene.db, objects)
    assert await read(shared) is None
    assert await town.scene.rows("select from log_garbage") == []


async def test_nobody_archives_and_erases_at_the_same_time(scene: Scene, acme: Api) -> None:
    await ask(scene)
    for lock in ("archive", "shelve", "publish", "erase"):
        await scene.sql.execute("select pg_advisory_lock(hashtext('tocsin.' || $1))", lock)
        await go_on(scene)
        assert (await scene.api.get("/v1/tenants/acme"))["erasure"]["state"] == "stopping", lock
        await scene.sql.execute("select pg_advisory_unlock(hashtext('tocsin.' || $1))", lock)
    await go_on(scene)
    assert (await scene.api.get("/v1/tenants/acme"))["erasure"]["state"] == "erasing"


async def test_one_whose_objects_cannot_be_reached_keeps_nobody_back(
    scene: Scene, acme: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (await ask(scene))["id"]
    await scene.api.post("/v1/tenants", {"slug": "other"})
    await ask(scene, "other")
    keys = scene.node.objects.keys

    async def refuse(folder: str) -> list[str]:
        if f"/{first}/" in folder:
            raise Unavailable("object storage refused a list")
        return await keys(folder)

    monkeypatch.setattr(scene.node.objects, "keys", refuse)
    for _ in range(2):
        await go_on(scene)
    await scene.api.get("/v1/tenants/other", expect=404)
    assert (await scene.api.get("/v1/tenants/acme"))["erasure"]["state"] == "erasing"
    monkeypatch.undo()
    for _ in range(2):
        await go_on(scene)
    await scene.api.get("/v1/tenants/acme", expect=404)


# ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_lane_that_is_retired_is_taken_back_into_use_by_whoever_asks(scene: Scene, acme: Api) -> None:
    target = {"kind": "python", "function": f"once.f{uuid.uuid4().hex}"}
    await scene.job(acme, target=target)
    lane = "select id from lanes where function = $1 and retired_at is null"
    [before] = await scene.rows(lane, target["function"])
    await ask(scene)
    for _ in range(2):
        await go_on(scene)
    await whole_pass(scene)
    assert await scene.rows(lane, target["function"]) == []
    await scene.node.lanes.forget_removed()
    made = await scene.job(target=target)
    [after] = await scene.rows(lane, target["function"])
    assert after == before == await scene.row("select lane_id from jobs where id = $1", made["id"])
