"""The routes of API v1 for people and programs: thin, each a few lines around one step. A module per noun."""

from tocsin.node.server.routes import (
    audit,
    calendars,
    circuits,
    dead,
    edits,
    events,
    fleet,
    jobs,
    keys,
    logs,
    occurrences,
    planned,
    pools,
    reports,
    runs,
    schedules,
    secrets,
)
from tocsin.node.server.routes.table import ROUTES

__all__ = [
    "ROUTES",
    "audit",
    "calendars",
    "circuits",
    "dead",
    "edits",
    "events",
    "fleet",
    "jobs",
    "keys",
    "logs",
    "occurrences",
    "planned",
    "pools",
    "reports",
    "runs",
    "schedules",
    "secrets",
]
