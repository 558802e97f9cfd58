"""Who may do what: one table, from which routes, help and docs are made."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tocsin.model.quotas import Quotas

Role = Literal["viewer", "operator", "editor", "admin", "worker", "platform"]

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
    "keys.manage": "admin",
    "audit.read": "admin",
    "fleet.operate": "platform",
    "tenants.manage": "platform",
    "worker.serve": "worker",
    "run.complete": "run",
}


def allowed(role: str, permission: str) -> bool:
    """Whether `role` has `permission`."""
    return PERMISSIONS[permission] in _INCLUDES.get(role, ())


class Identity(NamedTuple):
    """Who is calling: the key, its role, and the tenant it acts for, with its quotas if it has any. `fence`, of the
    role `run`: which attempt of the run that `key_id` then names. `address` and `request_id`, of calls that change
    something: from where, and what the call is named by. `suspended`: its tenant is, so that it may only read."""

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

    @property
    def actor(self) -> str:
        """How the audit names the caller."""
        return f"key:{self.key_name or self.key_id}"

    @property
    def bound_to(self) -> int | None:
        """Whose runs the caller may count: its tenant's. With a platform key those of all."""
        return None if self.role == "platform" else self.tenant_id
