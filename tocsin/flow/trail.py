"""trail: read the audit, newest first, and prove it: record by record against the chain, and against the anchors.

Proving goes in pieces of so many records, each in one snapshot, so that neither a request nor memory grows with the
chain. What is wrong with one record does not hide what is wrong with another: each is held to the hash that is stored
for the record before it.

Where a chain begins is a `Mark`. Whoever moves the first records elsewhere keeps the mark behind the last of them, and
the proof of what is left starts there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.flow.shared import audit
from tocsin.model.access import Identity
from tocsin.model.audit import BACKDATED, GENESIS, Anchor, Gap, anchors_folder, is_excused, link, read_anchors
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore
from tocsin.store.vault import MasterKeys

SQL = Sql(__file__, audit.SQL)
MOST_SCANNED = 10_000
PIECE = 20_000
_BATCH = 1000
_MOST_FOUND = 100
_AT_ONCE = 20  # objects
_MARK = re.compile(r"(\d{1,18})\.([0-9a-f]{64})\.(\d{1,18})\.(\d{4}-\d\d-\d\d)", re.ASCII)
_read_gaps = msgspec.json.Decoder(list[Gap]).decode
_read_restores = msgspec.json.Decoder(list[tuple[int, int]]).decode


class Filter(NamedTuple):
    """What a list is narrowed by."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None
    from_: datetime | None = None
    to: datetime | None = None


async def list_records(
    db: Database, who: Identity, wanted: Filter, before: int | None, limit: int
) -> tuple[list[dict[str, Any]], int | None]:
    """Sealed records, newest first, and from where to go on. A page may be short, even empty, and not be the last: so
    many records are looked at and no more."""
    async with db.snapshot(who.tenant_id, "trail") as connection:
        head = await connection.fetchrow(SQL["head"], who.tenant_id)
        top = (0 if head is None else head["seq"]) + 1 if before is None else before
        bottom = 1
        if wanted.to is not None:
            top = await _place(connection, who, top, wanted.to, -BACKDATED)
        if wanted.from_ is not None:
            bottom = await _place(connection, who, top, wanted.from_, BACKDATED)
        lowest = max(bottom, top - MOST_SCANNED)
        rows = await connection.fetch(SQL["list"], who.tenant_id, top, lowest, *wanted, limit)
    if len(rows) == limit:
        lowest = rows[-1]["seq"]
    return [_document(row) for row in rows], lowest if lowest > bottom else None


async def _place(connection: Connection, who: Identity, top: int, at: datetime, slack: timedelta) -> int:
    """The number from which on records, if they were later by `slack`, are of `at` or later, `top` at most. They are in
    the order of their times but for minutes."""
    low = 1
    while low < top:
        middle = (low + top) // 2
        found = await connection.fetchval(SQL["at"], who.tenant_id, middle)
        if found is not None and found + slack < at:
            low = middle + 1
        else:
            top = middle
    return low


def _document(row: Row) -> dict[str, Any]:
    return {
        "seq": row["seq"],
        "at": iso(row["at"]),
        "actor": row["actor"],
        "key_id": row["key_id"],
        "action": row["action"],
        "target": row["target"],
        "detail": None if row["detail"] is None else msgspec.json.decode(row["detail"]),
        "before": row["before"] and row["before"].hex(),
        "after": row["after"] and row["after"].hex(),
        "address": row["address"],
        "request_id": row["request_id"],
        "hash": row["hash"].hex(),
    }


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mark(NamedTuple):
    """Up to where it is proved: number and hash of a record, the highest id that was looked at, and the day up to
    which anchors were."""

    seq: int = 0
    hash: bytes = GENESIS
    id: int = 0
    day: date = date.min

    def __str__(self) -> str:
        return f"{self.seq}.{self.hash.hex()}.{self.id}.{self.day.isoformat()}"

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        """The mark that `str` wrote; None if it did not."""
        found = _MARK.fullmatch(text)
        try:
            return found and cls(int(found[1]), bytes.fromhex(found[2]), int(found[3]), date.fromisoformat(found[4]))
        except ValueError:
            return None


class Finding(NamedTuple):
    """What is wrong, with which record: `seq` is its number, `id` that of its row if there is one."""

    kind: str
    seq: int | None
    id: int | None
    what: str


class Proof(NamedTuple):
    """What one piece has shown. `next`: where the following one begins, None at the end of the chain; only there,
    `unsealed` counts the records that are still to come into it."""

    records: int
    checked: int
    unsealed: int
    findings: list[Finding]
    anchors: int
    signed: int
    anchored: Anchor | None
    lost: list[Anchor]
    next: Mark | None


