"""Lanes: who may take a run, interned as a small number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tocsin.model.job import JobSpec, PythonTarget
from tocsin.store.db import Database, Sql, columns

SQL = Sql(__file__)


class LaneKey(NamedTuple):
    pool: str
    kind: str
    function: str


def lane_key(spec: JobSpec) -> LaneKey:
    """The lane a job's runs go through."""
    if isinstance(spec.target, PythonTarget):
        return LaneKey(spec.pool, "python", spec.target.function)
    return LaneKey(spec.pool, "process", "")


class LaneBook:
    """Every lane seen so far; lanes are never changed or removed, so a cache never lies."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._ids: dict[LaneKey, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    async def intern(self, keys: Iterable[LaneKey]) -> dict[LaneKey, int]:
        """The id of each key whose pool exists, made if need be."""
        wanted = set(keys)
        missing = sorted(wanted - self._ids.keys())
        if missing:
            pools = {r["name"] for r in await self._db.fetch("engine", SQL["pools"], list({k.pool for k in missing}))}
            missing = [k for k in missing if k.pool in pools]
            if missing:
                self._learn(await self._db.fetch("engine", SQL["intern"], *columns(missing, 3)))
            if not self._ids.keys() >= set(missing):
                # Another node made it at this moment: our statement waited for it, but is too old to see it.
                await self.refresh()
        return {k: self._ids[k] for k in wanted if k in self._ids}

    async def refresh(self) -> None:
        """Learn the lanes that other nodes made."""
        self._learn(await self._db.fetch("vital", SQL["all"]))

    def _learn(self, rows: Iterable[tuple[int, str, str, str]]) -> None:
        for row in rows:
            self._ids[LaneKey(row[1], row[2], row[3])] = row[0]

    def open_to(self, pool: str, targets: Iterable[str], functions: Iterable[str]) -> frozenset[int]:
        """The lanes whose runs a worker with these abilities can take."""
        kinds, names = set(targets), set(functions)
        return frozenset(
            id_
            for key, id_ in self._ids.items()
            if key.pool == pool and key.kind in kinds and (key.kind != "python" or key.function in names)
        )
