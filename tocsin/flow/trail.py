"""trail: read the audit, newest first, and prove it: record by record against the chain, and against the anchors.

Proving goes in pieces of so many records, each of the database in one snapshot or of some files, so that neither a
request nor memory grows with the chain. What is wrong with one record does not hide what is wrong with another: each is
held to the hash that is stored for the record before it.

Where a chain begins is a `Mark`: the beginning, or the record behind which it was not to be kept any longer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.flow.shared import audit, shelf
from tocsin.model.access import Identity
from tocsin.model.audit import (
    BACKDATED,
    GENESIS,
    Anchor,
    Gap,
    anchors_folder,
    broken_series,
    digest_of,
    is_excused,
    link,
    read_anchors,
)
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import Parquet
from tocsin.store.vault import MasterKeys

SQL = Sql(__file__, audit.SQL)
MOST_SCANNED = 10_000
LONGEST_SILENCE = timedelta(hours=25)  # between two anchors of a chain; servers make one every twenty hours
PIECE = 20_000
_BATCH = 1000
_MOST_FOUND = 100
_AT_ONCE = 20  # objects
_FILES_AT_ONCE = 32
_MOST_FILES = 12 * _FILES_AT_ONCE  # a year and more of days
_MARK = re.compile(r"(\d{1,18})\.([0-9a-f]{64})\.(\d{1,18})\.(\d{4}-\d\d-\d\d)(?:\.(-1|\d{1,18}))?", re.ASCII)
_read_gaps = msgspec.json.Decoder(list[Gap]).decode
_read_restores = msgspec.json.Decoder(list[tuple[int, int]]).decode


class Filter(NamedTuple):
    """What a list is narrowed by."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None
    from_: datetime | None = None
    to: datetime | None = None


class Page(NamedTuple):
    """Records, newest first, and below which one to go on; None at the end."""

    records: list[dict[str, Any]]
    next: int | None


async def list_records(
    db: Database, parquet: Parquet, who: Identity, wanted: Filter, before: int | None, limit: int
) -> Page:
    """Sealed records, first those in the database, then those in files. A page may be short, even empty, and not be the
    last: so many records are looked at and no more."""
    tenant_id = who.tenant_id
    async with db.snapshot(tenant_id, "trail") as connection:
        head = await connection.fetchrow(SQL["head"], tenant_id)
        top = (0 if head is None else head["seq"]) + 1 if before is None else before
        floor = await shelf.upto(connection, tenant_id) + 1
        page = Page([], top)
        if top > floor:
            page = await _hot_page(connection, tenant_id, wanted, floor, top, limit)
        if page.next is None or page.next > floor or len(page.records) == limit:
            return page
        times = wanted.from_, wanted.to
        files = await shelf.below(connection, tenant_id, page.next, *times, _MOST_FILES + 1)
    cold = await _cold_page(parquet, tenant_id, wanted, files, page.next, limit - len(page.records))
    return Page(page.records + cold.records, cold.next)


async def _hot_page(connection: Connection, tenant_id: int, wanted: Filter, floor: int, top: int, limit: int) -> Page:
    """From below `top`; goes on at `floor` if what is before it may fit."""
    bottom = floor
    if wanted.to is not None:
        top = await _place(connection, tenant_id, floor, top, wanted.to, -BACKDATED)
    if wanted.from_ is not None:
        bottom = await _place(connection, tenant_id, floor, top, wanted.from_, BACKDATED)
    lowest = max(bottom, top - MOST_SCANNED)
    rows = await connection.fetch(SQL["list"], tenant_id, top, lowest, *wanted, limit)
    if len(rows) == limit:
        lowest = rows[-1]["seq"]
    done = lowest == bottom and (bottom > floor or floor == 1)
    return Page([_document(row) for row in rows], None if done else lowest)


async def _place(connection: Connection, tenant_id: int, low: int, top: int, at: datetime, slack: timedelta) -> int:
    """The number from which on records, if they were later by `slack`, are of `at` or later, from `low` to `top`. They
    are in the order of their times but for minutes."""
    while low < top:
        middle = (low + top) // 2
        found = await connection.fetchval(SQL["at"], tenant_id, middle)
        if found is not None and found + slack < at:
            low = middle + 1
        else:
            top = middle
    return low


