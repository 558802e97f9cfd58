"""docs/trust.md, SECURITY.md and docs/threats.md: each promise, and each attack, names tests, and they exist."""

from __future__ import annotations

import ast
import re

import pytest

from docs.generate import ROOT
from tests.cluster.checker import RULES

PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
PROMISES = dict(re.findall(r"^\*\*(P\d+) (.*?)(?=^\*\*|^## )", PAGE, re.MULTILINE | re.DOTALL))
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\*\*(.*?)\n(?=\n)", SECURITY, re.MULTILINE | re.DOTALL)
THREATS = (ROOT / "docs" / "threats.md").read_text(encoding="utf-8")
ATTACKS = dict(re.findall(r"^\*\*(.+?)\*\*\n(.*?)(?=^\*\*|^## |\Z)", THREATS, re.MULTILINE | re.DOTALL))
TESTS = re.findall(r"^- `(tests/[\w/]+\.py)::(\w+)`$", PAGE + SECURITY + THREATS, re.MULTILINE)


def test_all_twelve_promises_are_printed() -> None:
    assert list(PROMISES) == [f"P{n}" for n in range(1, 13)]


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_names_its_tests(promise: str) -> None:
    assert re.search(r"^- `tests/\S+::test_\w+`$", PROMISES[promise], re.MULTILINE)


def test_each_line_of_the_threat_model_names_its_tests() -> None:
    assert len(LINES) == 14
    assert [line for line in LINES if "- `tests/" not in line] == [line for line in LINES if "Not promised" in line]


def test_every_attack_is_tried() -> None:
    assert len(ATTACKS) >= 60
    assert [attack for attack, tests in ATTACKS.items() if "- `tests/" not in tests] == []


@pytest.mark.parametrize(("path", "name"), sorted(set(TESTS)))
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in defined


def test_a_named_invariant_is_one_of_the_checker() -> None:
    assert set(re.findall(r"\bI\d+\b", PAGE)) <= set(RULES)
