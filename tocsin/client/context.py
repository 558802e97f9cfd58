"""`Context`: what a function may know of the run it serves, and say about it. Standard library only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from tocsin.model.loglines import about

_LOOK_UP = 0.2  # seconds; a thread is interrupted between two instructions, and none is run while it waits


class Saving:
    """A checkpoint on its way: await it to be sure that it is kept."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Future[None]) -> None:
        self._kept = kept

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio

        return asyncio.wrap_future(self._kept).__await__()

    def wait(self) -> None:
        """Until it is kept, in a thread."""
        while True:
            try:
                return self._kept.result(_LOOK_UP)
            except TimeoutError:
                if self._kept.done():
                    raise


class Host(Protocol):
    """Whoever calls the function: a worker's runner, or `app.testing()`."""

    def emit(self, level: str, text: str, about: str = "") -> None:
        """A record for the run's log; `about`: its logger and fields, as `loglines.about` writes them."""

    def keep(self, state: Any) -> Saving:
        """Keep a checkpoint."""

    def progressed(self, fraction: float) -> None:
        """So much of the work is done."""

    def seconds_left(self) -> float:
        """Until the time-out."""

    def stop_event(self) -> threading.Event:
        """Set when the run is asked to stop."""

    @property
    def now(self) -> datetime:
        """The present."""


class Parent(NamedTuple):
    """A run that this one waited for. `result` is None unless it succeeded and had one."""

    run_id: str
    state: str
    result: Any


class Context:
    """What a function may know about the run it serves.

    `run_id` is the same in every attempt; `fence` rises with each, so a store of your own can refuse a zombie's write.
    `saved` is the last checkpoint that any attempt of the run has made, or None; `secrets` are the job's, by the names
    that it gives them. `parents` are the runs that this one waited for, by name; what they returned is in `results`.
    `logical_at` is the instant that the run stands for: of a backfill the one that it fills, else `scheduled_for`.
    `token` proves to the server at `url` that one speaks for this attempt, and ends with it.
    """

    __slots__ = (
        "_host",
        "_log",
        "args",
        "attempt",
        "fence",
        "job_id",
        "job_name",
        "logical_at",
        "parents",
        "run_id",
        "saved",
        "scheduled_for",
        "secrets",
        "token",
        "url",
    )

    def __init__(
        self,
        *,
        run_id: str,
        job_id: str,
        scheduled_for: datetime,
        logical_at: datetime | None = None,
        job_name: str | None = None,
        attempt: int = 1,
        fence: int = 0,
        args: Mapping[str, Any] | None = None,
        token: str = "",
        url: str = "",
        saved: Any = None,
        secrets: Mapping[str, str] | None = None,
        parents: Mapping[str, Mapping[str, Any]] | None = None,
        host: Host | None = None,
    ) -> None:
        self.run_id = run_id
        self.job_id = job_id
        self.job_name = job_name
        self.attempt = attempt
        self.fence = fence
        self.scheduled_for = scheduled_for
        self.logical_at = logical_at or scheduled_for
        self.args: Mapping[str, Any] = args or {}
        self.token = token
        self.url = url
        self.saved = saved
        self.secrets: Mapping[str, str] = secrets or {}
        self.parents: Mapping[str, Parent] = {
            name: Parent(parent["run_id"], parent["state"], parent.get("result"))
            for name, parent in (parents or {}).items()
        }
        self._host: Host = host or _Nowhere()
        self._log: RunLogger | None = None

    @property
    def log(self) -> RunLogger:
        """A logger whose lines, with their levels, become the run's log: `ctx.log.info("rendering", region=region)`."""
        if self._log is None:
            self._log = RunLogger(self.run_id, self._host)
        return self._log

    @property
    def results(self) -> Mapping[str, Any]:
        """What the runs that this one waited for returned, by name: `ctx.results["extract"]`."""
        return {name: parent.result for name, parent in self.parents.items()}

    @property
    def deadline(self) -> datetime:
        """When the run's time is up: it is interrupted then."""
        return self._host.now + timedelta(seconds=self._host.seconds_left())

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self._host.seconds_left())

    @property
    def cancelled(self) -> threading.Event:
        """Set when the run is to stop: it was cancelled, or its time is up. Who looks at it has two seconds to end by
        itself before it is interrupted; who does not is interrupted at once."""
        return self._host.stop_event()

    def progress(self, fraction: float) -> None:
        """Say how much is done, from 0 to 1; the run shows the latest."""
        done = float(fraction)
        if not 0 <= done <= 1:
            raise ValueError(f"progress lies between 0 and 1, not at {fraction!r}")
        self._host.progressed(done)

    def checkpoint(self, state: Any) -> Saving:
        """Keep `state` (anything JSON can hold, up to 64 KB): the next attempt finds it as `ctx.saved`.

        In a function that is not async this returns when the server has it. In an async one it is on its way when this
        returns; `await` what it answers to be sure. Of several on their way only the last is kept.
        """
        saving = self._host.keep(state)
        if not in_async_code():
            saving.wait()
        return saving


