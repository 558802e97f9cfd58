"""The loop that holds workflow runs: takes them when they are due, begins, stops and ends them.

No server owns one. All act for the same worker, whose lease does not end; what one of them leaves undone, any other
does at its next turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from tocsin.flow import claim, workflows
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.flow.report import Ending, report
from tocsin.flow.shared.failed import Failed
from tocsin.flow.shared.lanes import LaneBook, LaneKey
from tocsin.flow.shared.specs import SpecBook
from tocsin.flow.shared.transitions import Hint, Key, Stop
from tocsin.flow.workflows import Head
from tocsin.model.targets import WORKFLOW_POOL
from tocsin.model.workflow import CONDUCTOR
from tocsin.node.loop import Loop
from tocsin.store.db import Database, is_transient
from tocsin.telemetry import get_logger
from tocsin.wire import Finished

log = get_logger("conductor")
_MOST = 100  # workflow runs that one claim takes
_PAUSE = 1.0  # seconds until somebody looks who was told nothing
_LANE = LaneKey(WORKFLOW_POOL, "workflow", "")  # all go through one


class Conductor(Loop):
    """Woken when a workflow run becomes due, is to stop, or has come to its end; every second otherwise."""

    name = "conductor"

    def __init__(
        self,
        db: Database,
        lanes: LaneBook,
        specs: SpecBook,
        tell: Callable[[Iterable[Hint], Sequence[Stop]], None],
    ) -> None:
        super().__init__()
        self._db, self._lanes, self._specs, self._tell = db, lanes, specs, tell
        self.on_filled: Callable[[], None] = lambda: None  # a run of a backfill may have ended
        self.on_replace: Callable[[Collection[Key]], None] = lambda jobs: None
        self._rng = random.Random()
        self._lane: int | None = None
        self._failed = Failed()

    async def run_once(self) -> float:
        due_in = await self._claim()
        worked = await self._advance()
        return 0.0 if worked else due_in

    def heard(self, hints: Iterable[Hint], stops: Iterable[Stop] = ()) -> None:
        """Wake if one of these is about a workflow run."""
        if any(hint.lane_id == self._lane for hint in hints) or any(stop.worker_id == CONDUCTOR for stop in stops):
            self.wake()

    def lanes(self) -> set[int]:
        """Return the lane that the conductor takes from. The conductor always has a free slot."""
        return set() if self._lane is None else {self._lane}

    async def _claim(self) -> float:
        """Take workflow runs that are due: each costs a few rows and no worker, so that all may begin. Answers in how
        many seconds to look again."""
        if self._lane is None:
            self._lane = (await self._lanes.intern({_LANE: None}))[_LANE]
        if (await claim.pools(self._db))[WORKFLOW_POOL].paused:
            return _PAUSE
        heads = await claim.heads(self._db, [self._lane])
        terms = await claim.tenants(self._db) if heads else {}
        open_ = [head for head in heads if not terms[head.tenant_id].suspended]
        now = self._db.clock.now()
        waits = [(head.due - now).total_seconds() if head.due else 0.0 for head in open_]
        tenants = {head.tenant_id for head, wait in zip(open_, waits, strict=True) if wait <= 0}
        if tenants:
            shares = [Share(self._lane, tenant_id, _MOST, THE_BEGINNING) for tenant_id in sorted(tenants)]
            taken = await claim.take(self._db, shares, [CONDUCTOR] * _MOST)
            self._tell(taken.hints, ())
            if taken.replaces:
                self.on_replace(taken.replaces)
        return min((wait for wait in waits if 0 < wait < _PAUSE), default=_PAUSE)

    async def _advance(self) -> bool:
        """Do what workflow runs want done; whether something was."""
        ended: list[Finished] = []
        worked, failed = False, None
        for head in await workflows.wanting(self._db, self._failed):
            try:
                worked |= await self._turn(head, ended)
            except Exception as error:  # one that cannot go on does not keep the others back
                if not is_transient(error):
                    self._failed.add(head.key)
                log.warning("workflow run cannot go on", run=head.key.id, wants=head.what, error=str(error))
                failed = failed or error
        if ended:
            await self._end(ended)
        if failed is not None:
            raise failed
        return worked

    async def _turn(self, head: Head, ended: list[Finished]) -> bool:
        """What one wants done; whether something was. Those that have come to their end are ended together."""
        if head.what == "end":
            if finished := await workflows.ending(self._db, head.key):
                ended.append(finished)
            return finished is not None
        done = await (workflows.begin if head.what == "begin" else workflows.stop)(self._db, head.key)
        self._tell(done.hints, done.stops)
        return done is not workflows.NOTHING

    async def _end(self, ended: Sequence[Finished]) -> None:
        done = await report(self._db, self._specs, [Ending(CONDUCTOR, each) for each in ended], self._rng)
        self._tell(done.hints, ())
        if done.fills:
            self.on_filled()
        for each in ended:
            log.info("workflow run ended", run=each.run_id, outcome=each.outcome)
