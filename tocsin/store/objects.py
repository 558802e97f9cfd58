"""Object storage for what is bulky: a local folder by default, S3, GCS or Azure by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tocsin.errors import SetupError, Unavailable


class ObjectStore:
    """Put and get byte ranges by key."""

    def __init__(self, url: str, folder: Path) -> None:
        import obstore.store as backends  # 5 MB of native code: only who stores objects pays for it

        try:
            if url:
                self._store: Any = backends.from_url(url)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                self._store = backends.LocalStore(folder)
        except Exception as error:
            raise SetupError(f"object storage {url or folder} cannot be used: {error}") from error

    async def put(self, key: str, data: bytes) -> None:
        """Store `data`, whole or not at all."""
        import obstore

        try:
            await obstore.put_async(self._store, key, data)
        except Exception as error:
            raise Unavailable(f"object storage refused a write: {error}", code="objects_unavailable") from error

    async def get(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`."""
        import obstore

        try:
            return bytes(await obstore.get_range_async(self._store, key, start=start, length=length))
        except Exception as error:
            raise Unavailable(f"object storage refused a read: {error}", code="objects_unavailable") from error
