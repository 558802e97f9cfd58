"""Control groups: the kernel's own limits for a run and all that it starts, where this worker may set them.

Version 1 needs a folder under each controller that we may write to. Version 2 needs a group that was delegated to us
(systemd: `Delegate=yes`) with nobody else in it, because only a group without processes of its own can divide what it
has; so the worker moves into a leaf beside its runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US, _LEAST_US = 100_000, 1_000  # the kernel gives no less in a period
_OURS = re.compile(r"tocsin-(\d+)-[0-9a-f]{8}")


class Group:
    """A group for one run: one folder in version 2, one for each controller in version 1."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @property
    def doors(self) -> list[str]:
        """The files into which a process writes 0 to join."""
        return [f"{folder}/cgroup.procs" for folder in self._folders]

    def ooms(self) -> int:
        """How many of its processes the kernel has killed for want of memory."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                found = re.search(r"^oom_kill (\d+)$", _read(folder / name), re.MULTILINE)
                if found is not None:
                    return int(found[1])
        return 0

    def remove(self) -> bool:
        """Whether it is gone: a group goes only once it is empty, and what was killed may take a moment."""
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


class Cgroups:
    """The controllers that this worker may use, and its groups. `bases` has the folder of each."""

    def __init__(self, bases: dict[str, Path], unified: bool) -> None:
        self._bases, self._unified = bases, unified
        self._free: list[Group] = []
        self._dying: list[Group] = []

    @property
    def controllers(self) -> frozenset[str]:
        return frozenset(self._bases)

    def keep(self, controllers: Iterable[str]) -> None:
        """Use no others than these."""
        kept = set(controllers)
        for controller in self.controllers - kept:
            base = self._bases.pop(controller)
            if base not in self._bases.values():
                with contextlib.suppress(OSError):
                    base.rmdir()

    def plain(self, processes: int) -> Group:
        """A group that bounds nothing but the number of processes, always the same: it may have been another's."""
        return self._free.pop() if self._free else self.make(processes=processes)

    def give_back(self, group: Group) -> None:
        """A plain group that nobody is in any more."""
        self._free.append(group)

    def make(self, *, processes: int = 0, memory_mb: int = 0, cpu: float = 0) -> Group:
        """A new group with these limits, as far as there is a controller for each; 0: none."""
        self._bury()
        name = secrets.token_hex(8)
        wanted = {"pids": processes, "memory": memory_mb, "cpu": cpu}
        folders = {c: self._bases[c] / name for c, amount in wanted.items() if amount and c in self._bases}
        group = Group(list(dict.fromkeys(folders.values())))
        try:
            for folder in dict.fromkeys(folders.values()):
                folder.mkdir()
            for controller, folder in folders.items():
                self._limit(folder, controller, wanted[controller])
        except OSError:
            group.remove()
            raise
        return group

    def discard(self, group: Group) -> None:
        """Remove a group, now or when it is empty."""
        if not group.remove():
            self._dying.append(group)

    def close(self) -> None:
        """Leave nothing behind."""
        for group in (*self._dying, *self._free):
            group.remove()
        for base in set(self._bases.values()):
            with contextlib.suppress(OSError):
                base.rmdir()

    def _bury(self) -> None:
        if self._dying:
            self._dying = [group for group in self._dying if not group.remove()]

    def _limit(self, folder: Path, controller: str, amount: float) -> None:
        if controller == "pids":
            _write(folder / "pids.max", int(amount))
        elif controller == "memory":
            most = int(amount) << 20
            _write(folder / ("memory.max" if self._unified else "memory.limit_in_bytes"), most)
            with contextlib.suppress(OSError):  # where the kernel does not count swap, there may be none
                swap = ("memory.swap.max", 0) if self._unified else ("memory.memsw.limit_in_bytes", most)
                _write(folder / swap[0], swap[1])
        elif self._unified:
            _write(folder / "cpu.max", f"{_quota(amount)} {_PERIOD_US}")
        else:
            try:
                _write(folder / "cpu.cfs_quota_us", _quota(amount))
            except OSError as exc:
                if exc.errno != errno.EINVAL:  # it is more than we have ourselves, and that is held, too
                    raise


def _quota(cpus: float) -> int:
    return max(int(cpus * _PERIOD_US), _LEAST_US)


class Mount(NamedTuple):
    """Where a hierarchy is mounted, and which part of it."""

    path: str
    root: str
    kind: str
    controllers: list[str]


def find(proc: Path = Path("/proc/self")) -> Cgroups:
    """Whatever this worker may use; it may be nothing."""
    mounts, places = _mounts(_read(proc / "mountinfo")), _places(_read(proc / "cgroup"))
    bases: dict[str, Path] = {}
    for mount in mounts:
        if mount.kind == "cgroup2" and "" in places:
            bases = _unified(_folder(mount, places[""]))
            if bases:
                return Cgroups(bases, unified=True)
    for mount in mounts:
        for controller in set(_CONTROLLERS) & set(mount.controllers) & set(places):
            with contextlib.suppress(OSError):
                bases[controller] = _base(_folder(mount, places[controller]))
    return Cgroups(bases, unified=False)


def _mounts(mountinfo: str) -> list[Mount]:
    out = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            out.append(Mount(fields[4], fields[3], kind, options.split(",") if kind == "cgroup" else []))
    return out


def _places(cgroup: str) -> dict[str, str]:
    """Our group by controller; of version 2 under the empty name."""
    lines = [line.split(":", 2) for line in cgroup.splitlines()]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _folder(mount: Mount, place: str) -> Path:
    """A group's folder; in a container, what is mounted may begin further down."""
    inside = place.removeprefix(mount.root) if mount.root != "/" else place
    return Path(mount.path, inside.lstrip("/"))


def _base(parent: Path) -> Path:
    """A folder for our groups. Those of workers that are gone are removed."""
    for path in parent.glob("tocsin-*"):
        found = _OURS.fullmatch(path.name)
        if found is not None and not os.path.exists(f"/proc/{found[1]}"):
            with contextlib.suppress(OSError):
                for group in path.iterdir():
                    if group.is_dir():
                        group.rmdir()
                path.rmdir()
    base = parent / f"tocsin-{os.getpid()}-{secrets.token_hex(4)}"
    base.mkdir()
    return base


def _unified(group: Path) -> dict[str, Path]:
    """The controllers that we may hand on to groups below ours, of version 2."""
    has = set(_CONTROLLERS) & set(_read(group / "cgroup.controllers").split())
    if not has:
        return {}
    order = " ".join(f"+{controller}" for controller in sorted(has))
    try:
        if not has <= set(_read(group / "cgroup.subtree_control").split()):
            _move_into_a_leaf(group)
            _write(group / "cgroup.subtree_control", order)
        base = _base(group)
        _write(base / "cgroup.subtree_control", order)
    except OSError:
        return {}
    return dict.fromkeys(has, base)


def _move_into_a_leaf(group: Path) -> None:
    mine = {os.getpid(), *_children()}
    there = {int(pid) for pid in _read(group / "cgroup.procs").split()}
    if not there <= mine:
        raise OSError("others live in this worker's group")
    leaf = group / "tocsin-worker"
    leaf.mkdir(exist_ok=True)
    for pid in there:
        _write(leaf / "cgroup.procs", pid)


def _children() -> list[int]:
    return [int(pid) for pid in _read(Path(f"/proc/self/task/{os.getpid()}/children")).split()]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


def _write(path: Path, value: object) -> None:
    # Not by creating it: in a folder that is none of the kernel's, a file of that name would be a lie.
    with open(os.open(path, os.O_WRONLY), "w") as file:
        file.write(str(value))
