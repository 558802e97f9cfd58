"""The guard: a small process that ends the worker's job trees when the worker cannot.

The agent kills its runs itself when its lease is over. But an agent that was stopped or is swapped out kills nobody,
and one that was killed with -9 leaves grandchildren behind. The guard sees both: it shares the lease's deadline with
the agent, and it holds a pipe that closes when the agent dies. Standard library only, so that it stays small.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time

from tocsin.worker import proctree

_LOOK_EVERY = 0.1
_AFTER_THE_AGENT = 0.1  # seconds past the deadline: the agent itself goes first
_CELL = struct.Struct("d")


class Guard:
    """The agent's side: keeps the guard told until when the runs are ours."""

    def __init__(self, mark: str, children: set[int]) -> None:
        self._fd = os.memfd_create("tocsin-lease")
        os.ftruncate(self._fd, _CELL.size)
        self._cell = mmap.mmap(self._fd, _CELL.size)
        self._mark, self._children = mark, children
        self._process, self._pipe = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        theirs, ours = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tocsin.worker.guard", self._mark, str(self._fd), str(theirs)],
            stdin=subprocess.DEVNULL,
            pass_fds=(self._fd, theirs),
            start_new_session=True,
        )
        os.close(theirs)
        self._children.add(process.pid)
        return process, ours

    def lease_until(self, deadline: float) -> None:
        """The runs are ours until this `boottime` instant; 0: there is nothing to guard."""
        _CELL.pack_into(self._cell, 0, deadline)
        if self._process.poll() is not None:
            self._children.discard(self._process.pid)
            os.close(self._pipe)
            self._process, self._pipe = self._start()

    def close(self) -> None:
        """Let it look for leftovers and go."""
        os.close(self._pipe)
        self._process.wait()


def watch(mark: str, lease_fd: int, pipe: int) -> None:
    """The guard's side: until the agent is gone and nothing of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    cell = mmap.mmap(lease_fd, _CELL.size, prot=mmap.PROT_READ)
    while not select.select([pipe], [], [], _LOOK_EVERY)[0]:
        (deadline,) = _CELL.unpack_from(cell)
        if deadline and time.clock_gettime(time.CLOCK_BOOTTIME) > deadline + _AFTER_THE_AGENT:
            proctree.kill_once(0, mark)
    for _ in range(500):
        if not proctree.kill_once(0, mark):
            break
        time.sleep(0.01)


if __name__ == "__main__":
    watch(f"{sys.argv[1]}:", int(sys.argv[2]), int(sys.argv[3]))
