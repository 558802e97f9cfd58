"""Pools: what waits in them, and by which order it goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from tocsin.flow import pools
from tocsin.flow.shared.idempotency import Replay
from tocsin.node.server.http import Call, answer, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.named import name_before, name_of, versioned
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import Why, decode_pool_patch

_why = msgspec.json.Decoder(Why).decode


@route("GET", "/v1/pools", "fleet.read")
async def list_pools(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit, after = limit_of(query), name_before(query)
    return answer(page(await call.node.pools.list(call.who, after, limit + 1), limit, "name"))


@route("GET", "/v1/pools/{name}", "fleet.read")
async def get_pool(call: Call) -> Reply:
    return await _answer(call)


@route("PATCH", "/v1/pools/{name}", "fleet.operate")
async def change_pool(call: Call) -> Reply:
    patch = call.decode(decode_pool_patch)
    return await _after(
        call, lambda: pools.change(call.node.db, call.who, name_of(call, "pool"), patch, call.wish, call.version)
    )


@route("POST", "/v1/pools/{name}/pause", "fleet.operate")
async def pause_pool(call: Call) -> Reply:
    return await _switch(call, "pause")


@route("POST", "/v1/pools/{name}/resume", "fleet.operate")
async def resume_pool(call: Call) -> Reply:
    return await _switch(call, "resume")


async def _switch(call: Call, verb: Literal["pause", "resume"]) -> Reply:
    reason = call.decode(_why, b"{}").reason
    return await _after(
        call, lambda: pools.switch(call.node.db, call.who, name_of(call, "pool"), verb, reason, call.wish, call.version)
    )


async def _after(call: Call, step: Callable[[], Awaitable[None]]) -> Reply:
    """Take a step, and answer the pool as it is now. Dispatchers look at their pools at every scan."""
    try:
        await step()
    except Replay:
        return await _answer(call, REPLAYED)
    call.node.dispatcher.rescan()
    return await _answer(call)


async def _answer(call: Call, headers: dict[str, str] | None = None) -> Reply:
    return versioned(await call.node.pools.get(call.who, name_of(call, "pool")), headers=headers)
