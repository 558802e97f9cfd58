"""shelve: records of the audit leave PostgreSQL whole or not at all, and are read as before."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.flow.past import A_DAY, DAYS, LAST_COLD, Document, Past, read_file
from tocsin.errors import Unavailable
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow import seal, shelve, trail
from tocsin.flow.shared import shelf
from tocsin.model.audit import GENESIS
from tocsin.node.archivist import Archivist
from tocsin.settings import Settings
from tocsin.store.objects import Refusals


async def test_closed_days_become_files_and_leave_the_database(past: Past) -> None:
    before = await past.hot()
    assert before == list(range(1, 3 * A_DAY + 2))
    assert await past.shelve() == 2
    assert await past.hot() == before[LAST_COLD:]
    first, second = await past.files()
    assert (first["day"], first["first_seq"], first["last_seq"]) == (DAYS[0], 1, A_DAY)
    assert (second["day"], second["first_seq"], second["last_seq"]) == (DAYS[1], A_DAY + 1, 2 * A_DAY)
    assert first["previous"] == GENESIS and second["previous"] == first["checksum"], "the files are a chain, too"
    path = past.scene.node.objects.file(second["object"])
    assert path is not None and {row["previous_file"] for row in read_file(path)} == {first["checksum"].hex()}
    assert await past.shelve() == 0


async def test_a_tenant_whose_file_storage_refuses_keeps_no_other_back(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    await past.scene.api.post("/v1/tenants", {"slug": "acme"})
    other = await past.scene.value("select id from tenants where slug = 'acme'")
    await past.live(DAYS[0], other)
    put = past.scene.node.objects.put

    async def refuse(key: str, data: bytes, **kwargs: Any) -> None:
        if f"/{past.tenant_id}/" in key:
            raise Unavailable("object storage refused a write")
        await put(key, data, **kwargs)

    before = await past.hot()
    with monkeypatch.context() as today:
        today.setattr(past.scene.node.objects, "put", refuse)
        await past.shelve()
        assert {row["tenant_id"] for row in await past.files()} == {other}
        today.setattr(Refusals, "MOST", 1)
        with pytest.raises(Unavailable):
            await past.shelve()
    assert await past.hot() == before
    assert await past.shelve() == 2


async def test_records_are_read_as_before_by_one_cursor(past: Past) -> None:
    everything = await past.every()
    assert [record["seq"] for record in everything] == list(range(3 * A_DAY + 1, 0, -1))
    edge = everything[-(LAST_COLD + 1)]["at"]  # of the first record that stays
    queries: list[Document] = [
        {"limit": 3},
        {"limit": A_DAY + 1},
        {"limit": 500},
        {"actor": "key:1", "limit": 2},
        {"action": "job.create"},
        {"target": "job:\\N"},
        {"from": edge, "limit": 2},
        {"to": edge, "limit": 2},
        {"from": f"{DAYS[0]}T01:30:00Z", "to": f"{DAYS[1]}T01:31:00Z"},
        {"to": f"{DAYS[0]}T00:00:00Z"},
        {"actor": "key:nobody"},
    ]
    wanted = [await past.every(**query) for query in queries]
    assert len(wanted[3]) == 6 and len(wanted[8]) == A_DAY - 1 + 2
    await past.shelve()
    for query, before in zip(queries, wanted, strict=True):
        assert await past.every(**query) == before, query


async def test_a_page_that_would_take_too_long_goes_on_at_its_cursor(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = await past.every()
    await past.shelve(DAYS[-1] + timedelta(days=1))
    monkeypatch.setattr(trail, "_FILES_AT_ONCE", 1)
    monkeypatch.setattr(trail, "_MOST_FILES", 1)
    first = await past.scene.api.get("/v1/audit", params={"action": "job.delete"})
    assert first["items"] == [] and first["next_cursor"] is not None
    assert await past.every(action="job.delete") == []
    assert await past.every(limit=5) == everything


async def test_a_chain_is_proved_through_files_into_the_database(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    await past.shelve()
    pieces = await past.proofs()
    assert [piece["ok"] for piece in pieces] == [True, True], pieces
    assert sum(piece["checked"] for piece in pieces) == pieces[-1]["records"] == 3 * A_DAY + 1
    assert pieces[-1]["anchored_seq"] == 3 * A_DAY
    monkeypatch.setattr(trail, "PIECE", 2)
    monkeypatch.setattr(trail, "_BATCH", 2)
    pieces = await past.proofs()
    assert len(pieces) > 4 and all(piece["ok"] for piece in pieces)
    assert sum(piece["checked"] for piece in pieces) == 3 * A_DAY + 1


async def test_a_proof_goes_on_where_records_were_when_it_began(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in the database at the first call may be in a file at the second."""
    monkeypatch.setattr(trail, "PIECE", 3)
    monkeypatch.setattr(trail, "_BATCH", 3)
    first = await past.scene.api.get("/v1/audit/verify")
    await past.shelve()
    second = await past.scene.api.get("/v1/audit/verify", params={"cursor": first["next_cursor"]})
    assert (first["checked"], second["checked"], second["ok"]) == (3, A_DAY - 3 + A_DAY, True), second


