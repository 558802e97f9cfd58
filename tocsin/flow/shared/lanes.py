"""Lanes: who may take a run, interned as a small number."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from tocsin.clock import boottime
from tocsin.errors import InvalidInput
from tocsin.model.job import JobSpec
from tocsin.model.resources import NOTHING, Amounts, Labels, class_of, matches, may_hold
from tocsin.model.targets import PythonTarget, ability_for
from tocsin.store.db import Database, Row, Sql, columns

SQL = Sql(__file__)
Pairs = tuple[tuple[str, str], ...]
MOST_LANES = 2_000  # lanes that one tenant may create
_TRUSTED = 300.0  # seconds for which a server trusts its knowledge of retired lanes
_MOST_ABILITIES = 2_000  # remembered combinations of worker abilities


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


class _Abilities(NamedTuple):
    """The properties of a worker that decide which lanes it can take from."""

    pool: str
    targets: tuple[str, ...]
    functions: tuple[str, ...]
    total: Amounts
    labels: Pairs


_Slot = tuple[str, str, str, tuple[str, str] | None]  # pool, kind, function, the first required label


class LaneBook:
    """The lanes that this server knows. It reads the lanes that have changed.

    An unused lane is retired (`flow/retire.py`). Workers take from a retired lane as before, but a server that sends a
    job through it asks the database first, which takes the lane back into use. A retired lane is removed after ten
    minutes at the earliest, when every server knows that it is retired: a server that has not refreshed for five
    minutes does so before it uses a known lane for a job.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[int, LaneKey] = {}
        self._ids: dict[LaneKey, int] = {}  # of those that are not retired
        self._by_slot: dict[_Slot, set[int]] = {}
        self._open: dict[_Abilities, frozenset[int]] = {}  # by worker; cleared when a lane is added or removed
        self._pools: set[str] = set()  # pools that existed when lanes in them were asked for
        self._closed: dict[str, frozenset[int]] = {}  # pools that are open to these tenants alone
        self._upto = "0"  # changes by older transactions are known
        self._looked = float("-inf")
        self.fitted: set[int] = set()  # those whose runs need more than a slot
        self.version = 0  # incremented when a lane is added or removed

    def __len__(self) -> int:
        return len(self._known)

    async def intern(self, wanted: Mapping[LaneKey, int | None]) -> dict[LaneKey, int]:
        """Return the id of each lane. Missing lanes are created for the tenant that asks. Lanes of unknown pools are
        left out, and lanes beyond the number that the tenant may create."""
        if boottime() - self._looked > _TRUSTED:
            await self.refresh()
        missing = [key for key in wanted if key not in self._ids]
        if missing:
            asked = {key.pool for key in missing}
            there = {row["name"] for row in await self._db.fetch("engine", SQL["pools"], list(asked))}
            self._pools = (self._pools - asked) | there
            rows = sorted((*_row(key), wanted[key]) for key in missing if key.pool in there)
            if rows:
                self._learn(await self._db.fetch("engine", SQL["intern"], *columns(rows, 7), MOST_LANES))
            if not all(key in self._ids for key in missing if key.pool in there):
                # Another node made it at this moment: our statement waited for it, but is too old to see it.
                await self.refresh()
        return {key: self._ids[key] for key in wanted if key in self._ids}

    def refusal(self, path: str, key: LaneKey, tenant_id: int) -> InvalidInput | None:
        """Why no job of this tenant may come into a lane that was asked for, if it may not. What pools are closed to is
        known from the last look: the claim, which is exact, lets nothing pass that came in before it was."""
        if key not in self._ids and key.pool not in self._pools:
            return InvalidInput.field(path, "unknown_pool", f"there is no pool {key.pool!r}")
        if tenant_id not in self._closed.get(key.pool, (tenant_id,)):
            text = f"pool {key.pool!r} is not open to your tenant; the platform can open it, or choose another"
            return InvalidInput.field(path, "pool_closed", text)
        if key not in self._ids:
            text = (
                f"must be one of the {MOST_LANES:,} combinations of pool, kind of target, function, labels and class "
                "of resources that your tenant has already; unused ones go after some time"
            )
            return InvalidInput.field(path, "too_many_lanes", text)
        return None

    async def forget_removed(self) -> None:
        """Forget the retired lanes that the database has removed."""
        await self.refresh()
        retired = self._known.keys() - set(self._ids.values())
        if retired:
            # A lane that was taken back into use since then has changed, so the next refresh reads it again.
            self._forget(retired - {row["id"] for row in await self._db.fetch("vital", SQL["retired"])})

    async def refresh(self) -> None:
        """Read the lanes that have changed, and the pools' tenants. After a long gap read all lanes again: some may
        have been retired and removed."""
        silent = boottime() - self._looked > _TRUSTED
        rows = await self._db.fetch("vital", SQL["changed"], "0" if silent else self._upto)
        found = [tuple(row)[1:] for row in rows if row["id"] is not None]
        if silent:
            self._forget(self._known.keys() - {row[0] for row in found})
        self._learn(found)
        self._upto, self._looked = rows[0]["upto"], boottime()
        closed = await self._db.fetch("vital", SQL["closed"])
        self._closed = {row["name"]: frozenset(row["tenants"]) for row in closed}

    def _forget(self, gone: Collection[int]) -> None:
        for id_ in gone:
            key = self._known.pop(id_)
            self._by_slot[_slot(key)].discard(id_)
            self.fitted.discard(id_)
            if self._ids.get(key) == id_:
                del self._ids[key]
        if gone:
            self._changed()

    def _learn(self, rows: Iterable[Row]) -> None:
        for id_, pool, kind, function, labels, needs, prefer, retired in rows:
            of_class = Amounts(*needs) if needs else None
            key = LaneKey(pool, kind, function, _read(labels), of_class, _read(prefer))
            if retired and self._ids.get(key) == id_:
                del self._ids[key]
            elif not retired:
                self._ids[key] = id_
            if id_ not in self._known:
                self._known[id_] = key
                self._by_slot.setdefault(_slot(key), set()).add(id_)
                if of_class is not None:
                    self.fitted.add(id_)
                self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._open.clear()

    def open_to(
        self,
        pool: str,
        targets: Iterable[str],
        functions: Iterable[str],
        total: Amounts = NOTHING,
        labels: Labels | None = None,
    ) -> frozenset[int]:
        """The lanes whose runs a worker with these abilities, resources and labels can take."""
        asked = _Abilities(pool, tuple(targets), tuple(functions), total, _pairs(labels or {}))
        if asked not in self._open:
            if len(self._open) >= _MOST_ABILITIES:
                self._open.clear()
            self._open[asked] = frozenset(self._matching(asked))
        return self._open[asked]

    def _matching(self, asked: _Abilities) -> Iterator[int]:
        has = dict(asked.labels)
        for kind in set(asked.targets):
            for function in set(asked.functions) if kind == "python" else ("",):
                for label in (None, *asked.labels):
                    for id_ in self._by_slot.get((asked.pool, kind, function, label), ()):
                        key = self._known[id_]
                        if matches(has, key.require) and (key.needs is None or may_hold(asked.total, key.needs)):
                            yield id_


def _slot(key: LaneKey) -> _Slot:
    return key.pool, key.kind, key.function, key.require[0] if key.require else None


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
