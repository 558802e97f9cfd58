"""Circuit breakers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tocsin.errors import InvalidInput
from tocsin.flow import circuits
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.circuit import CircuitPolicy
from tocsin.model.scalars import decode_scalar
from tocsin.node.server.http import Call, answer, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.named import name_before, name_of, new_name
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import Why

_policy = msgspec.json.Decoder(CircuitPolicy, dec_hook=decode_scalar).decode
_why = msgspec.json.Decoder(Why).decode


@route("GET", "/v1/circuits", "fleet.read")
async def list_circuits(call: Call) -> Reply:
    query = call.query("state", "limit", "cursor")
    limit, state, after = limit_of(query), query.get("state"), name_before(query)
    return answer(page(await circuits.list_circuits(call.node.db, call.who, state, after, limit + 1), limit, "name"))


@route("GET", "/v1/circuits/{name}", "fleet.read")
async def get_circuit(call: Call) -> Reply:
    return await _answer(call, name_of(call, "circuit"))


@route("PUT", "/v1/circuits/{name}", "jobs.write")
async def put_circuit(call: Call) -> Reply:
    name = new_name(call)
    policy = call.decode(_policy)
    for path, message in policy.wrong():
        raise InvalidInput.field(path, "invalid", message)
    return await _done(call, name, lambda: circuits.put(call.node.db, call.who, name, policy, call.wish))


@route("POST", "/v1/circuits/{name}/open", "jobs.operate")
async def open_circuit(call: Call) -> Reply:
    return await _switch(call, circuits.open_by_hand)


@route("POST", "/v1/circuits/{name}/close", "jobs.operate")
async def close_circuit(call: Call) -> Reply:
    return await _switch(call, circuits.close_by_hand)


async def _switch(call: Call, step: Callable[..., Awaitable[None]]) -> Reply:
    name, reason = name_of(call, "circuit"), call.decode(_why, b"{}").reason
    return await _done(call, name, lambda: step(call.node.db, call.who, name, reason, call.wish))


async def _done(call: Call, name: str, step: Callable[[], Awaitable[None]]) -> Reply:
    try:
        await step()
    except Replay:
        return await _answer(call, name, REPLAYED)
    return await _answer(call, name)


async def _answer(call: Call, name: str, headers: dict[str, str] | None = None) -> Reply:
    return answer(await circuits.get(call.node.db, call.who, name), headers=headers)
