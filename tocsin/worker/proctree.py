"""Process trees on Linux: who belongs to a run, and ending all of them with proof.

A tree is found by three marks, because any one of them can be shed: descent (parent ids), the process group, and an
environment variable that every descendant inherits. Orphans come to the agent, who is their subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

MARK = "_TOCSIN_TREE"  # not TOCSIN_…: those names are settings, and unknown ones are refused

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_memory() -> None:
    """Keep this process's memory and environment (the worker's key) from programs of the same user."""
    _prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent(parent: int) -> Callable[[], None]:
    """A `preexec_fn`: the child is killed when the thread that started it ends, however it ends."""

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _processes() -> Iterator[tuple[int, int, int, bool]]:
    """(pid, parent, group, is a zombie) of every process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
                yield int(name), int(fields[1]), int(fields[2]), fields[0] in (b"Z", b"X")


def _has_mark(pid: int, start: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return start in b"\0" + environ.read()
    except OSError:
        return False


def members(root: int, mark: str) -> list[int]:
    """Living processes of the tree whose first process is, or was, `root` (0: only the mark counts).

    A mark also stands for all marks that begin with it.
    """
    line = f"\0{MARK}={mark}".encode()
    table = [(pid, parent, group) for pid, parent, group, zombie in _processes() if not zombie]
    me = os.getpid()
    found = {pid for pid, _, group in table if root and (pid == root or group == root)}
    found |= {pid for pid, _, _ in table if pid != me and pid not in found and _has_mark(pid, line)}
    grew = True
    while grew:
        more = {pid for pid, parent, _ in table if parent in found and pid not in found}
        found |= more
        grew = bool(more)
    return sorted(found)


def signal_group(root: int, number: int) -> None:
    """Signal the tree's first process group, if there still is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, number)


def kill_once(root: int, mark: str) -> int:
    """Kill everything of the tree that can be found now; how many there were."""
    found = members(root, mark)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def has_orphans(known: set[int]) -> bool:
    """Whether this process has children that it did not start itself. Reaps those that have ended."""
    alive = False
    for pid in _children():
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                alive |= os.waitpid(pid, os.WNOHANG)[0] == 0
    return alive


def _children() -> set[int]:
    """Our children. The kernel may leave some out of the list while another one ends: it counts when it comes twice."""
    before, now = None, _listed_children()
    while now != before:
        before, now = now, _listed_children()
    return now


def _listed_children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as children:
            found.update(map(int, children.read().split()))
    return found
