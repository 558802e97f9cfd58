"""Parcels: what is too large for a row is put into object storage under its tenant, the day and its digest.

Before it is put there, the database knows that it may be; whoever comes to need it says so in the very transaction that
makes a row name it. What nobody needs goes (`flow/payloads.py`): also what was stored for a call that came to nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from datetime import date
from typing import NamedTuple

from tocsin.errors import ServerFault
from tocsin.model.packed import Parcel, filled, has_references, parcels_of_result
from tocsin.store.db import Connection, Database, Sql, columns
from tocsin.store.objects import ObjectStore

SQL = Sql(__file__)
_LOOK_AGAIN = 10.0  # seconds
_AT_ONCE = 10  # objects that are read for one result
_CONTENTS, RESULTS = "0040", "0090"  # the migrations from which on they may lie elsewhere


class Use(NamedTuple):
    """A run or a job, and an object that it needs. `day`: the day on which the run was created; the run needs its
    arguments and result while that day is in the archive. A job needs the objects that its documents name while the
    database has them."""

    tenant_id: int
    object: str
    user_id: str
    day: date | None = None


async def use(connection: Connection, uses: Iterable[Use]) -> None:
    """Let these not go before those who need them."""
    if wanted := sorted(set(uses)):
        await connection.execute(SQL["use"], *columns(wanted, 4))


class Parcels:
    """Puts them there and gets them back."""

    def __init__(self, db: Database, objects: ObjectStore) -> None:
        self._db, self._objects = db, objects
        self._understood: dict[str, tuple[float, bool]] = {}  # by migration: when it was looked at, and what was seen

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

    async def whole(self, tenant_id: int, result: str) -> str:
        """A result with all of it that lies elsewhere."""
        if not has_references(result):
            return result
        wanted = {parcel.sha256: parcel for parcel in parcels_of_result(result)}
        some = asyncio.Semaphore(_AT_ONCE)

        async def read(parcel: Parcel) -> bytes:
            async with some:
                return await self.get(parcel.place(tenant_id), parcel.sha256)

        found = await asyncio.gather(*map(read, wanted.values()))
        return filled(result, dict(zip(wanted, found, strict=True)))

    async def understood(self, since: str = _CONTENTS) -> bool:
        """Whether no server of a release lives that does not have this migration: it would not know what to do with a
        document whose content lies elsewhere, or with a state that is sealed; or (`RESULTS`) with such a result."""
        looked_at, understood = self._understood.get(since, (float("-inf"), False))
        if time.monotonic() - looked_at > _LOOK_AGAIN:
            understood = not await self._db.fetchval("engine", SQL["older_servers"], since)
            self._understood[since] = time.monotonic(), understood
        return understood
