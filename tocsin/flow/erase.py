"""erase: everything of a tenant goes, from the database and from object storage. What is left is the word in the audit
of whoever asked for it.

From the commit of the call on, the tenant starts nothing and its keys are good for nothing. The rest goes wave by wave,
outside of any long transaction: whoever is killed is followed by the next turn.
- What runs is stopped. Its workers prove it, or time is up: then whatever they still say is superseded.
- Its objects go, and its lines out of objects in which others have lines, too.
- Its rows go, table by table.
- When nothing more was found for a while, since a call that had begun before may end late, the tenant itself goes, and
  its slug is free. For some days it is looked for now and then, for what came later than anybody expects.

Backups and what PostgreSQL has not vacuumed yet are not reached: they go in their own time.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, InvalidInput, NotFound
from tocsin.flow.shared import audit, cold, segments, shelf, turns
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.transitions import Stop
from tocsin.model import packed
from tocsin.model.access import Identity
from tocsin.model.audit import anchors_folder
from tocsin.model.workflow import CONDUCTOR
from tocsin.store.db import Connection, Database, Row, Sql, is_transient
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import get_logger

SQL = Sql(__file__)
log = get_logger("erase")
STOP_SECONDS = 60.0  # that workers have to prove that they stopped
SETTLE_SECONDS = 60.0  # without a trace: no call, and no turn of a loop, takes longer
_SOON, _RARELY = 2.0, 30.0  # seconds until the next turn, with and without something to do
_REMEMBERED = 3 * 86_400.0
_TENANTS = 50  # in one turn, during which no server archives
_WAVE = 10_000  # rows in one transaction, which takes a fraction of a second
_AT_ONCE = 50  # objects
# Where a test may end it, in this order.
POINTS = ("stopped", "blanked", "removed", "emptied", "erased")

# Every table with a tenant in it but that of the erasures themselves: first those that runs are made from, and what
# refers to something before that.
_MAKE_RUNS = ("triggers", "dependencies", "backfills")
TABLES = (
    *(*_MAKE_RUNS, "runs", "backfill_ends", "ended_joins", "unmapped", "run_counts", "unclaimed", "holds", "limits"),
    "cancels",
    *("circuits", "calendar_uses", "calendars", "jobs", "job_versions", "dead_letters", "secrets", "data_keys"),
    *("log_chunks", "log_segments", "log_usage", "archives", "payload_uses", "payloads"),
    *("event_feeds", "events", "idempotency", "audit", "audit_chain", "audit_archives", "audit_heads", "api_keys"),
)


def folders(tenant_id: int) -> tuple[str, ...]:
    """Where objects lie that are the tenant's alone."""
    of_logs, of_payloads = segments.compacted_folder(tenant_id), packed.folder(tenant_id)
    return cold.folder(tenant_id), of_logs, of_payloads, shelf.folder(tenant_id), anchors_folder(tenant_id)


# ── asking for it ────────────────────────────────────────────────────────────────────────────────────────────────


async def ask(db: Database, who: Identity, slug: str, confirm: str, wish: Wish | None = None) -> None:
    """Let a tenant be erased. Nothing undoes it; asking twice is asking once."""
    if confirm != slug:
        raise InvalidInput.field("confirm", "not_confirmed", f"say {slug!r} to erase this tenant and all that it has")
    async with db.transaction("erase") as connection:
        await recall(connection, wish)
        tenant = await connection.fetchrow(SQL["lock_tenant"], slug)
        if tenant is None:
            raise NotFound("there is no such tenant")
        if not tenant["erasing"]:
            _refuse(who, tenant, slug)
            entry = audit.platform_entry(who, "tenant.erase", f"tenant:{slug}")
            said = entry.actor, entry.key_id, entry.address, entry.request_id
            await connection.execute(SQL["ask"], tenant["id"], slug, who.home, *said)
            await connection.execute(SQL["suspend"], tenant["id"])
            await connection.execute(SQL["revoke"], tenant["id"])
            await audit.record(connection, entry)
        await remember(connection, wish, 202, [])


def _refuse(who: Identity, tenant: Row, slug: str) -> None:
    if tenant["legal_hold"]:
        raise Conflict(f"tenant {slug!r} has a legal hold: lift it first", code="legal_hold")
    if tenant["serves"] or tenant["id"] == who.home:
        raise Conflict(
            f"tenant {slug!r} has platform or worker keys that are good, and others need them: revoke those first, "
            "with a platform key of another tenant",
            code="platform_tenant",
        )


# ── doing it ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Turn(NamedTuple):
    """Who is to stop, and after how many seconds the next turn is due."""

    stops: list[Stop]
    pause: float


async def turn(
    db: Database, objects: ObjectStore, stop_seconds: float = STOP_SECONDS, settle_seconds: float = SETTLE_SECONDS
) -> Turn:
    """Go on with what there is to erase, as far as it goes without waiting. What cannot be done for one tenant keeps
    nothing of another's back."""
    stops: list[Stop] = []
    failed: Exception | None = None
    if not await db.fetchval("engine", SQL["under_way"]):
        return Turn(stops, _RARELY)
    # Not while another server archives: a file that is just being made of a tenant's rows would outlive them.
    async with turns.turn(db, "erase", "archive", "shelve", "publish", lock_timeout="2s") as owner:
        for row in await owner.fetch(SQL["due"], _TENANTS) if owner else ():
            erasure = _Erasure(db, objects, owner, row)
            try:
                stops += await erasure.go_on(stop_seconds, settle_seconds)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                log.warning("a tenant cannot be erased yet", tenant_id=row["tenant_id"], error=why)
                failed = failed if is_transient(error) else failed or error
    if failed is not None and not stops:
        raise failed
    return Turn(stops, _SOON)