async def verify(db: Database, objects: ObjectStore, master: MasterKeys, who: Identity, mark: Mark) -> Proof:
    """Prove the next piece of a tenant's chain."""
    walk = _Walk(who.tenant_id, mark)
    async with db.snapshot(who.tenant_id, "trail") as connection:
        head = await connection.fetchrow(SQL["head"], who.tenant_id)
        ended = await _walk(connection, walk)
        unsealed = await _look_for_unchained(connection, walk, mark, ended)
        # Before the anchors: what is noted as written is there to be read.
        notes = await connection.fetchrow(SQL["notebook"], who.tenant_id)
    days = await _anchors(objects, who.tenant_id, mark.day, None if ended else walk.day)
    if ended and notes is not None and notes["anchored_seq"] > max((a.seq for a in days.anchors), default=0):
        walk.find("anchor", notes["anchored_seq"], None, f"the anchor of record {notes['anchored_seq']} is gone")
    # After the anchors: none is written before what it anchors is committed.
    async with db.snapshot(who.tenant_id, "trail") as connection:
        shown = await _hold_to_anchors(connection, walk, days, master, ended)
    return Proof(
        0 if head is None else head["seq"],
        walk.checked,
        unsealed,
        sorted(walk.findings, key=_by_number)[:_MOST_FOUND],
        len(days.anchors),
        shown.signed,
        shown.last,
        shown.lost,
        None if ended else Mark(walk.seq, walk.hash, walk.id, walk.day),
    )


class _Walk:
    """One piece: where it stands, and what it has met."""

    def __init__(self, tenant_id: int, mark: Mark) -> None:
        self.tenant_id = tenant_id
        self.seq, self.hash, self.id, self.day = mark
        self.checked = 0
        self.findings: list[Finding] = []
        self.times: list[tuple[int, int, datetime]] = []  # of the records that were met: number, id, when

    def find(self, kind: str, seq: int | None, id_: int | None, what: str) -> None:
        if len(self.findings) < _MOST_FOUND:
            self.findings.append(Finding(kind, seq, id_, what))

    def meet(self, row: Row) -> None:
        seq, stored = row["seq"], row["hash"]
        if seq > self.seq + 1:
            last = f" to {seq - 1}" if seq > self.seq + 2 else ""
            self.find(
                "deleted", self.seq + 1, None, f"record {self.seq + 1}{last} is gone, with its place in the chain"
            )
        elif row["id"] is None:
            self.find("deleted", seq, row["audit_id"], f"record {seq} is gone; its place in the chain is left")
        elif link(self.hash, self.tenant_id, seq, audit.said(row)) != stored:
            self.find("changed", seq, row["id"], f"record {seq} is not what was sealed as the one after {self.seq}")
        if row["id"] is not None:
            self.times.append((seq, row["id"], row["at"]))
            self.day = max(self.day, row["at"].astimezone(UTC).date())
        self.seq, self.hash, self.id = seq, stored, max(self.id, row["audit_id"])
        self.checked += 1


async def _walk(connection: Connection, walk: _Walk) -> bool:
    """Meet the records of one piece; True if it is the last."""
    if walk.seq > 0:
        [before] = await connection.fetch(SQL["hashes"], walk.tenant_id, [walk.seq]) or [None]
        if before is None or before["hash"] != walk.hash:
            walk.find("changed", walk.seq, None, f"record {walk.seq} was proved a moment ago and is another now")
    while walk.checked < PIECE:
        rows = await connection.fetch(SQL["links"], walk.tenant_id, walk.seq, _BATCH)
        for row in rows:
            walk.meet(row)
        if len(rows) < _BATCH:
            return True
    return False


async def _look_for_unchained(connection: Connection, walk: _Walk, mark: Mark, ended: bool) -> int:
    """Find records that will never have a place; answers how many still wait for theirs, at the chain's end."""
    sealer = await connection.fetchrow(SQL["sealer"])
    gaps = [gap[:2] for gap in _read_gaps(sealer["gaps"])]
    upto = max(walk.id, sealer["high"]) if ended else walk.id
    found = await connection.fetch(SQL["unchained"], walk.tenant_id, mark.id, upto, *columns(gaps, 2), _MOST_FOUND)
    for row in found:
        what = f"the record with id {row['id']} was put in past the sealer: it has no place in the chain"
        walk.find("inserted", None, row["id"], what)
    waiting = SQL["unsealed"], walk.tenant_id, sealer["high"], MOST_SCANNED
    return await connection.fetchval(*waiting) if ended else 0


class _Days(NamedTuple):
    """What the anchors of some days say; `odd`: the objects with lines that are none."""

    anchors: list[Anchor]
    odd: list[str]


