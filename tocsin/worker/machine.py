"""What this machine has: what a worker offers unless it is told otherwise. In a container, what that may use of it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MB = 1024 * 1024


def resources() -> dict[str, float]:
    """Processors, memory and disk in MB, gpus; as the worker protocol names them."""
    return {"cpu": _cpus(), "memory_mb": _memory_mb(), "disk_mb": _disk_mb(), "gpus": _gpus()}


def _cpus() -> float:
    """Those we may run on, or as much of them as the container is given."""
    have = float(len(os.sched_getaffinity(0)))
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return min(have, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else have


def _memory_mb() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = _read(_CGROUP / "memory.max")
    return (min(total, int(most)) if most.isdigit() else total) // _MB


def _disk_mb() -> int:
    """What is free where temporary files go."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(tempfile.gettempdir()).free // _MB
    return 0


def _gpus() -> int:
    """Devices of NVIDIA's driver; others are to be told."""
    with contextlib.suppress(OSError):
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    return 0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("ascii").strip()
    return ""
