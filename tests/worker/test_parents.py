"""What a run is told of the runs that it waited for: with it, or by reference where that is large."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tocsin.wire import ClaimedRun, Parent

from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
SMALL = {
    "extract": Parent(run_id="r1", state="succeeded", result={"rows": 3}),
    "check": Parent(run_id="r2", state="dead"),
}
LARGE = {"extract": {"run_id": "r1", "state": "succeeded", "result": ["ü" * 1000] * 300}}


def by_reference(gateway: Gateway, run: ClaimedRun, parents: Any) -> ClaimedRun:
    """Before the worker can have heard of it: nothing was awaited since it was queued."""
    gateway.parents[run.run_id, run.token] = parents
    run.parents_url = f"/v1/runs/{run.run_id}/parents"
    return run


async def test_a_function_sees_how_its_parents_ended(shared: Gateway) -> None:
    end = await shared.end_of(shared.python("compare", parents=SMALL))
    assert end.result == {
        "results": {"extract": {"rows": 3}, "check": None},
        "states": {"extract": "succeeded", "check": "dead"},
    }
    alone = await shared.end_of(shared.python("compare"))
    assert alone.result == {"results": {}, "states": {}}


async def test_a_program_finds_them_in_its_environment(shared: Gateway) -> None:
    run = shared.process("sh", "-c", 'echo "$TOCSIN_PARENTS"', parents=SMALL)
    assert (await shared.end_of(run)).outcome == "succeeded"
    assert [json.loads(text) for text in shared.text_of(run)] == [
        {
            "extract": {"run_id": "r1", "state": "succeeded", "result": {"rows": 3}},
            "check": {"run_id": "r2", "state": "dead"},
        }
    ]
    alone = shared.process("sh", "-c", 'echo "${TOCSIN_PARENTS-none}"')
    await shared.end_of(alone)
    assert shared.text_of(alone) == ["none"]


async def test_large_results_are_fetched_with_the_runs_token(shared: Gateway) -> None:
    run = shared.python("compare")
    end = await shared.end_of(by_reference(shared, run, {"a": {"run_id": "r1", "state": "succeeded", "result": 5}}))
    assert end.result == {"results": {"a": 5}, "states": {"a": "succeeded"}}
    script = 'echo "[$TOCSIN_PARENTS]"; wc -c < "$TOCSIN_PARENTS_FILE"'
    run = shared.process("sh", "-c", script)
    assert (await shared.end_of(by_reference(shared, run, LARGE))).outcome == "succeeded"
    size = len(json.dumps(LARGE, ensure_ascii=False, separators=(",", ":")).encode())
    assert shared.text_of(run) == ["[]", str(size)]


async def test_results_that_cannot_be_fetched_end_the_attempt(shared: Gateway) -> None:
    end = await shared.end_of(shared.python("compare", parents_url="/v1/runs/nobody/parents"))
    assert end.error is not None and end.error.class_ == "start"
    assert "parents' results could not be fetched" in end.error.message