async def _anchors(objects: ObjectStore, tenant_id: int, first: date, last: date | None) -> _Days:
    """From `first`, up to but without `last`."""
    out = _Days([], [])
    days = {key.rpartition("/")[2].partition(".")[0]: key for key in await objects.keys(anchors_folder(tenant_id))}
    upto = "a" if last is None else last.isoformat()
    wanted = [key for day, key in sorted(days.items()) if first.isoformat() <= day < upto]
    for some in (wanted[i : i + _AT_ONCE] for i in range(0, len(wanted), _AT_ONCE)):
        for key, content in zip(some, await asyncio.gather(*map(objects.read, some)), strict=True):
            anchors, odd = read_anchors(content or b"")
            out.anchors.extend(anchors)
            if odd:
                out.odd.append(key)
    return out


class _Shown(NamedTuple):
    signed: int
    last: Anchor | None
    lost: list[Anchor]


async def _hold_to_anchors(connection: Connection, walk: _Walk, days: _Days, master: MasterKeys, ended: bool) -> _Shown:
    """Hold the chain to what was anchored, and at its end to the sealer's own notes."""
    for key in days.odd:
        walk.find("anchor", None, None, f"the object {key} has lines that are no anchors")
    signed = 0
    for anchor in days.anchors:
        good = _signature(anchor, walk.tenant_id, master)
        signed += good is True
        if good is False:
            walk.find("anchor", anchor.seq, None, f"the anchor of {iso(anchor.at)} was not signed by this cluster")
    notes = await connection.fetchrow(SQL["notebook"], walk.tenant_id)
    restores = [] if notes is None else _read_restores(notes["restores"])
    given_up = {anchor.epoch: anchor for anchor in days.anchors if is_excused(anchor, restores)}  # the last of each
    binding = sorted((anchor for anchor in days.anchors if not is_excused(anchor, restores)), key=_by_seq)
    wanted = sorted({anchor.seq for anchor in binding})
    stored = {row["seq"]: row["hash"].hex() for row in await connection.fetch(SQL["hashes"], walk.tenant_id, wanted)}
    for finding in _mismatches(binding, stored):
        walk.find(*finding)
    for finding in _backdated(walk.times, binding):
        walk.find(*finding)
    if ended:
        await _hold_to_notes(connection, walk, notes)
    return _Shown(signed, binding[-1] if binding else None, list(given_up.values()))


def _signature(anchor: Anchor, tenant_id: int, master: MasterKeys) -> bool | None:
    """Whether a signature is good; None if there is none, or its key is not here."""
    if anchor.tenant != tenant_id:
        return False
    if not anchor.mac or anchor.key not in master.ids:
        return None
    return any(anchor.is_signed_with(key) for key in master.derive_all("audit anchors"))


def _mismatches(anchors: Sequence[Anchor], stored: dict[int, str]) -> Iterator[Finding]:
    """The first anchor that the chain does not bear out tells all; those after it must fail, too."""
    good = 0
    for anchor in anchors:
        found = stored.get(anchor.seq)
        if found == anchor.hash:
            good = max(good, anchor.seq)
            continue
        since = f"records {good + 1} to {anchor.seq}" if anchor.seq > good + 1 else f"record {anchor.seq}"
        if found is None:
            yield Finding("cut", anchor.seq, None, f"record {anchor.seq} was there at {iso(anchor.at)} and is gone")
        else:
            what = f"{since}: written anew, or the anchor of {iso(anchor.at)} was"
            yield Finding("anchor", anchor.seq, None, what)
        return


def _backdated(times: Iterable[tuple[int, int, datetime]], anchors: Sequence[Anchor]) -> Iterator[Finding]:
    """Records that say they are older than an anchor that was made without them."""
    passed, latest = 0, None
    for seq, id_, at in times:
        while passed < len(anchors) and anchors[passed].seq < seq:
            made = anchors[passed].at
            latest = made if latest is None else max(latest, made)
            passed += 1
        if latest is not None and at < latest - BACKDATED:
            yield Finding("backdated", seq, id_, f"record {seq} says {iso(at)}, and was not there at {iso(latest)}")


async def _hold_to_notes(connection: Connection, walk: _Walk, notes: Row | None) -> None:
    # Read with the notes, not with the records: a seal may have come in between.
    head = await connection.fetchrow(SQL["head"], walk.tenant_id)
    if (None if head is None else (head["seq"], head["hash"])) == (notes and (notes["seq"], notes["hash"])):
        return
    seq = max(0 if head is None else head["seq"], 0 if notes is None else notes["seq"])
    walk.find("head", seq, None, f"the chain does not end where it was last sealed, at record {notes and notes['seq']}")


def _by_number(finding: Finding) -> tuple[int, int]:
    return finding.seq or 0, finding.id or 0


def _by_seq(anchor: Anchor) -> int:
    return anchor.seq
