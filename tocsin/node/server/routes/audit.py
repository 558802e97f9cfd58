"""The audit: who did what, and whether anybody has touched what it says."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from tocsin.clock import iso
from tocsin.errors import BadRequest
from tocsin.flow import trail
from tocsin.model.tables import as_csv
from tocsin.node.server.audit_replies import AuditRecord
from tocsin.node.server.http import Call, answer, instant_of, limit_of
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route
from tocsin.wire import encode

_FILTERS = ("actor", "action", "target", "from", "to")
_PAGE = 500


@route("GET", "/v1/audit", "audit.read")
async def list_audit(call: Call) -> Reply:
    query = call.query(*_FILTERS, "limit", "cursor")
    before = query.get("cursor")
    if before is not None and not (before.isascii() and before.isdigit() and len(before) <= 18):
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    node, top = call.node, None if before is None else int(before)
    page = await trail.list_records(node.db, node.parquet, call.who, _wanted(query), top, limit_of(query))
    return answer({"items": page.records, "next_cursor": None if page.next is None else str(page.next)})


@route("GET", "/v1/audit/export", "audit.read")
async def export_audit(call: Call) -> Reply:
    query = call.query(*_FILTERS, "format")
    kind = query.get("format", "ndjson")
    wanted = _wanted(query)
    first = await trail.list_records(call.node.db, call.node.parquet, call.who, wanted, None, _PAGE)
    return Reply(
        headers={"content-disposition": f'attachment; filename="audit.{kind}"', "x-content-type-options": "nosniff"},
        media_type="text/csv; charset=utf-8" if kind == "csv" else "application/x-ndjson",
        stream=_csv(call, wanted, first) if kind == "csv" else _ndjson(call, wanted, first),
    )


async def _ndjson(call: Call, wanted: trail.Filter, first: trail.Page) -> AsyncGenerator[bytes, None]:
    async for records in _pages(call, wanted, first):
        yield b"".join(encode(record) + b"\n" for record in records)


async def _csv(call: Call, wanted: trail.Filter, first: trail.Page) -> AsyncGenerator[bytes, None]:
    yield as_csv(AuditRecord.__struct_fields__, ()).encode()
    async for records in _pages(call, wanted, first):
        told = (record | {"detail": record["detail"] and encode(record["detail"]).decode()} for record in records)
        yield as_csv(AuditRecord.__struct_fields__, told, header=False).encode()


async def _pages(call: Call, wanted: trail.Filter, page: trail.Page) -> AsyncGenerator[list[dict[str, Any]], None]:
    """The records of this page and of those behind it; the next is read when the last has been taken."""
    node = call.node
    while True:
        if page.records:
            yield page.records
        if page.next is None:
            return
        await call.check_welcome()
        page = await trail.list_records(node.db, node.parquet, call.who, wanted, page.next, _PAGE)


def _wanted(query: dict[str, str]) -> trail.Filter:
    times = instant_of(query, "from"), instant_of(query, "to")
    return trail.Filter(query.get("actor"), query.get("action"), query.get("target"), *times)


@route("GET", "/v1/audit/verify", "audit.read")
async def verify_audit(call: Call) -> Reply:
    given = call.query("cursor").get("cursor")
    mark = trail.Mark() if given is None else trail.Mark.parse(given)
    if mark is None:
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    node = call.node
    days, written = node.settings.audit_days, node.anchor_series.last
    proof = await trail.verify(node.db, node.objects, node.parquet, node.master_keys, call.who, mark, days, written)
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
            "expired_days": proof.expired_days,
            "next_cursor": None if proof.next is None else str(proof.next),
        }
    )
