"""What the page on operations tells people to type works, on a real database; what it tells them to watch exists."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import Cluster
from tocsin.telemetry import REGISTRY

from .kit import ROOT, shell_blocks

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture
def environ(cluster: Cluster, database_url: str) -> Iterator[dict[str, str]]:
    """As somebody has it who administers this database, and who is about to restore it as another."""
    name = urlsplit(database_url).path.lstrip("/")
    programs = Path(cluster.server._installation.program("pg_dump")).parent
    outer = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")}
    yield outer | {
        "PATH": f"{Path(sys.executable).parent}:{programs}:{outer['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DATABASE_URL": database_url,
        "ADMIN_URL": cluster.as_superuser(name),
        "AGAIN_URL": cluster.url("tocsin_again"),
        "AGAIN_ADMIN_URL": cluster.as_superuser("tocsin_again"),
    }
    asyncio.run(cluster._execute("drop database if exists tocsin_again with (force)"))


def test_every_block_runs(environ: dict[str, str], tmp_path: Path) -> None:
    # What asks a server is not for a database alone.
    blocks = [text for text in shell_blocks(PAGE) if "tocsin fleet" not in text]
    assert len(blocks) >= 3
    done = subprocess.run(
        ["sh", "-ec", "\n".join(blocks)],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fences go on in epoch" in done.stdout and "this release can work on the schema" in done.stdout


def test_what_is_to_be_watched_is_measured() -> None:
    known = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    known |= {family.name for family in REGISTRY.collect()}
    known |= {f"{family.name}_total" for family in REGISTRY.collect() if family.type == "counter"}
    named = set(re.findall(r"`(tocsin_[a-z_]+)`", PAGE))
    assert len(named) > 5 and named <= known
