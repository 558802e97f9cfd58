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
from tocsin.client.failures import BadArguments, meaning, text_of
from tocsin.model.loglines import clean
from tocsin.model.masks import Mask, confidential
from tocsin.model.packed import MOST_RESULT
from tocsin.model.strict import MOST_LEVELS, is_deep
from tocsin.worker.frames import Call, CallTarget, Done, RunRef
from tocsin.worker.lines import OutputLimit

MESSAGE_CHARS = 4096
CLASS_CHARS = 256
_READ_CHARS = 64 * 1024  # characters of a text that is masked and then cut to a few thousand
_TRACE_FRAMES = 8
_OURS = os.path.dirname(__file__)  # frames of the runner itself say nothing to a job's owner

_to_msgpack = msgspec.msgpack.Encoder().encode


class Run:
    """One call in hand. `asked_to_stop` is the outcome it then has, whatever the function makes of it."""

    __slots__ = (
        "asked_to_stop",
        "call",
        "confided",
        "ended",
        "forked",
        "function",
        "limit",
        "partial",
        "ref",
        "started_ns",
        "stop_event",
        "target",
        "task",
        "thread",
        "told",
        "torn",
    )

    def __init__(self, call: Call, target: CallTarget, function: Function) -> None:
        self.call, self.target, self.function = call, target, function
        self.ref: RunRef = (call.cell, call.run_id, call.fence)
        # Taken now, because the function may change its arguments.
        self.confided = confidential(call.secrets, call.args, target, call.sensitive, call.token)
        self.started_ns = 0
        self.asked_to_stop = ""
        self.ended = False
        self.told = False  # the agent knows its end: its cell is another's
        self.forked = False
        self.task: asyncio.Task[None] | None = None
        self.thread: Any = None
        self.limit: OutputLimit | None = None
        self.partial: dict[str, str] | None = None
        self.torn: set[str] | None = None  # streams that are inside a line with a dropped piece
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
    """Return the end of a call that returned. Raises nothing, whatever the result does."""
    if run.asked_to_stop:
        return stopped(run, ran_ns)
    if result is None:
        return Done(*run.ref, run.started_ns, ran_ns)
    try:
        return Done(*run.ref, run.started_ns, ran_ns, result=_storable(result))
    except _TooLarge as exc:  # and another attempt would return as much
        return _failure(run, ran_ns, "result_too_large", str(exc), give_up=True)
    except BaseException as exc:
        name, why = type.__dict__["__name__"].__get__(type(result)), text_of(exc)
        return _failure(run, ran_ns, "result", f"the result of type {name} cannot be stored as JSON: {why}")


class _TooLarge(Exception):
    """More than a result may have."""


def _storable(result: Any) -> msgspec.Raw:
    """Through JSON and back, because only what survives that can be stored and read by anyone."""
    text = msgspec.json.encode(result)
    if len(text) > MOST_RESULT:
        raise _TooLarge(f"the result has {len(text):,} bytes as JSON, at most {MOST_RESULT:,} are kept")
    return repacked(text)


def repacked(text: bytes) -> msgspec.Raw:
    """Return JSON as msgpack. Refuse what is nested so deeply that the server could not read the report it is in."""
    value = msgspec.json.decode(text)
    if is_deep(text, value, MOST_LEVELS):
        raise ValueError(f"it must be nested at most {MOST_LEVELS} levels deep")
    return msgspec.Raw(_to_msgpack(value))


def failed(run: Run, ran_ns: int, exc: BaseException) -> Done:
    """Return the end of a call that raised. Raises nothing, whatever the exception does."""
    if run.asked_to_stop:
        return stopped(run, ran_ns)
    told = meaning(exc)
    # Where arguments were refused says nothing to a job's owner.
    trace = "" if issubclass(type(exc), BadArguments) else _trace(exc)
    return _failure(run, ran_ns, told.error_class, text_of(exc), trace, told.retry_after, told.give_up)


def broken(run: Run, ran_ns: int) -> Done:
    """Return the end of a call whose end could not be built: the fault is ours."""
    if run.asked_to_stop:
        return stopped(run, ran_ns)
    return Done(*run.ref, run.started_ns, ran_ns, "failed", "internal", "the runner could not read how it ended")


def stopped(run: Run, ran_ns: int) -> Done:
    """The end of a call that was asked to stop and did."""
    if run.asked_to_stop == "timeout":
        text = f"still running after {run.call.timeout_ms} ms"
        return Done(*run.ref, run.started_ns, ran_ns, "timeout", "timeout", text)
    return Done(*run.ref, run.started_ns, ran_ns, "cancelled")


def _failure(
    run: Run,
    ran_ns: int,
    error_class: str,
    text: str,
    trace: str = "",
    retry_after: float | None = None,
    give_up: bool = False,
) -> Done:
    """Mask, then cut: a secret that a cut goes through would not be found any more."""
    mask = Mask(run.confided)
    head = _shown(mask, text[:_READ_CHARS])
    message = head[:MESSAGE_CHARS]
    if trace:
        head = head[: MESSAGE_CHARS // 2]
        tail = _shown(mask, trace)[-(MESSAGE_CHARS - len(head) - 1) :].rstrip()
        message = f"{head}\n{tail}" if tail else head
    name = _shown(mask, error_class[:_READ_CHARS])[:CLASS_CHARS]
    return Done(*run.ref, run.started_ns, ran_ns, "failed", name, message, retry_after=retry_after, give_up=give_up)


def _shown(mask: Mask, text: str) -> str:
    return mask.text("\n".join(map(clean, text.split("\n"))))


def _trace(exc: BaseException) -> str:
    """Return the last part of the traceback."""
    try:
        traceback_ = BaseException.__dict__["__traceback__"].__get__(exc)
        # Our own frames are the outermost, and few.
        frames = traceback.extract_tb(traceback_, limit=-2 * _TRACE_FRAMES)
        theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
        return "".join(text[:_READ_CHARS] for text in traceback.format_list(theirs[-_TRACE_FRAMES:]))
    except BaseException:  # the loader of the module may do anything
        return ""
