"""What the kernel shows of a container: which limits hold, and whether its memory was its end.

Engines take limits that they do not enforce without a word, and not all of them tell of a death for memory. So the
container's own control group is looked at, of either version.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from tocsin.worker.targets import Resources

_MB = 1024 * 1024
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Group:
    """The control group that an engine has made for a container; without any file if it has made none."""

    def __init__(self, pid: int, container: str, root: Path = Path("/")) -> None:
        self._folders: dict[str, Path] = {}
        with contextlib.suppress(OSError, ValueError):
            for line in (root / f"proc/{pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if container in path:  # a group without its name is somebody else's
                    for controller in controllers.split(","):
                        self._folders[controller] = root / "sys/fs/cgroup" / controllers / path.lstrip("/")

    def __bool__(self) -> bool:
        return bool(self._folders)

    @property
    def memory(self) -> int:
        """How many bytes it may use; 0 if that is not limited."""
        return _number(self._text("memory", "memory.limit_in_bytes") or self._text("", "memory.max"))

    @property
    def cpus(self) -> float:
        """How many processors it may use; 0 if that is not limited."""
        quota, period = self._text("cpu", "cpu.cfs_quota_us"), self._text("cpu", "cpu.cfs_period_us")
        if not quota:
            quota, _, period = self._text("", "cpu.max").partition(" ")
        return _number(quota) / (_number(period) or 1)

    @property
    def kills(self) -> int | None:
        """How many of its processes were killed for their memory; None if that cannot be seen (any more)."""
        found = _KILLS.search(self._text("memory", "memory.oom_control") or self._text("", "memory.events"))
        return int(found[1]) if found else None

    def _text(self, controller: str, file: str) -> str:
        with contextlib.suppress(OSError, KeyError):
            return (self._folders[controller] / file).read_text().strip()
        return ""


def group_of(inspected: dict[str, Any]) -> Group:
    """The group of a container, if it has a process and that can be seen from here."""
    return Group(int(inspected["State"].get("Pid") or 0), inspected["Id"])


def enforced(asked: Resources, group: Group, inspected: dict[str, Any]) -> dict[str, str | bool]:
    """For each limit that was asked for, how it is held, or False."""
    granted = inspected["HostConfig"].get("DeviceRequests") or []
    held = {
        "memory_mb": 0 < group.memory <= asked.memory_mb * _MB and "cgroup",
        "cpu": 0 < group.cpus <= asked.cpu * 1.01 and "cgroup",
        "gpus": sum(device.get("Count", 0) for device in granted) == asked.gpus and "device",
    }
    return asked.enforced(held)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
