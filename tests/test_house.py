"""The rules of the house that a machine can hold: SQL in `.sql` files, floors, sizes, docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "tocsin").rglob("*.py"))
MOST_LINES, LONGEST_FUNCTION = 600, 80

SQL = re.compile(
    r"""^\s*(?:--.*\n\s*)*(?:
        select\b.+\bfrom\b | select\s+(?:[a-z_]+\(|\d|'|current_) |
        insert\s+into\b | update\s+[\w."]+\s+(?:\w+\s+)?set\b | delete\s+from\b | merge\s+into\b |
        with\s+(?:recursive\s+)?\w+\s+as\s*(?:(?:not\s+)?materialized\s*)?\( |
        (?:create|alter|drop)\s+(?:or\s+replace\s+|unique\s+|unlogged\s+|temp\s+)*
            (?:table|index|role|schema|database|view|function|sequence|policy|type|trigger|extension)\b |
        truncate\s+(?:table\s+)?\w+\s*;?$ | (?:grant|revoke)\b.+\b(?:on|to|from)\b | copy\s+\w+.*\b(?:from|to)\b |
        (?:begin|commit|rollback)\s*; | set\s+(?:local|session)\b | (?:listen|notify|lock\s+table)\s+\w+
    )""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Every string of a module that is not a docstring; an f-string with its holes as `x`."""
    tree = ast.parse(source)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "x" for p in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def sql_in(source: str) -> list[str]:
    return [f"line {line}: {text[:60]!r}" for line, text in strings(source) if SQL.match(text)]


def functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize(
    "lie",
    [
        'x = "select id from runs"',
        'async def f(c): await c.fetch("""\n  SELECT *\n  FROM jobs\n""")',
        'x = f"insert into {table} values (1)"',
        'x = "update runs set state = 1"',
        'x = "delete from runs"',
        'x = "with a as (select 1) select * from a"',
        'x = "-- a comment\\nwith recursive a as materialized (select 1)"',
        'x = "select pg_notify(1, 2)"',
        'x = "create unique index i on t (x)"',
        'x = "set local tocsin.tenant = 1"',
        'x = "truncate table runs"',
        'x = "grant select on runs to tocsin_app"',
        'def f():\n    "a docstring"\n    return "delete from runs"',
    ],
)
def test_the_search_for_sql_finds_a_lie(lie: str) -> None:
    assert sql_in(lie)


@pytest.mark.parametrize(
    "honest",
    [
        '"""select id from runs"""',
        'def f():\n    """update runs set state"""',
        'x = SQL["commit"] + SQL["select"]',
        'x = "update the job"',
        'x = "delete it"',
        'x = "create a job"',
        'x = "no select in front from here"',
    ],
)
def test_the_search_for_sql_leaves_prose_alone(honest: str) -> None:
    assert sql_in(honest) == []


def test_sql_lives_in_sql_files() -> None:
    found = {str(path.relative_to(ROOT)): sql_in(path.read_text()) for path in MODULES}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert len(MODULES) > 60


def test_every_statement_file_stands_beside_its_step() -> None:
    for path in (ROOT / "tocsin").rglob("*.sql"):
        if path.parent.name != "migrations" and path.name not in ("roles.sql", "bootstrap.sql", "schema.sql"):
            assert path.with_suffix(".py").exists(), path


def test_every_named_statement_is_used() -> None:
    source = "\n".join(path.read_text() for path in MODULES)
    statements = "\n".join(path.read_text() for path in (ROOT / "tocsin").rglob("*.sql"))
    included = set(re.findall(r"-- :include (\w+)", statements))
    for path in (ROOT / "tocsin").rglob("*.sql"):
        for name in re.findall(r"^-- :name (\w+)", path.read_text(), re.MULTILINE):
            assert f'["{name}"]' in source or name in included, f"{path.name}: {name} is used by nobody"


def test_the_floors_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_module_says_what_it_is() -> None:
    for path in MODULES:
        source = path.read_text()
        if source.strip():  # an empty __init__ only makes a package
            assert ast.get_docstring(ast.parse(source)), f"{path.relative_to(ROOT)} has no docstring"


def test_modules_and_functions_stay_small() -> None:
    for path in MODULES:
        source = path.read_text()
        assert source.count("\n") <= MOST_LINES, f"{path.relative_to(ROOT)} has {source.count(chr(10))} lines"
        for name, length in functions(source):
            assert length <= LONGEST_FUNCTION, f"{path.relative_to(ROOT)}: {name} has {length} lines"


def test_time_and_chance_are_given_to_the_model_not_taken_by_it() -> None:
    """`now` and randomness are arguments of pure functions (ids are random by design)."""
    taken = re.compile(r"datetime\.now\(|utcnow\(|time\.time\(|random\.random\(|random\.uniform\(|os\.urandom\(")
    for path in (ROOT / "tocsin" / "model").rglob("*.py"):
        if path.name != "ids.py":
            assert not taken.search(path.read_text()), path


def test_predicates_use_a_clock_that_an_index_can_use() -> None:
    for path in (ROOT / "tocsin").rglob("*.sql"):
        assert "clock_timestamp" not in path.read_text(), path
