"""One world for all tests here, in a database of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Cluster
from tests.simulation.rounds import open_world
from tests.simulation.world import World


@pytest.fixture(scope="package")
def world(cluster: Cluster) -> Iterator[World]:
    with open_world(cluster) as world:
        yield world
