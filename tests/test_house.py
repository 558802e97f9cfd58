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


UNPACKERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}
COMMANDS = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}


def dangers(source: str) -> list[str]:
    """What would run or unpack whatever it is given, and ruff does not see."""
    return [f"line {node.lineno}: {found}" for node in ast.walk(ast.parse(source)) if (found := _danger(node))]


def _danger(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names) if found := UNPACKERS & {alias.name.partition(".")[0] for alias in names}:
            return f"import {', '.join(found)}"
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPACKERS:
            return f"import {module}"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr=name)) if name.endswith(("load", "load_all")):
            return "" if name.startswith("safe_") else f"yaml.{name}"
        case ast.Call(func=ast.Attribute(attr="create_subprocess_shell" | "subprocess_shell")):
            return "a shell"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="subprocess"), attr=name), args=[first, *_]):
            text = isinstance(first, ast.JoinedStr) or (
                isinstance(first, ast.Constant) and isinstance(first.value, str)
            )
            return "a command in one string" if name in COMMANDS and (text or name.startswith("get")) else ""
    return ""


@pytest.mark.parametrize(
    "lie",
    [
        *("import pickle", "import os, marshal", "from shelve import open", "import dill.source"),
        *("yaml.load(x)", "yaml.load(x, Loader=yaml.SafeLoader)", "yaml.unsafe_load(x)", "yaml.full_load_all(x)"),
        *("subprocess.run('ls')", "subprocess.Popen(f'rm {x}')", "subprocess.getoutput(x)"),
        *("await asyncio.create_subprocess_shell(x)", "loop.subprocess_shell(p, x)"),
    ],
)
def test_the_search_for_dangers_finds_one(lie: str) -> None:
    assert dangers(f"async def f():\n    {lie}" if "await" in lie else lie)


def test_nothing_runs_or_unpacks_whatever_it_is_given() -> None:
    """The rest of this rule are ruff's `S` rules in pyproject.toml: eval, exec, shells, mktemp, weak TLS."""
    assert dangers("yaml.safe_load(x)\nsubprocess.run(['ls'])\nimport picklejar") == []
    places = [path for folder in ("tocsin", "supply", "docs", "bench") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): dangers(path.read_text()) for path in places}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "lie",
    ["eval(x)", "exec(x)", "os.system(x)", "subprocess.run(x, shell=True)", "tempfile.mktemp()", "hashlib.md5(x)"],
)
def test_ruff_finds_the_other_dangers(lie: str) -> None:
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--no-cache", "--output-format=concise", "-"]
    source = f"import hashlib\nimport os\nimport subprocess\nimport tempfile\n\n\ndef f(x):\n    return {lie}\n"
    done = subprocess.run(ruff, cwd=ROOT, input=source, capture_output=True, text=True, timeout=60)
    assert re.search(r"-:8:\d+: S\d+", done.stdout), done.stdout + done.stderr


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
