"""CPU time of process trees, from /proc: children that have ended are counted by whoever waited for them."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far: of each named tree, and of the whole machine."""

    trees: Mapping[str, float]
    machine: float

    def since(self, before: Usage) -> Usage:
        """What was used after `before`."""
        trees = {name: seconds - before.trees.get(name, 0.0) for name, seconds in self.trees.items()}
        return Usage(trees, self.machine - before.machine)

    def foreign(self) -> float:
        """CPU seconds that went to others than these trees."""
        return max(0.0, self.machine - sum(self.trees.values()))


def measure(trees: Mapping[str, Iterable[int]]) -> Usage:
    """The CPU seconds of trees of processes, given their roots."""
    children, own = _read_processes()
    used = {name: sum(_total(root, children, own) for root in roots) for name, roots in trees.items()}
    return Usage(used, _machine())


def tree(root: int) -> list[int]:
    """A process and all that descends from it."""
    children, _ = _read_processes()
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _total(pid: int, children: Mapping[int, list[int]], own: Mapping[int, float]) -> float:
    return own.get(pid, 0.0) + sum(_total(child, children, own) for child in children.get(pid, ()))


def _read_processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Children by parent, and CPU seconds of each process with those children that it has waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    own: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may hold anything: what follows it is plain.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children[int(fields[1])].append(int(folder.name))
                own[int(folder.name)] = sum(map(int, fields[11:15])) * _TICK
    return children, own


def _machine() -> float:
    """User, nice, system, interrupts and steal of all cores."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) * _TICK
