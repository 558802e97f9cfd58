"""PostgreSQL: the only module that knows the driver.

Three roles, none a superuser: `owner` (migrations, partitions), `engine` (batches across tenants), `app` (one
tenant per transaction, bound by row-level security). Reports and heartbeats have connections of their own, so that
a flood of API calls can never make a living worker look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import asyncpg
import msgspec

from tocsin.clock import DatabaseClock
from tocsin.errors import Contention, OutcomeUnknown, PartitionMissing, SetupError, TocsinError, Unavailable
from tocsin.failpoints import NO_FAILPOINTS, Failpoints
from tocsin.model.access import Scope
from tocsin.store.primary import Primary
from tocsin.telemetry import POOL_WAIT, RLS_DENIED, STEP_SECONDS, get_logger

log = get_logger("database")
Row = Any  # asyncpg.Record: a tuple whose columns are also found by name
Connection = Any  # asyncpg.Connection, or a pool's proxy of one
T = TypeVar("T")
UniqueViolation = asyncpg.UniqueViolationError
MINIMUM_VERSION = 150_000

_SESSION = {
    "search_path": "tocsin",
    "application_name": "tocsin server",  # not plain `tocsin`: that was before servers registered, see migrate.sql
    "timezone": "UTC",
    "jit": "off",
    "standard_conforming_strings": "on",
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


class _Terms(NamedTuple):
    """As whom the connections of a pool act, and how many seconds a statement may take."""

    role: str
    statement: int


# Heartbeats and results are small: one that takes long has met a server that is gone, and a lease does not wait.
_TERMS = {"engine": _Terms("engine", 15), "vital": _Terms("engine", 6), "app": _Terms("app", 15)}
_SLACK = 2  # seconds by which a server that answers at all gives up a statement before we do
_TRANSACTION = "30s"
_VITAL = 6
_POOL_SECONDS = 5.0  # to wait for a connection, making one included
_RELEASE_SECONDS = 2.0
_SOON, _LATER = {"retry-after": "1"}, {"retry-after": "5"}

# The connection, and with it whatever it was told to do last, is gone.
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the driver has lost count of what the server was told before it went
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    ConnectionError,
    OSError,
    TimeoutError,
)
# The server does not take us, or no writes.
_REFUSED = (
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.TargetServerAttributeNotMatched,
)
_GONE = (*_LOST, *_REFUSED)
_AGAIN = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.InvalidCachedStatementError,
)
# What passes by itself while a database starts, restarts or fails over.
_PASSING = (
    asyncpg.CannotConnectNowError,
    asyncpg.PostgresConnectionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.TargetServerAttributeNotMatched,
    OSError,
)


def is_transient(error: BaseException) -> bool:
    """True for what may go better when the same transaction is tried again."""
    return isinstance(error, (*_GONE, *_AGAIN, Unavailable))


def is_contention(error: BaseException) -> bool:
    """True for deadlocks, lock time-outs and the like: the whole batch is to be tried again, nobody is to blame."""
    return isinstance(error, (*_AGAIN, Contention))


def is_damage(error: BaseException) -> bool:
    """True when the database itself says that something in it is broken."""
    return isinstance(error, asyncpg.InternalServerError)


def is_data_error(error: BaseException) -> bool:
    """True when a row's content, not the database's condition, made the statement fail."""
    if _lacks_partition(error):
        return False
    return isinstance(error, (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError))


def _lacks_partition(error: BaseException) -> bool:
    """Return whether a row has no partition. PostgreSQL reports a check violation without a constraint name."""
    return isinstance(error, asyncpg.CheckViolationError) and not error.constraint_name


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
    settings = {"statement_timeout": "15s"} | _SESSION | _ROLE[role] | options
    try:
        return await Primary(url, _timeline).connect(settings, command_timeout=60)
    except (*_GONE, asyncpg.PostgresError) as error:
        raise Unavailable(f"cannot connect to the database: {error}", code="database_unavailable") from error


async def connect_plain(url: str, patience: float = 0.0) -> Connection:
    """One connection as the login itself, for what must happen before the roles exist."""
    try:
        return await _patiently(patience, lambda: Primary(url, _timeline).connect({}, command_timeout=60))
    except (*_GONE, asyncpg.PostgresError, ValueError) as error:
        raise SetupError(f"cannot connect to the database: {error}") from error


async def _timeline(connection: Connection) -> int:
    return int(await connection.fetchval(SQL["timeline"]))


async def _patiently(seconds: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """Try for this long while the database is not there yet; what is wrong for good is raised at once."""
    give_up_at, pause = time.monotonic() + seconds, 0.1
    while True:
        try:
            return await attempt()
        except _PASSING as error:
            if time.monotonic() + pause > give_up_at:
                raise
            log.warning("the database is not there yet", error=f"{type(error).__name__}: {error}", patience=seconds)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)


async def _keep_session(_connection: Connection) -> None:
    """No reset between borrowers: nothing here sets session state, only SET LOCAL, and a reset costs a round trip."""


class Database:
    """The pools of one server node."""

    session: ClassVar[dict[str, str]] = _SESSION  # what its connections set, beside what their role does

    def __init__(self, url: str, *, size: int = 8, failpoints: Failpoints = NO_FAILPOINTS) -> None:
        self.url = url
        self.clock = DatabaseClock()
        self.failpoints = failpoints
        self._sizes = {"engine": size, "vital": _VITAL, "app": size}
        self._pools: dict[str, Any] = {}
        self._listeners: set[Connection] = set()
        self._primary = Primary(url, self._examine, self._leave_old_primary)
        self.on_missing_partition: Callable[[], None] = lambda: None  # called when a row has no partition

    async def open(self, patience: float = 0.0) -> None:
        """Open the pools and refuse a database that cannot keep our promises. One that is not there yet, because it
        starts or fails over, is waited for `patience` seconds."""
        for name, size in self._sizes.items():
            self._pools[name] = await asyncpg.create_pool(
                min_size=0,
                max_size=size,
                max_inactive_connection_lifetime=0,
                connect=functools.partial(self._connect, name),
                reset=_keep_session,
            )
            await self._first_contact(name, patience)
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

    async def _first_contact(self, name: str, patience: float) -> None:
        pool = self._pools[name]
        try:
            await pool.release(await _patiently(patience, pool.acquire))
        except (asyncpg.InvalidParameterValueError, asyncpg.InsufficientPrivilegeError) as error:
            role = _TERMS[name].role
            raise SetupError(
                f"the database does not let us act as tocsin_{role} ({error}); run `tocsin migrate`"
            ) from error
        except (*_GONE, asyncpg.PostgresError, Unavailable) as error:
            raise SetupError(f"cannot connect to the database: {error}") from error

    async def _connect(self, name: str, _url: None, **given: Any) -> Connection:
        return await self._primary.connect(self._settings(name), _TERMS[name].statement + _SLACK, **given)

    def _settings(self, name: str) -> dict[str, str]:
        role, statement = _TERMS[name]
        return {"statement_timeout": f"{statement}s"} | self.session | _ROLE[role]

    async def close(self) -> None:
        """Close what is open; connections in use are given a moment, then cut."""
        for pool in self._pools.values():
            try:
                await asyncio.wait_for(pool.close(), 3)
            except (TimeoutError, *_GONE):
                pool.terminate()

    async def _examine(self, connection: Connection) -> int:
        """Look at a new session, at whatever time it is opened: settings change under a running server."""
        row = await connection.fetchrow(SQL["examine"], _TRANSACTION)
        self._refuse_unsafe(row)
        return int(row["timeline"])

    def _refuse_unsafe(self, row: Row) -> None:
        """Raise why what we promise would not hold in this session."""
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

    # ── one primary ──────────────────────────────────────────────────────────────────────────────────────────────

    async def look_around(self) -> None:
        """Is there a newer primary than the one in use? Only a URL with several hosts has where to look."""
        async with self._mapped():
            await self._primary.look_around(self._settings("engine"))

    async def _leave_old_primary(self) -> None:
        log.warning("another PostgreSQL has become the primary; the connections to the old one are dropped")
        await self._drop_connections()

    async def _drop_connections(self) -> None:
        """None of the present connections is used again; those in use go when they are given back."""
        for pool in self._pools.values():
            await pool.expire_connections()
        for listener in list(self._listeners):
            listener.terminate()

    async def read_clock(self) -> datetime:
        """Ask the database for its time, and remember how far it is from ours."""
        sent = time.monotonic()
        now = await self.fetchval("vital", SQL["now"])
        self.clock.observe(now, sent, time.monotonic())
        return now  # type: ignore[no-any-return]

    # ── single statements ────────────────────────────────────────────────────────────────────────────────────────

    async def fetch(self, pool: str, sql: str, *args: Any) -> list[Row]:
        """One statement, one commit."""
        async with self._mapped(), self._borrowed(pool) as connection:
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
        async with self._mapped(), self._borrowed(pool) as connection:
            with STEP_SECONDS.labels(step).time():
                async with self._alone(connection, step) if alone else self._committing(connection, step, SQL["begin"]):
                    yield connection

    def tenant(self, tenant_id: int, step: str) -> AbstractAsyncContextManager[Connection]:
        """One transaction that sees one tenant only, and of its jobs those that the caller is `kept_to`. BEGIN and SET
        LOCAL travel as one message."""
        return self._of_tenant(SQL["begin_tenant"], tenant_id, step)

    def snapshot(self, tenant_id: int, step: str) -> AbstractAsyncContextManager[Connection]:
        """The same, read-only, and all its statements see one moment."""
        return self._of_tenant(SQL["begin_snapshot"], tenant_id, step)

    @contextlib.asynccontextmanager
    async def _of_tenant(self, begin: str, tenant_id: int, step: str) -> AsyncIterator[Connection]:
        async with self._mapped(), self._borrowed("app") as connection:
            with STEP_SECONDS.labels(step).time():
                begin = begin.replace("$1", str(int(tenant_id))) + _scope.get()
                async with self._committing(connection, step, begin):
                    yield connection

    @contextlib.asynccontextmanager
    async def _borrowed(self, name: str) -> AsyncIterator[Connection]:
        """A connection of a pool, given back whole or thrown away; the wait for it is bounded."""
        pool = self._pools[name]
        await self.failpoints.hit(f"borrow.{name}")
        try:
            with POOL_WAIT.labels(name).time():
                connection = await pool.acquire(timeout=_POOL_SECONDS)
        except TimeoutError as error:
            raise Unavailable(
                "no connection to the database came free in time", code="database_busy", headers=_SOON
            ) from error
        except SetupError as error:  # a session opened later than the first ones, under settings that have changed
            raise Unavailable(str(error), code="database_unavailable") from error
        try:
            yield connection
        except _GONE as error:
            _throw_away(connection)
            if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
                await self._drop_connections()
            raise
        finally:
            # One that is dead already, or does not answer in time, is replaced; the caller has nothing to do with it.
            with contextlib.suppress(*_GONE):
                await pool.release(connection, timeout=_RELEASE_SECONDS)

    @contextlib.asynccontextmanager
    async def _committing(self, connection: Connection, step: str, begin: str) -> AsyncIterator[None]:
        await connection.execute(begin)
        try:
            yield
            await self.failpoints.hit(f"{step}.before_commit")
        except _GONE:
            raise  # the connection is thrown away, and what it had begun with it
        except BaseException:
            await _roll_back(connection)
            raise
        try:
            await connection.execute(SQL["commit"])
        except _LOST as error:
            raise _outcome_unknown(connection) from error
        await self.failpoints.hit(f"{step}.after_commit")

    @contextlib.asynccontextmanager
    async def _alone(self, connection: Connection, step: str) -> AsyncIterator[None]:
        await self.failpoints.hit(f"{step}.before_commit")
        try:
            yield
        except _LOST as error:
            raise _outcome_unknown(connection) from error
        await self.failpoints.hit(f"{step}.after_commit")

    @contextlib.asynccontextmanager
    async def _mapped(self) -> AsyncIterator[None]:
        try:
            yield
        except TocsinError:
            raise
        except _GONE as error:
            raise Unavailable(f"the database is not available: {error}", code="database_unavailable") from error
        except asyncpg.InsufficientResourcesError as error:
            # Nothing was stored. It heals as soon as there is room, so it is worth trying again.
            raise Unavailable(f"the database has no room: {error}", code="database_full", headers=_LATER) from error
        except _AGAIN as error:
            raise Contention(f"the database was too busy for this: {error}", headers=_SOON) from error
        except asyncpg.CheckViolationError as error:
            if not _lacks_partition(error):
                raise
            # Under row-level security the error does not name the row.
            self.on_missing_partition()
            raise PartitionMissing("history has no partition for the day of a run", headers=_SOON) from error
        except asyncpg.InsufficientPrivilegeError:
            RLS_DENIED.inc()
            raise

    # ── hints ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def listen(self, channel: str, heard: Callable[[str], None], lost: Callable[[], None]) -> Connection:
        """A connection that calls `heard(payload)` for each NOTIFY on `channel`, and `lost()` when it is gone."""

        def gone(_connection: Connection) -> None:
            self._listeners.discard(connection)
            lost()

        async with self._mapped():
            connection = await self._primary.connect(self._settings("engine") | {"idle_session_timeout": "0"}, 10)
            self._listeners.add(connection)
            connection.add_termination_listener(gone)
            await connection.add_listener(channel, lambda _c, _pid, _channel, payload: heard(payload))
        return connection

    async def notify(self, channel: str, payload: str) -> None:
        """Send a hint, in a transaction of its own."""
        await self.fetch("vital", SQL["notify"], channel, payload)


_scope: ContextVar[str] = ContextVar("scope", default="")


@contextlib.contextmanager
def kept_to(scope: Scope | None) -> Iterator[None]:
    """Within this, a tenant's transactions see what concerns the jobs of the scope alone (None: all of its jobs)."""
    before = _scope.set("" if scope is None else _scope_settings(scope))
    try:
        yield
    finally:
        _scope.reset(before)


def _scope_settings(scope: Scope) -> str:
    tags = msgspec.json.encode([{key: value} for key, value in scope.tags]).decode()
    return "; " + SQL["keep_to"].replace("$1", _quoted(scope.name_pattern), 1).replace("$2", _quoted(tags), 1)


def _quoted(text: str) -> str:
    """As a literal of SQL; a backslash is nothing special in one."""
    return "'" + text.replace("'", "''") + "'"


async def _roll_back(connection: Connection) -> None:
    """Or end the connection: what it had begun must not hold locks until the server notices."""
    try:
        await connection.execute(SQL["rollback"], timeout=_RELEASE_SECONDS)
    except (*_GONE, asyncpg.PostgresError):
        _throw_away(connection)


def _throw_away(connection: Connection) -> None:
    """Without a word to the other side, which may be silent. The pool makes another when it needs one."""
    with contextlib.suppress(asyncpg.InterfaceError):  # its end was noticed already
        connection.terminate()


def _outcome_unknown(connection: Connection) -> OutcomeUnknown:
    _throw_away(connection)
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
