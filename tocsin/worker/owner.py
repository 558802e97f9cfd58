"""Who started what an engine still holds: told in its labels, so that what a dead worker left can be known as such."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_OVERDUE = 300.0  # seconds past its deadline: no living worker leaves anything running for so long


class Owner(NamedTuple):
    """One process of one boot of one machine."""

    machine: str
    boot: str
    namespace: str  # of process ids: only within one of them they mean something
    pid: int
    started: int  # in ticks since boot, since process ids come again

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(
            machine=_read("/etc/machine-id"),
            boot=_read("/proc/sys/kernel/random/boot_id"),
            namespace=str(os.stat("/proc/self/ns/pid").st_ino),
            pid=pid,
            started=started_at(pid) or 0,
        )

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """What `str` has written; None if it was written by somebody else."""
        match text.split("/"):
            case [machine, boot, namespace, pid, started] if pid.isdecimal() and started.isdecimal():
                return cls(machine, boot, namespace, int(pid), int(started))
            case _:
                return None

    def __str__(self) -> str:
        return "/".join(map(str, self))


def started_at(pid: int) -> int | None:
    """When a process of this namespace was started, in ticks since boot; None if there is none (a zombie is none)."""
    try:
        # The name, in brackets, may hold anything; the state comes first after it, the start 19 fields later.
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def is_orphan(
    owner: Owner, deadline: float, *, here: Owner, now: float, started: Callable[[int], int | None] = started_at
) -> bool:
    """Whether what `owner` started, to be over by `deadline`, is nobody's any more. In doubt it is somebody's: a worker
    in a container of its own, or on another machine, cannot be seen from here, so what it started is left alone."""
    if owner.boot != here.boot:
        return bool(here.machine) and owner.machine == here.machine
    if owner.namespace == here.namespace:
        return started(owner.pid) != owner.started
    return now > deadline + _OVERDUE


def _read(path: str) -> str:
    try:
        return Path(path).read_text("ascii").strip()
    except (OSError, UnicodeError):
        return ""
