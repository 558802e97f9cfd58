"""The backfiller's loop: as a run of a backfill ends, make the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tocsin.flow.fill import Tables, fill
from tocsin.flow.shared.transitions import Hint
from tocsin.node.loop import Loop
from tocsin.store.db import Database

_SWEEP_SECONDS = 1.0
_AGAIN_SECONDS = 0.05  # after a turn that left some to whoever was at them


class Backfiller(Loop):
    """Turns when a run of a backfill has ended here (`wake`), over those of which some have; when one is asked for or
    resumed here (`look`), and every second, over all that are open."""

    name = "backfiller"

    def __init__(self, db: Database, hint: Callable[[Sequence[Hint]], None]) -> None:
        super().__init__()
        self._db = db
        self._hint = hint
        self._tables = Tables()
        self._sweep_at = float("-inf")

    def look(self) -> None:
        """There may be something to do for any of them."""
        self._sweep_at = float("-inf")
        self.wake()

    async def run_once(self) -> float:
        everywhere = time.monotonic() >= self._sweep_at
        if everywhere:
            self._sweep_at = time.monotonic() + _SWEEP_SECONDS
        filled = await fill(self._db, self._tables, everywhere)
        if filled.hints:
            self._hint(filled.hints)
        if filled.more:
            return _AGAIN_SECONDS
        return max(0.0, self._sweep_at - time.monotonic())
