"""unfold: make the runs of nodes that are mapped over a list in object storage.

Whoever ends the last parent of such a node leaves it waiting, for he holds locks that others wait for. Here the list is
fetched first; then, in one transaction, the node goes on as if its last parent had just ended. Elements that are large
themselves lie in object storage before a run names them, like all arguments.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from tocsin.errors import ServerFault, Unavailable
from tocsin.flow.shared import joins
from tocsin.flow.shared.joins import AtHand, Elements, Mapped, Settled, decide, elements_of, listed
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.transitions import Hint, Key
from tocsin.model.packed import LARGE, Packed
from tocsin.model.workflow import BadMap
from tocsin.store.db import Database, Row, Sql
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("unfold")
_MOST = 20  # nodes that one turn unfolds
_AT_ONCE = 10  # objects
_FIRST = "00000000-0000-0000-0000-000000000000"


class Unfolded(NamedTuple):
    """The lanes where runs became claimable, whether a workflow run has ended, how many nodes were expanded, where the
    next search continues (None: from the beginning), and the first error that object storage did not cause."""

    hints: list[Hint]
    heads: bool
    nodes: int
    after: str | None
    error: Exception | None


async def unfold(db: Database, parcels: Parcels, after: str | None) -> Unfolded:
    """Expand one page of mapped nodes whose list can be fetched. A node that fails does not stop the others."""
    hints: list[Hint] = []
    heads, nodes = False, 0
    failed: Exception | None = None
    rows = await db.fetch("engine", SQL["folded"], _MOST, after or _FIRST)
    for row in rows:
        try:
            settled = await _unfold(db, parcels, row)
        except Exception as error:
            log.warning("a mapped node cannot go on yet", run=row["id"], error=f"{type(error).__name__}: {error}"[:500])
            if not (isinstance(error, Unavailable) and error.code == "objects_unavailable"):
                failed = failed or error
            continue
        if settled is not None:
            hints += settled.hints
            heads, nodes = heads or settled.heads, nodes + 1
    return Unfolded(hints, heads, nodes, rows[-1]["id"] if len(rows) == _MOST else None, failed)


async def _unfold(db: Database, parcels: Parcels, row: Row) -> Settled | None:
    """Expand one mapped node. Return None if another server was first."""
    node = Key(row["tenant_id"], row["id"])
    at_hand = await _fetched(db, parcels, row)
    async with db.transaction("unfold", "vital") as connection:
        if not await connection.fetchval(SQL["take"], *node):
            return None
        return await decide(connection, [node], at_hand)


async def _fetched(db: Database, parcels: Parcels, row: Row) -> AtHand:
    """What a node is mapped over, whole."""
    if row["map"] is None:
        return {}
    about = msgspec.json.decode(row["map"], type=Mapped)
    found = await db.fetchrow("engine", joins.SQL["result"], row["tenant_id"], about.run_id, joins.MOST_BYTES)
    elements: Elements | BadMap
    try:
        elements = elements_of(await parcels.whole(row["tenant_id"], listed(found, about)), about)
    except BadMap as why:
        elements = why
    except ServerFault as gone:
        elements = BadMap(f"the result of {about.map.parent} cannot be read: {gone.detail}")
    if isinstance(elements, Elements):
        elements = elements._replace(packed=await _packed(parcels, row["tenant_id"], elements.args))
    return {(row["id"], row["map"]): elements}


async def _packed(parcels: Parcels, tenant_id: int, args: list[str]) -> dict[int, Packed]:
    """Those of the elements that are too large for a row, which lie in object storage from now on."""
    large = [place for place, text in enumerate(args) if len(text) > LARGE // 4 and len(text.encode()) > LARGE]
    out = {}
    for some in (large[i : i + _AT_ONCE] for i in range(0, len(large), _AT_ONCE)):
        stored = await asyncio.gather(*(parcels.put(tenant_id, args[place].encode()) for place in some))
        for place, parcel in zip(some, stored, strict=True):
            out[place] = Packed(size=parcel.size, sha256=parcel.sha256, place=parcel.place(tenant_id))
    return out
