"""Tenants by the names that the platform calls them by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tocsin.errors import InvalidInput
from tocsin.store.db import Database, Sql

SQL = Sql(__file__)


async def ids_of(db: Database, slugs: Sequence[str], path: str) -> list[int]:
    """Their numbers; raises, with the field's path, if there is no such tenant."""
    found = {row["slug"]: row["id"] for row in await db.fetch("engine", SQL["ids"], list(slugs))}
    for i, slug in enumerate(slugs):
        if slug not in found:
            raise InvalidInput.field(f"{path}[{i}]", "invalid", "there is no such tenant")
    return sorted(found.values())


async def slugs_of(db: Database, ids: Collection[int]) -> dict[int, str]:
    """The other way round, of those that there are."""
    return {row["id"]: row["slug"] for row in await db.fetch("engine", SQL["slugs"], list(ids))} if ids else {}
