"""The round of `make test`: every kind of fault once, in real processes under load; then every promise is checked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Site
from .database import OwnDatabase
from .round import Plan, light, play

# Another seed is another round: TRUST_SEED=7 make test ARGS="tests/cluster/test_round.py"
SEED = int(os.environ.get("TRUST_SEED", "1"))
PLAN = Plan(seconds=18.0, seed=SEED, servers=2, workers=3, slots=8, rate=40.0, faults_every=1.0, loads=light)


@pytest.fixture
def database() -> Iterator[OwnDatabase]:
    """A PostgreSQL that may be stopped: the one of the other tests is everybody's."""
    # Not pytest's own folder: that is 0700, and the user who runs PostgreSQL for root could not get there.
    with tempfile.TemporaryDirectory(prefix="tocsin-round-") as folder:
        Path(folder).chmod(0o711)
        with OwnDatabase(Path(folder) / "postgres") as database:
            yield database


@pytest.mark.trust
async def test_the_promises_hold_under_every_kind_of_fault(
    database: OwnDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nround with seed {SEED} in {tmp_path}")
    with Site(tmp_path, "", database.keys) as site:
        outcome = await play(site, database, PLAN)
    with capsys.disabled():
        print(outcome)
    assert [str(b) for b in outcome.breaches] == []
    # An empty round would prove nothing.
    assert len({f.kind for f in outcome.faults}) >= 10
    assert len(outcome.evidence.runs) > 300
    assert outcome.evidence.logs
    assert any(run["losses"] for run in outcome.evidence.runs)
    assert any(run["failures"] for run in outcome.evidence.runs)
    assert any(run["state"] == "cancelled" for run in outcome.evidence.runs)
    assert outcome.evidence.unanswered() == []
