"""The round of `make test`: kill and freeze real processes under load for some seconds, then check every promise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Cluster

from .cluster import Site
from .round import play

# Another seed is another round: TRUST_SEED=7 make test ARGS="tests/cluster/test_round.py"
SEED = int(os.environ.get("TRUST_SEED", "1"))
SECONDS = 15.0


@pytest.mark.trust
async def test_the_promises_hold_under_kills(
    cluster: Cluster, database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\nround with seed {SEED} in {tmp_path}")
    with Site(tmp_path, database_url, cluster.keys) as site:
        outcome = await play(site, seconds=SECONDS, seed=SEED)
    with capsys.disabled():
        print(outcome)
    assert [str(b) for b in outcome.breaches] == []
    # An empty round would prove nothing.
    assert len(outcome.faults) == 3
    assert len(outcome.evidence.runs) > 300
    assert any(run["losses"] for run in outcome.evidence.runs)
    assert any(run["failures"] for run in outcome.evidence.runs)
    assert any(run["state"] == "cancelled" for run in outcome.evidence.runs)
    assert outcome.evidence.unanswered() == []
