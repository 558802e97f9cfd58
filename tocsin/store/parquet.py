"""Parquet files: written from CSV, and read by SQL from object storage; the only module that knows DuckDB.

DuckDB is loaded when the first file is read, works in threads of its own within bounds of memory and time, and is given
the files one by one: it never lists, and never looks for anything elsewhere. Files of a store behind a URL are copied
to a folder first, where those that were used last stay for the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from tocsin.errors import Contention, Unavailable
from tocsin.store.db import Sql
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("parquet")
Given = Sequence[Any] | Mapping[str, Any]
_THREADS = 2  # queries at a time; each is bound to one core
_MEMORY = "256MB"
_COPIES = 8  # files on their way here at a time
_SECONDS = 15.0  # a query may take, as one of the database
_WORK_SECONDS = 600.0  # to write and prove a file may take: nobody waits for it
_AGAIN_SECONDS = 0.05  # between two wishes that a query end
_NICER = 10
_KEPT_BYTES = 1 << 30  # of copies
_KEPT_SECONDS = 300.0  # that a copy stays at least: somebody may be about to read it
_UNUSED_SECONDS = 86_400.0  # after which it goes, however much room there is
_CONFIG: dict[str, Any] = {
    "threads": 1,
    "memory_limit": _MEMORY,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}


_UNREADABLE = ("archive_slow", "archive_unavailable", "archive_damaged")


class File(NamedTuple):
    """A file in object storage, as the catalogue has it."""

    object: str
    size: int
    checksum: bytes


class _Engine:
    """DuckDB, in threads of its own."""

    def __init__(self, threads: int, begin: Callable[[], None], spill: Path) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="parquet", initializer=begin)
        self._spill = spill
        self._engine: Any = None

    def close(self) -> None:
        """Begin no more queries; those under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, sql: str, given: Given, seconds: float) -> list[dict[str, Any]]:
        """Rows of a statement, which may take so long."""
        cursors: list[Any] = []
        work = self._threads.submit(self._ask, cursors, sql, given)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), seconds)
        except TimeoutError:
            raise Contention("reading the archive took too long; ask for less", code="archive_slow") from None
        finally:
            # Who no longer waits lets nobody work for him.
            if not work.cancel():
                _interrupt(work, cursors)

    def _ask(self, cursors: list[Any], sql: str, given: Given) -> list[dict[str, Any]]:
        import duckdb

        if self._engine is None:
            # Two threads that do so at once make one too many, which is let go.
            self._engine = duckdb.connect(":memory:", config=_CONFIG | {"temp_directory": str(self._spill)})
        cursor = self._engine.cursor()
        cursors.append(cursor)
        try:
            cursor.execute(sql, given)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, map(_aware, row), strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            # It may name files of this machine, which is nothing to tell a caller.
            log.error("the archive cannot be read", error=f"{type(error).__name__}: {error}")
            raise Unavailable("the archive cannot be read", code="archive_unavailable") from error
        finally:
            cursor.close()


