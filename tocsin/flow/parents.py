"""parents: how the runs ended that a run waited for, and what they resulted in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tocsin.errors import Conflict, TooLarge
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Key
from tocsin.model.access import Identity
from tocsin.model.packed import has_references, size_of
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.wire import Parent

SQL = Sql(__file__, SHARED)
WITH_THE_RUN = 65_536  # bytes of results that are handed over together with a run
MOST = 64 * 2**20  # that are told at all
Parents = dict[str, Parent]  # by name


async def handed_over(db: Database, runs: Sequence[Key]) -> dict[str, Parents | None]:
    """What these runs are told of those that they waited for; None: it is large, and to be fetched."""
    if not runs:
        return {}
    rows = await db.fetch("engine", SQL["ends"], *columns(runs, 2), WITH_THE_RUN)
    told: dict[str, list[Row]] = {run.id: [] for run in runs}
    for row in rows:
        told[runs[row["n"] - 1].id].append(row)
    return {run_id: None if _is_large(ends, WITH_THE_RUN) else _decoded(ends) for run_id, ends in told.items()}


async def told(db: Database, parcels: Parcels, who: Identity) -> Parents:
    """The same for a run that asks with its token, while its attempt is under way."""
    if not await db.fetchval("engine", SQL["holds"], who.tenant_id, who.key_id, who.fence):
        raise Conflict("this attempt is not under way any more", code="superseded")
    rows = await db.fetch("engine", SQL["ends"], [who.tenant_id], [who.key_id], MOST)
    if _is_large(rows, MOST):
        raise TooLarge(f"the results of the runs that it waited for have more than {MOST // 2**20} MiB together")
    whole = [
        row["result"] and msgspec.Raw((await parcels.whole(who.tenant_id, row["result"])).encode()) for row in rows
    ]
    return _parents(rows, whole)  # passed on unchanged


def _is_large(rows: Sequence[Row], most: int) -> bool:
    """Whether the results are more than that together, with all of them that lies elsewhere."""
    if not rows or rows[0]["size"] > most:
        return bool(rows)
    elsewhere = [row["result"] for row in rows if row["result"] is not None and has_references(row["result"])]
    return bool(elsewhere) and rows[0]["size"] + sum(map(size_of, elsewhere)) > most


def _decoded(rows: Sequence[Row]) -> Parents:
    return _parents(rows, [row["result"] and msgspec.json.decode(row["result"]) for row in rows])


def _parents(rows: Sequence[Row], results: Iterable[Any]) -> Parents:
    told = zip(rows, results, strict=True)
    return {row["name"]: Parent(run_id=row["run_id"], state=row["state"], result=result) for row, result in told}
