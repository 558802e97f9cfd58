"""shelve: records of the audit leave PostgreSQL whole or not at all, are read as before, and as hard to tamper with.

The one who tampers has the database, the object storage and all the time he wants; what he lacks are the anchors.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import duckdb
import pytest

from tests.flow.kit import Scene
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow import seal, shelve, trail
from tocsin.flow.shared import audit, shelf
from tocsin.model.audit import GENESIS, Anchor, anchors_folder, link, write_anchor
from tocsin.node.archivist import Archivist
from tocsin.settings import Settings
from tocsin.store.parquet import Parquet

Document = dict[str, Any]
DAY = date(2026, 3, 10)
DAYS = [DAY + timedelta(days=n) for n in range(3)]
A_DAY = 4  # records
_SAY = (
    "insert into audit (tenant_id, at, actor, key_id, action, target, detail, before, after, address, request_id)"
    " values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
)
_ODD = ['said "no",\n\\N\r\n', "\\N", "", "é, =1+1"]


class Past:
    """Days of long ago with records in them, sealed and anchored as they would have been."""

    def __init__(self, scene: Scene, parquet: Parquet) -> None:
        self.scene, self.parquet = scene, parquet
        self.tenant_id = 0

    async def live(self, day: date, tenant_id: int | None = None) -> None:
        tenant_id = tenant_id or self.tenant_id
        for number in range(A_DAY):
            at = datetime.combine(day, time(number, 30), UTC) + timedelta(microseconds=123_456)
            odd = _ODD[number % len(_ODD)]
            detail = None if number % 2 else f'{{"version": {number}, "é": "\\u0007"}}'
            key = "019a0000-0000-7000-8000-000000000001" if number % 3 else None
            after = None if number == 2 else hashlib.sha256(odd.encode()).digest()
            said = (f"key:{number % 2}", key, "job.edit" if number else "job.create", f"job:{odd}", detail, None, after)
            await self.scene.sql.execute(_SAY, tenant_id, at, *said, None if number else "192.0.2.7", odd or None)
        await seal.seal(self.scene.db)
        await self.anchor(datetime.combine(day, time(23, 50), UTC), tenant_id)

    async def anchor(self, at: datetime, tenant_id: int | None = None) -> None:
        tenant_id = tenant_id or self.tenant_id
        head = await self.scene.row("select seq, hash from audit_heads where tenant_id = $1", tenant_id)
        said = write_anchor(Anchor(tenant=tenant_id, seq=head["seq"], hash=head["hash"].hex(), at=at))
        await self.scene.node.objects.put(f"{anchors_folder(tenant_id)}{at:%Y-%m-%d}.ndjson", said)
        await self.scene.sql.execute(
            "update audit_heads set anchored_seq = seq, anchored_at = now() where tenant_id = $1", tenant_id
        )

    async def shelve(self, before: date = DAYS[-1]) -> int:
        node = self.scene.node
        return await shelve.shelve(node.db, node.objects, self.parquet, before)

    async def hot(self) -> list[int]:
        """The numbers of the records in the database, each of which is there with its place."""
        rows = await self.scene.rows(
            "select c.seq from audit_chain c join audit a on a.id = c.audit_id where c.tenant_id = $1 order by c.seq",
            self.tenant_id,
        )
        assert len(rows) == await self.scene.value("select count(*) from audit where tenant_id = $1", self.tenant_id)
        return [row["seq"] for row in rows]

    async def every(self, **query: Any) -> list[Document]:
        """All pages of a list."""
        items: list[Document] = []
        cursor: dict[str, str] = {}
        for _ in range(100):
            page = await self.scene.api.get("/v1/audit", params=query | cursor)
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            cursor = {"cursor": page["next_cursor"]}
        raise AssertionError("the pages have no end")

    async def proofs(self) -> list[Document]:
        """The whole chain, piece by piece."""
        pieces: list[Document] = []
        cursor: dict[str, str] = {}
        for _ in range(100):
            pieces.append(await self.scene.api.get("/v1/audit/verify", params=cursor))
            if pieces[-1]["next_cursor"] is None:
                return pieces
            cursor = {"cursor": pieces[-1]["next_cursor"]}
        raise AssertionError("the pieces have no end")

    async def found(self) -> list[tuple[str, int | None]]:
        """What the proof of the whole chain names."""
        return [(finding["kind"], finding["seq"]) for piece in await self.proofs() for finding in piece["findings"]]

    async def files(self) -> list[asyncpg.Record]:
        return await self.scene.rows("select * from audit_archives order by tenant_id, first_seq")

    async def rewrite(self, change: Callable[[list[Document]], list[Document]], file: int = 0) -> None:
        """Write a file anew, with other records in it, and make the catalogue believe in it."""
        row = (await self.files())[file]
        path = self.scene.node.objects.file(row["object"])
        assert path is not None
        write_file(path, change(read_file(path)))
        data = path.read_bytes()
        await self.scene.sql.execute(
            "update audit_archives set bytes = $3, checksum = $4 where tenant_id = $1 and first_seq = $2",
            *(row["tenant_id"], row["first_seq"], len(data), hashlib.sha256(data).digest()),
        )
        await self.scene.sql.execute(
            "update audit_archives set previous = $3 where tenant_id = $1 and first_seq = $2 + 1",
            *(row["tenant_id"], row["last_seq"], hashlib.sha256(data).digest()),
        )


COLUMNS = list(shelf.COLUMNS)


def read_file(path: Path) -> list[Document]:
    rows = duckdb.sql(f"select * from read_parquet('{path}')").fetchall()
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def write_file(path: Path, records: list[Document]) -> None:
    types = ", ".join(f'"{name}" {kind}' for name, kind in shelf.COLUMNS.items())
    with duckdb.connect() as db:
        db.execute(f"create table records ({types})")
        if records:
            marks = ", ".join("?" * len(COLUMNS))
            db.executemany(f"insert into records values ({marks})", [list(record.values()) for record in records])
        db.execute(f"copy records to '{path}' (format parquet)")


@pytest.fixture
async def past(scene: Scene, tmp_path: Path) -> AsyncIterator[Past]:
    """Three days of one tenant, and some records of today."""
    parquet = Parquet(scene.node.objects, tmp_path / "cold")
    past = Past(scene, parquet)
    past.tenant_id = (await scene.who()).tenant_id
    await scene.sql.execute("delete from audit")  # that the keys were made
    for day in DAYS:
        await past.live(day)
    await scene.job(name="today")
    await seal.seal(scene.db)
    yield past
    parquet.close()


LAST_COLD = 2 * A_DAY  # the third day stays


# ── the way out ──────────────────────────────────────────────────────────────────────────────────────────────────


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
    with pytest.raises(Exception, match="is not what was archived"):
        await past.shelve()
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


# ── tampering with files ─────────────────────────────────────────────────────────────────────────────────────────


async def edited(past: Past) -> None:
    await past.rewrite(lambda rows: [row | {"actor": "key:else"} if row["seq"] == 3 else row for row in rows])


async def deleted(past: Past) -> None:
    await past.rewrite(lambda rows: [row for row in rows if row["seq"] != 3])


async def put_in(past: Past) -> None:
    await past.rewrite(lambda rows: [*rows[:3], rows[2] | {"id": rows[2]["id"] + 900, "actor": "key:else"}, rows[3]])


async def put_in_first(past: Past) -> None:
    await past.rewrite(lambda rows: [*rows[:2], rows[2] | {"id": 0, "actor": "key:else"}, *rows[2:]])


async def swapped(past: Past) -> None:
    def change(rows: list[Document]) -> list[Document]:
        first, second = rows[1], rows[2]
        places = [{name: row[name] for name in ("seq", "hash")} for row in (first, second)]
        return [rows[0], second | places[0], first | places[1], rows[3]]

    await past.rewrite(change)


async def end_of_a_file_cut(past: Past) -> None:
    await past.rewrite(lambda rows: rows[:2], file=1)


async def back_dated(past: Past) -> None:
    """As the last of its file: nobody else is moved."""
    at = datetime.combine(DAYS[0], time(12))
    await past.rewrite(lambda rows: [*rows, rows[3] | {"seq": 2 * A_DAY + 1, "id": 999, "at": at}], file=1)


async def back_dated_and_chained(past: Past) -> None:
    """One record more in the first day, and the whole file chained anew."""

    def change(rows: list[Document]) -> list[Document]:
        rows = [*rows[:2], rows[1] | {"actor": "key:else", "id": rows[1]["id"] + 900}, *rows[2:]]
        last = GENESIS
        for seq, row in enumerate(rows, 1):
            micros = int(row["at"].replace(tzinfo=UTC).timestamp()) * 1_000_000 + row["at"].microsecond
            said = row | {"micros": micros}
            said |= {name: row[name] and bytes.fromhex(row[name]) for name in ("before", "after")}
            last = link(last, past.tenant_id, seq, audit.said(said))
            row["seq"], row["hash"] = seq, last.hex()
        return rows

    await past.rewrite(change)


async def cut(past: Past) -> None:
    """All from the second day on, as if there had never been any."""
    for statement in (
        "delete from audit",
        "delete from audit_chain",
        "delete from audit_archives where first_seq > 1",
        "update audit_heads set (seq, hash, anchored_seq) = (select last_seq, last_hash, last_seq from audit_archives)",
    ):
        await past.scene.sql.execute(statement)


async def file_gone(past: Past) -> None:
    await past.scene.node.objects.delete((await past.files())[1]["object"])


async def file_broken(past: Past) -> None:
    await past.scene.node.objects.put((await past.files())[1]["object"], b"not what it was")


async def file_written_alike(past: Past) -> None:
    """The same records in other bytes, which the catalogue does not believe in."""
    path = past.scene.node.objects.file((await past.files())[1]["object"])
    assert path is not None
    write_file(path, read_file(path))


async def files_swapped(past: Past) -> None:
    """Each where the other was, and the catalogue says so."""
    first, second = await past.files()
    objects = past.scene.node.objects
    contents = [await objects.read(row["object"]) for row in (second, first)]
    for row, data in zip((first, second), contents, strict=True):
        assert data is not None
        await objects.put(row["object"], data)
        await past.scene.sql.execute(
            "update audit_archives set checksum = $2, bytes = $3 where object = $1",
            *(row["object"], hashlib.sha256(data).digest(), len(data)),
        )


async def file_of_another_tenant(past: Past) -> None:
    """One that is whole, and proves, where it belongs."""
    await past.scene.api.post("/v1/tenants", {"slug": "acme"})
    other = await past.scene.value("select id from tenants where slug = 'acme'")
    await past.live(DAYS[0], other)
    await past.shelve()
    mine, _, theirs = await past.files()
    data = await past.scene.node.objects.read(theirs["object"])
    assert data is not None
    await past.scene.node.objects.put(mine["object"], data)


async def file_taken_out(past: Past) -> None:
    await past.scene.sql.execute("delete from audit_archives where first_seq > 1")


async def file_that_follows_another(past: Past) -> None:
    await past.scene.sql.execute("update audit_archives set previous = sha256('another') where first_seq > 1")


ANCHORED = A_DAY  # by the first day's anchor
# All records of both files are where they do not belong.
SWAPPED = [
    *(("deleted", 1), *(("inserted", seq) for seq in range(1, A_DAY)), ("cut", ANCHORED), ("inserted", A_DAY)),
    *(("deleted", A_DAY + 1), *(("inserted", seq) for seq in range(A_DAY + 1, 2 * A_DAY + 1)), ("cut", 2 * A_DAY)),
]


@pytest.mark.parametrize(
    ("tamper", "names"),
    [
        (edited, [("changed", 3)]),
        (deleted, [("deleted", 3)]),
        (put_in, [("inserted", 3)]),
        (put_in_first, [("inserted", 3)]),
        (swapped, [("changed", 2), ("changed", 3)]),
        (end_of_a_file_cut, [("deleted", A_DAY + 3), ("cut", 2 * A_DAY)]),
        (back_dated, [("inserted", 2 * A_DAY + 1)]),
        (back_dated_and_chained, [("changed", ANCHORED), ("anchor", ANCHORED), ("inserted", A_DAY + 1)]),
        (cut, [("cut", 2 * A_DAY)]),
        (file_gone, [("deleted", A_DAY + 1), ("cut", 2 * A_DAY)]),
        (file_broken, [("archive", A_DAY + 1), ("cut", 2 * A_DAY)]),
        (file_written_alike, [("archive", A_DAY + 1)]),
        (files_swapped, SWAPPED),
        (file_of_another_tenant, [("deleted", 1), ("cut", ANCHORED)]),
        (file_taken_out, [("deleted", A_DAY + 1), ("cut", 2 * A_DAY)]),
        (file_that_follows_another, [("archive", A_DAY + 1)]),
    ],
)
async def test_tampering_with_files_is_found_and_named(
    past: Past, tamper: Callable[[Past], Awaitable[None]], names: list[tuple[str, int]]
) -> None:
    await past.shelve()
    assert await past.found() == []
    await tamper(past)
    # A file written anew is also one that those after it do not follow, which is told beside the record.
    found = [one for one in await past.found() if one not in names]
    assert [one for one in await past.found() if one in names] == names, await past.found()
    assert all(kind == "archive" for kind, _ in found), found


# ── tampering with what is left in the database ──────────────────────────────────────────────────────────────────

NEXT = LAST_COLD + 1


async def hot_edited(past: Past) -> None:
    await past.scene.sql.execute("update audit set actor = 'x' where id = (select min(id) + 1 from audit)")


async def hot_deleted(past: Past) -> None:
    await past.scene.sql.execute(
        "with place as (delete from audit_chain where seq = $1 returning audit_id)"
        " delete from audit where id in (select audit_id from place)",
        NEXT,
    )


async def hot_put_in(past: Past) -> None:
    """Among ids of records that are in files."""
    await past.scene.sql.execute(
        "insert into audit (id, tenant_id, at, actor, action, target) overriding system value"
        " select min(id) - 3, tenant_id, min(at), 'x', 'y', 'z' from audit group by tenant_id"
    )


async def hot_swapped(past: Past) -> None:
    first, second = await past.scene.rows(
        "select * from audit_chain where seq in ($1, $2) order by seq", NEXT, NEXT + 1
    )
    await past.scene.sql.execute("delete from audit_chain where seq in ($1, $2)", NEXT, NEXT + 1)
    for place, record in ((first, second), (second, first)):
        await past.scene.sql.execute(
            "insert into audit_chain (tenant_id, seq, audit_id, hash) values ($1, $2, $3, $4)",
            *(place["tenant_id"], place["seq"], record["audit_id"], place["hash"]),
        )


async def hot_cut(past: Past) -> None:
    for statement in (
        "delete from audit",
        "delete from audit_chain",
        "update audit_heads set (seq, hash, anchored_seq)"
        " = (select last_seq, last_hash, last_seq from audit_archives order by last_seq desc limit 1)",
    ):
        await past.scene.sql.execute(statement)


async def hot_back_dated(past: Past) -> None:
    """Of a day that is in a file."""
    await past.scene.sql.execute(
        "insert into audit (tenant_id, at, actor, action, target) values ($1, $2, 'x', 'y', 'z')",
        *(past.tenant_id, datetime.combine(DAYS[0], time(12), UTC)),
    )
    await seal.seal(past.scene.db)


@pytest.mark.parametrize(
    ("tamper", "names"),
    [
        (hot_edited, [("changed", NEXT + 1)]),
        (hot_deleted, [("deleted", NEXT)]),
        (hot_put_in, [("inserted", None)]),
        (hot_swapped, [("changed", NEXT), ("changed", NEXT + 1)]),
        (hot_cut, [("cut", 3 * A_DAY)]),
        (hot_back_dated, [("backdated", 3 * A_DAY + 2)]),
    ],
)
async def test_tampering_with_the_rest_is_found_and_named(
    past: Past, tamper: Callable[[Past], Awaitable[None]], names: list[tuple[str, int | None]]
) -> None:
    await past.shelve()
    assert await past.found() == []
    await tamper(past)
    assert await past.found() == names


@pytest.mark.parametrize(
    ("last_at", "day"),
    [(DAYS[2], DAYS[2]), (date(2018, 1, 1), date(2018, 1, 1)), (date(2018, 1, 1), DAYS[2])],
    ids=["young", "older", "older than its day"],
)
async def test_what_was_deleted_and_is_said_to_have_expired_was_too_young_for_that(
    past: Past, last_at: date, day: date
) -> None:
    gone = 2 * A_DAY + 2
    last = await past.scene.row("select * from audit_chain where tenant_id = $1 and seq = $2", past.tenant_id, gone)
    deleted = await past.scene.rows(
        "delete from audit_chain where tenant_id = $1 and seq <= $2 returning audit_id", past.tenant_id, gone
    )
    await past.scene.sql.execute("delete from audit where id = any($1)", [row["audit_id"] for row in deleted])
    await past.scene.sql.execute(
        "insert into audit_archives (tenant_id, first_seq, last_seq, last_hash, last_id, day, first_at, last_at, bytes,"
        " checksum, previous, expired_at, gone_at) values ($1, 1, $2, $3, $4, $5, $6, $6, 0, $7, $7, now(), now())",
        *(past.tenant_id, gone, last["hash"], last["audit_id"], day),
        *(datetime.combine(last_at, time(1), UTC), bytes(32)),
    )
    assert await past.found() == [("expired", gone)]
