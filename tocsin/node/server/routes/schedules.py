"""Schedules before a job has them."""

from __future__ import annotations

import msgspec

from tocsin.flow.preview import preview_schedule
from tocsin.model.scalars import Instant, decode_scalar
from tocsin.node.server.http import Call, answer
from tocsin.node.server.protocol import Reply
from tocsin.node.server.routes.table import route
from tocsin.wire import PreviewRequest

_request = msgspec.json.Decoder(PreviewRequest, dec_hook=decode_scalar).decode


@route("POST", "/v1/schedules/preview", "jobs.read")
async def preview(call: Call) -> Reply:
    body = call.decode(_request)
    after = None if body.after is None else body.after.at
    run = call.node.aside.run
    found = await preview_schedule(call.node.db, call.who, body.schedule, after, body.count, body.name, run)
    return answer(found._asdict() | {"runs": [Instant(run) for run in found.runs]})
