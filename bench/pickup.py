"""pickup: how long an idle system takes from a submit to the start of the handler."""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.stand import Stand, marks, say

_GAP_SECONDS = 0.03
_WARM_RUNS = 20
_WAIT_SECONDS = 30.0
_SLOTS = 50


@dataclass(frozen=True)
class Pickup:
    """Milliseconds from just before the call to the handler's first act, and to the answer of the call."""

    kind: str
    submits: int
    p50: float
    p95: float
    p99: float
    worst: float
    answer_p50: float
    foreign_cores: float

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def measure(stand: Stand, *, submits: int = 200, process_submits: int = 60) -> list[Pickup]:
    """Both kinds of target, one after the other, on one idle worker."""
    stand.api  # noqa: B018 (starts the server, which the worker needs)
    stand.start_workers(1, _SLOTS)
    try:
        with marks() as path:
            found = [_measure(stand, "python", _python_target(path), path, submits)]
        with marks() as path:
            found.append(_measure(stand, "process", _process_target(path), path, process_submits))
    finally:
        stand.stop_workers()
    return found


def describe(one: Pickup) -> str:
    """One line."""
    return (
        f"p95 {one.p95:.1f} ms, p99 {one.p99:.1f} ms, worst {one.worst:.1f} ms; {one.submits} submits, "
        f"answered in {one.answer_p50:.1f} ms (p50); others used {one.foreign_cores:.2f} cores"
    )


def _python_target(path: Path) -> dict[str, Any]:
    return {"kind": "python", "function": "bench.mark", "kwargs": {"path": str(path)}}


def _process_target(path: Path) -> dict[str, Any]:
    """`date` writes the line: a shell's redirection is an O_APPEND write, and its start is part of the figure."""
    return {"kind": "process", "command": ["/bin/sh", "-c", f'exec date "+%s.%N $TOCSIN_ARGS" >> {path}']}


def _measure(stand: Stand, kind: str, target: dict[str, Any], path: Path, submits: int) -> Pickup:
    job = stand.api.create_job(target)
    _submit(stand, job, _WARM_RUNS)
    _read(path, _WARM_RUNS)
    stand.await_quiet()
    begun, before = time.perf_counter(), stand.cpu()
    answers = _submit(stand, job, submits)
    seconds, used = time.perf_counter() - begun, stand.cpu().since(before)
    found = _read(path, _WARM_RUNS + submits)[_WARM_RUNS:]
    cuts = statistics.quantiles(found, n=100, method="inclusive")
    one = Pickup(
        kind, submits, cuts[49], cuts[94], cuts[98], max(found), statistics.median(answers), used.foreign() / seconds
    )
    say(f"pick-up of {kind}: p50 {one.p50:.1f} ms, {describe(one)}")
    return one


def _submit(stand: Stand, job: str, count: int) -> list[float]:
    """Single submits, spaced with jitter; answers the milliseconds of each call."""
    answers = []
    for _ in range(count):
        sent = time.time()
        stand.api.post(f"/v1/jobs/{job}/runs", {"args": {"sent": sent}})
        answers.append((time.time() - sent) * 1e3)
        time.sleep(_GAP_SECONDS * (0.7 + 0.6 * random.random()))
    return answers


def _read(path: Path, goal: int) -> list[float]:
    """Milliseconds of each line, in the order of the submits, once there are enough of them."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while len(lines := path.read_text().splitlines()) < goal:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(lines)} of {goal} runs had started after {_WAIT_SECONDS:.0f} s")
        time.sleep(0.02)
    starts = sorted((_sent(line), float(line.partition(" ")[0])) for line in lines)
    if len({sent for sent, _ in starts}) != goal:
        raise RuntimeError(f"{goal} submits made {len(starts)} starts")
    return [(started - sent) * 1e3 for sent, started in starts]


def _sent(line: str) -> float:
    """When the run was submitted: a number, or the run's args as a process sees them."""
    text = line.partition(" ")[2]
    return float(json.loads(text)["sent"] if text.startswith("{") else text)
