"""What the API answers about the audit, as `replies` has the rest."""

from __future__ import annotations

from typing import Any, Literal

from tocsin.model.scalars import Instant
from tocsin.node.server.replies import Id, Reply


class AuditRecord(Reply):
    """What one call changed. `before` and `after` are SHA-256 of the document that the target was and became, null
    where there is none or it is secret; `hash` is the record's in its tenant's chain, where `seq` is its number."""

    seq: int
    at: Instant
    actor: str
    key_id: Id | None
    action: str
    target: str
    detail: dict[str, Any] | None
    before: str | None
    after: str | None
    address: str | None
    request_id: str | None
    hash: str


class AuditFinding(Reply):
    """What is wrong with which record: `seq` is its number in the chain, `id` that of its row."""

    kind: Literal["changed", "deleted", "inserted", "backdated", "cut", "anchor", "head", "archive", "expired"]
    seq: int | None
    id: int | None
    what: str


class LostRecords(Reply):
    """A head that was anchored and that a restored backup does not have."""

    seq: int
    anchored_at: Instant


class AuditProof(Reply):
    """What one piece of the chain has shown; `next_cursor` is the next call's `cursor`, null at the chain's end.
    `records` is how many there are in all, `checked` how many this piece has; the anchors are those of its days.
    `unsealed` records are committed and not chained yet, which takes a second at most; counted in the last piece.
    Records up to `expired_seq` were not to be kept for longer than `expired_days`: what is proved begins behind it."""

    ok: bool
    records: int
    checked: int
    unsealed: int
    findings: list[AuditFinding]
    anchors: int
    signed_anchors: int
    anchored_seq: int | None
    anchored_at: Instant | None
    lost_by_restores: list[LostRecords]
    expired_seq: int | None
    expired_days: int | None
    next_cursor: str | None
