"""dead: the dead-letter path, and running an ended run again. Both make new runs that name their origin."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.transitions import Hint, NewRun, hints, stage
from tocsin.model.access import Identity
from tocsin.model.ids import new_id, new_ids
from tocsin.store.db import Connection, Database, Sql

SQL = Sql(__file__)


async def list_dead(
    db: Database, who: Identity, job: str | None, error_class: str | None, before: str | None, limit: int
) -> list[dict[str, Any]]:
    """Newest first."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, before, job, error_class, limit)
    return [
        {
            "id": row["id"],
            "run_id": row["id"],
            "job_id": row["job_id"],
            "job_name": row["job_name"],
            "job_version": row["job_version"],
            "died_at": iso(row["died_at"]),
            "error": {"class": row["error_class"], "message": row["error"] or ""} if row["error_class"] else None,
            "args": msgspec.Raw(row["args"].encode()) if row["args"] else None,
            "tags": msgspec.Raw(row["tags"].encode()) if row["tags"] else {},
        }
        for row in rows
    ]


async def redrive(
    db: Database, who: Identity, ids: Sequence[str], now: datetime, wish: Wish | None
) -> tuple[list[str], list[Hint]]:
    """Each letter becomes a new run with its args. All or nothing: a letter that is not there is an error."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        await recall(connection, wish)
        letters = await _take(connection, who, ids)
        await _hold_jobs(connection, who, [letter["job_id"] for letter in letters])
        new = [
            NewRun(
                who.tenant_id, id_, letter["job_id"], "redrive", now, letter["priority"], letter["args"], letter["id"]
            )
            for id_, letter in zip(new_ids(now, len(letters)), letters, strict=True)
        ]
        rows = await stage(connection, new)
        await audit.record(connection, audit.entry(who, "dead.redrive", "dead-letters", ids=list(ids)))
        made = [run.id for run in new]
        await remember(connection, wish, 200, made)
    return made, hints(rows)


async def discard(db: Database, who: Identity, ids: Sequence[str], wish: Wish | None) -> int:
    """The letters leave; their history stays."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        await recall(connection, wish)
        letters = await _take(connection, who, ids)
        await audit.record(connection, audit.entry(who, "dead.discard", "dead-letters", ids=list(ids)))
        await remember(connection, wish, 200, list(ids))
    return len(letters)


async def retry(db: Database, who: Identity, run_id: str, now: datetime, wish: Wish | None) -> tuple[str, list[Hint]]:
    """A new run of an ended one, with its args and the job's current version."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        await recall(connection, wish)
        origin = await connection.fetchrow(SQL["origin"], who.tenant_id, run_id)
        if origin is None:
            raise NotFound("there is no ended run with this id")
        await _hold_jobs(connection, who, [origin["job_id"]])
        new = NewRun(
            who.tenant_id, new_id(now), origin["job_id"], "retry", None, origin["priority"], origin["args"], run_id
        )
        rows = await stage(connection, [new])
        await audit.record(connection, audit.entry(who, "run.retry", f"run:{run_id}"))
        await remember(connection, wish, 202, [new.id])
    return new.id, hints(rows)


async def _take(connection: Connection, who: Identity, ids: Sequence[str]) -> list[Any]:
    letters = await connection.fetch(SQL["take"], who.tenant_id, list(ids))
    missing = set(ids) - {letter["id"] for letter in letters}
    if missing:
        raise NotFound(f"there is no dead letter {min(missing)}")
    return letters  # type: ignore[no-any-return]


async def _hold_jobs(connection: Connection, who: Identity, ids: Sequence[str]) -> None:
    states = {
        row["id"]: row["state"] for row in await connection.fetch(SQL["hold_jobs"], who.tenant_id, sorted(set(ids)))
    }
    gone = [id_ for id_ in ids if states.get(id_, "cancelled") == "cancelled"]
    if gone:
        raise Conflict(f"job {gone[0]} is cancelled and takes no more runs", code="job_cancelled")