def in_async_code() -> bool:
    """Whether an event loop runs in this thread, so that it must not be blocked."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Nowhere:
    """Nobody listens: a context made by hand, to call a function directly."""

    def emit(self, level: str, text: str, about: str = "") -> None:
        logging.getLogger("tocsin.run").log(logging.getLevelName(level.upper()), text)

    def keep(self, state: Any) -> Saving:
        kept: Future[None] = Future()
        kept.set_result(None)
        return Saving(kept)

    def progressed(self, fraction: float) -> None:
        pass

    def seconds_left(self) -> float:
        return timedelta(days=1).total_seconds()

    def stop_event(self) -> threading.Event:
        return threading.Event()

    @property
    def now(self) -> datetime:
        return datetime.now(UTC)


# ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────────


_ABOUT = "tocsin_about"  # of a record: its logger and fields


class RunLogger(logging.Logger):
    """A `logging.Logger` whose calls also take values by name: `info("rendering", region="eu")`."""

    def __init__(self, run_id: str, host: Host, called: str = "") -> None:
        super().__init__(f"tocsin.run.{run_id}", logging.DEBUG)
        self._run_id, self._host, self._called = run_id, host, called
        self.addHandler(_RunHandler(host))

    def getChild(self, suffix: str) -> RunLogger:
        """A logger whose lines carry this name, for a part of the work: `ctx.log.getChild("db")`."""
        return RunLogger(self._run_id, self._host, f"{self._called}.{suffix}".strip("."))

    def debug(self, msg: object, *args: object, **fields: Any) -> None:
        """Detail, for whoever looks for a fault."""
        self._tell(logging.DEBUG, msg, args, fields)

    def info(self, msg: object, *args: object, **fields: Any) -> None:
        """What is going on."""
        self._tell(logging.INFO, msg, args, fields)

    def warning(self, msg: object, *args: object, **fields: Any) -> None:
        """Something that somebody should look at."""
        self._tell(logging.WARNING, msg, args, fields)

    def error(self, msg: object, *args: object, **fields: Any) -> None:
        """Something went wrong."""
        self._tell(logging.ERROR, msg, args, fields)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **fields: Any) -> None:
        """Something went wrong: with the traceback of what is being handled."""
        self._tell(logging.ERROR, msg, args, {"exc_info": exc_info, **fields})

    def critical(self, msg: object, *args: object, **fields: Any) -> None:
        """Nothing goes any more."""
        self._tell(logging.CRITICAL, msg, args, fields)

    def log(self, level: int, msg: object, *args: object, **fields: Any) -> None:
        """At a level of one's own."""
        self._tell(level, msg, args, fields)

    def _tell(self, level: int, msg: object, args: tuple[object, ...], fields: dict[str, Any]) -> None:
        if not self.isEnabledFor(level):
            return
        known = {name: fields.pop(name) for name in ("exc_info", "extra", "stack_info", "stacklevel") if name in fields}
        told = about(self._called, fields)
        if told:
            known["extra"] = {**(known.get("extra") or {}), _ABOUT: told}
        if fields:
            named = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
            # With arguments the text is a format, in which what is added must stand for itself.
            msg = f"{msg} {named.replace('%', '%%') if args else named}"
        self._log(level, msg, args, **known)


def _value(value: object) -> str:
    text = str(value)
    return text if text and not any(letter.isspace() or letter in "\"'=" for letter in text) else repr(text)


class _RunHandler(logging.Handler):
    """Hands formatted lines to the run's log."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._host.emit(record.levelname.lower(), self.format(record), getattr(record, _ABOUT, ""))
        except Exception:
            self.handleError(record)
