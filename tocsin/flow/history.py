"""history: read runs and attempts, live and ended alike, as the API answers them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.errors import NotFound
from tocsin.flow.shared import lanes
from tocsin.flow.shared.documents import error_of, instant, milliseconds, raw, run_document
from tocsin.model.access import Identity
from tocsin.model.ids import lowest_id
from tocsin.model.resources import Amounts, why_unschedulable
from tocsin.store.db import Database, Sql

SQL = Sql(__file__)


class RunFilter(NamedTuple):
    """What a list of runs is narrowed by."""

    job: str | None = None
    state: str | None = None
    outcome: str | None = None
    error_class: str | None = None
    worker: str | None = None
    tag: dict[str, str] | None = None
    from_: datetime | None = None
    to: datetime | None = None


async def get_run(db: Database, who: Identity, run_id: str) -> dict[str, Any]:
    """One run's document, wherever it is in its life."""
    # One after the other: planned together, every partition of history would be planned for each live run, too.
    # The second look sees what ended between the two.
    row = await db.fetchrow("app", SQL["get_live"], who.tenant_id, run_id)
    row = row or await db.fetchrow("app", SQL["get_ended"], who.tenant_id, run_id)
    if row is None:
        raise NotFound("there is no such run")
    document = run_document(row)
    if row["needs"] is not None and row["state"] == "ready":
        needs = Amounts(*row["needs"])
        if why_unschedulable(needs, await lanes.totals(db, row["lane_id"])) is not None:
            document |= {"blocked_by": "resources", "reason": "unschedulable"}
    return document


async def list_runs(
    db: Database, who: Identity, filter_: RunFilter, before: str | None, limit: int
) -> list[dict[str, Any]]:
    """Newest first, over live and ended runs."""
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = await connection.fetch(
            SQL["list"],
            who.tenant_id,
            before,
            filter_.job,
            filter_.state,
            filter_.outcome,
            filter_.error_class,
            filter_.worker,
            msgspec.json.encode(filter_.tag).decode() if filter_.tag else None,
            lowest_id(filter_.from_) if filter_.from_ else None,
            lowest_id(filter_.to) if filter_.to else None,
            limit,
        )
    return [run_document(row) for row in rows]


async def attempts(db: Database, who: Identity, run_id: str) -> list[dict[str, Any]]:
    """Every attempt of a run, oldest first, the one under way included."""
    await get_run(db, who, run_id)
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = await connection.fetch(SQL["attempts"], who.tenant_id, run_id)
    return [
        {
            "attempt": row["attempt"],
            "fence": row["fence"],
            "outcome": row["outcome"],
            "started_at": instant(row["started_at"]),
            "finished_at": instant(row["finished_at"]),
            "duration_ms": milliseconds(row["started_at"], row["finished_at"]),
            "worker": row["worker"],
            "exit_code": row["exit_code"],
            "error": error_of(row),
            "result": raw(row["result"]),
            "usage": raw(row["usage"]),
            "reason": row["reason"],
        }
        for row in rows
    ]
