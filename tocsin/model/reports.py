"""What reports are made of: histograms that can be added up, percentiles of them, and tables as CSV.

Hot and cold history, and one day and the next, are counted apart and added: so durations are counted by buckets, each
a twentieth wider than the one before, and a percentile is right to 2.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from tocsin.errors import InvalidInput
from tocsin.model.scalars import EARLIEST

Kind = Literal["runs", "failures", "utilisation"]
# What each report may be grouped by; the first unless told.
GROUPS: dict[Kind, tuple[str, ...]] = {
    "runs": ("total", "day", "hour", "job"),
    "failures": ("class", "job", "worker", "day", "hour"),
    "utilisation": ("worker", "pool", "tenant", "job"),
}
IN_ORDER = ("day", "hour")  # groups that stand in their own order, not the largest first
GROWTH = 1.05  # stands in flow/reports.sql, too
SHORTEST = 0.1  # milliseconds: all that is shorter is one bucket
LONGEST_SPAN, LONGEST_BY_HOUR = timedelta(days=366), timedelta(days=31)


class Span(NamedTuple):
    """The runs of a report: made from `start` on, before `end`."""

    start: datetime
    end: datetime


def span(start: datetime | None, end: datetime | None, by: str, now: datetime) -> Span:
    """What was asked for, the last day unless told; raises why not."""
    end = end or now
    start = start or max(end - timedelta(days=1), EARLIEST)
    longest = LONGEST_BY_HOUR if by == "hour" else LONGEST_SPAN
    if not start < end:
        raise InvalidInput.field("from", "invalid_range", "must be before `to`")
    if end - start > longest:
        raise InvalidInput.field("from", "invalid_range", f"may be {longest.days} days before `to` at most")
    return Span(start, end)


def grouping(kind: Kind, by: str | None) -> str:
    """What to group by; raises if this report cannot be."""
    if by is None:
        return GROUPS[kind][0]
    if by not in GROUPS[kind]:
        raise InvalidInput.field("by", "invalid", f"must be one of {', '.join(GROUPS[kind])}")
    return by


def bucket(ms: float) -> int:
    """The bucket of a duration, as flow/reports.sql counts it."""
    return math.ceil(math.log(max(ms, SHORTEST)) / math.log(GROWTH))


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """The duration in milliseconds that so large a share does not exceed: of the ones counted by bucket."""
    wanted = math.ceil(share * sum(counts.values()))
    for number in sorted(counts):
        wanted -= counts[number]
        if wanted <= 0:
            # The middle of the bucket by ratio: no further than half a bucket from any that is in it.
            return round(math.pow(GROWTH, number - 0.5), 3)
    return None


def success_rate(states: Mapping[str, int]) -> float | None:
    """Of the runs that were to come to an end of their own, how many came to a good one."""
    good = states.get("succeeded", 0)
    tried = good + states.get("dead", 0) + states.get("expired", 0)
    return round(good / tried, 6) if tried else None
