"""Lanes: who may take a run, interned as a small number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tocsin.errors import InvalidInput
from tocsin.model.job import JobSpec
from tocsin.model.resources import NOTHING, Amounts, Labels, class_of, matches, may_hold
from tocsin.model.targets import PythonTarget, ability_for
from tocsin.store.db import Database, Row, Sql, columns

SQL = Sql(__file__)
Pairs = tuple[tuple[str, str], ...]


class LaneKey(NamedTuple):
    """`needs`: the class of what its runs take of a worker's resources, None if they take a slot and no more, of
    whichever worker they may have."""

    pool: str
    kind: str
    function: str
    require: Pairs = ()
    needs: Amounts | None = None
    prefer: Pairs = ()


def lane_key(spec: JobSpec) -> LaneKey:
    """The lane a job's runs go through."""
    function = spec.target.function if isinstance(spec.target, PythonTarget) else ""
    require, prefer = _pairs(spec.placement.require), _pairs(spec.placement.prefer)
    fitted = prefer or spec.needs != NOTHING
    needs = class_of(spec.needs) if fitted else None
    return LaneKey(spec.pool, ability_for(spec.target), function, require, needs, prefer)


def _pairs(labels: Labels) -> Pairs:
    return tuple(sorted(labels.items())) if labels else ()


class LaneBook:
    """Every lane seen so far. Lanes are never changed. One that nobody goes through is retired, and removed long after:
    by then every server has looked, and asks before it sends somebody through it, which takes it back into use."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[LaneKey, int] = {}
        self._ids: dict[LaneKey, int] = {}  # of those that are not retired
        self._closed: dict[str, frozenset[int]] = {}  # pools that are open to these tenants alone
        self.fitted: set[int] = set()  # those whose runs need more than a slot

    def __len__(self) -> int:
        return len(self._known)

    async def intern(self, keys: Iterable[LaneKey]) -> dict[LaneKey, int]:
        """The id of each key whose pool exists, made if need be."""
        wanted = set(keys)
        missing = [key for key in wanted if key not in self._ids]
        if missing:
            pools = {r["name"] for r in await self._db.fetch("engine", SQL["pools"], list({k.pool for k in missing}))}
            # In one order, as every node makes them: two that make the same ones wait, and never in a circle.
            rows = sorted(_row(key) for key in missing if key.pool in pools)
            if rows:
                self._learn(await self._db.fetch("engine", SQL["intern"], *columns(rows, 6)))
            if not all(key in self._ids for key in missing if key.pool in pools):
                # Another node made it at this moment: our statement waited for it, but is too old to see it.
                await self.refresh()
        return {k: self._ids[k] for k in wanted if k in self._ids}

    def refusal(self, path: str, key: LaneKey, tenant_id: int) -> InvalidInput | None:
        """Why no job of this tenant may come into a lane that was asked for, if it may not. What pools are closed to is
        known from the last look: the claim, which is exact, lets nothing pass that came in before it was."""
        if key not in self._ids:
            return InvalidInput.field(path, "unknown_pool", f"there is no pool {key.pool!r}")
        if tenant_id not in self._closed.get(key.pool, (tenant_id,)):
            text = f"pool {key.pool!r} is not open to your tenant; the platform can open it, or choose another"
            return InvalidInput.field(path, "pool_closed", text)
        return None

    async def forget_retired(self) -> None:
        """Ask the next time before somebody is sent through a lane that is retired."""
        retired = {row["id"] for row in await self._db.fetch("vital", SQL["retired"])}
        if retired:
            self._ids = {key: id_ for key, id_ in self._ids.items() if id_ not in retired}

    async def refresh(self) -> None:
        """Learn the lanes that other nodes made, and to whom pools are open."""
        self._learn(await self._db.fetch("vital", SQL["all"]))
        closed = await self._db.fetch("vital", SQL["closed"])
        self._closed = {row["name"]: frozenset(row["tenants"]) for row in closed}

    def _learn(self, rows: Iterable[Row]) -> None:
        for id_, pool, kind, function, labels, needs, prefer, retired in rows:
            of_class = Amounts(*needs) if needs else None
            key = LaneKey(pool, kind, function, _read(labels), of_class, _read(prefer))
            self._known[key] = id_
            if not retired:
                self._ids[key] = id_
            if of_class is not None:
                self.fitted.add(id_)

    def open_to(
        self,
        pool: str,
        targets: Iterable[str],
        functions: Iterable[str],
        total: Amounts = NOTHING,
        labels: Labels | None = None,
    ) -> frozenset[int]:
        """The lanes whose runs a worker with these abilities, resources and labels can take."""
        kinds, names, has = set(targets), set(functions), labels or {}
        return frozenset(
            id_
            for key, id_ in self._known.items()
            if key.pool == pool
            and key.kind in kinds
            and (key.kind != "python" or key.function in names)
            and (not key.require or matches(has, key.require))
            and (key.needs is None or may_hold(total, key.needs))
        )


async def totals(db: Database, lane_id: int) -> list[Amounts]:
    """What the living workers have that may take from a lane, whether it is free or not."""
    return [Amounts(*row["resources"]) for row in await db.fetch("engine", SQL["totals"], lane_id)]


def _row(key: LaneKey) -> tuple[str, str, str, str, str, str]:
    needs = "{}" if key.needs is None else "{" + ",".join(map(str, key.needs)) + "}"
    return key.pool, key.kind, key.function, _written(key.require), needs, _written(key.prefer)


def _written(pairs: Pairs) -> str:
    return msgspec.json.encode(dict(pairs)).decode()


def _read(text: str) -> Pairs:
    return () if text == "{}" else _pairs(msgspec.json.decode(text, type=dict[str, str]))
