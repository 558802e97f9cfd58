"""The backfiller's loop: as a run of a backfill ends, make the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tocsin.flow.fill import Tables, fill
from tocsin.flow.shared.transitions import Hint
from tocsin.node.loop import Loop
from tocsin.store.db import Database

_SWEEP_SECONDS = 1.0
# After each turn it rests, for as long as so many turns take, or the runs that it made: nobody waits for the past, what
# ends meanwhile is taken up together, and where the database is busy with live work there is less of this, not more.
_REST_PER_TURN, _REST_PER_RUN = 15, 0.025
_SHORTEST_REST, _LONGEST_REST = 0.05, 1.0


class Backfiller(Loop):
    """Turns when a run of a backfill has ended here (`wake`), over those of which some have; when one is asked for or
    resumed here (`look`), and every second, over all that are open."""

    name = "backfiller"

    def __init__(self, db: Database, hint: Callable[[Sequence[Hint]], None]) -> None:
        super().__init__()
        self._db = db
        self._hint = hint
        self._tables = Tables()
        self._sweep_at = self._rested_at = float("-inf")

    def look(self) -> None:
        """There may be something to do for any of them."""
        self._sweep_at = float("-inf")
        self.wake()

    async def run_once(self) -> float:
        await asyncio.sleep(self._rested_at - time.monotonic())
        begun = time.monotonic()
        everywhere = begun >= self._sweep_at
        if everywhere:
            self._sweep_at = begun + _SWEEP_SECONDS
        filled = await fill(self._db, self._tables, everywhere)
        if filled.held_back:
            self._sweep_at = float("-inf")
        if filled.hints:
            self._hint(filled.hints)
        now = time.monotonic()
        rest = max(_REST_PER_TURN * (now - begun), _REST_PER_RUN * filled.made, _SHORTEST_REST)
        self._rested_at = now + min(rest, _LONGEST_REST)
        return 0.0 if filled.more else max(0.0, self._sweep_at - now)
