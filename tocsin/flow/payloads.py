"""payloads: arguments that are sealed or large, packed when they come and opened when a worker gets them.

What is large lies in object storage until nothing in the database needs it: a run that ended may be run again with the
same arguments. A worker that asks for it gets a URL of this server, good for this one object and a short while, so that
any object store will do; what is sealed, or asked for by another worker, is read here.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.errors import ApiProblem, NotFound
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.sealing import DataKeys, args_context
from tocsin.model.packed import LARGE, Packed
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.store.objects import ObjectStore, each
from tocsin.store.vault import MasterKeys, seal, unseal

SQL = Sql(__file__)
_MOST_USES, _MOST_OBJECTS = 500, 100  # that are looked at in one turn
_URL_LASTS = timedelta(minutes=15)
_PURPOSE = "payload url"


class Asked(NamedTuple):
    """Packed arguments of a run that is handed to a worker."""

    tenant_id: int
    job_id: str
    packed: Packed


class Opened(NamedTuple):
    """The arguments themselves, or the path under which they are fetched, and their digest."""

    args: Any = None
    path: str | None = None
    sha256: str = ""


Opener = Callable[[], Coroutine[Any, Any, Opened | ApiProblem]]


class _Ticket(msgspec.Struct, array_like=True):
    """What a URL is good for."""

    place: str
    size: int
    until: float


class Payloads:
    """Packs and opens arguments."""

    def __init__(self, db: Database, keys: MasterKeys, data_keys: DataKeys, parcels: Parcels) -> None:
        self._db, self._keys, self._data_keys, self._parcels = db, keys, data_keys, parcels

    async def is_sensitive(self, tenant_id: int, job_id: str) -> bool | None:
        """Whether a job says that the arguments of all its runs are sensitive; None if there is no open one."""
        found: bool | None = await self._db.fetchval("engine", SQL["is_sensitive"], tenant_id, job_id)
        return found

    async def pack(self, tenant_id: int, job_id: str, args: bytes, sensitive: bool) -> Packed:
        """Seal arguments if they are sensitive, and put them into object storage if they are large."""
        packed = Packed(size=len(args))
        if sensitive:
            packed.data_key, key = await self._data_keys.current(tenant_id)
            args = seal(key, args, args_context(tenant_id, job_id))
        if len(args) > LARGE:
            parcel = await self._parcels.put(tenant_id, args)
            packed.sha256, packed.place = parcel.sha256, parcel.place(tenant_id)
        elif sensitive:
            packed.sealed = base64.b64encode(args).decode()
        return packed

    async def pepper(self, tenant_id: int) -> bytes:
        """For what is made from sensitive arguments and kept in the open: nobody can try guesses at it."""
        _, key = await self._data_keys.current(tenant_id)
        return hmac.digest(key, b"concurrency keys", "sha256")

    async def open(self, asked: Mapping[str, Asked], by_url: bool) -> dict[str, Opened | ApiProblem]:
        """The arguments of these runs; `by_url`: as far as may be, where to fetch them."""
        openers = await self.openers(asked, by_url)
        found = await asyncio.gather(*(opener() for opener in openers.values()))
        return dict(zip(openers, found, strict=True))

    async def openers(self, asked: Mapping[str, Asked], by_url: bool) -> dict[str, Opener]:
        """Return, for each of these runs, the function that opens its arguments."""
        sealing = {(a.tenant_id, a.packed.data_key) for a in asked.values() if a.packed.data_key}
        keys = await self._data_keys.read(sealing)
        if sealing:
            asked = await self._as_sealed(asked)
        return {run_id: functools.partial(self._open, a, keys, by_url) for run_id, a in asked.items()}

    async def _as_sealed(self, asked: Mapping[str, Asked]) -> dict[str, Asked]:
        """The same, each with the job that its arguments were sealed for: of a workflow run that is the workflow."""
        jobs = {(a.tenant_id, a.job_id) for a in asked.values() if a.packed.data_key}
        rows = await self._db.fetch("engine", SQL["workflows"], *columns(sorted(jobs), 2))
        workflows = {(row["tenant_id"], row["id"]): row["workflow_id"] for row in rows}
        return {id_: a._replace(job_id=workflows.get((a.tenant_id, a.job_id), a.job_id)) for id_, a in asked.items()}

    async def _open(
        self, asked: Asked, keys: Mapping[tuple[int, int], bytes | ApiProblem], by_url: bool
    ) -> Opened | ApiProblem:
        packed = asked.packed
        if by_url and packed.place and not packed.data_key and self.gives_urls:
            return Opened(path=self.path(packed.place, packed.size), sha256=packed.sha256)
        try:
            if packed.sealed:
                data = base64.b64decode(packed.sealed)
            else:
                data = await self._parcels.get(packed.place, packed.sha256)
            if packed.data_key:
                key = keys[asked.tenant_id, packed.data_key]
                if isinstance(key, ApiProblem):
                    return key
                data = unseal(key, data, args_context(asked.tenant_id, asked.job_id))
        except ApiProblem as problem:
            return problem
        return Opened(msgspec.json.decode(data))

    # ── URLs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def gives_urls(self) -> bool:
        """Whether it has a key to sign them with."""
        return bool(self._keys.ids)

    def path(self, place: str, size: int) -> str:
        """Where on this server, for the next minutes, an object is fetched by whoever knows the path."""
        until = (self._db.clock.now() + _URL_LASTS).timestamp()
        ticket = msgspec.json.encode(_Ticket(place, size, until))
        mac = hmac.digest(self._keys.derive(_PURPOSE), ticket, "sha256")
        return f"/v1/payloads/{base64.urlsafe_b64encode(mac + ticket).decode().rstrip('=')}"

    async def fetch(self, token: str, now: datetime) -> bytes:
        """What a URL of ours is good for; one that is not, or not any more, leads nowhere."""
        try:
            data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            raise _nowhere() from None
        mac, text = data[:32], data[32:]
        keys: Sequence[bytes] = self._keys.derive_all(_PURPOSE)
        if not any(hmac.compare_digest(mac, hmac.digest(key, text, "sha256")) for key in keys):
            raise _nowhere()
        ticket = msgspec.json.decode(text, type=_Ticket)
        if ticket.until < now.timestamp():
            raise _nowhere()
        return await self._parcels.get(ticket.place, ticket.place.rpartition("/")[2])


def _nowhere() -> NotFound:
    return NotFound("this URL leads nowhere, or not any more")


# ── what nobody needs any more ───────────────────────────────────────────────────────────────────────────────────────


async def clean(db: Database, objects: ObjectStore) -> int:
    """Check some uses of objects and some objects, and delete objects that are not needed. Return how many of either
    were checked; if not zero, there may be more. The next turn continues after an interruption. If an object cannot be
    deleted, the others are deleted first, then this raises; a later turn tries again."""
    looked_at = int(await db.fetchval("engine", SQL["review_uses"], _MOST_USES))
    due = await db.fetch("engine", SQL["due"], _MOST_OBJECTS)

    async def remove(row: Row) -> None:
        await objects.delete(row["object"])
        await db.fetch("engine", SQL["forget"], row["tenant_id"], row["object"], row["look_at"])

    await each(remove, [row for row in due if not row["needed"]])
    return looked_at + len(due)
