"""The eraser: goes on with the erasure of tenants, and tells workers to stop what they run of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tocsin.flow import erase
from tocsin.flow.shared.transitions import Hint, Stop
from tocsin.node.loop import Loop
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore


class Eraser(Loop):
    """Every half minute: is anybody to be erased? And every other second while somebody is."""

    name = "eraser"

    def __init__(
        self, db: Database, objects: ObjectStore, tell: Callable[[Sequence[Hint], Sequence[Stop]], None]
    ) -> None:
        super().__init__()
        self._db, self._objects, self._tell = db, objects, tell

    async def run_once(self) -> float:
        turn = await erase.turn(self._db, self._objects)
        if turn.stops:
            self._tell([], turn.stops)
        return turn.pause
