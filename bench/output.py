"""output: one program that writes far more than is kept of it: what that costs its worker, and how fast it goes.

The memory is the resident set of the worker's own processes: before the run, at its peak, and after it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench.stand import Stand, await_until, say

_MEGABYTE = 1024 * 1024
_WITHIN = 3600.0


@dataclass(frozen=True)
class Output:
    """Megabytes of a worker's memory, and how many a second it read."""

    gigabytes: int
    idle_rss: float
    peak_rss: float
    rss: float
    per_second: float

    def document(self) -> dict[str, Any]:
        return asdict(self)


def measure(stand: Stand, gigabytes: int) -> Output:
    """One run that writes so much, in lines of 100 bytes."""
    api, command = stand.api, f"yes {'x' * 99} | head -c {gigabytes}000000000"
    target = {"kind": "process", "command": ["sh", "-c", command]}
    job = api.create_job(target, timeout="PT1H", retry={"max_attempts": 1})
    stand.start_workers(1, 1)
    try:
        await_until(lambda: any(w["state"] == "live" for w in api.call("GET", "/v1/workers")["items"]), "a worker")
        own = [psutil.Process(stand.workers[0].pid)]
        own += own[0].children(recursive=True)
        sizes = [_resident(own)]
        began = time.monotonic()
        run_id = api.post(f"/v1/jobs/{job}/runs", {})["id"]

        def end() -> dict[str, Any] | None:
            sizes.append(_resident(own))
            run: dict[str, Any] = api.call("GET", f"/v1/runs/{run_id}")
            return run if run["state"] in ("succeeded", "dead") else None

        run = await_until(end, "the run ends", _WITHIN, every=0.1)
        seconds = time.monotonic() - began
        if run["state"] != "succeeded":
            raise RuntimeError(f"the run ended otherwise: {run['error']}")
        sizes.append(_resident(own))
    finally:
        stand.stop_workers()
    found = Output(gigabytes, sizes[0], max(sizes), sizes[-1], gigabytes * 1000 / seconds)
    say(f"output of {gigabytes} GB in {seconds:.0f} s: {describe(found)}")
    return found


def describe(found: Output) -> str:
    """Its memory in words."""
    return f"RSS {found.idle_rss:.0f} MB before, {found.peak_rss:.0f} MB at most, {found.rss:.0f} MB after"


def _resident(processes: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in processes) / _MEGABYTE