async def _cold_page(
    parquet: Parquet, tenant_id: int, wanted: Filter, files: Sequence[shelf.Shelved], top: int, limit: int
) -> Page:
    found: list[dict[str, Any]] = []
    narrowed = wanted._replace(from_=_naive(wanted.from_), to=_naive(wanted.to))._asdict()
    looked = files[:_MOST_FILES]
    for wave in (looked[i : i + _FILES_AT_ONCE] for i in range(0, len(looked), _FILES_AT_ONCE)):
        rows = await shelf.find(parquet, tenant_id, wave, top, **narrowed, limit=limit - len(found))
        found += map(_document, rows)
        if len(found) == limit:
            return Page(found, rows[-1]["seq"])
    return Page(found, looked[-1].first if len(files) > len(looked) else None)


def _naive(at: datetime | None) -> datetime | None:
    """As times are in files."""
    return at and at.astimezone(UTC).replace(tzinfo=None)


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
    """How far the chain is verified: number and hash of a record, the highest id that was read, the day up to which
    anchors were read, and the number of the last anchor."""

    seq: int = 0
    hash: bytes = GENESIS
    id: int = 0
    day: date = date.min
    anchor: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.hash.hex()}.{self.id}.{self.day.isoformat()}.{self.anchor}"

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        """The mark that `str` wrote; None if it did not."""
        found = _MARK.fullmatch(text)
        try:
            return found and cls(
                int(found[1]), bytes.fromhex(found[2]), int(found[3]), date.fromisoformat(found[4]), int(found[5] or -1)
            )
        except ValueError:
            return None


class Finding(NamedTuple):
    """What is wrong, with which record: `seq` is its number, `id` that of its row if there is one."""

    kind: str
    seq: int | None
    id: int | None
    what: str


class Proof(NamedTuple):
    """What one piece has shown. `expired`: up to where records were not to be kept any longer, `expired_days`: than so
    long. `next`: where the following piece begins, None at the end of the chain; only there, `unsealed` counts the
    records that are still to come into it."""

    records: int
    checked: int
    unsealed: int
    findings: list[Finding]
    anchors: int
    signed: int
    anchored: Anchor | None
    lost: list[Anchor]
    expired: int
    expired_days: int | None
    next: Mark | None


async def verify(
    db: Database,
    objects: ObjectStore,
    parquet: Parquet,
    master: MasterKeys,
    who: Identity,
    mark: Mark,
    audit_days: int,
    written: Callable[[int, int], tuple[int, str] | None] = lambda _tenant_id, _epoch: None,
) -> Proof:
    """Verify the next piece of a tenant's chain. `audit_days`: how many days records are kept for tenants without a
    setting of their own. `written`: the last anchor that this server has written for a tenant in an epoch."""
    async with db.snapshot(who.tenant_id, "trail") as connection:
        head = await connection.fetchrow(SQL["head"], who.tenant_id)
        begin = await connection.fetchrow(shelf.SQL["beginning"], who.tenant_id)
        mark = mark if begin is None or begin["last_seq"] <= mark.seq else Mark(*begin)._replace(anchor=-1)
        walk = _Walk(who.tenant_id, mark)
        # One more than is read, before those: the file that ends where this piece begins.
        files = await shelf.holding(connection, who.tenant_id, mark.seq, _FILES_AT_ONCE + 1)
        cold = bool(files) and files[-1].last > mark.seq
        ended = not cold and await _walk(connection, walk)
        # Before the anchors: what is noted as written is there to be read.
        noted = await connection.fetchrow(SQL["notebook"], who.tenant_id)
    if cold:
        await _walk_files(objects, parquet, walk, files)
    days = await _anchors(objects, who.tenant_id, mark.day, None if ended else walk.day)
    if ended and noted is not None and noted["anchored_seq"] > max((a.seq for a in days.anchors), default=0):
        walk.find("anchor", noted["anchored_seq"], None, f"the anchor of record {noted['anchored_seq']} is gone")
    # After the anchors: none is written before what it anchors is committed.
    async with db.snapshot(who.tenant_id, "trail") as connection:
        unsealed = await _look_for_unchained(connection, walk, mark, ended)
        now = await _look_again(connection, walk, [mark.seq, *(anchor.seq for anchor in days.anchors)])
    if ended:
        _hold_to_notes(walk, now)
    stored = await _stored(objects, parquet, walk, now)
    series = days.anchors
    expired, terms = 0 if now.beginning is None else now.beginning["last_seq"], None
    if now.beginning is not None:
        # As the engine: the role that serves a tenant does not read what is settled for it.
        terms = await db.fetchrow("engine", SQL["terms"], who.tenant_id, audit_days)
        stored[expired] = now.beginning["last_hash"]
        _hold_to_terms(walk, terms, [anchor for anchor in days.anchors if anchor.seq < expired])
        days = days._replace(anchors=[anchor for anchor in days.anchors if anchor.seq >= expired])
    # Behind a file that was tampered with, what the catalogue has of its end was gone on with.
    ends = {file.last: file.hash for file in now.files}
    if mark.seq > 0 and mark.hash not in (stored.get(mark.seq), ends.get(mark.seq)):
        walk.find("changed", mark.seq, None, f"record {mark.seq} was proved a moment ago and is another now")
    shown = _hold_to_anchors(walk, days, master, now.notes, stored)
    _hold_to_series(walk, series, mark, master)
    if ended and now.head is not None:
        _hold_to_beats(walk, series, master, now, written(who.tenant_id, now.epoch))
    return Proof(
        0 if head is None else head["seq"],
        walk.checked,
        unsealed,
        # What expired meanwhile was not to be found any more.
        sorted(
            (one for one in walk.findings if one.seq is None or one.seq > expired or one.kind == "expired"),
            key=_by_number,
        )[:_MOST_FOUND],
        len(days.anchors),
        shown.signed,
        shown.last,
        shown.lost,
        expired,
        terms and terms["days"],
        None if ended else Mark(walk.seq, walk.hash, walk.id, walk.day, _last_number(series, mark)),
    )


