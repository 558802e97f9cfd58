"""The loop that makes the runs of nodes which are mapped over large results."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.transitions import Hint
from tocsin.flow.unfold import unfold
from tocsin.node.loop import Loop
from tocsin.store.db import Database

_PAUSE = 1.0  # seconds until somebody looks who was told nothing


class Unfolder(Loop):
    """Woken when a node was left for it; every second otherwise. The conductor's turns are to wait for no object."""

    name = "unfolder"

    def __init__(self, db: Database, parcels: Parcels, tell: Callable[[Iterable[Hint]], None]) -> None:
        super().__init__()
        self._db, self._parcels, self._tell = db, parcels, tell
        self._after: str | None = None  # where the next search for nodes continues
        self.on_heads: Callable[[], None] = lambda: None  # a workflow run may have come to its end

    async def run_once(self) -> float:
        done = await unfold(self._db, self._parcels, self._after)
        self._after = done.after
        self._tell(done.hints)
        if done.heads:
            self.on_heads()
        if done.error is not None:
            raise done.error
        return 0.0 if done.nodes or done.after else _PAUSE
