"""Named points around every commit and reply where a test may crash, delay or fail the process.

Production holds a `Failpoints` without rules: `hit` is one dictionary look-up that finds nothing.
A rule is written ``name=action[:nth]`` and rules are joined by ``;``, for example
``report.after_commit=kill:3`` (SIGKILL ourselves the third time) or ``claim.before_commit=raise``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import dataclass


class InjectedFault(RuntimeError):
    """Raised by a failpoint whose action is ``raise``."""


@dataclass
class _Rule:
    action: str
    countdown: int


class Failpoints:
    """The hook. Build one per process from settings and hand it to what commits or replies."""

    def __init__(self, rules: str = "") -> None:
        self._rules: dict[str, _Rule] = {}
        for rule in filter(None, (part.strip() for part in rules.split(";"))):
            name, _, action = rule.partition("=")
            verb, _, nth = action.partition(":")
            self._rules[name] = _Rule(verb, int(nth or "1"))

    async def hit(self, name: str) -> None:
        """Pass the point ``name``; does nothing unless a rule names it."""
        rule = self._rules.get(name)
        if rule is None:
            return
        rule.countdown -= 1
        if rule.countdown != 0:
            return
        if rule.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule.action == "raise":
            raise InjectedFault(name)
        elif rule.action == "hang":
            await asyncio.Event().wait()
        elif rule.action == "block":
            threading.Event().wait()  # blocks the whole event loop, like a handler that never stops computing
        else:
            raise ValueError(f"failpoint {name}: unknown action {rule.action!r}")


NO_FAILPOINTS = Failpoints()