class _Erasure:
    """One tenant on its way out."""

    def __init__(self, db: Database, objects: ObjectStore, owner: Connection, row: Row) -> None:
        self._db, self._objects, self._owner, self._row = db, objects, owner, row
        self._tenant_id: int = row["tenant_id"]

    async def go_on(self, stop_seconds: float, settle_seconds: float) -> list[Stop]:
        """As far as it goes now; answers who is to stop."""
        if self._row["state"] == "stopping":
            stops = await self._stop(stop_seconds)
            if not await self._owner.fetchval(SQL["stopped"], self._tenant_id):
                return stops
            await self._point("stopped")
        found = await self._take_objects() + await self._take_rows()
        empty_for = await self._owner.fetchval(SQL["looked"], self._tenant_id, found > 0)
        await self._point("emptied")
        if self._row["state"] == "erased":
            await self._look_back(found)
        elif not found and empty_for >= settle_seconds:
            await self._finish()
        return []

    async def _stop(self, seconds: float) -> list[Stop]:
        """Let nothing more come to be, and what is held be stopped; after so long it is not waited for."""
        for table in _MAKE_RUNS:
            await self._wave(table)
        asked_for = (await self._db.read_clock() - self._row["asked_at"]).total_seconds()
        await self._all(SQL["let_go"], CONDUCTOR, asked_for >= seconds)
        stops: list[Stop] = []
        while wave := await self._owner.fetch(SQL["stop"], self._tenant_id, _WAVE):
            stops += [Stop(*row) for row in wave]
        return stops

    # ── object storage ───────────────────────────────────────────────────────────────────────────────────────────

    async def _take_objects(self) -> int:
        """How many there were, or had something of it."""
        found = await self._take_lines()
        for folder in folders(self._tenant_id):
            keys = await self._objects.keys(folder)
            for some in (keys[i : i + _AT_ONCE] for i in range(0, len(keys), _AT_ONCE)):
                await asyncio.gather(*map(self._objects.delete, some))
                await self._count(len(some))
                await self._point("removed")
            found += len(keys)
        return found

    async def _take_lines(self) -> int:
        """Those in objects that workers shipped the lines of many tenants in."""
        found = 0
        while wave := await self._owner.fetch(SQL["segments"], self._tenant_id, _AT_ONCE):
            await asyncio.gather(*map(self._objects.delete, (row["object"] for row in wave if not row["shared"])))
            for row in wave:
                if row["shared"]:
                    await self._blank(row)
            await self._owner.execute(SQL["forget_segments"], self._tenant_id, [row["id"] for row in wave])
            await self._count(len(wave))
            found += len(wave)
        return found

    async def _blank(self, row: Row) -> None:
        """Zeros in the place of its bytes: those of others stay where they are, so that nobody need know of it."""
        await self._owner.execute(SQL["keep_in_sight"], row["object"])
        data = await self._objects.read(row["object"])
        if data is not None:
            first, last = row["first"], row["last"]
            await self._objects.put(row["object"], data[:first] + bytes(last - first) + data[last:], durable=True)
        await self._point("blanked")

    async def _count(self, objects: int) -> None:
        await self._owner.execute(SQL["count_objects"], self._tenant_id, objects)

    # ── the database ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _take_rows(self) -> int:
        """How many there were."""
        days = [row["name"] for row in await self._owner.fetch(SQL["days"])]
        return sum([await self._wave(table) for table in (*TABLES, *days)])

    async def _wave(self, table: str) -> int:
        return await self._all(SQL["take_rows"].replace("$TABLE", table))

    async def _all(self, statement: str, *given: object) -> int:
        """Wave by wave; how many there were."""
        found = 0
        while wave := await self._owner.fetchval(statement, self._tenant_id, _WAVE, *given):
            found += wave
        return found

    async def _finish(self) -> None:
        row = self._row
        async with self._owner.transaction():
            gone = dict(await self._owner.fetchrow(SQL["erased"], self._tenant_id))
            await self._owner.execute(SQL["forget_duties"], self._tenant_id)
            await self._owner.execute(SQL["forget_tenant"], self._tenant_id)
            await audit.record(self._owner, _record(row, asked_at=iso(row["asked_at"]), **gone))
        await self._point("erased")
        log.info("a tenant is erased", tenant=row["slug"], **gone)

    async def _look_back(self, found: int) -> None:
        if found:
            log.warning("something of an erased tenant came late, and is gone", tenant=self._row["slug"], found=found)
        await self._owner.execute(SQL["forget_erasure"], self._tenant_id, _REMEMBERED)

    async def _point(self, name: str) -> None:
        await self._db.failpoints.hit(f"erase.{name}")


def _record(row: Row, **detail: object) -> audit.Entry:
    """That it is done, in the name of whoever asked for it."""
    key_id, said = row["key_id"], msgspec.json.encode(detail).decode()
    told = row["home_id"], row["actor"], key_id and str(key_id), "tenant.erased", f"tenant:{row['slug']}", said
    return audit.Entry(*told, address=row["address"], request_id=row["request_id"])
