"""A bound on work, in steps instead of seconds. A step is a call that the interpreter makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TooManySteps(BaseException):
    """The code under test had not finished when its steps were used up. No `except Exception` hides it."""


@contextmanager
def at_most(most: int) -> Iterator[list[int]]:
    """Run a block of this thread for at most this many steps. Yield a list with the number of steps so far.

    A step is a call: of a Python function, of a generator for its next element, or of a C function. Work inside a C
    function is not counted, nor is a loop that calls nothing.
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
