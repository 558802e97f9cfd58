"""The loop that lets those that wait for a circuit go again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tocsin.flow import circuits
from tocsin.flow.shared.transitions import Hint
from tocsin.node.loop import Loop
from tocsin.store.db import Database
from tocsin.telemetry import get_logger

log = get_logger("breaker")


class Breaker(Loop):
    """Every second, and more often while canaries are under way: circuits that have cooled down, waves that ended."""

    name = "breaker"

    def __init__(self, db: Database, hint: Callable[[Sequence[Hint]], None]) -> None:
        super().__init__()
        self._db = db
        self._hint = hint

    async def run_once(self) -> float:
        kept = await circuits.keep(self._db)
        for name, state in kept.moved:
            log.info("circuit", name=name, state=state)
        if kept.hints:
            self._hint(kept.hints)
        return kept.again
