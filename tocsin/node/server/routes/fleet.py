"""Workers and tenants."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tocsin.errors import NotFound
from tocsin.flow import erase, fleet, tenants, usage
from tocsin.flow.shared.idempotency import Replay
from tocsin.node.server.http import Call, answer, cursor_of, limit_of, number_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import Confirmation, NewTenant, TenantPatch, Why

_new_tenant = msgspec.json.Decoder(NewTenant).decode
_tenant_patch = msgspec.json.Decoder(TenantPatch).decode
_confirmation = msgspec.json.Decoder(Confirmation).decode
_why = msgspec.json.Decoder(Why).decode


@route("GET", "/v1/workers", "fleet.read")
async def list_workers(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    return answer(page(await fleet.list_workers(call.node.db, call.who, cursor_of(query), limit + 1), limit))


@route("GET", "/v1/workers/{id}", "fleet.read")
async def get_worker(call: Call) -> Reply:
    return answer(await fleet.get_worker(call.node.db, call.who, call.id()))


@route("POST", "/v1/workers/{id}/drain", "fleet.operate")
async def drain_worker(call: Call) -> Reply:
    await fleet.drain(call.node.db, call.who, call.id())
    call.node.drain([call.id()])
    return answer(await fleet.get_worker(call.node.db, call.who, call.id()))


@route("POST", "/v1/tenants", "tenants.manage")
async def create_tenant(call: Call) -> Reply:
    body = call.decode(_new_tenant)
    try:
        return answer(await tenants.create_tenant(call.node.db, call.who, body, call.wish), 201)
    except Replay:
        return answer(await tenants.get_tenant(call.node.db, body.slug), 201, REPLAYED)


@route("GET", "/v1/tenants", "tenants.manage")
async def list_tenants(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    items = await tenants.list_tenants(call.node.db, number_of(query, "cursor"), limit + 1)
    return answer(page(items, limit))


@route("GET", "/v1/tenants/{slug}", "fleet.read")
async def get_tenant(call: Call) -> Reply:
    return await _tenant(call)


@route("PATCH", "/v1/tenants/{slug}", "tenant.change")
async def change_tenant(call: Call) -> Reply:
    patch, slug = call.decode(_tenant_patch), _seen_slug(call)
    settings = call.node.settings
    usual = {"runs_days": settings.runs_days, "logs_days": settings.logs_days}
    try:
        await tenants.change_tenant(call.node.db, call.who, slug, patch, usual, call.wish)
    except Replay:
        return await _tenant(call, REPLAYED)
    return await _tenant(call)


@route("DELETE", "/v1/tenants/{slug}", "tenants.manage")
async def erase_tenant(call: Call) -> Reply:
    confirm = call.decode(_confirmation).confirm
    try:
        await erase.ask(call.node.db, call.who, _slug(call), confirm, call.wish)
    except Replay:
        return await _tenant(call, REPLAYED, status=202)
    call.node.eraser.wake()
    return await _tenant(call, status=202)


@route("POST", "/v1/tenants/{slug}/suspend", "tenants.manage")
async def suspend_tenant(call: Call) -> Reply:
    return await _switch(call, "suspend")


@route("POST", "/v1/tenants/{slug}/resume", "tenants.manage")
async def resume_tenant(call: Call) -> Reply:
    return await _switch(call, "resume")


async def _switch(call: Call, verb: Literal["suspend", "resume"]) -> Reply:
    reason = call.decode(_why, b"{}").reason
    try:
        await tenants.switch(call.node.db, call.who, _slug(call), verb, reason, call.wish)
    except Replay:
        return await _tenant(call, REPLAYED)
    call.node.dispatcher.rescan()
    return await _tenant(call)


@route("GET", "/v1/tenants/{slug}/usage", "usage.read")
async def get_usage(call: Call) -> Reply:
    return answer(await usage.told(call.node.db, await _document(call)))


async def _tenant(call: Call, headers: dict[str, str] | None = None, status: int = 200) -> Reply:
    """A tenant and what it uses."""
    found = await _document(call)
    return answer(found | {"usage": await usage.at_present(call.node.db, found["id"])}, status, headers)


async def _document(call: Call) -> dict[str, Any]:
    return await tenants.get_tenant(call.node.db, _seen_slug(call))


def _seen_slug(call: Call) -> str:
    """A tenant's; anybody but the platform sees its own only."""
    slug = _slug(call)
    if call.who.role != "platform" and slug != call.who.tenant:
        raise NotFound("there is no such tenant")
    return slug


def _slug(call: Call) -> str:
    return call.request.params["slug"]
