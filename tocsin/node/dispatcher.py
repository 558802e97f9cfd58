"""The dispatcher: gathers what the workers of this node can take, claims for all of them at once, fairly.

It remembers, per (lane, tenant), whether something may be claimable and where live index entries begin (the floor),
so that a claim starts at live rows however many dead ones a held snapshot keeps in front of them. Hints keep the
memory fresh; a scan from the very beginning, now and then, is the safety net, and polling alone stays correct.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tocsin.flow import claim
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.flow.fleet import Worker
from tocsin.flow.shared.lanes import LaneBook
from tocsin.flow.shared.transitions import Hint
from tocsin.model.fairness import VirtualTime, allot
from tocsin.node.loop import Loop
from tocsin.store.db import Database, Row

_HUNGRY_SCAN = 0.25  # seconds between scans while workers wait for something to do
_BUSY_SCAN = 2.0
_LOOK_BACK = timedelta(seconds=15)  # the head start of the highest priority, and 5 s for what was inserted out of order
_MOST_PER_CLAIM = 1000
_PROMOTE = 1000


@dataclass(eq=False)
class Poll:
    """One worker's request for work, open until it gets some, gets an order, or its time is up."""

    worker: Worker
    slots: int
    answer: asyncio.Future[list[Row]]
    lanes: frozenset[int] = frozenset()
    lapses_at: float = float("inf")  # on the monotonic clock, as far as this node knows
    claiming: bool = False
    closed: bool = False
    uncertain: bool = False  # a claim for it failed, perhaps after its commit

    def settle(self, rows: list[Row]) -> None:
        """Answer it, once."""
        self.claiming = False
        if not self.answer.done():
            self.answer.set_result(rows)


@dataclass
class Place:
    """A tenant's queue in one lane, as far as this node knows."""

    floor: datetime = THE_BEGINNING
    may_have: bool = False
    next_due: datetime | None = None
    hints: int = 0


