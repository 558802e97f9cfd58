"""PostgreSQL: the only module that knows the driver.

Three roles, none a superuser: `owner` (migrations, partitions), `engine` (batches across tenants), `app` (one
tenant per transaction, bound by row-level security). Reports and heartbeats have connections of their own, so that
a flood of API calls can never make a living worker look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import asyncpg

from tocsin.clock import DatabaseClock
from tocsin.errors import Contention, OutcomeUnknown, SetupError, TocsinError, Unavailable
from tocsin.failpoints import NO_FAILPOINTS, Failpoints
from tocsin.telemetry import STEP_SECONDS

Row = Any  # asyncpg.Record: a tuple whose columns are also found by name
Connection = Any  # asyncpg.Connection, or a pool's proxy of one
UniqueViolation = asyncpg.UniqueViolationError
MINIMUM_VERSION = 150_000

_SESSION = {
    "search_path": "tocsin",
    "application_name": "tocsin",
    "timezone": "UTC",
    "jit": "off",
    "statement_timeout": "15s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
}
# The queue's statements find their rows by index, however empty or stale the statistics are: none reads a whole table
# because the planner believes it to be small. `tests/flow/test_plans.py` holds them to it.
_ENGINE = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
}
_ROLE: dict[str, dict[str, str]] = {
    "owner": {"role": "tocsin_owner", "statement_timeout": "0"},
    "engine": {"role": "tocsin_engine"} | _ENGINE,
    # A plan made while a table was small is kept while it grows.
    "app": {"role": "tocsin_app", "enable_seqscan": "off"},
}

_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
    ConnectionError,
    OSError,
    TimeoutError,
)
_AGAIN = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.InvalidCachedStatementError,
)


def is_transient(error: BaseException) -> bool:
    """True for what may go better when the same transaction is tried again."""
    return isinstance(error, (*_GONE, *_AGAIN, Unavailable))


def is_contention(error: BaseException) -> bool:
    """True for deadlocks, lock time-outs and the like: the whole batch is to be tried again, nobody is to blame."""
    return isinstance(error, (*_AGAIN, Contention))


def is_data_error(error: BaseException) -> bool:
    """True when a row's content, not the database's condition, made the statement fail."""
    return isinstance(error, (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError))


class Sql(dict[str, str]):
    """The named statements of one `.sql` file: sections `-- :name x`, with `-- :include y` from the
    shared file (or an earlier section of its own)."""

    def __init__(self, module_file: str, shared: Sql | None = None) -> None:
        super().__init__()
        self.path = Path(module_file).with_suffix(".sql")
        name = ""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if line.startswith("-- :name "):
                name = line.removeprefix("-- :name ").strip()
                self[name] = ""
            elif line.strip().startswith("-- :include "):
                wanted = line.strip().removeprefix("-- :include ").strip()
                self[name] += self[wanted] if wanted in self else (shared or self)[wanted]
            elif name:
                self[name] += line + "\n"


async def connect(url: str, role: str, **options: Any) -> Connection:
    """One connection in one of the three roles."""
    settings = _SESSION | _ROLE[role] | options
    try:
        return await asyncpg.connect(url, server_settings=settings, timeout=10, command_timeout=60)
    except (*_GONE, asyncpg.PostgresError) as error:
        raise Unavailable(f"cannot connect to the database: {error}", code="database_unavailable") from error


async def connect_plain(url: str) -> Connection:
    """One connection as the login itself, for what must happen before the roles exist."""
    try:
        return await asyncpg.connect(url, timeout=10, command_timeout=60)
    except (*_GONE, asyncpg.PostgresError, ValueError) as error:
        raise SetupError(f"cannot connect to the database: {error}") from error


async def _keep_session(_connection: Connection) -> None:
    """No reset between borrowers: nothing here sets session state, only SET LOCAL, and a reset costs a round trip."""


class Database:
    """The pools of one server node."""

    session: ClassVar[dict[str, str]] = _SESSION  # what its connections set, beside what their role does

    def __init__(self, url: str, *, size: int = 8, failpoints: Failpoints = NO_FAILPOINTS) -> None:
        self.url = url
        self.clock = DatabaseClock()
        self.failpoints = failpoints
        self._size = size
        self._pools: dict[str, Any] = {}

    async def open(self) -> None:
        """Open the pools and refuse a database that cannot keep our promises."""
        sizes = {"engine": ("engine", self._size), "vital": ("engine", 6), "app": ("app", self._size)}
        for name, (role, size) in sizes.items():
            self._pools[name] = await self._pool(role, size)
        await self._refuse_unsafe()
        # The first reading on a connection also prepares the statement and puts our clock ahead: "now" would be later.
        for _ in range(3):
            await self.read_clock()

    async def warm_up(self) -> None:
        """Make all connections now: making one keeps the whole node busy for longer than most calls take. One that
        cannot be had is tried again when it is needed."""
        for pool in self._pools.values():
            wanted = (pool.acquire() for _ in range(pool.get_max_size()))
            for made in await asyncio.gather(*wanted, return_exceptions=True):
                if not isinstance(made, BaseException):
                    await pool.release(made)

    async def _pool(self, role: str, size: int) -> Any:
        try:
            return await asyncpg.create_pool(
                self.url,
                min_size=1,
                max_size=size,
                timeout=10,
                command_timeout=60,
                max_inactive_connection_lifetime=0,
                server_settings=self.session | _ROLE[role],
                reset=_keep_session,
            )
        except (asyncpg.InvalidParameterValueError, asyncpg.InsufficientPrivilegeError) as error:
            raise SetupError(
                f"the database does not let us act as tocsin_{role} ({error}); run `tocsin migrate`"
            ) from error
        except (*_GONE, asyncpg.PostgresError) as error:
            raise SetupError(f"cannot connect to the database: {error}") from error

    async def close(self) -> None:
        """Close what is open; connections in use are given a moment, then cut."""
        for pool in self._pools.values():
            try:
                await asyncio.wait_for(pool.close(), 3)
            except (TimeoutError, *_GONE):
                pool.terminate()

    async def _refuse_unsafe(self) -> None:
        for name in ("engine", "app"):
            row = await self.fetchrow(name, SQL["safety"])
            if row["version"] < MINIMUM_VERSION:
                raise SetupError("PostgreSQL 15 or newer is needed")
            if row["superuser"] or row["bypass"]:
                raise SetupError(
                    "the database role that serves is a superuser or bypasses row-level security, so tenants would "
                    "not be separated; give a login without these rights"
                )
            if row["unsafe"]:
                raise SetupError(
                    f"the database has {row['unsafe']}: what we acknowledge would not survive a crash; set it to on"
                )

    async def read_clock(self) -> datetime:
        """Ask the database for its time, and remember how far it is from ours."""
        sent = time.monotonic()
        now = await self.fetchval("vital", SQL["now"])
        self.clock.observe(now, sent, time.monotonic())
        return now  # type: ignore[no-any-return]

    # ── single statements ────────────────────────────────────────────────────────────────────────────────────────

    async def fetch(self, pool: str, sql: str, *args: Any) -> list[Row]:
        """One statement, one commit."""
        async with self._mapped(), self._pools[pool].acquire() as connection:
            return await connection.fetch(sql, *args)  # type: ignore[no-any-return]

    async def fetchrow(self, pool: str, sql: str, *args: Any) -> Row:
        rows = await self.fetch(pool, sql, *args)
        return rows[0] if rows else None

    async def fetchval(self, pool: str, sql: str, *args: Any) -> Any:
        row = await self.fetchrow(pool, sql, *args)
        return row[0] if row is not None else None

    # ── transactions ─────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def transaction(self, step: str, pool: str = "engine", alone: bool = False) -> AsyncIterator[Connection]:
        """One transaction of `step` across tenants. `alone`: it has one statement at most, which commits by itself."""
        async with self._mapped(), self._pools[pool].acquire() as connection:
            with STEP_SECONDS.labels(step).time():
                async with self._alone(step) if alone else self._committing(connection, step, SQL["begin"]):
                    yield connection

    @contextlib.asynccontextmanager
    async def tenant(self, tenant_id: int, step: str) -> AsyncIterator[Connection]:
        """One transaction that sees one tenant only. BEGIN and SET LOCAL travel as one message."""
        async with self._mapped(), self._pools["app"].acquire() as connection:
            with STEP_SECONDS.labels(step).time():
                async with self._committing(connection, step, SQL["begin_tenant"].replace("$1", str(int(tenant_id)))):
                    yield connection

    @contextlib.asynccontextmanager
    async def _committing(self, connection: Connection, step: str, begin: str) -> AsyncIterator[None]:
        await connection.execute(begin)
        try:
            yield
            await self.failpoints.hit(f"{step}.before_commit")
        except BaseException:
            with contextlib.suppress(*_GONE, asyncpg.PostgresError):
                await connection.execute(SQL["rollback"])
            raise
        try:
            await connection.execute(SQL["commit"])
        except _GONE as error:
            raise _outcome_unknown() from error
        await self.failpoints.hit(f"{step}.after_commit")

    @contextlib.asynccontextmanager
    async def _alone(self, step: str) -> AsyncIterator[None]:
        await self.failpoints.hit(f"{step}.before_commit")
        try:
            yield
        except _GONE as error:
            raise _outcome_unknown() from error
        await self.failpoints.hit(f"{step}.after_commit")

    @contextlib.asynccontextmanager
    async def _mapped(self) -> AsyncIterator[None]:
        try:
            yield
        except TocsinError:
            raise
        except _GONE as error:
            raise Unavailable(f"the database is not available: {error}", code="database_unavailable") from error
        except _AGAIN as error:
            raise Contention(f"the database was too busy for this: {error}", headers={"retry-after": "1"}) from error

    # ── hints ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def listen(self, channel: str, heard: Callable[[str], None]) -> Connection:
        """A connection that calls `heard(payload)` for each NOTIFY on `channel`."""
        connection = await connect(self.url, "engine", idle_session_timeout="0")
        await connection.add_listener(channel, lambda _c, _pid, _channel, payload: heard(payload))
        return connection

    async def notify(self, channel: str, payload: str) -> None:
        """Send a hint, in a transaction of its own."""
        await self.fetch("vital", SQL["notify"], channel, payload)


def _outcome_unknown() -> OutcomeUnknown:
    return OutcomeUnknown(
        "the connection to the database broke while committing; repeat the call with the same Idempotency-Key"
    )


def sparse_columns(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The same, with an empty array for a column without any value: `unnest` fills it up with nulls."""
    return [[] if column.count(None) == len(column) else list(column) for column in zip(*rows, strict=True)]


def columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Rows as arrays per column, the form in which batches travel to `unnest`."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


SQL = Sql(__file__)
