"""Routes that the contract names and nothing serves yet: they say so."""

from __future__ import annotations

from tocsin.errors import NotSupported
from tocsin.node.server.http import Call
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route


def _not_yet(method: str, path: str, permission: str) -> None:
    @route(method, path, permission)
    async def not_yet(call: Call) -> Reply:
        raise NotSupported(f"{method} {path} is not supported yet")


for _method, _path, _permission in (
    ("PUT", "/v1/channels/{name}", "jobs.write"),
    ("GET", "/v1/channels/{name}", "jobs.read"),
    ("DELETE", "/v1/channels/{name}", "jobs.write"),
):
    _not_yet(_method, _path, _permission)