async def test_a_chain_that_is_all_in_files_goes_on(past: Past) -> None:
    day = (await past.scene.now()).date()
    await past.anchor(await past.scene.now())
    await past.shelve(day + timedelta(days=1))
    assert await past.hot() == []
    assert await past.found() == []
    await past.scene.job(name="goes-on")
    await seal.seal(past.scene.db)
    assert await past.hot() == [3 * A_DAY + 2]
    assert await past.found() == []
    assert [record["seq"] for record in await past.every(limit=5)] == list(range(3 * A_DAY + 2, 0, -1))


async def test_the_archivist_moves_what_is_old(past: Past, tmp_path: Path) -> None:
    url = past.scene.node.settings.database_url
    for days, left in ((0, 3 * A_DAY + 1), (30, 1)):
        settings = Settings.load({}, home=tmp_path, database_url=url, hot_days=days)
        await Archivist(past.scene.db, past.scene.node.objects, past.parquet, settings).run_once()
        assert len(await past.hot()) == left


async def test_a_tenant_may_have_hot_days_of_its_own(past: Past) -> None:
    age = (await past.scene.now()).date() - DAYS[1]
    await past.scene.api.call("PATCH", "/v1/tenants/default", json={"retention": {"hot_days": age.days}})
    await seal.seal(past.scene.db)
    assert await past.shelve(date.min) == 1 and (await past.hot())[0] == A_DAY + 1


async def test_nothing_goes_while_a_server_lives_that_would_not_find_it(past: Past) -> None:
    add = "insert into servers (id, name, version, newest_migration) values (gen_random_uuid(), 'old', '0', $1)"
    await past.scene.sql.execute(add, "0036_retention")
    assert await past.shelve() == 0
    await past.scene.sql.execute("update servers set seen_at = now() - interval '2 minutes'")
    await past.scene.sql.execute(add, "0041_audit_archive")
    assert await past.shelve() == 2


async def test_what_is_not_anchored_stays(past: Past) -> None:
    await past.scene.sql.execute("update audit_heads set anchored_seq = 2")
    assert await past.shelve() == 1
    assert (await past.hot())[0] == 3


async def test_long_days_are_several_files(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "MOST_ROWS", 3)
    assert await past.shelve() == 4
    assert await past.found() == []


@pytest.mark.parametrize("point", shelve.POINTS)
async def test_the_next_turn_repairs_what_a_crash_left(past: Past, point: str, tmp_path: Path) -> None:
    everything = await past.every()
    past.scene.db.failpoints = Failpoints(f"shelve.{point}=raise")
    with pytest.raises(InjectedFault):
        await past.shelve()
    assert await past.every(limit=5) == everything
    assert await past.found() == []
    await past.shelve()
    assert await past.every(limit=5) == everything
    assert await past.found() == []
    assert len(await past.hot()) == len(everything) - LAST_COLD
    stored = list((tmp_path / "objects" / "audit-archive").rglob("*.parquet"))
    assert len(stored) == len(await past.files()) == 2


async def test_a_file_that_came_back_changed_takes_nothing_away(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    put = past.scene.node.objects.put

    async def spoil(key: str, data: bytes, **kwargs: Any) -> None:
        await put(key, data[:100] + bytes([data[100] ^ 1]) + data[101:], **kwargs)

    monkeypatch.setattr(past.scene.node.objects, "put", spoil)
    assert await past.shelve() == 0
    assert len(await past.hot()) == 3 * A_DAY + 1 and await past.files() == []


@pytest.mark.parametrize(
    "tamper", ["update audit set actor = 'x' where id = $1", "delete from audit where id = $1"], ids=["edit", "delete"]
)
async def test_what_is_not_what_was_sealed_stays_as_evidence_and_holds_up_nobody_else(past: Past, tamper: str) -> None:
    await past.scene.api.post("/v1/tenants", {"slug": "acme"})
    other = await past.scene.value("select id from tenants where slug = 'acme'")
    await past.live(DAYS[0], other)
    wrong = await past.scene.value(
        "select audit_id from audit_chain where tenant_id = $1 and seq = $2", past.tenant_id, A_DAY + 2
    )
    await past.scene.sql.execute(tamper, wrong)
    found = await past.found()
    assert found and found[0][1] == A_DAY + 2
    await past.shelve()
    files = [(row["tenant_id"], row["last_seq"]) for row in await past.files()]
    assert files == [(past.tenant_id, A_DAY), (other, A_DAY)]
    assert await past.found() == found


async def test_nobody_reads_another_tenants_files(past: Past) -> None:
    await past.shelve()
    await past.scene.api.post("/v1/tenants", {"slug": "acme"})
    other = await past.scene.api.with_key("admin", "acme")
    assert [item["action"] for item in (await other.get("/v1/audit"))["items"]] == []
    assert (await other.get("/v1/audit/verify"))["checked"] == 0


@pytest.mark.parametrize("pool", ["engine", "app"])
async def test_no_role_that_serves_can_say_that_something_is_archived(past: Past, pool: str) -> None:
    await past.shelve()
    for statement in (
        "insert into audit_archives select * from audit_archives",
        "update audit_archives set gone_at = null",
        "delete from audit_archives",
        "truncate audit_archives",
        f"{shelve.SQL['remove'].replace('$1', '1').replace('$2', '1')}",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await past.scene.db.fetch(pool, statement)
