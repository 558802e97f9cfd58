"""history: read runs and attempts, live and ended alike, as the API answers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time
from typing import Any, NamedTuple

import msgspec

from tocsin.errors import NotFound, ServerFault
from tocsin.flow.shared import cold, lanes
from tocsin.flow.shared.documents import error_of, instant, milliseconds, raw, run_document
from tocsin.flow.shared.parcels import Parcels
from tocsin.model.access import Identity
from tocsin.model.ids import lowest_id
from tocsin.model.packed import result_shown
from tocsin.model.resources import Amounts, why_unschedulable
from tocsin.model.states import LIVE
from tocsin.store.db import Connection, Database, Sql
from tocsin.store.parquet import Parquet

SQL = Sql(__file__, cold.SQL)
_MOST_WAVES = 12  # of files that one call looks through: about a year of a tenant

# What each thing that may be asked for means to files.
_ONLY = {
    "before": SQL["only_before"],
    "job": SQL["only_job"],
    "state": SQL["only_state"],
    "outcome": SQL["only_outcome"],
    "error_class": SQL["only_error_class"],
    "worker": SQL["only_worker"],
    "tag": SQL["only_tag"],
    "since": SQL["only_since"],
    "until": SQL["only_until"],
}


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


class Listed(NamedTuple):
    """Runs, newest first. `rest`: where to go on if there was more to look through than one call does."""

    items: list[dict[str, Any]]
    rest: str | None = None


async def get_run(
    db: Database, who: Identity, run_id: str, parquet: Parquet | None = None, parcels: Parcels | None = None
) -> dict[str, Any]:
    """One run's document, wherever it is in its life; in the archive only if there is who reads it, and with a large
    result only if there is who fetches that."""
    # One after the other: planned together, every partition of history would be planned for each live run, too.
    # The second look sees what ended between the two, the third what was archived between those.
    row = await db.fetchrow("app", SQL["get_live"], who.tenant_id, run_id)
    row = row or await db.fetchrow("app", SQL["get_ended"], who.tenant_id, run_id)
    if row is None and parquet is not None:
        row = next(reversed(await cold.attempts_of(db, parquet, who, run_id)), None)
    if row is None:
        raise NotFound("there is no such run")
    document = run_document(row)
    if parcels is not None and row["result"] is not None:
        try:
            document["result"] = raw(await parcels.whole(who.tenant_id, row["result"]))
        except ServerFault as lost:  # what else is known of the run is told all the same
            document["result"] = result_shown(row["result"], error=lost.code)
    if row["needs"] is not None and row["state"] == "ready":
        needs = Amounts(*row["needs"])
        if why_unschedulable(needs, await lanes.totals(db, row["lane_id"])) is not None:
            document |= {"blocked_by": "resources", "reason": "unschedulable"}
    return document


async def list_runs(
    db: Database, parquet: Parquet, who: Identity, filter_: RunFilter, before: str | None, limit: int
) -> Listed:
    """Newest first, over live, ended and archived runs."""
    given = _given(filter_, before)
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, *given.values(), limit)
        # After the rows: a day that was archived between the two is found twice then, and not never.
        found = await _archived(connection, who, given, rows[-1]["id"] if len(rows) == limit else None)
    runs = {row["id"]: run_document(row) for row in rows}
    rest = await _add_archived(parquet, found, runs, {"tenant": who.tenant_id, "most": limit} | given)
    newest = sorted((id_ for id_ in runs if rest is None or id_ >= rest), reverse=True)[:limit]
    return Listed([runs[id_] for id_ in newest], None if len(newest) == limit else rest)


def _given(filter_: RunFilter, before: str | None) -> dict[str, Any]:
    """What is asked for, in the order of `list`."""
    return {
        "before": before,
        "job": filter_.job,
        "state": filter_.state,
        "outcome": filter_.outcome,
        "error_class": filter_.error_class,
        "worker": filter_.worker,
        "tag": msgspec.json.encode(filter_.tag).decode() if filter_.tag else None,
        "since": lowest_id(filter_.from_) if filter_.from_ else None,
        "until": lowest_id(filter_.to) if filter_.to else None,
    }


async def _archived(
    connection: Connection, who: Identity, given: Mapping[str, Any], lowest: str | None
) -> list[cold.Archived]:
    """Files that may hold some of the runs, of which the page has those down to `lowest` already."""
    if given["state"] in LIVE:
        return []
    # No run is older than its job.
    first = max(filter(None, (given["since"], given["job"], lowest)), default=None)
    last = min(filter(None, (given["until"], given["before"])), default=None)
    return await cold.files(
        connection,
        [who.tenant_id],
        cold.day_of(first) if first else cold.FIRST_DAY,
        cold.day_before(last) if last else cold.LAST_DAY,
    )


async def _add_archived(
    parquet: Parquet, found: Sequence[cold.Archived], runs: dict[str, Any], given: Mapping[str, Any]
) -> str | None:
    """Look through files until there are enough runs; answers where to go on if that would take too long."""
    asked = {name: value for name, value in given.items() if value is not None}
    only = " ".join(condition for name, condition in _ONLY.items() if name in asked)
    for number, wave in enumerate(cold.waves(found), 1):
        rows = await cold.query(parquet, SQL["list_cold"].replace("$ONLY", only), wave, asked)
        runs |= {row["id"]: run_document(row) for row in rows}
        looked_through = lowest_id(datetime.combine(wave[-1].day, time(), UTC))
        if sum(id_ >= looked_through for id_ in runs) >= given["most"]:
            return None
        if number == _MOST_WAVES and wave[-1] is not found[-1]:
            return looked_through
    return None


async def attempts(db: Database, who: Identity, run_id: str, parquet: Parquet) -> list[dict[str, Any]]:
    """Every attempt of a run, oldest first, the one under way included."""
    await get_run(db, who, run_id, parquet)
    async with db.tenant(who.tenant_id, "history") as connection:
        rows = await connection.fetch(SQL["attempts"], who.tenant_id, run_id)
    if not rows:
        rows = [row for row in await cold.attempts_of(db, parquet, who, run_id) if row["outcome"] is not None]
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
            "result": result_shown(row["result"]),
            "usage": raw(row["usage"]),
            "reason": row["reason"],
        }
        for row in rows
    ]
