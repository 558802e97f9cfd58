"""Limits that several runs share: concurrency keys, rates, and who of those that want to start now may.

A rate is kept as one instant per key (GCRA): `tat`, when all that was let through so far would have come at an even
pace. A run may go while that is less than a burst ahead of now.
"""

from __future__ import annotations

import hmac
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

_PLACEHOLDER = re.compile(r"\{args((?:\.[A-Za-z0-9_-]+)+)\}")
_UNITS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86_400}
_RATE = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{0,6})\s*([a-z]+)\s*", re.ASCII)
_NAMESPACE = uuid.UUID("6f1f6f0e-6c1c-5f0a-9d6b-1f4f6a2b7c11")
LONGEST_KEY = 256


class BadLimit(ValueError):
    """What is wrong with a limit, in words."""


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_key(template: str) -> None:
    """Refuse a key that names something other than arguments of the run."""
    if not template.strip():
        raise BadLimit("is empty")
    rest = _PLACEHOLDER.sub("", template)
    if "{" in rest or "}" in rest:
        raise BadLimit("may name arguments as {args.customer} or {args.order.region}; other braces mean nothing")


def depends_on_args(template: str) -> bool:
    """Whether runs of one job may have different keys."""
    return _PLACEHOLDER.search(template) is not None


def rendered(template: str, args: Mapping[str, Any]) -> str:
    """The key of a run with these arguments; one that is missing leaves nothing in its place."""

    def value(match: re.Match[str]) -> str:
        found: Any = args
        for name in match[1][1:].split("."):
            found = found.get(name) if isinstance(found, dict) else None
        if found is None or isinstance(found, dict | list):
            return ""
        text = str(found).lower() if isinstance(found, bool) else str(found)
        return text[:LONGEST_KEY]  # a template may name a long argument many times

    return _PLACEHOLDER.sub(value, template)[:LONGEST_KEY]


def key_id(tenant_id: int, key: str, pepper: bytes = b"") -> str:
    """The number that stands for a tenant's key everywhere. With a pepper nobody who lacks that can tell from the
    number what the key is; such keys are others than those without."""
    named = f"{tenant_id}/{key}"
    if pepper:
        return str(uuid.UUID(bytes=hmac.digest(pepper, named.encode(), "sha256")[:16], version=4))
    return str(uuid.uuid5(_NAMESPACE, named))


# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Rate(NamedTuple):
    """One run every `gap`, and up to `burst` at once after a pause."""

    gap: timedelta
    burst: int

    def room(self, tat: datetime | None, now: datetime) -> int:
        """How many may go now."""
        ahead = max(timedelta(0), tat - now) if tat is not None else timedelta(0)
        return max(0, math.floor(self.burst - ahead / self.gap + 1e-9))

    def after(self, tat: datetime | None, now: datetime, count: int) -> datetime:
        """The instant to keep when `count` go now."""
        return max(tat or now, now) + count * self.gap

    def opens_at(self, tat: datetime) -> datetime:
        """When one more may go."""
        return tat - (self.burst - 1) * self.gap


def parse_rate(text: str, burst: int | None = None) -> Rate:
    """`100/min`, `10/s`, `1000/day`, `5/10min`. A burst, unless it is given, is what a second brings, one at least."""
    match = _RATE.fullmatch(text)
    unit = _UNITS.get(match[3].removesuffix("s") if len(match[3]) > 1 else match[3]) if match else None
    if match is None or unit is None:
        raise BadLimit('is not a rate such as "100/min", "10/s" or "1000/day"')
    count, period = int(match[1]), int(match[2] or 1) * unit
    if not count or not period:
        raise BadLimit("lets nothing through")
    if count > 1_000_000 * period or period > 366 * 86_400:
        raise BadLimit("is more than a million a second, or counts over more than a year")
    return Rate(timedelta(seconds=period) / count, burst or max(1, math.ceil(count / period)))


# ── who may start ────────────────────────────────────────────────────────────────────────────────────────────────


class Wish(NamedTuple):
    """A run that would start now: its job, its key if it has one, and what binds it."""

    run: int
    job: str
    key: str | None = None
    job_max: int | None = None
    key_max: int | None = None
    rate: Rate | None = None

    @property
    def rated(self) -> str:
        """Whose rate it is: the key's, else the job's."""
        return self.key or self.job


class Blocked(NamedTuple):
    """A run that may not start, and what it waits for."""

    run: int
    by: str
    key: str


class Verdict(NamedTuple):
    """Who goes, who waits for what, and the instants of the rates that were used."""

    going: list[int]
    blocked: list[Blocked]
    tats: dict[str, datetime]


def admit(
    wishes: Sequence[Wish],
    running: Mapping[str, int],
    tats: Mapping[str, datetime | None],
    now: datetime,
    slots: int,
    seat: Callable[[int], bool] = lambda _: True,
) -> Verdict:
    """Let runs start in their order while every limit that binds them has room. `running` counts by job and by key.
    Once the slots are used up nobody is judged any more: who is left stays where it is; so does a run that no limit
    holds but that finds no seat."""
    count, spent = dict(running), dict(tats)
    going: list[int] = []
    blocked: list[Blocked] = []
    used: dict[str, datetime] = {}
    for wish in wishes:
        if len(going) == slots:
            break
        full = _full(wish, count, spent, now)
        if full is not None:
            blocked.append(full)
            continue
        if not seat(wish.run):
            continue
        going.append(wish.run)
        for key in (wish.job, wish.key):
            if key is not None:
                count[key] = count.get(key, 0) + 1
        if wish.rate is not None:
            spent[wish.rated] = used[wish.rated] = wish.rate.after(spent.get(wish.rated), now, 1)
    return Verdict(going, blocked, used)


def _full(wish: Wish, count: Mapping[str, int], tats: Mapping[str, datetime | None], now: datetime) -> Blocked | None:
    if wish.job_max is not None and count.get(wish.job, 0) >= wish.job_max:
        return Blocked(wish.run, "limit", wish.job)
    if wish.key is not None and wish.key_max is not None and count.get(wish.key, 0) >= wish.key_max:
        return Blocked(wish.run, "limit", wish.key)
    if wish.rate is not None and not wish.rate.room(tats.get(wish.rated), now):
        return Blocked(wish.run, "rate", wish.rated)
    return None
