"""The planner's loop: stage what falls due within the horizon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from tocsin.flow.plan import Rotation, next_due, plan, take_back
from tocsin.flow.shared.transitions import Hint
from tocsin.node.loop import Loop
from tocsin.store.db import Database


class Planner(Loop):
    """Turns when the earliest cursor comes within the horizon, and every second at the latest."""

    name = "planner"

    def __init__(self, db: Database, horizon: timedelta, hint: Callable[[Sequence[Hint]], None]) -> None:
        super().__init__()
        self._db = db
        self._horizon = horizon
        self._hint = hint
        self._rotation = Rotation()

    async def run_once(self) -> float:
        await take_back(self._db)
        result = await plan(self._db, self._horizon, self._rotation)
        if result.hints:
            self._hint(result.hints)
        if result.more:
            return 0
        soonest = await next_due(self._db)
        if soonest is None:
            return 1.0
        return min(1.0, max(0.05, self._db.clock.seconds_until(soonest - self._horizon)))
