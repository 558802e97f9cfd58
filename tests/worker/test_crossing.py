"""Runs that share a worker never get each other's frames, results or checkpoints, whatever one of them does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.wire import ClaimedRun

from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_cancelled_wait_for_a_checkpoint_disturbs_no_other_run(shared: Gateway, tmp_path: Path) -> None:
    """The answer to the cancelled wait reaches the runner in one read with calls of other runs."""
    ledger, go_on = tmp_path / "calls", tmp_path / "go-on"
    shared.notes_go_on.clear()
    impatient = shared.python("gives_up_waiting", 1)
    await shared.until(lambda: shared.notes_waiting)
    blocker = shared.python("block_loop_until", str(go_on))
    others = [shared.python("echo_logged", str(ledger), n) for n in range(4)]
    await in_hand(shared, [blocker, *others])
    shared.notes_go_on.set()
    await shared.until(lambda: shared.notes.get(impatient.run_id))
    reports = len(shared.reports)
    await shared.until(lambda: len(shared.reports) > reports + 1)
    go_on.touch()
    others += [shared.python("echo_logged", str(ledger), n) for n in range(4, 8)]
    assert (await shared.end_of(impatient)).result == 1
    for n, run in enumerate(others):
        end = await shared.end_of(run)
        assert (end.outcome, end.result) == ("succeeded", n)
    assert sorted(map(int, ledger.read_text().split())) == list(range(8)), "a run was called more than once"


async def in_hand(gateway: Gateway, runs: list[ClaimedRun]) -> None:
    """Wait until a report of the worker names all of these runs."""
    keys = {(run.run_id, run.fence) for run in runs}
    await gateway.until(lambda: keys <= {tuple(key) for key in gateway.reports[-1].running or []})


async def test_a_deep_result_of_a_run_with_secrets_disturbs_no_other_run(shared: Gateway) -> None:
    deep = [shared.python("nested", 900, secrets={"TOKEN": "s3cr3t-tok3n"}) for _ in range(3)]
    others = [shared.python("math.add", n, 1) for n in range(20)]
    for n, run in enumerate(others):
        assert (await shared.end_of(run)).result == n + 1
    for run in deep:
        end = await shared.end_of(run)
        depth, value = 0, end.result
        while value:
            depth, [value] = depth + 1, value
        assert (end.outcome, depth) == ("succeeded", 900)


async def test_a_runner_that_speaks_of_a_run_it_does_not_have_is_replaced(shared: Gateway) -> None:
    beside = shared.python("sleep", 60)
    await in_hand(shared, [beside])
    forger = shared.python("forge", "run-of-another-worker", 7)
    for run in (forger, beside):
        end = await shared.end_of(run)
        assert (end.outcome, end.result) == ("lost", None)
        assert end.error is not None and "broke the protocol" in end.error.message
    after = [shared.python("math.add", n, 1) for n in range(5)]
    assert [(await shared.end_of(run)).result for run in after] == [1, 2, 3, 4, 5]


async def test_a_runner_cannot_end_a_run_under_another_fence(shared: Gateway) -> None:
    beside = shared.python("sleep", 60)
    await in_hand(shared, [beside])
    shared.python("forge", beside.run_id, beside.fence - 1)
    end = await shared.end_of(beside)
    assert (end.outcome, end.result) == ("lost", None)
