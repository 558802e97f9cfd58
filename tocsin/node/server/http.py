"""HTTP plumbing: one call's parts (who, body, wish), answers, and errors as problem documents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tocsin.errors import (
    ApiProblem,
    BadRequest,
    Forbidden,
    InvalidInput,
    NotFound,
    NotSupported,
    PreconditionFailed,
    ServerFault,
    TooManyRequests,
    Unauthorized,
    UnsupportedMedia,
)
from tocsin.flow import catalog, history
from tocsin.flow.shared.idempotency import Wish, digest, wish_of
from tocsin.flow.shared.windows import Listed
from tocsin.model.access import Identity, Kept, allowed, kept_by
from tocsin.model.ids import parse_id
from tocsin.model.scalars import Instant
from tocsin.model.strict import refuse_heavy, refuse_odd
from tocsin.node.server.protocol import ClientGone, Reply, Request, problem
from tocsin.store.db import kept_to
from tocsin.telemetry import WRITES, get_logger
from tocsin.wire import encode

if TYPE_CHECKING:
    from tocsin.flow.catalog import Estimates
    from tocsin.node.assemble import Node

log = get_logger("server")
T = TypeVar("T")
Handler = Callable[["Call"], Awaitable[Reply]]
Endpoint = Callable[[Request], Awaitable[Reply]]

CLIENT_BODY_LIMIT = 8 * 1024 * 1024
WORKER_BODY_LIMIT = 64 * 1024 * 1024
# Before somebody hears that he came too often. He was told to stay away for a second at least; who asks again at once,
# over and over, is slowed down by his own connections, and what he costs the others with him.
_HELD_SECONDS = 0.25
_SLOW_SECONDS = 1.0  # an acknowledgement that takes longer is not what was promised
_MOST_TEXT = 300  # of what an error says, for a caller's own words may be in it
_MOST_VALUE = 1024  # characters of a query parameter
_SAFE = frozenset(("GET", "HEAD"))
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`")
# Fields that the contract names and nothing here acts on yet.
_PLANNED_FIELDS = {"same_version"}
_PATH = re.compile(r" - at `\$?(?P<path>[^`]*)`$")


@dataclass(slots=True)
class Call:
    """One request, with what every handler needs of it."""

    node: Node
    request: Request
    who: Identity
    body: bytes

    @property
    def wish(self) -> Wish | None:
        """The caller's `Idempotency-Key`, if it gave one."""
        key = self.request.headers.get("idempotency-key")
        if key is None:
            return None
        if not 1 <= len(key) <= 255 or not key.isascii() or not key.isprintable():
            raise InvalidInput("an Idempotency-Key has 1 to 255 visible ASCII characters", code="idempotency_key")
        asked = digest(self.request.method, self.request.path, self.body)
        return wish_of(self.who.tenant_id, key, asked, self.node.wish_keys)

    @property
    def version(self) -> int | None:
        """The version the caller has seen (`If-Match`), if it says so."""
        text = self.request.headers.get("if-match")
        if text is None or text == "*":
            return None
        number = text.strip('"')
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise PreconditionFailed('If-Match takes the ETag of a job, such as "3"')
        return int(number)

    @property
    def estimates(self) -> Estimates:
        """When runs of the caller will start, for documents of jobs."""
        pools, tenant_id, now = self.node.pools, self.who.tenant_id, self.node.db.clock.now()

        def estimate(pool: str, due: datetime) -> datetime | None:
            found = pools.start_of(tenant_id, pool, due, now)
            return found and found.at

        return estimate

    async def check_welcome(self) -> None:
        """Raise if the caller's key has ended: an answer that comes page by page outlives the look at it that the call
        began with."""
        if not await self.node.authenticator.living({self.who.key_id}):
            raise Unauthorized("this key or token is not good any more")

    def id(self, name: str = "id") -> str:
        """An id from the path; what is not one does not exist."""
        found = parse_id(self.request.params[name])
        if found is None:
            raise NotFound("there is nothing with this id")
        return found

    async def in_scope(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of these records of runs that are of jobs of the caller's scope: not all come from the database, which
        would have seen to it."""
        if self.who.scope is None or not items:
            return items
        seen = await catalog.visible(self.node.db, self.who, {item["job_id"] for item in items})
        return [item for item in items if item["job_id"] in seen]

    def decode(self, decoder: Callable[[bytes], T], empty: bytes | None = None) -> T:
        """The JSON body as a type. `empty`: what an absent body means."""
        if not self.body and empty is not None:
            return decode_json(decoder, empty)
        kind = self.request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind not in ("application/json", "application/merge-patch+json"):
            raise UnsupportedMedia("send application/json")
        return decode_json(decoder, self.body)

    def query(self, *names: str) -> dict[str, str]:
        """Query parameters; one that the route does not know is refused, never ignored."""
        check_query(self.request, names)
        return {k: v for k, v in self.request.query if v != ""}


def decode_json(decoder: Callable[[bytes], T], body: bytes) -> T:
    """Decode strictly, and say what is wrong where."""
    refuse_heavy(body)
    try:
        found = decoder(body)
        refuse_odd(body)
        return found
    except msgspec.ValidationError as error:
        wrong = error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="malformed_json") from None
    _refuse_broken(body)
    raise _invalid(str(wrong))


def _refuse_broken(body: bytes) -> None:
    """What has a wrong field may be no JSON behind it, or odd; that comes first."""
    try:
        msgspec.json.decode(body)
        refuse_odd(body)
    except msgspec.ValidationError:
        return  # a number out of range, which the wrong field may be
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="malformed_json") from None


def _invalid(message: str) -> ApiProblem:
    found = _PATH.search(message)
    path = found.group("path").lstrip(".")[:_MOST_TEXT] if found else ""
    text = _PATH.sub("", message)[:_MOST_TEXT]
    unknown = _UNKNOWN_FIELD.search(text)
    if unknown is not None and unknown["name"] in _PLANNED_FIELDS:
        path = ".".join(filter(None, (path, unknown["name"])))
        return NotSupported(
            f"{path}: not supported yet",
            errors=[{"path": path, "code": "not_supported", "message": "not supported yet"}],
        )
    return InvalidInput(f"{path or 'body'}: {text}", errors=[{"path": path, "code": "invalid", "message": text}])


def check_query(request: Request, names: Collection[str]) -> None:
    """Refuse parameters that are not among `names`, stand twice, or hold what no text in the database does."""
    given = request.query
    for name, value in given:
        if name not in names:
            raise BadRequest(f"unknown query parameter {name[:64]!r}", code="unknown_parameter")
        if "\0" in value:
            raise BadRequest("the character U+0000 is found nowhere", code="nul_character")
        if len(value) > _MOST_VALUE:
            raise BadRequest(f"{name}: has more than {_MOST_VALUE} characters", code="long_parameter")
    if len(given) > len({name for name, _ in given}):
        raise BadRequest("a query parameter stands twice", code="duplicate_parameter")


def _check_choices(request: Request, parameters: Mapping[str, Collection[str]]) -> None:
    """Refuse values that a parameter does not accept. They would match nothing, and the caller would trust the empty
    list."""
    for name, value in request.query:
        if value and parameters[name] and value not in parameters[name]:
            raise InvalidInput.field(name, "invalid", f"must be one of {', '.join(parameters[name])}")


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """A JSON answer."""
    return Reply(encode(value), status, headers)


def page(items: list[dict[str, Any]], limit: int, key: str = "id") -> dict[str, Any]:
    """A list's answer; one row more than `limit` was asked for, and tells whether there is a next page."""
    more = len(items) > limit
    return {"items": items[:limit], "next_cursor": str(items[limit - 1][key]) if more else None}


def listed(found: Listed, limit: int) -> dict[str, Any]:
    """Return the answer of a list that may end a page early. Such a page has a cursor, too."""
    shown = page(found.items, limit)
    return shown | {"next_cursor": shown["next_cursor"] or found.rest}


def limit_of(query: dict[str, str]) -> int:
    """1 to 500, 50 unless given."""
    text = query.get("limit", "50")
    if not text.isascii() or not text.isdigit() or len(text) > 3 or not 1 <= int(text) <= 500:
        raise BadRequest("limit is a number from 1 to 500", code="invalid_limit")
    return int(text)


def cursor_of(query: dict[str, str]) -> str | None:
    """Where the last page ended."""
    if "cursor" not in query:
        return None
    found = parse_id(query["cursor"])
    if found is None:
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    return found


def instant_of(query: dict[str, str], name: str) -> datetime | None:
    """A time from the query."""
    if name not in query:
        return None
    try:
        return Instant.parse(query[name].replace(" ", "+")).at
    except ValueError as error:
        raise BadRequest(f"{name}: {error}", code="invalid_time") from None


def number_of(query: dict[str, str], name: str) -> int | None:
    """A count from the query."""
    text = query.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadRequest(f"{name} is a number", code="invalid_number")
    return int(text)


def id_of(query: dict[str, str], name: str) -> str | None:
    """An id from the query."""
    if name not in query:
        return None
    found = parse_id(query[name])
    if found is None:
        raise BadRequest(f"{name} is not an id", code="invalid_id")
    return found


def tag_of(query: dict[str, str]) -> dict[str, str] | None:
    """`tag=key:value`."""
    if "tag" not in query:
        return None
    key, colon, value = query["tag"].partition(":")
    if not colon:
        raise BadRequest("tag is written key:value", code="invalid_tag")
    return {key: value}


async def read_body(request: Request, most: int) -> bytes:
    """The whole body, as it is."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("send the body without content-encoding")
    return await request.body(most)


def endpoint(
    node: Node,
    path: str,
    permission: str,
    handler: Handler,
    body_limit: int,
    parameters: Mapping[str, Collection[str]] | None = None,
) -> Endpoint:
    """Wrap a handler: authenticate, authorise, read the body.

    `parameters`: the known query parameters. Each has the values that it accepts, or None if the handler checks them.
    """
    kept = kept_by(path)

    async def serve(request: Request) -> Reply:
        who = await node.authenticator.identify(request)
        if permission == "worker.serve" and who.role == "worker":
            request.of_worker = True
            return await serve_limited(request, who)
        told = node.edge.count(who.key_id)
        try:
            reply = await serve_limited(request, who)
        except ApiProblem as error:
            error.headers = told | error.headers
            raise
        reply.headers = told if reply.headers is None else reply.headers | told
        return reply

    async def serve_limited(request: Request, who: Identity) -> Reply:
        if not allowed(who.role, permission):
            raise Forbidden(f"a key with role {who.role} may not do this")
        if parameters is not None and request.query_string:
            check_query(request, parameters)
            _check_choices(request, parameters)
        if who.scope is None:
            return await serve_known(request, who)
        with kept_to(who.scope):
            await _keep(node, request, who, kept)
            return await serve_known(request, who)

    async def serve_known(request: Request, who: Identity) -> Reply:
        if request.method in _SAFE or permission == "worker.serve":  # neither leaves a record in the audit
            return await handler(Call(node, request, who, await read_body(request, body_limit)))
        if who.suspended and who.role != "platform":
            raise Forbidden("the tenant is suspended: its keys only read", code="tenant_suspended")
        name = request_id(request)
        who = who._replace(address=node.edge.address(request), request_id=name)
        call = Call(node, request, who, await read_body(request, body_limit))
        with _counted():
            reply = await handler(call)
        reply.headers = {"x-request-id": name} | (reply.headers or {})
        return reply

    return serve


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count a call that changes something by how it was answered."""
    began = time.monotonic()

    def count(*, failed: bool) -> None:
        slow = time.monotonic() - began >= _SLOW_SECONDS
        WRITES.labels("failed" if failed else "slow" if slow else "in_time").inc()

    try:
        yield
    except ClientGone:
        raise  # nobody waits for an answer
    except Exception as error:
        count(failed=not isinstance(error, ApiProblem) or error.status >= 500)
        raise
    count(failed=False)


async def _keep(node: Node, request: Request, who: Identity, kept: Kept | None) -> None:
    """Refuse what a key with a scope asks for beyond it: one more look, which other keys do not pay for."""
    if kept is None:
        raise Forbidden("this key is kept to some jobs, and this is not about one", code="out_of_scope")
    named = parse_id(request.params.get("id", "")) if kept in ("job", "run") else None
    if named is None:
        return
    if kept == "run":
        job_id = (await history.get_run(node.db, who, named, node.parquet))["job_id"]
        if not await catalog.visible(node.db, who, [job_id]):
            raise NotFound("there is no such run")
    elif not await catalog.visible(node.db, who, [named]):
        raise NotFound("there is no such job")


def request_id(request: Request) -> str:
    """What the caller, or a proxy before us, names this call by; else a name of our own."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(12).hex()


async def answered(node: Node, serve: Endpoint, request: Request) -> Reply:
    """The reply of an endpoint, errors as problem documents."""
    too_often = False
    try:
        reply = await serve(request)
    except ApiProblem as error:
        reply = problem(error)
        too_often = isinstance(error, TooManyRequests)
        # Who raises an exception that stands in a variable of his ties it to his own frame, and the call with all that
        # it brought waits for the collector of garbage. At a thousand refusals a second others notice the pause.
        error.__traceback__ = None
    except (asyncio.CancelledError, ClientGone):
        raise
    except Exception as error:
        log.error("request failed", path=request.path, error=repr(error), exc_info=error)
        reply = problem(ServerFault("this is our fault; it was logged"))
    if too_often:
        await asyncio.sleep(_HELD_SECONDS)
    await node.db.failpoints.hit("server.before_reply")
    return reply
