"""The ASGI application: routes, and what is not found or not allowed as problem documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tocsin.errors import ApiProblem, BadRequest, MethodNotAllowed, NotFound, NotSupported, ServerFault, Unavailable
from tocsin.node.server import routes, worker_routes
from tocsin.node.server.http import CLIENT_BODY_LIMIT, WORKER_BODY_LIMIT, answer, endpoint, problem
from tocsin.store.migrate import is_current
from tocsin.telemetry import REGISTRY

if TYPE_CHECKING:
    from tocsin.node.assemble import Node


def build(node: Node) -> Starlette:
    """The application of one node."""
    table = [
        Route(path, endpoint(node, permission, handler, limit), methods=[method])
        for group, limit in ((routes.ROUTES, CLIENT_BODY_LIMIT), (worker_routes.ROUTES, WORKER_BODY_LIMIT))
        for method, path, permission, handler in group
    ]
    return Starlette(
        routes=[*table, *_open_routes(node)],
        exception_handlers={HTTPException: _http_error, Exception: _fault},
    )


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

    async def not_yet(request: Request) -> Response:
        return problem(NotSupported(f"{request.url.path} is not supported yet"))

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        *(Route(path, not_yet) for path in ("/openapi.json", "/docs", "/")),
    ]


async def _http_error(_request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    kinds: dict[int, ApiProblem] = {404: NotFound("there is no such path"), 405: MethodNotAllowed()}
    return problem(kinds.get(status, BadRequest(str(error))))


async def _fault(_request: Request, _error: Exception) -> Response:
    return problem(ServerFault("this is our fault; it was logged"))
