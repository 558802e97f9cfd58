"""What a process keeps to itself."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Keep this process's memory and environment (its keys) from programs of the same user, such as jobs; nor does it
    leave them in a core file."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
