"""Who may do what."""

from __future__ import annotations

import pytest

from tocsin.model.access import PERMISSIONS, Identity, allowed

# The whole table, spelled out once more: a change of the rule must be made twice.
EXPECTED = {
    "viewer": {"jobs.read", "runs.read", "fleet.read"},
    "operator": {"jobs.read", "runs.read", "fleet.read", "jobs.operate", "runs.operate"},
    "editor": {"jobs.read", "runs.read", "fleet.read", "jobs.operate", "runs.operate", "jobs.write"},
    "admin": {"jobs.read", "runs.read", "fleet.read", "jobs.operate", "runs.operate", "jobs.write"}
    | {"keys.manage", "audit.read"},
    "platform": set(PERMISSIONS) - {"worker.serve", "run.complete"},
    "worker": {"worker.serve"},
    "run": {"run.complete"},
}


@pytest.mark.parametrize("role", EXPECTED)
def test_each_role_may_do_this_and_nothing_else(role: str) -> None:
    assert {p for p in PERMISSIONS if allowed(role, p)} == EXPECTED[role]


@pytest.mark.parametrize("role", ["", "root", "Admin", "viewer ", "superuser"])
def test_an_unknown_role_may_do_nothing(role: str) -> None:
    assert not any(allowed(role, p) for p in PERMISSIONS)


def test_an_unknown_permission_is_a_bug_not_a_grant() -> None:
    with pytest.raises(KeyError):
        allowed("platform", "everything")


def test_the_audit_names_the_key() -> None:
    assert Identity("k1", "ci", "editor", 1, "default").actor == "key:ci"
    assert Identity("k1", "", "editor", 1, "default").actor == "key:k1"
