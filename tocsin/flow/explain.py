"""explain: why a run has not started, and when it may; or how it ended. Reads one moment, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import msgspec

from tocsin.errors import NotFound
from tocsin.flow.shared import cold
from tocsin.flow.shared.documents import instant
from tocsin.model.access import Identity
from tocsin.model.blockers import (
    MANY,
    Awaited,
    Blocker,
    Breaker,
    Earlier,
    End,
    Facts,
    Fleet,
    Limit,
    Queue,
    Quota,
    Throttle,
    blockers,
    why_ended,
    why_held,
    why_waiting,
)
from tocsin.model.estimate import Estimate, Pace, at_once, latest
from tocsin.model.limits import Rate, key_id, rendered
from tocsin.model.resources import Amounts
from tocsin.model.states import HELD
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.parquet import Parquet

SQL = Sql(__file__)
NO_BOUND = 2**31 - 1  # the limit row of a job without one
_FAR = MANY + 1

Paces = Callable[[str], Pace | None]  # of a pool


async def explain(db: Database, parquet: Parquet, who: Identity, run_id: str, paces: Paces) -> dict[str, Any]:
    """The document of `GET /v1/runs/{id}/explain`; `paces` tells how fast a pool starts runs."""
    told = await _of_hot(db, who, run_id, paces)
    if told is not None:
        return told
    rows = await cold.attempts_of(db, parquet, who, run_id)
    if not rows:
        raise NotFound("there is no such run")
    return _ended(run_id, rows[-1])


async def _of_hot(db: Database, who: Identity, run_id: str, paces: Paces) -> dict[str, Any] | None:
    """The same of a run that is in the database."""
    async with db.snapshot(who.tenant_id, "explain") as connection:
        run = await connection.fetchrow(SQL["live"], who.tenant_id, run_id)
        if run is None:
            ended = await connection.fetchrow(SQL["ended"], who.tenant_id, run_id)
            return None if ended is None else _ended(run_id, ended)
        if run["state"] in HELD:
            told = why_held(run["state"], run["worker"], run["started_at"])
            return _document(run_id, run["state"], told, [], None)
        facts = await _facts(connection, who.tenant_id, run_id, run, paces)
    found = blockers(facts)
    start = latest(blocker.over for blocker in found) if found else at_once(facts.now)
    return _document(run_id, run["state"], why_waiting(found, run["blocked_by"]), found, start)


async def _facts(connection: Connection, tenant_id: int, run_id: str, run: Row, paces: Paces) -> Facts:
    lasts: timedelta | None = await connection.fetchval(SQL["lasts"], tenant_id, run["job_id"])
    earlier = await _earlier(connection, tenant_id, run_id, run)
    limits, throttle = await _limits(connection, tenant_id, run_id, run) if run["limited"] else ([], None)
    awaited = await _awaited(connection, tenant_id, run_id, run) if run["pending_parents"] else []
    await connection.execute(SQL["beyond"])
    fleet = await _fleet(connection, tenant_id, run)
    quota = await connection.fetchrow(SQL["quota"], tenant_id)
    suspended_since, shut_out = await connection.fetchrow(SQL["standing"], tenant_id, fleet.pool)
    return Facts(
        run["now"],
        run["attempt"],
        run["ready_at"],
        fleet,
        await _queue(connection, tenant_id, run_id, run) if fleet.able else Queue(),
        overlap=run["overlap"],
        paused_since=run["paused_since"],
        earlier=earlier,
        limits=limits,
        throttle=throttle,
        quota=quota and Quota(*quota),
        breaker=_breaker(run),
        pool_paused_since=run["pool_paused_since"],
        lasts=lasts,
        pace=paces(fleet.pool),
        suspended_since=suspended_since,
        shut_out=shut_out,
        pending=run["pending_parents"] or 0,
        awaited=awaited,
        folded=run["folded"],
    )


# ── what is the tenant's own ─────────────────────────────────────────────────────────────────────────────────────


async def _awaited(connection: Connection, tenant_id: int, run_id: str, run: Row) -> list[Awaited]:
    """Some of the runs that it waits for."""
    by = SQL["nodes_before"] if run["workflow_run_id"] is not None else SQL["parents"]
    return [Awaited(*row) for row in await connection.fetch(by, tenant_id, run_id)]


async def _earlier(connection: Connection, tenant_id: int, run_id: str, run: Row) -> list[Earlier]:
    if run["overlap"] is None or run["trigger"] != "schedule" or run["attempt"]:
        return []
    return [Earlier(*row) for row in await connection.fetch(SQL["earlier"], tenant_id, run["job_id"], run_id)]


async def _limits(connection: Connection, tenant_id: int, run_id: str, run: Row) -> tuple[list[Limit], Throttle | None]:
    """The limits that bind the run, as the claim would weigh them."""
    key = _key_of(tenant_id, run)

    async def holders(limit: str, blocked_by: str) -> Row:
        return await connection.fetchrow(SQL["holders"], tenant_id, limit, run["order_key"], run_id, blocked_by, _FAR)

    limits = []
    if run["job_max"] is not None and run["job_max"] != NO_BOUND:
        found = await holders(run["job_id"], "limit")
        limits.append(Limit(None, run["job_max"], *found))
    if run["key_id"] is not None and run["key_max"] is not None:
        found = await holders(run["key_id"], "limit")
        limits.append(Limit(key, run["key_max"], *found))
    if run["rate_gap"] is None:
        return limits, None
    found = await holders(run["key_id"] or run["job_id"], "rate")
    tat = run["job_tat"] if run["key_id"] is None else run["key_tat"]
    return limits, Throttle(key, Rate(run["rate_gap"], run["rate_burst"]), tat, found["waiting"])


def _breaker(run: Row) -> Breaker | None:
    if run["circuit"] is None:
        return None
    return Breaker(run["circuit"], run["circuit_state"], run["circuit_since"], run["circuit_next_at"])


def _key_of(tenant_id: int, run: Row) -> str | None:
    """The concurrency key as its owner wrote it; its number, if the job has another one by now."""
    if run["key_id"] is None:
        return None
    given = msgspec.json.decode(run["spec"]).get("concurrency_key")
    template = given.get("key") if isinstance(given, dict) else given
    args = msgspec.json.decode(run["args"]) if run["args"] else {}
    key = rendered(template or "", args if isinstance(args, dict) else {})
    return key if key_id(tenant_id, key) == run["key_id"] else str(run["key_id"])


# ── what it shares with others ───────────────────────────────────────────────────────────────────────────────────


async def _fleet(connection: Connection, tenant_id: int, run: Row) -> Fleet:
    lane = (run["pool"], run["kind"], run["function"])
    found = await connection.fetchrow(SQL["fleet"], *lane, run["labels"], run["needs"], tenant_id)
    totals = [Amounts(*total) for total in found["totals"]]
    needs = None if run["needs"] is None else Amounts(*run["needs"])
    return Fleet(*lane, msgspec.json.decode(run["labels"]), needs, **dict(found) | {"totals": totals})


async def _queue(connection: Connection, tenant_id: int, run_id: str, run: Row) -> Queue:
    lanes = [
        row["id"]
        for row in await connection.fetch(SQL["lanes"], run["pool"], run["kind"], run["function"], run["labels"])
    ]
    mine = await connection.fetchval(SQL["mine"], tenant_id, lanes, run["order_key"], _FAR, run_id)
    in_one_order = run["policy"] != "fair"
    place = run["order_key"] if in_one_order else None
    others = await connection.fetch(SQL["others"], tenant_id, lanes, mine, _FAR, place)
    weight = others[0]["ours"] if others else 1
    return Queue(mine, weight, [(row["weight"], row["queued"]) for row in others], in_one_order)


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────────


def _ended(run_id: str, row: Row) -> dict[str, Any]:
    error = ": ".join(part for part in (row["error_class"], (row["error"] or "").partition("\n")[0]) if part)
    numbers = (row["attempt"], row["failures"], row["losses"], row["max_attempts"])
    end = End(row["state"], row["outcome"], row["reason"], *numbers, error or None, row["count"])
    return _document(run_id, row["state"], why_ended(end), [], None)


def _document(
    run_id: str, state: str, summary: str, found: Iterable[Blocker], start: Estimate | None
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "state": state,
        "summary": summary,
        "blockers": [_blocker(one) for one in found],
        "estimated_start_at": start and instant(start.at),
        "estimated_error_seconds": start and round(start.error.total_seconds(), 3),
    }


def _blocker(one: Blocker) -> dict[str, Any]:
    """What does not apply is left out."""
    told = {
        "code": one.code,
        "message": one.message,
        "since": instant(one.since),
        "until": instant(one.until),
        "key": one.key,
        "runs": list(one.runs),
    }
    return {name: value for name, value in told.items() if value}
