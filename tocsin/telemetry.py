"""Logs and metrics. One name per step: what `flow/claim.py` does is counted by `tocsin_claim_*`."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LAG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)

STEP_SECONDS = Histogram(
    "tocsin_step_seconds", "Time of one transaction of a step.", ["step"], buckets=_FAST, registry=REGISTRY
)
CLAIMED = Counter("tocsin_claim_runs", "Runs handed to workers.", registry=REGISTRY)
REPORTED = Counter("tocsin_report_attempts", "Attempts ended, by outcome.", ["outcome"], registry=REGISTRY)
SUPERSEDED = Counter("tocsin_superseded", "Reports with a stale fence, refused.", registry=REGISTRY)
SSRF_BLOCKED = Counter("tocsin_ssrf_blocked", "Http attempts that led behind our own walls.", registry=REGISTRY)
PLANNED = Counter("tocsin_plan_runs", "Occurrences staged.", registry=REGISTRY)
FILLED = Counter("tocsin_fill_runs", "Runs made for backfills.", registry=REGISTRY)
SUBMITTED = Counter("tocsin_submit_jobs", "Jobs stored.", registry=REGISTRY)
LOST = Counter("tocsin_reap_runs", "Runs taken back from lost workers.", registry=REGISTRY)
MISSED = Counter("tocsin_occurrences_missed", "Occurrences not run, by reason.", ["reason"], registry=REGISTRY)
START_LAG = Histogram(
    "tocsin_start_lag_seconds", "Claim minus ready_at of a run's first attempt.", buckets=_LAG, registry=REGISTRY
)
DEPTH = Gauge("tocsin_queue_depth", "Live runs by state.", ["state"], registry=REGISTRY)
OVERDUE = Gauge("tocsin_overdue_oldest_seconds", "Age of the oldest due, unclaimed run.", registry=REGISTRY)
WANTED_WORKERS = Gauge(
    "tocsin_wanted_workers", "Workers that a pool wants, by what waits, comes in and runs.", ["pool"], registry=REGISTRY
)
QUOTA_REFUSED = Counter("tocsin_quota_refused", "Submissions refused by a tenant's quota.", ["code"], registry=REGISTRY)
LOG_LINES_CUT = Counter("tocsin_log_lines_cut", "Lines left out for a tenant's log_bytes_per_day.", registry=REGISTRY)
LOG_BACKLOG = Gauge(
    "tocsin_log_upload_backlog_bytes",
    "Log lines that wait with the workers of this server to be taken from them.",
    registry=REGISTRY,
)
WRITES = Counter(
    "tocsin_writes",
    "Calls that change something, by how they were answered: in time, slow (a second or more) or failed (5xx).",
    ["answered"],
    registry=REGISTRY,
)
DEAD_LETTERS = Counter("tocsin_dead_letters", "Runs that were given up.", registry=REGISTRY)
SCHEDULES_STUCK = Gauge(
    "tocsin_schedules_stuck", "Schedules whose next occurrence is a minute late and not staged.", registry=REGISTRY
)
SLOTS_LEAKED = Gauge(
    "tocsin_slots_leaked", "Runs that are held by workers which are gone, and not taken back.", registry=REGISTRY
)
WORKERS_LIVE = Gauge("tocsin_workers_live", "Workers with a valid lease.", registry=REGISTRY)
RETRY_SHARE = Gauge(
    "tocsin_retry_share", "Retries in all attempts that this server handed out in the last minutes.", registry=REGISTRY
)
STRETCHED = Counter("tocsin_retries_stretched", "Retries put off for want of budget.", registry=REGISTRY)
CIRCUITS_OPEN = Gauge("tocsin_circuits_open", "Circuits that are open or half open.", registry=REGISTRY)
CIRCUIT_TRANSITIONS = Counter(
    "tocsin_circuit_transitions", "Circuits that came into another state, by state.", ["state"], registry=REGISTRY
)
TAILERS = Gauge("tocsin_log_tailers", "Logs that are followed live.", registry=REGISTRY)
LISTENERS = Gauge("tocsin_events_listeners", "Open streams of events.", registry=REGISTRY)
AUDIT_SEALED = Counter("tocsin_audit_sealed", "Audit records put into their tenant's hash chain.", registry=REGISTRY)
AUDIT_ANCHOR_AGE = Gauge(
    "tocsin_audit_anchor_age_seconds", "For how long the head of some audit chain is not anchored.", registry=REGISTRY
)
CONNECTIONS_REFUSED = Counter(
    "tocsin_connections_refused", "Connections refused because there were too many.", registry=REGISTRY
)
RATE_REFUSED = Counter("tocsin_rate_refused", "Requests refused by a rate limit.", ["limit"], registry=REGISTRY)
AUTH_FAILURES = Counter("tocsin_auth_failures", "Requests with a key or token that is not good.", registry=REGISTRY)
TLS_RELOAD_FAILURES = Counter(
    "tocsin_tls_reload_failures", "Certificates that could not be taken up; the old one is shown on.", registry=REGISTRY
)
TLS_EXPIRES_AT = Gauge(
    "tocsin_tls_expires_timestamp_seconds", "When the certificate that is shown ends, since 1970.", registry=REGISTRY
)
ARCHIVE_LAG = Gauge(
    "tocsin_archive_lag_seconds", "For how long some day of history should have been archived.", registry=REGISTRY
)
LOOP_ERRORS = Counter("tocsin_loop_errors", "Failed turns of a loop.", ["loop"], registry=REGISTRY)
LOOP_HELD = Histogram(
    "tocsin_event_loop_held_seconds",
    "Times in which one handler held the event loop of this server for more than a second.",
    buckets=(1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
XMIN_AGE = Gauge(
    "tocsin_pg_xmin_age_seconds",
    "Age of the oldest snapshot that keeps dead rows from being removed.",
    registry=REGISTRY,
)
LONGEST_TX = Gauge("tocsin_pg_longest_tx_seconds", "Age of the oldest open transaction.", registry=REGISTRY)
SEES_SESSIONS = Gauge(
    "tocsin_pg_sees_all_sessions", "1 if other users' sessions are shown to us; else 0.", registry=REGISTRY
)
POOL_WAIT = Histogram(
    "tocsin_pg_pool_wait_seconds", "Wait for a connection of a pool.", ["pool"], buckets=_FAST, registry=REGISTRY
)
CONNECTIONS = Gauge("tocsin_pg_connections_ratio", "Connections in use, of all that may be.", registry=REGISTRY)
NOTIFY_QUEUE = Gauge("tocsin_pg_notify_queue_ratio", "How full the queue of notifications is.", registry=REGISTRY)
SLOT_RETAINED = Gauge(
    "tocsin_pg_slot_retained_bytes", "WAL that is kept for the replication slot furthest behind.", registry=REGISTRY
)
DEAD_RATIO = Gauge(
    "tocsin_queue_dead_ratio", "Dead rows for each live one (of a thousand at least).", ["table"], registry=REGISTRY
)
RLS_DENIED = Counter("tocsin_rls_denied", "Statements that the database did not allow us.", registry=REGISTRY)
DISK_FREE = Gauge(
    "tocsin_disk_free_ratio", "Free room on disks of this machine, by what is on them.", ["on"], registry=REGISTRY
)
CLOCK_SKEW = Gauge("tocsin_clock_skew_seconds", "This node's wall clock minus the database's.", registry=REGISTRY)


def setup_logging(level: str = "info", as_json: bool = False) -> None:
    """Configure structlog once per process; lines go to standard error."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> Any:
    """A logger that names its part of the house."""
    return structlog.get_logger(part=name)
