"""Every kind of backlog in one database: each drains, and an ordinary tenant's runs start during that time.

`python -m bench backlogs` runs the same at full size and measures how late those runs start.
"""

from __future__ import annotations

import pytest

from bench import backlogs
from bench.stand import stand


@pytest.mark.slow
def test_backlogs_drain_beside_an_ordinary_tenant() -> None:
    with stand() as made:
        found = backlogs.measure(made, backlogs.SMALL)
    assert set(found.drained_after) == {"expired", "late", "cursors", "keys"}
    for lag in (found.scheduled, found.asked_for, found.behind_expired):
        assert lag.runs > 0
