"""The loops that keep house: the reaper takes back what lost workers held, the sweeper is the safety net under
everything that waits, the follower keeps jobs up with their calendars and zones, the caretaker makes partitions and
measures."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime

from tocsin.flow import control, events, fleet, partitions, plan, reap, replan, servers, sweep
from tocsin.flow.report import Ending, report
from tocsin.flow.shared.failed import Failed
from tocsin.flow.shared.specs import SpecBook
from tocsin.flow.shared.transitions import Hint, Key, Stop
from tocsin.model.retry import loss_spread
from tocsin.node.loop import Loop, Pace
from tocsin.store.db import Database
from tocsin.store.horizon import Horizon
from tocsin.store.room import Room
from tocsin.telemetry import CLOCK_SKEW, LOST, get_logger

log = get_logger("reaper")
_PAGES = 5  # pages of limits and jobs that runs wait for, in one turn
_STRAYS = 5.0  # seconds between two searches for runs of unknown workers
_SKEW = 1.0  # seconds by which clocks may differ before it is worth a word
_LOOK_FOR_PARTITIONS = 5.0  # seconds between two attempts to create missing partitions
Hear = Callable[[Sequence[Hint]], None]
Tell = Callable[[Sequence[Hint], Sequence[Stop]], None]


class Reaper(Loop):
    """Every half second: whose lease is over, and what did they hold?"""

    name = "reaper"

    def __init__(self, db: Database, specs: SpecBook, hint: Hear) -> None:
        super().__init__()
        self._db = db
        self._specs = specs
        self._hint = hint
        self._rng = random.Random()
        self._streak = 0  # runs taken back in turns that followed each other at once
        self._look_for_strays = Pace()
        self._stray: str | None = None  # where the next search continues

    async def run_once(self) -> float:
        for worker_id, name in await reap.lapse(self._db):
            log.warning("worker lost", worker=worker_id, name=name)
        lost = [Ending(o.worker_id, o.finished) for o in [*await reap.orphans(self._db), *await self._strays()]]
        if lost:
            self._streak += len(lost)
            spread = loss_spread(self._streak)
            taken_back = await report(self._db, self._specs, lost, self._rng, spread=spread)
            LOST.inc(len(taken_back.accepted))
            self._hint(taken_back.hints)
        if len(lost) >= 1000:
            return 0
        self._streak = 0
        return 0.5

    async def _strays(self) -> list[reap.Orphan]:
        if not self._look_for_strays.due(_STRAYS):
            return []
        self._look_for_strays.begin()
        found = await reap.strays(self._db, self._stray)
        self._stray = found.after
        self._look_for_strays.end()
        return found.orphans


class Sweeper(Loop):
    """Handles deadlines, late occurrences and missed releases every second. When the dispatcher asks for it, also stops
    runs that a younger occurrence replaces, at once."""

    name = "sweeper"

    def __init__(
        self,
        db: Database,
        tell: Tell,
        served_lanes: Callable[[], set[int]],
        free_lanes: Callable[[], set[int]],
    ) -> None:
        super().__init__()
        self._db = db
        self._tell = tell
        self._served_lanes = served_lanes
        self._free_lanes = free_lanes
        self._late = Pace()
        self._next_turn = 0.0
        self._behind = False  # more runs are past their deadline than one turn ends
        self._to_replace: set[Key] = set()
        # Where the next turn continues: among the keys that runs wait for, among occurrences that replace other runs,
        # among runs that wait for other runs, and among runs that ended while they waited.
        self._parked: str | None = None
        self._due: tuple[datetime, str] | None = None
        self._joining: str | None = None
        self._joined: str | None = None

    def replace(self, jobs: Collection[Key]) -> None:
        """Stop the runs that an occurrence of these jobs waits to replace."""
        self._to_replace.update(jobs)
        self.wake()

    async def run_once(self) -> float:
        if self._to_replace:
            await self._replace_told()
            rest = 0.0 if self._to_replace else self._next_turn - time.monotonic()
            if rest > 0:
                return rest
        self._next_turn = time.monotonic() + 1.0
        # A step that fails must not keep the other steps from running.
        failed: Exception | None = None
        for net in (self._expire, self._release, self._replace, self._join):
            try:
                await net()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return 0.0 if self._to_replace or self._behind else 1.0

    async def _expire(self) -> None:
        expired = await sweep.expire(self._db)
        self._say(expired.hints)
        self._behind = expired.more
        if self._late.due(1.0):
            self._late.begin()
            self._say(await sweep.misfires(self._db, sorted(self._served_lanes())))
            self._late.end()

    async def _release(self) -> None:
        """Check some of the keys that runs wait for. Keys that stay full must not hide the others."""
        for _ in range(_PAGES):
            looked = await sweep.release_waiting(self._db, self._free_lanes(), self._parked)
            self._parked = looked.after
            self._to_replace.update(looked.keys)
            self._say(looked.hints)
            if self._parked is None:
                return

    async def _replace(self) -> None:
        due = await sweep.due_to_replace(self._db, self._due)
        self._due = due.after
        self._to_replace.update(due.jobs)
        await self._replace_told()

    async def _replace_told(self) -> None:
        jobs, self._to_replace = self._to_replace, set()
        replaced = await sweep.replace_earlier(self._db, jobs)
        if replaced.more:
            self._to_replace |= jobs
        self._say(replaced.hints, replaced.stops)

    async def _join(self) -> None:
        joining = await sweep.release_joining(self._db, self._joining)
        self._joining = joining.after
        self._say(joining.hints)
        self._joined = await sweep.forget_joins(self._db, self._joined)

    def _say(self, hints: Sequence[Hint], stops: Sequence[Stop] = ()) -> None:
        if hints or stops:
            self._tell(hints, stops)


class Canceller(Loop):
    """Cancels the next pieces of jobs that were cancelled with many runs, every second."""

    name = "canceller"

    def __init__(self, db: Database, tell: Tell) -> None:
        super().__init__()
        self._db = db
        self._tell = tell

    async def run_once(self) -> float:
        done = await control.go_on_cancelling(self._db)
        if done is None:
            return 1.0
        if done.hints or done.stops:
            self._tell(done.hints, done.stops)
        return 0


class Follower(Loop):
    """Every few seconds: jobs that are behind their calendars or zones are planned anew, wave by wave."""

    name = "follower"

    def __init__(self, db: Database, hint: Hear) -> None:
        super().__init__()
        self._db = db
        self._hint = hint
        self._failed = Failed()

    async def run_once(self) -> float:
        wave = await replan.follow(self._db, self._failed)
        if wave.hints:
            self._hint(wave.hints)
        return 0 if wave.jobs >= replan.WAVE else 5.0


class Caretaker(Loop):
    """Every few seconds: a sign of life, the clock, the gauges, the partitions ahead."""

    name = "caretaker"

    def __init__(
        self,
        db: Database,
        server: servers.Server,
        retire: Callable[[], None],
        measure_pools: Callable[[], Awaitable[None]],
        room: Room,
    ) -> None:
        super().__init__()
        self._db = db
        self._server = server
        self._room = room
        self._retire = retire
        self._measure_pools = measure_pools
        self._past: int | None = None
        self._limit: Key | None = None  # where the search for unused limits continues
        self._turn = 0
        self._skewed = False
        self._horizon = Horizon(db)
        self._counts = Pace()
        self._partition_missing = False
        self._partitions = Pace()
        db.on_missing_partition = self.miss_partition

    def miss_partition(self) -> None:
        """Create the missing partitions in the next turn: at once, unless the last attempt was a moment ago."""
        self._partition_missing = True
        if self._partitions.due(_LOOK_FOR_PARTITIONS):
            self.wake()

    async def _make_missing(self) -> None:
        self._partitions.begin()
        self._partition_missing = False
        made = await partitions.make_missing(self._db)
        log.error("history had no partition for some runs, which could not end", made=made)
        self._partitions.end()

    async def run_once(self) -> float:
        await self._db.look_around()
        await self._show_life()
        await self._db.read_clock()
        self._look_at_clocks()
        await self._horizon.watch()
        if self._counts.due(0.0):
            self._counts.begin()
            await self._measure_pools()
            self._counts.end()
        await fleet.measure(self._db)
        await plan.measure(self._db)
        await self._room.look()
        if self._partition_missing:
            await self._make_missing()
        # Counted before the work, so that a step that fails does not keep the other steps from running.
        turn, self._turn = self._turn, self._turn + 1
        if turn % 60 == 0:
            await partitions.make_ahead(self._db)
        if turn % 12 == 0:
            await events.tidy(self._db)
        await sweep.forget_keys(self._db)
        self._limit = await sweep.forget_limits(self._db, self._limit)
        return 5.0

    async def _show_life(self) -> None:
        past = await servers.enlist(self._db, self._server)
        if self._past not in (None, past):
            # Lanes, specs and workers that this node remembers may be others by now.
            log.error("the database was restored from a backup; this server knows another past, and goes")
            self._retire()
        self._past = past

    async def stop(self) -> None:
        await super().stop()
        await servers.leave(self._db, self._server)

    def _look_at_clocks(self) -> None:
        """Nothing goes by this node's wall clock; but its log, and people, do."""
        clock = self._db.clock
        step, skew = clock.take_step(), clock.skew()
        CLOCK_SKEW.set(skew)
        if abs(step) > _SKEW:
            log.warning("the database's clock was set", by_seconds=round(step, 3))
        if (abs(skew) > _SKEW) != self._skewed:
            self._skewed = not self._skewed
            say = log.warning if self._skewed else log.info
            say(f"this node's clock is {'wrong' if self._skewed else 'right again'}", skew_seconds=round(skew, 3))
