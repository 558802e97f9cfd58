from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import pytest_asyncio

from ..conftest import started
from ..gateway import Gateway
from .container import ContainerHarness
from .harness import Deed, Harness
from .kubernetes import KubernetesHarness
from .process import ProcessHarness, SandboxHarness
from .python import PythonHarness, PythonThreadHarness
from .web import HttpHarness

HARNESSES: list[type[Harness]] = [
    ProcessHarness,
    SandboxHarness,
    PythonHarness,
    PythonThreadHarness,
    HttpHarness,
    KubernetesHarness,
    ContainerHarness,
]


class Site(NamedTuple):
    """A kind, a gateway that hands out its runs, and the worker that executes them."""

    harness: Harness
    gateway: Gateway
    worker: psutil.Process

    def target(self, deed: Deed) -> dict[str, object]:
        if deed in self.harness.lacks:
            pytest.skip(f"{self.harness.kind}: {self.harness.lacks[deed]}")
        return self.harness.target(deed)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=HARNESSES, ids=lambda kind: kind.__name__)
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """One worker for all tests of a kind; a stop takes half a second to become a kill."""
    where: Path = tmp_path_factory.mktemp("conformance")
    harness: Harness = request.param(where)
    if why := harness.missing():
        pytest.skip(f"{harness.kind} cannot be tried here: {why}")
    async with harness, started(grace=0.5, heartbeat=0.2, **harness.worker) as (gateway, process):
        yield Site(harness, gateway, psutil.Process(process.pid))
