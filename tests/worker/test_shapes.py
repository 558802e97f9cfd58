"""A function that raises or returns an odd object ends only its own run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from .conftest import started
from .gateway import Gateway
from .shapes import FAILS

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Exceptions that an asyncio task loses: a caller that awaits the task waits until the run's own time-out.
ASYNCIO_CANNOT = {"no class", "no attributes"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def odd() -> AsyncIterator[Gateway]:
    async with started(module="shapes:app", grace=0.5, heartbeat=0.2) as (gateway, _):
        yield gateway


@pytest.mark.parametrize("how", ["odd", "odd_late", "odd_in_task", "odd_sync", "odd_isolated", "odd_sync_isolated"])
async def test_it_ends_its_own_run_and_no_other(odd: Gateway, how: str) -> None:
    kind = {"odd_sync": "steady_sync", "odd_isolated": "steady_isolated", "odd_sync_isolated": "steady_isolated"}
    beside = kind.get(how, "steady")
    waiting = odd.python("waits", 1, timeout=600)
    runs = []
    shapes = [shape for shape in FAILS if how != "odd_in_task" or shape not in ASYNCIO_CANNOT]
    for n, shape in enumerate(shapes):
        runs.append((n, shape, odd.python(how, shape, secrets={"A": "s3cr3t"}), odd.python(beside, n)))
    classes = {}
    for n, shape, run, bystander in runs:
        end = await odd.end_of(run)
        assert end.outcome == "failed" and end.error is not None, shape
        assert end.result is None
        classes[shape] = end.error.class_
        assert end.error.class_ not in ("crashed", "lost", "internal", ""), shape
        assert len(end.error.message) <= 4096 and len(end.error.class_) <= 256
        ended = await odd.end_of(bystander)
        assert (ended.outcome, ended.result) == ("succeeded", n), f"beside {shape}"
    assert classes["retry without init"] == "shapes.BareRetry"
    assert classes["system exit"] == "SystemExit"
    assert classes["returns deep"] == classes["returns cycle"] == "result"
    assert waiting.run_id not in odd.finished, "a run that had nothing to do with it ended"
    odd.order_stop(waiting)
    assert (await odd.end_of(waiting)).outcome == "cancelled"


async def test_the_process_is_the_same_as_before(odd: Gateway) -> None:
    """None of the shapes made the worker register again."""
    assert len(odd.registered) == 1
