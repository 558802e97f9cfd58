"""The eraser: goes on with the erasure of tenants, and tells workers to stop what they run of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tocsin.flow import erase, retire
from tocsin.flow.shared.lanes import LaneBook
from tocsin.flow.shared.transitions import Hint, Stop
from tocsin.node.loop import Loop
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore

_NEXT_PAGE = 2.0  # seconds between two pages of the search for unused lanes


class Eraser(Loop):
    """Continues erasures and looks for unused lanes: every half minute, or every two seconds during an erasure."""

    name = "eraser"

    def __init__(
        self,
        db: Database,
        objects: ObjectStore,
        lanes: LaneBook,
        tell: Callable[[Sequence[Hint], Sequence[Stop]], None],
    ) -> None:
        super().__init__()
        self._db, self._objects, self._lanes, self._tell = db, objects, lanes, tell

    async def run_once(self) -> float:
        await self._lanes.forget_removed()
        more = await retire.turn(self._db)
        turn = await erase.turn(self._db, self._objects)
        if turn.stops:
            self._tell([], turn.stops)
        return min(turn.pause, _NEXT_PAGE) if more else turn.pause
