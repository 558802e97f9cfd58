"""Whose children are whose: a process that a call starts carries the call's brand, so that a stop finds it.

Calls share this process, and a brand is the process's. So it is set for the instant of a fork, under a lock, whichever
way Python forks: `os.fork` and uvloop go through the hooks, `subprocess` and `posix_spawn` have to be wrapped. What a
call starts from a thread of its own making, which has no context, stays the runner's.
"""

from __future__ import annotations

import _posixsubprocess
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from tocsin.worker import proctree
from tocsin.worker.runner.run import CURRENT

_lock = threading.RLock()
_before_branding: list[int] = []


def brand_children() -> None:
    """From now on, what a call forks carries its brand."""
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
    # Module attributes on purpose: these are where `subprocess` and `multiprocessing` look them up.
    fork_exec = _wrapped(_posixsubprocess.fork_exec)
    _posixsubprocess.fork_exec = fork_exec
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    os.posix_spawn, os.posix_spawnp = _wrapped(os.posix_spawn), _wrapped(os.posix_spawnp)


def _wrapped(fork: Callable[..., int]) -> Callable[..., int]:
    def branded(*args: Any, **kwargs: Any) -> int:
        _before()
        try:
            return fork(*args, **kwargs)
        finally:
            _after()

    return branded


def _before() -> None:
    _lock.acquire()
    run = CURRENT.get()
    if run is not None and not run.ended:
        run.forked = True
        _before_branding.append(proctree.wear(run.call.brand))


def _after() -> None:
    while _before_branding:
        proctree.wear(_before_branding.pop())
    _lock.release()


def _in_child() -> None:
    _before_branding.clear()  # it keeps its brand
    _lock.release()
