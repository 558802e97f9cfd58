"""A call in the runner: what it needs to start, its result as it goes to the agent, and its output."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from tocsin.client.app import Function
from tocsin.client.context import Context, Host
from tocsin.client.failures import BadArguments, meaning
from tocsin.model.loglines import clean
from tocsin.model.packed import MOST_RESULT
from tocsin.worker.frames import Call, CallTarget, Done
from tocsin.worker.lines import OutputLimit

MESSAGE_CHARS = 4096
_OURS = os.path.dirname(__file__)  # frames of the runner itself say nothing to a job's owner

_to_msgpack = msgspec.msgpack.Encoder().encode


class Run:
    """One call in hand. `asked_to_stop` is the outcome it then has, whatever the function makes of it."""

    __slots__ = (
        "asked_to_stop",
        "call",
        "ended",
        "forked",
        "function",
        "limit",
        "partial",
        "started_ns",
        "stop_event",
        "target",
        "task",
        "thread",
        "told",
    )

    def __init__(self, call: Call, target: CallTarget, function: Function) -> None:
        self.call, self.target, self.function = call, target, function
        self.started_ns = 0
        self.asked_to_stop = ""
        self.ended = False
        self.told = False  # the agent knows its end: its cell is another's
        self.forked = False
        self.task: asyncio.Task[None] | None = None
        self.thread: Any = None
        self.limit: OutputLimit | None = None
        self.partial: dict[str, str] | None = None
        self.stop_event: threading.Event | None = None  # the function has it, and may heed it

    def invoke(self, url: str, host: Callable[[Run], Host]) -> Any:
        """Call the function: its result, or the coroutine that will have it. Raises `BadArguments` before it begins."""
        function, target, own = self.function, self.target, self.call.args
        args, kwargs = function.arguments.fill(target.args, {**target.kwargs, **own} if own else target.kwargs)
        if function.wants_context:
            return function.call(self._context(url, host(self)), *args, **kwargs)
        return function.call(*args, **kwargs)

    def _context(self, url: str, host: Host) -> Context:
        call = self.call
        return Context(
            run_id=call.run_id,
            job_id=call.job_id,
            job_name=call.job_name,
            attempt=call.attempt,
            fence=call.fence,
            scheduled_for=datetime.fromisoformat(call.scheduled_for),
            logical_at=None if call.logical_at is None else datetime.fromisoformat(call.logical_at),
            args=call.args,
            token=call.token,
            url=url,
            saved=call.saved,
            secrets=call.secrets,
            parents=call.parents,
            host=host,
        )


CURRENT: contextvars.ContextVar[Run | None] = contextvars.ContextVar("tocsin_run", default=None)


def succeeded(run: Run, ran_ns: int, result: Any) -> Done:
    """The end of a call that returned."""
    cell, started = run.call.cell, run.started_ns
    if run.asked_to_stop:
        return stopped(run, ran_ns)
    if result is None:
        return Done(cell, started, ran_ns)
    try:
        return Done(cell, started, ran_ns, result=_storable(result))
    except _TooLarge as exc:  # and another attempt would return as much
        return Done(cell, started, ran_ns, "failed", "result_too_large", str(exc), give_up=True)
    except Exception as exc:
        message = clean(f"the result of type {type(result).__name__} cannot be stored as JSON: {exc}")[:MESSAGE_CHARS]
        return Done(cell, started, ran_ns, "failed", "result", message)


class _TooLarge(Exception):
    """More than a result may have."""


def _storable(result: Any) -> msgspec.Raw:
    """Through JSON and back, because only what survives that can be stored and read by anyone."""
    text = msgspec.json.encode(result)
    if len(text) > MOST_RESULT:
        raise _TooLarge(f"the result has {len(text):,} bytes as JSON, at most {MOST_RESULT:,} are kept")
    return msgspec.Raw(_to_msgpack(msgspec.json.decode(text)))


def failed(run: Run, ran_ns: int, exc: BaseException) -> Done:
    """The end of a call that raised."""
    if run.asked_to_stop:
        return stopped(run, ran_ns)
    told = meaning(exc)
    # Where arguments were refused says nothing to a job's owner.
    message = clean(str(exc))[:MESSAGE_CHARS] if isinstance(exc, BadArguments) else _message(exc)
    return Done(
        run.call.cell,
        run.started_ns,
        ran_ns,
        "failed",
        told.error_class,
        message,
        retry_after=told.retry_after,
        give_up=told.give_up,
    )


def stopped(run: Run, ran_ns: int) -> Done:
    """The end of a call that was asked to stop and did."""
    if run.asked_to_stop == "timeout":
        text = f"still running after {run.call.timeout_ms} ms"
        return Done(run.call.cell, run.started_ns, ran_ns, "timeout", "timeout", text)
    return Done(run.call.cell, run.started_ns, ran_ns, "cancelled")


def _message(exc: BaseException) -> str:
    """What it says, then the end of where it happened."""
    try:
        text = str(exc)
    except Exception:
        text = "(its text cannot be made)"
    head = "\n".join(map(clean, text.split("\n")))[: MESSAGE_CHARS // 2]
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if not f.filename.startswith(_OURS)]
    trace = "".join(traceback.format_list(frames[-8:]))
    tail = "\n".join(map(clean, trace.split("\n")))[-(MESSAGE_CHARS - len(head) - 1) :].rstrip()
    return f"{head}\n{tail}" if tail else head