class _Walk:
    """One piece: where it stands, and what it has met."""

    def __init__(self, tenant_id: int, mark: Mark) -> None:
        self.tenant_id = tenant_id
        self.seq, self.hash, self.id, self.day = mark[:4]
        self.checked = 0
        self.findings: list[Finding] = []
        self.times: list[tuple[int, int, datetime]] = []  # of the records that were met: number, id, when
        self.hashes: dict[int, bytes] = {}

    def find(self, kind: str, seq: int | None, id_: int | None, what: str) -> None:
        if len(self.findings) < _MOST_FOUND:
            self.findings.append(Finding(kind, seq, id_, what))

    def meet(self, row: Row) -> None:
        seq, stored = row["seq"], row["hash"]
        if seq > self.seq + 1:
            self.miss(seq - 1, "gone, with its place in the chain")
        elif row["id"] is None:
            self.find("deleted", seq, row["audit_id"], f"record {seq} is gone; its place in the chain is left")
        elif not self._follows(row):
            self.find("changed", seq, row["id"], f"record {seq} is not what was sealed as the one after {self.seq}")
        if row["id"] is not None:
            self.times.append((seq, row["id"], row["at"]))
            self.day = max(self.day, row["at"].astimezone(UTC).date())
        self.seq, self.hash, self.id = seq, stored, max(self.id, row["audit_id"])
        self.hashes[seq] = stored
        self.checked += 1

    def meet_all(self, rows: shelf.Records, file: shelf.Shelved) -> None:
        """Those of a file, in which there may be any number of them under one number, and others than belong there."""
        for seq, group in groupby(rows, key=lambda row: int(row["seq"])):
            same = list(group)
            belongs = file.first <= seq <= file.last
            true = next(filter(self._follows, same), same[0]) if belongs else None
            for row in same:
                if row is not true:
                    what = f"the record with id {row['id']} was put into {file.file.object}, as number {seq}"
                    self.find("inserted", seq, row["id"], what)
            if true is not None:
                self.meet(true)

    def miss(self, last: int, how: str) -> None:
        """There is nothing of the next records up to this one."""
        first = self.seq + 1
        self.find("deleted", first, None, f"record {first}{f' to {last}' if last > first else ''} is {how}")

    def _follows(self, row: Row) -> bool:
        return bool(link(self.hash, self.tenant_id, row["seq"], audit.said(row)) == row["hash"])


async def _walk(connection: Connection, walk: _Walk) -> bool:
    """Meet the records of one piece; True if it is the last."""
    while walk.checked < PIECE:
        rows = await connection.fetch(SQL["links"], walk.tenant_id, walk.seq, _BATCH)
        for row in rows:
            walk.meet(row)
        if len(rows) < _BATCH:
            return True
    return False


