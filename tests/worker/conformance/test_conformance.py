"""The contract of `tocsin.worker.executors.Executor`, for every kind alike."""

from __future__ import annotations

import pytest

from tocsin import wire
from tocsin.worker.lines import ATTEMPT_BYTES, LINE_BYTES

from ..conftest import until
from .conftest import Site

pytestmark = pytest.mark.asyncio(loop_scope="module")

MUCH = 64 << 20  # bytes by which a worker must not grow, whatever a run writes


def class_of(end: wire.Finished) -> str | None:
    return None if end.error is None else end.error.class_


async def test_the_worker_offers_the_kind(site: Site) -> None:
    assert site.harness.kind in site.gateway.registered[0].targets


async def test_a_run_that_ends_well_without_a_word(site: Site) -> None:
    run = site.gateway.submit(site.target("nothing"))
    end = await site.gateway.end_of(run)
    assert (end.outcome, class_of(end), end.exit_code or 0) == ("succeeded", None, 0)
    assert end.ran_ms >= 0 and end.held_ms >= 0 and site.gateway.text_of(run) == []


async def test_what_it_says_arrives(site: Site) -> None:
    run = site.gateway.submit(site.target("say"))
    assert (await site.gateway.end_of(run)).outcome == "succeeded"
    assert site.gateway.text_of(run) == ["héllo"]


async def test_a_run_that_fails(site: Site) -> None:
    end = await site.gateway.end_of(site.gateway.submit(site.target("fail")))
    assert (end.outcome, class_of(end), end.exit_code) == ("failed", *site.harness.fails_as)
    assert end.error is not None and end.error.message


async def test_a_run_that_dies(site: Site) -> None:
    end = await site.gateway.end_of(site.gateway.submit(site.target("die")))
    assert (end.outcome, class_of(end), end.exit_code) == ("failed", site.harness.dies_as, None)


async def test_a_run_that_cannot_start(site: Site) -> None:
    end = await site.gateway.end_of(site.gateway.submit(site.target("absent")))
    assert (end.outcome, class_of(end)) == ("failed", site.harness.absent_as)
    assert end.error is not None and end.error.message


@pytest.mark.parametrize("deed", ["wait", "refuse"])
async def test_a_run_that_is_cancelled_is_gone_when_that_is_told(site: Site, deed: str) -> None:
    run = site.gateway.submit(site.target(deed))  # type: ignore[arg-type]
    await site.harness.begun(site.gateway, run)
    site.gateway.order_stop(run)
    end = await site.gateway.end_of(run)
    assert end.outcome == "cancelled" and site.harness.left() == []


@pytest.mark.parametrize("deed", ["wait", "refuse"])
async def test_a_run_that_takes_too_long_is_gone_when_that_is_told(site: Site, deed: str) -> None:
    run = site.gateway.submit(site.target(deed), timeout=1.0)  # type: ignore[arg-type]
    end = await site.gateway.end_of(run)
    # The clock of an event loop may be a millisecond ahead of the one that the attempt is measured with.
    assert (end.outcome, class_of(end)) == ("timeout", "timeout") and end.ran_ms >= 999
    assert site.harness.left() == []


async def test_a_flood_is_cut_and_marked_and_neither_grows_the_worker_nor_stops_the_run(site: Site) -> None:
    before = site.worker.memory_info().rss
    run = site.gateway.submit(site.target("flood"))
    end = await site.gateway.end_of(run)
    assert end.outcome == "succeeded" and end.log is not None
    *lines, note = site.gateway.text_of(run)
    assert sum(map(len, lines)) <= ATTEMPT_BYTES and "dropped" in note
    assert end.log["dropped"] > 20_000 and end.log["lines"] == len(lines) + 1
    assert site.worker.memory_info().rss < before + MUCH
    assert (await site.gateway.end_of(site.gateway.submit(site.target("nothing")))).outcome == "succeeded"


async def test_bytes_that_are_no_text_become_some(site: Site) -> None:
    run = site.gateway.submit(site.target("binary"))
    assert (await site.gateway.end_of(run)).outcome == "succeeded"
    first, *long, last = site.gateway.text_of(run)
    assert first == "\ufffd\\x00\\x1b[31m ok é" and last == "no end"
    assert "".join(long) == "long " + "é" * 10_000 and all(len(line.encode()) <= LINE_BYTES for line in long)


async def test_a_limit_is_enforced_or_said_not_to_be(site: Site) -> None:
    run = site.gateway.submit(site.target("hog"), resources={"memory_mb": 64})
    end = await site.gateway.end_of(run)
    assert end.usage is not None
    if end.usage["enforced"]["memory_mb"]:
        assert end.outcome == "failed" and class_of(end) in ("oom", "exit", "signal")
    else:
        assert end.outcome == "succeeded"


async def test_many_at_once_end_once_each(site: Site) -> None:
    runs = [site.gateway.submit(site.target("nothing")) for _ in range(30)]
    for run in runs:
        assert (await site.gateway.end_of(run)).outcome == "succeeded"
    ends = [end.run_id for report in site.gateway.reports for end in report.finished]
    assert len(set(ends)) == len(ends)


async def test_nothing_is_left_of_a_worker_that_was_declared_lost(site: Site) -> None:
    """The last test: the worker registers anew, and is another one from then on. What outlives a worker is left for the
    next attempts."""
    runs = [site.gateway.submit(site.target("wait")), site.gateway.submit(site.target("refuse"))]
    for run in runs:
        await site.harness.begun(site.gateway, run)
    site.gateway.unknown.add(site.gateway.worker_ids[-1])
    await site.gateway.until(lambda: len(site.gateway.registered) == 2)
    if site.harness.outlives_workers:
        assert len(site.harness.left()) == len(runs)
    else:
        await until(lambda: not site.harness.left())
    assert (await site.gateway.end_of(site.gateway.submit(site.target("nothing")))).outcome == "succeeded"
    assert not {run.run_id for run in runs} & set(site.gateway.finished), "their ends are no longer ours to tell"
