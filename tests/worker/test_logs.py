"""Log shipping: repeats, gaps, refusals, and results that do not wait for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from .conftest import started
from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with started(result_waits=0.7) as (gateway, _):
        yield gateway


async def test_a_failed_shipment_is_repeated_and_the_result_waits_for_it(gateway: Gateway) -> None:
    gateway.log_faults = [(503, {}), (500, {})]
    run = gateway.process("sh", "-c", "echo one; echo two")
    end = await gateway.end_of(run)
    assert gateway.text_of(run) == ["one", "two"] and end.log == {"lines": 2, "dropped": 0}


async def test_a_gap_is_filled_from_where_the_server_says(gateway: Gateway) -> None:
    run = gateway.process("sh", "-c", "echo one; echo two; echo three")
    gateway.log_faults = [(409, {"code": "log_gap", "expected_offset": 1})]
    gateway.log_lines[run.run_id] = [(0.0, "stdout", "info", "one")]
    end = await gateway.end_of(run)
    assert gateway.text_of(run) == ["one", "two", "three"] and end.log == {"lines": 3, "dropped": 0}


async def test_a_superseded_log_is_dropped_and_holds_nothing_up(gateway: Gateway) -> None:
    gateway.log_faults = [(409, {"code": "superseded"})]
    end = await gateway.end_of(gateway.process("echo", "one"))
    assert end.log == {"lines": 0, "dropped": 1}


async def test_a_result_does_not_wait_for_ever_for_its_log_and_the_lines_follow_it(gateway: Gateway) -> None:
    gateway.log_faults = [(503, {})] * 1000
    run = gateway.process("echo", "one")
    end = await gateway.end_of(run)
    assert end.outcome == "succeeded" and end.log == {"lines": 0, "dropped": 0}
    gateway.log_faults = []
    assert (await gateway.end_of(gateway.process("true"))).log is None
    assert await gateway.line_of(run, "one") == "one"


async def test_a_drained_worker_stays_until_its_lines_have_arrived() -> None:
    async with started(result_waits=0.2) as (gateway, process):
        gateway.log_faults = [(503, {})] * 1000
        run = gateway.process("echo", "one")
        await gateway.end_of(run)
        process.terminate()
        await gateway.until(lambda: gateway.reports[-1].leaving is False and not gateway.claims_open)
        gateway.log_faults = []
        assert await gateway.line_of(run, "one") == "one"
        assert await process.wait() == 0
