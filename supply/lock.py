"""The lock files: what is installed, pinned to a version and to the digests of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RUNTIME, DEVELOPMENT = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"
_LINE = re.compile(
    r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[0-9a-z.+!]+)(?: ; (?P<marker>[^\\]+?))?"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)"
)


class Locked(NamedTuple):
    """One package; `marker`: only where this holds."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


class Unlocked(Exception):
    """A line that lets in more than one known file."""


def read(path: Path) -> list[Locked]:
    """The packages of a lock file. Raises `Unlocked` for whatever is not pinned and hashed, or names a place."""
    return list(_parsed(path.read_text()))


def _parsed(text: str) -> Iterator[Locked]:
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None and line.strip():
            raise Unlocked(f"not a name, a version and digests: {line.strip()[:100]}")
        if match is not None:
            hashes = tuple(match["hashes"].replace("--hash=sha256:", "").split())
            yield Locked(match["name"], match["version"], match["marker"] or "", hashes)
