"""Secrets, and the master keys that they are sealed with."""

from __future__ import annotations

import msgspec

from tocsin.errors import InvalidInput
from tocsin.flow import secrets
from tocsin.flow.shared.idempotency import Replay
from tocsin.node.server.http import Call, answer, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.named import deleted, name_before, name_of, new_name, versioned
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import NewSecret

_request = msgspec.json.Decoder(NewSecret).decode
_SHORTEST = 4  # a shorter value could not be masked in logs, for it would be found everywhere


@route("PUT", "/v1/secrets/{name}", "secrets.manage")
async def put_secret(call: Call) -> Reply:
    name = new_name(call)
    value = call.decode(_request).value
    if len(value.replace("\n", "").replace("\r", "")) < _SHORTEST:
        raise InvalidInput.field(
            "value", "invalid", f"has fewer than {_SHORTEST} characters that are not ends of lines"
        )
    try:
        done = await secrets.put(call.node.db, call.node.master_keys, call.who, name, value, call.wish, call.version)
    except Replay as first:
        return await _answer(call, name, first.status, REPLAYED)
    return await _answer(call, name, 201 if done.made else 200)


@route("GET", "/v1/secrets", "secrets.manage")
async def list_named_secrets(call: Call) -> Reply:
    query = call.query("limit", "cursor")
    limit, after = limit_of(query), name_before(query)
    return answer(page(await secrets.list_secrets(call.node.db, call.who, after, limit + 1), limit, "name"))


@route("GET", "/v1/secrets/{name}", "secrets.manage")
async def get_secret(call: Call) -> Reply:
    return await _answer(call, name_of(call, "secret"))


@route("DELETE", "/v1/secrets/{name}", "secrets.manage")
async def delete_secret(call: Call) -> Reply:
    name = name_of(call, "secret")
    return await deleted(lambda: secrets.delete(call.node.db, call.who, name, call.wish, call.version))


async def _answer(call: Call, name: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return versioned(await secrets.get(call.node.db, call.who, name), status, headers)


@route("GET", "/v1/master-keys", "tenants.manage")
async def list_master_keys(call: Call) -> Reply:
    return answer({"items": await secrets.usage(call.node.db, call.node.master_keys)})


@route("POST", "/v1/master-keys/rotate", "tenants.manage")
async def rotate_master_key(call: Call) -> Reply:
    done = await secrets.rotate(call.node.db, call.node.master_keys, call.who)
    left = await secrets.usage(call.node.db, call.node.master_keys)
    remaining = sum(key["secrets"] + key["data_keys"] for key in left if not key["seals"])
    return answer({"rewrapped": done, "remaining": remaining})
