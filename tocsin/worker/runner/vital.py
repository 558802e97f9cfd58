"""Callbacks on which all calls of this runner depend: one that fails puts the runner in doubt, and ends it."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

IN_DOUBT = 70  # exit code; what the agent says of the runs names it
_Given = ParamSpec("_Given")


def give_up(exc: BaseException) -> NoReturn:
    """End this process now; the agent starts another and accounts for the runs."""
    traceback.print_exception(exc, file=sys.__stderr__)
    if sys.__stderr__ is not None:
        sys.__stderr__.flush()
    os._exit(IN_DOUBT)


def vital(callback: Callable[_Given, None]) -> Callable[_Given, None]:
    """End the process if the callback fails. The loop would only log that, and go on with calls that nobody ends."""

    @functools.wraps(callback)
    def guarded(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as exc:
            give_up(exc)

    return guarded
