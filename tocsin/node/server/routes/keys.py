"""Keys: made, shown once, rotated, revoked."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from tocsin.flow import keys
from tocsin.flow.shared.idempotency import Replay
from tocsin.node.server.http import Call, answer, cursor_of, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import decode_new_key, decode_rotation


@route("POST", "/v1/keys", "keys.manage")
async def create_key(call: Call) -> Reply:
    body = call.decode(decode_new_key)
    return await _shown_once(call, keys.create_key(call.node.db, call.node.key_hashes, call.who, body, call.wish))


@route("POST", "/v1/keys/{id}/rotate", "keys.manage")
async def rotate_key(call: Call) -> Reply:
    body = call.decode(decode_rotation, b"{}")
    node = call.node
    reply = await _shown_once(call, keys.rotate_key(node.db, node.key_hashes, call.who, call.id(), body, call.wish))
    node.end_keys([call.id()])  # without overlap it has
    return reply


async def _shown_once(call: Call, made: Awaitable[dict[str, Any]]) -> Reply:
    """A new key. Only its hash is kept: one whose answer was lost cannot be shown again, but no second one is made."""
    try:
        return answer(await made, 201)
    except Replay as first:
        shown = await keys.get_key(call.node.db, call.who, first.ids[0])
        return answer(shown | {"tenant": call.who.tenant, "key": None}, 201, REPLAYED)


@route("GET", "/v1/keys", "keys.manage")
async def list_keys(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit = limit_of(query)
    return answer(page(await keys.list_keys(call.node.db, call.who, cursor_of(query), limit + 1), limit))


@route("GET", "/v1/keys/{id}", "keys.manage")
async def get_key(call: Call) -> Reply:
    return answer(await keys.get_key(call.node.db, call.who, call.id()))


@route("DELETE", "/v1/keys/{id}", "keys.manage")
async def revoke_key(call: Call) -> Reply:
    await keys.revoke_key(call.node.db, call.who, call.id())
    call.node.end_keys([call.id()])
    return Reply(status=204)
