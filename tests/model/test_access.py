"""Who may do what."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.access import (
    PATTERN,
    PERMISSIONS,
    ROLES,
    SCOPED,
    Identity,
    Scope,
    allowed,
    kept_by,
    misplaced_scopes,
)

ROOT = Path(__file__).parents[2]

# The whole table, spelled out once more: a change of the rule must be made twice.
VIEWER = {"jobs.read", "runs.read", "fleet.read"}
OPERATOR = VIEWER | {"jobs.operate", "runs.operate"}
EDITOR = OPERATOR | {"jobs.write", "secrets.manage"}
ADMIN = EDITOR | {"keys.manage", "audit.read", "usage.read", "tenant.change"}
EXPECTED = {
    "viewer": VIEWER,
    "operator": OPERATOR,
    "editor": EDITOR,
    "admin": ADMIN,
    "platform": ADMIN | {"fleet.operate", "tenants.manage"},
    "worker": {"worker.serve"},
    "run": {"run.read", "run.complete"},
}


@pytest.mark.parametrize("role", EXPECTED)
def test_each_role_may_do_this_and_nothing_else(role: str) -> None:
    assert {p for p in PERMISSIONS if allowed(role, p)} == EXPECTED[role]


def test_every_role_that_a_key_may_have_is_told_in_words() -> None:
    assert set(ROLES) == EXPECTED.keys() - {"run"}


@pytest.mark.parametrize("role", ["", "root", "Admin", "viewer ", "superuser"])
def test_an_unknown_role_may_do_nothing(role: str) -> None:
    assert not any(allowed(role, p) for p in PERMISSIONS)


def test_an_unknown_permission_is_a_bug_not_a_grant() -> None:
    with pytest.raises(KeyError):
        allowed("platform", "everything")


def test_the_audit_names_the_key() -> None:
    assert Identity("k1", "ci", "editor", 1, "default").actor == "key:ci"
    assert Identity("k1", "", "editor", 1, "default").actor == "key:k1"


# ── scopes ───────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = st.text("abz.-_09", min_size=1, max_size=8)


@given(st.lists(st.text("ab*.-", min_size=1, max_size=6), max_size=4), NAMES)
def test_a_pattern_fits_as_a_shell_would_have_it(patterns: list[str], name: str) -> None:
    def fits(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return fits(pattern[1:], text) or (bool(text) and fits(pattern, text[1:]))
        return bool(text) and pattern[0] == text[0] and fits(pattern[1:], text[1:])

    assert Scope(tuple(patterns)).has(name, {}) == any(fits(pattern, name) for pattern in patterns)


@given(st.lists(st.text("ab*.-", min_size=1, max_size=6), max_size=4), NAMES)
def test_the_expression_says_the_same_by_itself(patterns: list[str], name: str) -> None:
    scope = Scope(tuple(patterns))
    assert (re.search(scope.name_pattern, name) is not None) == scope.has(name, {})


WORST = [["*a*a*a*a*a*a*b"], ["*a" * 64], ["*" * 127 + "b"], ["a*" * 63 + "ab"] * 50, ["*aaaaaaab" * 14] * 50]


@pytest.mark.parametrize("patterns", WORST)
def test_the_worst_patterns_take_few_steps(patterns: list[str]) -> None:
    """The test runs in a process with 20 seconds of processor time: an endless search cannot be counted from inside."""
    told = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
from tests.steps import at_most
from tocsin.model.access import Scope
with at_most(10_000):
    print(Scope({patterns!r}).has("a" * 128, {{}}))
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, f"{patterns == ['*a' * 64]}\n"), done.stderr


def test_a_name_or_a_tag_is_enough_and_nothing_is_not() -> None:
    scope = Scope(("billing-*",), (("team", "billing"),))
    assert (
        scope.has("billing-nightly", {})
        and scope.has(None, {"team": "billing"})
        and scope.has("x", {"team": "billing"})
    )
    assert not scope.has(None, {}) and not scope.has("x", {"team": "other"}) and not scope.has("not-billing-x", {})
    assert not Scope().has("x", {"a": "b"}) and not Scope((), (("a", "b"),)).has("", {})


@pytest.mark.parametrize("pattern", ["", "a b", "a|b", "(a)", "[a]", "a\n", "ä", "x" * 129, "a?", "a+", "^a$", "a\\"])
def test_what_means_more_than_a_name_is_no_pattern(pattern: str) -> None:
    assert re.search(PATTERN, pattern) is None


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/v1/jobs", "body"),
        ("/v1/jobs/batch", "body"),
        ("/v1/jobs/by-name/{name}", "body"),
        ("/v1/jobs/{id}", "job"),
        ("/v1/jobs/{id}/runs", "job"),
        ("/v1/runs", "rows"),
        ("/v1/runs/{id}/logs/stream", "run"),
        ("/v1/schedules/preview", "free"),
        ("/v1/secrets/{name}", None),
        ("/v1/keys", None),
        ("/v1/reports/runs", None),
        ("/v1/jobsite", None),
        ("/", None),
    ],
)
def test_a_scope_is_kept_by_the_longest_beginning_and_else_closed(path: str, kept: str | None) -> None:
    assert kept_by(path) == kept


def test_every_beginning_is_one_of_a_route() -> None:
    from tocsin.node.server.routes import ROUTES

    paths = {path for _, path, _, _ in ROUTES}
    assert all(any(path == b or path.startswith(b + "/") for path in paths) for b in SCOPED)


@pytest.mark.parametrize("role", ROLES)
def test_scopes_of_jobs_and_of_workers_are_for_their_roles(role: str) -> None:
    assert (misplaced_scopes(role, True, False) is None) == (role in ("viewer", "operator", "editor"))
    assert (misplaced_scopes(role, False, True) is None) == (role == "worker")
    assert misplaced_scopes(role, False, False) is None
