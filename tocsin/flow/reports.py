"""reports: what became of the runs of a stretch of time, counted: how many, how long, how late, why not, and where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from tocsin.clock import iso
from tocsin.flow.shared import cold
from tocsin.model.access import Identity
from tocsin.model.ids import lowest_id
from tocsin.model.reports import IN_ORDER, Kind, Span, percentile, success_rate
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.parquet import Parquet

SQL = Sql(__file__, cold.SQL)
MOST_ROWS = 1_000_000  # of history that one report reads in the database: the newest
MOST_ARCHIVED = 20_000_000  # and in files
STATES = ("succeeded", "dead", "cancelled", "expired", "skipped")
Item = dict[str, Any]
Opened = Callable[[], AbstractAsyncContextManager[Connection]]


class Asked(NamedTuple):
    """A report: which runs, grouped by what, how many groups at most."""

    span: Span
    by: str
    most: int


class _Reader:
    """Counts what one caller may see, in the database and in files."""

    def __init__(self, opened: Opened, parquet: Parquet, tenants: Sequence[int], asked: Asked) -> None:
        self._opened = opened
        self._parquet = parquet
        self._tenants = list(tenants)
        self._span = asked.span
        start, end = asked.span
        self._scope = (self._tenants, lowest_id(start), lowest_id(end), MOST_ROWS, asked.by)
        self.complete = True

    async def count(self, statement: str, *more: Any) -> list[Row]:
        """What a statement counts: in the database, in a transaction that is not kept waiting for files, and in those
        files that were the rest at the same moment."""
        async with self._opened() as connection:
            rows: list[Row] = await connection.fetch(statement.replace("$ROWS", SQL["hot"]), *self._scope, *more)
            # After the first look at the database, which holds on to the partitions that it saw.
            found = await cold.files(connection, self._tenants, self._span.start.date(), self._span.end.date())
        if rows and rows[0].get("scanned", 0) >= MOST_ROWS:
            self.complete = False
        if files := self._newest(found):
            scope = (*self._scope[:3], MOST_ARCHIVED, self._scope[4])
            rows += await cold.query(self._parquet, statement.replace("$ROWS", SQL["cold"]), files, (*scope, *more))
        return rows

    def _newest(self, found: Sequence[cold.Archived]) -> list[cold.Archived]:
        """Those to be read, as far as there are not too many rows in them."""
        room = accumulate(archived.rows for archived in found)
        chosen = [archived for archived, rows in zip(found, room, strict=True) if rows <= MOST_ARCHIVED]
        self.complete &= len(chosen) == len(found)
        return chosen


async def report(db: Database, parquet: Parquet, who: Identity, kind: Kind, asked: Asked) -> dict[str, Any]:
    """The report's document. Of utilisation a platform key sees that of all tenants."""
    make: Callable[[_Reader, Asked], Awaitable[list[Item]]] = {
        "runs": _runs,
        "failures": _failures,
        "utilisation": _utilisation,
    }[kind]
    if kind == "utilisation" and who.bound_to is None:
        slugs = {str(row["id"]): row["slug"] for row in await db.fetch("engine", SQL["tenants"])}
        reader = _Reader(lambda: _of_all(db), parquet, [int(id_) for id_ in slugs], asked)
    else:
        slugs = {str(who.tenant_id): who.tenant}
        reader = _Reader(lambda: db.snapshot(who.tenant_id, "reports"), parquet, [who.tenant_id], asked)
    items = await make(reader, asked)
    if kind == "utilisation":
        await _offer(db, asked, items, slugs)
    if asked.by == "job":
        await _name_jobs(db, who, items)
    return {
        "report": kind,
        "by": asked.by,
        "from": iso(asked.span.start),
        "to": iso(asked.span.end),
        "complete": reader.complete,
        "items": items,
    }


@asynccontextmanager
async def _of_all(db: Database) -> AsyncIterator[Connection]:
    """One moment of all tenants."""
    async with db.transaction("reports") as connection:
        await connection.execute(SQL["steady"])
        yield connection


