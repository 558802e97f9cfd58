"""The audit's chain holds in whatever order calls commit, and names the record that somebody has tampered with.

The one who tampers is a superuser who knows how the chain is made: no role of ours may do any of it.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from tests.flow.kit import PROCESS, Scene
from tocsin.errors import Unauthorized
from tocsin.flow import seal, trail
from tocsin.flow.shared import audit
from tocsin.model.audit import GENESIS, link
from tocsin.node.server.app import build
from tocsin.node.server.protocol import Request
from tocsin.node.server.routes import audit as routes
from tocsin.store.vault import MasterKeys

Document = dict[str, Any]
_SAY = "insert into audit (tenant_id, actor, action, target) values ($1, 'key:x', 'job.create', 'job:x') returning id"


async def anchor(scene: Scene, master: MasterKeys | None = None) -> int:
    node = scene.node
    return await seal.anchor(scene.db, node.objects, master or node.master_keys, "test", node.anchor_series, every=0.0)


async def chained(scene: Scene, count: int = 8) -> None:
    """Some records in the chain, and its head anchored."""
    for number in range(count):
        await scene.job(name=f"audited-{number}")
    await seal.seal(scene.db)
    assert await anchor(scene) == 1


async def found(scene: Scene) -> list[tuple[str, int | None]]:
    proof = await scene.api.get("/v1/audit/verify")
    assert proof["ok"] == (not proof["findings"])
    return [(finding["kind"], finding["seq"]) for finding in proof["findings"]]


async def head(scene: Scene) -> int:
    return await scene.value("select max(seq) from audit_chain")  # type: ignore[no-any-return]


async def forge(scene: Scene) -> None:
    """Make the whole chain and the sealer's notes fit what the records say now."""
    rows = await scene.rows(
        f"select c.tenant_id, c.seq, {audit.SQL['said']}"
        "  from audit_chain c join audit a on a.id = c.audit_id order by c.seq"
    )
    last = GENESIS
    for row in rows:
        last = link(last, row["tenant_id"], row["seq"], audit.said(row))
        await scene.sql.execute("update audit_chain set hash = $1 where seq = $2", last, row["seq"])
    await scene.sql.execute("update audit_heads set seq = $1, hash = $2", rows[-1]["seq"], last)


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_record_says_who_what_from_where_and_what_it_was_before(scene: Scene) -> None:
    job = await scene.job(name="nightly")
    named = {"x-request-id": "deploy-17"}
    await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json={"priority": 700}, headers=named)
    await seal.seal(scene.db)
    page = await scene.api.get("/v1/audit", params={"target": f"job:{job['id']}"})
    edit, create = page["items"]
    assert page["next_cursor"] is None
    assert (create["action"], edit["action"]) == ("job.create", "job.edit")
    assert create["actor"].startswith("key:") and create["seq"] == edit["seq"] - 1
    assert (create["before"], create["after"]) == (None, edit["before"])
    assert edit["after"] not in (None, edit["before"])
    assert edit["request_id"] == "deploy-17" and len(create["request_id"]) == 24
    assert edit["detail"] == {"version": 2}


async def test_what_a_document_was_is_what_it_became_before(scene: Scene) -> None:
    api = scene.api
    for calls in (5, 6):
        await api.call("PUT", "/v1/circuits/billing", json={"calls": calls})
    for day in ("2026-12-24", "2026-12-25"):
        await api.call("PUT", "/v1/calendars/holidays", json={"days": [day]})
    await api.delete("/v1/calendars/holidays")
    for policy in ("fifo", "fair"):
        await api.call("PATCH", "/v1/pools/default", json={"policy": policy})
    await api.post("/v1/jobs/batch", {"jobs": [{"target": PROCESS, "schedule": {"manual": True}}] * 2})
    await seal.seal(scene.db)
    told: dict[str, list[tuple[str | None, str | None]]] = {}
    for record in reversed((await api.get("/v1/audit"))["items"]):
        told.setdefault(record["target"], []).append((record["before"], record["after"]))
    for target, made, ends in (("circuit:billing", True, False), ("calendar:holidays", True, True)):
        changes = told[target]
        assert [before for before, _ in changes[1:]] == [after for _, after in changes[:-1]], target
        assert ((changes[0][0] is None), (changes[-1][1] is None)) == (made, ends), target
    assert told["pool:default"][0] == told["pool:default"][1][::-1]
    [batch] = [changes for target, changes in told.items() if target.startswith("job:")]
    assert batch[0][0] is None and batch[0][1] is not None


