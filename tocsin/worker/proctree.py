"""Process trees on Linux: who belongs to a run, and ending all of them with proof.

A tree is found by four marks, because any one of them can be shed: descent (parent ids), the process group, an
environment variable that every descendant inherits, and a *brand*. That is a number as the soft limit RLIMIT_RTTIME,
too large ever to matter: it costs nothing, needs no right, and outlives a new session, a new parent, closed files and
an empty environment. Orphans come to the agent, who is their subreaper, so even one without any mark is seen; it can
only be a run's, and is killed with the first run that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

MARK = "_TOCSIN_TREE"  # not TOCSIN_…: those names are settings, and unknown ones are refused

_BRANDS = 1 << 62  # µs: 146,000 years
_NICER = 5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl
# Of files under /proc: its process has gone, or is another user's. Any other error must not pass for its end.
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def without_keys() -> dict[str, str]:
    """Our environment for a process that we start: programs of the same user can read it there."""
    return {name: value for name, value in os.environ.items() if not (name.startswith("TOCSIN_") and "KEY" in name)}


def die_with_parent(parent: int) -> Callable[[], None]:
    """A `preexec_fn`: the child is killed when the thread that started it ends, however it ends."""

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


class Tree(NamedTuple):
    """How the processes of a run, or of a whole worker, are known."""

    root: int  # the first process and its group, which must not have been reaped; 0: there is none
    mark: str  # what they have in their environment, or the beginning of it; empty: there is none
    brands: range
    under: int = 0  # whoever descends from this process belongs to it, too
    doors: tuple[str, ...] = ()  # files that list its processes: of its control group


class Family:
    """All that one worker starts: marks and brands that nobody else has, and the children it has started itself."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(8)
        self._first = _BRANDS + (secrets.randbits(29) << 32)
        self._last = 0
        self.children = _children()  # whatever the agent was born with is nobody's run

    @property
    def whole(self) -> Tree:
        """Everything at once."""
        return Tree(0, f"{self._name}:", range(self._first, self._first + 2**32))

    def tree(self, name: str, brands: int = 1) -> Tree:
        """A tree to come; its root is known once it has been started."""
        first = self._first + self._last % 2**32
        self._last += brands
        return Tree(0, f"{self._name}:{name};", range(first, first + brands))

    def orphans(self) -> Iterator[tuple[int, int, bool]]:
        """(pid, brand, has ended) of our children that we did not start ourselves. Reaps those that have ended."""
        for pid in _children() - self.children:
            brand = brand_of(pid)
            with contextlib.suppress(ChildProcessError):
                yield pid, brand, os.waitpid(pid, os.WNOHANG)[0] != 0

    def has_orphans(self) -> bool:
        """Whether there are any that live, for all we know."""
        try:
            return not all([ended for _, _, ended in self.orphans()])
        except OSError:  # no file descriptor is left to look with
            return True

    def kill_once(self, tree: Tree) -> Found:
        """Kill everything of the tree that can be found now, and every orphan that hides whose it is.

        `restless`: something of it ended while we looked, and may have left a child behind that we passed by."""
        own = self.whole
        for _ in self.orphans():
            pass
        found = kill_once(tree)
        restless = False
        for pid, brand, ended in self.orphans():
            hides = brand not in own.brands
            if ended:
                restless |= hides or brand in tree.brands
            elif brand in tree.brands or (hides and not _has_mark(pid, own.mark)):
                found.add(pid, _signal(pid, signal.SIGKILL))
        return found._replace(restless=restless)


class Found(NamedTuple):
    """What a look at a tree found: its living processes, and those among them that we may not signal."""

    alive: set[int]
    untouchable: set[int]
    restless: bool = False

    def add(self, pid: int, signalled: bool) -> None:
        self.alive.add(pid)
        if not signalled:
            self.untouchable.add(pid)


@contextlib.contextmanager
def branded(brand: int) -> Iterator[None]:
    """What is forked within carries the brand, and whatever that forks. For one thread at a time."""
    before = wear(brand)
    try:
        yield
    finally:
        wear(before)


def wear(brand: int) -> int:
    """Set this process's own brand; what it was before."""
    before, most = resource.getrlimit(resource.RLIMIT_RTTIME)
    if most == resource.RLIM_INFINITY or 0 <= brand <= most:  # else the other marks must do
        resource.setrlimit(resource.RLIMIT_RTTIME, (brand, most))
    return before


def brand_of(pid: int) -> int:
    """A process's brand, also of one that has ended and was not reaped; 0 if we may not know."""
    try:
        return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    except OSError:
        return 0


def yield_to_us(pid: int) -> None:
    """Let a process that has just been started, and what it will start, give way to heartbeats on a busy machine."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICER))


def _processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, group) of every living process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(*_GONE, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    yield int(name), int(fields[1]), int(fields[2])


def _has_mark(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return f"\0{MARK}={mark}".encode() in b"\0" + environ.read()
    except _GONE:
        return False


def kill_once(tree: Tree) -> Found:
    """Kill everything of the tree that can be found now."""
    table = list(_processes())
    members = _members(tree, table)
    found = Found(members, set())
    strangers = {group for pid, _, group in table if pid not in members}
    # A group at one blow: none of it can fork meanwhile.
    for group in {group for pid, _, group in table if pid in members} - strangers:
        signal_group(group, signal.SIGKILL)
    for pid in members:
        found.add(pid, _signal(pid, signal.SIGKILL))
    return found


def _members(tree: Tree, table: list[tuple[int, int, int]]) -> set[int]:
    # An agent wears a brand itself for the moment in which it forks.
    spared = {os.getpid(), tree.under}
    inside = _listed(tree.doors)
    found = {
        pid
        for pid, parent, group in table
        if pid in inside
        or (tree.root and tree.root in (pid, group))
        or (tree.under and parent == tree.under)
        or brand_of(pid) in tree.brands
        or (tree.mark and _has_mark(pid, tree.mark))
    } - spared
    grew = True
    while grew:
        more = {pid for pid, parent, _ in table if parent in found and pid not in found}
        found |= more
        grew = bool(more)
    return found - spared


def _listed(files: tuple[str, ...]) -> set[int]:
    found: set[int] = set()
    for name in files:
        with contextlib.suppress(OSError):
            found.update(map(int, _content(name).split()))
    return found


def signal_within(root: int, number: int) -> None:
    """Signal a group except its first process and that one's child: the two that keep a sandbox up."""
    table = [(pid, parent) for pid, parent, group in _processes() if group == root and pid != root]
    for pid, parent in table:
        if parent != root:
            _signal(pid, number)


def _signal(pid: int, number: int) -> bool:
    """Whether we may."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(pid, number)
        except PermissionError:
            return False
    return True


def signal_group(root: int, number: int) -> None:
    """Signal the tree's first process group, if there still is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, number)


def _children() -> set[int]:
    """Our children. The kernel may leave some out of the list while another one ends: it counts when it comes twice."""
    before, now = None, _listed_children()
    while now != before:
        before, now = now, _listed_children()
    return now


def _listed_children() -> set[int]:
    """Those of our first thread: it alone forks, and orphans come to it."""
    return set(map(int, _content(f"/proc/self/task/{os.getpid()}/children").split()))


def _content(path: str) -> bytes:
    """A file of the kernel's, read without the ado of a file object: this is done several times a run."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    finally:
        os.close(fd)
