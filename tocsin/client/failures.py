"""What a function may raise to say how its run goes on, and what any exception means for it. Standard library only."""

from __future__ import annotations

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
    """What an exception means for the run whose function raised it."""
    if isinstance(exc, BadArguments):
        return Failure("arguments", give_up=True)
    after = exc.seconds if isinstance(exc, Retry) else None
    return Failure(dotted(type(exc))[:256], isinstance(exc, GiveUp), after)


def dotted(kind: type[BaseException]) -> str:
    """An exception class's name as runs show it: in full, except Python's own and ours."""
    if kind.__module__ == "builtins" or kind.__module__.startswith("tocsin."):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def seconds_of(length: Length) -> float:
    """A length of time in seconds; raises `ValueError` if it is none."""
    if isinstance(length, str):
        from tocsin.model.scalars import Duration

        return Duration.parse(length).seconds
    return length.total_seconds() if isinstance(length, timedelta) else float(length)