async def test_lists_are_narrowed_and_go_on_where_they_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "MOST_SCANNED", 3)
    await chained(scene)
    job = await scene.job(name="paused")
    await scene.api.post(f"/v1/jobs/{job['id']}/pause", {"reason": "because"})
    await seal.seal(scene.db)

    async def every(**query: Any) -> list[Document]:
        items, cursor, pages = [], None, 0
        while pages == 0 or cursor is not None:
            given = query | ({} if cursor is None else {"cursor": cursor})
            page = await scene.api.get("/v1/audit", params={"limit": 2} | given)
            items += page["items"]
            cursor, pages = page["next_cursor"], pages + 1
        return items

    everything = await every()
    assert [item["seq"] for item in everything] == list(range(await head(scene), 0, -1))
    assert [item["action"] for item in await every(action="job.pause")] == ["job.pause"]
    assert [item["action"] for item in await every(target=f"job:{job['id']}")] == ["job.pause", "job.create"]
    assert await every(actor="key:nobody") == []
    middle = everything[4]["at"]
    assert await every(**{"from": middle}) == everything[:5]
    assert await every(to=middle) == everything[5:]
    assert await every(to="2998-12-31T23:59:59Z", **{"from": "1971-01-01T00:00:00Z"}) == everything


async def exported(scene: Scene, query: str = "") -> tuple[dict[str, str], list[bytes]]:
    """The answer's headers, and its parts as they come."""
    headers = {"authorization": f"Bearer {scene.api.key}"}
    reply = await build(scene.node)(Request("GET", "/v1/audit/export", query.encode(), headers))
    assert reply.stream is not None and reply.headers is not None
    return reply.headers | {"type": reply.media_type}, [part async for part in reply.stream]


async def test_the_audit_is_exported_page_by_page(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "MOST_SCANNED", 3)
    monkeypatch.setattr(routes, "_PAGE", 2)
    await chained(scene)
    listed = (await scene.api.get("/v1/audit", params={"limit": 3}))["items"]
    headers, parts = await exported(scene)
    records = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert records[:3] == listed and [record["seq"] for record in records] == list(range(await head(scene), 0, -1))
    assert len(parts) > 3, "never more than a page at a time"
    assert headers["type"] == "application/x-ndjson" and "attachment" in headers["content-disposition"]
    _, parts = await exported(scene, f"target={listed[1]['target']}")
    assert [json.loads(part) for part in parts] == [listed[1]]
    assert (await exported(scene, "action=none"))[1] == []


