"""How many workers a pool wants: enough for what comes in, and for its backlog to be gone soon.

Known is what every sample tells: how many runs were handed out so far, how many wait to be, how many run. The rest
follows: what came in is what was handed out and what the queue grew by, and a run holds its slot for as long as the
running ones last at the rate at which they are replaced (Little's law).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WINDOW = 60.0  # seconds over which rates are taken
DRAIN = 60.0  # seconds in which a backlog is to be gone
BUSY = 0.8  # the share of slots that is to be at work when nothing waits


class Sample(NamedTuple):
    """A pool at an instant (seconds on any clock that only rises): runs handed out so far, due and not yet handed out,
    and running."""

    at: float
    claimed: int
    queued: int
    running: int


class Load(NamedTuple):
    """What a pool has to do: what is there, what comes in a second, and how long a run holds its slot (None: nobody
    knows, for nothing has started yet)."""

    queued: int
    running: int
    arrivals: float
    service: float | None


def load_of(samples: Sequence[Sample]) -> Load:
    """The load at the last of these samples, which are in the order of time."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    claimed = last.claimed - first.claimed
    running = sum(sample.running for sample in samples) / len(samples)
    if seconds <= 0 or claimed <= 0:
        # Nothing was replaced all the while: what runs takes at least that long.
        return Load(last.queued, last.running, 0.0, seconds if running and seconds > 0 else None)
    arrivals = max(0.0, (claimed + last.queued - first.queued) / seconds)
    return Load(last.queued, last.running, arrivals, running * seconds / claimed)


def wanted_workers(load: Load, slots: float) -> int:
    """How many workers with so many slots each. One more is enough to find out how long runs take."""
    if load.service is None:
        return max(min(1, load.queued), math.ceil(load.running / max(slots, 1.0)))
    # How much of a slot each run that is there wants, until the backlog is to be gone: a long one wants one of its own,
    # short ones follow each other.
    held = min(1.0, load.service / DRAIN)
    steady = load.arrivals * load.service / BUSY if load.arrivals else 0.0
    needed = max(steady, load.running * held) + load.queued * held
    at_least = 1 if load.queued or load.running else 0
    return max(at_least, math.ceil(needed / max(slots, 1.0) - 1e-9))
