"""Server nodes under a clock moved by hand, whose steps can be stopped or crashed between any two statements."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import asyncpg

from tocsin.clock import DatabaseClock
from tocsin.failpoints import Failpoints, InjectedFault
from tocsin.flow.shared.contents import Contents
from tocsin.flow.shared.lanes import LaneBook
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.sealing import DataKeys
from tocsin.flow.shared.specs import SpecBook
from tocsin.model import ids
from tocsin.store.db import Connection, Database, Row
from tocsin.store.vault import MasterKeys

CLOCK = Path(__file__).with_name("clock.sql")
SEARCH_PATH = "sim, tocsin, pg_catalog"
BEGINNING = datetime(2031, 3, 1, 12, tzinfo=UTC)


class ManualClock(DatabaseClock):
    """The time of all nodes: what the database was told it is."""

    def __init__(self, observer: asyncpg.Connection) -> None:
        super().__init__()
        self._observer = observer
        self._now = BEGINNING

    async def set(self, at: datetime) -> None:
        """Move the hands, for every transaction that begins from now on."""
        self._now = at
        await self._observer.execute("insert into sim.ticks (at) values ($1)", at)

    async def restart(self) -> None:
        """Begin anew; no transaction is open."""
        await self._observer.execute("delete from sim.ticks")
        await self.set(BEGINNING)

    def now(self) -> datetime:
        return self._now

    def reached(self) -> datetime:
        return self._now

    def observe(self, database_now: datetime, sent: float, received: float) -> None:
        """There is nothing to learn."""


class Gate(Failpoints):
    """The points that a step passes: before each statement, before and after each commit. At one of them it may be
    stopped, until it is let go on, or crash."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0
        self._stop_at = 0
        self._crash = False
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    def arm(self, point: int, *, crash: bool) -> None:
        """Stop or crash the next step at its `point`-th point (from 1)."""
        self.passed, self._stop_at, self._crash = 0, point, crash
        self.reached.clear()
        self._open.clear()

    def let_go(self) -> None:
        """Whoever stands here goes on; nobody is stopped any more."""
        self._stop_at = 0
        self._open.set()

    async def hit(self, name: str) -> None:
        self.passed += 1
        if self.passed != self._stop_at:
            return
        self.reached.set()
        if self._crash:
            raise InjectedFault(name)
        await self._open.wait()


class _Gated:
    """A connection whose every statement passes the gate first."""

    def __init__(self, connection: Connection, gate: Gate) -> None:
        self._connection, self._gate = connection, gate

    async def fetch(self, *args: Any) -> Any:
        await self._gate.hit("statement")
        return await self._connection.fetch(*args)

    async def fetchrow(self, *args: Any) -> Any:
        await self._gate.hit("statement")
        return await self._connection.fetchrow(*args)

    async def fetchval(self, *args: Any) -> Any:
        await self._gate.hit("statement")
        return await self._connection.fetchval(*args)

    async def execute(self, *args: Any) -> Any:
        await self._gate.hit("statement")
        return await self._connection.execute(*args)


class SimulatedDatabase(Database):
    """A node's pools. Nothing here is to survive a power cut, so that commits need not wait for the disk."""

    session: ClassVar[dict[str, str]] = Database.session | {
        "search_path": SEARCH_PATH,
        "synchronous_commit": "off",
        "idle_in_transaction_session_timeout": "60s",
    }

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.gate = Gate()
        super().__init__(url, size=2, failpoints=self.gate)
        self.clock = clock

    def _refuse_unsafe(self, row: Row) -> None:
        """It is unsafe."""

    async def fetch(self, pool: str, sql: str, *args: Any) -> list[Row]:
        await self.gate.hit("statement")
        rows = await super().fetch(pool, sql, *args)
        await self.gate.hit("answer")
        return rows

    @contextlib.asynccontextmanager
    async def transaction(self, step: str, pool: str = "engine", alone: bool = False) -> AsyncIterator[Connection]:
        async with super().transaction(step, pool, alone) as connection:
            yield _Gated(connection, self.gate)

    @contextlib.asynccontextmanager
    async def tenant(self, tenant_id: int, step: str) -> AsyncIterator[Connection]:
        async with super().tenant(tenant_id, step) as connection:
            yield _Gated(connection, self.gate)


class Node:
    """What the steps want of a server node."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        self.db = SimulatedDatabase(url, clock)
        self.lanes = LaneBook(self.db)
        # Documents here are small and tell no secrets: nothing of them is kept elsewhere, so there is no elsewhere.
        self.contents = Contents(DataKeys(self.db, MasterKeys()), Parcels(self.db, None))  # type: ignore[arg-type]
        self.specs = SpecBook(self.db)

    @property
    def gate(self) -> Gate:
        return self.db.gate


async def install_clock(superuser_url: str) -> asyncpg.Connection:
    """Put the clock into a migrated database; answers a connection that moves and observes it, bound by nothing."""
    connection = await asyncpg.connect(
        superuser_url,
        server_settings={
            "search_path": SEARCH_PATH,
            "timezone": "UTC",
            "jit": "off",
            "synchronous_commit": "off",
            "session_replication_role": "replica",  # it may empty the tables in any order
        },
    )
    if await connection.fetchval("select to_regnamespace('sim') is null"):
        await connection.execute(CLOCK.read_text())
    return connection


def seed_ids(seed: int | None) -> None:
    """Draw the chance in ids from a seed, so that an example is the same each time it is played; None: as ever."""
    setattr(ids, "os", os if seed is None else SimpleNamespace(urandom=random.Random(seed).randbytes))  # noqa: B010
