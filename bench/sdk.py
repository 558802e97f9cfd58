"""sdk: what a worker adds to a Python function: processor time for each call, memory for many that wait at once.

Both are of the worker's whole tree: the agent, the guard beside it, and the runner in which functions are called.
Memory is the sum of their resident sets (RSS), in which pages that they share count more than once; PSS, in which they
count once, stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench import drain
from bench.drain import Drain
from bench.stand import Api, Stand, say

SLEEPERS = 2_000
_WARM_RUNS = 2_000
_WAIT_SECONDS = 120.0
_MEGABYTE = 1024 * 1024
# What is called, and what stands in its job's target.
_CALLS: dict[str, dict[str, Any]] = {
    "no-op": {"function": "bench.noop"},
    "no-op with context and typed arguments": {"function": "bench.typed", "kwargs": {"day": "2026-03-06", "pages": 3}},
}


@dataclass(frozen=True)
class Overhead:
    """CPU µs of the worker for each run of one function."""

    what: str
    drains: list[Drain]

    @property
    def worker_us(self) -> float:
        """Of the drain in the middle, by rate."""
        return drain.median(self.drains).worker_us

    def document(self) -> dict[str, Any]:
        return {"what": self.what, "worker_us": self.worker_us, "drains": [one.document() for one in self.drains]}


@dataclass(frozen=True)
class Memory:
    """Megabytes of a worker, idle and with so many calls that wait."""

    what: str
    calls: int
    idle_rss: float
    rss: float
    pss: float

    def document(self) -> dict[str, Any]:
        return asdict(self)


def overheads(stand: Stand, *, runs: int, slots: int, repeat: int) -> list[Overhead]:
    """Each function drained several times, by one worker."""
    found = []
    for what, target in _CALLS.items():
        jobs = {"default": stand.api.create_job({"kind": "python", **target})}
        drain.drain_once(stand, jobs, _WARM_RUNS, slots, workers=1)
        drains = [drain.drain_once(stand, jobs, runs, slots, workers=1) for _ in range(repeat)]
        found.append(Overhead(what, drains))
        say(f"sdk, {what}: {found[-1].worker_us:.1f} µs of the worker a run")
    return found


def memories(stand: Stand) -> list[Memory]:
    """Many calls that only wait, async and in threads."""
    return [_memory(stand, "async", "bench.sleep"), _memory(stand, "in threads", "bench.sleep_in_thread")]


def _memory(stand: Stand, what: str, function: str) -> Memory:
    api = stand.api
    job = api.create_job({"kind": "python", "function": function}, timeout="PT1H", retry={"max_attempts": 1})
    stand.start_workers(1, SLEEPERS)
    try:
        _until(lambda: [w for w in api.call("GET", "/v1/workers")["items"] if w["state"] == "live"], "a worker")
        idle, _ = _megabytes(stand)
        api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * SLEEPERS})
        _until(lambda: _running(api, job) == SLEEPERS, f"{SLEEPERS} calls that wait")
        rss, pss = _megabytes(stand)
    finally:
        api.call("DELETE", f"/v1/jobs/{job}")  # else the next worker would find them
        _until(lambda: _running(api, job) == 0, "their end")
        stand.stop_workers()
    found = Memory(what, SLEEPERS, idle, rss, pss)
    say(f"sdk, {SLEEPERS:,} {what}: {found.rss:.0f} MB of the worker, idle {found.idle_rss:.0f} MB")
    return found


def _running(api: Api, job: str) -> int:
    """How many of them a worker has."""
    count, query = 0, f"/v1/runs?job={job}&limit=500"
    page = api.call("GET", query)
    while True:
        count += sum(run["state"] in ("running", "stopping") for run in page["items"])
        if page["next_cursor"] is None:
            return count
        page = api.call("GET", f"{query}&cursor={page['next_cursor']}")


def _megabytes(stand: Stand) -> tuple[float, float]:
    tree = [p for worker in stand.workers for p in _tree(worker.pid)]
    rss = sum(process.memory_info().rss for process in tree)
    return rss / _MEGABYTE, sum(process.memory_full_info().pss for process in tree) / _MEGABYTE


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _until(condition: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{what}: not within {_WAIT_SECONDS:.0f} s")
        time.sleep(0.2)
