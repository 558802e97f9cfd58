"""Log shipping: repeats, gaps, refusals, and results that do not wait for ever."""

from __future__ import annotations

from .conftest import started


async def test_a_failed_shipment_is_repeated_and_the_result_waits_for_it() -> None:
    async with started() as (gateway, _):
        gateway.log_faults = [(503, {}), (500, {})]
        run = gateway.process("sh", "-c", "echo one; echo two")
        end = await gateway.end_of(run)
        assert gateway.text_of(run) == ["one", "two"] and end.log == {"lines": 2, "dropped": 0}


async def test_a_gap_is_filled_from_where_the_server_says() -> None:
    async with started() as (gateway, _):
        first = gateway.process("sh", "-c", "echo one; sleep 300")
        await gateway.line_of(first, "one")
        run = gateway.process("sh", "-c", "echo one; echo two; echo three")
        gateway.log_faults = [(409, {"code": "log_gap", "expected_offset": 1})]
        gateway.log_lines[run.run_id] = [(0.0, "stdout", "info", "one")]
        end = await gateway.end_of(run)
        assert gateway.text_of(run) == ["one", "two", "three"] and end.log == {"lines": 3, "dropped": 0}


async def test_a_superseded_log_is_dropped_and_holds_nothing_up() -> None:
    async with started() as (gateway, _):
        gateway.log_faults = [(409, {"code": "superseded"})] * 3
        end = await gateway.end_of(gateway.process("echo", "one"))
        assert end.log == {"lines": 0, "dropped": 1}


async def test_a_result_waits_five_seconds_for_its_log_and_no_longer() -> None:
    async with started() as (gateway, _):
        gateway.log_faults = [(503, {})] * 1000
        end = await gateway.end_of(gateway.process("echo", "one"))
        assert end.outcome == "succeeded" and end.log == {"lines": 0, "dropped": 1}
        assert (await gateway.end_of(gateway.process("true"))).log is None
