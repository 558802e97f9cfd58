"""The audit: who did what, and whether anybody has touched what it says."""

from __future__ import annotations

from tocsin.clock import iso
from tocsin.errors import BadRequest
from tocsin.flow import trail
from tocsin.node.server.http import Call, answer, instant_of, limit_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route


@route("GET", "/v1/audit", "audit.read")
async def list_audit(call: Call) -> Reply:
    query = call.query("actor", "action", "target", "from", "to", "limit", "cursor")
    wanted = trail.Filter(
        query.get("actor"),
        query.get("action"),
        query.get("target"),
        instant_of(query, "from"),
        instant_of(query, "to"),
    )
    before = query.get("cursor")
    if before is not None and not (before.isascii() and before.isdigit() and len(before) <= 18):
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    node, top = call.node, None if before is None else int(before)
    page = await trail.list_records(node.db, node.parquet, call.who, wanted, top, limit_of(query))
    return answer({"items": page.records, "next_cursor": None if page.next is None else str(page.next)})


@route("GET", "/v1/audit/verify", "audit.read")
async def verify_audit(call: Call) -> Reply:
    given = call.query("cursor").get("cursor")
    mark = trail.Mark() if given is None else trail.Mark.parse(given)
    if mark is None:
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    node = call.node
    proof = await trail.verify(node.db, node.objects, node.parquet, node.master_keys, call.who, mark)
    anchored = proof.anchored
    return answer(
        {
            "ok": not proof.findings,
            "records": proof.records,
            "checked": proof.checked,
            "unsealed": proof.unsealed,
            "findings": [finding._asdict() for finding in proof.findings],
            "anchors": proof.anchors,
            "signed_anchors": proof.signed,
            "anchored_seq": anchored and anchored.seq,
            "anchored_at": anchored and iso(anchored.at),
            "lost_by_restores": [{"seq": one.seq, "anchored_at": iso(one.at)} for one in proof.lost],
            "expired_seq": proof.expired or None,
            "next_cursor": None if proof.next is None else str(proof.next),
        }
    )
