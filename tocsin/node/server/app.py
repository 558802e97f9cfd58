"""The ASGI application: routes, and what is not found or not allowed as problem documents."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tocsin.errors import ApiProblem, BadRequest, MethodNotAllowed, NotFound, NotSupported, ServerFault, Unavailable
from tocsin.node.server import docs_page, routes, worker_routes
from tocsin.node.server.http import CLIENT_BODY_LIMIT, WORKER_BODY_LIMIT, answer, endpoint, problem
from tocsin.node.server.openapi import OPERATIONS, document
from tocsin.store.migrate import is_current
from tocsin.telemetry import REGISTRY
from tocsin.wire import encode

if TYPE_CHECKING:
    from tocsin.node.assemble import Node


class _Of36(StringConvertor):
    """An id has 36 characters, so that `/v1/jobs/batch` is not taken for `/v1/jobs/{id}` by a method it lacks."""

    regex = "[^/]{36}"


register_url_convertor("of36", _Of36())
Endpoint = Callable[[Request], Awaitable[Response]]


def build(node: Node) -> Starlette:
    """The application of one node."""
    table: dict[str, dict[str, Endpoint]] = {}
    for method, path, permission, handler in routes.ROUTES:
        known = OPERATIONS.get((method, path))
        table.setdefault(path, {})[method] = endpoint(
            node, permission, handler, CLIENT_BODY_LIMIT, None if known is None else known.query
        )
    for method, path, permission, handler in worker_routes.ROUTES:
        table.setdefault(path, {})[method] = endpoint(node, permission, handler, WORKER_BODY_LIMIT)
    app = Starlette(
        routes=[*(_route(path, methods) for path, methods in table.items()), *_open_routes(node)],
        exception_handlers={HTTPException: _http_error, Exception: _fault},
    )
    app.router.redirect_slashes = False
    return app


def _route(path: str, methods: dict[str, Endpoint]) -> Route:
    """One route for all methods of a path, so that a 405 names them all."""
    if "GET" in methods:
        methods["HEAD"] = methods["GET"]

    async def serve(request: Request) -> Response:
        return await methods[request.method](request)

    return Route(path.replace("{id}", "{id:of36}"), serve, methods=list(methods))


def _open_routes(node: Node) -> list[Route]:
    async def healthz(_request: Request) -> Response:
        return answer({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        try:
            if await is_current(node.db):
                return answer({"status": "ready"})
            return problem(Unavailable("the schema is not current: run `tocsin migrate`", code="schema_old"))
        except ApiProblem as error:
            return problem(error)

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(REGISTRY), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(_request: Request) -> Response:
        return Response(described()[0], media_type="application/json")

    async def docs(_request: Request) -> Response:
        return Response(described()[1], 200, docs_page.HEADERS, "text/html")

    async def not_yet(request: Request) -> Response:
        return problem(NotSupported(f"{request.url.path} is not supported yet"))

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
        Route("/", not_yet),
    ]


@functools.cache
def described() -> tuple[bytes, bytes]:
    """The OpenAPI document and its page; made when somebody first asks."""
    made = document([*routes.ROUTES, *worker_routes.ROUTES])
    return encode(made), docs_page.render(made)


async def _http_error(_request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    kinds: dict[int, ApiProblem] = {404: NotFound("there is no such path"), 405: MethodNotAllowed()}
    found = kinds.get(status, BadRequest(str(error)))
    found.headers.update({name.lower(): value for name, value in (getattr(error, "headers", None) or {}).items()})
    return problem(found)


async def _fault(_request: Request, _error: Exception) -> Response:
    return problem(ServerFault("this is our fault; it was logged"))