async def _walk_files(objects: ObjectStore, parquet: Parquet, walk: _Walk, files: Sequence[shelf.Shelved]) -> None:
    """Meet the records of one piece, all of a file's at once. `files` may begin with the one before."""
    before = GENESIS if walk.seq == 0 else None
    for file in files:
        if walk.checked >= PIECE:
            return
        if file.last > walk.seq:
            found = await shelf.examine(objects, parquet, walk.tenant_id, file, walk.seq)
            await asyncio.to_thread(_meet_file, walk, file, before, found)  # hashes thousands
        before = file.file.checksum


def _meet_file(walk: _Walk, file: shelf.Shelved, before: bytes | None, found: shelf.Found) -> None:
    """`before`: the checksum of the file that came before, None if that is not known."""
    name = file.file.object
    if found.records is None:
        kind, how = ("archive", f"in {name}, which cannot be read") if found.there else ("deleted", f"gone with {name}")
        walk.find(kind, file.first, None, f"records {file.first} to {file.last} are {how}")
    else:
        if not found.intact:
            walk.find("archive", file.first, None, f"{name} is not the file that was stored")
        walk.meet_all(found.records, file)
        if walk.seq < file.last:
            walk.miss(file.last, f"gone from {name}")
        elif walk.hash != file.hash:
            walk.find("changed", file.last, None, f"record {file.last} is not the one that {name} ended with")
        said = {row["previous_file"] for row in found.records} or {file.previous.hex()}
        if said != {file.previous.hex()} or before not in (None, file.previous):
            walk.find("archive", file.first, None, f"{name} does not follow the file before it")
    # Where the next file begins, whatever became of this one.
    walk.seq, walk.hash, walk.id, walk.day = file.last, file.hash, max(walk.id, file.id), max(walk.day, file.day)


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
    upto = "a" if last is None else last.isoformat()
    keys = await objects.keys(anchors_folder(tenant_id))
    # Of a day there may be many: each server writes its own.
    wanted = [key for key in keys if first.isoformat() <= key.rpartition("/")[2].partition(".")[0] < upto]
    for some in (wanted[i : i + _AT_ONCE] for i in range(0, len(wanted), _AT_ONCE)):
        for key, content in zip(some, await asyncio.gather(*map(objects.read, some)), strict=True):
            anchors, odd = read_anchors(content or b"")
            out.anchors.extend(anchors)
            if odd:
                out.odd.append(key)
    return out


class _Now(NamedTuple):
    """One moment after the anchors were read: where the chain begins, the sealer's notes, the chain's head, the hashes
    that the database has of the records that were asked for, and the files that have those of the others."""

    beginning: Row | None
    notes: Row | None
    head: Row | None
    hashes: dict[int, bytes]
    files: list[shelf.Shelved]
    at: datetime
    epoch: int


async def _look_again(connection: Connection, walk: _Walk, wanted: Iterable[int]) -> _Now:
    tenant_id, seqs = walk.tenant_id, sorted(set(wanted))
    beginning = await connection.fetchrow(shelf.SQL["beginning"], tenant_id)
    notes = await connection.fetchrow(SQL["notebook"], tenant_id)
    head = await connection.fetchrow(SQL["head"], tenant_id)
    hashes = {row["seq"]: row["hash"] for row in await connection.fetch(SQL["hashes"], tenant_id, seqs)}
    elsewhere = [seq for seq in seqs if seq not in hashes and seq not in walk.hashes]
    files = await shelf.holding(connection, tenant_id, elsewhere[0], _FILES_AT_ONCE) if elsewhere else []
    wanted_files = [file for file in files if any(file.first <= seq <= file.last for seq in elsewhere)]
    moment = await connection.fetchrow(SQL["moment"])
    return _Now(beginning, notes, head, hashes, wanted_files, moment["at"], moment["epoch"])


async def _stored(objects: ObjectStore, parquet: Parquet, walk: _Walk, now: _Now) -> dict[int, bytes]:
    """The hashes of all records that anchors name, wherever they lie."""
    stored = walk.hashes | now.hashes
    for file in now.files:
        found = await shelf.examine(objects, parquet, walk.tenant_id, file, 0)
        stored |= {row["seq"]: row["hash"] for row in found.records or ()}
    return stored


class _Shown(NamedTuple):
    signed: int
    last: Anchor | None
    lost: list[Anchor]