async def _runs(reader: _Reader, asked: Asked) -> list[Item]:
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    labels: dict[str, str | None] = {}
    for row in await reader.count(SQL["runs"]):
        groups[row["key"]][row["state"]] += row["runs"]
        labels[row["key"]] = labels.get(row["key"]) or row["label"]
    chosen = _foremost(groups, asked, key=lambda key: groups[key].total())
    durations: dict[str, Counter[int]] = defaultdict(Counter)
    lags: dict[str, Counter[int]] = defaultdict(Counter)
    for row in await reader.count(SQL["durations"], chosen):
        if row["duration"] is not None:
            durations[row["key"]][row["duration"]] += row["runs"]
        else:
            lags[row["key"]][row["lag"]] += row["runs"]
    return [
        {
            "key": key,
            "label": labels[key],
            "runs": groups[key].total(),
            **{state: groups[key][state] for state in STATES},
            "success_rate": success_rate(groups[key]),
            **_percentiles("duration", durations[key]),
            **_percentiles("start_lag", lags[key]),
        }
        for key in chosen
    ]


def _percentiles(name: str, counts: Mapping[int, int]) -> Item:
    return {f"{name}_p{share}_ms": percentile(counts, share / 100) for share in (50, 95, 99)}


async def _failures(reader: _Reader, asked: Asked) -> list[Item]:
    groups: dict[str, Item] = {}
    for row in await reader.count(SQL["failures"]):
        item = groups.setdefault(row["key"], {"key": row["key"], "label": None, "failures": 0, "runs": 0, "dead": 0})
        for name in ("failures", "runs", "dead"):
            item[name] += row[name]
        item["label"] = item["label"] or row["label"]
        for name, value in (("last_at", iso(row["last_at"])), ("last_run_id", row["last_run_id"])):
            item[name] = max(item.get(name, ""), value)
    return [groups[key] for key in _foremost(groups, asked, key=lambda key: groups[key]["failures"])]


async def _utilisation(reader: _Reader, asked: Asked) -> list[Item]:
    groups: dict[str, Item] = {}
    for row in await reader.count(SQL["utilisation"]):
        key = row["key"] or "unknown"  # the pool of a job that is gone
        item = groups.setdefault(key, {"key": key, "label": None, "attempts": 0, "busy_seconds": 0.0})
        item["label"] = item["label"] or row["label"]
        item["attempts"] += row["attempts"]
        item["busy_seconds"] = round(item["busy_seconds"] + float(row["busy_seconds"]), 3)
        item |= {"capacity_seconds": None, "utilisation": None}
    return [groups[key] for key in _foremost(groups, asked, key=lambda key: groups[key]["busy_seconds"])]


def _foremost(groups: Iterable[str], asked: Asked, key: Callable[[str], Any]) -> list[str]:
    """The largest groups; days and hours, the latest of them, in their own order."""
    if asked.by in IN_ORDER:
        return sorted(groups)[-asked.most :]
    return sorted(groups, key=lambda name: (-key(name), name))[: asked.most]


async def _name_jobs(db: Database, who: Identity, items: list[Item]) -> None:
    async with db.tenant(who.tenant_id, "reports") as connection:
        rows = await connection.fetch(SQL["job_names"], who.tenant_id, [item["key"] for item in items])
    names = {row["key"]: row["label"] for row in rows}
    for item in items:
        item["label"] = names.get(item["key"]) or item["label"]


async def _offer(db: Database, asked: Asked, items: list[Item], slugs: Mapping[str, str]) -> None:
    """What there was to be used, for workers and pools; and names for what has them."""
    offered: dict[str, float] = defaultdict(float)
    labels = dict(slugs) if asked.by == "tenant" else {}
    if asked.by in ("worker", "pool"):
        known = await db.fetchval("engine", SQL["remembered"], asked.span.start)
        for row in await db.fetch("engine", SQL["capacity"], *asked.span):
            key = row["id"] if asked.by == "worker" else row["pool"]
            offered[key] += max(row["seconds"], 0.0) if known else 0.0
            if asked.by == "worker":
                labels[key] = row["name"]
    for item in items:
        item["label"] = labels.get(item["key"]) or item["label"]
        if offered[item["key"]]:
            item["capacity_seconds"] = round(offered[item["key"]], 3)
            item["utilisation"] = round(item["busy_seconds"] / offered[item["key"]], 6)
