"""When a run will start, as far as anybody can tell: one estimator for all who say so.

Every estimate has an error: about twice the standard deviation of what it follows from, so that nineteen of twenty
starts lie within it while the queue goes on as it did. Where nothing is known there is no estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from tocsin.model.limits import Rate

MOMENT = timedelta(milliseconds=250)  # a dispatcher that has free slots looks this often, told or not


class Estimate(NamedTuple):
    """An instant, and how far off it may be."""

    at: datetime
    error: timedelta


class Pace(NamedTuple):
    """So many starts in so many seconds."""

    starts: int
    seconds: float


def at_once(now: datetime) -> Estimate:
    """Nothing stands in the way."""
    return Estimate(now, MOMENT)


def not_before(instant: datetime) -> Estimate:
    """It is known when."""
    return Estimate(instant, MOMENT)


def in_queue(now: datetime, ahead: int, free: int, pace: Pace | None) -> Estimate | None:
    """`ahead` others go first, `free` slots are there at once, and the rest starts at the pace of the last minute."""
    needed = ahead + 1 - free
    if needed <= 0:
        return at_once(now)
    if pace is None or pace.starts <= 0:
        return None
    return _after(now, needed, pace.seconds / pace.starts, pace.starts)


def under_limit(now: datetime, ahead: int, places: int, lasts: timedelta | None) -> Estimate | None:
    """`ahead` others wait for one of `places`, each of which comes free when a run that `lasts` so long has ended."""
    if lasts is None or places <= 0:
        return None
    return _after(now, ahead + 1, lasts.total_seconds() / places, math.inf)


def at_rate(now: datetime, ahead: int, rate: Rate, tat: datetime | None) -> Estimate:
    """`ahead` others wait for the same rate."""
    opens = now if tat is None else max(now, rate.opens_at(tat))
    return Estimate(opens + ahead * rate.gap, MOMENT)


def behind_run(now: datetime, since: datetime | None, lasts: timedelta | None) -> Estimate | None:
    """Another run, which began at `since`, must end first."""
    if lasts is None:
        return None
    left = lasts if since is None else max(timedelta(0), lasts - (now - since))
    return Estimate(now + left, max(lasts, MOMENT))


def latest(estimates: Iterable[Estimate | None]) -> Estimate | None:
    """All of this must come to pass. The error reaches as far as the latest of them may."""
    known = list(estimates)
    if not known or any(one is None for one in known):
        return None
    at = max(one.at for one in known if one is not None)
    return Estimate(at, max(one.at + one.error for one in known if one is not None) - at)


def ahead_of(mine: int, weight: int, others: Sequence[tuple[int, int]]) -> int:
    """How many start before a run that has `mine` of its own tenant before it, while tenants share by weight. `others`:
    the weight of each other tenant and how many it has queued."""
    return mine + sum(min(queued, share_of(mine, weight, theirs)) for theirs, queued in others)


def share_of(mine: int, weight: int, theirs: int) -> int:
    """How many another tenant may start meanwhile."""
    return math.ceil((mine + 1) * theirs / weight)


def _after(now: datetime, needed: int, gap: float, seen: float) -> Estimate:
    """`needed` events, one every `gap` seconds on average, as chance would have them; the gap itself was learned from
    `seen` of them."""
    seconds = needed * gap
    return Estimate(
        now + timedelta(seconds=seconds),
        max(MOMENT, timedelta(seconds=seconds * 2 * math.sqrt(1 / needed + 1 / seen))),
    )
