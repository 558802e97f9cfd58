"""history: read runs and attempts, live and ended alike, as the API answers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import EPOCH
from tocsin.errors import NotFound, ServerFault
from tocsin.flow.shared import cold, lanes, windows
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
    "job": SQL["only_job"],
    "state": SQL["only_state"],
    "outcome": SQL["only_outcome"],
    "error_class": SQL["only_error_class"],
    "worker": SQL["only_worker"],
    "tag": SQL["only_tag"],
}


class _Side(NamedTuple):
    """One of the two tables: its statements and its filters. The filters in `indexed` have an index of their own; the
    most selective filter comes first."""

    rows: str
    floor: str
    only: Mapping[str, str]
    indexed: Sequence[str]


_LIVE = _Side(
    SQL["list_live"],
    SQL["floor_live"],
    {"job": SQL["live_job"], "state": SQL["live_state"], "worker": SQL["live_worker"], "tag": SQL["live_tag"]},
    ("worker", "job"),
)
_ENDED = _Side(
    SQL["list_ended"],
    SQL["floor_ended"],
    {
        "job": SQL["ended_job"],
        "state": SQL["ended_state"],
        "outcome": SQL["ended_outcome"],
        "error_class": SQL["ended_error_class"],
        "worker": SQL["ended_worker"],
        "tag": SQL["ended_tag"],
    },
    ("error_class", "outcome", "state", "job"),
)
# Most runs succeed: an index of successful runs would cost each report a write.
_SUCCEEDED = {"state": SQL["ended_state_succeeded"], "outcome": SQL["ended_outcome_succeeded"]}


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
) -> windows.Listed:
    """Newest first, over live, ended and archived runs."""
    given = _given(who, filter_, before, limit)
    # The order matters: a run that ends, or a day that is archived, between two of these reads is found twice, never
    # missed.
    looked = [await _look(db, who, side, given) for side in _sides(filter_)]
    runs = {row["id"]: run_document(row) for side in looked for row in side.rows}
    floors = [side.floor for side in looked if side.floor is not None]
    filled = sorted(runs, reverse=True)[limit - 1 : limit]  # the last run of the page, if the page is already full
    lowest = max(floors + filled, default=None)
    async with db.tenant(who.tenant_id, "history") as connection:
        found = await _archived(connection, who, given, lowest)
    rest = max(filter(None, (await _add_archived(parquet, found, runs, given), *floors)), default=None)
    newest = sorted((id_ for id_ in runs if rest is None or id_ >= rest), reverse=True)[:limit]
    return windows.Listed([runs[id_] for id_ in newest], None if len(newest) == limit else rest)


def _given(who: Identity, filter_: RunFilter, before: str | None, most: int) -> dict[str, Any]:
    """Return the parameters of a list: the filters, with None for those not given, and the range of run ids."""
    since, until = (None if at is None else lowest_id(at) for at in (filter_.from_, filter_.to))
    return {
        "tenant": who.tenant_id,
        "most": most,
        "job": filter_.job,
        "state": filter_.state,
        "outcome": filter_.outcome,
        "error_class": filter_.error_class,
        "worker": filter_.worker,
        "tag": msgspec.json.encode(filter_.tag).decode() if filter_.tag else None,
        "low": max(filter(None, (since, filter_.job and _before_runs_of(filter_.job), windows.LOWEST))),
        "high": min(filter(None, (until, before, windows.HIGHEST))),
    }


def _before_runs_of(job: str) -> str:
    """Return an id below all runs of a job: no run is older than its job, except for the order of ids within one
    instant."""
    day = cold.day_of(job)
    if not EPOCH.date() < day < cold.LAST_DAY:
        return windows.LOWEST
    return lowest_id(datetime.combine(day, time(), UTC) - timedelta(days=1))


def _sides(filter_: RunFilter) -> list[_Side]:
    """Return the tables that may contain such runs, live runs first."""
    live = filter_.state in (None, *LIVE) and filter_.outcome is None and filter_.error_class is None
    ended = filter_.state not in LIVE
    return [side for side, has in ((_LIVE, live), (_ENDED, ended)) if has]


async def _look(db: Database, who: Identity, side: _Side, given: Mapping[str, Any]) -> windows.Looked:
    """Read one table by the index of its most selective filter."""
    common = {name for name in _SUCCEEDED if side is _ENDED and given[name] == "succeeded"}
    asked = {name: only for name, only in side.only.items() if given[name] is not None}
    driver = next((asked[name] for name in side.indexed if name in asked and name not in common), None)
    only = [_SUCCEEDED[name] if name in common else condition for name, condition in asked.items()]
    return await windows.look(db, who, windows.Query("history", side.rows, side.floor, given, only, driver))


async def _archived(
    connection: Connection, who: Identity, given: Mapping[str, Any], lowest: str | None
) -> list[cold.Archived]:
    """Files that may hold some of the runs, of which the page has those down to `lowest` already."""
    if given["state"] in LIVE:
        return []
    first = max(filter(None, (given["low"], lowest)))
    return await cold.files(
        connection,
        [who.tenant_id],
        cold.day_of(first) if first > windows.LOWEST else cold.FIRST_DAY,
        cold.day_before(given["high"]) if given["high"] < windows.HIGHEST else cold.LAST_DAY,
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
