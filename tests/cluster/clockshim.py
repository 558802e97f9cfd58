"""A wall clock that can be stepped while the process that lives by it runs: an LD_PRELOAD library over `clock_gettime`.

    shim = ClockShim(folder)          # pytest.skip where there is no C compiler
    server.env |= shim.env            # before it is started
    shim.step(3600)                   # its wall clock is an hour ahead from now on; monotonic clocks go on as they were
    shim.suspend(600)                 # as if the machine had slept: wall clock and CLOCK_BOOTTIME

Other processes, also those that it executes (a worker's programs and its runner), keep true time.
"""

from __future__ import annotations

import bisect
import mmap
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
_WORDS = struct.Struct("qq")


def build(folder: Path) -> Path:
    """The library, compiled; skips the test where that cannot be done."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) here to build the library that steps a process's clock")
    library = folder / "clockshim.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True, capture_output=True)
    library.chmod(0o755)
    return library


class ClockShim:
    """The clock of whatever is started with `env`. Remembers its steps, to say what it showed when."""

    def __init__(self, folder: Path) -> None:
        file = folder / "clock.offsets"
        file.write_bytes(_WORDS.pack(0, 0))
        file.chmod(0o644)  # PostgreSQL runs as another user where we are root
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), _WORDS.size)
        self.env = {"LD_PRELOAD": str(build(folder)), "CLOCKSHIM": str(file)}
        self._steps: list[tuple[int, float]] = [(0, 0.0)]  # from which true microsecond on, how far ahead

    @property
    def ahead(self) -> float:
        """By how many seconds its wall clock is ahead of the true one."""
        return self._steps[-1][1]

    def step(self, seconds: float) -> None:
        """Set the wall clock forward, or back."""
        self._set(self.ahead + seconds, _WORDS.unpack_from(self._page)[1] / 1e9)

    def suspend(self, seconds: float) -> None:
        """What a process sees when its machine wakes after so long a sleep."""
        self._set(self.ahead + seconds, _WORDS.unpack_from(self._page)[1] / 1e9 + seconds)

    def _set(self, wall: float, boottime: float) -> None:
        _WORDS.pack_into(self._page, 0, int(wall * 1e9), int(boottime * 1e9))
        self._steps.append((time.time_ns() // 1000, wall))

    def shown(self, true_us: int, settling: float = 0.0) -> int:
        """What it showed at a true instant, in microseconds; the most that it showed in the `settling` seconds before,
        which is what somebody may have gone by who read it then."""
        last = bisect.bisect_right(self._steps, (true_us, float("inf")))
        first = bisect.bisect_right(self._steps, (int(true_us - settling * 1e6), float("inf"))) - 1
        return true_us + int(max(ahead for _, ahead in self._steps[first:last]) * 1e6)
