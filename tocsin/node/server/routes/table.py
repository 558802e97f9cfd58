"""The table that every route stands in: method, path, the permission it needs, and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.shared.transitions import Controlled
from tocsin.model.access import PERMISSIONS
from tocsin.node.server.http import Call, Handler

ROUTES: list[tuple[str, str, str, Handler]] = []
REPLAYED = {"idempotent-replayed": "true"}


def route(method: str, path: str, permission: str) -> Callable[[Handler], Handler]:
    """Register a handler under the permission it needs; a route without a rule is none."""
    if permission not in PERMISSIONS:
        raise ValueError(f"{method} {path}: model/access has no permission {permission!r}")

    def register(handler: Handler) -> Handler:
        ROUTES.append((method, path, permission, handler))
        return handler

    return register


async def controlled(call: Call, step: Callable[[], Awaitable[Controlled]]) -> bool:
    """Take a control step and pass on what it woke and whom it stops; True if it was a replay."""
    try:
        done = await step()
    except Replay:
        return True
    call.node.tell(done.hints, done.stops)
    return False
