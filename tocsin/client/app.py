"""`App`: the functions a worker offers. Standard library only, so that importing it costs a job's module nothing.

from tocsin import App

app = App()

@app.function("reports.daily")
async def daily(ctx, day: str) -> dict:
    ctx.log.info("writing the report of %s", day)
    return {"pages": 3}
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar, overload

_Function = TypeVar("_Function", bound=Callable[..., Any])


class GiveUp(Exception):
    """Raise it in a function to say that trying again is useless: the run is not retried."""


class Function:
    """A registered function and what the worker must know to call it."""

    __slots__ = ("call", "is_async", "name", "wants_context")

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name = name
        self.call = call
        self.is_async = inspect.iscoroutinefunction(call)
        self.wants_context = next(iter(inspect.signature(call).parameters), None) == "ctx"


class App:
    """A registry of functions, served by `tocsin worker module:app`."""

    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}

    @overload
    def function(self, name: _Function, /) -> _Function: ...

    @overload
    def function(self, name: str | None = None, /) -> Callable[[_Function], _Function]: ...

    def function(self, name: Any = None, /) -> Any:
        """Register a function, sync or async, under `name` (its `__name__` if none is given).

        The function is called with the target's `args` and `kwargs` and the run's own args, which win. A first
        parameter named `ctx` receives the `Context`.
        """
        if callable(name):
            return self._add(name.__name__, name)
        return lambda call: self._add(name or call.__name__, call)

    def _add(self, name: str, call: _Function) -> _Function:
        if name in self.functions:
            raise ValueError(f"two functions are named {name!r}")
        self.functions[name] = Function(name, call)
        return call


class Context:
    """What a function may know about the run it serves.

    `run_id` is the same in every attempt; `fence` rises with each, so a store of your own can refuse a zombie's write.
    """

    __slots__ = (
        "_emit",
        "_log",
        "args",
        "attempt",
        "fence",
        "job_id",
        "job_name",
        "run_id",
        "scheduled_for",
        "token",
        "url",
    )

    def __init__(
        self,
        *,
        run_id: str,
        job_id: str,
        scheduled_for: datetime,
        job_name: str | None = None,
        attempt: int = 1,
        fence: int = 0,
        args: Mapping[str, Any] | None = None,
        token: str = "",
        url: str = "",
        emit: Callable[[str, str], None] | None = None,
    ) -> None:
        self.run_id = run_id
        self.job_id = job_id
        self.job_name = job_name
        self.attempt = attempt
        self.fence = fence
        self.scheduled_for = scheduled_for
        self.args: Mapping[str, Any] = args or {}
        self.token = token
        self.url = url
        self._emit = emit
        self._log: logging.Logger | None = None

    @property
    def log(self) -> logging.Logger:
        """A logger whose lines, with their levels, become the run's log."""
        if self._log is None:
            self._log = self._open_log()
        return self._log

    def _open_log(self) -> logging.Logger:
        if self._emit is None:
            return logging.getLogger("tocsin.run")
        log = logging.Logger(f"tocsin.run.{self.run_id}", logging.DEBUG)
        log.addHandler(_RunHandler(self._emit))
        return log


class _RunHandler(logging.Handler):
    """Hands formatted lines to the run's log."""

    def __init__(self, emit: Callable[[str, str], None]) -> None:
        super().__init__()
        self._to_run = emit

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._to_run(record.levelname.lower(), self.format(record))
        except Exception:
            self.handleError(record)
