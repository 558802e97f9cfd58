"""Windows: a page of a list reads a bounded number of rows, however few of them match.

A list whose filter has no index of its own reads the newest rows first. It searches a small window and, if that has too
few matches, a larger one. After the largest window the page ends, and its cursor is the end of the window.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tocsin.model.access import Identity
from tocsin.store.db import Database, Row

WINDOWS = (500, 10_000)  # rows that a page reads: first, and at most
LOWEST, HIGHEST = "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"

_NAMED = re.compile(r"\$([a-z_]+)")


class Listed(NamedTuple):
    """A page of documents, newest first. `rest`: the cursor of the next page if this one ended before it was full."""

    items: list[dict[str, Any]]
    rest: str | None = None


class Looked(NamedTuple):
    """Matching rows, newest first, and the lowest id that was read; `floor` is None if there are no rows below."""

    rows: list[Row]
    floor: str | None = None


class Query(NamedTuple):
    """A list: its statement, and the statement that finds the id behind `$window` rows. In both, `$ONLY` stands for the
    conditions `only`, `$name` for a value of `given`, and `$low` and `$high` for the range of ids. One of the
    conditions, `driver`, has an index; without it the list reads all rows of the tenant. `exact`: every row that the
    driver finds is in the list."""

    step: str
    rows: str
    floor: str
    given: Mapping[str, Any]
    only: Sequence[str]
    driver: str | None = None
    exact: bool = True


async def look(db: Database, who: Identity, query: Query) -> Looked:
    """Return the matching rows: `most` of `given` at most, or the matches within the largest window."""
    if query.exact and who.scope is None and len(query.only) == (query.driver is not None):
        return Looked(await _rows(db, who, query, None))
    rows: list[Row] = []
    floor = None
    for window in WINDOWS:
        floor = await _floor(db, query, window)
        rows = await _rows(db, who, query, floor)
        if floor is None or len(rows) >= query.given["most"]:
            return Looked(rows)
    return Looked(rows, floor)


async def _rows(db: Database, who: Identity, query: Query, floor: str | None) -> list[Row]:
    low = query.given["low"] if floor is None else max(floor, query.given["low"])
    statement = query.rows.replace("$ONLY", "\n".join(query.only))
    async with db.tenant(who.tenant_id, query.step) as connection:
        return await connection.fetch(*bound(statement, {**query.given, "low": low}))  # type: ignore[no-any-return]


async def _floor(db: Database, query: Query, window: int) -> str | None:
    """Return the id behind `window` rows. Run as the engine: for a key of few jobs the policies would discard rows
    uncounted."""
    statement = query.floor.replace("$ONLY", query.driver or "")
    return await db.fetchval("engine", *bound(statement, {**query.given, "window": window}))  # type: ignore[no-any-return]


def bound(statement: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a statement with `$name` parameters in the form that asyncpg takes, and the values of the parameters it
    uses."""
    text, names = _numbered(statement)
    return text, *(given[name] for name in names)


@functools.lru_cache(maxsize=512)
def _numbered(statement: str) -> tuple[str, tuple[str, ...]]:
    names = tuple(dict.fromkeys(_NAMED.findall(statement)))
    return _NAMED.sub(lambda match: f"${names.index(match[1]) + 1}", statement), names
