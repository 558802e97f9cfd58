"""reports: what became of the runs of a stretch of time, counted: how many, how long, how late, why not, and where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tocsin.clock import iso
from tocsin.flow.shared import cold
from tocsin.model.access import Identity
from tocsin.model.ids import lowest_id
from tocsin.model.reports import IN_ORDER, Kind, Span, percentile, success_rate
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.parquet import File, Parquet

SQL = Sql(__file__)
MOST_ROWS = 1_000_000  # of history that one report reads in the database: the newest
MOST_ARCHIVED = 20_000_000  # and in files
STATES = ("succeeded", "dead", "cancelled", "expired", "skipped")
Item = dict[str, Any]


class Asked(NamedTuple):
    """A report: which runs, grouped by what, how many groups at most."""

    span: Span
    by: str
    most: int


class _Reader:
    """Counts what one caller may see, of one moment, in the database and in files."""

    def __init__(self, connection: Connection, parquet: Parquet, tenants: Sequence[int], asked: Asked) -> None:
        self._connection = connection
        self._parquet = parquet
        self._tenants = list(tenants)
        self._span = asked.span
        start, end = asked.span
        self._scope = (self._tenants, lowest_id(start), lowest_id(end), MOST_ROWS, asked.by)
        self._files: list[File] | None = None
        self.complete = True

    async def count(self, statement: str, *more: Any) -> list[Row]:
        rows: list[Row] = await self._connection.fetch(statement.replace("$ROWS", SQL["hot"]), *self._scope, *more)
        if rows and rows[0].get("scanned", 0) >= MOST_ROWS:
            self.complete = False
        # After the first look at the database, which holds on to the partitions that it saw.
        files = await self._archived()
        if files:
            rows += await self._parquet.query(
                statement.replace("$ROWS", SQL["cold"]),
                files,
                (*self._scope[:3], MOST_ARCHIVED, self._scope[4], *more),
            )
        return rows

    async def _archived(self) -> list[File]:
        """The files to be read, the newest, as far as there are not too many rows in them."""
        if self._files is None:
            found = await cold.files(self._connection, self._tenants, self._span.start.date(), self._span.end.date())
            room = accumulate(archived.rows for archived in found)
            self._files = [archived.file for archived, rows in zip(found, room, strict=True) if rows <= MOST_ARCHIVED]
            self.complete &= len(self._files) == len(found)
        return self._files


async def report(db: Database, parquet: Parquet, who: Identity, kind: Kind, asked: Asked) -> dict[str, Any]:
    """The report's document. Of utilisation a platform key sees that of all tenants."""
    make: Callable[[_Reader, Asked], Awaitable[list[Item]]] = {
        "runs": _runs,
        "failures": _failures,
        "utilisation": _utilisation,
    }[kind]
    await _bring_files(db, parquet, who, asked)
    if kind == "utilisation" and who.bound_to is None:
        slugs = {str(row["id"]): row["slug"] for row in await db.fetch("engine", SQL["tenants"])}
        async with db.transaction("reports") as connection:
            await connection.execute(SQL["steady"])
            reader = _Reader(connection, parquet, [int(id_) for id_ in slugs], asked)
            items = await make(reader, asked)
    else:
        slugs = {str(who.tenant_id): who.tenant}
        async with db.snapshot(who.tenant_id, "reports") as connection:
            reader = _Reader(connection, parquet, [who.tenant_id], asked)
            items = await make(reader, asked)
            if asked.by == "job":
                await _name_jobs(connection, who, items)
    if kind == "utilisation":
        await _offer(db, asked, items, slugs)
    return {
        "report": kind,
        "by": asked.by,
        "from": iso(asked.span.start),
        "to": iso(asked.span.end),
        "complete": reader.complete,
        "items": items,
    }


async def _bring_files(db: Database, parquet: Parquet, who: Identity, asked: Asked) -> None:
    """Have the caller's own files at hand before a transaction is begun, which should not wait for them."""
    async with db.snapshot(who.tenant_id, "reports") as connection:
        found = await cold.files(connection, [who.tenant_id], asked.span.start.date(), asked.span.end.date())
    await parquet.bring([archived.file for archived in found])


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


async def _name_jobs(connection: Connection, who: Identity, items: list[Item]) -> None:
    rows = await connection.fetch(SQL["job_names"], who.tenant_id, [item["key"] for item in items])
    names = {row["key"]: row["label"] for row in rows}
    for item in items:
        item["label"] = names.get(item["key"]) or item["label"]


async def _offer(db: Database, asked: Asked, items: list[Item], slugs: Mapping[str, str]) -> None:
    """What there was to be used, for workers and pools; and names for what has them."""
    offered: dict[str, float] = defaultdict(float)
    labels = dict(slugs) if asked.by == "tenant" else {}
    if asked.by in ("worker", "pool"):
        for row in await db.fetch("engine", SQL["capacity"], *asked.span):
            key = row["id"] if asked.by == "worker" else row["pool"]
            offered[key] += max(row["seconds"], 0.0)
            if asked.by == "worker":
                labels[key] = row["name"]
    for item in items:
        item["label"] = labels.get(item["key"]) or item["label"]
        if offered[item["key"]]:
            item["capacity_seconds"] = round(offered[item["key"]], 3)
            item["utilisation"] = round(item["busy_seconds"] / offered[item["key"]], 6)
