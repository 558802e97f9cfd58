"""What a function may raise to say how its run goes on, and what any exception means for it. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

Length = str | timedelta | float  # "10m", a timedelta, or seconds


class GiveUp(Exception):
    """Raise it in a function to say that trying again is useless: the run is not retried."""


class Retry(Exception):
    """Raise it in a function to be tried again, `after` a length of time ("30s", a `timedelta`, seconds) or when its
    job's back-off says. It counts as a failed attempt: when they are used up, the run is dead."""

    def __init__(self, reason: str = "", *, after: Length | None = None) -> None:
        super().__init__(reason or "the function asks to be tried again")
        self.seconds = None if after is None else seconds_of(after)


class BadArguments(Exception):
    """What a run was given is not what its function takes. Trying again is useless."""


class Superseded(Exception):
    """This attempt is not its run's any more (its worker was given up, or it was cancelled): nothing was kept."""


class Failure(NamedTuple):
    """What an exception means for its run: the class that the job's `retry_on` and `give_up_on` may name, whether it is
    useless to try again, and after how many seconds it asks for that."""

    error_class: str
    give_up: bool = False
    retry_after: float | None = None


def meaning(exc: BaseException) -> Failure:
    """Return what an exception means for the run whose function raised it. Raises nothing: a subclass may have any
    shape.

    Therefore the type decides (`isinstance` reads the object's `__class__`, which may be code), and an attribute counts
    only if `Retry` could have set its value."""
    kind = type(exc)
    if issubclass(kind, BadArguments):
        return Failure("arguments", give_up=True)
    after = _retry_after(exc) if issubclass(kind, Retry) else None
    return Failure(dotted(kind), issubclass(kind, GiveUp), after)


def _retry_after(exc: BaseException) -> float | None:
    try:
        seconds = exc.seconds  # type: ignore[attr-defined]
        # Subclasses are excluded: they may do anything.
        return float(seconds) if type(seconds) in (int, float) and math.isfinite(seconds) else None
    except BaseException:
        return None


def dotted(kind: type[BaseException]) -> str:
    """An exception class's name as runs show it: in full, except Python's own and ours."""
    # Uses the descriptors of `type`: a metaclass may define both names itself.
    name, module = _QUALNAME(kind), _MODULE(kind)
    if type(module) is not str or module == "builtins" or module.startswith("tocsin."):
        return name
    return f"{module}.{name}"


_QUALNAME: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_MODULE: Callable[[type], object] = type.__dict__["__module__"].__get__


def text_of(exc: BaseException) -> str:
    """Return the text of an exception, even of one that cannot be printed."""
    try:
        return str.__str__(str(exc))  # not a subclass, whose methods may do anything
    except BaseException:
        return "(its text cannot be made)"


def seconds_of(length: Length) -> float:
    """A length of time in seconds; raises `ValueError` if it is none."""
    if isinstance(length, str):
        from tocsin.model.scalars import Duration

        return Duration.parse(length).seconds
    return length.total_seconds() if isinstance(length, timedelta) else float(length)
