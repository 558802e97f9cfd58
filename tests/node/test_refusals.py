"""A refusal leaves nothing behind that only the collector of garbage would find."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from tests.conftest import Api
from tocsin.errors import Conflict
from tocsin.node.server.http import answered
from tocsin.node.server.protocol import Reply, Request


class Brought:
    """What a call brought with it."""


async def test_what_a_refused_call_brought_goes_with_it(still_api: Api) -> None:
    seen: list[Any] = []

    async def refuse(request: Request) -> Reply:
        brought = Brought()
        seen.append(weakref.ref(brought))
        problem = Conflict("no")  # tied to this frame by its traceback, and the frame to it
        raise problem

    gc.disable()
    try:
        reply = await answered(still_api.node, refuse, Request("GET", "/", b"", {}, body=b""))
        assert reply.status == 409
        assert seen[0]() is None
    finally:
        gc.enable()
