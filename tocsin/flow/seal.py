"""seal: give each committed audit record its number and its hash, tenant by tenant, and put the heads out of reach.

Calls write their record and do not wait for each other's. One server at a time follows, a moment behind: it takes what
was committed in the order of the ids, and notes the ids that are missing below the highest it has seen. Those were
drawn by transactions that are not over, or that failed; what still comes out of them is chained when it does.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tocsin.flow.shared import audit
from tocsin.model.audit import (
    GENESIS,
    Anchor,
    Gap,
    Horizon,
    anchors_folder,
    between,
    digest_of,
    link,
    still_open,
    write_anchor,
)
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore
from tocsin.store.vault import MasterKeys
from tocsin.telemetry import AUDIT_ANCHOR_AGE, AUDIT_SEALED, get_logger

SQL = Sql(__file__, audit.SQL)
log = get_logger("anchorer")
AT_ONCE = 2000
ANCHOR_SECONDS = 60.0
ANCHORS_AT_ONCE = 50
BEAT_SECONDS = 72_000.0  # seconds between two anchors of a chain that does not move
_MOST_SERIES = 100_000
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


class Series:
    """The last anchor of each chain that this server has written: its number, and the digest of its line. The series
    continues from there even if the database names an earlier anchor. In that case the database was set back, and the
    missing anchors show it. After a restore from a backup the series continues from the number in the database."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, tuple[int, int, str]] = OrderedDict()  # by tenant: epoch, number, digest

    def after(self, row: Row) -> tuple[int, str]:
        """Return number and digest of the anchor that the next one follows."""
        known: tuple[int, str] = row["anchor_number"], row["anchor_line"]
        own = self.last(row["tenant_id"], row["epoch"])
        if own is None or own[0] <= known[0]:
            return known
        log.error("the anchors of an audit were put back in the database", tenant_id=row["tenant_id"], to=known[0])
        return own

    def last(self, tenant_id: int, epoch: int) -> tuple[int, str] | None:
        """Return number and digest of the last anchor that this server has written since the last restore."""
        known = self._last.get(tenant_id)
        return None if known is None or known[0] != epoch else known[1:]

    def wrote(self, made: Anchor) -> None:
        self._last[made.tenant] = made.epoch, made.number, digest_of(made)
        self._last.move_to_end(made.tenant)
        if len(self._last) > _MOST_SERIES:
            self._last.popitem(last=False)


async def anchor(
    db: Database,
    objects: ObjectStore,
    master: MasterKeys,
    writer: str,
    series: Series,
    every: float = ANCHOR_SECONDS,
    beat: float = BEAT_SECONDS,
) -> int:
    """Write the heads that moved, and those whose last anchor is old, to one object per tenant, day and `writer`.
    Return how many. If one cannot be written, the others are written first, then this raises."""
    due = await db.fetch("engine", SQL["due_anchors"], ANCHORS_AT_ONCE, every, beat)
    made = (_anchor(db, objects, master, writer, series, row) for row in due)
    done = await asyncio.gather(*made, return_exceptions=True)
    AUDIT_ANCHOR_AGE.set(await db.fetchval("engine", SQL["anchor_age"]))
    for failure in done:
        if isinstance(failure, BaseException):
            raise failure
    return len(due)


async def _anchor(
    db: Database, objects: ObjectStore, master: MasterKeys, writer: str, series: Series, row: Row
) -> None:
    number, previous = series.after(row)
    made = Anchor(
        tenant=row["tenant_id"],
        seq=row["seq"],
        hash=row["hash"].hex(),
        at=row["at"],
        epoch=row["epoch"],
        number=number + 1,
        previous=previous,
    )
    if master.ids:
        made = made.signed(master.ids[0], master.derive("audit anchors"))
    # Nobody else writes this one: who is slow would put back what it has read, without what another wrote meanwhile.
    key = f"{anchors_folder(made.tenant)}{made.at:%Y-%m-%d}.{writer}.ndjson"
    said = await objects.read(key) or b""
    if said and not said.endswith(b"\n"):
        said += b"\n"
    await objects.put(key, said + write_anchor(made), durable=True)
    series.wrote(made)
    await db.fetch("engine", SQL["anchored"], made.tenant, made.seq, made.number, digest_of(made))
