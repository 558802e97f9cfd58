"""Object storage for what is bulky: a local folder by default, S3, GCS or Azure by URL.

Nothing here rests on put-if-absent, which not every store has: who writes an object gives it a key that nobody else
would, and says in the database that it is there once it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from tocsin.errors import ObjectLost, SetupError, Unavailable
from tocsin.telemetry import get_logger

log = get_logger("objects")
T = TypeVar("T")
_PAGE = 1000  # keys
_AT_ONCE = 16  # objects in parallel
# What fails is tried again, but not for so long (the library's three minutes) that callers pile up behind a store that
# is down; each try takes half a minute at most.
_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}


class ObjectStore:
    """Put and get byte ranges by key. Credentials of a URL's store come from its own environment (`AWS_…`, `AZURE_…`,
    `GOOGLE_…`)."""

    def __init__(self, url: str, folder: Path) -> None:
        import obstore.store as backends  # 5 MB of native code: only who stores objects pays for it

        self._url = url
        self.folder: Path | None = None if url else folder  # None: it is not on this machine
        try:
            if self.folder is None:
                self._store: Any = backends.from_url(url, retry_config=_RETRIES)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                self._store = backends.LocalStore(folder)
        except Exception as error:
            raise SetupError(f"object storage {url or folder} cannot be used: {error}") from error

    async def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """Store `data`, whole or not at all. `durable`: it is on the disk when this returns, not on its way there;
        stores behind a URL promise that anyway."""
        import obstore

        try:
            await obstore.put_async(self._store, key, data)
            if durable and self.folder is not None:
                await asyncio.to_thread(_sync, self.folder, self.folder / key)
        except Exception as error:
            raise _refused("a write", key, error) from error

    async def get(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`; raises `ObjectLost` if it is the object that lacks them."""
        import obstore

        try:
            data = bytes(await obstore.get_range_async(self._store, key, start=start, length=length))
        except FileNotFoundError as error:
            raise ObjectLost(f"{key} is not in object storage any more") from error
        except Exception as error:
            if "range" in str(error).lower():  # behind its end; no store says so in a type
                raise ObjectLost(f"{key} is shorter than it was") from error
            raise _refused("a read", key, error) from error
        if len(data) < length:
            raise ObjectLost(f"{key} is shorter than it was")
        return data

    async def read(self, key: str) -> bytes | None:
        """A whole object; None if there is none."""
        import obstore

        try:
            found = await obstore.get_async(self._store, key)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _refused("a read", key, error) from error

    async def keys(self, folder: str) -> list[str]:
        """The keys of all objects in a folder, which ends with a slash, in order."""
        return sorted([key async for page in self.pages(folder) for key in page])

    async def pages(self, folder: str) -> AsyncIterator[list[str]]:
        """The same page by page, a thousand at most each, as they come."""
        import obstore

        try:
            async for batch in obstore.list(self._store, folder, chunk_size=_PAGE):
                yield [one["path"] for one in batch]
        except Exception as error:
            raise _refused("a list", folder, error) from error

    async def folders(self, folder: str) -> list[str]:
        """The folders in a folder, which all end with a slash, in order."""
        import obstore

        try:
            found = await obstore.list_with_delimiter_async(self._store, folder)
            return sorted(f"{one}/" for one in found["common_prefixes"])
        except Exception as error:
            raise _refused("a list", folder, error) from error

    async def delete(self, key: str) -> None:
        """Let an object be gone; one that is not there is."""
        import obstore

        try:
            await obstore.delete_async(self._store, key)
        except FileNotFoundError:
            return
        except Exception as error:
            raise _refused("a delete", key, error) from error

    def address(self, key: str) -> str:
        """Where an object lies, to others who have the same storage."""
        return f"{self._url.rstrip('/')}/{key}" if self.folder is None else f"file://{self.folder.absolute() / key}"

    def file(self, key: str) -> Path | None:
        """Where an object lies on this machine, if it does: then nobody need copy it."""
        return None if self.folder is None else self.folder / key


class Refusals:
    """Counts tenants that storage refuses in a row. A refusal for one tenant does not delay the others. But after
    several in a row, storage counts as unavailable: a request for each of the other tenants would take hours."""

    MOST = 10

    def __init__(self) -> None:
        self._in_a_row = 0

    def passed(self) -> None:
        """Record that storage did not refuse a tenant."""
        self._in_a_row = 0

    def refused(self, problem: Unavailable) -> None:
        """Record a refusal. Raise it if there were too many in a row."""
        self._in_a_row += 1
        if self._in_a_row >= self.MOST:
            raise problem


async def each(do: Callable[[T], Awaitable[None]], items: Sequence[T]) -> None:
    """Call `do` for each item, some in parallel. If one fails, its error is raised after the others are done."""
    failed: BaseException | None = None
    for start in range(0, len(items), _AT_ONCE):
        done = await asyncio.gather(*map(do, items[start : start + _AT_ONCE]), return_exceptions=True)
        failed = failed or next((one for one in done if one is not None), None)
    if failed is not None:
        raise failed


def _refused(what: str, key: str, error: Exception) -> Unavailable:
    """Why is for the operator: who asks is told nothing of this machine's paths, or of others' addresses."""
    log.warning(f"object storage refused {what}", key=key, why=str(error))
    return Unavailable(f"object storage refused {what}", code="objects_unavailable")


def _sync(top: Path, path: Path) -> None:
    """The file, and the folders that may be new with it."""
    for place in (path, *path.parents):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if place == top:
            return
