"""Circuit breakers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import get_args

import msgspec

from tocsin.errors import BadRequest, InvalidInput, NotFound
from tocsin.flow import circuits
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.circuit import CircuitPolicy, State
from tocsin.model.job import NAME
from tocsin.model.scalars import decode_scalar
from tocsin.node.server.http import Call, answer, limit_of, page
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED, route
from tocsin.wire import Why

_policy = msgspec.json.Decoder(CircuitPolicy, dec_hook=decode_scalar).decode
_why = msgspec.json.Decoder(Why).decode


@route("GET", "/v1/circuits", "fleet.read")
async def list_circuits(call: Call) -> Reply:
    query = call.query("state", "limit", "cursor")
    limit, state, after = limit_of(query), query.get("state"), query.get("cursor")
    if state not in (None, *get_args(State)):
        raise BadRequest(f"state is one of {', '.join(get_args(State))}", code="invalid_state")
    if after is not None and not re.fullmatch(NAME, after):
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    return answer(page(await circuits.list_circuits(call.node.db, call.who, state, after, limit + 1), limit, "name"))


@route("GET", "/v1/circuits/{name}", "fleet.read")
async def get_circuit(call: Call) -> Reply:
    return await _answer(call, _name(call))


@route("PUT", "/v1/circuits/{name}", "jobs.write")
async def put_circuit(call: Call) -> Reply:
    name = call.request.params["name"]
    if not re.fullmatch(NAME, name):
        raise InvalidInput.field("name", "invalid", "a name has 1 to 128 of the characters a-z A-Z 0-9 . _ -")
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
    name, reason = _name(call), call.decode(_why, b"{}").reason
    return await _done(call, name, lambda: step(call.node.db, call.who, name, reason, call.wish))


async def _done(call: Call, name: str, step: Callable[[], Awaitable[None]]) -> Reply:
    try:
        await step()
    except Replay:
        return await _answer(call, name, REPLAYED)
    return await _answer(call, name)


def _name(call: Call) -> str:
    """A name from the path; what is not one does not exist."""
    name = call.request.params["name"]
    if not re.fullmatch(NAME, name):
        raise NotFound("there is no such circuit")
    return name


async def _answer(call: Call, name: str, headers: dict[str, str] | None = None) -> Reply:
    return answer(await circuits.get(call.node.db, call.who, name), headers=headers)
