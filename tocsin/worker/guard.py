"""The guard: a small process that ends the worker's job trees and containers when the worker cannot.

The agent kills its runs itself when its lease is over. But an agent that was stopped or is swapped out kills nobody,
and one that was killed with -9 leaves grandchildren behind. The guard sees both: it shares the lease's deadline with
the agent, and it holds a pipe that closes when the agent dies. Standard library only, so that it stays small.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tocsin.worker import proctree
from tocsin.worker.owner import Owner

_LOOK_EVERY = 0.05
_AFTER_THE_AGENT = 0.05  # seconds past the deadline: the agent itself goes first
_QUIET_LOOKS = 3  # so often nothing must be found: what is on the hop between two processes may be missed once
_CELL = struct.Struct("d")


class Guard:
    """The agent's side: keeps the guard told until when the runs are ours."""

    def __init__(self, family: proctree.Family, engine: str = "") -> None:
        self._engine = engine
        self._fd = os.memfd_create("tocsin-lease")
        os.ftruncate(self._fd, _CELL.size)
        self._cell = mmap.mmap(self._fd, _CELL.size)
        self._family = family
        self._process, self._pipe = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], int]:
        theirs, ours = os.pipe()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tocsin.worker.guard", *_words(self._family.whole)),
                *(str(self._fd), str(theirs), self._engine, str(Owner.here())),
            ],
            stdin=subprocess.DEVNULL,
            env=proctree.without_keys(),
            pass_fds=(self._fd, theirs),
            start_new_session=True,
        )
        os.close(theirs)
        self._family.children.add(process.pid)
        return process, ours

    def lease_until(self, deadline: float) -> None:
        """The runs are ours until this `boottime` instant; 0: there is nothing to guard."""
        # What is started from here on must not be hit by a blow that was meant for what was before.
        with contextlib.nullcontext() if deadline else _alone(self._fd):
            _CELL.pack_into(self._cell, 0, deadline)
        if self._process.poll() is not None:
            self._family.children.discard(self._process.pid)
            os.close(self._pipe)
            self._process, self._pipe = self._start()

    def close(self) -> None:
        """Let it look for leftovers and go."""
        os.close(self._pipe)
        self._process.wait()


def _is_over(cell: mmap.mmap) -> bool:
    (deadline,) = _CELL.unpack_from(cell)
    return bool(deadline) and time.clock_gettime(time.CLOCK_BOOTTIME) > deadline + _AFTER_THE_AGENT


@contextlib.contextmanager
def _alone(fd: int) -> Iterator[None]:
    """One of the two processes at a time."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _words(tree: proctree.Tree) -> list[str]:
    return [tree.mark, str(tree.brands.start), str(tree.brands.stop), str(os.getpid())]


def _tree(mark: str, first: str, last: str, agent: str) -> proctree.Tree:
    return proctree.Tree(0, mark, range(int(first), int(last)), under=int(agent))


def _strays(engine: str, owner: str) -> Callable[[], int]:
    """Kills the worker's containers, if it may have any."""
    if not engine:
        return lambda: 0
    from tocsin.worker.strays import Strays  # speaks HTTP; most guards are smaller without it

    return Strays(engine, owner).kill_once


def watch(tree: proctree.Tree, kill_strays: Callable[[], int], lease_fd: int, pipe: int) -> None:
    """The guard's side: until the agent is gone and nothing of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    cell = mmap.mmap(lease_fd, _CELL.size, prot=mmap.PROT_READ)
    while not select.select([pipe], [], [], _LOOK_EVERY)[0]:
        if _is_over(cell):
            with _alone(lease_fd):
                if _is_over(cell):
                    proctree.kill_once(tree)
                    kill_strays()
    # The agent is gone, and its id may be somebody else's.
    tree, quiet = tree._replace(under=0), 0
    for _ in range(500):
        quiet = 0 if proctree.kill_once(tree).alive or kill_strays() else quiet + 1
        if quiet == _QUIET_LOOKS:
            break
        time.sleep(0.01)


if __name__ == "__main__":
    watch(_tree(*sys.argv[1:5]), _strays(*sys.argv[7:9]), int(sys.argv[5]), int(sys.argv[6]))