async def test_an_export_ends_with_its_key(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_PAGE", 2)
    await chained(scene)
    made = await scene.api.post("/v1/keys", {"role": "admin"})
    headers = {"authorization": f"Bearer {made['key']}"}
    for kind in (b"format=ndjson", b"format=csv"):
        reply = await build(scene.node)(Request("GET", "/v1/audit/export", kind, headers))
        assert reply.stream is not None
        await anext(reply.stream)
        if kind == b"format=csv":
            await scene.api.delete(f"/v1/keys/{made['id']}")
            assert b"seq" not in await anext(reply.stream), "the page that was read with the call"
            with pytest.raises(Unauthorized):
                await anext(reply.stream)
        else:
            assert await anext(reply.stream)


async def test_an_export_for_spreadsheets_has_no_formula(scene: Scene) -> None:
    await scene.sql.execute(_SAY.replace("'key:x'", "'=cmd()'"), (await scene.who()).tenant_id)
    await chained(scene, 2)
    headers, parts = await exported(scene, "format=csv")
    records = list(csv.DictReader(io.StringIO(b"".join(parts).decode(), newline="")))
    assert headers["type"] == "text/csv; charset=utf-8"
    listed = (await scene.api.get("/v1/audit"))["items"]
    assert [record["hash"] for record in records] == [record["hash"] for record in listed]
    assert records[0].keys() == listed[0].keys()
    assert [record["actor"] for record in records if "cmd" in record["actor"]] == ["'=cmd()"]
    assert (await scene.api.get("/v1/audit/export?format=pdf", expect=422))["errors"][0]["path"] == "format"
    await (await scene.api.with_key("editor")).get("/v1/audit/export", expect=403)


async def test_bad_questions_are_refused(scene: Scene) -> None:
    assert (await scene.api.get("/v1/audit", params={"cursor": "x"}, expect=400))["code"] == "invalid_cursor"
    assert (await scene.api.get("/v1/audit/verify", params={"cursor": "1.2"}, expect=400))["code"] == "invalid_cursor"
    assert (await scene.api.get("/v1/audit", params={"from": "soon"}, expect=400))["code"] == "invalid_time"
    editor = await scene.api.with_key("editor")
    await editor.get("/v1/audit", expect=403)
    await editor.get("/v1/audit/verify", expect=403)


async def test_a_tenant_reads_and_proves_its_own_chain_alone(scene: Scene) -> None:
    await chained(scene)
    await scene.api.post("/v1/tenants", {"slug": "acme"})
    other = await scene.api.with_key("admin", "acme")
    job = await scene.job(other, name="theirs")
    await seal.seal(scene.db)
    items = (await other.get("/v1/audit"))["items"]
    assert [(item["seq"], item["action"]) for item in items] == [(2, "job.create"), (1, "key.create")]
    assert items[0]["target"] == f"job:{job['id']}"
    theirs = await other.get("/v1/audit/verify")
    assert theirs["ok"] and theirs["records"] == theirs["checked"] == 2
    assert await found(scene) == []


# ── how the chain is made ────────────────────────────────────────────────────────────────────────────────────────


async def test_late_commits_follow_and_failed_ones_leave_no_hole(scene: Scene, cluster: Any) -> None:
    who = await scene.who()
    await scene.job(name="before")
    await seal.seal(scene.db)
    database = await scene.value("select current_database()")
    slow = await asyncpg.connect(cluster.as_superuser(database), server_settings={"search_path": "tocsin"})
    try:
        slow_transaction = slow.transaction()
        await slow_transaction.start()
        late = await slow.fetchval(_SAY, who.tenant_id)
        with pytest.raises(ZeroDivisionError):
            async with scene.sql.transaction():
                failed = await scene.value(_SAY, who.tenant_id)
                raise ZeroDivisionError
        await scene.job(name="overtakes")
        assert await seal.seal(scene.db) == 1
        gaps = await scene.value("select gaps from audit_sealer")
        assert f"[{late}, {failed}," in gaps
        await slow_transaction.commit()
    finally:
        await slow.close()
    assert await seal.seal(scene.db) == 1
    assert await scene.value("select audit_id from audit_chain order by seq desc limit 1") == late
    assert await found(scene) == []
    # What failed is forgotten once nobody can bring it any more.
    await scene.sql.execute("update audit_sealer set gaps = jsonb_set(gaps, '{0,3}', '0')")
    await seal.seal(scene.db)
    assert await scene.value("select gaps from audit_sealer") == "[]"
    assert await seal.seal(scene.db) == 0


async def test_one_server_seals_at_a_time(scene: Scene) -> None:
    await scene.job(name="once")
    async with scene.sql.transaction():
        await scene.sql.execute("select from audit_sealer for update")
        assert await seal.seal(scene.db) == 0
    assert await seal.seal(scene.db) > 0
    assert await found(scene) == []


async def test_no_anchor_is_made_before_old_records_are_sealed(scene: Scene) -> None:
    """As after an upgrade: records of years before the first anchor are no back-dated ones."""
    await scene.job(name="sealed")
    await seal.seal(scene.db)
    old = await scene.now() - timedelta(days=400)
    await scene.sql.execute(
        "insert into audit (tenant_id, at, actor, action, target) values (1, $1, 'k', 'a', 't')", old
    )
    assert await anchor(scene) == 0
    await seal.seal(scene.db)
    assert await anchor(scene) == 1
    assert await found(scene) == []


async def test_a_long_chain_is_proved_piece_by_piece(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "PIECE", 2)
    monkeypatch.setattr(trail, "_BATCH", 2)
    await chained(scene, 7)
    await scene.sql.execute("update audit set action = 'job.edit' where id = (select max(id) - 1 from audit)")
    cursor, kinds, checked = None, [], 0
    while True:
        proof = await scene.api.get("/v1/audit/verify", params={} if cursor is None else {"cursor": cursor})
        kinds += [(finding["kind"], finding["seq"]) for finding in proof["findings"]]
        checked, cursor = checked + proof["checked"], proof["next_cursor"]
        if cursor is None:
            break
    last = await head(scene)
    assert checked == last == proof["records"] == proof["anchored_seq"]
    assert kinds == [("changed", last - 1)]


# ── tampering ────────────────────────────────────────────────────────────────────────────────────────────────────


async def edited(scene: Scene) -> None:
    await scene.sql.execute("update audit set actor = 'key:else' where id = (select min(id) + 3 from audit)")


async def deleted(scene: Scene) -> None:
    await scene.sql.execute("delete from audit where id = (select min(id) + 3 from audit)")


async def deleted_with_its_place(scene: Scene) -> None:
    await scene.sql.execute("delete from audit where id = (select audit_id from audit_chain where seq = 4)")
    await scene.sql.execute("delete from audit_chain where seq = 4")


async def put_in_behind_the_sealer(scene: Scene) -> None:
    passed_by = await scene.value("select setval('audit_id_seq', last_value + 9) from audit_id_seq") - 5
    await scene.job(name="later")
    await seal.seal(scene.db)
    await scene.sql.execute("update audit_sealer set gaps = '[]'")
    await scene.sql.execute(
        "insert into audit (id, tenant_id, at, actor, action, target) overriding system value"
        " select $1::bigint, tenant_id, at, actor, action, target from audit limit 1",
        passed_by,
    )


async def back_dated(scene: Scene) -> None:
    at = await scene.now() - timedelta(days=1)
    await scene.sql.execute(
        "insert into audit (tenant_id, at, actor, action, target)"
        " select tenant_id, $1, actor, action, target from audit limit 1",
        at,
    )
    await seal.seal(scene.db)


async def swapped(scene: Scene) -> None:
    first, second = await scene.rows("select * from audit_chain where seq in (4, 5) order by seq")
    await scene.sql.execute("delete from audit_chain where seq in (4, 5)")
    place = "insert into audit_chain (tenant_id, seq, audit_id, hash) values ($1, $2, $3, $4)"
    await scene.sql.execute(place, first["tenant_id"], 4, second["audit_id"], first["hash"])
    await scene.sql.execute(place, first["tenant_id"], 5, first["audit_id"], second["hash"])


async def cut(scene: Scene) -> None:
    last = await head(scene)
    await scene.sql.execute("delete from audit where id in (select audit_id from audit_chain where seq > $1)", last - 2)
    await scene.sql.execute("delete from audit_chain where seq > $1", last - 2)
    await forge(scene)


async def another_head(scene: Scene) -> None:
    await scene.sql.execute("update audit_heads set hash = sha256('another')")


async def another_anchor(scene: Scene) -> None:
    [key] = await scene.node.objects.keys("audit/1/")
    said = await scene.node.objects.read(key)
    assert said is not None
    place = said.index(b'"hash":"') + 8
    await scene.node.objects.put(key, said[:place] + b"00" * 32 + said[place + 64 :])


async def no_anchor(scene: Scene) -> None:
    [key] = await scene.node.objects.keys("audit/1/")
    await scene.node.objects.delete(key)


async def written_anew(scene: Scene) -> None:
    await edited(scene)
    await forge(scene)


LAST = -1  # the number of the last record


@pytest.mark.parametrize(
    ("tamper", "names"),
    [
        (edited, [("changed", 4)]),
        (deleted, [("deleted", 4)]),
        (deleted_with_its_place, [("deleted", 4)]),
        (put_in_behind_the_sealer, [("inserted", None)]),
        (back_dated, [("backdated", LAST)]),
        (swapped, [("changed", 4), ("changed", 5)]),
        (cut, [("cut", LAST)]),
        (another_head, [("head", LAST)]),
        (written_anew, [("anchor", LAST)]),
        (another_anchor, [("anchor", LAST)]),
        (no_anchor, [("anchor", LAST)]),
    ],
)
async def test_tampering_is_found_and_named(
    scene: Scene, tamper: Callable[[Scene], Awaitable[None]], names: list[tuple[str, int | None]]
) -> None:
    await chained(scene)
    assert await found(scene) == []
    before = await head(scene)
    await tamper(scene)
    last = max(before, await head(scene))
    assert await found(scene) == [(kind, last if seq == LAST else seq) for kind, seq in names]


async def test_an_anchor_that_somebody_else_wrote_is_found(scene: Scene) -> None:
    await scene.job(name="anchored")
    await seal.seal(scene.db)
    await anchor(scene, MasterKeys([b"k" * 32]))
    who, keys = await scene.who(), MasterKeys([b"k" * 32])
    objects = scene.node.objects
    good = await trail.verify(scene.db, objects, scene.node.parquet, keys, who, trail.Mark(), 2555)
    assert good.findings == [] and good.signed == good.anchors == 1
    [key] = await objects.keys(f"audit/{who.tenant_id}/")
    said = await objects.read(key)
    assert said is not None
    await objects.put(key, said.replace(b'"key":', b'"epoch":1,"key":'))
    forged = await trail.verify(scene.db, objects, scene.node.parquet, keys, who, trail.Mark(), 2555)
    assert [finding.kind for finding in forged.findings] == ["anchor"]


async def test_what_a_restore_gave_up_is_told_and_is_no_tampering(scene: Scene) -> None:
    await chained(scene)
    last = await head(scene)
    await cut(scene)
    assert await found(scene) == [("cut", last)]
    await scene.sql.execute("update cluster set restored = 1")
    await scene.sql.execute("update audit_heads set anchored_seq = 0")
    await scene.job(name="goes-on")
    await seal.seal(scene.db)
    await anchor(scene)
    proof = await scene.api.get("/v1/audit/verify")
    assert proof["ok"] and proof["anchored_seq"] == last - 1
    assert [lost["seq"] for lost in proof["lost_by_restores"]] == [last]
    await edited(scene)
    assert await found(scene) == [("changed", 4)]


@pytest.mark.parametrize("pool", ["engine", "app"])
@pytest.mark.parametrize("table", ["audit", "audit_chain"])
async def test_no_role_that_serves_can_take_back_what_was_said(scene: Scene, pool: str, table: str) -> None:
    await chained(scene, 1)
    for statement in (f"update {table} set tenant_id = 0", f"delete from {table}", f"truncate {table}"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await scene.db.fetch(pool, statement)


async def test_a_slow_writer_of_anchors_takes_none_of_anothers_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, keys = scene.node.objects, scene.node.master_keys
    reached, go_on, put = asyncio.Event(), asyncio.Event(), objects.put

    async def slow(key: str, data: bytes, **how: Any) -> None:
        if not reached.is_set():
            reached.set()
            await go_on.wait()
        await put(key, data, **how)

    await scene.job(name="one")
    await seal.seal(scene.db)
    monkeypatch.setattr(objects, "put", slow)
    first = asyncio.create_task(seal.anchor(scene.db, objects, keys, "slow", seal.Series(), every=0.0))
    await reached.wait()
    await scene.job(name="two")
    await seal.seal(scene.db)
    assert await seal.anchor(scene.db, objects, keys, "other", seal.Series(), every=0.0) == 1
    go_on.set()
    await first
    proof = await scene.api.get("/v1/audit/verify")
    assert proof["ok"] and proof["anchors"] == 2 and proof["anchored_seq"] == proof["records"]
