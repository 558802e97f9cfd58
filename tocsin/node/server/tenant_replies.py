"""What the API answers about tenants, as `replies` has the rest."""

from __future__ import annotations

from typing import Literal

from tocsin.model.scalars import Instant
from tocsin.node.server.replies import Reply


class TenantQuotas(Reply):
    """What a tenant may have at most; null: as much as there is room for."""

    max_jobs: int | None
    max_queued: int | None
    max_running: int | None
    submit_rate: str | None
    log_bytes_per_day: int | None


class TenantUsage(Reply):
    """What a tenant has of it: open jobs, runs that have not started, running ones, and bytes of log lines since
    midnight UTC (counted only while there is a quota for them)."""

    jobs: int
    queued: int
    running: int
    log_bytes_today: int


class TenantRetention(Reply):
    """For how many days archived runs, logs and the archived audit are kept, and runs and audit are in the database
    before they are archived (null: as long as those of others), and whether all of it is held."""

    runs_days: int | None
    legal_hold: bool
    hot_days: int | None
    logs_days: int | None
    audit_days: int | None


class TenantErasure(Reply):
    """How far the erasure of a tenant is: first what runs is stopped, then rows and objects go, and those that have are
    counted. When it is done there is no such tenant."""

    state: Literal["stopping", "erasing"]
    asked_at: Instant
    asked_by: str
    rows: int
    objects: int


class Tenant(Reply):
    id: int
    slug: str
    weight: int
    quotas: TenantQuotas
    http_allow: list[str]
    retention: TenantRetention
    created_at: Instant
    suspended_at: Instant | None
    erasure: TenantErasure | None


class TenantInUse(Tenant):
    """A tenant and what it uses."""

    usage: TenantUsage


class Share(Reply):
    """How much is used, and how much there may be at most; null: as much as there is room for."""

    used: int
    quota: int | None


class LastDay(Reply):
    """Runs that were made `since`: a day ago, or later if there were too many to count. `ran` are those that had an
    attempt and ended, `failed` those that died."""

    since: Instant
    submitted: int
    ran: int
    failed: int


class Stored(Reply):
    """Bytes in object storage, as they are stored; of large payloads, how many there are."""

    history_bytes: int
    audit_bytes: int
    log_bytes: int
    payloads: int


class Usage(Reply):
    """What a tenant has: open jobs, runs that have not started, running ones, and bytes of log lines since midnight
    UTC, each with its quota; what it did in a day; and what is stored of it. Beyond 200,000 of a kind are not
    counted."""

    tenant: str
    jobs: Share
    queued: Share
    running: Share
    log_bytes_today: Share
    last_day: LastDay
    stored: Stored
