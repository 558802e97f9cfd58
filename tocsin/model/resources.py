"""Resources and placement: what a run takes of a worker, which worker it goes to, and whom a worker is kept for.

Amounts are whole numbers (a processor is a thousand of them), so that sums are exact. Nothing here knows how many
workers there are elsewhere or what time it is: both come as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

Labels = Mapping[str, str]
MOST = 1_000_000_000  # of anything; far beyond any machine, and a sum of many fits into 64 bits
MOST_CPUS = 1_000_000


class Amounts(NamedTuple):
    """So much of each resource."""

    cpu: int = 0  # thousandths of a processor
    memory_mb: int = 0
    disk_mb: int = 0
    gpus: int = 0

    def plus(self, other: Amounts) -> Amounts:
        """The sum."""
        return Amounts(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Amounts) -> Amounts:
        """What is left of it; less than nothing where more was taken than there is."""
        return Amounts(*(a - b for a, b in zip(self, other, strict=True)))

    def within(self, room: Amounts) -> bool:
        """Whether it fits there. What is not asked for need not be there, whatever was promised of it before."""
        # Written out: a claim asks this of each run and worker.
        cpu, memory, disk, gpus = self
        return (
            (not cpu or cpu <= room[0])
            and (not memory or memory <= room[1])
            and (not disk or disk <= room[2])
            and (not gpus or gpus <= room[3])
        )

    def document(self) -> dict[str, float]:
        """As the API answers it."""
        return self._asdict() | {"cpu": self.cpu / 1000}


NOTHING = Amounts()


def amounts(told: Mapping[str, float]) -> Amounts:
    """From the numbers of a document; what it does not name is none. A part of a thousandth counts as a whole one."""
    cpu = math.ceil(told.get("cpu", 0) * 1000 - 1e-6)
    return Amounts(cpu, *(math.floor(told.get(name, 0)) for name in Amounts._fields[1:]))


# ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def class_of(needs: Amounts) -> Amounts:
    """The class that runs with these needs share a lane with: each amount rounded up to a power of two."""
    return Amounts(*(1 << (n - 1).bit_length() if n else 0 for n in needs))


def may_hold(total: Amounts, of_class: Amounts) -> bool:
    """Whether a worker that has `total` could take some run of a class. More than half of a class is in it."""
    return all(have > most // 2 for have, most in zip(total, of_class, strict=True) if most)


def matches(labels: Labels, wanted: Iterable[tuple[str, str]]) -> bool:
    """Whether a worker has all these labels."""
    return all(labels.get(name) == value for name, value in wanted)


# ── who goes where ───────────────────────────────────────────────────────────────────────────────────────────────


class Guest(NamedTuple):
    """A run that needs a worker. `near_only`: it accepts only a worker with the labels that it prefers for now.
    `starving`: it has waited so long that a worker must be kept for it. `suspect`: it may have taken its last worker
    down."""

    id: str
    lane_id: int
    needs: Amounts = NOTHING
    prefer: Mapping[str, str] = {}
    near_only: bool = False
    starving: bool = False
    suspect: bool = False


class Room(NamedTuple):
    """A worker with free slots: its resources, the part that runs use, and the run for which it is kept. `lanes`: the
    lanes it may take from; None means all. `suspected`: it holds a suspect."""

    slots: Sequence[int]
    total: Amounts = NOTHING
    used: Amounts = NOTHING
    labels: Mapping[str, str] = {}
    lanes: Collection[int] | None = None
    kept_for: str | None = None
    suspected: bool = False


class Seating:
    """The free slots and resources of some workers, given out one run after the other.

    A run with needs goes where it leaves least (best fit, over all resources, so that what needs no gpu leaves those
    that have one alone), a worker it prefers before any other; a run without goes to the first slot. All ties are
    broken by the workers' order, so the same question has the same answer.

    A worker that is kept for a run gives nothing of its resources to others; runs that take none may still go there.
    A worker has one suspect at a time.
    """

    def __init__(self, rooms: Sequence[Room]) -> None:
        self._rooms = list(rooms)
        self._free = [room.total.minus(room.used) for room in rooms]
        self._slots = [list(reversed(room.slots)) for room in rooms]
        self._scale = [max([1, *(room.total[d] for room in rooms)]) for d in range(len(NOTHING))]
        self._left = [self._share(free) for free in self._free]
        self._open: dict[int, list[int]] = {}
        self._suspected = {i for i, room in enumerate(rooms) if room.suspected}
        self.slot_of: dict[str, int] = {}
        self.kept: dict[int, str] = {i: room.kept_for for i, room in enumerate(rooms) if room.kept_for is not None}

    def free(self, room: int) -> Amounts:
        """What is left of a worker's resources."""
        return self._free[room]

    def seat(self, guest: Guest) -> bool:
        """Give a run its slot, if there is one for it now; keep a worker for it if it has waited too long."""
        able = self._able(guest)
        if guest.prefer and able:
            near = [i for i in able if matches(self._rooms[i].labels, guest.prefer.items())]
            able = near if near or guest.near_only else able
        if not able:
            if guest.starving:
                self._keep(guest)
            return False
        # All that have room are left with less by the same amount, so who has least now has least then.
        best = min(able, key=self._left.__getitem__ if guest.needs != NOTHING else lambda i: self._slots[i][-1])
        self.slot_of[guest.id] = self._slots[best].pop()
        if guest.suspect:
            self._suspected.add(best)
        self._free[best] = self._free[best].minus(guest.needs)
        self._left[best] = self._share(self._free[best])
        self.kept = {i: run for i, run in self.kept.items() if run != guest.id}
        return True

    def _able(self, guest: Guest) -> list[int]:
        """Who has a slot and room for a run, in order."""
        needs, slots, free, kept = guest.needs, self._slots, self._free, self.kept
        able = self._open_to(guest)
        if guest.suspect:
            able = [i for i in able if i not in self._suspected]
        if needs == NOTHING:
            return [i for i in able if slots[i]]
        return [i for i in able if slots[i] and needs.within(free[i]) and (i not in kept or kept[i] == guest.id)]

    def _open_to(self, guest: Guest) -> list[int]:
        """Who may take from its lane."""
        lane = guest.lane_id
        if lane not in self._open:
            self._open[lane] = [i for i, room in enumerate(self._rooms) if room.lanes is None or lane in room.lanes]
        return self._open[lane]

    def _share(self, of: Amounts) -> float:
        """Amounts of different kinds as one number: parts of the most that any of these workers has."""
        return sum(max(0, n) / scale for n, scale in zip(of, self._scale, strict=True))

    def _keep(self, guest: Guest) -> None:
        """Keep the worker that lacks least for a run that has waited too long, unless one is kept already."""
        if guest.id in self.kept.values():
            return
        able = [i for i in self._open_to(guest) if i not in self.kept and guest.needs.within(self._rooms[i].total)]
        if able:
            self.kept[min(able, key=lambda i: (self._share(guest.needs.minus(self._free[i])), i))] = guest.id


# ── what nobody could ever take ──────────────────────────────────────────────────────────────────────────────────


def why_unschedulable(needs: Amounts, totals: Iterable[Amounts]) -> str | None:
    """Why none of the workers that a run may go to could ever take it: which resource, and what the largest worker has
    of it. None if one could, or if there is no worker at all, for then resources are not what is missing."""
    known = list(totals)
    if not known or any(needs.within(total) for total in known):
        return None
    largest = Amounts(*(max(total[d] for total in known) for d in range(len(NOTHING))))
    need, most = needs.document(), largest.document()
    short = [
        f"{name} {need[name]:g} (the largest worker has {most[name]:g})" for name in need if need[name] > most[name]
    ]
    if not short:
        short = ["all that it needs together: " + ", ".join(f"{name} {need[name]:g}" for name in need if need[name])]
    return "no living worker that may take it has " + ", nor ".join(short)
