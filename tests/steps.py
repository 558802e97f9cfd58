"""A bound on work, in steps instead of seconds: the calls that the interpreter makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TooManySteps(BaseException):
    """The code under test was still at work when its steps were used up. No `except Exception` hides it."""


@contextmanager
def at_most(most: int) -> Iterator[list[int]]:
    """Run a block of this thread for so many steps; yields a list of one number, those that it took so far.

    A step is a call: of a Python function, of a generator for its next element, or of a C function. What a C function
    does inside is not seen, nor is a loop that calls nothing.
    """
    taken = [0]

    def step(frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            taken[0] += 1
            if taken[0] > most:
                raise TooManySteps(f"more than {most:,} steps, at {frame.f_code.co_filename}:{frame.f_lineno}")

    old = sys.getprofile()
    sys.setprofile(step)
    try:
        yield taken
    finally:
        sys.setprofile(old)
