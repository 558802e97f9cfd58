"""Callbacks on which all calls of this runner depend. If one fails, the runner is in doubt and ends."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, ParamSpec

IN_DOUBT = 70  # exit code; the agent names it in the ends of the runs
_Given = ParamSpec("_Given")


def give_up(exc: BaseException) -> NoReturn:
    """End this process now. The agent starts another and accounts for the runs."""
    traceback.print_exception(exc, file=sys.__stderr__)
    if sys.__stderr__ is not None:
        sys.__stderr__.flush()
    os._exit(IN_DOUBT)


def vital(callback: Callable[_Given, None]) -> Callable[_Given, None]:
    """End the process if the callback fails. The loop would only log the error and leave calls that never end."""

    @functools.wraps(callback)
    def guarded(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as exc:
            give_up(exc)

    return guarded
