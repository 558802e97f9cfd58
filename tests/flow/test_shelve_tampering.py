"""Archived audit records are as hard to tamper with as before.

The attacker has the database, the object storage and unlimited time, but not the anchors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, time

import pytest

from tests.flow.past import A_DAY, DAYS, LAST_COLD, Document, Past, read_file, write_file
from tocsin.flow import seal
from tocsin.flow.shared import audit
from tocsin.model.audit import GENESIS, link

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
    """Add a back-dated record at the end of its file, so that no other record moves."""
    at = datetime.combine(DAYS[0], time(12))
    await past.rewrite(lambda rows: [*rows, rows[3] | {"seq": 2 * A_DAY + 1, "id": 999, "at": at}], file=1)


async def back_dated_and_chained(past: Past) -> None:
    """Add one record to the first day, and chain the whole file again."""

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
    """Remove everything from the second day on."""
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
    """Write the same records in other bytes, which do not match the catalogue."""
    path = past.scene.node.objects.file((await past.files())[1]["object"])
    assert path is not None
    write_file(path, read_file(path))


async def files_swapped(past: Past) -> None:
    """Swap two files, and adjust the catalogue."""
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
    """Use a file that is complete and valid, but belongs to another tenant."""
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
# All records of both files are in the wrong place.
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
    # The file after a rewritten file does not follow it any more, which is a second finding.
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
    """Insert a record among the ids of records that are in files."""
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
    """Back-date a record to a day that is in a file."""
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
