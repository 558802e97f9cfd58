"""usage: what a tenant has, beside what it may have. Nothing here looks at more than so many rows, whoever asks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tocsin.clock import iso
from tocsin.model.ids import instant_of, lowest_id
from tocsin.store.db import Database, Sql

SQL = Sql(__file__)
_MOST_COUNTED = 200_000
_MOST_ENDED = 100_000
_DAY = timedelta(days=1)


async def at_present(db: Database, tenant_id: int) -> dict[str, Any]:
    """What a tenant has of what quotas are for; beyond 200,000 of a kind are not counted."""
    return dict(await db.fetchrow("engine", SQL["at_present"], tenant_id, _MOST_COUNTED))


async def told(db: Database, tenant: dict[str, Any]) -> dict[str, Any]:
    """The document of `GET /v1/tenants/{slug}/usage`, of a tenant's own document."""
    tenant_id, quotas, now = tenant["id"], tenant["quotas"], await db.read_clock()
    present = await at_present(db, tenant_id)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    stored = dict(await db.fetchrow("engine", SQL["stored"], tenant_id, lowest_id(midnight), _MOST_COUNTED))
    logged = stored.pop("logged_today")
    if quotas["log_bytes_per_day"] is not None:
        logged = present["log_bytes_today"]  # what the quota goes by
    since = lowest_id(now - _DAY)
    lately = dict(await db.fetchrow("engine", SQL["lately"], tenant_id, since, _MOST_ENDED))
    oldest = lately.pop("oldest")
    return {
        "tenant": tenant["slug"],
        "jobs": {"used": present["jobs"], "quota": quotas["max_jobs"]},
        "queued": {"used": present["queued"], "quota": quotas["max_queued"]},
        "running": {"used": present["running"], "quota": quotas["max_running"]},
        "log_bytes_today": {"used": logged, "quota": quotas["log_bytes_per_day"]},
        "last_day": {"since": iso(now - _DAY if oldest is None else instant_of(oldest))} | lately,
        "stored": stored,
    }
