"""Parcels: what is too large for a row is put into object storage under its tenant, the day and its digest.

Before it is put there, the database knows that it may be; whoever comes to need it says so in the very transaction that
makes a row name it. What nobody needs goes (`flow/payloads.py`): also what was stored for a call that came to nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import NamedTuple

from tocsin.errors import ServerFault
from tocsin.model.packed import Parcel
from tocsin.store.db import Connection, Database, Sql, columns
from tocsin.store.objects import ObjectStore

SQL = Sql(__file__)
_LOOK_AGAIN = 10.0  # seconds


class Use(NamedTuple):
    """A run or a job, and an object that it needs."""

    tenant_id: int
    object: str
    user_id: str


async def use(connection: Connection, uses: Iterable[Use]) -> None:
    """Let these not go before those who need them."""
    if wanted := sorted(set(uses)):
        await connection.execute(SQL["use"], *columns(wanted, 3))


class Parcels:
    """Puts them there and gets them back."""

    def __init__(self, db: Database, objects: ObjectStore) -> None:
        self._db, self._objects = db, objects
        self._looked_at, self._understood = float("-inf"), False

    async def put(self, tenant_id: int, data: bytes) -> Parcel:
        """Store it, for good; the same of the same day lies there once."""
        parcel = Parcel(size=len(data), sha256=hashlib.sha256(data).hexdigest(), day=f"{self._db.clock.now():%Y-%m-%d}")
        place = parcel.place(tenant_id)
        await self._db.fetch("engine", SQL["note"], tenant_id, place)
        await self._objects.put(place, data, durable=True)
        return parcel

    async def get(self, place: str, sha256: str) -> bytes:
        """What lies there; it must be what was put there."""
        data = await self._objects.read(place)
        if data is None:
            raise ServerFault("this payload is not in object storage any more", code="payload_gone")
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ServerFault("this payload was changed in object storage", code="payload_broken")
        return data

    async def understood(self) -> bool:
        """Whether no server of a release lives that would not know what to do with a document whose content lies
        elsewhere, or with a state that is sealed."""
        if time.monotonic() - self._looked_at > _LOOK_AGAIN:
            self._understood = not await self._db.fetchval("engine", SQL["older_servers"])
            self._looked_at = time.monotonic()
        return self._understood
