"""The audit's hash chain: what of a record is hashed, how records follow each other, and what an anchor says.

The hash of a record is SHA-256 over the hash of the record before it (32 zero bytes before the first) and the record's
canonical bytes. Who holds one hash holds everything before it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

import msgspec

GENESIS = bytes(32)
GAP_MICROS = 60_000_000
BACKDATED = timedelta(minutes=5)


class Record(NamedTuple):
    """What was said by one row. `micros`: since 1970, as exact as the database keeps it; `detail`: JSON as it writes
    it."""

    id: int
    micros: int
    actor: str
    key_id: str | None
    action: str
    target: str
    detail: str | None
    before: bytes | None
    after: bytes | None
    address: str | None
    request_id: str | None


def canonical(tenant_id: int, seq: int, record: Record) -> bytes:
    """A JSON array: each value has one spelling and one place, so that no two records read the same."""
    before, after = record.before, record.after
    return msgspec.json.encode(
        (
            tenant_id,
            seq,
            *record[:7],
            None if before is None else before.hex(),
            None if after is None else after.hex(),
            *record[9:],
        )
    )


def link(previous: bytes, tenant_id: int, seq: int, record: Record) -> bytes:
    """The hash of a record that follows one with the hash `previous`."""
    return hashlib.sha256(previous + canonical(tenant_id, seq, record)).digest()


def of_one_day(times: Sequence[datetime], before: date) -> int:
    """How many of the first of these records make one file: those up to the end of the first one's day, in UTC, which
    is over before `before`. One that comes late, or says so, is with those among which it was sealed."""
    if not times or times[0].astimezone(UTC).date() >= before:
        return 0
    day = times[0].astimezone(UTC).date()
    return next((n for n, at in enumerate(times) if at.astimezone(UTC).date() > day), len(times))


# ── which records are still to come ──────────────────────────────────────────────────────────────────────────────


class Gap(NamedTuple):
    """Ids that were not there when a higher one was. Whoever drew them has a transaction number below `xid`, or has
    failed; `micros`: when it was noticed."""

    first: int
    last: int
    xid: int
    micros: int


class Horizon(NamedTuple):
    """The oldest transaction that still runs, the next number that will be given, and the time."""

    oldest: int
    next: int
    micros: int


def still_open(gaps: Iterable[Gap], found: Sequence[int], horizon: Horizon) -> list[Gap]:
    """The gaps that are left when `found` came out of them, without those out of which nothing can come any more.

    A number that was not given yet is another cluster's, from which this database was copied: nobody there writes
    here. A minute is far more than lies between drawing an id and having a transaction number.
    """
    out: list[Gap] = []
    come = sorted(found)
    for gap in gaps:
        inside = [id_ for id_ in come if gap.first <= id_ <= gap.last]
        settled = gap.xid <= horizon.oldest or gap.xid > horizon.next
        # What came may be the first of more than were read at once.
        if settled and not inside and horizon.micros - gap.micros > GAP_MICROS:
            continue
        out += between(gap.first - 1, [*inside, gap.last + 1], gap.xid, gap.micros)
    return out


def between(after: int, ids: Iterable[int], xid: int, micros: int) -> list[Gap]:
    """The gaps among `ids`, which rise from above `after`."""
    out = []
    for id_ in ids:
        if id_ > after + 1:
            out.append(Gap(after + 1, id_ - 1, xid, micros))
        after = id_
    return out


# ── anchors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def anchors_folder(tenant_id: int) -> str:
    """Where a tenant's anchors lie in object storage."""
    return f"audit/{tenant_id}/"


class Anchor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The head of a chain at one moment, stored where the database's administrator has no access. `number`: its
    position in the series of the tenant's anchors, from 1; `previous`: SHA-256 of the previous anchor's line. Anchors
    of earlier releases have neither. `key` and `mac`: the master key that signed the anchor, if the server had one."""

    tenant: int
    seq: int
    hash: str
    at: datetime
    epoch: int = 0
    number: int = 0
    previous: str = ""
    key: str = ""
    mac: str = ""

    def signed(self, key_id: str, key: bytes) -> Anchor:
        """The same with its signature."""
        return msgspec.structs.replace(self, key=key_id, mac=self._mac(key))

    def is_signed_with(self, key: bytes) -> bool:
        return hmac.compare_digest(self.mac, self._mac(key))

    def _mac(self, key: bytes) -> str:
        said: tuple[object, ...] = (self.tenant, self.seq, self.hash, self.at, self.epoch)
        if self.number:
            said += (self.number, self.previous)
        return hmac.digest(key, msgspec.json.encode(said), "sha256").hex()


_read_anchor = msgspec.json.Decoder(Anchor).decode


def read_anchors(content: bytes) -> tuple[list[Anchor], int]:
    """The anchors of an object, one a line, and how many of its lines are none."""
    anchors, odd = [], 0
    for line in content.splitlines():
        try:
            anchors.append(_read_anchor(line))
        except msgspec.DecodeError:
            odd += 1
    return anchors, odd


def write_anchor(anchor: Anchor) -> bytes:
    """One line of such an object."""
    return msgspec.json.encode(anchor) + b"\n"


def digest_of(anchor: Anchor) -> str:
    """Return the digest by which the next anchor names this one."""
    return hashlib.sha256(msgspec.json.encode(anchor)).hexdigest()


def broken_series(anchors: Iterable[Anchor], after: int) -> Iterator[tuple[Anchor, str]]:
    """Yield each faulty anchor of a series that continues after number `after` (-1: unknown), with the reason. A number
    may occur more than once: if a server dies before it has recorded an anchor, another server writes the anchor
    again."""
    lines: dict[int, set[str]] = {}
    last = after
    for anchor in sorted((a for a in anchors if a.number > 0), key=lambda a: a.number):
        number = anchor.number
        if last < 0:
            last = number - 1
        if number > last + 1:
            some = f"{last + 1} to {number - 1}" if number > last + 2 else str(last + 1)
            yield anchor, f"anchor {some} of the series is missing"
        elif number - 1 in lines and anchor.previous not in lines[number - 1]:
            yield anchor, f"anchor {number} does not follow anchor {number - 1}"
        elif number == 1 and anchor.previous:
            yield anchor, "anchor 1 follows another, which is missing"
        lines.setdefault(number, set()).add(digest_of(anchor))
        last = max(last, number)


def is_excused(anchor: Anchor, restores: Iterable[tuple[int, int]]) -> bool:
    """Whether the anchor tells of a past that was given up: the database was restored to a record before it."""
    return any(epoch > anchor.epoch and seq < anchor.seq for epoch, seq in restores)
