"""The application: which endpoint a path means, and what is not found or not allowed as problem documents."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from urllib.parse import unquote

from prometheus_client import generate_latest

from tocsin.errors import ApiProblem, MethodNotAllowed, NotFound, NotSupported, Unavailable
from tocsin.node.server import docs_page, routes, worker_routes
from tocsin.node.server.http import CLIENT_BODY_LIMIT, WORKER_BODY_LIMIT, Call, Endpoint, answer, answered, endpoint
from tocsin.node.server.openapi import document
from tocsin.node.server.operations import OPERATIONS, choices
from tocsin.node.server.protocol import Reply, Request, Respond
from tocsin.store.migrate import schema_state
from tocsin.telemetry import REGISTRY
from tocsin.wire import encode

if TYPE_CHECKING:
    from tocsin.node.assemble import Node


def build(node: Node) -> Respond:
    """The application of one node."""
    places = Places()
    for method, path, permission, handler in routes.ROUTES:
        known = OPERATIONS.get((method, path))
        parameters = None if known is None else {name: choices(path, name) for name in known.query}
        places.add(method, path, endpoint(node, path, permission, handler, CLIENT_BODY_LIMIT, parameters))
    for method, path, permission, handler in worker_routes.ROUTES:
        places.add(method, path, endpoint(node, path, permission, handler, WORKER_BODY_LIMIT))
    for path, open_to_all in _open_routes(node).items():
        places.add("GET", path, open_to_all)
    places.add("GET", "/v1/payloads/{token}", _payload(node))
    places.add("GET", "/login", node.logins.begin)
    places.add("GET", "/login/callback", node.logins.finish)
    places.add("POST", "/logout", node.logins.end)
    places.add("POST", "/logout/everywhere", node.logins.end_all)

    edge = node.edge

    async def serve(request: Request) -> Reply:
        edge.admit(request)
        try:
            reply = edge.preflight(request) or await places.find(request)(request)
        except ApiProblem:
            edge.settle(request)
            raise
        edge.settle(request)
        return reply

    async def respond(request: Request) -> Reply:
        reply = await answered(node, serve, request)
        edge.share(request, reply)
        return reply

    return respond


class _Place:
    """What stands at one segment of a path, and below it."""

    def __init__(self) -> None:
        self.named: dict[str, _Place] = {}
        self.parameter: tuple[str, _Place] | None = None
        self.methods: dict[str, Endpoint] = {}


class Places:
    """Endpoints by path. A word that stands in a path goes before a parameter that would take it."""

    def __init__(self) -> None:
        self._root = _Place()

    def add(self, method: str, path: str, serve: Endpoint) -> None:
        """Put an endpoint at a path, whose parameters are written `{name}`."""
        place = self._root
        for word in path.split("/")[1:]:
            if word.startswith("{"):
                if place.parameter is None:
                    place.parameter = word[1:-1], _Place()
                name, place = place.parameter
                if name != word[1:-1]:
                    raise ValueError(f"{path}: another path has {{{name}}} where this one has {word}")
            else:
                place = place.named.setdefault(word, _Place())
        place.methods[method] = serve
        if method == "GET":
            place.methods["HEAD"] = serve

    def find(self, request: Request) -> Endpoint:
        """The endpoint of a request, whose parameters are filled in; raises 404 and 405."""
        place: _Place | None = self._root
        for word in request.path.split("/")[1:]:
            assert place is not None
            found = place.named.get(word)
            if found is None and place.parameter is not None:
                name, found = place.parameter
                request.params[name] = unquote(word) if "%" in word else word
                if "\0" in request.params[name]:
                    raise NotFound("there is no such path: the character U+0000 is found nowhere")
                # What has not as many is no mistaken id but a mistaken path, or a name.
                if word and name == "id" and len(word) != 36:
                    raise NotFound("there is no such path: an id has 36 characters")
                found = found if word else None
            place = found
            if place is None:
                break
        if place is None or not place.methods:
            raise NotFound("there is no such path")
        serve = place.methods.get(request.method)
        if serve is None:
            raise MethodNotAllowed(headers={"allow": ", ".join(sorted(place.methods))})
        return serve


def _payload(node: Node) -> Endpoint:
    """Arguments that lie in object storage, for whoever has a URL that is still good: it is a key by itself."""

    async def payload(request: Request) -> Reply:
        found = await node.payloads.fetch(request.params["token"], node.db.clock.now())
        return Reply(found, headers={"cache-control": "no-store"})

    return payload


def _open_routes(node: Node) -> dict[str, Endpoint]:
    async def healthz(_request: Request) -> Reply:
        return answer({"status": "ok"})

    async def readyz(_request: Request) -> Reply:
        match await schema_state(node.db):
            case "current":
                return answer({"status": "ready"})
            case "old":
                raise Unavailable("the schema is not current: run `tocsin migrate`", code="schema_old")
            case "new":
                raise Unavailable("the schema has left this release behind: install the newer one", code="schema_new")

    # They name pools and tell what all tenants do together: not for everybody.
    async def measured(_call: Call) -> Reply:
        return _measured()

    with_key = endpoint(node, "/metrics", "fleet.operate", measured, CLIENT_BODY_LIMIT)

    async def metrics(request: Request) -> Reply:
        return _measured() if node.edge.may_watch(request) else await with_key(request)

    async def openapi(_request: Request) -> Reply:
        return Reply(described()[0])

    async def docs(_request: Request) -> Reply:
        return Reply(described()[1], 200, docs_page.HEADERS, "text/html; charset=utf-8")

    async def not_yet(request: Request) -> Reply:
        raise NotSupported(f"{request.path} is not supported yet")

    return {
        "/healthz": healthz,
        "/readyz": readyz,
        "/metrics": metrics,
        "/openapi.json": openapi,
        "/docs": docs,
        "/": not_yet,
    }


def _measured() -> Reply:
    return Reply(generate_latest(REGISTRY), media_type="text/plain; version=0.0.4; charset=utf-8")


@functools.cache
def described() -> tuple[bytes, bytes]:
    """The OpenAPI document and its page; made when somebody first asks."""
    made = document([*routes.ROUTES, *worker_routes.ROUTES])
    return encode(made), docs_page.render(made)
