"""Runs that came without their arguments: each waits only for its own, and the other runs do not wait."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tocsin.wire import StopOrder

from .conftest import started
from .gateway import Gateway


def large(gateway: Gateway, value: Any) -> dict[str, str]:
    """Return the reference by which a run names arguments that do not come with it."""
    data = gateway.payloads["large"] = json.dumps(value).encode()
    return {"args_url": "/v1/payloads/large", "args_sha256": hashlib.sha256(data).hexdigest()}


async def test_a_slow_payload_delays_its_own_run_alone() -> None:
    async with started(slots=3, heartbeat=0.2) as (gateway, _):
        gateway.payloads_wait.clear()
        slow = gateway.process("sh", "-c", 'echo "$TOCSIN_ARGS"', **large(gateway, {"a": 1}))
        others = [gateway.process("true") for _ in range(4)]  # more than the remaining slots: slots are reused
        for other in others:
            assert (await gateway.end_of(other)).outcome == "succeeded"
        key = slow.run_id, slow.fence
        await gateway.until(lambda: [r for r in gateway.reports if r.running == [key]])  # the worker holds the run
        assert slow.run_id not in gateway.finished
        gateway.payloads_wait.set()
        assert (await gateway.end_of(slow)).outcome == "succeeded"
        assert gateway.text_of(slow) == ['{"a":1}']


async def test_a_run_that_waits_for_its_payload_takes_a_slot() -> None:
    async with started(slots=1, heartbeat=0.2) as (gateway, _):
        gateway.payloads_wait.clear()
        gateway.process("true", **large(gateway, {"a": 1}))
        await gateway.until(lambda: gateway.payloads_asked)
        await gateway.until(lambda: gateway.claims[-1].listen)
        assert gateway.claims[-1].slots == 0


async def test_a_run_that_is_cancelled_while_it_waits_for_its_payload_never_starts() -> None:
    async with started(slots=2, heartbeat=0.2) as (gateway, _):
        gateway.payloads_wait.clear()
        slow, over = [gateway.process("true", **large(gateway, {"a": 1})) for _ in range(2)]
        await gateway.until(lambda: gateway.payloads_asked == 2)
        gateway.order_stop(slow)
        gateway.stops.append(StopOrder(run_id=over.run_id, fence=over.fence, ended=True))
        assert (await gateway.end_of(slow)).outcome == "cancelled"
        gateway.payloads_wait.set()
        after = gateway.process("true")
        assert (await gateway.end_of(after)).outcome == "succeeded", "its slot is free"
        assert over.run_id not in gateway.finished, "nobody waits for the end of what has ended"


async def test_a_worker_that_is_drained_hands_back_what_it_still_fetches() -> None:
    async with started(slots=2, heartbeat=0.2) as (gateway, process):
        gateway.payloads_wait.clear()
        slow = gateway.process("true", **large(gateway, {"a": 1}))
        await gateway.until(lambda: gateway.payloads_asked)
        process.terminate()
        await gateway.until(lambda: (slow.run_id, slow.fence) in gateway.returned)
        assert await process.wait() == 0