class Parquet:
    """Writes and reads files of Parquet. What nobody waits for is done by an engine of its own: while it gives way to
    others, it must hold nothing that these would wait for."""

    def __init__(self, objects: ObjectStore, folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self._engine = _Engine(_THREADS, lambda: None, folder / "spill")
        self._patient = _Engine(1, _give_way, folder / "spill-patient")

    def close(self) -> None:
        """Begin no more queries; those under way end by themselves."""
        self._engine.close()
        self._patient.close()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def query(self, sql: str, files: Sequence[File], given: Given = ()) -> list[dict[str, Any]]:
        """Rows of a statement, in which `$FILES` stands for the files; `given` for `$1` or `$name`. Times are UTC."""
        paths = [str(path) for path in await self.bring(files)]
        # Our own paths, never a caller's words; quoted all the same.
        listed = "[" + ", ".join("'" + path.replace("'", "''") + "'" for path in paths) + "]"
        return await self._engine.ask(sql.replace("$FILES", listed), given, _SECONDS)

    async def bring(self, files: Sequence[File]) -> list[Path]:
        """The files on this machine, where those of a store behind a URL are copied to, some at a time."""
        some = asyncio.Semaphore(_COPIES)

        async def one(file: File) -> Path:
            async with some:
                return await self._at_hand(file)

        return list(await asyncio.gather(*map(one, files)))

    async def _at_hand(self, file: File) -> Path:
        """The file on this machine."""
        own = self._objects.file(file.object)
        if own is not None:
            return own
        copy = self._folder / f"{file.checksum.hex()}.parquet"
        if not await asyncio.to_thread(_touch, copy):
            data = await self.fetch(file)
            await asyncio.to_thread(self._keep, copy, data)
        return copy

    async def fetch(self, file: File) -> bytes:
        """The bytes of a file, which are those that were stored."""
        data = await self._objects.get(file.object, 0, file.size)
        if await checksum(data) != file.checksum:
            raise Unavailable(f"{file.object} is not what was archived", code="archive_damaged")
        return data

    def _keep(self, copy: Path, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = sorted((*looks, found) for found in self._folder.glob("*.parquet") for looks in _looks(found))
        room = _KEPT_BYTES - len(data) - sum(size for _, size, _ in kept)
        for used, size, found in kept:
            if room >= 0 or used > time.time() - _KEPT_SECONDS:
                break
            found.unlink(missing_ok=True)
            room += size
        part = copy.with_suffix(f".{os.getpid()}.{id(data)}")
        part.write_bytes(data)
        part.replace(copy)

    async def tidy(self) -> None:
        """Let copies go that nobody has used for a day: what they were made of may have expired, or been erased; and
        what servers left that were killed while they copied or sorted."""
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        for found in filter(Path.is_file, self._folder.rglob("*")):
            for used, _ in _looks(found):
                if used < time.time() - _UNUSED_SECONDS:
                    found.unlink(missing_ok=True)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def write(self, rows: Path, columns: Mapping[str, str]) -> bytes:
        """A file of rows that PostgreSQL wrote as CSV, with `\\N` for null; they go. The same rows make the same
        bytes."""
        numbers = "{" + ", ".join(f"'{name}': {number}" for number, name in enumerate(columns, 1)) + "}"
        types = "{" + ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items()) + "}"
        made = rows.with_suffix(".parquet")
        named = {"$COLUMNS": types, "$NUMBERS": numbers, "$FROM": str(rows), "$TO": str(made)}
        sql = SQL["write"]
        for name, value in named.items():
            sql = sql.replace(name, value)
        await self._patient.ask(sql, (), _WORK_SECONDS)
        await asyncio.to_thread(rows.unlink)
        return await asyncio.to_thread(made.read_bytes)

    async def query_stored(self, sql: str, file: File) -> list[dict[str, Any]]:
        """The same as `query`, of what the store has, not of a copy; for few rows, because it gives way to others."""
        return await self._query_bytes(self._patient, sql, await self.fetch(file), ())

    async def query_bytes(self, sql: str, data: bytes, given: Given = ()) -> list[dict[str, Any]]:
        """The same of a file that is at hand, whatever it is."""
        return await self._query_bytes(self._engine, sql, data, given)

    async def _query_bytes(self, engine: _Engine, sql: str, data: bytes, given: Given) -> list[dict[str, Any]]:
        with tempfile.NamedTemporaryFile(prefix="tocsin-proof-", suffix=".parquet") as back:
            await asyncio.to_thread(_fill, back, data)
            return await engine.ask(sql.replace("$FILES", f"['{back.name}']"), given, _WORK_SECONDS)


def _interrupt(work: Future[Any], cursors: list[Any]) -> None:
    """End a query, if it has not ended: again and again, because one that has not begun yet does not hear it."""
    import duckdb

    if not work.done():
        with contextlib.suppress(duckdb.Error):  # it has just ended
            for cursor in cursors:
                cursor.interrupt()
        asyncio.get_running_loop().call_later(_AGAIN_SECONDS, _interrupt, work, cursors)


def is_unreadable(error: BaseException) -> bool:
    """True when it is the file that is wrong, not the storage that is away."""
    return isinstance(error, (Contention, Unavailable)) and error.code in _UNREADABLE


async def checksum(data: bytes) -> bytes:
    """Of a file. In a thread: a large one takes as long as some calls do."""
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


def _give_way() -> None:
    """Let this thread have what others leave: where cores are scarce, a tenth of one. Elsewhere than on Linux threads
    have no such thing of their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


def _fill(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.flush()


def _looks(copy: Path) -> list[tuple[float, int]]:
    """When it was used and how large it is; nothing if somebody else has just let it go."""
    try:
        found = copy.stat()
    except FileNotFoundError:
        return []
    return [(found.st_mtime, found.st_size)]


def _touch(copy: Path) -> bool:
    """Whether there is such a copy; it was just used, then."""
    try:
        os.utime(copy)
    except FileNotFoundError:
        return False
    return True


def _aware(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
