"""graphs: how fast one job follows another in a workflow, in a long chain and over a wide fan.

A hop is the time from the start of one job's handler to the start of the next one's, by the handlers' own clock: run,
report, release, claim and start.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.stand import Stand, await_until, marks

HOP_BAR_MS = 15.0
FAN_BAR_SECONDS = 5.0
CHAIN, FAN = 1_000, 10_000
_SLOTS = 2_000
_ENDED = ("succeeded", "dead", "cancelled")


@dataclass(frozen=True)
class Chained:
    """Milliseconds from one start to the next, and seconds of the whole."""

    jobs: int
    p50: float
    p99: float
    seconds: float
    foreign_cores: float


@dataclass(frozen=True)
class Fanned:
    """Seconds from the call that asks for a run of one job, so many after it, and one after those, to its end."""

    jobs: int
    seconds: float
    foreign_cores: float


@dataclass(frozen=True)
class Graphs:
    """Every round of both."""

    chains: list[Chained]
    fans: list[Fanned]

    @property
    def hop_ms(self) -> float:
        return statistics.median(one.p50 for one in self.chains)

    @property
    def fan_seconds(self) -> float:
        return statistics.median(one.seconds for one in self.fans)

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self) | {"hop_ms": self.hop_ms, "fan_seconds": self.fan_seconds}


def measure(stand: Stand, *, repeat: int = 3) -> Graphs:
    """Both, on one stand."""
    fan = stand.api.post("/v1/workflows", {"name": "fan", "jobs": _fan()})["id"]
    stand.start_workers(1, _SLOTS)
    try:
        with marks() as path:
            chain = stand.api.post("/v1/workflows", {"name": "chain", "jobs": _chain(path)})["id"]
            chains = [_run_chain(stand, chain, path) for _ in range(repeat)]
        fans = [_run_fan(stand, fan) for _ in range(repeat)]
    finally:
        stand.stop_workers()
    return Graphs(chains, fans)


def _chain(path: Path) -> dict[str, Any]:
    target = {"kind": "python", "function": "bench.start", "kwargs": {"path": str(path)}}
    return {f"n{i}": {"target": target, "depends_on": [f"n{i - 1}"] if i else []} for i in range(CHAIN)}


def _fan() -> dict[str, Any]:
    target = {"kind": "python", "function": "bench.noop"}
    wide = [f"n{i}" for i in range(FAN - 2)]
    return {
        "first": {"target": target},
        **{name: {"target": target, "depends_on": ["first"]} for name in wide},
        "last": {"target": target, "depends_on": wide},
    }


def _run_chain(stand: Stand, workflow: str, path: Path) -> Chained:
    path.write_text("")
    stand.await_quiet()
    begun, before = time.perf_counter(), stand.cpu()
    _run(stand, workflow)
    seconds, used = time.perf_counter() - begun, stand.cpu().since(before)
    starts = sorted(float(line) for line in path.read_text().split())
    if len(starts) != CHAIN:
        raise RuntimeError(f"{len(starts)} jobs of {CHAIN} started")
    hops = sorted((after - start) * 1000 for start, after in pairwise(starts))
    return Chained(CHAIN, statistics.median(hops), hops[int(len(hops) * 0.99)], seconds, used.foreign() / seconds)


def _run_fan(stand: Stand, workflow: str) -> Fanned:
    stand.await_quiet()
    begun, before = time.perf_counter(), stand.cpu()
    _run(stand, workflow)
    seconds, used = time.perf_counter() - begun, stand.cpu().since(before)
    return Fanned(FAN, seconds, used.foreign() / seconds)


def _run(stand: Stand, workflow: str) -> None:
    """Ask for a run and wait for its end; by the run of the head, which costs less to read than the graph."""
    run = stand.api.post(f"/v1/jobs/{workflow}/runs", {})["id"]
    ended = await_until(lambda: _end(stand, run), "the workflow run ends", 300, every=0.02)
    if ended != "succeeded":
        raise RuntimeError(f"the workflow run is {ended}")


def _end(stand: Stand, run: str) -> str | None:
    state: str = stand.api.call("GET", f"/v1/runs/{run}")["state"]
    return state if state in _ENDED else None
