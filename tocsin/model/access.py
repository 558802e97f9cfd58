"""Who may do what: the tables from which the API, the command line's help and docs/reference/access.md are made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # every `tocsin --help` loads this module, for the words of the roles
    from tocsin.model.quotas import Quotas

Role = Literal["viewer", "operator", "editor", "admin", "worker", "platform"]

# What each role is for, in the words of help and docs.
ROLES: dict[Role, str] = {
    "viewer": "reads jobs, runs, logs and reports",
    "operator": "also pauses, runs, cancels, retries and redrives",
    "editor": "also makes and changes jobs, calendars, circuits and secrets",
    "admin": "also looks after its tenant's keys and how long runs and logs are kept, and reads its audit and usage",
    "worker": "lets workers register, and see what they claimed; nothing else",
    "platform": "does all of that for every tenant, and looks after tenants, pools, workers and master keys",
}

# Each role may do what stands in its row and in the rows it includes.
_INCLUDES: dict[str, tuple[str, ...]] = {
    "viewer": ("viewer",),
    "operator": ("viewer", "operator"),
    "editor": ("viewer", "operator", "editor"),
    "admin": ("viewer", "operator", "editor", "admin"),
    "worker": ("worker",),
    "platform": ("viewer", "operator", "editor", "admin", "platform"),
    # No key has this one: the token of an attempt has, and speaks for that attempt alone.
    "run": ("run",),
}

# permission → the least role that has it
PERMISSIONS: dict[str, Role | Literal["run"]] = {
    "jobs.read": "viewer",
    "runs.read": "viewer",
    "fleet.read": "viewer",
    "jobs.operate": "operator",
    "runs.operate": "operator",
    "jobs.write": "editor",
    "secrets.manage": "editor",
    "keys.manage": "admin",
    "audit.read": "admin",
    "usage.read": "admin",
    "tenant.change": "admin",
    "fleet.operate": "platform",
    "tenants.manage": "platform",
    "worker.serve": "worker",
    "run.read": "run",
    "run.complete": "run",
}

# What of its own tenant an admin may change, within what the server does for everybody; all else is the platform's, for
# others pay for it, or it binds the tenant itself.
OWN_TERMS = ("retention.runs_days", "retention.logs_days")

# How a key with a scope is kept to its jobs, in the words of the docs.
Kept = Literal["job", "run", "rows", "body", "free"]
KEPT: dict[Kept, str] = {
    "job": "the job in the path must be one of its own, and is looked up first",
    "run": "so must the job of the run in the path",
    "rows": "the database shows it what is of its own jobs, and no more",
    "body": "the same; and a job that it sends must be one of its own",
    "free": "there is no job in it",
}
# What such a key may call. The longest beginning counts; what does not stand here is closed to it.
SCOPED: dict[str, Kept] = {
    "/v1/jobs": "body",
    "/v1/jobs/{id}": "job",
    "/v1/workflows": "body",
    "/v1/workflows/{id}": "job",
    "/v1/runs": "rows",
    "/v1/runs/{id}": "run",
    "/v1/workflow-runs": "rows",
    "/v1/workflow-runs/{id}": "run",
    "/v1/dead-letters": "rows",
    "/v1/backfills": "rows",
    "/v1/events": "rows",
    "/v1/logs/search": "rows",
    "/v1/schedules/preview": "free",
}


def allowed(role: str, permission: str) -> bool:
    """Whether `role` has `permission`."""
    return PERMISSIONS[permission] in _INCLUDES.get(role, ())


def kept_by(path: str) -> Kept | None:
    """How a key with a scope is kept to it on this route; None: the route is closed to it."""
    fits = [beginning for beginning in SCOPED if path == beginning or path.startswith(beginning + "/")]
    return SCOPED[max(fits, key=len)] if fits else None


PATTERN = r"^[a-zA-Z0-9._*-]{1,128}(?!\n)$"
MOST_STARS = 8  # in a pattern; each takes a search, for every pattern of a key and every job of a batch
_SCOPED_ROLES = ("viewer", "operator", "editor")


class Scope(NamedTuple):
    """To which jobs of its tenant a key is kept: those whose name fits one of the patterns (`*` stands for any
    characters), and those that have one of the tags."""

    names: Sequence[str] = ()
    tags: Sequence[tuple[str, str]] = ()

    @property
    def name_pattern(self) -> str:
        """Return a regular expression for the names, for PostgreSQL only: its matcher works in one pass. Python's
        matcher tries every way to divide a name among the stars."""
        return f"^({'|'.join(_expression(name) for name in self.names)})$"

    def has(self, name: str | None, tags: Mapping[str, str]) -> bool:
        """Whether a job of this name, with these tags, is in it."""
        return self.has_name(name) or any(tags.get(key) == value for key, value in self.tags)

    def has_name(self, name: str | None) -> bool:
        """Return whether every job of this name is in the scope, whatever its tags."""
        return name is not None and any(fits(pattern, name) for pattern in self.names)


def fits(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern in which `*` stands for any characters. One pass: each piece between two
    stars is matched at its first occurrence, because the rest after a later occurrence is part of the rest after the
    first."""
    first, *pieces = pattern.split("*")
    if not pieces:
        return text == first
    last = pieces.pop()
    if len(text) < len(first) + len(last) or not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in pieces:
        at = text.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


def _expression(pattern: str) -> str:
    return ".*".join(re.escape(piece) for piece in re.split(r"\*+", pattern))


class Duty(NamedTuple):
    """Whom a worker key may serve; None: all."""

    pools: frozenset[str] | None = None
    tenants: frozenset[int] | None = None


ANYBODY = Duty()


def misplaced_scopes(role: str, of_jobs: bool, of_workers: bool) -> str | None:
    """Why a key of this role has no such scopes, if it has not."""
    if of_jobs and role not in _SCOPED_ROLES:
        return f"`jobs` and `tags` are for {', '.join(_SCOPED_ROLES)}"
    if of_workers and role != "worker":
        return "`pools` and `tenants` are for worker keys"
    return None


class Identity(NamedTuple):
    """Who is calling: the key, its role, and the tenant it acts for, with its quotas if it has any. `fence`, of the
    role `run`: which attempt of the run that `key_id` then names. `address` and `request_id`, of calls that change
    something: from where, and what the call is named by. `suspended`: its tenant is, so that it may only read. `scope`:
    the jobs that the key is kept to; None: all. `duty`, of a worker key: whom it may serve. `home_id`: the key's own
    tenant, if it acts for another. `subject`, of who came with a token instead of a key: whom its issuer says that it
    is; `key_id` then stands for that."""

    key_id: str
    key_name: str
    role: str
    tenant_id: int
    tenant: str
    quotas: Quotas | None = None
    fence: int = 0
    address: str = ""
    request_id: str = ""
    suspended: bool = False
    scope: Scope | None = None
    duty: Duty = ANYBODY
    home_id: int = 0
    subject: str = ""

    @property
    def home(self) -> int:
        """The key's own tenant."""
        return self.home_id or self.tenant_id

    @property
    def actor(self) -> str:
        """How the audit names the caller."""
        return f"oidc:{self.subject}" if self.subject else f"key:{self.key_name or self.key_id}"

    @property
    def bound_to(self) -> int | None:
        """Whose runs the caller may count: its tenant's. With a platform key those of all."""
        return None if self.role == "platform" else self.tenant_id
