"""The worker protocol's routes. Bodies are JSON or msgpack; the answer comes in the form that was asked for."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

import tocsin
from tocsin.errors import BadRequest, InvalidInput, UpgradeRequired
from tocsin.node.server.http import Call, Handler
from tocsin.node.server.protocol import Reply
from tocsin.wire import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    PROTOCOL_HEADER,
    Claim,
    LogShipment,
    Notes,
    Register,
    Report,
    encode,
    encode_msgpack,
)

T = TypeVar("T")
ROUTES: list[tuple[str, str, str, Handler]] = []
_MSGPACK = "application/msgpack"
_PROTOCOL, _NEWEST = PROTOCOL_HEADER.lower(), str(PROTOCOL)


def _route(path: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def understood(call: Call) -> Reply:
            _refuse_other_protocols(call.request.headers.get(_PROTOCOL))
            return await handler(call)

        ROUTES.append(("POST", path, "worker.serve", understood))
        return understood

    return register


def _refuse_other_protocols(given: str | None) -> None:
    """Those that this server does not speak. Workers that name none are older than the header."""
    if given is None or given == _NEWEST:
        return
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        raise BadRequest(f"{PROTOCOL_HEADER} is a number, such as {PROTOCOL}", code="invalid_protocol")
    spoken = str(PROTOCOL) if OLDEST_PROTOCOL == PROTOCOL else f"{OLDEST_PROTOCOL} to {PROTOCOL}"
    told = f"the worker speaks protocol {int(given)}, and this server (Tocsin {tocsin.__version__}) {spoken}"
    headers = {"upgrade": f"tocsin-worker/{PROTOCOL}", "connection": "upgrade"}
    if int(given) < OLDEST_PROTOCOL:
        raise UpgradeRequired(f"{told}: upgrade the worker", code="protocol_too_old", headers=headers)
    if int(given) > PROTOCOL:
        text = f"{told}: upgrade the servers first, or start a worker of the servers' version"
        raise UpgradeRequired(text, code="protocol_too_new", headers=headers)


class _Decoder:
    """One type in both encodings."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._json = msgspec.json.Decoder(kind).decode
        self._msgpack = msgspec.msgpack.Decoder(kind).decode

    def __call__(self, call: Call) -> Any:
        packed = call.request.headers.get("content-type", "").startswith(_MSGPACK)
        try:
            return self._msgpack(call.body) if packed else self._told(call.body)
        except msgspec.ValidationError as error:
            if not packed and (mended := self._mended(call.body)) is not None:
                return mended
            raise InvalidInput(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not packed and (mended := self._mended(call.body)) is not None:
                return mended
            raise BadRequest(f"the body cannot be read: {error}", code="malformed_body") from None

    def _told(self, body: bytes) -> Any:
        found = self._json(body)
        try:
            encode_msgpack(found)  # whoever waits for a result, and the next attempt, is told so
        except OverflowError:
            return self._mended(body) or found
        return found

    def _mended(self, body: bytes) -> Any:
        """Characters that JSON forbids in a result or error, and integers that no worker can be told, are stored
        escaped: refusing them would loop for ever."""
        with contextlib.suppress(ValueError, RecursionError, msgspec.ValidationError):
            return msgspec.convert(_without_surrogates(json.loads(body, parse_int=_integer)), self._kind)
        return None


def _integer(digits: str) -> int | str:
    number = int(digits) if len(digits) <= 20 else 2**64
    return number if -(2**63) <= number < 2**64 else digits


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case list():
            return [_without_surrogates(v) for v in value]
        case dict():
            return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
        case _:
            return value


_register, _claim, _report, _logs = _Decoder(Register), _Decoder(Claim), _Decoder(Report), _Decoder(LogShipment)
_notes = _Decoder(Notes)


def _wants_msgpack(call: Call) -> bool:
    return call.request.headers.get("accept", "").startswith(_MSGPACK)


def _answer(call: Call, value: Any) -> Reply:
    if _wants_msgpack(call):
        return Reply(encode_msgpack(value), media_type=_MSGPACK)
    return Reply(encode(value))


@_route("/v1/worker/register")
async def register(call: Call) -> Reply:
    call.node.edge.register(call.who.key_id)
    return _answer(call, await call.node.gateway.register(call.who, _register(call)))


@_route("/v1/worker/{id}/claim")
async def claim(call: Call) -> Reply:
    gateway = call.node.gateway
    done = await gateway.claim(call.who, call.id(), _claim(call), call.request.gone, _wants_msgpack(call))
    if done is None:
        return Reply(status=499)
    try:
        return _answer(call, done)
    except OverflowError:  # an integer that was stored before such were refused
        return _answer(call, await gateway.without_untold(call.id(), done))


@_route("/v1/worker/{id}/report")
async def report(call: Call) -> Reply:
    return _answer(call, await call.node.gateway.report(call.who, call.id(), _report(call)))


@_route("/v1/worker/{id}/logs")
async def ship_logs(call: Call) -> Reply:
    shipment = _logs(call)
    await call.node.gateway.ship_logs(call.who, call.id(), shipment)
    call.node.tails.stored(shipment.chunks)
    return _answer(call, {"stored": True})


@_route("/v1/worker/{id}/notes")
async def note(call: Call) -> Reply:
    return _answer(call, await call.node.gateway.note(call.who, call.id(), _notes(call)))
