"""The dispatcher: gathers what the workers of this node can take, claims for all of them at once, fairly.

It remembers, per (lane, tenant), whether something may be claimable and where live index entries begin (the floor),
so that a claim starts at live rows however many dead ones a held snapshot keeps in front of them. Hints keep the
memory fresh; a scan from the very beginning is the safety net, made as often as it is cheap, and polling alone stays
correct.

It also remembers the next instant at which something staged falls due. Slots that nothing due wants are given to such
runs a moment ahead of their instant, and the worker starts them on the dot.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from tocsin.flow import claim, sweep
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.flow.fleet import Worker
from tocsin.flow.shared.lanes import LaneBook
from tocsin.flow.shared.transitions import Hint, Key
from tocsin.model.fairness import VirtualTime, allot, furthest_forward
from tocsin.node.fitting import LOOK_AGAIN, Fitter
from tocsin.node.loop import Loop, Pace
from tocsin.node.running import RECOUNT, RunningQuotas
from tocsin.store.db import Database, Row

_HUNGRY_SCAN = 0.25  # seconds between scans while workers wait for something to do
_BUSY_SCAN = 2.0
_STRAGGLERS = timedelta(seconds=60)  # longer than any transaction: what it stages was to come when it began
_OUT_OF_ORDER = timedelta(seconds=5)  # how much later than others something may be inserted that comes before them
THE_END = datetime.max.replace(tzinfo=THE_BEGINNING.tzinfo)
_KEPT_FREE = 16  # slots of a worker, or a quarter of a small one's, that are not given out ahead
_MOST_PER_CLAIM = 1000
_PROMOTE = 1000
_Claimed = TypeVar("_Claimed", claim.Taken, claim.Ahead)


class Reach(NamedTuple):
    """Which runs a worker may have: of these lanes, and of these tenants (None: of all)."""

    lanes: frozenset[int] = frozenset()
    tenants: frozenset[int] | None = None

    def has(self, place: tuple[int, int]) -> bool:
        """Whether it may have those of this (lane, tenant)."""
        return place[0] in self.lanes and (self.tenants is None or place[1] in self.tenants)

    def without(self, lanes: Collection[int]) -> Reach:
        """The rest of it."""
        return self._replace(lanes=self.lanes.difference(lanes))


NOWHERE = Reach()


@dataclass(eq=False)
class Poll:
    """One worker's request for work, open until it gets some, gets an order, or its time is up."""

    worker: Worker
    slots: int
    answer: asyncio.Future[list[Row]]
    reach: Reach = NOWHERE
    lapses_at: float = float("inf")  # on the monotonic clock, as far as this node knows
    ahead: bool = False  # takes runs before their instant
    held: int = 0  # further slots, whose run waits for its instant and gives way to something due …
    held_until: float = 0.0  # … before the first of them starts
    claiming: bool = False
    closed: bool = False
    uncertain: bool = False  # a claim for it failed, perhaps after its commit

    @property
    def slots_ahead(self) -> int:
        """How many runs it takes before their instant. Some slots stay free for what falls due meanwhile: a run that
        gives way is late, and a worker whose slots all wait for an instant that is near asks for nothing."""
        return max(0, self.slots - min(self.worker.slots // 4, _KEPT_FREE)) if self.ahead else 0

    def settle(self, rows: list[Row]) -> None:
        """Answer it, once."""
        self.claiming = False
        if not self.answer.done():
            self.answer.set_result(rows)


@dataclass
class Place:
    """A tenant's queue in one lane, as far as this node knows."""

    floor: datetime = THE_BEGINNING
    due_floor: datetime = THE_BEGINNING  # the same of what is staged
    may_have: bool = False
    crowded: bool = False  # the last claim found as much as it might take: what is staged may have been left out
    next_due: datetime | None = None
    ahead_until: datetime = THE_BEGINNING  # what falls due by then and could be handed out ahead has been
    hints: int = 0

    def opens_at(self, lead: timedelta) -> datetime | None:
        """When to hand out ahead. Half the lead before the instant: what the other half brings goes with it."""
        return self.next_due - lead / 2 if self.next_due is not None and self.next_due > self.ahead_until else None


@dataclass
class Dispatcher(Loop):
    """Serves the long polls of the workers connected to this node."""

    db: Database
    lanes: LaneBook
    lead: timedelta = timedelta(seconds=1)
    near_wait: timedelta = timedelta(seconds=2)  # how long a run waits for a worker that it prefers
    patience: timedelta = timedelta(seconds=30)  # how long it waits for room before a worker is kept for it
    name: str = "dispatcher"
    polls: list[Poll] = field(default_factory=list)
    _places: dict[tuple[int, int], Place] = field(default_factory=lambda: defaultdict(Place))
    _times: dict[str, VirtualTime] = field(default_factory=lambda: defaultdict(VirtualTime))
    _weights: dict[int, int] = field(default_factory=dict)
    _pools: dict[str, claim.Pool] = field(default_factory=dict)
    _quotas: RunningQuotas = field(default_factory=RunningQuotas)
    _handed_out: Counter[str] = field(default_factory=Counter)
    _served: dict[frozenset[int], float] = field(default_factory=dict)
    _scanned: float = 0.0
    _everywhere: bool = False
    _full_scans: Pace = field(default_factory=Pace)
    _looks_back: Pace = field(default_factory=Pace)
    _lanes_known: int = 0
    _opens: dict[Key, datetime] = field(default_factory=dict)  # when rates let the next one through
    # called with jobs whose occurrence waits to replace a run
    on_replace: Callable[[Collection[Key]], None] = lambda jobs: None

    def __post_init__(self) -> None:
        super().__init__()
        self._fitter = Fitter(self.near_wait, self.patience)

    # ── what others tell it ──────────────────────────────────────────────────────────────────────────────────────

    def open_poll(
        self,
        worker: Worker,
        slots: int,
        lapses_at: float = float("inf"),
        *,
        ahead: bool = False,
        held: int = 0,
        held_for: float = 0.0,
    ) -> Poll:
        """A worker has free slots, and a lease until `lapses_at` unless it renews it; `held` further ones have a run
        that gives way, for `held_for` seconds."""
        poll = Poll(worker, slots, asyncio.get_running_loop().create_future(), lapses_at=lapses_at)
        poll.ahead, poll.held, poll.held_until = ahead, held, time.monotonic() + held_for
        poll.reach = self._open_to(worker)
        self.polls.append(poll)
        self.look_for_room()
        self.wake()
        return poll

    def _open_to(self, w: Worker) -> Reach:
        return Reach(self.lanes.open_to(w.pool, w.targets, w.functions, w.resources, w.labels), w.tenants)

    def look_for_room(self) -> None:
        """A worker may have room again for runs that found none."""
        for key in self._fitter.in_vain():
            self._places[key].may_have = self._fitter.room_came = True
        if self._fitter.room_came:
            self.wake()

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
                continue
            place.due_floor = min(place.due_floor, hint.ready_at)
            if place.next_due is None or hint.ready_at < place.next_due:
                place.next_due = hint.ready_at
            if hint.ready_at <= place.ahead_until:
                place.ahead_until = THE_BEGINNING
        self.wake()

    def rescan(self) -> None:
        """Something became claimable somewhere."""
        self._scanned, self._everywhere = 0.0, True
        self.wake()

    def served_lanes(self) -> set[int]:
        """Lanes that workers of this node asked for lately."""
        horizon = time.monotonic() - 60
        self._served = {lanes: at for lanes, at in self._served.items() if at > horizon}
        return set().union(*self._served) if self._served else set()

    def free_lanes(self) -> set[int]:
        """Return the lanes for which a worker of this node has a free slot."""
        return set().union(*{poll.reach.lanes for poll in self.polls if not poll.answer.done()})

    def handed_out(self) -> dict[str, int]:
        """How many runs of each pool it has handed to workers since it was last asked."""
        counted, self._handed_out = self._handed_out, Counter()
        return dict(counted)

    # ── its turn ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def run_once(self) -> float:
        await self._learn_lanes()
        await self._open_rates()
        self._wake_due_places()
        for poll in [p for p in self.polls if p.lapses_at < time.monotonic()]:
            self.close_poll(poll)
        claimed = True
        while claimed and self.polls:
            claimed = False
            for reach in {poll.reach for poll in self.polls}:
                self._served[reach.lanes] = time.monotonic()
                claimed |= await self._serve(reach)
        for reach in {poll.reach for poll in self.polls if poll.slots_ahead} if self.lead else ():
            await self._serve_ahead(reach)
        if time.monotonic() - self._scanned >= (_HUNGRY_SCAN if self.polls else _BUSY_SCAN):
            await self._scan()
            if self.polls and any(place.may_have for place in self._places.values()):
                return 0
        return self._pause()

    def _pause(self) -> float:
        """Until the next instant that something is to be done at; a scan, at the latest."""
        now = self.db.clock.now()
        longest = _HUNGRY_SCAN if self.polls else _BUSY_SCAN
        if self.polls and self._quotas.full:
            longest = RECOUNT
        if self.polls and self._fitter.room_came:
            longest, self._fitter.room_came = LOOK_AGAIN, False
        reaches = {poll.reach for poll in self.polls if poll.slots_ahead} if self.lead else set()
        reaches = {reach.without(self.lanes.fitted) for reach in reaches}
        of_all = frozenset[int]().union(*(reach.lanes for reach in reaches if reach.tenants is None))
        of_some = [reach for reach in reaches if reach.tenants is not None]
        soonest = None
        for key, place in self._places.items():
            taken_ahead = key[0] in of_all or (of_some and any(reach.has(key) for reach in of_some))
            opens = place.opens_at(self.lead) if taken_ahead else None
            at = place.next_due if opens is None else opens
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        if self._opens and self.polls:
            soonest = min(filter(None, (soonest, *self._opens.values())))
        return max(0.0005, min(longest, (soonest - now).total_seconds())) if soonest else longest

    def _wake_due_places(self) -> None:
        now = self.db.clock.now()
        for place in self._places.values():
            if place.next_due is not None and place.next_due <= now:
                place.next_due, place.may_have = None, True

    async def _open_rates(self) -> None:
        """Let go what waited for a rate, the moment that it may: the sweep would come to it within a second."""
        now = self.db.clock.now()
        due = [key for key, at in self._opens.items() if at <= now]
        if due and self.polls:
            for key in due:
                del self._opens[key]
            self.hint(await sweep.release_keys(self.db, due, self.free_lanes()))

    async def _learn_lanes(self) -> None:
        """Lanes are made by submitting, here or on another node, while polls are open."""
        if time.monotonic() - self._scanned >= _HUNGRY_SCAN:
            await self.lanes.refresh()
        if self.lanes.version != self._lanes_known:
            self._lanes_known = self.lanes.version
            for poll in self.polls:
                poll.reach = self._open_to(poll.worker)

    async def _serve(self, reach: Reach) -> bool:
        """One claim for all workers with these abilities; answers whether another one may find more."""
        polls = [p for p in self.polls if p.reach == reach and not p.answer.done()]
        pool = polls[0].worker.pool if polls else ""
        terms = self._pools.get(pool, claim.Pool())
        if not polls or terms.paused:
            return False
        places = {key: place.floor for key, place in self._places.items() if place.may_have and reach.has(key)}
        places = await self._startable(terms, self._fitter.worth_a_look(places))
        shares = await self._in_one_order(places, polls) if terms.policy != "fair" else []
        # From here on nothing is awaited before the claim: a poll that was closed until now gets nothing.
        polls = [p for p in polls if not p.answer.done()]
        now = time.monotonic()
        slots = _interleave(polls, lambda p: p.slots)
        # Runs that wait for their instant give way only to what finds no other slot.
        slots += _interleave(polls, lambda p: p.held if p.held_until > now else 0)
        slots = slots[:_MOST_PER_CLAIM]
        shares = self._quotas.capped(shares or self._shares(places, len(slots), pool)) if slots else []
        if not shares:
            return False
        looks_back = self._looks_back.due(_HUNGRY_SCAN)
        if looks_back:
            self._looks_back.begin()
        forward = furthest_forward(terms.head_start) + _OUT_OF_ORDER
        earliest = self.db.clock.now() - forward if looks_back else THE_END
        shares = [
            s._replace(
                floor=min(self._places[s.lane_id, s.tenant_id].floor, earliest),
                due_floor=self._places[s.lane_id, s.tenant_id].due_floor,
            )
            for s in shares
        ]
        hints = [self._places[s.lane_id, s.tenant_id].hints for s in shares]
        taken = await self._take(polls, slots, shares)
        if looks_back:
            self._looks_back.end()
        self._learn(shares, hints, taken)
        self._opens |= taken.opens
        if taken.replaces:
            self.on_replace(taken.replaces)
        self._charge(taken.rows, pool)
        # Where something found no room, what stands behind it elsewhere may find some.
        found = taken.left.total() > 0 or bool(taken.unfit)
        return found or any(self._places[s.lane_id, s.tenant_id].may_have for s in shares)

    async def _take(self, polls: list[Poll], slots: list[Poll], shares: list[Share]) -> claim.Taken:
        """Claim for these slots. Runs that need more than one may go to any worker who waits and may have them."""
        fitted = {share.lane_id for share in shares} & self.lanes.fitted
        if not fitted:
            return await self._give(polls, slots, lambda workers: claim.take(self.db, shares, workers))
        shares = self._fitter.looks(shares, fitted)
        others = [p for p in self.polls if p.reach != polls[0].reach and not p.answer.done()]
        # What is claimed for all of them is told apart by lanes, not by tenants: one that may not have all stays out.
        whose = {share.tenant_id for share in shares}
        others = [p for p in others if p.reach.tenants is None or whose <= p.reach.tenants]
        others = [p for p in others if not fitted.isdisjoint(p.reach.lanes)]
        spare = _interleave(others, lambda p: p.slots)
        everybody = [*polls, *others]
        terms = self._fitter.terms({p.worker.id: p.reach.lanes for p in everybody}, [p.worker.id for p in spare])
        taken = await self._give(
            everybody, [*slots, *spare], lambda workers: claim.take(self.db, shares, workers[: len(slots)], terms)
        )
        self._fitter.learn([share for share in shares if share.look], taken)
        return taken

    async def _serve_ahead(self, reach: Reach) -> None:
        """The same with what falls due soon, for slots that nothing due wants."""
        polls = [p for p in self.polls if p.reach == reach and p.slots_ahead and not p.answer.done()]
        pool = polls[0].worker.pool if polls else ""
        # Who has room for what needs more than a slot is not known before its instant.
        simple = reach.without(self.lanes.fitted)
        now = self.db.clock.now()
        places = {
            key: place.next_due
            for key, place in self._places.items()
            if simple.has(key) and (at := place.opens_at(self.lead)) is not None and at <= now and place.next_due
        }
        terms = self._pools.get(pool, claim.Pool())
        open_ = {} if terms.paused else await self._startable(terms, places)
        for key in places.keys() - open_.keys():
            self._places[key].ahead_until = places[key]  # they wait for their instant
        polls = [p for p in polls if not p.answer.done()]
        slots = _interleave(polls, lambda p: p.slots_ahead)[:_MOST_PER_CLAIM]
        shares = self._quotas.capped(self._shares(open_, len(slots), pool)) if slots else []
        if not shares:
            return
        hints = [self._places[s.lane_id, s.tenant_id].hints for s in shares]
        taken = await self._give(polls, slots, lambda workers: claim.take_ahead(self.db, shares, workers, self.lead))
        self._learn_ahead(shares, hints, taken)
        self._charge(taken.rows, pool)

    async def _give(
        self, polls: list[Poll], slots: list[Poll], take: Callable[[list[str]], Awaitable[_Claimed]]
    ) -> _Claimed:
        """Claim for the workers of these slots, and answer the polls that got something."""
        given: dict[int, list[Row]] = defaultdict(list)
        for poll in polls:
            poll.claiming = True
        try:
            taken = await take([slot.worker.id for slot in slots])
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
        return taken

    async def _startable(
        self, terms: claim.Pool, places: dict[tuple[int, int], datetime]
    ) -> dict[tuple[int, int], datetime]:
        """The places of those tenants to whom the pool is open, and who have room."""
        if terms.tenants is not None:
            places = {key: at for key, at in places.items() if key[1] in terms.tenants}
        return await self._quotas.within(self.db, places)

    def _shares(self, places: dict[tuple[int, int], datetime], slots: int, pool: str) -> list[Share]:
        """How much each tenant may take now, and from which of its lanes: the one that is foremost."""
        first: dict[int, tuple[datetime, int]] = {}
        for (lane, tenant), place in places.items():
            if tenant not in first or (place, lane) < first[tenant]:
                first[tenant] = (place, lane)
        if not first:
            return []
        times = self._times[pool].of(first)
        self._times[pool].lift(self._quotas.full, min(times.values()))
        shares = allot(slots, times, self._weights)
        return [Share(first[tenant][1], tenant, most, THE_BEGINNING) for tenant, most in shares.items()]

    async def _in_one_order(self, places: dict[tuple[int, int], datetime], polls: list[Poll]) -> list[Share]:
        """The shares that let the foremost runs of all tenants start; none if all that waits can start now, for then
        there is no order to keep."""
        slots = min(_MOST_PER_CLAIM, sum(poll.slots + poll.held for poll in polls))
        known = [(*key, floor, self._places[key].due_floor) for key, floor in places.items()]
        runs = await claim.foremost(self.db, known, slots) if known else {}
        if sum(runs.values()) < slots:
            return []
        return [Share(lane, tenant, most, THE_BEGINNING) for (lane, tenant), most in runs.items()]

    def _learn(self, shares: Sequence[Share], hints: Sequence[int], taken: claim.Taken) -> None:
        """What a claim says of its places, unless a hint came while it was under way: that knows of younger runs."""
        last: dict[tuple[int, int], datetime] = {}
        for row in taken.rows:
            key = row["lane_id"], row["tenant_id"]
            if key not in last or last[key] < row["order_key"]:
                last[key] = row["order_key"]
        for share, before in zip(shares, hints, strict=True):
            key = share.lane_id, share.tenant_id
            place = self._places[key]
            place.crowded = taken.left[key] >= share.most
            place.next_due = _sooner(place.next_due, taken.next_due[key])
            if place.hints == before:
                place.may_have = place.crowded
                # What found no room stands before what was taken.
                place.floor = place.floor if key[0] in self.lanes.fitted else last.get(key, place.floor)
        for unfit in taken.unfit:
            place = self._places[unfit.lane_id, unfit.tenant_id]
            place.next_due = _sooner(place.next_due, unfit.until)

    def _learn_ahead(self, shares: Sequence[Share], hints: Sequence[int], taken: claim.Ahead) -> None:
        """The same of a claim ahead: what comes next, and up to when all that could go has gone."""
        got = Counter((row["lane_id"], row["tenant_id"]) for row in taken.rows)
        for share, before in zip(shares, hints, strict=True):
            key = share.lane_id, share.tenant_id
            place, left = self._places[key], taken.next_due[key]
            # What fell due before the claim came to it was not taken ahead, and is not among what is left either.
            overtaken = place.next_due is not None and place.next_due <= taken.until - self.lead
            if place.hints != before or overtaken:
                place.next_due = _sooner(place.next_due, left)
                continue
            place.next_due = left
            if got[key] < share.most:
                place.ahead_until = taken.until

    def _charge(self, rows: Sequence[Row], pool: str) -> None:
        self._handed_out[pool] += len(rows)
        fair = self._pools.get(pool, claim.Pool()).policy == "fair"
        for tenant, count in Counter(row["tenant_id"] for row in rows).items():
            self._quotas.charge(tenant, count)
            if fair:
                self._times[pool].charge(tenant, count, self._weights.get(tenant, 1))

    async def _scan(self) -> None:
        """Look who has something, and put what is due but cannot start in order."""
        lanes = self.served_lanes()
        self._scanned = time.monotonic()
        if not lanes:
            return
        tenants = await claim.tenants(self.db)
        self._weights = {tenant: terms.weight for tenant, terms in tenants.items()}
        self._quotas.know(tenants)
        self._pools = await claim.pools(self.db)
        heads = await self._heads(lanes)
        now = self.db.clock.now()
        for head in heads:
            place = self._places[head.lane_id, head.tenant_id]
            if head.head is not None:
                place.floor, place.may_have = head.head, True
            elif head.due is not None and head.due <= now:
                place.may_have = True
            elif head.due is not None:
                # A hint that came meanwhile may know of something sooner, which this has not seen.
                place.next_due = _sooner(place.next_due, head.due)
        crowded = {(h.lane_id, h.tenant_id): h.due for h in heads if h.due is not None and h.due <= now}
        if self.polls:
            # Free slots take what is staged as it falls due; but not where what is ready takes them all, and however
            # many are free, what needs more than one may have to wait.
            crowded = {
                key: due for key, due in crowded.items() if self._places[key].crowded or key[0] in self.lanes.fitted
            }
        if crowded:
            await claim.promote(self.db, list(crowded), _PROMOTE, list(crowded.values()))

    async def _heads(self, lanes: set[int]) -> list[claim.Head]:
        """Where the live entries begin: from the very beginning, which also finds places that nobody has told of, or,
        if that has become too dear to be done each time, from the known floors."""
        began = self.db.clock.now()
        known = {key: place for key, place in self._places.items() if key[0] in lanes}
        hints = {key: place.hints for key, place in known.items()}
        if self._full_scans.due(0.0 if self._everywhere else _HUNGRY_SCAN):
            self._full_scans.begin()
            self._everywhere = False
            heads = await claim.heads(self.db, sorted(lanes))
            self._full_scans.end()
            self._forget_empty(known, {(head.lane_id, head.tenant_id) for head in heads})
        else:
            heads = await claim.heads_from(self.db, [(*key, p.floor, p.due_floor) for key, p in known.items()])
        staged = {(head.lane_id, head.tenant_id): head.due for head in heads if head.due is not None}
        for key, place in known.items():
            if place.hints == hints[key]:
                place.due_floor = min(staged.get(key, THE_END), began - _STRAGGLERS)
        return heads

    def _forget_empty(self, known: dict[tuple[int, int], Place], seen: set[tuple[int, int]]) -> None:
        for key in known.keys() - seen:
            if known[key].next_due is None and not known[key].may_have:
                self._places.pop(key, None)
        for times in self._times.values():
            times.forget_idle({tenant for _, tenant in seen})


def _sooner(one: datetime | None, other: datetime | None) -> datetime | None:
    return min(filter(None, (one, other)), default=None)


def _interleave(polls: list[Poll], free: Callable[[Poll], int]) -> list[Poll]:
    """The free slots of all polls, in turn, whoever has most first: work spreads over the workers."""
    order = sorted(((free(p), p) for p in polls), key=lambda o: -o[0])
    out: list[Poll] = []
    depth = 0
    while len(out) < _MOST_PER_CLAIM:
        layer = [p for slots, p in order if slots > depth]
        if not layer:
            break
        out += layer
        depth += 1
    return out
