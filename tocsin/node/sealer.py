"""The loops behind the audit: one chains what calls have said, the other puts the heads into object storage. Two of
them, because storage that is slow or away must not hold up the chain."""

from __future__ import annotations

from uuid import uuid4

from tocsin.flow import seal
from tocsin.node.loop import Loop
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore
from tocsin.store.vault import MasterKeys

_SEAL_SECONDS, _ANCHOR_SECONDS = 0.5, 5.0


class Sealer(Loop):
    """Twice a second: what was committed gets its place in the chain, by whichever server comes first."""

    name = "sealer"

    def __init__(self, db: Database) -> None:
        super().__init__()
        self._db = db

    async def run_once(self) -> float:
        return 0.0 if await seal.seal(self._db) >= seal.AT_ONCE else _SEAL_SECONDS


class Anchorer(Loop):
    """Every few seconds: heads that moved, each once a minute."""

    name = "anchorer"

    def __init__(self, db: Database, objects: ObjectStore, master: MasterKeys, series: seal.Series) -> None:
        super().__init__()
        self._db, self._objects, self._master = db, objects, master
        self._writer = uuid4().hex[:16]
        self._series = series

    async def run_once(self) -> float:
        done = await seal.anchor(self._db, self._objects, self._master, self._writer, self._series)
        return 0.0 if done >= seal.ANCHORS_AT_ONCE else _ANCHOR_SECONDS
