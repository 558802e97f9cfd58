"""What the API answers about logs, as types."""

from __future__ import annotations

from typing import Any, Literal

from tocsin.model.scalars import Instant
from tocsin.node.server.replies import Page, Reply


class LogText(Reply):
    """A line; `seq` counts from 1 within the attempt, and is 0 where the server itself says that lines may be missing.
    `logger` and `fields` are those of the SDK's `ctx.log`."""

    seq: int
    ts: Instant
    stream: str
    level: str
    text: str
    logger: str | None
    fields: dict[str, Any] | None


class Logs(Reply):
    """Lines, oldest first; `next_after` is the next call's `after`, null if there are no more now."""

    items: list[LogText]
    next_after: int | None


class TailedLine(LogText):
    """A line as it comes, with its attempt."""

    attempt: int


class FoundLine(LogText):
    """A line that was looked for, and whose it is."""

    run_id: str
    job_id: str
    attempt: int


class FoundLines(Page[FoundLine]):
    """Lines that were looked for; `incomplete`: object storage has lost some that this page was to look at."""

    incomplete: bool


class LogsStored(Reply):
    stored: Literal[True]
