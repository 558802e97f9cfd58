"""What several routes have in common whose things go by a name, or are answered with their version."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tocsin.errors import BadRequest, InvalidInput, NotFound
from tocsin.flow.shared.idempotency import Replay
from tocsin.model.job import NAME
from tocsin.node.server.http import Call, answer
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import REPLAYED


def new_name(call: Call) -> str:
    """The name in the path, for what may have to be made."""
    name = call.request.params["name"]
    if not re.fullmatch(NAME, name):
        raise InvalidInput.field("name", "invalid", "a name has 1 to 128 of the characters a-z A-Z 0-9 . _ -")
    return name


def name_of(call: Call, what: str) -> str:
    """The name in the path, for what must be there; what is not a name does not exist."""
    name = call.request.params["name"]
    if not re.fullmatch(NAME, name):
        raise NotFound(f"there is no such {what}")
    return name


def name_before(query: Mapping[str, str]) -> str | None:
    """The last name of the page before (`cursor`)."""
    after = query.get("cursor")
    if after is not None and not re.fullmatch(NAME, after):
        raise BadRequest("this cursor is not one of ours", code="invalid_cursor")
    return after


def versioned(found: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    """A document with its version as `ETag`."""
    return answer(found, status, {"etag": f'"{found["version"]}"'} | (headers or {}))


async def deleted(step: Callable[[], Awaitable[None]]) -> Reply:
    """Nothing is left to answer."""
    try:
        await step()
    except Replay:
        return Reply(status=204, headers=REPLAYED)
    return Reply(status=204)