@dataclass
class Dispatcher(Loop):
    """Serves the long polls of the workers connected to this node."""

    db: Database
    lanes: LaneBook
    name: str = "dispatcher"
    polls: list[Poll] = field(default_factory=list)
    _places: dict[tuple[int, int], Place] = field(default_factory=lambda: defaultdict(Place))
    _times: dict[str, VirtualTime] = field(default_factory=lambda: defaultdict(VirtualTime))
    _weights: dict[int, int] = field(default_factory=dict)
    _served: dict[frozenset[int], float] = field(default_factory=dict)
    _scanned: float = 0.0
    _looked_back: float = 0.0
    _lanes_known: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    # ── what others tell it ──────────────────────────────────────────────────────────────────────────────────────

    def open_poll(self, worker: Worker, slots: int, lapses_at: float = float("inf")) -> Poll:
        """A worker has free slots, and a lease until `lapses_at` unless it renews it."""
        poll = Poll(worker, slots, asyncio.get_running_loop().create_future(), lapses_at=lapses_at)
        poll.lanes = self.lanes.open_to(worker.pool, worker.targets, worker.functions)
        self.polls.append(poll)
        self.wake()
        return poll

    def close_poll(self, poll: Poll) -> None:
        """The worker is not waiting any more. If a claim for it is under way, that claim still settles it."""
        poll.closed = True
        if poll in self.polls:
            self.polls.remove(poll)
        if not poll.claiming:
            poll.settle([])

    def hint(self, hints: Iterable[Hint]) -> None:
        """Something became claimable, or will."""
        now = self.db.clock.now()
        for hint in hints:
            place = self._places[hint.lane_id, hint.tenant_id]
            place.hints += 1
            place.floor = min(place.floor, hint.order_key)
            if hint.ready_at <= now:
                place.may_have = True
            elif place.next_due is None or hint.ready_at < place.next_due:
                place.next_due = hint.ready_at
        self.wake()

    def rescan(self) -> None:
        """Something became claimable somewhere."""
        self._scanned = 0.0
        self.wake()

    def served_lanes(self) -> set[int]:
        """Lanes that workers of this node asked for lately."""
        horizon = time.monotonic() - 60
        self._served = {lanes: at for lanes, at in self._served.items() if at > horizon}
        return set().union(*self._served) if self._served else set()

    # ── its turn ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def run_once(self) -> float:
        await self._learn_lanes()
        self._wake_due_places()
        for poll in [p for p in self.polls if p.lapses_at < time.monotonic()]:
            self.close_poll(poll)
        claimed = True
        while claimed and self.polls:
            claimed = False
            for lanes in {poll.lanes for poll in self.polls}:
                self._served[lanes] = time.monotonic()
                claimed |= await self._serve(lanes)
        if time.monotonic() - self._scanned >= (_HUNGRY_SCAN if self.polls else _BUSY_SCAN):
            await self._scan()
            if self.polls and any(place.may_have for place in self._places.values()):
                return 0
        return self._pause()

    def _pause(self) -> float:
        now = self.db.clock.now()
        soonest = min((p.next_due for p in self._places.values() if p.next_due is not None), default=None)
        longest = _HUNGRY_SCAN if self.polls else _BUSY_SCAN
        return max(0.0005, min(longest, (soonest - now).total_seconds())) if soonest else longest

    def _wake_due_places(self) -> None:
        now = self.db.clock.now()
        for place in self._places.values():
            if place.next_due is not None and place.next_due <= now:
                place.next_due, place.may_have = None, True

    async def _learn_lanes(self) -> None:
        """Lanes are made by submitting, here or on another node, while polls are open."""
        if time.monotonic() - self._scanned >= _HUNGRY_SCAN:
            await self.lanes.refresh()
        if len(self.lanes) != self._lanes_known:
            self._lanes_known = len(self.lanes)
            for poll in self.polls:
                w = poll.worker
                poll.lanes = self.lanes.open_to(w.pool, w.targets, w.functions)

    async def _serve(self, lanes: frozenset[int]) -> bool:
        """One claim for all workers with these abilities; answers whether another one may find more."""
        polls = [p for p in self.polls if p.lanes == lanes and not p.answer.done()]
        slots = _interleave(polls)[:_MOST_PER_CLAIM]
        shares = self._shares(lanes, len(slots), polls[0].worker.pool) if slots else []
        if not shares:
            return False
        given: dict[int, list[Row]] = defaultdict(list)
        hints = [self._places[s.lane_id, s.tenant_id].hints for s in shares]
        for poll in polls:
            poll.claiming = True
        try:
            taken = await claim.take(self.db, shares, [slot.worker.id for slot in slots])
            for row in taken.rows:
                given[id(slots[row["slot"] - 1])].append(row)
        except BaseException:
            for poll in polls:
                poll.uncertain = True
            raise
        finally:
            for poll in polls:
                poll.claiming = False
                if given[id(poll)] or poll.closed:
                    poll.settle(given[id(poll)])
            self.polls = [poll for poll in self.polls if not poll.answer.done()]
        self._learn(shares, hints, taken, polls[0].worker.pool)
        return taken.left.total() > 0 or any(self._places[s.lane_id, s.tenant_id].may_have for s in shares)

    def _shares(self, lanes: frozenset[int], slots: int, pool: str) -> list[Share]:
        """How much each tenant may take now, and from which of its lanes: the one whose first run is foremost."""
        first: dict[int, tuple[int, Place]] = {}
        for (lane, tenant), place in self._places.items():
            if place.may_have and lane in lanes and (tenant not in first or place.floor < first[tenant][1].floor):
                first[tenant] = (lane, place)
        if not first:
            return []
        shares = allot(slots, self._times[pool].of(first), self._weights)
        look_back = self._look_back()
        return [Share(first[t][0], t, n, min(first[t][1].floor, look_back)) for t, n in shares.items()]

    def _look_back(self) -> datetime:
        """Every quarter second one claim starts a little earlier than the floors say."""
        if time.monotonic() - self._looked_back < _HUNGRY_SCAN:
            return datetime.max.replace(tzinfo=THE_BEGINNING.tzinfo)
        self._looked_back = time.monotonic()
        return self.db.clock.now() - _LOOK_BACK

    def _learn(self, shares: Sequence[Share], hints: Sequence[int], taken: claim.Taken, pool: str) -> None:
        """What a claim says of its places, unless a hint came while it was under way: that knows of younger runs."""
        last: dict[tuple[int, int], datetime] = {}
        given: dict[int, int] = defaultdict(int)
        for row in taken.rows:
            key = row["lane_id"], row["tenant_id"]
            given[key[1]] += 1
            if key not in last or last[key] < row["order_key"]:
                last[key] = row["order_key"]
        for share, before in zip(shares, hints, strict=True):
            key = share.lane_id, share.tenant_id
            place = self._places[key]
            if place.hints == before:
                place.may_have = taken.left[key] >= share.most
                place.floor = last.get(key, place.floor)
        for tenant, count in given.items():
            self._times[pool].charge(tenant, count, self._weights.get(tenant, 1))

    async def _scan(self) -> None:
        """Look from the very beginning who has something, and put what is due but cannot start in order."""
        lanes = self.served_lanes()
        self._scanned = time.monotonic()
        if not lanes:
            return
        self._weights = await claim.weights(self.db)
        heads = await claim.heads(self.db, sorted(lanes))
        now = self.db.clock.now()
        seen = set()
        for head in heads:
            key = head.lane_id, head.tenant_id
            place = self._places[key]
            seen.add(key)
            if head.head is not None:
                place.floor, place.may_have = head.head, True
            elif head.due is not None and head.due <= now:
                place.may_have = True
            elif head.due is not None:
                place.next_due = head.due
        for key in self._places.keys() - seen:
            if key[0] in lanes and self._places[key].next_due is None and not self._places[key].may_have:
                del self._places[key]
        crowded = [(h.lane_id, h.tenant_id) for h in heads if h.due is not None and h.due <= now]
        if crowded and not self.polls:
            await claim.promote(self.db, crowded, _PROMOTE)
        for times in self._times.values():
            times.forget_idle({tenant for _, tenant in seen})


def _interleave(polls: list[Poll]) -> list[Poll]:
    """The free slots of all polls, in turn, whoever has most first: work spreads over the workers."""
    order = sorted(polls, key=lambda p: -p.slots)
    out: list[Poll] = []
    depth = 0
    while len(out) < _MOST_PER_CLAIM:
        layer = [p for p in order if p.slots > depth]
        if not layer:
            break
        out += layer
        depth += 1
    return out
