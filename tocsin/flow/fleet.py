"""fleet: workers and their leases. A lease belongs to a worker, not to a run: 100,000 running jobs renew nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import Forbidden, InvalidInput, NotFound
from tocsin.flow.shared import audit
from tocsin.model.access import Identity
from tocsin.model.ids import new_id, parse_id
from tocsin.model.job import NAME
from tocsin.model.resources import MOST, MOST_CPUS, NOTHING, Amounts, amounts
from tocsin.model.targets import WORKFLOW_POOL
from tocsin.store.db import Database, Row, Sql
from tocsin.telemetry import SLOTS_LEAKED, WORKERS_LIVE
from tocsin.wire import Register

SQL = Sql(__file__)
_MOST_WORDS = 100


class Worker(NamedTuple):
    """What a dispatcher must know of a worker."""

    id: str
    pool: str
    targets: list[str]
    functions: list[str]
    state: str
    slots: int
    lease_left: float = float("inf")  # seconds, when it was read
    resources: Amounts = NOTHING
    labels: Mapping[str, str] = {}
    tenants: frozenset[int] | None = None  # whose runs its key lets it have; None: everybody's


async def register(db: Database, who: Identity, body: Register, lease_seconds: float) -> Worker:
    """A new worker, whatever its name: a restart is a new id."""
    _refuse_odd(body)
    if who.duty.pools is not None and body.pool not in who.duty.pools:
        raise Forbidden(f"this key serves other pools than {body.pool!r}", code="out_of_scope")
    worker_id = new_id(db.clock.now())
    slots = min(max(body.slots, 1), 100_000)
    resources = amounts(body.resources)
    async with db.transaction("register", "vital") as connection:
        await connection.execute(SQL["pool"], body.pool)
        if (formerly := parse_id(body.formerly)) is not None:
            await connection.execute(SQL["came_back"], formerly, who.key_id)
        await connection.execute(
            SQL["register"],
            worker_id,
            who.key_id,
            body.name,
            body.pool,
            slots,
            msgspec.json.encode(body.labels).decode(),
            body.targets,
            body.functions,
            body.version,
            lease_seconds,
            list(resources),
            None if who.duty.tenants is None else sorted(who.duty.tenants),
        )
    abilities = (body.pool, body.targets, body.functions, "live", slots)
    return Worker(worker_id, *abilities, lease_seconds, resources, body.labels, who.duty.tenants)


def _refuse_odd(body: Register) -> None:
    texts = (body.name, body.version, *body.targets, *body.functions, *body.labels, *body.labels.values())
    if any(not text.isprintable() or len(text) > 256 for text in texts) or len(body.functions) > 10_000:
        raise InvalidInput("names, labels and functions of a worker are printable texts of up to 256 characters")
    if len(body.labels) > _MOST_WORDS or len(body.targets) > _MOST_WORDS:
        raise InvalidInput(f"a worker has at most {_MOST_WORDS} labels, and kinds of targets")
    if not re.fullmatch(NAME, body.pool):
        raise InvalidInput.field("pool", "invalid", "is not a name")
    if body.pool == WORKFLOW_POOL:
        raise InvalidInput.field("pool", "reserved", "is the pool of workflow runs, which the servers take themselves")
    for name in Amounts._fields:
        most = MOST_CPUS if name == "cpu" else MOST
        if not 0 <= body.resources.get(name, 0) <= most:
            raise InvalidInput.field(f"resources.{name}", "invalid", f"must lie between 0 and {most:,}")


async def find(db: Database, who: Identity, worker_id: str) -> Worker | None:
    """A worker that registered with this very key, on whichever node, and was not declared gone."""
    row = await db.fetchrow("vital", SQL["find"], worker_id, who.key_id)
    if row is None:
        return None
    labels = msgspec.json.decode(row["labels"])
    found = Worker(*row[:7])._replace(resources=Amounts(*row["resources"]), labels=labels)
    return found._replace(tenants=who.duty.tenants)


async def was_here(db: Database, who: Identity, worker_id: str) -> bool:
    """Whether a worker registered with this very key, be it gone since."""
    return bool(await db.fetchval("vital", SQL["was_here"], worker_id, who.key_id))


class Renewed(NamedTuple):
    """The state of each worker that still is one, and the last claim that was made for anybody."""

    states: dict[str, str]
    last_claim: int


async def renew(db: Database, worker_ids: Sequence[str], lease_seconds: float) -> Renewed:
    """Extend leases."""
    rows = await db.fetch("vital", SQL["renew"], list(worker_ids), lease_seconds)
    return Renewed({row["id"]: row["state"] for row in rows}, max((row["last_claim"] for row in rows), default=0))


async def list_workers(db: Database, who: Identity, before: str | None, limit: int) -> list[dict[str, Any]]:
    """Newest first; those gone for more than ten minutes are left out."""
    rows = await db.fetch("engine", SQL["list"], before, None, limit, who.bound_to, who.tenant_id)
    return [_document(row) for row in rows]


async def get_worker(db: Database, who: Identity, worker_id: str) -> dict[str, Any]:
    """One worker's document."""
    row = await db.fetchrow("engine", SQL["list"], None, worker_id, 1, who.bound_to, who.tenant_id)
    if row is None:
        raise NotFound("there is no such worker")
    return _document(row)


async def drain(db: Database, who: Identity, worker_id: str) -> None:
    """live → draining: it takes nothing more, finishes what it has, and leaves."""
    await get_worker(db, who, worker_id)
    async with db.transaction("drain") as connection:
        await connection.execute(SQL["drain"], worker_id)
        await audit.record(connection, audit.platform_entry(who, "worker.drain", f"worker:{worker_id}"))


async def leave(db: Database, worker_id: str) -> None:
    """live | draining → gone, by its own word: nothing was lost."""
    await db.fetch("vital", SQL["leave"], worker_id)


async def measure(db: Database) -> None:
    """Set the gauges of living workers and of what others left; forget those long gone."""
    WORKERS_LIVE.set(await db.fetchval("engine", SQL["live"]))
    SLOTS_LEAKED.set(await db.fetchval("engine", SQL["leaked"]))
    await db.fetch("engine", SQL["prune"])


def _document(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "name": row["name"],
        "pool": row["pool"],
        "state": row["state"],
        "slots": row["slots"],
        "running": row["running"],
        "resources": _resources(row),
        "labels": msgspec.Raw(row["labels"].encode()),
        "targets": row["targets"],
        "functions": row["functions"],
        "version": row["version"],
        "lease_until": iso(row["lease_until"]),
        "registered_at": iso(row["registered_at"]),
        "gone_at": row["gone_at"] and iso(row["gone_at"]),
    }


def _resources(row: Row) -> dict[str, dict[str, float]]:
    """What the worker has, what of that runs have, what is left, and what of it runs of the caller's tenant have."""
    total, used = Amounts(*row["resources"]), Amounts(*row["used"])
    shown = {"total": total, "used": used, "free": total.minus(used), "yours": Amounts(*row["mine"])}
    return {name: amount.document() for name, amount in shown.items()}
