"""The legal life of a run and of a job: one table each. Each SQL statement that writes a state names where it
comes from; `tests/model/test_states.py` reads the SQL and compares it with these tables."""

from __future__ import annotations

LIVE = ("staged", "ready", "waiting", "running", "stopping")
FINAL = ("succeeded", "dead", "cancelled", "expired", "skipped")
HELD = ("running", "stopping")
JOB_STATES = ("active", "paused", "cancelled", "completed")
OUTCOMES = ("succeeded", "failed", "timeout", "lost", "cancelled")
TRIGGERS = ("schedule", "manual", "api", "dependency", "backfill", "retry", "redrive")
BLOCKERS = ("parent", "overlap", "limit", "rate", "breaker", "paused", "resources")
REASONS = (
    "skipped_overlap",
    "skipped_paused",
    "coalesced",
    "misfire_expired",
    "upstream_failed",
    "not_needed",
    "mapped",
    "map_failed",
    "expired",
    "cancelled",
)

# from → to, with the steps that make the move
RUN_MOVES: dict[tuple[str, str], tuple[str, ...]] = {
    ("staged", "ready"): ("promote", "sweep"),
    ("staged", "running"): ("claim",),
    ("ready", "running"): ("claim",),
    ("staged", "waiting"): ("claim",),
    ("ready", "waiting"): ("claim",),
    ("waiting", "ready"): ("release", "resume", "sweep", "circuits", "joins"),
    ("running", "stopping"): ("cancel", "erase"),
    ("running", "staged"): ("report", "reap", "give_back", "restored"),
    ("running", "ready"): ("give_back", "restored"),
    ("running", "succeeded"): ("report",),
    ("stopping", "succeeded"): ("report",),
    ("running", "dead"): ("report", "reap"),
    ("running", "cancelled"): ("report",),
    ("stopping", "cancelled"): ("report", "reap", "give_back"),
    ("staged", "cancelled"): ("cancel",),
    ("ready", "cancelled"): ("cancel",),
    ("waiting", "cancelled"): ("cancel", "joins"),
    ("staged", "skipped"): ("claim", "sweep"),
    ("ready", "skipped"): ("claim",),
    ("staged", "expired"): ("claim", "sweep"),
    ("ready", "expired"): ("claim", "sweep"),
    ("waiting", "expired"): ("sweep",),
    # A workflow run that is run again already.
    ("running", "skipped"): ("workflows",),
    ("stopping", "skipped"): ("workflows",),
    # A run that others decide about, or stand for.
    ("waiting", "skipped"): ("joins",),
    ("waiting", "succeeded"): ("joins",),
    ("waiting", "dead"): ("joins",),
}

JOB_STATES = ("active", "paused", "cancelled", "completed")
OPEN_JOB_STATES = ("active", "paused")
