"""seal: give each committed audit record its number and its hash, tenant by tenant, and put the heads out of reach.

Calls write their record and do not wait for each other's. One server at a time follows, a moment behind: it takes what
was committed in the order of the ids, and notes the ids that are missing below the highest it has seen. Those were
drawn by transactions that are not over, or that failed; what still comes out of them is chained when it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tocsin.flow.shared import audit
from tocsin.model.audit import GENESIS, Anchor, Gap, Horizon, anchors_folder, between, link, still_open, write_anchor
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore
from tocsin.store.vault import MasterKeys
from tocsin.telemetry import AUDIT_ANCHOR_AGE, AUDIT_SEALED

SQL = Sql(__file__, audit.SQL)
AT_ONCE = 2000
ANCHOR_SECONDS = 60.0
ANCHORS_AT_ONCE = 50
_read_gaps = msgspec.json.Decoder(list[Gap]).decode


class _Head(NamedTuple):
    seq: int
    hash: bytes


async def seal(db: Database) -> int:
    """Chain what was committed since the last time; answers how many records, `AT_ONCE` or more if there are others."""
    if not await db.fetchval("engine", SQL["pending"]):
        return 0
    async with db.transaction("seal") as connection:
        state = await connection.fetchrow(SQL["take"])
        if state is None:
            return 0
        if state["epoch"] != state["restored"]:
            await connection.execute(SQL["note_restore"], state["restored"])
        gaps = _read_gaps(state["gaps"])
        late = await connection.fetch(SQL["late"], *columns([gap[:2] for gap in gaps], 2), AT_ONCE) if gaps else []
        new = await connection.fetch(SQL["new"], state["high"], AT_ONCE)
        rows = [*late, *new]
        await _chain(connection, rows)
        gaps = still_open(gaps, [row["id"] for row in late], Horizon(state["oldest"], state["next"], state["micros"]))
        if new:
            gaps += between(state["high"], [row["id"] for row in new], new[0]["next"], state["micros"])
        high = new[-1]["id"] if new else state["high"]
        await connection.execute(SQL["put_back"], high, msgspec.json.encode(gaps).decode(), state["restored"])
    AUDIT_SEALED.inc(len(rows))
    return len(rows)


async def _chain(connection: Connection, rows: Sequence[Row]) -> None:
    if not rows:
        return
    tenants = sorted({row["tenant_id"] for row in rows})
    known = await connection.fetch(SQL["heads"], tenants)
    heads = dict.fromkeys(tenants, _Head(0, GENESIS)) | {row["tenant_id"]: _Head(*row[1:]) for row in known}
    links = []
    for row in rows:
        tenant_id = row["tenant_id"]
        last = heads[tenant_id]
        head = _Head(last.seq + 1, link(last.hash, tenant_id, last.seq + 1, audit.said(row)))
        heads[tenant_id] = head
        links.append((tenant_id, head.seq, row["id"], head.hash))
    await connection.execute(SQL["chain"], *columns(links, 4))
    await connection.execute(SQL["advance"], *columns([(id_, *heads[id_]) for id_ in tenants], 3))


# ── heads, out of the reach of whoever may write in the database ─────────────────────────────────────────────────


async def anchor(
    db: Database, objects: ObjectStore, master: MasterKeys, writer: str, every: float = ANCHOR_SECONDS
) -> int:
    """Write down the heads that moved, in one object per tenant, day and `writer`; answers how many. Raises if one
    could not be written; the others are."""
    due = await db.fetch("engine", SQL["due_anchors"], ANCHORS_AT_ONCE, every)
    done = await asyncio.gather(*(_anchor(db, objects, master, writer, row) for row in due), return_exceptions=True)
    AUDIT_ANCHOR_AGE.set(await db.fetchval("engine", SQL["anchor_age"]))
    for failure in done:
        if isinstance(failure, BaseException):
            raise failure
    return len(due)


async def _anchor(db: Database, objects: ObjectStore, master: MasterKeys, writer: str, row: Row) -> None:
    made = Anchor(tenant=row["tenant_id"], seq=row["seq"], hash=row["hash"].hex(), at=row["at"], epoch=row["epoch"])
    if master.ids:
        made = made.signed(master.ids[0], master.derive("audit anchors"))
    # Nobody else writes this one: who is slow would put back what it has read, without what another wrote meanwhile.
    key = f"{anchors_folder(made.tenant)}{made.at:%Y-%m-%d}.{writer}.ndjson"
    said = await objects.read(key) or b""
    if said and not said.endswith(b"\n"):
        said += b"\n"
    await objects.put(key, said + write_anchor(made), durable=True)
    await db.fetch("engine", SQL["anchored"], made.tenant, made.seq)