def _hold_to_anchors(
    walk: _Walk, days: _Days, master: MasterKeys, notes: Row | None, stored: dict[int, bytes]
) -> _Shown:
    """Hold the chain to what was anchored."""
    for key in days.odd:
        walk.find("anchor", None, None, f"the object {key} has lines that are no anchors")
    signed = 0
    for anchor in days.anchors:
        good = _signature(anchor, walk.tenant_id, master)
        signed += good is True
        if good is False:
            walk.find("anchor", anchor.seq, None, f"the anchor of {iso(anchor.at)} was not signed by this cluster")
    restores = [] if notes is None else _read_restores(notes["restores"])
    given_up = {anchor.epoch: anchor for anchor in days.anchors if is_excused(anchor, restores)}  # the last of each
    binding = sorted((anchor for anchor in days.anchors if not is_excused(anchor, restores)), key=_by_seq)
    for finding in _mismatches(binding, {seq: hash_.hex() for seq, hash_ in stored.items()}):
        walk.find(*finding)
    for finding in _backdated(walk.times, binding):
        walk.find(*finding)
    return _Shown(signed, binding[-1] if binding else None, list(given_up.values()))


def _hold_to_series(walk: _Walk, anchors: Sequence[Anchor], mark: Mark, master: MasterKeys) -> None:
    """Check anchors against each other: none may be missing, and all after the first signed one must be signed. If an
    anchor names a key that is not configured any more, the next anchor vouches for it."""
    for anchor, why in broken_series(anchors, mark.anchor):
        walk.find("anchor", anchor.seq, None, why)
    first = min((a.at for a in anchors if _is_good(a, walk.tenant_id, master)), default=None)
    for anchor in anchors:
        if first is not None and not anchor.mac and anchor.at > first:
            walk.find("anchor", anchor.seq, None, f"the anchor of {iso(anchor.at)} is not signed, and earlier ones are")


def _hold_to_beats(
    walk: _Walk, anchors: Sequence[Anchor], master: MasterKeys, now: _Now, written: tuple[int, str] | None
) -> None:
    """Find a series that was cut off: by the anchors that this server has written, and because servers write an anchor
    every day even if the chain does not move. If servers sign, an anchor without a signature does not count."""
    good = [a for a in anchors if not master.ids or _is_good(a, walk.tenant_id, master)]
    head = 0 if now.head is None else now.head["seq"]
    if any(finding.kind == "anchor" for finding in walk.findings):
        return
    if written is not None and written not in {(a.number, digest_of(a)) for a in good}:
        walk.find("anchor", head, None, f"anchor {written[0]} of the series, which this server wrote, is gone")
        return
    last = max((anchor.at for anchor in good), default=None)
    since = last or min((at for _, _, at in walk.times), default=None)
    if since is None or now.at - since > LONGEST_SILENCE:
        told = "there is none" if last is None else f"the last is of {iso(last)}"
        kind = "signed anchor" if master.ids else "anchor"
        what = f"{told}, and servers write a {kind} every day: later ones were removed, or no server has run"
        walk.find("anchor", head, None, what)


def _is_good(anchor: Anchor, tenant_id: int, master: MasterKeys) -> bool:
    return _signature(anchor, tenant_id, master) is True


def _last_number(anchors: Sequence[Anchor], mark: Mark) -> int:
    return max((anchor.number for anchor in anchors), default=mark.anchor)


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


def _hold_to_terms(walk: _Walk, terms: Row | None, before: Sequence[Anchor]) -> None:
    """What is said to have expired must have been old enough: a record is younger than any anchor that was made without
    it."""
    if terms is None:
        return  # it is being erased
    latest = max([terms["last_at"], *(anchor.at for anchor in before)])
    if terms["expired_at"] - latest < timedelta(days=terms["days"]) - BACKDATED:
        seq, at = terms["last_seq"], iso(terms["expired_at"])
        what = f"record {seq} is of {iso(latest)} or later, and was expired at {at}: not after {terms['days']} days"
        walk.find("expired", seq, None, what)


def _hold_to_notes(walk: _Walk, now: _Now) -> None:
    head, notes = now.head, now.notes
    if (None if head is None else (head["seq"], head["hash"])) == (notes and (notes["seq"], notes["hash"])):
        return
    seq = max(0 if head is None else head["seq"], 0 if notes is None else notes["seq"])
    walk.find("head", seq, None, f"the chain does not end where it was last sealed, at record {notes and notes['seq']}")


def _by_number(finding: Finding) -> tuple[int, int]:
    return finding.seq or 0, finding.id or 0


def _by_seq(anchor: Anchor) -> int:
    return anchor.seq
