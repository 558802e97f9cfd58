"""What a program may use: rlimits always, control groups where the worker may, and an honest list of which are held."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from tocsin.telemetry import get_logger
from tocsin.worker import cgroups
from tocsin.worker.cgroups import Group
from tocsin.worker.targets import NO_RESOURCES, Resources

log = get_logger("worker")

PROCESSES = 2048  # and threads, that one run may have
_OPEN_FILES = 65_536
_USUAL_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # before a worker that needs more has raised its own
_LIKELY_KILLED = 800  # of 1000: when the machine has no memory left, the kernel kills a run, not its worker

_TRIALS: dict[str, dict[str, Any]] = {"pids": {"processes": 9}, "memory": {"memory_mb": 99}, "cpu": {"cpu": 0.5}}


class Hold(NamedTuple):
    """One run's limits: what is put in front of its command, what is held and how, and its group if it has one."""

    prefix: Sequence[str]
    enforced: dict[str, str | bool]
    group: Group | None


class Limits:
    """Holds runs to their limits."""

    def __init__(self) -> None:
        self._groups = cgroups.find()
        self._groups.keep(controller for controller in self._groups.controllers if self._works(controller))
        self._prlimit = shutil.which("prlimit")
        # Those of a run that asked for nothing, who are the most: worked out once.
        self._plain_rlimits, self._plain_held = self._rlimits(NO_RESOURCES)
        _no_cores()
        missing = {"memory", "pids", "cpu"} - self._groups.controllers
        if missing:
            log.info("no control groups for some limits of programs; runs say which are held", missing=sorted(missing))

    def _works(self, controller: str) -> bool:
        """That a group can be made does not mean that a process may walk into it."""
        try:
            group = self._groups.make(**_TRIALS[controller])
            done = subprocess.run([*_joining(group.doors), "/bin/sh", "-c", ":"], capture_output=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return False
        self._groups.discard(group)
        return done.returncode == 0

    def hold(self, wanted: Resources) -> Hold:
        """The limits of a run that is about to start. Raises OSError if it should be held, and cannot be."""
        if wanted is NO_RESOURCES:
            group = self._groups.plain(PROCESSES) if "pids" in self._groups.controllers else None
            return Hold(self._prefix(group, self._plain_rlimits), self._plain_held, group)
        rlimits, held = self._rlimits(wanted)
        group = None
        if self._groups.controllers:
            group = self._groups.make(processes=PROCESSES, memory_mb=wanted.memory_mb, cpu=wanted.cpu)
        return Hold(self._prefix(group, rlimits), wanted.enforced(held) | held, group)

    def release(self, hold: Hold, *, empty: bool) -> None:
        """The run is over; `empty`: and so is all that it started."""
        if hold.group is not None and empty and hold.enforced is self._plain_held:
            self._groups.give_back(hold.group)
        elif hold.group is not None:
            self._groups.discard(hold.group)

    def close(self) -> None:
        """Leave no groups behind."""
        self._groups.close()

    def _prefix(self, group: Group | None, rlimits: list[str]) -> list[str]:
        return [*_joining(group.doors if group else []), *rlimits]

    def _rlimits(self, wanted: Resources) -> tuple[list[str], dict[str, str | bool]]:
        """The command that sets rlimits, and how each limit is held, those of the groups included.

        Memory by rlimit only where no group can: it counts what a process reserves, not what it uses."""
        grouped = self._groups.controllers
        words: list[str] = []
        held: dict[str, str | bool] = {"processes": "cgroup" if "pids" in grouped else False}
        if not held["processes"] and os.getuid() != 0 and self._prlimit:  # the kernel does not hold root to it
            words.append(f"--nproc={_processes_of_this_user() + PROCESSES}")
            held["processes"] = "per user"
        if wanted.cpu and "cpu" in grouped:
            held["cpu"] = "cgroup"
        if wanted.memory_mb and "memory" in grouped:
            held["memory_mb"] = "cgroup"
        elif wanted.memory_mb and self._prlimit:
            words.append(f"--data={_within(wanted.memory_mb << 20, resource.RLIMIT_DATA)}")
            held["memory_mb"] = "per process"
        if wanted.disk_mb and self._prlimit:
            words.append(f"--fsize={_within(wanted.disk_mb << 20, resource.RLIMIT_FSIZE)}")
            held["disk_mb"] = "per file"
        return [self._prlimit, *words, "--"] if self._prlimit and words else [], held


def open_many_files() -> None:
    """For us alone: each run takes a few, and what is usual is soon too little."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def settle(pid: int) -> None:
    """For a program that has just been started: what can wait until then, since a moment without it does no harm."""
    with contextlib.suppress(OSError):
        most = _within(_OPEN_FILES, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(_USUAL_FILES, most), most))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "wb", 0) as file:
        file.write(b"%d" % _LIKELY_KILLED)


def _joining(doors: list[str]) -> list[str]:
    """A command that walks through the doors, so that not even its first moment is spent outside."""
    if not doors:
        return []
    steps = " && ".join(f'echo 0 >"${number}"' for number in range(1, len(doors) + 1))
    return ["/bin/sh", "-c", f'{steps} && shift {len(doors)} && exec "$@"', "sh", *doors]


def _no_cores() -> None:
    """For us and all that we start: a core of ours would hold the worker's key."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _within(amount: int, kind: int) -> int:
    """A limit may only ever be lowered."""
    most = resource.getrlimit(kind)[1]
    return amount if most == resource.RLIM_INFINITY else min(amount, most)


def _processes_of_this_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                count += os.stat(f"/proc/{name}").st_uid == os.getuid()
    return count
