"""What a dispatcher remembers of runs that need more of a worker than a slot: for which of them no worker had room when
it last looked, and which workers are kept for a run that has waited too long.

All of it may be forgotten: a run that nobody looks at is found by the next scan, and a worker that is kept no longer is
kept again by the next look at the run that starves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from tocsin.flow.claim import Fitting, Share, Taken
from tocsin.flow.shared.transitions import Key

PlaceKey = tuple[int, int]  # (lane, tenant)

LOOK_AGAIN = 0.01  # seconds at least between two looks at a place whose runs found no room
_FADES = 10.0  # seconds after which a worker is kept no longer for a run that was not seen together with it
_LOOKS = 200  # runs that are looked at in one claim, over all places, beyond what may be taken


class _Kept(NamedTuple):
    run: Key
    seen: float


class Fitter:
    """The memory of one dispatcher. `near_wait` and `patience` are as in `Fitting`."""

    def __init__(self, near_wait: timedelta, patience: timedelta) -> None:
        self._near_wait, self._patience = near_wait, patience
        self._looked: dict[PlaceKey, float] = {}  # places with runs that found no room, and when they did not
        self._from: dict[PlaceKey, datetime] = {}  # where to go on, behind many that found no room
        self._kept: dict[str, _Kept] = {}
        self.room_came = False  # since a look found none

    def worth_a_look(self, places: Mapping[PlaceKey, datetime]) -> dict[PlaceKey, datetime]:
        """Without those that were looked at in vain a moment ago."""
        if not self._looked:
            return dict(places)
        lately = time.monotonic() - LOOK_AGAIN
        return {key: floor for key, floor in places.items() if self._looked.get(key, 0.0) <= lately}

    def looks(self, shares: list[Share], fitted: Collection[int]) -> list[Share]:
        """How deep to look where runs need more than a slot; and from where: behind those that the last look saw in
        vain, until one has come to the end of them."""
        depth = max(1, _LOOKS // max(1, sum(s.lane_id in fitted for s in shares)))
        return [
            s._replace(look=max(s.most, depth), floor=self._from.get((s.lane_id, s.tenant_id), s.floor))
            if s.lane_id in fitted
            else s
            for s in shares
        ]

    def in_vain(self) -> Iterable[PlaceKey]:
        """The places of runs that found no room."""
        return self._looked

    def terms(self, lanes: Mapping[str, frozenset[int]], spare: list[str]) -> Fitting:
        """For a claim on behalf of these workers; `spare`: of slots that only runs with needs may have."""
        fresh = time.monotonic() - _FADES
        self._kept = {worker: kept for worker, kept in self._kept.items() if kept.seen > fresh}
        kept = {worker: one.run for worker, one in self._kept.items()}
        return Fitting(spare, lanes, kept, self._near_wait, self._patience)

    def learn(self, shares: Iterable[Share], taken: Taken) -> None:
        """What a claim says."""
        now = time.monotonic()
        looks = {(share.lane_id, share.tenant_id): share.look for share in shares}
        for key in looks:
            self._looked.pop(key, None)
            self._from.pop(key, None)
        in_vain: dict[PlaceKey, list[datetime]] = defaultdict(list)
        for unfit in taken.unfit:
            in_vain[unfit.lane_id, unfit.tenant_id].append(unfit.order_key)
        self._looked |= dict.fromkeys(in_vain, now)
        full = [key for key, order_keys in in_vain.items() if len(order_keys) >= looks[key]]
        self._from |= {key: max(in_vain[key]) + timedelta(microseconds=1) for key in full}
        seen = {unfit.run_id: Key(unfit.tenant_id, unfit.run_id) for unfit in taken.unfit}
        for worker, run_id in taken.kept.items():
            if run_id is None:
                self._kept.pop(worker, None)
            elif run_id in seen:  # else it may be gone
                self._kept[worker] = _Kept(seen[run_id], now)
        if self._kept:
            started = {row["id"] for row in taken.rows}
            self._kept = {worker: kept for worker, kept in self._kept.items() if kept.run.id not in started}
