"""events: what changed, in the order it was committed, for whoever listens.

Triggers write the changes down (migration 0003), and only for tenants whose feed is open. A reader goes by position:
the number of the transaction, then the order within it; and never past the oldest transaction that still runs, because
behind that one something may still come in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.wire import CircuitEvent, JobEvent, RunEvent

SQL = Sql(__file__)
OPEN_SECONDS = 600.0  # a feed stays open so long after it was last renewed
_KEPT_SECONDS, _KEPT_ROWS = 600.0, 50_000
_FEEDS = 10  # feeds that one statement closes or trims, each with some 50,000 rows
_MOST_TRIMMED = 200_000  # rows in one statement
_PAGE = 100  # rows, of up to a hundred changes each
_read_changes = msgspec.json.Decoder(list[list[Any]]).decode
_EVENT_ID = re.compile(r"(\d{1,10})-(\d{1,18})-(\d{1,18})-(\d{1,9})", re.ASCII)


class Position(NamedTuple):
    """A place between changes: behind the `nth` of a row, or (0) behind all rows before it."""

    xid: int
    seq: int = 0
    nth: int = 0


NOWHERE = Position(2**62)


class EventId(NamedTuple):
    """What a client resumes from: a position in the feed with this mark."""

    mark: int
    position: Position

    def __str__(self) -> str:
        return f"{self.mark}-{self.position.xid}-{self.position.seq}-{self.position.nth}"

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """The id that `str` wrote; None if it did not."""
        found = _EVENT_ID.fullmatch(text)
        if found is None:
            return None
        mark, *position = map(int, found.groups())
        return cls(mark, Position(*position))


class Change(NamedTuple):
    """One thing that changed."""

    position: Position
    subject: str
    job_id: str | None
    event: RunEvent | JobEvent | CircuitEvent


class Reading(NamedTuple):
    """What one look at a tenant's feed found."""

    open: bool
    mark: int | None  # None while it is not complete yet
    since: int
    changes: list[Change]
    upto: Position  # there is nothing before it that was not read
    full: bool  # there may be more to read at once

    def follows(self, place: EventId) -> bool:
        """Whether nothing is missing between `place` and what was read."""
        return place.mark == self.mark and place.position.xid > self.since


async def open_feeds(db: Database, tenants: Sequence[int]) -> set[int]:
    """Open the feeds of these tenants, or keep them open; answers of whom there is one."""
    opened = {row["tenant_id"] for row in await db.fetch("engine", SQL["open"], sorted(tenants), OPEN_SECONDS)}
    await db.fetch("engine", SQL["begin"], list(opened))
    return opened


async def read(db: Database, places: Mapping[int, Position]) -> dict[int, Reading]:
    """The changes of each tenant from its place on."""
    wanted = columns([(tenant, place.xid, place.seq) for tenant, place in places.items()], 3)
    found: dict[int, list[Row]] = {}
    for row in await db.fetch("engine", SQL["read"], *wanted, _PAGE):
        found.setdefault(row["tenant_id"], []).append(row)
    return {tenant: _reading(rows) for tenant, rows in found.items()}


async def tidy(db: Database) -> None:
    """Close feeds that nobody listens to any more, and drop what is old or too much."""
    while await db.fetchval("engine", SQL["close"], _FEEDS) == _FEEDS:
        pass
    behind: int | None = 0
    while behind is not None:
        kept = _KEPT_SECONDS, _KEPT_ROWS
        page = await db.fetchrow("engine", SQL["trim"], *kept, behind, _FEEDS, _MOST_TRIMMED)
        behind = behind if page["more"] else page["last"]


def _reading(rows: list[Row]) -> Reading:
    first, last = rows[0], rows[-1]
    if first["since"] is None or first["horizon"] <= first["since"]:
        return Reading(first["since"] is not None, None, 0, [], NOWHERE, False)
    full = len(rows) == _PAGE
    return Reading(
        True,
        first["mark"],
        first["since"],
        [change for row in rows if row["xid"] is not None for change in _changes(row)],
        Position(last["xid"], last["seq"] + 1) if full else Position(first["horizon"]),
        full,
    )


def _changes(row: Row) -> list[Change]:
    at, make = iso(row["at"]), _MAKERS[row["subject"]]
    return [
        make(Position(row["xid"], row["seq"], nth), at, values)
        for nth, values in enumerate(_read_changes(row["changes"]), 1)
    ]


def _run_change(position: Position, at: str, values: list[Any]) -> Change:
    what, run_id, job_id, *rest = values
    return Change(position, "run", job_id, RunEvent(at, f"run.{what}", run_id, job_id, *rest))


def _job_change(position: Position, at: str, values: list[Any]) -> Change:
    what, job_id, *rest = values
    return Change(position, "job", job_id, JobEvent(at, f"job.{what}", job_id, *rest))


def _circuit_change(position: Position, at: str, values: list[Any]) -> Change:
    what, *rest = values
    return Change(position, "circuit", None, CircuitEvent(at, f"circuit.{what}", *rest))


_MAKERS = {"run": _run_change, "job": _job_change, "circuit": _circuit_change}
